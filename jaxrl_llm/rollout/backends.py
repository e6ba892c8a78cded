"""Backends that sample and grade the groups that a collector requests.

A :class:`Backend` is the whole-batch sampler in rounds (:class:`SamplerBackend`), or the slots of
an engine, which take a new group while others decode (:class:`EngineBackend`). Both give the same
rollouts: a rollout depends only on the key, its number and the weights. Responses that are already
complete are only graded.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import jax
import numpy as np

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.core.runtime.threads import Worker, wait_for_one
from jaxrl_llm.core.support import Support
from jaxrl_llm.curation.collectors.protocol import Request, Response, TurnStart
from jaxrl_llm.data.questions import Question
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.generation import Generation
from jaxrl_llm.rollout.engine.requests import (
    Completion,
    FinishedGroup,
    Group,
    check_finite,
    to_rollout,
)
from jaxrl_llm.rollout.episodes import Episodes
from jaxrl_llm.rollout.sampling.options import ENTROPY_STATS
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.types import LENGTH, UNFINISHED, Rollout

Grade = Callable[[Sequence[Question], Sequence[Sequence[str]]], Scores]


@dataclass(frozen=True)
class Asked:
    """A group to sample or to grade; equal requests compare equal.

    Attributes:
      question: Index of the question in the data set.
      requests: One number per rollout: each names a stream of random numbers.
      request: The collector's request.
      prompt: Tokens of the request's text; None for the question's.
      responses: The request's responses, as arrays.
      content: Distinguishes requests that differ in more than index and numbers.
    """

    question: int
    requests: tuple[int, ...]
    request: Request = field(default=Request(1), compare=False, repr=False)
    prompt: tuple[int, ...] | None = field(default=None, compare=False, repr=False)
    responses: tuple[Response, ...] = field(default=(), compare=False, repr=False)
    content: bytes = field(default=b"", repr=False)


class Graded(NamedTuple):
    """A group of n rollouts with their texts and rewards.

    Attributes:
      rollout: ``[1, n]``, on the host.
      texts: n.
      scores: ``[n]``; unfinished rollouts count as failed.
      entropy: float32 ``[1, n, T]``, entropy of the sampling distributions, if recorded.
      runner_up: int32 and float32 ``[1, n, T]``, the second most likely tokens and their
        log-probabilities, if recorded.
      by_run: Whether the run's reward graded any of it.
      sampled: bool ``[1, n, T]``, the tokens of episodes that the policy sampled; None where it
        sampled all.
      turn_starts: Where the turns of episodes begin, n of them.
    """

    rollout: Rollout
    texts: list[str]
    scores: Scores
    entropy: np.ndarray | None = None
    runner_up: tuple[np.ndarray, np.ndarray] | None = None
    by_run: bool = True
    sampled: np.ndarray | None = None
    turn_starts: tuple[tuple[TurnStart, ...], ...] | None = None


class Backend(Protocol):
    """The interface that samples and grades groups."""

    seconds: dict[str, float]

    def submit(self, asked: Sequence[Asked]) -> None:
        """Queues groups."""
        ...

    def spare(self) -> int:
        """How many more groups of G rollouts the next ``wait`` could sample at no cost."""
        ...

    def wait(self) -> dict[Asked, Graded]:
        """Samples until at least one queued group has finished; returns the finished groups."""
        ...

    def close(self) -> None:
        """Drops what is queued."""
        ...


def tokens_of(response: Response, blank: Tokens | None = None) -> Tokens:
    """A response as a sampler's outputs: what is not known is 0, of versions -1, of entropies NaN.

    ``blank`` is one token of the engine that is to go on from it.
    """
    n = len(response.tokens)

    def known(x: np.ndarray | None) -> np.ndarray:
        return np.zeros(n, np.float32) if x is None else np.nan_to_num(np.float32(x))

    support = entropy = runner_up = runner_up_logp = experts = None
    if blank is not None and blank.support is not None:
        # An empty set stands for the full vocabulary.
        ids, bits = blank.support
        support = Support(
            None if ids is None else np.full((n, *ids.shape), -1, ids.dtype),
            None if bits is None else np.zeros((n, *bits.shape), bits.dtype),
        )
    if blank is not None and blank.entropy is not None:
        # NaN stays out of statistics, which a 0 would lower.
        entropy = np.full(n, np.nan, np.float32)
        if response.entropy is not None:
            entropy = np.asarray(response.entropy, np.float32)
    if blank is not None and blank.runner_up is not None:
        runner_up_logp = known(response.runner_up_logp)
        runner_up = np.zeros(n, np.int32)
        if response.runner_up is not None:
            runner_up = np.asarray(response.runner_up, np.int32)
    if blank is not None and blank.experts is not None:
        experts = np.zeros((n, *blank.experts.shape), blank.experts.dtype)
    return Tokens(
        tokens=np.asarray(response.tokens, np.int32),
        behavior_logp=known(response.behavior_logp),
        model_logp=known(response.model_logp),
        log_kept=np.zeros(n, np.float32),
        version=np.full(n, -1, np.int32)
        if response.version is None
        else np.asarray(response.version, np.int32),
        entropy=entropy,
        support=support,
        runner_up=runner_up,
        runner_up_logp=runner_up_logp,
        experts=experts,
    )


def complete_rollout(asked: Asked, prompt: Sequence[int]) -> Rollout:
    """A request's responses that are complete, as a rollout of the width of the longest."""
    pairs = zip(asked.requests, asked.responses, strict=True)
    done = tuple(Completion(n, tokens_of(x), x.finish) for n, x in pairs)
    group = Group(id=asked.question, prompt=prompt, requests=asked.requests)
    return to_rollout(
        [FinishedGroup(group, done)],
        max_new_tokens=max(map(len, done)),
        prompt_width=len(prompt),
    )


