"""Runs a collector: samples and grades the groups that it requests, until its batch is complete.

A rollout depends on the key, its number and the weights, and the number counts the rollouts in the
order of requests, so every :mod:`backend <jaxrl_llm.rollout.backends>` gives the same batch.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.sizes import power_of_two
from jaxrl_llm.core.support import Support
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import (
    JUDGE,
    OWN,
    TEXT,
    Collection,
    Collector,
    Outcome,
    Request,
    Response,
    Row,
    width_of,
)
from jaxrl_llm.data.questions import Question, TextEncoder
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rewards.scoring import join_scores
from jaxrl_llm.rollout._inputs import check_tokens
from jaxrl_llm.rollout.backends import Asked, Backend, Graded
from jaxrl_llm.rollout.begun import count_begun
from jaxrl_llm.rollout.cut import cut_response
from jaxrl_llm.rollout.episodes import Episodes
from jaxrl_llm.rollout.sampler import bucket_of
from jaxrl_llm.rollout.types import CANCELLED, LENGTH, STOP, UNFINISHED, Rollout

_ROLES = range(OWN, TEXT + 1)
# What a response may say of each of its tokens.
_OF_TOKENS = (
    "behavior_logp",
    "model_logp",
    "version",
    "trains",
    "entropy",
    "nodes",
    "runner_up",
    "runner_up_logp",
    "ends",
)


class Segments(NamedTuple):
    """Segments of responses, and the values of their prefixes; K is a power of two.

    Attributes:
      ids: int32 ``[P, G, T]``, the segment of each token; -1 for none.
      where: bool ``[P, G, K]``, segments that exist.
      values: float32 ``[P, G, K]``, 0 elsewhere.
    """

    ids: np.ndarray
    where: np.ndarray
    values: np.ndarray


class Collected(NamedTuple):
    """A complete batch.

    Attributes:
      rollout: ``[P, G]``, on the host; G is the collector's ``width``. The prompt of a row is the
        common prefix of its members' prompts; the rest of a member's prompt comes before its
        response in ``tokens``, where ``mask`` is False. It is also False where a response does not
        train.
      where: bool ``[P, G]``, False if a row has no such member or it takes no part.
      roles: int32 ``[P, G]``, the role of each rollout.
      known: bool ``[P, G, T]``, whether ``behavior_logp`` is known; None if it is for every token
        that trains.
      context: bool ``[P]``, whether a member has tokens that are read and do not train, before its
        response or in it.
      nodes: int32 ``[P, G, T]``, the rollout that sampled each token, by its number in the batch;
        -1 for none. Responses that fork have the number of a token in common.
      members: int32 ``[P, G, 2]``, the number of the first rollout of a member's request, and the
        member's place in the request; -1 where a row has no such member.
      segments: Segments of the responses if the collector values prefixes; else None.
      questions: The P questions of the rows.
      places: Indices of these questions in the data set.
      texts: P groups of G.
      messages: The user's message of each rollout, if it is not the question's; P groups of G.
      scores: ``[P * G]``.
      state: State of the collector.
      in_order: Number of prompts taken in the order of the data.
      groups: Number of groups that began in this batch; one that goes on began earlier.
      rollouts: Number of rollouts that began in this batch.
      tokens: Number of tokens of all rollouts that finished meanwhile, also of dropped groups and
        of those that were sampled ahead and then not needed.
      continued: Number of tokens of the batch's own rollouts that older weights sampled.
      reward: Mean reward of all sampled rollouts; NaN if none has one.
      failures: Number of failed calls of the reward.
      seconds: Seconds by "sample" and "reward".
    """

    rollout: Rollout
    where: np.ndarray
    roles: np.ndarray
    known: np.ndarray | None
    context: np.ndarray
    nodes: np.ndarray
    members: np.ndarray
    segments: Segments | None
    questions: list[Question]
    places: list[int]
    texts: list[list[str]]
    messages: list[list[str | None]]
    scores: Scores
    state: ArrayTree
    in_order: int
    groups: int
    rollouts: int
    tokens: int
    continued: int
    reward: float
    failures: int
    seconds: dict[str, float]


class Limits(NamedTuple):
    """The limits of a run.

    Attributes:
      encoder: Encodes texts, with the maximum length of prompts.
      max_new_tokens: T, the maximum length of a response.
      vocab_size: Tokens lie below it.
      episodes: Plays an environment, whose prompts are its first observations.
    """

    encoder: TextEncoder
    max_new_tokens: int
    vocab_size: int
    episodes: Episodes | None = None


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
    version: int = 0,
    seed: int = 0,
    limits: Limits | None = None,
    pad_id: int = 0,
    rows: "DataRows | None" = None,
) -> Collected:
    """Collects a batch.

    Args:
      collector: The collector.
      state: Its state.
      key: A typed key, for its draws.
      backend: Samples and grades.
      questions: The data set.
      next_places: The indices of the next n questions in the order of the data, from the beginning
        of this batch.
      num_groups: P.
      group_size: G.
      step: Index of the batch in the run, from 0.
      version: Version of the weights.
      seed: Seed of the order of the data.
      limits: The limits of the run; requests with a text or responses need them.
      pad_id: Fills ``tokens`` after the end of a response.
      rows: The rows of the questions, to reuse them between calls; None creates them.

    Raises:
      ValueError: If the collector requests something unavailable, or decides on rows that cannot
        form a batch.
      RewardError: If the reward fails.
    """
    data = DataRows(questions) if rows is None else rows
    start = Collection(num_groups, group_size, step, data=data, version=version, seed=seed)
    if limits is not None:
        encoder = limits.encoder
        decode = encoder.tokenizer.decode
        start = start._replace(
            encode=encoder.response,
            decode=decode,
            takes_text=encoder.takes_text,
            stop_ids=encoder.stop_ids,
            plays=limits.episodes is not None,
        )
    book = _Book(collector, state, key, questions, next_places, start, limits)
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
            # Empty rows of the sampler sample the groups that may be asked for next, except groups
            # of several rows, which might not end in the same round.
            one_row = width_of(collector, group_size) == group_size
            if one_row and needs_of(collector).asks_ahead and (spare := backend.spare()):
                backend.submit(book.ahead(spare))
            book.finished |= backend.wait()
            book.take()
    finally:
        backend.close()
    book.check(decision.rows)
    return book.assemble(decision.rows, learned, pad_id=pad_id, seconds=backend.seconds)


class DataRows(Sequence):
    """The rows of the data as a collector sees them."""

    def __init__(self, questions: Sequence[Question]):
        self._questions = questions
        self._computed: dict[Callable, Any] = {}

    def computed(self, function: Callable[[Sequence], Any]) -> Any:
        """``function(rows)``, computed the first time; see ``protocol.computed_once``."""
        if function not in self._computed:
            self._computed[function] = function(self)
        return self._computed[function]

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return DataRows(self._questions[index])
        prompt = self._questions[index].prompt
        return {**prompt.metadata, "text": prompt.text}


def _decoded_ends(
    encoder: TextEncoder, text: str, tokens: Sequence[int], ends: Sequence[int] | np.ndarray
) -> np.ndarray:
    """The ends of steps of a text in characters of its decoded tokens.

    They differ where the tokenizer normalizes, such as two characters into one.
    """
    decode = encoder.tokenizer.decode
    if (written := decode(tokens)) == text:
        return np.asarray(ends)
    size = len(written)
    moved = [
        size if end == len(text) else min(len(decode(encoder.response(text[:end]))), size)
        for end in map(int, ends)
    ]
    return np.maximum.accumulate(np.asarray(moved, np.int64))


class _Book:
    """The requests of a batch and their outcomes."""

    def __init__(self, collector, state, key, questions, next_places, start, limits):
        self.collector, self.state, self._key = collector, state, key
        self._questions, self._next_places, self._limits = questions, next_places, limits
        self._start: Collection = start
        self._width = width_of(collector, start.group_size)
        self.requests: list[Request] = []
        self.outcomes: list[Outcome | None] = []
        self.asked: list[Asked] = []
        self._known: set[Asked] = set()  # the same
        self.finished: dict[Asked, Graded] = {}  # also of groups that are not asked for yet
        self.waiting = 0
        self._open: dict[Asked, int] = {}  # asked for and without an outcome, by their places
        self._submitted: set[Asked] = set()
        self._planned = 0  # submitted and not asked for
        self._number = 0  # of the next rollout
        self._in_order = 0  # requests that take the next prompt
        self._places: list[int] = []
        self._texts: dict[tuple[int, str], tuple[int, ...]] = {}

    def collection(self) -> Collection:
        return self._start._replace(requests=tuple(self.requests), outcomes=tuple(self.outcomes))

    def propose(self, count: int) -> tuple[Sequence[Request], ArrayTree]:
        """The next requests of the collector, and its state after them."""
        if not count:
            return (), self.state
        requests, state = self.collector.propose(self.state, self._key, self.collection(), count)
        if len(requests) != count:
            raise ValueError(
                f"collector {self.collector!r} proposes {len(requests)} groups, but {count} are "
                "needed."
            )
        return requests, state

    def ask(self, requests: Sequence[Request]) -> list[Asked]:
        """Enters requests; those that nothing samples yet."""
        resolved = self._resolve(requests)
        for each in resolved:
            if each in self._known:
                raise ValueError(
                    f"collector {self.collector!r} asks twice for the draws of rollouts "
                    f"{each.request.draws_of} of request {each.request.extends}, in equal "
                    "requests; use the outcome of the first one twice."
                )
            self._known.add(each)
        self._open |= {each: i for i, each in enumerate(resolved, len(self.asked))}
        self._planned -= sum(each in self._submitted for each in resolved)
        self._number += sum(request.rollouts for request in requests if not request.draws_of)
        self._in_order += _in_order(requests)
        self.requests += requests
        self.asked += resolved
        self.outcomes += [None] * len(requests)
        self.waiting += len(requests)
        new = [each for each in resolved if each not in self._submitted]
        self._submitted.update(new)
        return new

    def ahead(self, count: int) -> list[Asked]:
        """At most ``count`` groups that would be asked for next and that nothing samples yet."""
        most = self._planned + count
        # The collector may propose fewer if the batch needs no more.
        requests, _ = self.collector.propose(self.state, self._key, self.collection(), most)
        resolved = self._resolve(requests[:most])
        # A reward of a request's own is not compared.
        new = [x for x in resolved if x not in self._submitted and x.request.reward is None][:count]
        self._submitted.update(new)
        self._planned += len(new)
        return new

    def take(self) -> bool:
        """Enters the outcomes of requests that have finished; whether there is a new one."""
        done = [asked for asked in self._open if asked in self.finished]
        for asked in done:
            group, size = self.finished[asked], range(len(asked.requests))
            self.outcomes[self._open.pop(asked)] = Outcome(
                prompt=asked.question,
                rewards=np.asarray(group.scores.rewards, np.float32),
                where=~group.scores.failed,
                lengths=group.rollout.mask[0].sum(axis=-1, dtype=np.int32),
                truncated=group.rollout.finish[0] == LENGTH,
                reward_components=group.scores.reward_components,
                responses=tuple(_response(asked, group, i) for i in size),
                texts=tuple(group.texts),
                prompt_tokens=self._prompt_of(asked),
            )
        self.waiting -= len(done)
        return bool(done)

    def _resolve(self, requests: Sequence[Request]) -> list[Asked]:
        """Requests that follow those so far, with the places of their prompts and their numbers."""
        self._check(requests)
        number, first = self._number, self._in_order
        if (needed := first + _in_order(requests)) > len(self._places):
            self._places = list(self._next_places(max(needed, 2 * len(self._places))))
        places = iter(self._places[first:needed])
        resolved: list[Asked] = []
        for request in requests:
            extended: Asked | None = None
            if request.extends is not None:
                earlier = request.extends - len(self.asked)
                extended = self.asked[request.extends] if earlier < 0 else resolved[earlier]
                place = extended.question
            else:
                place = next(places) if request.prompt is None else int(request.prompt)
            numbers = tuple(range(number, number + request.rollouts))
            if request.draws_of and extended is not None:
                if not all(0 <= i < len(extended.requests) for i in request.draws_of):
                    raise ValueError(
                        f"collector {self.collector!r} asks for the draws of rollouts "
                        f"{request.draws_of} of a request with {len(extended.requests)}."
                    )
                numbers = tuple(extended.requests[i] for i in request.draws_of)
            text = request.text
            text = text(self._start.data[place]) if callable(text) else text
            request = request._replace(text=text)
            prompt = self._prompt_of_request(request, text, place)
            responses = self._responses(request, place)
            content = _content(request, responses)
            resolved.append(Asked(place, numbers, request, prompt, responses, content))
            number += 0 if request.draws_of else request.rollouts
        return resolved

    def _prompt_of_request(
        self, request: Request, text: str | None, place: int
    ) -> tuple[int, ...] | None:
        """The tokens of a prompt with this text, or of another that is not the question's own."""
        prompt = None
        if text is not None:
            if self._limits is None or not needs_of(self.collector).sends_text:
                raise ValueError(
                    f"collector {self.collector!r} sends a text; set needs = "
                    "Needs(sends_text=True) on it, so that prompts have room for the text."
                )
            if (prompt := self._texts.get((place, text))) is None:
                name = f"{self._name(place)}, with the text of collector {self.collector!r},"
                prompt = tuple(self._limits.encoder.prompt(text, name))
                self._texts[place, text] = prompt
        if request.prompt_tokens:
            prompt = request.prompt_tokens
        if self._limits is not None and self._limits.episodes is not None:
            prompt = self._first_observation(request, place)
        return prompt

    def _prompt_of(self, asked: Asked) -> tuple[int, ...]:
        prompt = asked.prompt
        return tuple(self._questions[asked.question].tokens) if prompt is None else prompt

    def _first_observation(self, request: Request, place: int) -> tuple[int, ...]:
        """The prompt of an episode; raises ValueError where there is no room for it."""
        start = f"collector {self.collector!r} asks for"
        untold = any(x.trains is None or x.reward is None for x in request.responses)
        if request.text is not None or (not request.sampled and untold):
            raise ValueError(
                f"{start} a text, or for complete responses without turns and rewards, which an "
                "environment does not support."
            )
        limits = cast("Limits", self._limits)
        episodes, row = cast("Episodes", limits.episodes), self._start.data[place]
        return episodes.prompt(place, row, self._name(place), limits.encoder.room)

    def _name(self, place: int) -> str:
        prompt = self._questions[place].prompt
        return repr(prompt.name)

    def _responses(self, request: Request, place: int) -> tuple[Response, ...]:
        """The responses of a request as arrays; raises ValueError for what cannot be used."""
        if not request.responses:
            return ()
        if self._limits is None:
            raise ValueError(
                f"collector {self.collector!r} brings responses; pass their limits to collect."
            )
        T = self._limits.max_new_tokens
        most = T if request.limit is None else request.limit
        start = f"collector {self.collector!r}: a response to prompt {self._name(place)}"
        arrays = []
        for response in request.responses:
            tokens = response.tokens
            if isinstance(tokens, str):
                text, encoder = tokens, self._limits.encoder
                tokens = encoder.response(text, ends=not request.sampled)
                if response.turn_ends is not None:
                    turn_ends = _decoded_ends(encoder, text, tokens, response.turn_ends)
                    response = response._replace(turn_ends=turn_ends)
            check_tokens(start, tokens, self._limits.vocab_size)
            if len(tokens) > (room := most - request.sampled) and self._limits.encoder.cuts:
                response = cut_response(response, tokens, room, self._limits.encoder.tokenizer)
                tokens = response.tokens
            n = len(tokens)
            if n > room:
                what = "begins with" if request.sampled else "has"
                raise ValueError(f"{start} {what} {n} tokens; the longest response has {most}.")
            if not n and not request.sampled:
                raise ValueError(f"{start} has no tokens.")
            if request.sampled and response.reward is not None:
                raise ValueError(f"{start} is to be continued, so it cannot have a reward yet.")
            if not request.sampled and response.finish not in (LENGTH, STOP, CANCELLED):
                raise ValueError(f"{start} is not sampled, but its finish is {response.finish}.")
            for name in _OF_TOKENS:
                x = getattr(response, name)
                if x is not None and np.shape(x) != (n,):
                    raise ValueError(f"{start} has {n} tokens, and {name} of shape {np.shape(x)}.")
            arrays.append(response._replace(tokens=np.asarray(tokens, np.int32).reshape(n)))
        return tuple(arrays)

    def _check(self, requests: Sequence[Request]) -> None:
        """Raises ValueError for requests that nothing can serve."""
        start = f"collector {self.collector!r} asks for"
        for i, request in enumerate(requests, len(self.requests)):
            if request.rollouts < 1:
                raise ValueError(
                    f"{start} {request.rollouts} rollouts of a prompt; it must be at least 1."
                )
            if request.prompt is not None and not 0 <= request.prompt < len(self._questions):
                raise ValueError(
                    f"{start} prompt {request.prompt}; the data set has prompts 0 to "
                    f"{len(self._questions) - 1}."
                )
            self._check_declared(request, i, start)
            if fault := next(_faults(request, self._limits), None):
                raise ValueError(f"{start} request {i} {fault}.")
            if request.extends is not None and (
                request.prompt is not None or not 0 <= request.extends < i
            ):
                raise ValueError(
                    f"{start} more rollouts of request {request.extends} in request {i}; it must "
                    "be an earlier one, and prompt None."
                )

    def _check_declared(self, request: Request, i: int, start: str) -> None:
        """Raises ValueError if request i has a field that the needs of the collector lack."""
        if request.prompt_tokens:
            if not needs_of(self.collector).sets_prompts:
                raise ValueError(
                    f"{start} prompt_tokens in request {i}; its needs must have sets_prompts=True."
                )
            if self._limits is not None:
                size = self._limits.vocab_size
                check_tokens(f"{start} prompt_tokens", request.prompt_tokens, size)
        if request.fixed and not needs_of(self.collector).fixes_tokens:
            raise ValueError(
                f"{start} fixed tokens in request {i}; its needs must have fixes_tokens=True."
            )
        if request.draft and not needs_of(self.collector).draft_steps:
            raise ValueError(f"{start} a draft in request {i}; its needs must have draft_steps.")

    def check(self, rows: Sequence[Row]) -> None:
        """Raises ValueError unless rows can be a batch."""
        who, P, G = f"collector {self.collector!r}", self._start.num_groups, self._width
        if len(rows) != P:
            raise ValueError(f"{who} decides on {len(rows)} rows; a batch has {P}.")
        for p, row in enumerate(rows):
            start = f"{who}: row {p}"
            if not 1 <= len(row.members) <= G:
                raise ValueError(f"{start} has {len(row.members)} members; a group has 1 to {G}.")
            rewards = (0.0,) * len(row.members) if row.rewards is None else row.rewards
            if len(rewards) != len(row.members) or not np.isfinite(rewards).all():
                raise ValueError(
                    f"{start} has the rewards {rewards} for {len(row.members)} members; it takes a "
                    "finite one for each."
                )
            if row.segments is not None and len(row.segments) != len(row.members):
                raise ValueError(
                    f"{start} has segments of {len(row.segments)} members; it has "
                    f"{len(row.members)}."
                )
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

        def member(request: int, index: int) -> _Member:
            asked = self.asked[request]
            context = asked.prompt
            if context is None or asked.request.train_as_prompt:
                context = tuple(self._questions[asked.question].tokens)
            return _Member(asked, self.finished[asked], index, context)

        groups = [[member(i, j) for i, j in row.members] for row in rows]
        places = [self.asked[row.members[0][0]].question for row in rows]
        where, roles = np.zeros((len(rows), G), bool), np.zeros((len(rows), G), np.int32)
        members = np.full((len(rows), G, 2), -1, np.int32)
        for p, (row, group) in enumerate(zip(rows, groups, strict=True)):
            where[p, : len(group)] = row.takes_part
            roles[p, : len(group)] = [each.asked.request.role for each in group]
            members[p, : len(group)] = [(each.asked.requests[0], each.index) for each in group]
            if not os.path.commonprefix([each.context for each in group]):
                raise ValueError(
                    f"collector {self.collector!r}: the prompts of row {p}, of prompt "
                    f"{self._name(places[p])}, do not begin with the same token, so they cannot "
                    "share a row; a text must begin as the prompt does."
                )
        scores = _join_scores(groups, G)
        for p, row in enumerate(rows):
            if row.rewards is not None:
                cells = slice(p * G, p * G + len(row.rewards))
                scores.rewards[cells], scores.failed[cells] = row.rewards, False
        sampled = [x for x in self.asked if self._is_rollout_of_policy(x.request)]
        graded = [self.finished[x] for x in sampled or self.asked if x in self.finished]
        # What is unfinished was not graded.
        failures = [
            x.scores.unanswered & (x.rollout.finish[0] != UNFINISHED)
            for x in map(self.finished.get, self.asked)
            if x is not None
        ]
        rollout, known, context, nodes = _join_rollouts(groups, G, pad_id)
        begun = count_begun(self.asked, self.finished)
        return Collected(
            rollout=rollout,
            where=where & ~scores.failed.reshape(where.shape),
            roles=roles,
            known=known,
            context=context,
            nodes=nodes,
            members=members,
            segments=_join_segments(rows, groups, rollout.tokens.shape),
            questions=[self._questions[place] for place in places],
            places=places,
            texts=[[x.done.texts[x.index] for x in g] + [""] * (G - len(g)) for g in groups],
            messages=[
                [cast("str | None", x.asked.request.text) for x in g] + [None] * (G - len(g))
                for g in groups
            ],
            scores=scores,
            state=state,
            in_order=self._in_order,
            groups=begun[0],
            rollouts=begun[1],
            tokens=sum(
                _num_sampled(x.responses, done.rollout)
                for x, done in self.finished.items()
                if x.request.sampled
            ),
            continued=sum(
                each.continued(self._start.version) for group in groups for each in group
            ),
            reward=mean_reward([each.scores for each in graded]),
            failures=sum(int(failed.sum()) for failed in failures),
            seconds=dict(seconds),
        )

    def _is_rollout_of_policy(self, request: Request) -> bool:
        """Whether the responses are answers of the policy: no verdicts, drafts, value estimates."""
        values = needs_of(self.collector).values_prefixes and request.extends is not None
        return request.sampled and request.role != JUDGE and not request.draft and not values


