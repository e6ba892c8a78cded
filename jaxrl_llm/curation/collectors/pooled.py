"""A pool of successes, and fewer rollouts for easy prompts: the data collection of DART."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.core import Array, ArrayTree, checks
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    OWN,
    Collection,
    Collector,
    Decision,
    Row,
    on_host,
    resized,
    sized,
    stack_outcomes,
)
from jaxrl_llm.curation.collectors.replayed import replayed, store_groups, stored_request
from jaxrl_llm.curation.collectors.visits import in_epochs
from jaxrl_llm.curation.recycling import adaptive_rollouts, pooled_groups
from jaxrl_llm.curation.replay import ReplayBuffer

__all__ = ["PooledState", "pooled"]


class PooledState(NamedTuple):
    """State of :func:`pooled`.

    Attributes:
      recent: float32 ``[N, H]``, a ring of the rewards of each prompt's latest rollouts.
      count: int32 ``[N]``, rollouts of each prompt so far.
      pool: A buffer of successes, groups of one rollout, the newest of each prompt.
      source: State of the collector that proposes the prompts.
      digests: int32 ``[N]``, digest of the prompt tokens that the newest success answers.
      turns: int32 ``[N]``, turns of the longest successful episode; 0 for none.
    """

    recent: Array
    count: Array
    pool: ReplayBuffer
    source: ArrayTree
    digests: Array
    turns: Array


def _digest(tokens: Sequence[int]) -> int:
    """Of a prompt: an environment may begin otherwise than when it was played before."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) & 0x7FFFFFFF


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Pooled:
    """Made by :func:`pooled`."""

    capacity: int
    low: int
    high: int | None
    threshold: float
    max_accuracy: float
    max_staleness: int | None
    source: Collector
    max_new_tokens: int | None = None

    @property
    def needs(self) -> Needs:
        return needs_of_sources(self.source) | Needs(
            asks_again=True, grades_apart=True, repeats_starts=True
        )

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Pooled":
        high = group_size if self.high is None else self.high
        if high < self.low:
            raise ValueError(f"{self!r}: low is above the {high} rollouts of a group.")
        source = sized(self.source, group_size=high, max_new_tokens=max_new_tokens)
        return dataclasses.replace(self, high=high, source=source, max_new_tokens=max_new_tokens)

    def width(self, group_size: int) -> int:
        return group_size if self.high is None else self.high

    def init(self, num_prompts: int) -> PooledState:
        if self.high is None or self.max_new_tokens is None:
            raise ValueError(
                f"{self!r}: the size of its pool is unknown before "
                "for_run(group_size, max_new_tokens)."
            )
        store = replayed(capacity=self.capacity, share=0.5)
        return PooledState(
            recent=np.zeros((num_prompts, self.high), np.float32),
            count=np.zeros(num_prompts, np.int32),
            pool=sized(store, group_size=1, max_new_tokens=self.max_new_tokens)
            .init(num_prompts)
            .buffer,
            source=self.source.init(num_prompts),
            digests=np.zeros(num_prompts, np.int32),
            turns=np.zeros(num_prompts, np.int32),
        )

    def propose(self, state: PooledState, key, collection: Collection, count: int):
        requests, source = self.source.propose(state.source, key, collection, count)
        prompts = [request.prompt for request in requests if request.prompt is not None]
        if len(prompts) < len(requests):
            raise ValueError(f"{self!r}: the source must name its prompts, as in_epochs does.")
        at, high = np.array(prompts, np.int32), state.recent.shape[-1]
        seen = np.minimum(state.count[at], high)
        rates = state.recent[at].sum(axis=-1) / np.maximum(seen, 1)
        with on_host():
            sizes = adaptive_rollouts(
                np.float32(rates), low=self.low, high=high, threshold=self.threshold
            )
        sizes = np.where(seen > 0, np.asarray(sizes), high)
        limits = state.turns[at] * collection.plays  # 0 for none
        return tuple(
            resized(request, int(size))._replace(turns=int(most) or None)
            for request, size, most in zip(requests, sizes, limits, strict=True)
        ), state._replace(source=source)

    def observe(self, state: PooledState, collection: Collection):
        P, requests = collection.num_groups, collection.requests
        if len(requests) < P:
            return Decision(ask=P - len(requests)), state
        if collection.waiting:
            return Decision(), state
        part = collection._replace(requests=requests[:P], outcomes=collection.outcomes[:P])
        outcomes = [collection.outcome(i) for i in range(P)]
        groups = stack_outcomes(outcomes, rows=P)
        # Where in the pool the success of each prompt is, -1 for none.
        pool = state.pool
        usable = pool.order >= 0
        if self.max_staleness is not None:
            usable &= collection.step - pool.versions <= self.max_staleness
        same = (pool.prompt_ids == np.asarray(groups.prompt)[:, None]) & usable
        digests = np.array([_digest(outcome.prompt_tokens) for outcome in outcomes], np.int32)
        same &= (state.digests[np.asarray(groups.prompt)] == digests)[:, None]
        places = np.where(same.any(axis=-1), same.argmax(axis=-1), -1)
        with on_host():
            # The rollouts of a batch are of one age, so that the first one gives way.
            judged = pooled_groups(
                groups.rewards,
                age=np.zeros_like(groups.rewards),
                stored=places >= 0,
                count=1,
                where=groups.where,
                max_accuracy=self.max_accuracy,
            )
        replace, keep = np.asarray(judged.replace), np.asarray(judged.keep)
        failed = np.flatnonzero(replace >= 0)
        if len(requests) == P and len(failed):
            stored = []
            for p in failed:
                request = stored_request(pool, int(places[p]), version=collection.step)
                responses = request.responses
                if not collection.plays:  # a success is graded again
                    responses = tuple(each._replace(reward=None) for each in responses)
                stored.append(
                    request._replace(responses=responses, prompt=None, extends=int(p), round=1)
                )
            return Decision(requests=tuple(stored)), state
        rows = []
        for p in range(P):
            members = [(p, j) for j in range(requests[p].rollouts)]
            if replace[p] >= 0:
                members[replace[p]] = (P + int(np.flatnonzero(failed == p)[0]), 0)
            rows.append(Row(tuple(members), takes_part=bool(keep[p])))
        _, source = self.source.observe(state.source, part)
        return Decision(rows=tuple(rows)), self._learned(state, part, source)

    def _learned(self, state: PooledState, part: Collection, source: ArrayTree) -> PooledState:
        """The state with the rewards and the successes of a batch."""
        recent, count = state.recent.copy(), state.count.copy()
        digests, turns = state.digests.copy(), state.turns.copy()
        successes, prompts = [], []
        for i in range(part.num_groups):
            outcome = part.outcome(i)
            prompt, valid = int(outcome.prompt), np.flatnonzero(outcome.where)
            for j in valid:
                recent[prompt, count[prompt] % recent.shape[-1]] = max(outcome.rewards[j], 0.0)
                count[prompt] += 1
            right = [j for j in valid if outcome.rewards[j] > 0]
            for j in right:
                if (starts := outcome.responses[j].turn_starts) is not None:
                    turns[prompt] = max(turns[prompt], len(starts) + 1)
            # Of an episode that the chat template rewrote, the buffer has not what was left.
            right = [j for j in right if outcome.responses[j].ends is None]
            if right and part.requests[i].role == OWN:
                response = outcome.responses[right[-1]]
                digests[prompt] = _digest(outcome.prompt_tokens)
                reward = float(outcome.rewards[right[-1]])
                successes.append([response._replace(reward=reward)])
                prompts.append(prompt)
        pool = state.pool
        if successes:
            scores = np.zeros(len(successes), np.float32)
            pool = store_groups(pool, successes, prompts=prompts, scores=scores, unique=True)
        return PooledState(recent, count, pool, source, digests, turns)

    def __repr__(self) -> str:
        defaults = {"low": 1, "high": None, "threshold": 0.6, "max_accuracy": 1.0}
        shown = [f"capacity={self.capacity}"]
        for name, default in (defaults | {"max_staleness": None}).items():
            if (value := getattr(self, name)) != default:
                shown.append(f"{name}={value}")
        if self.source != in_epochs():
            shown.append(f"source={self.source!r}")
        return f"pooled({', '.join(shown)})"


