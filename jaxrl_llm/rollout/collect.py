"""Plays a collector: samples and grades the groups that it asks for, until its batch is complete.

What samples is a :class:`Backend`: the whole-batch sampler in rounds (:class:`SamplerBackend`), or
the slots of an engine, which take a new group while others decode (:class:`EngineBackend`). Both
give the same batch: a rollout depends on the key, its number and the weights, and the number counts
the rollouts in the order of requests.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.curation.collectors.protocol import Collection, Collector, Outcome, Request, Row
from jaxrl_llm.data.questions import Question
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rewards.scoring import join_scores
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.generation import Generation
from jaxrl_llm.rollout.engine.requests import Group, to_rollout
from jaxrl_llm.rollout.types import LENGTH, Rollout

Grade = Callable[[Sequence[Question], Sequence[Sequence[str]]], Scores]


class Asked(NamedTuple):
    """A group to sample.

    Attributes:
      question: Its place in the data set.
      requests: One number a rollout: each names a stream of random numbers.
    """

    question: int
    requests: tuple[int, ...]


class Graded(NamedTuple):
    """A group of n rollouts with their texts and rewards.

    Attributes:
      rollout: ``[1, n]``, on the host.
      texts: n.
      scores: ``[n]``.
    """

    rollout: Rollout
    texts: list[str]
    scores: Scores


class Collected(NamedTuple):
    """A complete batch.

    Attributes:
      rollout: ``[P, G]``, on the host; G is the collector's ``width``.
      where: bool ``[P, G]``, False where a row has no such member or takes no part.
      questions: P, of the rows.
      places: Places of these questions in the data set.
      texts: P groups of G.
      scores: ``[P * G]``.
      state: Of the collector.
      in_order: How many prompts it took in the order of the data.
      groups: How many groups were asked for.
      rollouts: How many rollouts of them.
      reward: Mean reward of all rollouts that were asked for.
      failures: How many of them have no reward.
      seconds: By "sample" and "reward".
    """

    rollout: Rollout
    where: np.ndarray
    questions: list[Question]
    places: list[int]
    texts: list[list[str]]
    scores: Scores
    state: ArrayTree
    in_order: int
    groups: int
    rollouts: int
    reward: float
    failures: int
    seconds: dict[str, float]


class Backend(Protocol):
    """What samples and grades groups."""

    seconds: dict[str, float]

    def submit(self, asked: Sequence[Asked]) -> None:
        """Queues groups."""
        ...

    def spare(self) -> int:
        """How many more groups of G rollouts the next ``wait`` could sample at no cost."""
        ...

    def wait(self) -> dict[Asked, Graded]:
        """Samples until at least one queued group has finished; those that have."""
        ...

    def close(self) -> None:
        """Drops what is queued."""
        ...


def collect(
    collector: Collector,
    state: ArrayTree,
    key: Array,
    backend: Backend,
    questions: Sequence[Question],
    *,
    next_places: Callable[[int], Sequence[int]],
    num_groups: int,
    group_size: int,
    step: int,
    pad_id: int = 0,
) -> Collected:
    """Collects a batch.

    Args:
      collector: Decides what is asked for.
      state: Its state.
      key: A typed key, for its draws.
      backend: Samples and grades.
      questions: The data set.
      next_places: The places of the next n questions in the order of the data, from the beginning
        of this batch.
      num_groups: P.
      group_size: G.
      step: Which batch of the run it is, from 0.
      pad_id: Fills ``tokens`` after the end of a response.

    Raises:
      ValueError: If the collector asks for what there is not, or decides on rows that cannot be a
        batch.
      RewardError: If the reward fails.
    """
    book = _Book(collector, state, key, questions, next_places, num_groups, group_size, step)
    try:
        while True:
            decision, learned = collector.observe(book.state, book.collection())
            if decision.rows is not None:
                break
            if decision.ask or decision.requests:
                fresh, book.state = book.propose(decision.ask)
                backend.submit(book.ask([*fresh, *decision.requests]))
                if book.take():
                    continue
            if not book.waiting:
                raise ValueError(
                    f"collector {collector!r} neither completes the batch of {num_groups} groups "
                    f"nor asks for more, after {len(book.asked)} groups."
                )
            # Rows of the sampler that would be empty sample what may be asked for next; a collector
            # with a width asks for more of the same groups.
            if not hasattr(collector, "width") and (spare := backend.spare()):
                backend.submit(book.ahead(spare))
            book.finished |= backend.wait()
            book.take()
    finally:
        backend.close()
    book.check(decision.rows)
    return book.assemble(decision.rows, learned, pad_id=pad_id, seconds=backend.seconds)


def batch_width(collector: Collector, group_size: int) -> int:
    """The most rollouts of a group: G, or more for a collector that says so."""
    width = getattr(collector, "width", None)
    return group_size if width is None else width(group_size)


class _Book:
    """What was asked for in a batch, and what came of it."""

    def __init__(self, collector, state, key, questions, next_places, num_groups, group_size, step):
        self.collector, self.state, self._key = collector, state, key
        self._questions, self._next_places = questions, next_places
        self._empty = Collection(num_groups, group_size, step)
        self._width = batch_width(collector, group_size)
        self.requests: list[Request] = []
        self.outcomes: list[Outcome | None] = []
        self.asked: list[Asked] = []
        self.finished: dict[Asked, Graded] = {}  # also of groups that are not asked for yet
        self._submitted: set[Asked] = set()

    def collection(self) -> Collection:
        return self._empty._replace(requests=tuple(self.requests), outcomes=tuple(self.outcomes))

    @property
    def waiting(self) -> int:
        return sum(outcome is None for outcome in self.outcomes)

    def propose(self, count: int) -> tuple[Sequence[Request], ArrayTree]:
        """The next requests of the collector, and its state after them."""
        if not count:
            return (), self.state
        requests, state = self.collector.propose(self.state, self._key, self.collection(), count)
        if len(requests) != count:
            raise ValueError(
                f"collector {self.collector!r} proposes {len(requests)} groups where {count} are "
                "asked for."
            )
        return requests, state

    def _resolve(self, requests: Sequence[Request]) -> list[Asked]:
        """Requests that follow those so far, with the places of their prompts and their numbers."""
        self._check(requests)
        number = sum(len(asked.requests) for asked in self.asked)
        ordered, new = _in_order(self.requests), _in_order(requests)
        places = iter(self._next_places(ordered + new)[ordered:])
        resolved = []
        for request in requests:
            if request.extends is not None:
                place = [*self.asked, *resolved][request.extends].question
            else:
                place = next(places) if request.prompt is None else int(request.prompt)
            resolved.append(Asked(place, tuple(range(number, number + request.rollouts))))
            number += request.rollouts
        return resolved

    def _check(self, requests: Sequence[Request]) -> None:
        """Raises ValueError for requests that nothing can serve."""
        for i, request in enumerate(requests, len(self.requests)):
            start = f"collector {self.collector!r} asks for"
            if request.rollouts < 1:
                raise ValueError(
                    f"{start} {request.rollouts} rollouts of a prompt; it must be at least 1."
                )
            if request.prompt is not None and not 0 <= request.prompt < len(self._questions):
                raise ValueError(
                    f"{start} prompt {request.prompt}; the data set has prompts 0 to "
                    f"{len(self._questions) - 1}."
                )
            if request.extends is None:
                continue
            if request.prompt is not None or not 0 <= request.extends < i:
                raise ValueError(
                    f"{start} more rollouts of request {request.extends} in request {i}; it must "
                    "be an earlier one, and prompt None."
                )

    def ask(self, requests: Sequence[Request]) -> list[Asked]:
        """Enters requests; those that nothing samples yet."""
        resolved = self._resolve(requests)
        self.requests += requests
        self.asked += resolved
        self.outcomes += [None] * len(requests)
        return self._new(resolved)

    def ahead(self, count: int) -> list[Asked]:
        """The ``count`` groups that would be asked for next and that nothing samples yet."""
        planned = len(self._submitted - set(self.asked))
        requests, _ = self.propose(planned + count)
        return self._new(self._resolve(requests), count)

    def _new(self, asked: list[Asked], most: int | None = None) -> list[Asked]:
        new = [each for each in asked if each not in self._submitted][:most]
        self._submitted.update(new)
        return new

    def take(self) -> bool:
        """Enters the outcomes of requests that have finished; whether there is a new one."""
        new = False
        for i, asked in enumerate(self.asked):
            if self.outcomes[i] is None and asked in self.finished:
                self.outcomes[i], new = _outcome(asked, self.finished[asked]), True
        return new

    def check(self, rows: Sequence[Row]) -> None:
        """Raises ValueError unless rows can be a batch."""
        who, P, G = f"collector {self.collector!r}", self._empty.num_groups, self._width
        if len(rows) != P:
            raise ValueError(f"{who} decides on {len(rows)} rows; a batch has {P}.")
        for p, row in enumerate(rows):
            start = f"{who}: row {p}"
            if not 1 <= len(row.members) <= G:
                raise ValueError(f"{start} has {len(row.members)} members; a group has 1 to {G}.")
            for request, member in row.members:
                if not 0 <= request < len(self.asked) or self.outcomes[request] is None:
                    raise ValueError(f"{start} names request {request}, which has not finished.")
                if not 0 <= member < len(self.asked[request].requests):
                    raise ValueError(
                        f"{start} names rollout {member} of request {request}, which has "
                        f"{len(self.asked[request].requests)}."
                    )
            prompts = {self.asked[request].question for request, _ in row.members}
            if len(prompts) > 1:
                raise ValueError(f"{start} mixes the prompts {sorted(prompts)}.")

    def assemble(
        self, rows: Sequence[Row], state: ArrayTree, *, pad_id: int, seconds: dict[str, float]
    ) -> Collected:
        """The batch of these rows."""
        G = self._width
        groups = [[(self.finished[self.asked[r]], i) for r, i in row.members] for row in rows]
        places = [self.asked[row.members[0][0]].question for row in rows]
        where = np.zeros((len(rows), G), bool)
        for p, row in enumerate(rows):
            where[p, : len(row.members)] = row.takes_part
        scores = _join_scores(groups, G)
        graded = [self.finished[asked].scores for asked in self.asked if asked in self.finished]
        return Collected(
            rollout=_join_rollouts(groups, G, pad_id),
            where=where & ~scores.failed.reshape(where.shape),
            questions=[self._questions[place] for place in places],
            places=places,
            texts=[[done.texts[i] for done, i in g] + [""] * (G - len(g)) for g in groups],
            scores=scores,
            state=state,
            in_order=_in_order(self.requests),
            groups=sum(request.extends is None for request in self.requests),
            rollouts=sum(request.rollouts for request in self.requests),
            reward=mean_reward(graded),
            failures=sum(scores.failures for scores in graded),
            seconds=dict(seconds),
        )


def _in_order(requests: Sequence[Request]) -> int:
    """How many requests take the next prompt in the order of the data."""
    return sum(request.prompt is None and request.extends is None for request in requests)


def mean_reward(scores: Sequence[Scores]) -> float:
    """Mean reward of all rollouts that have one; NaN if none has."""
    rewards = np.concatenate([each.rewards[~each.failed] for each in scores])
    return float(rewards.mean()) if rewards.size else float("nan")


def _outcome(asked: Asked, done: Graded) -> Outcome:
    rollout, scores = done.rollout, done.scores
    return Outcome(
        prompt=asked.question,
        rewards=np.asarray(scores.rewards, np.float32),
        where=~scores.failed,
        lengths=rollout.mask[0].sum(axis=-1, dtype=np.int32),
        truncated=rollout.finish[0] == LENGTH,
        reward_components=scores.reward_components,
    )


def _join_rollouts(groups: list[list[tuple[Graded, int]]], size: int, pad_id: int) -> Rollout:
    """P groups of at most G members as arrays ``[P, G]``; the rest is padding."""
    rollouts = [done.rollout for group in groups for done, _ in group]
    width = max(rollout.prompt_tokens.shape[1] for rollout in rollouts)

    def prompts(name: str) -> np.ndarray:
        rows = [getattr(group[0][0].rollout, name)[0] for group in groups]
        return np.stack([np.pad(row, (0, width - len(row))) for row in rows])

    def members(name: str, fill: int = 0) -> Any:
        def stack(*leaves: np.ndarray) -> np.ndarray:
            out = np.full((len(groups), size, *leaves[0].shape[2:]), fill, leaves[0].dtype)
            rest = iter(leaves)
            for p, group in enumerate(groups):
                for g, (_, member) in enumerate(group):
                    out[p, g] = next(rest)[0, member]
            return out

        return jax.tree.map(stack, *(getattr(rollout, name) for rollout in rollouts))

    return Rollout(
        prompt_tokens=prompts("prompt_tokens"),
        prompt_mask=prompts("prompt_mask"),
        tokens=members("tokens", pad_id),
        mask=members("mask"),
        behavior_logp=members("behavior_logp"),
        model_logp=members("model_logp"),
        log_kept=members("log_kept"),
        finish=members("finish", LENGTH),
        version=members("version"),
        support=members("support"),
    )


def _join_scores(groups: list[list[tuple[Graded, int]]], size: int) -> Scores:
    """Scores ``[P * G]`` of groups of at most G members; the rest counts as failed."""
    calls = list({id(done): done for group in groups for done, _ in group}.values())
    sizes = [len(done.texts) for done in calls]
    first = dict(zip(map(id, calls), np.cumsum([0, *sizes[:-1]]), strict=True))
    rows = np.full((len(groups), size), -1)
    for p, group in enumerate(groups):
        rows[p, : len(group)] = [first[id(done)] + member for done, member in group]
    return join_scores([done.scores for done in calls]).take(rows.reshape(-1))


class SamplerBackend:
    """Rounds of the whole-batch sampler, each of P rows of G; a round is sampled, then graded.

    Args:
      sample: ``(prompts, request_ids) -> Rollout`` of P lists of tokens and numbers ``[P, G]``, on
        the host.
      questions: The data set.
      decode: Text of token ids.
      grade: Rewards of groups of texts; on several processes all of them call it together.
      num_groups: P.
      group_size: G.
    """

    def __init__(
        self,
        sample: Callable[[list[list[int]], np.ndarray], Rollout],
        questions: Sequence[Question],
        *,
        decode: Callable[[list[int]], str],
        grade: Grade,
        num_groups: int,
        group_size: int,
    ):
        self._sample, self._questions = sample, questions
        self._decode, self._grade = decode, grade
        self._shape = (num_groups, group_size)
        self._queue: deque[tuple[Asked, int]] = deque()  # groups by rows, the first of which is 0
        self._rows: dict[Asked, list[Rollout]] = {}
        self.seconds = {"sample": 0.0, "reward": 0.0}

    def submit(self, asked: Sequence[Asked]) -> None:
        """Queues groups, those of more than G rollouts as several rows."""
        for each in asked:
            self._queue.extend((each, row) for row in range(self._num_rows(each)))

    def spare(self) -> int:
        """Rows of the next round that nothing fills."""
        return max(self._shape[0] - len(self._queue), 0)

    def wait(self) -> dict[Asked, Graded]:
        """Samples and grades the next round."""
        start, size = time.perf_counter(), self._shape[0]
        rows = [self._queue.popleft() for _ in range(min(size, len(self._queue)))]
        filled = rows + rows[:1] * (size - len(rows))
        ids = np.array([self._requests_of(asked, row) for asked, row in filled])
        prompts = [self._questions[asked.question].tokens for asked, _ in filled]
        rollout = self._sample(prompts, ids)
        complete = []
        for i, (asked, _) in enumerate(rows):
            done = self._rows.setdefault(asked, [])
            done.append(jax.tree.map(lambda x, i=i: x[i : i + 1], rollout))
            if len(done) == self._num_rows(asked):
                complete.append(asked)
        groups = [self._join_rows(asked) for asked in complete]
        texts = [texts_of(rollout, self._decode)[0] for rollout in groups]
        sampled = time.perf_counter()
        scores = self._grade([self._questions[asked.question] for asked in complete], texts)
        self.seconds["sample"] += sampled - start
        self.seconds["reward"] += time.perf_counter() - sampled
        graded, first = {}, 0
        for asked, rollout, group in zip(complete, groups, texts, strict=True):
            rows = np.arange(first, first + len(group))
            graded[asked] = Graded(rollout, group, scores.take(rows))
            first += len(group)
        return graded

    def close(self) -> None:
        """Drops what is queued."""
        self._queue.clear()
        self._rows.clear()

    def _num_rows(self, asked: Asked) -> int:
        return -(-len(asked.requests) // self._shape[1])

    def _requests_of(self, asked: Asked, row: int) -> list[int]:
        """The numbers of a row; one that is not full repeats its first."""
        size = self._shape[1]
        requests = list(asked.requests[row * size : (row + 1) * size])
        return requests + requests[:1] * (size - len(requests))

    def _join_rows(self, asked: Asked) -> Rollout:
        """The rows of a group as one."""
        rows, size = self._rows.pop(asked), len(asked.requests)
        responses = [row._replace(prompt_tokens=None, prompt_mask=None) for row in rows]
        joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1)[:, :size], *responses)
        return joined._replace(prompt_tokens=rows[0].prompt_tokens, prompt_mask=rows[0].prompt_mask)


class EngineBackend:
    """An engine's slots: groups are graded as they finish, while others decode.

    On several processes, which must ask for the same groups, rewards are exchanged once all groups
    that were asked for have finished: there a replacement waits for the others.

    Args:
      engine: From :func:`~jaxrl_llm.rollout.make_engine`.
      params: Parameters of its model.
      key: Typed key of all requests.
      version: Of the parameters.
      questions: The data set.
      decode: Text of token ids.
      grade: Rewards of groups of texts, by this process alone.
      max_new_tokens: T.
      pad_id: Fills ``tokens`` after the end of a response.
    """

    def __init__(
        self,
        engine: Engine,
        params: ArrayTree,
        key: Array,
        questions: Sequence[Question],
        *,
        version: int,
        decode: Callable[[list[int]], str],
        grade: Grade,
        max_new_tokens: int,
        pad_id: int,
    ):
        self._generation = Generation(engine, params, key=key, version=version)
        self._finished = iter(self._generation)
        self._questions, self._decode, self._grade = questions, decode, grade
        self._width, self._pad_id = max_new_tokens, pad_id
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._sampled: dict[Asked, tuple[Rollout, list[str]]] = {}
        self._grading: dict[Asked, Future] = {}
        self.seconds = {"sample": 0.0, "reward": 0.0}

    def submit(self, asked: Sequence[Asked]) -> None:
        """Queues groups."""
        for each in asked:
            tokens = self._questions[each.question].tokens
            self._generation.submit(Group(id=each, prompt=tokens, requests=each.requests))

    def spare(self) -> int:
        """None: a slot that nothing fills costs little."""
        return 0

    def wait(self) -> dict[Asked, Graded]:
        """Decodes until a group has been graded; on several processes, until all have been."""
        alone = jax.process_count() == 1
        start = time.perf_counter()
        while not (alone and any(future.done() for future in self._grading.values())):
            if not self._decode_group():
                break
        sampled = time.perf_counter()
        if alone:
            wait(self._grading.values(), return_when=FIRST_COMPLETED)
            scores = {x: f.result() for x, f in self._grading.items() if f.done()}
        else:
            futures = list(self._grading.items())
            shared = processes.together(lambda: {x: f.result() for x, f in futures})
            scores = {asked: value for each in shared for asked, value in each.items()}
        self.seconds["sample"] += sampled - start
        self.seconds["reward"] += time.perf_counter() - sampled
        graded = {}
        for asked in [asked for asked in self._sampled if asked in scores]:
            self._grading.pop(asked, None)
            rollout, texts = self._sampled.pop(asked)
            graded[asked] = Graded(rollout, texts, scores[asked])
        return graded

    def _decode_group(self) -> bool:
        """Decodes until the next group has finished, and hands it to the reward; False for none."""
        done = next(self._finished, None)
        if done is None:
            self._finished = iter(self._generation)  # more may be submitted
            return False
        asked, question = done.id, self._questions[done.id.question]
        name = question.prompt.id or question.prompt.text[:40]
        rollout = to_rollout(
            [done._replace(group=done.group._replace(id=name))],
            max_new_tokens=self._width,
            prompt_width=self._generation.engine.spec.prompt_length,
            pad_id=self._pad_id,
        )
        texts = texts_of(rollout, self._decode)[0]
        self._sampled[asked] = (rollout, texts)
        # Every process decodes all groups and grades its share of them.
        if sum(asked.requests) % jax.process_count() == jax.process_index():
            self._grading[asked] = self._pool.submit(self._grade, [question], [texts])
        return True

    def close(self) -> None:
        """Drops what is queued, decoding or not graded yet."""
        # Where one call failed the others may too, each after its deadline.
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._generation.stop()


def texts_of(rollout: Rollout, decode: Callable[[list[int]], str]) -> list[list[str]]:
    """The responses as text: P lists of G."""
    tokens, mask = processes.to_host((rollout.tokens, rollout.mask))
    return [
        [decode(row[keep].tolist()) for row, keep in zip(rows, masks, strict=True)]
        for rows, masks in zip(tokens, mask, strict=True)
    ]