# Fields of a rollout with one number a token.
_FIELDS = ("tokens", "mask", "behavior_logp", "model_logp", "log_kept", "version")


class _Member(NamedTuple):
    """A rollout of a row, and the prompt that it trains with."""

    asked: Asked
    done: Graded
    index: int
    context: tuple[int, ...]

    @property
    def begins(self) -> Response | None:
        """The response that the request continues or brings; None without."""
        return self.asked.responses[self.index] if self.asked.responses else None

    def continued(self, version: int) -> int:
        """How many tokens of the policy's own rollout older weights sampled."""
        begin = self.begins
        if begin is None or begin.version is None or self.asked.request.role != OWN:
            return 0
        versions = np.asarray(begin.version)
        return int(((versions >= 0) & (versions < version)).sum())


def _content(request: Request, responses: tuple[Response, ...]) -> bytes:
    """A digest of the options and responses of a request; empty for a plain one.

    Its place in the batch, its prompt, its rollouts and what its reward computes are left out.
    """
    options = request._replace(
        rollouts=0, prompt=None, extends=None, round=0, responses=(), reward=None, fixed=()
    )
    has_reward = request.reward is not None
    if options == Request(0) and not (has_reward or responses or request.fixed):
        return b""
    digest = hashlib.blake2b(repr((*options, has_reward)).encode(), digest_size=16)
    for x in request.fixed:
        digest.update(f"{len(x)}:".encode() + np.asarray(x, np.int32).tobytes())
    for response in responses:
        for x in response._replace(turn_starts=None):
            digest.update(b"|" if x is None else np.asarray(x).tobytes())
            digest.update(str(np.shape(x)).encode())
    return digest.digest()


