"""A collector that gives some prompts more rollouts than others, by what the first ones showed."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl_llm.core import ArrayTree, call_with, checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Decision,
    Request,
    Row,
    in_order,
    on_host,
    sized,
)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _TwoPhase:
    """Made by :func:`two_phase`."""

    allocate: Callable
    max_rollouts: int
    first: int | None
    rounds: int
    source: Collector

    def for_run(self, group_size: int, max_new_tokens: int) -> "_TwoPhase":
        size = self.first or group_size
        source = sized(self.source, group_size=size, max_new_tokens=max_new_tokens)
        return dataclasses.replace(self, source=source)

    def width(self, group_size: int) -> int:
        return max(self.max_rollouts, self.first or group_size)

    def init(self, num_prompts: int) -> ArrayTree:
        return self.source.init(num_prompts)

    def propose(self, state, key, collection: Collection, count: int):
        if self.first is not None:
            collection = collection._replace(group_size=self.first)
        return self.source.propose(state, key, collection, count)

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        groups, requests = collection.num_groups, collection.requests
        if len(requests) < groups:
            return Decision(ask=groups - len(requests)), state
        if collection.waiting:
            return Decision(), state
        members: list[list[tuple[int, int]]] = [[] for _ in range(groups)]
        for i, request in enumerate(requests):
            group = i if request.extends is None else request.extends
            members[group] += [(i, j) for j in range(request.rollouts)]
        rounds = requests[-1].round
        if rounds < self.rounds and (extra := self._extra(collection, members, rounds)).any():
            more = enumerate(extra)
            asked = (Request(int(n), extends=i, round=rounds + 1) for i, n in more if n)
            return Decision(requests=tuple(asked)), state
        _, learned = self.source.observe(state, collection)
        return Decision(rows=tuple(Row(tuple(row)) for row in members)), learned

    def _extra(self, collection: Collection, members, rounds: int) -> np.ndarray:
        """How many more rollouts each group gets in the next round: int ``[P]``."""
        most = self.width(collection.group_size)
        rewards = np.zeros((len(members), most), np.float32)
        where = np.zeros(rewards.shape, bool)
        for p, row in enumerate(members):
            for g, (i, j) in enumerate(row):
                rewards[p, g], where[p, g] = (
                    collection.outcomes[i].rewards[j],
                    collection.outcomes[i].where[j],
                )
        counts = np.array([len(row) for row in members])
        first = self.first or collection.group_size
        left = collection.num_groups * collection.group_size - int(counts.sum())
        context = {
            "rewards": rewards,
            "where": where,
            "accuracy": np.float32((rewards * where).sum(-1) / np.maximum(where.sum(-1), 1)),
            "rollouts": first,
            "max_rollouts": most,
            "budget": max(left, 0) // (self.rounds - rounds),
        }
        with on_host():
            extra = np.asarray(call_with(self.allocate, context=context))
        if extra.shape != counts.shape or extra.dtype.kind not in "iu":
            raise ValueError(
                f"{self!r}: the allocator must return {len(counts)} integers; got shape "
                f"{extra.shape} of {extra.dtype}."
            )
        if wrong := [p for p, n in enumerate(extra) if not 0 <= n <= most - counts[p]]:
            p = wrong[0]
            raise ValueError(
                f"{self!r}: the allocator gives group {p}, which has {counts[p]} rollouts, "
                f"{extra[p]} more; from 0 to {most - counts[p]} are left to max_rollouts {most}."
            )
        return extra

    def __repr__(self) -> str:
        text = f"{stable_repr(self.allocate)}, max_rollouts={self.max_rollouts}"
        if self.first is not None:
            text += f", first={self.first}"
        if self.rounds != 1:
            text += f", rounds={self.rounds}"
        if self.source != in_order():
            text += f", source={self.source!r}"
        return f"two_phase({text})"


def two_phase(
    allocate: Callable,
    *,
    max_rollouts: int,
    first: int | None = None,
    rounds: int = 1,
    source: Collector | None = None,
) -> Collector:
    """Asks for a few rollouts of each prompt, then for more of those that an allocator names.

        first rollouts of P prompts -> rewards -> allocate -> extra rollouts -> one group each

    Groups differ in size: the batch is ``[P, max_rollouts]``, and what a group does not have is
    masked. A round waits for the one before it.

    Args:
      allocate: Integers ``[P]`` of rollouts that each group gets in the next round. It names what
        it takes: ``rewards`` and ``where`` ``[P, max_rollouts]``, ``accuracy`` ``[P]`` (mean
        reward), ``rollouts`` (of the first round), ``max_rollouts``, ``budget`` (what is left of
        P G rollouts, divided by the rounds to come), such as
        :func:`~jaxrl_llm.curation.dars_extra_rollouts` and
        :func:`~jaxrl_llm.curation.xrpo_extra_rollouts`.
      max_rollouts: Most rollouts of a group.
      first: Rollouts of the first round; None for G.
      rounds: How often the allocator is asked; it ends earlier once it names no group.
      source: The collector that proposes the prompts; None for :func:`in_order`.

    Returns:
      A collector; its state is that of ``source``.

    Raises:
      TypeError: If ``allocate`` is no function, or a number no integer.
      ValueError: If a number is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.two_phase(jr.curation.dars_extra_rollouts, max_rollouts=32)
      two_phase(dars_extra_rollouts, max_rollouts=32)

    References:
      DARS (arXiv:2508.13755), XRPO (arXiv:2510.06672) and V0 (arXiv:2602.03584), which differ in
      the allocator.
    """
    name = "two_phase"
    if not callable(allocate):
        raise TypeError(f"{name}: allocate must be a function; got {allocate!r}.")
    for option, value in {"max_rollouts": max_rollouts, "first": first, "rounds": rounds}.items():
        if value is None and option == "first":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: {option} must be an integer; got {value!r}.")
        checks.check_positive(name, **{option: value})
    if first is not None and first > max_rollouts:
        raise ValueError(f"{name}: first must be at most max_rollouts {max_rollouts}; got {first}.")
    return _TwoPhase(
        allocate=allocate,
        max_rollouts=max_rollouts,
        first=first,
        rounds=rounds,
        source=in_order() if source is None else source,
    )