def ungraded(asked: Asked, rollout: Rollout) -> list[int]:
    """The members of a group that have ended and have no reward."""
    rewards = [x.reward for x in asked.responses] or [None] * len(asked.requests)
    finish = rollout.finish[0]
    return [i for i, r in enumerate(rewards) if r is None and finish[i] != UNFINISHED]


def own_scores(asked: Asked, texts: Sequence[str]) -> Scores:
    """The rewards of a request that brings its reward; NaN counts as none."""
    rewards = np.asarray(asked.request.reward(texts), np.float32)  # type: ignore[misc]
    if rewards.shape != (len(texts),):
        raise ValueError(
            f"The reward of a request for prompt {asked.question} returned shape {rewards.shape} "
            f"for {len(texts)} texts; it must return one number per text."
        )
    if (infinite := np.isinf(rewards)).any():
        raise ValueError(
            f"The reward of a request for prompt {asked.question} returned "
            f"{rewards[infinite][0]:g}; it must return finite numbers, or NaN for none."
        )
    return Scores(np.where(np.isnan(rewards), 0, rewards), {}, np.isnan(rewards))


def all_scores(asked: Asked, members: list[int], scores: Scores | None) -> Scores:
    """Scores of a group: ``members`` were graded; the others bring a score or have none."""
    size = len(asked.requests)
    if len(members) == size and scores is not None:
        return scores
    if scores is None:
        scores = Scores(np.zeros(1, np.float32), {}, np.ones(1, bool))
        members = []
    rows = np.full(size, -1)
    rows[members] = np.arange(len(members))
    scores = scores.take(rows)
    for i, response in enumerate(asked.responses):
        if response.reward is not None:
            scores.rewards[i], scores.failed[i] = response.reward, False
            for values in scores.reward_components.values():
                values[i] = np.nan
    if any(response.turn_rewards is not None for response in asked.responses):
        steps = {
            name: tuple(getattr(response, name) for response in asked.responses)
            for name in ("turn_rewards", "turn_ends")
        }
        scores = scores._replace(details={**scores.details, **steps})
    return scores