def _num_sampled(earlier: Sequence[Response], rollout: Rollout) -> int:
    """How many tokens were sampled for a request, without its earlier responses."""
    versions = [
        rollout.version[rollout.mask],
        *(x.version for x in earlier if x.version is not None),
    ]
    total, *before = (int((np.asarray(each) >= 0).sum()) for each in versions)
    return total - sum(before)


def _faults(request: Request, limits: "Limits | None") -> Iterator[str]:
    """What is wrong with the options of a request by themselves, as the end of a sentence."""
    n = len(request.responses)
    if n not in (0, request.rollouts):
        yield f"with {n} responses for {request.rollouts} rollouts"
    if not request.sampled:
        if not n:
            yield "of complete responses, but brings none"
        drawn = (request.limit, request.temperature, request.entropy_stats)
        if any(x is not None for x in drawn):
            yield (
                "of complete responses, for which limit, temperature and entropy_stats have no "
                "effect"
            )
    stats = request.entropy_stats
    if stats is not None and not (len(stats) == 4 and np.isfinite(stats).all()):
        yield f"with entropy_stats {stats}; they must be four finite numbers"
    if request.train_as_prompt and request.text is None:
        yield "with train_as_prompt, which has no effect without a text"
    played = limits is not None and limits.episodes is not None
    if request.turns is not None and not (played and request.turns >= 1):
        yield f"with turns {request.turns}; it is at least 1, of the episodes of an environment"
    if request.pauses and request.limit is None:
        yield "that pauses, which has no effect without a limit"
    if request.limit is not None:
        T = request.limit if limits is None else limits.max_new_tokens
        if not 1 <= request.limit <= T:
            yield f"with limit {request.limit}; it must be from 1 to max_new_tokens {T}"
    if request.temperature is not None and not 0 <= request.temperature < float("inf"):
        yield f"with temperature {request.temperature}; it must be finite and at least 0"
    if request.prompt_tokens and (request.sampled or request.text is not None):
        yield "with prompt_tokens, which go with complete responses and no text"
    draws = len(request.draws_of)
    if draws and (request.extends is None or draws != request.rollouts):
        yield (
            f"with the draws of {draws} rollouts; they are of the request that it extends, one for "
            f"each of its {request.rollouts}"
        )
    if request.fixed and (len(request.fixed) != request.rollouts or n):
        yield (
            f"with fixed tokens of {len(request.fixed)} of {request.rollouts} rollouts, and {n} "
            "responses; it takes those of each rollout, and no response"
        )
    most = None if limits is None else limits.max_new_tokens
    for x in map(np.asarray, request.fixed):
        if x.ndim != 1 or x.dtype.kind not in "iu" or len(x) > (most or len(x)):
            yield (
                f"with fixed tokens of shape {x.shape} and dtype {x.dtype}; they must be integers, "
                f"at most {most}"
            )
    if request.role not in _ROLES:
        yield f"with role {request.role}; roles are {_ROLES.start} to {_ROLES.stop - 1}"


