"""A collector for flow policies: cheap drafts of many seeds; the extremes are generated in full."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl_llm.core import ArrayTree, call_with, checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.protocol import (
    Collection,
    Collector,
    Decision,
    Request,
    Row,
    in_order,
    on_host,
    stack_outcomes,
)

__all__ = ["drafted"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Drafted:
    """Made by :func:`drafted`."""

    rule: Callable
    oversample: int
    steps: int

    @property
    def needs(self) -> Needs:
        return Needs(asks_again=True, draft_steps=self.steps)

    def init(self, num_prompts: int) -> ArrayTree:
        return in_order().init(num_prompts)

    def propose(self, state: ArrayTree, key, collection: Collection, count: int):
        wide = collection._replace(group_size=self.oversample * collection.group_size)
        requests, state = in_order().propose(state, key, wide, count)
        return tuple(request._replace(draft=True) for request in requests), state

    def observe(self, state: ArrayTree, collection: Collection):
        P, asked = collection.num_groups, len(collection.requests)
        if asked < P:
            return Decision(ask=P - asked), state
        if collection.waiting:
            return Decision(), state
        if asked == P:
            return Decision(requests=self._again(collection)), state
        rows = [
            Row(tuple((P + i, j) for j in range(collection.requests[P + i].rollouts)))
            for i in range(P)
        ]
        return Decision(rows=tuple(rows)), state

    def _again(self, collection: Collection) -> tuple[Request, ...]:
        """The extremes of each group once more; of one without a reward, its first drafts."""
        size = collection.group_size
        drafts = stack_outcomes(collection.outcomes, rows=collection.num_groups)
        context = {"rewards": drafts.rewards, "where": drafts.where, "count": size}
        with on_host():
            keep = np.asarray(call_with(self.rule, context=context)) & drafts.where
        checks.check_shape(repr(self), "the rule's result", keep, drafts.where.shape)
        requests = []
        for i, row in enumerate(keep):
            members = tuple(np.flatnonzero(row).tolist()) or tuple(range(size))
            if len(members) > size:
                raise ValueError(
                    f"{self!r}: the rule takes {len(members)} drafts of a group; {size} train."
                )
            requests.append(Request(len(members), extends=i, draws_of=members))
        return tuple(requests)

    def __repr__(self) -> str:
        rule = stable_repr(self.rule)
        return f"drafted({rule}, oversample={self.oversample}, steps={self.steps})"


def drafted(rule: Callable, *, oversample: int = 4, steps: int = 6) -> Collector:
    """Drafts of ``oversample`` times G seeds; a rule selects those to generate in full and train.

        oversample G seeds -> drafts -> rewards -> rule -> the same noise in full -> rewards

    A draft is a trajectory of a flow policy in a few steps, none of them random. Only its reward is
    used; the trajectory that trains starts from the same noise and has its own reward.

    Args:
      rule: ``rewards [P, oversample G] -> bool [P, oversample G]``, at most G of each group, such
        as :func:`~jaxrl_llm.curation.contrasts`; its parameters may be ``rewards``,
        ``where`` and ``count`` (G).
      oversample: At least 1.
      steps: Steps of a draft, at least 1.

    Returns:
      A collector; its state is that of :func:`in_order`.

    Raises:
      TypeError: If ``rule`` is not a function.
      ValueError: If a number is not an integer above 0; in a run, if the rule selects more than G,
        or the policy's trajectories split or follow a text, since they begin from other noise.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.drafted(jr.curation.contrasts)
      drafted(contrasts, oversample=4, steps=6)

    References:
      Sol-RL (arXiv:2604.06916), NOTES: 24 of 96 seeds, drafts of 6 steps in 4 bits and
      10 steps in full precision. Drafts of one precision are ours.
    """
    if not callable(rule):
        raise TypeError(f"drafted: rule must be a function; got {rule!r}.")
    checks.check_count("drafted", oversample=oversample, steps=steps)
    return _Drafted(rule=rule, oversample=int(oversample), steps=int(steps))