def pooled(
    *,
    capacity: int = 1024,
    low: int = 1,
    high: int | None = None,
    threshold: float = 0.6,
    max_accuracy: float = 1.0,
    max_staleness: int | None = None,
    source: Collector | None = None,
) -> Collector:
    """Fewer rollouts for easy prompts, and a stored success if all rollouts fail.

        rollouts of a prompt = adaptive_rollouts(mean max(reward, 0) of its latest ones)
        all failed:  the newest success of the prompt replaces the first rollout
        turns of an episode <= those of the longest successful one of its task
        dropped:     mean reward >= max_accuracy, or all failed and there is no success

    A rollout with a reward above 0 is a success. A success from the pool is graded again, except
    for an episode, which has its reward on its last turn and is not used if the environment now
    starts with other tokens. The limit of turns and a stored episode are of one beginning of the
    task, so a run resets an environment with the same seed whenever the task returns. A prompt
    without rollouts so far gets ``high``. Dropped groups do not train and are not replaced.

    Args:
      capacity: C, number of prompts with a stored success; the oldest is removed first.
      low: Minimum rollouts of a prompt.
      high: Maximum rollouts; None for G.
      threshold: Success rate from which a prompt gets fewer rollouts, above 0.
      max_accuracy: Mean reward from which a prompt is mastered.
      max_staleness: Successes older than this many versions of the weights are not used; None for
        no bound.
      source: The collector that proposes the prompts, by name; None for :func:`in_epochs`.

    Returns:
      A collector; its state is a :class:`PooledState`.

    Raises:
      ValueError: If a number is out of its range, or ``source`` also decides on groups that have
        finished; in a run, if it does not name its prompts.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.pooled(capacity=64, high=8)
      pooled(capacity=64, high=8)

    References:
      DART (arXiv:2509.23866) and its released code, whose asynchronous sampler fills a group with
      rollouts of the two newest policies; here a group is of one batch, and of one policy. See
      :func:`~jaxrl_llm.curation.pooled_groups` and :func:`~jaxrl_llm.curation.adaptive_rollouts`.
    """
    name = "pooled"
    checks.check_count(name, capacity=capacity, low=low)
    if high is not None:
        checks.check_count(name, high=high)
        if high < low:
            raise ValueError(f"{name}: high must not be below low; got {high} and {low}.")
    checks.check_positive(name, finite=True, threshold=threshold, max_accuracy=max_accuracy)
    checks.check_non_negative(name, max_staleness=max_staleness)
    return _Pooled(
        capacity=capacity,
        low=low,
        high=high,
        threshold=float(threshold),
        max_accuracy=float(max_accuracy),
        max_staleness=max_staleness,
        source=prompt_source(name, in_epochs() if source is None else source),
    )