def _in_order(requests: Sequence[Request]) -> int:
    """How many requests take the next prompt in the order of the data."""
    return sum(request.prompt is None and request.extends is None for request in requests)


def mean_reward(scores: Sequence[Scores]) -> float:
    """Mean reward of all rollouts that have one; NaN if none has."""
    rewards = np.concatenate([np.zeros(0), *(each.rewards[~each.failed] for each in scores)])
    return float(rewards.mean()) if rewards.size else float("nan")


def _response(asked: Asked, done: Graded, index: int) -> Response:
    """A rollout as a response that a later request may bring; what is not known stays so."""
    rollout = done.rollout
    n = int(rollout.mask[0, index].sum())
    begin = asked.responses[index] if asked.responses else None
    behavior_logp = rollout.tempered_logp[0, index, :n].astype(np.float32)
    model_logp = rollout.model_logp[0, index, :n].astype(np.float32)
    trains = None
    if asked.request.fixed:
        behavior_logp[rollout.version[0, index, :n] < 0] = np.nan
        model_logp[rollout.version[0, index, :n] < 0] = np.nan
    if done.sampled is not None:
        trains = done.sampled[0, index, :n]
    if begin is not None:
        first = len(begin.tokens)
        for x, values in ((begin.behavior_logp, behavior_logp), (begin.model_logp, model_logp)):
            values[:first] = np.nan if x is None else x
        if begin.trains is not None and done.sampled is None:
            trains = np.append(begin.trains, np.ones(n - first, bool)).astype(bool)
    return Response(
        tokens=rollout.tokens[0, index, :n].astype(np.int32),
        behavior_logp=behavior_logp,
        model_logp=model_logp,
        version=rollout.version[0, index, :n].astype(np.int32),
        trains=trains,
        entropy=None if done.entropy is None else done.entropy[0, index, :n],
        nodes=_nodes(asked, done, index, n),
        runner_up=None if done.runner_up is None else done.runner_up[0][0, index, :n],
        runner_up_logp=None if done.runner_up is None else done.runner_up[1][0, index, :n],
        ends=None if rollout.ends is None else rollout.ends[0, index, :n],
        turn_starts=None if done.turn_starts is None else done.turn_starts[index],
        finish=int(rollout.finish[0, index]),
        reward=None if done.scores.failed[index] else float(done.scores.rewards[index]),
    )