class SamplerBackend:
    """Rounds of the whole-batch sampler, each of P rows of G; a round is sampled, then graded.

    Args:
      sample: ``(prompts, request_ids) -> Rollout`` of P lists of tokens and numbers ``[P, G]``, on
        the host; with ``fixed``, int ``[P, G, t]``, for requests with fixed tokens, and with
        ``draft`` for drafts, which have separate rounds.
      questions: The data set.
      decode: Text of token ids.
      grade: Rewards of groups of texts; on several processes all of them call it together.
      num_groups: P.
      group_size: G.
    """

    def __init__(
        self,
        sample: Callable[..., Rollout],
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
        self._queue: deque[tuple[Asked, int]] = deque()  # a group and the number of its row, from 0
        self._rows: dict[Asked, list[Rollout]] = {}
        self._complete: list[Asked] = []
        self.seconds = {"sample": 0.0, "reward": 0.0}

    def submit(self, asked: Sequence[Asked]) -> None:
        """Queues groups, those of more than G rollouts as several rows.

        Raises:
          ValueError: If a request needs slots.
        """
        for each in asked:
            if not each.request.sampled:
                self._complete.append(each)
                continue
            request = each.request
            drawn = (request.limit, request.temperature, request.entropy_stats)
            if each.responses or any(x is not None for x in drawn):
                raise ValueError(
                    "a collector asks for continued responses, a limit or a temperature, which the "
                    "whole-batch sampler does not support; set needs = Needs(slots=True) "
                    "on the collector, or sampling.slots."
                )
            self._queue.extend((each, row) for row in range(self._num_rows(each)))

    def spare(self) -> int:
        """Rows of the next round that nothing fills."""
        return max(self._shape[0] - len(self._queue), 0) if self._queue else 0

    def wait(self) -> dict[Asked, Graded]:
        """Samples and grades the next round."""
        start = time.perf_counter()
        rollouts = {asked: complete_rollout(asked, self._prompt(asked)) for asked in self._complete}
        self._complete.clear()
        if self._queue:
            (size, width), draft = self._shape, self._queue[0][0].request.draft
            rows: list[tuple[Asked, int]] = []
            while len(rows) < size and self._queue and self._queue[0][0].request.draft == draft:
                rows.append(self._queue.popleft())
            filled = rows + rows[:1] * (size - len(rows))
            ids = [list(asked.requests[row * width : (row + 1) * width]) for asked, row in filled]
            ids = np.array([row + row[:1] * (width - len(row)) for row in ids])
            prompts = [self._prompt(asked) for asked, _ in filled]
            fixed = [asked.request.fixed[row * width :][:width] for asked, row in filled]
            if draft:
                rollout = self._sample(prompts, ids, draft=True)
            elif any(fixed):
                rollout = self._sample(prompts, ids, fixed=_padded(fixed, width))
            else:
                rollout = self._sample(prompts, ids)
            for i, (asked, _) in enumerate(rows):
                done = self._rows.setdefault(asked, [])
                done.append(jax.tree.map(lambda x, i=i: x[i : i + 1], rollout))
                if len(done) == self._num_rows(asked):
                    alone = [row._replace(prompt_tokens=None, prompt_mask=None) for row in done]
                    n = len(asked.requests)
                    joined = trees.zip_leaves(
                        lambda x, n=n: np.concatenate(x, axis=1)[:, :n], alone
                    )
                    prompt = (done[0].prompt_tokens, done[0].prompt_mask)
                    rollouts[asked] = joined._replace(
                        prompt_tokens=prompt[0], prompt_mask=prompt[1]
                    )
                    del self._rows[asked]
        texts = {asked: texts_of(rollout, self._decode)[0] for asked, rollout in rollouts.items()}
        sampled = time.perf_counter()
        graded = self._graded(rollouts, texts)
        self.seconds["sample"] += sampled - start
        self.seconds["reward"] += time.perf_counter() - sampled
        return graded

    def _graded(
        self, rollouts: dict[Asked, Rollout], texts: dict[Asked, list[str]]
    ) -> dict[Asked, Graded]:
        """Groups with their rewards; those of the run in one call."""
        members = {asked: ungraded(asked, rollout) for asked, rollout in rollouts.items()}
        chosen = {asked: [texts[asked][i] for i in rows] for asked, rows in members.items() if rows}
        by_run = [asked for asked in chosen if asked.request.reward is None]
        scores: dict[Asked, Scores] = {}
        if by_run:
            questions = [self._questions[asked.question] for asked in by_run]
            joined, first = self._grade(questions, [chosen[asked] for asked in by_run]), 0
            for asked in by_run:
                rows = np.arange(first, first + len(chosen[asked]))
                scores[asked], first = joined.take(rows), first + len(rows)
        for asked, group in chosen.items():
            if asked.request.reward is not None:
                scores[asked] = processes.from_first(lambda a=asked, g=group: own_scores(a, g))
        return {
            asked: Graded(
                rollout,
                texts[asked],
                all_scores(asked, members[asked], scores.get(asked)),
                by_run=asked in by_run,
            )
            for asked, rollout in rollouts.items()
        }

    def _prompt(self, asked: Asked) -> list[int]:
        if asked.prompt is not None:
            return list(asked.prompt)
        return self._questions[asked.question].tokens

    def close(self) -> None:
        """Drops what is queued."""
        self._queue.clear()
        self._rows.clear()
        self._complete.clear()

    def _num_rows(self, asked: Asked) -> int:
        return -(-len(asked.requests) // self._shape[1])


def _padded(fixed: Sequence[Sequence[np.ndarray]], width: int) -> np.ndarray:
    """Fixed tokens of P rows of at most G responses as an array, -1 for none."""
    longest = max(len(tokens) for row in fixed for tokens in row)
    array = np.full((len(fixed), width, longest), -1, np.int32)
    for cells, row in zip(array, fixed, strict=True):
        for cell, tokens in zip(cells, row, strict=False):
            cell[: len(tokens)] = tokens
    return array


class _Recorded(NamedTuple):
    """Optional records of each token; see :class:`Graded`."""

    entropy: np.ndarray | None = None
    runner_up: tuple[np.ndarray, np.ndarray] | None = None
    sampled: np.ndarray | None = None
    turn_starts: tuple[tuple[TurnStart, ...], ...] | None = None


class EngineBackend:
    """An engine's slots: groups are graded as they finish, while others decode.

    With several processes, which must request the same groups, rewards are exchanged after all
    requested groups have finished, so a replacement waits for the others.

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
      episodes: Plays an environment; its rewards are then those of the run.
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
        episodes: Episodes | None = None,
    ):
        self._episodes = episodes
        self._generation = Generation(engine, params, key=key, version=version)
        self._finished = iter(self._generation)
        self._questions, self._decode, self._grade = questions, decode, grade
        self._width, self._pad_id = max_new_tokens, pad_id
        self._worker = Worker("rewards")
        # In the order in which they finished, which is the same in all processes.
        self._sampled: dict[Asked, tuple[Rollout, list[str], _Recorded]] = {}
        self._grading: dict[Asked, Future] = {}
        self.seconds = {"sample": 0.0, "reward": 0.0}

    def submit(self, asked: Sequence[Asked]) -> None:
        """Queues groups."""
        for each in asked:
            question, request = self._questions[each.question], each.request
            prompt = question.tokens if each.prompt is None else list(each.prompt)
            if request.draft:
                raise ValueError("a collector asks for drafts, which slots cannot make.")
            if request.fixed:
                raise ValueError(
                    "a collector asks for responses with fixed tokens, which slots cannot serve."
                )
            if not request.sampled:
                self._hand_over_complete(each, complete_rollout(each, prompt))
                continue
            if self._episodes is not None and request.turns is not None:
                for number in each.requests:
                    self._episodes.limit(number, request.turns)
            blank = self._generation.engine.spec.draw.blank
            begun = list(zip(each.requests, each.responses, strict=False))
            partial = {
                number: Completion(number, tokens_of(response, blank), UNFINISHED)
                for number, response in begun
                if len(response.tokens)
            }
            left: dict[int, int] = {}
            if self._episodes is not None and (request.pauses or request.limit is not None):
                what = "that pause" if request.pauses else f"of at most {request.limit} tokens"
                raise ValueError(
                    f"a collector asks for episodes {what}, but an environment always plays to the "
                    "end."
                )
            if self._episodes is not None:
                for number, response in begun:
                    if len(response.tokens):
                        read = self._episodes.begin(number, response)
                        begun_with = partial[number]
                        out = jax.tree.map(lambda x, read=read: x[read], begun_with.out)
                        partial[number] = replace(begun_with, out=out)
                        left[number] = len(begun_with) - len(read)
            settings = {} if request.temperature is None else {"temperature": request.temperature}
            if request.entropy_stats is not None:
                settings |= dict(zip(ENTROPY_STATS, request.entropy_stats, strict=True))
            self._generation.submit(
                Group(
                    id=each,
                    prompt=prompt,
                    requests=each.requests,
                    max_new_tokens=request.limit,
                    settings=settings,
                    partial=partial,
                    follow=None if self._episodes is None else self._episodes.follow(each.question),
                    turn_limit=None if self._episodes is None else self._episodes.turn_tokens,
                    left=left,
                )
            )

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
            wait_for_one(self._grading.values())
            scores = {x: f.result() for x, f in self._grading.items() if f.done()}
        else:
            # By their places: requests need not pickle.
            order = list(self._sampled)
            places = {asked: i for i, asked in enumerate(order)}
            futures = [(places[asked], future) for asked, future in self._grading.items()]
            shared = processes.together(lambda: {i: f.result() for i, f in futures})
            scores = {order[i]: value for each in shared for i, value in each.items()}
        self.seconds["sample"] += sampled - start
        self.seconds["reward"] += time.perf_counter() - sampled
        graded = {}
        for asked in [asked for asked in self._sampled if asked in scores]:
            self._grading.pop(asked, None)
            rollout, texts, recorded = self._sampled.pop(asked)
            by_run = asked.request.reward is None and bool(ungraded(asked, rollout))
            graded[asked] = Graded(
                rollout,
                texts,
                scores[asked],
                recorded.entropy,
                recorded.runner_up,
                by_run,
                recorded.sampled,
                recorded.turn_starts,
            )
        return graded

    def _decode_group(self) -> bool:
        """Decodes until the next group has finished, and hands it to the reward; False for none."""
        done = next(self._finished, None)
        if done is None:
            self._finished = iter(self._generation)  # more may be submitted
            return False
        asked, question = done.id, self._questions[done.id.question]
        name = question.prompt.name
        scores = sampled = starts = ends = None
        if self._episodes is not None:
            check_finite(done)
            plays = [self._episodes.take(completion) for completion in done.completions]
            scores = self._episodes.scores([each.episode for each in plays])
            starts = tuple(each.starts for each in plays)
            sampled = np.zeros((1, len(plays), self._width), bool)
            if any(each.ends is not None for each in plays):
                ends = np.full(sampled.shape, self._width, np.int32)
            for i, each in enumerate(plays):
                sampled[0, i, : len(each.sampled)] = each.sampled
                if ends is not None and each.ends is not None:
                    ends[0, i, : len(each.ends)] = each.ends
            pairs = zip(done.completions, plays, strict=True)
            done = done._replace(
                completions=tuple(
                    replace(c, out=each.out, finish=each.episode.finish) for c, each in pairs
                )
            )
        rollout = to_rollout(
            [done._replace(group=done.group._replace(id=name))],
            max_new_tokens=self._width,
            prompt_width=self._generation.engine.spec.prompt_length,
            pad_id=self._pad_id,
        )._replace(ends=ends)
        lengths = rollout.mask[0].sum(axis=-1)
        if asked.request.pauses:
            paused = (rollout.finish[0] == LENGTH) & (lengths < self._width)
            rollout = rollout._replace(finish=np.where(paused, UNFINISHED, rollout.finish))
        completions = done.completions

        def recorded(name: str) -> np.ndarray | None:
            """A record of the slots by name, ``[1, n, T]``; None if it is off."""
            outputs = [getattr(each.out, name) for each in completions]
            if outputs[0] is None:
                return None
            array = np.zeros(rollout.mask.shape, outputs[0].dtype)
            for i, values in enumerate(outputs):
                array[0, i, : len(values)] = values
            return array

        second, logp = recorded("runner_up"), recorded("runner_up_logp")
        pair = None if second is None or logp is None else (second, logp)
        record = _Recorded(recorded("entropy"), pair, sampled, starts)
        self._hand_over(asked, rollout, record, scores)
        return True

    def _hand_over_complete(self, asked: Asked, rollout: Rollout) -> None:
        """Hands responses that are complete to the reward; of episodes they bring theirs."""
        if self._episodes is None:
            return self._hand_over(asked, rollout, _Recorded())
        episodes = [self._episodes.stored(each) for each in asked.responses]
        sampled = np.zeros(rollout.mask.shape, bool)
        for row, each in zip(sampled[0], asked.responses, strict=True):
            row[: len(each.tokens)] = each.trains
        recorded = _Recorded(sampled=sampled)
        return self._hand_over(asked, rollout, recorded, self._episodes.scores(episodes))

    def _hand_over(
        self, asked: Asked, rollout: Rollout, recorded: _Recorded, scores: Scores | None = None
    ) -> None:
        """Hands a group to the reward; every process holds all of them and grades its share.

        ``scores`` are those of episodes.
        """
        texts = texts_of(rollout, self._decode)[0]
        if scores is not None:
            self._sampled[asked] = (rollout, texts, recorded)
            self._grading[asked] = Future()
            self._grading[asked].set_result(scores)
            return

        def score() -> Scores:
            members, scores = ungraded(asked, rollout), None
            if members:
                chosen = [texts[i] for i in members]
                if asked.request.reward is not None:
                    scores = own_scores(asked, chosen)
                else:
                    scores = self._grade([self._questions[asked.question]], [chosen])
            return all_scores(asked, members, scores)

        self._sampled[asked] = (rollout, texts, recorded)
        if sum(asked.requests) % jax.process_count() == jax.process_index():
            self._grading[asked] = self._worker.submit(score)

    def close(self) -> None:
        """Drops groups that are queued, decoding or not yet graded."""
        # Where one call failed the others may too, each after its deadline.
        self._worker.close()
        self._generation.stop()
        if self._episodes is not None:
            self._episodes.close()


def texts_of(rollout: Rollout, decode: Callable[[list[int]], str]) -> list[list[str]]:
    """The responses as text: P lists of G; of a flow policy the numbers of the last latent.

    Of one that writes before it denoises, its text stands before them, in lines of its own.
    """
    tokens, mask = processes.to_host((rollout.tokens, rollout.mask))
    if rollout.latents is not None:
        latents = np.asarray(processes.to_host(rollout.latents))
        is_text = mask & (latents == 0).all((-2, -1))

        def each(p: int, g: int) -> str:
            numbers = " ".join(f"{x:.9g}" for x in latents[p, g, -1, 1])
            keep = is_text[p, g]
            return f"{decode(tokens[p, g][keep].tolist())}\n{numbers}" if keep.any() else numbers

        return [[each(p, g) for g in range(mask.shape[1])] for p in range(mask.shape[0])]
    return [
        [decode(row[keep].tolist()) for row, keep in zip(rows, masks, strict=True)]
        for rows, masks in zip(tokens, mask, strict=True)
    ]
