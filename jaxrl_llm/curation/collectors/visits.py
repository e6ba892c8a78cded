"""Collectors that choose their prompts, in epochs shuffled by a seed.

:func:`in_order` takes the next prompts of the run, which the collector learns only after its
request. A request may depend on the prompt, for example on the level of its hint or on a part of a
correct response. The collectors here go through the data in an order given by a seed and store
their position.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jaxrl_llm.core import ArrayTree, bind, checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.hints.hinted import solution_of
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    HINTED,
    Collection,
    Collector,
    Decision,
    Request,
    Response,
    computed_once,
    in_order,
    on_host,
    sized,
)
from jaxrl_llm.curation.hints import hint_level, prefix_cuts
from jaxrl_llm.curation.plans import stage_mask

__all__ = ["hint_levels", "in_epochs", "prefixed", "staged"]


def next_visits(
    visits: Mapping[str, np.ndarray], *, count: int, seed: int, where: np.ndarray | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The next entries of endless shuffled epochs, and the position after them.

    Args:
      visits: ``epoch``, ``index`` and ``size``, the entries of an epoch: int32 ``[]`` each.
      count: Number of entries.
      seed: Seed of the order.
      where: bool ``[size]``, the entries that take part; None for all.

    Returns:
      int ``[count]``, from 0 to ``size`` - 1, and the visits after them.
    """
    epoch, index, size = (int(visits[name]) for name in ("epoch", "index", "size"))
    where = np.ones(size, bool) if where is None else where
    parts = [np.zeros(0, np.int64)]
    while count:
        order = np.random.default_rng((seed, epoch)).permutation(size)
        places = index + np.flatnonzero(where[order[index:]])[:count]
        parts.append(order[places])
        count -= len(places)
        index = size if count else int(places[-1]) + 1
        if index == size:
            epoch, index = epoch + 1, 0
    return np.concatenate(parts), _visits(size, epoch, index)


def _visits(size: int, epoch: int = 0, index: int = 0) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(value, np.int32)
        for name, value in {"epoch": epoch, "index": index, "size": size}.items()
    }


def _order_seed(seed: int | None, collection: Collection) -> int:
    """The seed of an order: a collector's own, or the run's."""
    return collection.seed if seed is None else seed


def _proposed(collection: Collection) -> int:
    """How many groups of a batch have been proposed."""
    return sum(request.extends is None for request in collection.requests)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _InEpochs:
    """Made by :func:`in_epochs`."""

    seed: int | None = None
    needs: ClassVar[Needs] = Needs(counts_groups=True)

    def init(self, num_prompts: int) -> ArrayTree:
        return _visits(num_prompts)

    def _where(self, collection: Collection) -> np.ndarray | None:
        """Bool, the prompts that take part; None for all."""
        del collection
        return None

    def _next(self, visits, collection: Collection, count: int) -> tuple[np.ndarray, ArrayTree]:
        """The next prompts, and the position after them."""
        seed, where = _order_seed(self.seed, collection), self._where(collection)
        return next_visits(visits, count=count, seed=seed, where=where)

    def propose(self, state, key, collection: Collection, count: int):
        del key
        first = _proposed(collection)
        prompts, _ = self._next(state, collection, first + count)
        return tuple(Request(collection.group_size, int(i)) for i in prompts[first:]), state

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        decision, _ = in_order().observe((), collection)
        if decision.rows is None and (collection.waiting or not collection.requests):
            return decision, state
        return decision, self._next(state, collection, _proposed(collection))[1]

    def __repr__(self) -> str:
        return "in_epochs()" if self.seed is None else f"in_epochs(seed={self.seed})"


def in_epochs(*, seed: int | None = None) -> Collector:
    """Each prompt once per epoch, in an order that the collector chooses and stores.

    Unlike :func:`in_order` it chooses its prompts, for collectors whose requests depend on them.

    Args:
      seed: Seed of the order, not negative; None for that of the run, ``data.seed``.

    Returns:
      A collector; its state is the position in the epochs.

    Raises:
      ValueError: If ``seed`` is negative.

    Example:
      >>> import jaxrl_llm as jr
      >>> source, place = jr.curation.in_epochs(), jr.curation.Collection(2, 4)
      >>> requests, _ = source.propose(source.init(3), None, place, 3)
      >>> sorted(request.prompt for request in requests)
      [0, 1, 2]

    References:
      Shuffled passes over the data, as in verl, TRL and tunix.
    """
    if seed is not None:
        checks.check_seed("in_epochs", seed=seed)
    return _InEpochs(seed=seed)


