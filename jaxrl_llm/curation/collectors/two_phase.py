"""A collector that gives some prompts more rollouts than others, by what the first ones showed."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxrl_llm.core import ArrayTree, accepted, call_with, checks, traits_of
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    HINTED,
    Collection,
    Collector,
    Decision,
    Request,
    Row,
    in_order,
    more_of,
    on_host,
    sized,
)
from jaxrl_llm.curation.prompts.beliefs import (
    PromptBelief,
    belief_init,
    belief_mean,
    belief_update,
)

__all__ = ["Memory", "TwoPhaseState", "remembered_rates", "two_phase"]


class Memory(Protocol):
    """What an allocator remembers of the prompts from batch to batch.

    ``read`` and ``learn`` name what they take of ``prompts`` (int ``[P]``, places in the data set),
    ``rewards`` and ``where`` ``[P, max_rollouts]``, ``counts`` (int ``[P]``, rollouts of each),
    ``texts`` (of each group, those of its rollouts), and of the Collection ``data``,
    ``takes_text``, ``num_groups`` and ``group_size``.
    """

    def init(self, num_prompts: int) -> ArrayTree:
        """The state before the first batch: arrays whose shapes do not change."""
        ...

    @property
    def read(self) -> Callable[..., Mapping[str, Any]]:
        """``(state, ...) -> mapping``: further arguments that the allocator may name."""
        ...

    @property
    def learn(self) -> Callable[..., ArrayTree]:
        """``(state, ...) -> state``: the update after a complete batch."""
        ...


class TwoPhaseState(NamedTuple):
    """State of a :func:`two_phase` with a memory.

    Attributes:
      source: State of the collector that proposes the prompts.
      memory: State of the memory.
    """

    source: ArrayTree
    memory: ArrayTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rates:
    """Made by :func:`remembered_rates`."""

    prior: tuple[float, float]
    retain: float

    reward_range = (0.0, 1.0)

    def init(self, num_prompts: int) -> PromptBelief:
        return jax.tree.map(np.asarray, belief_init(num_prompts, prior=self.prior))

    def read(self, state: PromptBelief, *, prompts: np.ndarray) -> dict[str, np.ndarray]:
        return {"rates": np.asarray(belief_mean(state))[prompts]}

    def learn(
        self,
        state: PromptBelief,
        *,
        prompts: np.ndarray,
        rewards: np.ndarray,
        where: np.ndarray,
    ) -> PromptBelief:
        learned = belief_update(
            state, prompts, rewards, where=where, retain=self.retain, prior=self.prior
        )
        return jax.tree.map(np.asarray, learned)

    def __repr__(self) -> str:
        return f"remembered_rates(prior={self.prior}, retain={self.retain})"


def remembered_rates(*, prior: tuple[float, float] = (1.0, 1.0), retain: float = 1.0) -> Memory:
    """A memory of every prompt's success rate, which an allocator reads as ``rates`` ``[P]``.

        rates = alpha / (alpha + beta)      before the batch

    Args:
      prior: Pseudo-counts of success and failure of a prompt without rollouts.
      retain: See :func:`~jaxrl_llm.curation.belief_update`.

    Returns:
      A :class:`Memory` whose state is a PromptBelief ``[N]``.

    Raises:
      ValueError: If an option is out of its range.

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> memory = jr.curation.remembered_rates()
      >>> memory.read(memory.init(4), prompts=np.array([2]))["rates"].tolist()
      [0.5]

    References:
      SPO (arXiv:2509.13232) tracks success rates this way; V0 (arXiv:2602.03584) and V_0.5
      (arXiv:2603.10848) predict them with a separate model.
    """
    prior = (float(prior[0]), float(prior[1]))
    belief_init(1, prior=prior)  # checks it
    checks.check_share("remembered_rates", retain=retain)
    return _Rates(prior=prior, retain=retain)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _TwoPhase:
    """Made by :func:`two_phase`."""

    allocate: Callable
    max_rollouts: int
    first: int | None
    rounds: int
    source: Collector
    memory: Memory | None
    text: Callable | None

    @property
    def needs(self) -> Needs:
        of_text = Needs(sends_text=True, mixes_texts=True) if self.text is not None else Needs()
        return needs_of_sources(self.source) | of_text | Needs(asks_again=True, grades_apart=True)

    def for_run(self, group_size: int, max_new_tokens: int) -> "_TwoPhase":
        first = self.first or group_size
        source = sized(self.source, group_size=first, max_new_tokens=max_new_tokens)
        return dataclasses.replace(self, source=source)

    def check_sizes(self, data: Sequence[Mapping], *, group_size: int, num_groups: int) -> None:
        """Raises ValueError if the sizes leave the allocator no choice."""
        del data, num_groups
        size, most = self.first or group_size, self.max_rollouts
        if size >= most:
            raise ValueError(
                f"{self!r}: max_rollouts {most} must be above the {size} rollouts of the first "
                "round (first, or group_size), or no prompt can get more."
            )
        if "budget" in accepted(self.allocate) and group_size <= size:
            raise ValueError(
                f"{self!r}: for its allocator to have a budget, group_size must be above the "
                f"{size} rollouts of the first round (first); got {group_size}."
            )
        if traits_of(self.allocate).spends_budget and group_size >= most:
            raise ValueError(
                f"{self!r}: for its allocator to have a choice, group_size must be below "
                f"max_rollouts {most}, or each prompt gets so many; got {group_size}."
            )

    def width(self, group_size: int) -> int:
        return max(self.max_rollouts, self.first or group_size)

    def init(self, num_prompts: int) -> ArrayTree:
        source = self.source.init(num_prompts)
        if self.memory is None:
            return source
        return TwoPhaseState(source, self.memory.init(num_prompts))

    def propose(self, state, key, collection: Collection, count: int):
        if self.first is not None:
            collection = collection._replace(group_size=self.first)
        if self.memory is None:
            return self.source.propose(state, key, collection, count)
        requests, source = self.source.propose(state.source, key, collection, count)
        return requests, state._replace(source=source)

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
        # What the groups have shown so far, as the functions of this collector name it.
        shape = (groups, self.width(collection.group_size))
        rewards, where = np.zeros(shape, np.float32), np.zeros(shape, bool)
        for p, row in enumerate(members):
            for g, (i, j) in enumerate(row):
                outcome = collection.outcome(i)
                rewards[p, g], where[p, g] = outcome.rewards[j], outcome.where[j]
        every = [[collection.outcome(i) for i in dict.fromkeys(i for i, _ in m)] for m in members]
        context = {
            "prompts": np.array([int(outcomes[0].prompt) for outcomes in every]),
            "rewards": rewards,
            "where": where,
            "accuracy": np.float32((rewards * where).sum(-1) / np.maximum(where.sum(-1), 1)),
            "counts": np.array([len(row) for row in members]),
            "texts": [[text for outcome in x for text in outcome.texts] for x in every],
            "data": collection.data,
            "takes_text": collection.takes_text,
            "num_groups": groups,
            "group_size": collection.group_size,
        }
        if (done := requests[-1].round) < self.rounds:
            memory = state.memory if self.memory is not None else None
            if more := self._more(memory, collection, context, done):
                return Decision(requests=more), state
        source = state if self.memory is None else state.source
        first = collection._replace(
            requests=requests[:groups], outcomes=collection.outcomes[:groups]
        )
        _, learned = self.source.observe(source, first)
        if self.memory is not None:
            with on_host():
                memory = call_with(self.memory.learn, state.memory, context=context)
            learned = TwoPhaseState(learned, memory)
        return Decision(rows=tuple(Row(tuple(row)) for row in members)), learned

    def _more(
        self, memory: ArrayTree, collection: Collection, context: dict[str, Any], done: int
    ) -> tuple[Request, ...]:
        """The requests of the next round."""
        groups, counts = collection.num_groups, context["counts"]
        left = groups * collection.group_size - int(counts.sum())
        context = context | {
            "rollouts": self.first or collection.group_size,
            "max_rollouts": self.width(collection.group_size),
            "budget": max(left, 0) // (self.rounds - done),
        }
        if self.memory is not None:
            with on_host():
                context |= call_with(self.memory.read, memory, context=context)
        columns, most = _columns(self, self.allocate, context), context["max_rollouts"]
        with on_host():
            extra = np.asarray(call_with(self.allocate, context=context | columns))
        if extra.dtype == bool:
            extra = extra & (counts < most)
        if extra.shape != counts.shape or extra.dtype.kind not in "iub":
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
        # A group of which nothing is known gets no more: its accuracy of 0 only stands for none.
        extra = np.where(context["where"].any(axis=-1), extra, 0)
        texts: list[str | None] = [None] * groups
        if self.text is not None:
            texts = call_with(self.text, context=context | {"memory": memory})
        requests = []
        for p in np.flatnonzero(extra).tolist():
            request = more_of(collection.requests[p], int(extra[p]))
            request = request._replace(extends=p, round=done + 1)
            if (text := texts[p]) is not None:
                request = request._replace(text=text, role=HINTED)
            requests.append(request)
        return tuple(requests)

    def __repr__(self) -> str:
        text = f"{stable_repr(self.allocate)}, max_rollouts={self.max_rollouts}"
        if self.first is not None:
            text += f", first={self.first}"
        if self.rounds != 1:
            text += f", rounds={self.rounds}"
        if self.source != in_order():
            text += f", source={self.source!r}"
        for name in ("memory", "text"):
            if (value := getattr(self, name)) is not None:
                text += f", {name}={stable_repr(value)}"
        return f"two_phase({text})"


def _columns(collector, function: Callable, context: dict[str, Any]) -> dict[str, np.ndarray]:
    """Numbers of the prompts' rows ``[P]`` that a function names and nothing else brings."""
    columns = {}
    for name, parameter in accepted(function).items():
        # `connect` names a place that it fills from elsewhere with an underscore.
        optional = parameter.default is not inspect.Parameter.empty or name.startswith("_")
        if optional or name in context:
            continue
        rows = [context["data"][p] if len(context["data"]) else {} for p in context["prompts"]]
        values = [row.get(name) for row in rows]
        for prompt, value in zip(context["prompts"], values, strict=True):
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise ValueError(
                    f"{collector!r} reads a number {name!r} of every prompt; prompt {prompt} of "
                    f"the data has {value!r}."
                )
        columns[name] = np.asarray(values, np.float32)
    return columns


