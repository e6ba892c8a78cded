"""A hint policy that tries every message once: the least help that leads to a right answer.

``messages``, ``threshold`` and ``metric`` are those of
:mod:`~jaxrl_llm.curation.collectors.hints.policies`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.curation.collectors.hints.hinted import GuidedGroup, HintPolicy
from jaxrl_llm.curation.collectors.hints.policies import (
    HintedPolicy,
    Messages,
    check_policy,
    of_role,
)
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.protocol import (
    DEMONSTRATION,
    HINTED,
    Outcome,
    Request,
    Response,
    on_host,
)
from jaxrl_llm.curation.hints import minimal_hint, scaffold_slots

__all__ = ["scaffold"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Scaffold(HintedPolicy):
    """Made by :func:`scaffold`."""

    messages: Messages
    after: str = "hint"
    warmup: int = 0

    name = "scaffold"

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(mixes_texts=self.after != "plain")

    @property
    def first_help(self) -> int:
        return self.warmup

    def check(self, row: Mapping[str, Any]) -> None:
        self.messages(row)

    def ask(self, group: GuidedGroup) -> Sequence[Request]:
        hinted = of_role(group, HINTED)
        if not hinted:
            if group.step < self.warmup or not self.failed(group.outcomes[0]):
                return ()
            texts = filter(group.takes_text, self.messages(group.row))  # those with room
            return [Request(1, text=text, role=HINTED) for text in texts]
        level = self._level(hinted)
        if level < 0 or self.after == "hint" or of_role(group, DEMONSTRATION):
            return ()
        outcome = hinted[level][1]
        # A response with its reward has no components, so it is graded again if there are any.
        reward = None if outcome.reward_components else float(outcome.rewards[0])
        right = outcome.responses[0]
        plain = Response(right.tokens, finish=right.finish, reward=reward)
        return [Request(1, responses=(plain,), sampled=False, role=DEMONSTRATION)]

    def members(self, group: GuidedGroup) -> Sequence[tuple[int, int]]:
        hinted, first = of_role(group, HINTED), group.numbers[0]
        row = [(first, member) for member in range(group.group_size)]
        if not hinted or (level := self._level(hinted)) < 0:
            return row
        new = [(number, 0) for number, _ in of_role(group, DEMONSTRATION)]
        new += [(hinted[level][0], 0)] if self.after != "plain" else []
        with on_host():
            slots = scaffold_slots(
                np.int32(level),
                group_size=group.group_size,
                where=np.asarray(group.outcomes[0].where),
                count=len(new),
            )
        for place, member in zip(np.flatnonzero(slots), new, strict=False):
            row[place] = member
        return row

    def _level(self, hinted: list[tuple[int, Outcome]]) -> int:
        """The first message whose rollout is right; -1 for none."""
        rewards = np.concatenate([self.rewards(outcome) for _, outcome in hinted])
        where = np.concatenate([np.asarray(outcome.where) for _, outcome in hinted])
        with on_host():
            return int(minimal_hint(rewards, where=where, threshold=self.threshold))


def scaffold(
    messages: Messages,
    *,
    after: Literal["hint", "plain", "both"] = "hint",
    warmup: int = 0,
    threshold: float = 0.0,
    metric: str | None = None,
) -> HintPolicy:
    """Samples one rollout per message; the right one with the least help replaces a wrong one.

    Args:
      messages: See the module; all of them are requested at once.
      after: The prompt of the right response in training: the message with the hint, the plain
        message, which makes it off-policy (a demonstration), or both, replacing two rollouts.
      warmup: Number of batches before the first hint.
      threshold, metric: See the module.

    Returns:
      A policy for :func:`~jaxrl_llm.curation.hinted`.

    Raises:
      TypeError: If ``messages`` is not a function.
      ValueError: If an option is unknown or out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.curation.scaffold(jr.curation.tier_messages, warmup=50)
      scaffold(tier_messages, warmup=50)

    References:
      Scaf-GRPO (arXiv:2510.19807) and its released code; ``after="both"`` is its "6+1+1".
    """
    name = "scaffold"
    if not callable(messages):
        raise TypeError(f"{name}: messages must be a function; got {messages!r}.")
    checks.check_option(name, "after", after, ("hint", "plain", "both"))
    checks.check_non_negative(name, finite=True, warmup=warmup)
    check_policy(name, threshold, metric)
    return _Scaffold(
        messages=messages, after=after, warmup=int(warmup), threshold=threshold, metric=metric
    )