def _stages(data: Sequence[Mapping[str, Any]], *, column: str) -> np.ndarray:
    return np.array([row[column] for row in data], np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Staged(_InEpochs):
    """Made by :func:`staged`."""

    boundaries: tuple[int, ...]
    column: str = "stage"

    def check_data(self, data: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if a row has no stage, or none is open in the first step."""
        for row in data:
            stage, name = row.get(self.column), row.get("id") or row["text"][:40]
            if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
                raise ValueError(
                    f"staged: {self.column!r} of prompt {name!r} must be an integer from 0 on; got "
                    f"{stage!r}."
                )
            if stage > len(self.boundaries):
                raise ValueError(
                    f"staged: {self.column!r} of prompt {name!r} is {stage}, which never opens: "
                    f"boundaries {self.boundaries} open stages up to {len(self.boundaries)}."
                )
        self._open(data, 0)

    def _where(self, collection: Collection) -> np.ndarray:
        return self._open(collection.data, collection.step)

    def _open(self, data: Sequence[Mapping[str, Any]], step: int) -> np.ndarray:
        """Bool, the prompts that take part."""
        stages = computed_once(data, bind(_stages, column=self.column))
        with on_host():
            there = np.asarray(stage_mask(stages, step, boundaries=self.boundaries))
        if not there.any():
            raise ValueError(f"staged: no {self.column!r} of a prompt is open at step {step}.")
        return there

    def __repr__(self) -> str:
        seed = "" if self.seed is None else f", seed={self.seed}"
        return f"staged({self.boundaries}, column={self.column!r}{seed})"


def staged(
    boundaries: Sequence[int], *, column: str = "stage", seed: int | None = None
) -> Collector:
    """Prompts of the stages reached so far, from easy to hard, in shuffled epochs.

        a prompt takes part if stage <= number of boundaries that are at most the step

    Args:
      boundaries: Steps at which the next stage begins, increasing.
      column: The column with the stage of each prompt, an integer from 0, for example by the
        length of its plan.
      seed: Seed of the order, not negative; None for that of the run, ``data.seed``.

    Returns:
      A collector; its state is the place in the epochs.

    Raises:
      ValueError: If the boundaries do not increase or ``seed`` is negative; in a run, if a row
        has no stage or a stage that never begins, or if no row is in a stage reached so far.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.staged((100, 200))
      staged((100, 200), column='stage')

    References:
      Structured preference optimization (arXiv:2502.20742), which trains from easy to hard; see
      :func:`~jaxrl_llm.curation.stage_mask`. Confidence: ABSTRACT.
    """
    if seed is not None:
        checks.check_seed("staged", seed=seed)
    stage_mask(np.zeros(0, np.int32), 0, boundaries=boundaries)
    return _Staged(boundaries=tuple(boundaries), column=column, seed=seed)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _HintLevels:
    """Made by :func:`hint_levels`."""

    messages: Callable[[Mapping[str, Any]], Sequence[str]]
    low: float
    high: float
    max_level: int
    threshold: float
    source: Collector

    @property
    def needs(self) -> Needs:
        return needs_of_sources(self.source) | Needs(sends_text=True)

    def for_run(self, group_size: int, max_new_tokens: int) -> Collector:
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        return dataclasses.replace(self, source=source)

    def check_data(self, data: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if a row has not what the messages read."""
        for row in data:
            self.messages(row)

    def init(self, num_prompts: int) -> ArrayTree:
        return {
            "level": np.zeros(num_prompts, np.int32),
            "accuracy": np.full(num_prompts, np.nan, np.float32),
            "source": self.source.init(num_prompts),
        }

    def propose(self, state, key, collection: Collection, count: int):
        plain, _ = self.source.propose(state["source"], key, collection, count)
        prompts = [request.prompt for request in plain if request.prompt is not None]
        if len(prompts) < len(plain):
            raise ValueError(f"{self!r}: the source must name its prompts, as in_epochs does.")
        levels = self._levels(state, prompts)
        requests = []
        for request, prompt, level in zip(plain, prompts, levels, strict=True):
            texts = []
            if level:
                texts = [
                    x for x in self.messages(collection.data[prompt]) if collection.takes_text(x)
                ]
            if texts:
                text = texts[min(level, len(texts)) - 1]
                request = request._replace(text=text, role=HINTED)
            requests.append(request)
        return tuple(requests), state

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        decision, _ = in_order().observe((), collection)
        if decision.rows is None:
            return decision, state
        outcomes = [outcome for outcome in collection.outcomes if outcome is not None]
        level, accuracy = state["level"].copy(), state["accuracy"].copy()
        before = self._levels(state, [int(outcome.prompt) for outcome in outcomes])
        for used, outcome in zip(before, outcomes, strict=True):
            if not (where := np.asarray(outcome.where)).any():
                continue
            level[outcome.prompt] = used
            accuracy[outcome.prompt] = np.mean(outcome.rewards[where] > self.threshold)
        _, source = self.source.observe(state["source"], collection)
        return decision, {"level": level, "accuracy": accuracy, "source": source}

    def _levels(self, state, prompts: list[int]) -> list[int]:
        """The levels at which prompts are asked in this batch."""
        with on_host():
            levels = hint_level(
                state["level"][prompts],
                state["accuracy"][prompts],
                low=self.low,
                high=self.high,
                max_level=self.max_level,
            )
        return np.asarray(levels).tolist()

    def __repr__(self) -> str:
        text = f"{stable_repr(self.messages)}, low={self.low:g}, high={self.high:g}"
        if self.max_level != 3:
            text += f", max_level={self.max_level}"
        if self.threshold:
            text += f", threshold={self.threshold:g}"
        if self.source != in_epochs():
            text += f", source={self.source!r}"
        return f"hint_levels({text})"


def hint_levels(
    messages: Callable[[Mapping[str, Any]], Sequence[str]],
    *,
    low: float = 0.1,
    high: float = 0.35,
    max_level: int = 3,
    threshold: float = 0.0,
    source: Collector | None = None,
) -> Collector:
    """Each prompt with a hint whose level follows the prompt's accuracy at its last visit.

        level + 1 where accuracy <= low, level - 1 where accuracy > high, 0 at the first visit

    Args:
      messages: ``row -> (message, ...)``, one per level from 1; higher levels use the last.
      low, high, max_level: See :func:`~jaxrl_llm.curation.hint_level`.
      threshold: Largest reward that counts as a failure.
      source: A collector that chooses its prompts; None for :func:`in_epochs`.

    Returns:
      A collector; its state is the level and the accuracy of each prompt, and that of ``source``.

    Raises:
      TypeError: If ``messages`` is not a function.
      ValueError: If an option is out of its range, or the source does not choose its prompts or
        also decides on groups that have finished.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.hint_levels(jr.curation.tier_messages)
      hint_levels(tier_messages, low=0.1, high=0.35)

    References:
      SAGE-light (arXiv:2602.03143). Its released code writes new hints at each visit; here they
      come from the data.
    """
    name = "hint_levels"
    if not callable(messages):
        raise TypeError(f"{name}: messages must be a function; got {messages!r}.")
    checks.check_share(name, low=low, high=high)
    checks.check_count(name, max_level=max_level)
    if low > high:
        raise ValueError(f"{name}: low must not be above high; got {low:g} and {high:g}.")
    return _HintLevels(
        messages=messages,
        low=low,
        high=high,
        max_level=int(max_level),
        threshold=threshold,
        source=prompt_source(name, in_epochs() if source is None else source),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Prefixed:
    """Made by :func:`prefixed`."""

    column: str
    cuts: int
    low: float
    high: float
    seed: int | None
    max_new_tokens: int | None = dataclasses.field(default=None, repr=False)  # of the run

    needs: ClassVar[Needs] = Needs(slots=True, brings_responses=True)

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Prefixed":
        del group_size
        return dataclasses.replace(self, max_new_tokens=max_new_tokens)

    def check_data(self, data: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if a row has no trace."""
        for row in data:
            if row.get(self.column) is not None:
                solution_of("prefixed", row, self.column)
        if not any(row.get(self.column) is not None for row in data):
            raise ValueError(f"{self!r}: no prompt has {self.column!r} in its row.")

    def init(self, num_prompts: int) -> ArrayTree:
        return _visits(num_prompts * (self.cuts + 1))

    def propose(self, state, key, collection: Collection, count: int):
        del key
        first, prompts = _proposed(collection), int(state["size"]) // (self.cuts + 1)
        seed = _order_seed(self.seed, collection)
        entries, _ = next_visits(state, count=first + count, seed=seed)
        requests = []
        for entry in entries[first:]:
            cut, prompt = divmod(int(entry), prompts)
            request = Request(collection.group_size, prompt)
            prefix, row = (), collection.data[prompt] if cut else {}
            if row.get(self.column) is not None:
                # The tokens of its trace up to one of the cuts.
                trace = solution_of("prefixed", row, self.column)
                tokens = collection.encode(trace) if isinstance(trace, str) else trace
                with on_host():
                    key = jax.random.fold_in(jax.random.key(seed), prompt)
                    length = np.int32(len(tokens))
                    ends = prefix_cuts(key, length, cuts=self.cuts, low=self.low, high=self.high)
                most = len(tokens) if self.max_new_tokens is None else self.max_new_tokens - 1
                prefix = tokens[: min(int(ends[cut - 1]), most)]
            if len(prefix):
                begins = Response(np.int32(prefix), trains=np.zeros(len(prefix), bool))
                request = request._replace(responses=(begins,) * request.rollouts, role=HINTED)
            requests.append(request)
        return tuple(requests), state

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        decision, _ = in_order().observe((), collection)
        if decision.rows is None:
            return decision, state
        seed = _order_seed(self.seed, collection)
        return decision, next_visits(state, count=_proposed(collection), seed=seed)[1]

    def __repr__(self) -> str:
        text = f"cuts={self.cuts}, low={self.low:g}, high={self.high:g}"
        if self.column != "demonstration":
            text = f"column={self.column!r}, {text}"
        return f"prefixed({text}{'' if self.seed is None else f', seed={self.seed}'})"


def prefixed(
    *,
    column: str = "demonstration",
    cuts: int = 3,
    low: float = 0.4,
    high: float = 0.8,
    seed: int | None = None,
) -> Collector:
    """The prompts, and each of them again with several prefixes of a correct response.

        epoch = N plain prompts and N * cuts that begin with trace[:h], h = floor(u length)
        u uniform in [low, high), drawn once

    Each of these is a separate prompt with its own group and baseline. No token of a prefix is
    trained. A prompt without a trace occurs equally often, without a prefix.

    Args:
      column: The column with a correct response, a text or token ids.
      cuts: Number of prefixes of each trace.
      low, high: Smallest and largest share, see :func:`~jaxrl_llm.curation.prefix_cuts`.
      seed: Seed of the cuts and of the order; None for that of the run, ``data.seed``.

    Returns:
      A collector; its state is the position in the epochs.

    Raises:
      ValueError: If an option is out of its range; from its ``check_data``, if no prompt has a
        trace, or one is neither a text nor token ids.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.prefixed(cuts=2)
      prefixed(cuts=2, low=0.4, high=0.8)

    References:
      PrefixRL (arXiv:2601.18795), PAPER reading.
    """
    name = "prefixed"
    checks.check_count(name, cuts=cuts)
    checks.check_share(name, low=low, high=high)
    if seed is not None:
        checks.check_seed(name, seed=seed)
    if low > high:
        raise ValueError(f"{name}: low must not be above high; got {low:g} and {high:g}.")
    return _Prefixed(column=column, cuts=int(cuts), low=low, high=high, seed=seed)
