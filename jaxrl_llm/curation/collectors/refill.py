"""Dynamic sampling: other groups in place of those that a rule drops."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl_llm.core import ArrayTree, call_with, checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Decision,
    Outcome,
    full_row,
    groups_of,
    in_order,
    on_host,
    prompt_source,
    sized,
    stack_outcomes,
)

__all__ = ["refill"]


@dataclasses.dataclass(frozen=True, repr=False)
class _Refill:
    """Made by :func:`refill`."""

    rule: Callable
    oversample: float
    max_rounds: int
    source: Collector

    asks_again = True
    asks_ahead = True

    # What the rule said of the outcomes of this batch, so that each is asked once: by identity.
    judged: dict[int, tuple[Outcome, bool]] = dataclasses.field(
        default_factory=dict, init=False, compare=False
    )

    def for_run(self, group_size: int, max_new_tokens: int) -> "_Refill":
        source = sized(self.source, group_size=group_size, max_new_tokens=max_new_tokens)
        return dataclasses.replace(self, source=source)

    def init(self, num_prompts: int) -> ArrayTree:
        return self.source.init(num_prompts)

    def propose(self, state, key, collection: Collection, count: int):
        return self.source.propose(state, key, collection, count)

    def observe(self, state, collection: Collection) -> tuple[Decision, ArrayTree]:
        target, asked = collection.num_groups, len(collection.requests)
        most = target * self.max_rounds
        if not asked:
            self.judged.clear()
            return Decision(ask=min(groups_of(self.oversample, target, up=True), most)), state
        passed = self._passed(collection)
        # The first P in the order of requests, whichever finished first.
        waits = collection.outcomes[: passed[target - 1]] if len(passed) >= target else (None,)
        if None not in waits:
            return self._complete(state, collection, passed[:target])
        missing = target - len(passed) - collection.waiting
        if missing <= 0:
            return Decision(), state
        if asked < most:
            return Decision(ask=min(missing, most - asked)), state
        if collection.waiting:
            return Decision(), state
        return self._complete(state, collection, passed)

    def _passed(self, collection: Collection) -> list[int]:
        """The requests that have finished and pass the rule."""
        finished = [(i, x) for i, x in enumerate(collection.outcomes) if x is not None]
        new = [x for _, x in finished if id(x) not in self.judged]
        # A multiple of P rows, so that the rule meets few shapes.
        rows = -(-len(new) // collection.num_groups) * collection.num_groups
        arrays = stack_outcomes(new, rows=rows)
        keep = np.zeros_like(arrays.where)
        if arrays.where.any():
            with on_host():
                keep = call_with(self.rule, arrays.rewards, context=arrays._asdict())
            checks.check_shape(repr(self), "the rule's result", keep, arrays.rewards.shape)
            checks.check_bool(repr(self), rule=keep)
        passes = (np.asarray(keep) & arrays.where).any(axis=-1).tolist()
        pairs = zip(new, passes[: len(new)], strict=True)
        self.judged.update({id(outcome): (outcome, verdict) for outcome, verdict in pairs})
        return [i for i, outcome in finished if self.judged[id(outcome)][1]]

    def _complete(self, state, collection, passed: list[int]):
        self.judged.clear()
        sizes, whole = [request.rollouts for request in collection.requests], set(passed)
        dropped = [i for i in range(len(sizes)) if i not in whole]
        filler = dropped[: collection.num_groups - len(passed)]
        rows = [full_row(i, sizes[i], takes_part=i in whole) for i in sorted(passed + filler)]
        # The source learns from the groups up to the last of the batch: which of those behind it
        # have finished depends on timing.
        count = passed[-1] + 1 if not filler else len(sizes)
        seen = collection._replace(
            requests=collection.requests[:count], outcomes=collection.outcomes[:count]
        )
        return Decision(rows=tuple(rows)), self.source.observe(state, seen)[1]

    def __repr__(self) -> str:
        text = stable_repr(self.rule)
        if self.oversample != 1.0:
            text += f", oversample={self.oversample}"
        source = "" if self.source == in_order() else f", source={self.source!r}"
        return f"refill({text}, max_rounds={self.max_rounds}{source})"


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
    return _Refill(rule, float(oversample), max_rounds, prompt_source("refill", source))
