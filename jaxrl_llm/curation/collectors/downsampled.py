"""A collector that samples more rollouts of a prompt than train, and selects among them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core import ArrayTree, call_with, checks
from jaxrl_llm.core.compose import accepted, stable_repr
from jaxrl_llm.curation.collectors.needs import Needs, needs_of, needs_of_sources
from jaxrl_llm.curation.collectors.on_source import evaluation_text_of
from jaxrl_llm.curation.collectors.protocol import (
    GRADED_BY_RUN,
    Collection,
    Collector,
    Decision,
    Row,
    for_batch_of,
    in_order,
    on_host,
    sized,
)

__all__ = ["DownsampledState", "downsampled"]

# What a rule may read besides the components of the reward.
_OWN_NAMES = ("rewards", "where", "lengths", "truncated", "count", "key")


class DownsampledState(NamedTuple):
    """State of :func:`downsampled`.

    Attributes:
      key: uint32, data of the key of the current batch, for a rule that draws; else ``()``.
      source: State of the collector that proposes the prompts.
    """

    key: ArrayTree
    source: ArrayTree


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Downsampled:
    """Made by :func:`downsampled`."""

    rule: Callable
    oversample: int
    regrade: Callable | None
    source: Collector

    @property
    def needs(self) -> Needs:
        return needs_of_sources(self.source) | Needs(asks_again=True)

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Downsampled":
        size = self.group_size_of_source(group_size)
        source = sized(self.source, group_size=size, max_new_tokens=max_new_tokens)
        return dataclasses.replace(self, source=source)

    def group_size_of_source(self, group_size: int) -> int:
        return self.oversample * group_size

    def width(self, group_size: int) -> int:
        return group_size

    def for_batch(self, num_groups: int) -> "_Downsampled":
        return dataclasses.replace(self, source=for_batch_of(self.source, num_groups))

    @property
    def evaluation_text(self) -> Callable:
        """That of the source, if it has one."""
        return evaluation_text_of(self.source)

    def init(self, num_prompts: int) -> DownsampledState:
        key: ArrayTree = ()
        if self._draws:
            key = np.zeros_like(jax.random.key_data(jax.random.key(0)))
        return DownsampledState(key, self.source.init(num_prompts))

    @property
    def _draws(self) -> bool:
        return "key" in accepted(self.rule)

    def propose(self, state: DownsampledState, key, collection: Collection, count: int):
        requests, source = self.source.propose(state.source, key, self._wide(collection), count)
        data = np.asarray(jax.random.key_data(key)) if self._draws else ()
        return requests, DownsampledState(data, source)

    def observe(self, state: DownsampledState, collection: Collection):
        decision, source = self.source.observe(state.source, self._wide(collection))
        if decision.rows is None:
            return decision, state
        rows = decision.rows
        most = collection.group_size
        shape = (len(rows), max(len(row.members) for row in rows))
        where = np.zeros(shape, bool)
        context: dict[str, Any] = {"rewards": np.zeros(shape, np.float32), "where": where}
        context["count"] = most
        context["lengths"] = np.zeros(shape, np.int32)
        context["truncated"] = np.zeros(shape, bool)
        components: dict[str, np.ndarray] = {}
        for p, row in enumerate(rows):
            for g, (i, j) in enumerate(row.members):
                outcome = collection.outcome(i)
                for name in ("rewards", "where", "lengths", "truncated"):
                    context[name][p, g] = getattr(outcome, name)[j]
                if row.rewards is not None:
                    context["rewards"][p, g] = row.rewards[g]
                for name, values in outcome.reward_components.items():
                    if name not in components:
                        self._check_component(name)
                        components[name] = np.zeros(shape, np.float32)
                    components[name][p, g] = values[j]
        with on_host():
            if self._draws:
                context["key"] = jax.random.wrap_key_data(state.key)
            if self.regrade is not None:
                context["rewards"] = self._regraded(self.regrade, components | context)
            times = np.asarray(call_with(self.rule, context=components | context))
        checks.check_shape(repr(self), "the rule's result", times, shape)
        if times.dtype.kind not in "biu":
            raise ValueError(f"{self!r}: the rule must return bool or integers; got {times.dtype}.")
        times = np.where(where, times, 0).astype(int)
        chosen = []
        for row, counts in zip(rows, times, strict=True):
            if not 0 <= counts.sum() <= most or counts.min() < 0:
                raise ValueError(
                    f"{self!r}: the rule takes {counts.sum()} rollouts of a group; from 0 to "
                    f"{most} train."
                )
            members = np.repeat(np.arange(len(counts)), counts).tolist()
            if not members:  # of a group that loses all, no rollout trains
                chosen.append(Row(row.members[:most], takes_part=False))
                continue
            if self.regrade is not None:
                new = context["rewards"][len(chosen), : len(row.members)]
                row = row._replace(rewards=tuple(new.tolist()))
            chosen.append(_of_members(row, members))
        return Decision(rows=tuple(chosen)), DownsampledState(state.key, source)

    def _regraded(self, regrade: Callable, context: dict[str, Any]) -> np.ndarray:
        """The rewards of all sampled rollouts in place of the run's."""
        for name, parameter in accepted(regrade).items():
            if parameter.default is parameter.empty and name not in context:
                raise ValueError(
                    f"{self!r}: regrade reads {name!r}, which is missing from the mapping that the "
                    "reward returns."
                )
        new = np.asarray(call_with(regrade, context=context), np.float32)
        checks.check_shape(repr(self), "the result of regrade", new, context["where"].shape)
        return new

    def _check_component(self, name: str) -> None:
        regrades = self.regrade is not None and name in accepted(self.regrade)
        if name not in accepted(self.rule) and not regrades:
            return
        reader = "the rule" if name in accepted(self.rule) else "regrade"
        if name in _OWN_NAMES:
            raise ValueError(
                f"{self!r}: {reader} reads {name!r}, which is also the name of a component of the "
                "run's reward; rename the component."
            )
        if needs_of(self.source).lacks_components:
            raise ValueError(
                f"{self!r}: {reader} reads the component {name!r}, but the run's reward does not "
                f"grade all responses of the source. {GRADED_BY_RUN}"
            )

    def _wide(self, collection: Collection) -> Collection:
        return collection._replace(group_size=self.group_size_of_source(collection.group_size))

    def __repr__(self) -> str:
        text = f"{stable_repr(self.rule)}, oversample={self.oversample}"
        if self.regrade is not None:
            text += f", regrade={stable_repr(self.regrade)}"
        if self.source != in_order():
            text += f", source={self.source!r}"
        return f"downsampled({text})"