def _nodes(asked: Asked, done: Graded, index: int, length: int) -> np.ndarray:
    """Which rollout of the batch sampled each token of a response; -1 for none."""
    begin = asked.responses[index] if asked.responses else None
    first = 0 if begin is None else len(begin.tokens)
    nodes = np.full(length, asked.requests[index] if asked.request.sampled else -1, np.int32)
    nodes[:first] = -1 if begin is None or begin.nodes is None else begin.nodes
    if asked.request.fixed:
        nodes = np.where(done.rollout.version[0, index, :length] < 0, -1, nodes)
    return nodes if done.sampled is None else np.where(done.sampled[0, index, :length], nodes, -1)


def _bucket(size: int) -> int:
    """A width that few sizes have in common; 0 stays 0."""
    return bucket_of(size) if size else 0


def _join_rollouts(
    groups: list[list[_Member]], size: int, pad_id: int
) -> tuple[Rollout, np.ndarray | None, np.ndarray, np.ndarray]:
    """P groups of at most G members as arrays ``[P, G]``; the rest is padding.

    Also returns the known values of the tokens, which groups have context, and their nodes.
    """
    prefixes = [os.path.commonprefix([each.context for each in group]) for group in groups]
    width, length = _sizes(groups, prefixes)
    shape = (len(groups), size, length)
    joined = _blank_rollout([each for group in groups for each in group], shape)
    present, known = np.zeros(shape, bool), np.ones(shape, bool)
    nodes = np.full(shape, -1, np.int32)
    for p, (group, prefix) in enumerate(zip(groups, prefixes, strict=True)):
        for g, each in enumerate(group):
            rollout, i, rest = each.done.rollout, each.index, each.context[len(prefix) :]
            first, end = len(rest), len(rest) + rollout.tokens.shape[2]
            _copy_member(joined, each, p, g, first)
            n = int(rollout.mask[0, i].sum())
            nodes[p, g, first : first + n] = _nodes(each.asked, each.done, i, n)
            if each.done.sampled is not None:
                joined.mask[p, g, first:end] &= each.done.sampled[0, i]
            if each.asked.request.fixed:
                known[p, g, first:end] = rollout.version[0, i] >= 0
            present[p, g, :end] = np.append(np.ones(first, bool), rollout.mask[0, i])
            joined.tokens[p, g, :first] = rest
            if (begin := each.begins) is not None:
                end = first + len(begin.tokens)
                logp = begin.behavior_logp
                known[p, g, first:end] = False if logp is None else ~np.isnan(logp)
                if begin.trains is not None:
                    joined.mask[p, g, first:end] &= np.asarray(begin.trains, bool)
    prompts = np.zeros((len(groups), width), np.int32)
    for row, prefix in zip(prompts, prefixes, strict=True):
        row[: len(prefix)] = prefix
    lengths = np.array([len(prefix) for prefix in prefixes])
    joined = joined._replace(
        prompt_tokens=prompts,
        prompt_mask=np.arange(width) < lengths[:, None],
        tokens=np.where(present, joined.tokens, pad_id).astype(np.int32),
    )
    context = (present & ~joined.mask).any(axis=(1, 2))
    return joined, None if known[joined.mask].all() else known, context, nodes