def two_phase(
    allocate: Callable,
    *,
    max_rollouts: int,
    first: int | None = None,
    rounds: int = 1,
    source: Collector | None = None,
    memory: Memory | None = None,
    text: Callable | None = None,
) -> Collector:
    """Samples a few rollouts of each prompt, then more for the prompts that an allocator selects.

        first rollouts of P prompts -> rewards -> allocate -> extra rollouts -> one group each

    Groups differ in size: the batch is ``[P, max_rollouts]``, and unused places are masked. Each
    round waits for the previous one.

    Args:
      allocate: Integers ``[P]`` of rollouts that each group gets in the next round, or bools for
        one more each. It names what it takes: ``rewards`` and ``where`` ``[P, max_rollouts]``,
        ``accuracy`` ``[P]`` (mean reward), ``counts`` ``[P]`` (rollouts so far), ``rollouts`` (of
        the first round), ``max_rollouts``, ``budget`` (the rest of P G rollouts, divided by
        the remaining rounds), the results of the memory, and numeric columns of the data. See
        :func:`~jaxrl_llm.curation.dars_extra_rollouts` and
        :func:`~jaxrl_llm.curation.xrpo_extra_rollouts`.
      max_rollouts: Maximum number of rollouts of a group.
      first: Rollouts of the first round; None for G.
      rounds: Maximum number of calls of the allocator; sampling ends when it selects no group.
      source: The collector that proposes the prompts; None for :func:`in_order`.
      memory: State for the allocator, such as :func:`remembered_rates`; None for no state.
      text: The message of the further rollouts of each group, a list of P with None for the
        prompt's own. It names what it takes of the allocator's context and ``memory``, the state.

    Returns:
      A collector; its state is that of ``source``, or a :class:`TwoPhaseState` with a memory.

    Raises:
      TypeError: If ``allocate`` is not a function, or a number is not an integer.
      ValueError: If a number is out of its range; in a run, if an allocation is out of range, a
        prompt lacks a column that the allocator names, or G leaves the allocator no choice:
        ``max_rollouts`` must be above the first rollouts, so must G for an allocator that takes a
        ``budget``, and below ``max_rollouts`` for one that spends all of it.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.two_phase(jr.curation.dars_extra_rollouts, max_rollouts=32)
      two_phase(dars_extra_rollouts, max_rollouts=32)

    References:
      DARS (arXiv:2508.13755), XRPO (arXiv:2510.06672), V0 (arXiv:2602.03584) and V_0.5
      (arXiv:2603.10848), which differ in the allocator.
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
        source=prompt_source(name, source),
        memory=memory,
        text=text,
    )