def _of_members(row: Row, members: list[int]) -> Row:
    """A row of some members of a row, in this order, with what is known of each."""
    return row._replace(
        members=tuple(row.members[g] for g in members),
        rewards=None if row.rewards is None else tuple(row.rewards[g] for g in members),
        segments=None if row.segments is None else tuple(row.segments[g] for g in members),
    )


def downsampled(
    rule: Callable,
    *,
    oversample: int = 2,
    regrade: Callable | None = None,
    source: Collector | None = None,
) -> Collector:
    """Samples ``oversample`` times G rollouts of each prompt, at most G of which train.

        oversample G rollouts of P prompts -> rewards -> rule -> at most G of each

    Args:
      rule: ``rewards [P, oversample G] -> [P, oversample G]``, bool for what trains, or integers
        for how often, such as :func:`~jaxrl_llm.curation.resample_on_correct` and
        :func:`~jaxrl_llm.curation.resample_groups`. Its parameters may be ``rewards``, ``where``,
        ``lengths``, ``truncated``, ``count`` (G), a reward component by its name, or ``key``.
      oversample: At least 1.
      regrade: New rewards ``[P, oversample G]`` of all sampled rollouts, which the rule reads and
        with which the selected ones train, such as agreement with the majority. Its parameters are
        those of a rule, without ``key``. None for the rewards of the run.
      source: The collector that proposes the prompts; None for :func:`in_order`.

    Returns:
      A collector; its state is a :class:`DownsampledState`.

    Raises:
      TypeError: If ``rule`` or ``regrade`` is not a function.
      ValueError: If ``oversample`` is not an integer above 0; in a run, if the rule selects more
        than G rollouts of a group, if ``regrade`` names a component that the reward lacks, or if
        one of them names a component of a reward that does not grade all responses of the source,
        or reads a name of those above that a component has as well.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.downsampled(jr.curation.resample_on_correct)
      downsampled(resample_on_correct, oversample=2)

    References:
      GRPO-RoC (arXiv:2508.20722), PF-PPO (arXiv:2409.06957) and Sol-RL (arXiv:2604.06916), which
      differ in the rule; TTRL (arXiv:2504.16084), whose rollouts all vote on the rewards.
    """
    if not callable(rule):
        raise TypeError(f"downsampled: rule must be a function; got {rule!r}.")
    if not (regrade is None or callable(regrade)):
        raise TypeError(f"downsampled: regrade must be a function; got {regrade!r}.")
    checks.check_count("downsampled", oversample=oversample)
    source = in_order() if source is None else source
    return _Downsampled(rule=rule, oversample=int(oversample), regrade=regrade, source=source)