def _sizes(groups: list[list[_Member]], prefixes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The widths of the prompts and of the responses. They take few values: each is compiled.

    The tokens of a member's prompt after the prefix of its group stand before its response.
    """
    members = [each for group in groups for each in group]
    before = max(
        len(each.context) - len(prefix)
        for group, prefix in zip(groups, prefixes, strict=True)
        for each in group
    )
    plain = all(each.asked.prompt is None for each in members)
    sampled = any(each.asked.request.sampled for each in members)
    needed = max(map(len, prefixes))
    width = max(each.done.rollout.prompt_tokens.shape[1] for each in members)
    # An environment's prompts differ in length from batch to batch.
    episodes = all(each.done.sampled is not None for each in members)
    if needed > width or not (sampled and (plain or episodes)):
        width = _bucket(needed)
    elif episodes:
        while needed <= width // 2:
            width = -(-width // 2)
    length = max(each.done.rollout.tokens.shape[2] for each in members)
    return width, _bucket(before) + (length if sampled else _bucket(length))


def _blank_rollout(members: Sequence[_Member], shape: tuple[int, int, int]) -> Rollout:
    """A rollout ``[P, G, T]`` of padding without prompts, with the fields that any member has.

    Raises:
      ValueError: If some members have latents and others do not.
    """
    rollouts = [each.done.rollout for each in members]
    some = {
        name: next((x for rollout in rollouts if (x := getattr(rollout, name)) is not None), None)
        for name in ("support", "ends", "latents", "experts")
    }
    if len({rollout.latents is None for rollout in rollouts}) > 1:
        raise ValueError(
            "collect: a row has trajectories of a flow policy and responses without latents."
        )
    support, ends, latents, experts = some.values()
    if support is not None:
        support = Support(
            *(
                x if x is None else np.full((*shape, x.shape[-1]), fill, x.dtype)
                for x, fill in zip(support, (-1, 0), strict=True)
            )
        )
    # Experts of zero choose anew, where a rollout does not say.
    wide = {
        name: None if x is None else np.zeros((*shape, *x.shape[3:]), x.dtype)
        for name, x in (("latents", latents), ("experts", experts))
    }
    return Rollout(
        prompt_tokens=None,
        prompt_mask=None,
        finish=np.full(shape[:2], LENGTH, np.int32),
        support=support,
        ends=None if ends is None else np.full(shape, shape[-1], np.int32),
        latents=wide["latents"],
        experts=wide["experts"],
        **{name: np.zeros(shape, getattr(rollouts[0], name).dtype) for name in _FIELDS},
    )


def _copy_member(joined: Rollout, member: _Member, p: int, g: int, first: int) -> None:
    """Writes the response of a member into row ``[p, g]``, from cell ``first`` on."""
    rollout, i = member.done.rollout, member.index
    end = first + rollout.tokens.shape[2]

    def copy(to: np.ndarray | None, values: np.ndarray | None) -> None:
        if to is not None and values is not None:
            to[p, g, first:end] = values[0, i]

    for name in (*_FIELDS, "latents", "experts"):
        copy(getattr(joined, name), getattr(rollout, name))
    if joined.support is not None and rollout.support is not None:
        for to, values in zip(joined.support, rollout.support, strict=True):
            copy(to, values)
    if joined.ends is not None and rollout.ends is not None:
        joined.ends[p, g, first:end] = np.minimum(rollout.ends[0, i] + first, joined.ends.shape[-1])
    joined.finish[p, g] = rollout.finish[0, i]


def _join_segments(
    rows: Sequence[Row], groups: list[list[_Member]], shape: tuple[int, ...]
) -> Segments | None:
    """The segments of rows as arrays; None where no row has any."""
    if all(row.segments is None for row in rows):
        return None
    most = max(len(each) for row in rows for each in row.segments or ((),))
    wide = (*shape[:2], power_of_two(most))
    ids = np.full(shape, -1, np.int32)
    where, values = np.zeros(wide, bool), np.zeros(wide, np.float32)
    for p, (row, group) in enumerate(zip(rows, groups, strict=True)):
        prefix = os.path.commonprefix([each.context for each in group])
        for g, segments in enumerate(row.segments or ()):
            # What is left of the prompt stands before the response.
            first = len(group[g].context) - len(prefix)
            end = first + int(group[g].done.rollout.mask[0, group[g].index].sum())
            for k, (start, value) in enumerate(segments):
                ids[p, g, first + start : end] = k
                where[p, g, k], values[p, g, k] = True, value
    return Segments(ids, where, values)


def _join_scores(groups: list[list[_Member]], size: int) -> Scores:
    """Scores ``[P * G]`` of groups of at most G members; the rest counts as failed."""
    calls = list({id(each.done): each.done for group in groups for each in group}.values())
    graded = [done.scores for done in calls if done.by_run]
    names = {name for scores in graded for name in scores.reward_components}
    detail_names = {name for done in calls for name in done.scores.details}
    sizes = [len(done.texts) for done in calls]
    first = dict(zip(map(id, calls), np.cumsum([0, *sizes[:-1]]), strict=True))
    rows = np.full((len(groups), size), -1)
    for p, group in enumerate(groups):
        rows[p, : len(group)] = [first[id(each.done)] + each.index for each in group]

    def scores(done: Graded) -> Scores:
        """Scores in which a group that the run's reward did not grade has NaN, or None."""
        if done.by_run:
            return done.scores
        absent, no_detail = np.full(len(done.texts), np.nan, np.float32), (None,) * len(done.texts)
        return done.scores._replace(
            reward_components=dict.fromkeys(names, absent),
            details={name: done.scores.details.get(name, no_detail) for name in detail_names},
        )

    return join_scores([scores(done) for done in calls]).take(rows.reshape(-1))
