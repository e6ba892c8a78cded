"""Dynamic sampling: other groups in place of those that a rule drops."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from jaxrl_llm.core import call_with, checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.from_generator import GeneratorCollector, GroupHandle, OpenBatch
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.on_source import prompt_source
from jaxrl_llm.curation.collectors.protocol import (
    Collector,
    Outcome,
    groups_of,
    on_host,
    stack_outcomes,
)

__all__ = ["refill"]


@dataclasses.dataclass(frozen=True, repr=False)
class _Refill(GeneratorCollector):
    """Made by :func:`refill`."""

    rule: Callable
    oversample: float
    max_rounds: int

    @property
    def also(self) -> Needs:
        return Needs(asks_ahead=True)

    def collect(self, batch: OpenBatch):
        target, most = batch.num_groups, batch.num_groups * self.max_rounds
        groups = batch.ask(min(groups_of(self.oversample, target, up=True), most))
        while True:
            passed = self._passed(batch)
            # The first P in the order of requests, whichever finished first.
            if len(passed) >= target and _finished(groups[: passed[target - 1].index]):
                return [group.row() for group in passed[:target]]
            waiting = sum(group.outcome is None for group in groups)
            missing = target - len(passed) - waiting
            if missing > 0 and len(groups) < most:
                groups += batch.ask(min(missing, most - len(groups)))
            elif missing > 0 and not waiting:  # dropped groups fill the batch
                dropped = [group for group in groups if group not in passed]
                rows = sorted(passed + dropped[: target - len(passed)], key=lambda g: g.index)
                return [group.row(takes_part=group in passed) for group in rows]
            yield

    def _passed(self, batch: OpenBatch) -> list[GroupHandle]:
        """The groups that have finished and pass the rule."""
        finished = [group for group in batch.groups if group.outcome is not None]
        verdicts = batch.once(functools.partial(self._passes, batch.num_groups), finished)
        return [group for group, verdict in zip(finished, verdicts, strict=True) if verdict]

    def _passes(self, num_groups: int, outcomes: list[Outcome]) -> list[bool]:
        # A multiple of P rows, so that the rule meets few shapes.
        rows = -(-len(outcomes) // num_groups) * num_groups
        arrays = stack_outcomes(outcomes, rows=rows)
        keep = np.zeros_like(arrays.where)
        if arrays.where.any():
            with on_host():
                keep = call_with(self.rule, arrays.rewards, context=arrays._asdict())
            checks.check_shape(repr(self), "the rule's result", keep, arrays.rewards.shape)
            checks.check_bool(repr(self), rule=keep)
        return (np.asarray(keep) & arrays.where).any(axis=-1).tolist()[: len(outcomes)]

    def __repr__(self) -> str:
        text = stable_repr(self.rule)
        if self.oversample != 1.0:
            text += f", oversample={self.oversample}"
        return f"refill({text}, max_rounds={self.max_rounds}{self.of_source()})"


def _finished(groups: list[GroupHandle]) -> bool:
    return all(group.outcome is not None for group in groups)


def refill(
    rule: Callable,
    *,
    oversample: float = 1.0,
    max_rounds: int = 10,
    source: Collector | None = None,
) -> Collector:
    """Replaces each group that a rule drops with another group: dynamic sampling.

        batch = the first P groups, in the order of requests, that pass the rule
        requests <= max_rounds * P

    A replacement is requested as soon as a group is dropped, while the others are still being
    sampled. No more groups are requested than necessary, and the batch does not depend on timing.
    With ``oversample`` above 1 the first requests are more than P; the batch is the same but
    complete sooner, and extra groups are discarded. If the bound is reached, the batch is filled
    with dropped groups that take no part, and if no group passed, the step makes no update.

    Args:
      rule: ``rewards [n, G] -> keep [n, G]``, bool, such as
        :func:`~jaxrl_llm.curation.informative_groups`; a group passes if any rollout is kept,
        whatever the other groups are. It may also have parameters ``where``, ``reward_components``,
        ``lengths`` and ``truncated``.
      oversample: Number of first groups as a multiple of P; at least 1 and at most ``max_rounds``.
      max_rounds: Bound of all requested groups as a multiple of P.
      source: The collector that proposes the groups; None for :func:`in_order`.

    Returns:
      A collector; its state is that of ``source``.

    Raises:
      TypeError: If the rule is not a function, or ``max_rounds`` not an integer.
      ValueError: If ``max_rounds`` is below 1 or ``oversample`` out of its range, or the source
        requests more after groups have finished.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.refill(jr.curation.informative_groups, max_rounds=4)
      refill(informative_groups, max_rounds=4)

    References:
      Yu et al., DAPO (arXiv:2503.14476). The released trainer samples three times the batch at once
      (``oversample=3.0``), again as often as needed, and ends the run after 10 rounds.
    """
    if not callable(rule):
        raise TypeError(f"refill: rule must be a function; got {rule!r}.")
    if isinstance(max_rounds, bool) or not isinstance(max_rounds, int):
        raise TypeError(f"refill: max_rounds must be an integer; got {max_rounds!r}.")
    checks.check_positive("refill", max_rounds=max_rounds)
    if not 1.0 <= oversample <= max_rounds:
        raise ValueError(
            f"refill: oversample must be from 1 to max_rounds {max_rounds}; got {oversample!r}."
        )
    source = prompt_source("refill", source)
    return _Refill(rule, float(oversample), max_rounds, source=source)
