"""The policies of ``hinted``: the help for a failed group, and the rollouts of its row.

====================  =========================  ===========================  =====================
policy                asks again                 with                         the row
====================  =========================  ===========================  =====================
ladder                while no rollout is right  one message after another    the last group
self_hints            the same                   hints that the model writes  the last group
scaffold              if no rollout is right     one rollout a message        one success swapped in
hint_share            always                     the start of a solution      plain and hinted
examples_in_prompt    always                     other prompts' solutions     plain and steered
rethink               while no rollout is right  two templates                the last group
repair                if a rollout is wrong      its right steps              it, put right
inpainted             if no rollout is right     chunks held in their places  successes swapped in
====================  =========================  ===========================  =====================

Options that policies share:

- ``messages``: ``row -> (message, ...)``, from the weakest help to the strongest.
- ``threshold``: Largest reward of a failure.
- ``metric``: Name of the reward component that is compared; None for the reward.

A wrong type raises TypeError, an option that is unknown or out of its range ValueError.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.curation.collectors.hints.hinted import GuidedGroup
from jaxrl_llm.curation.collectors.needs import Needs
from jaxrl_llm.curation.collectors.protocol import Outcome, on_host
from jaxrl_llm.curation.hints import needs_hint

Messages = Callable[[Mapping[str, Any]], Sequence[str]]


def no_reward(texts: Sequence[str]) -> list[float]:
    """Zero for each text: the reward of a question that the model is asked besides."""
    return [0.0] * len(texts)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class HintedPolicy:
    """The base of hint policies."""

    threshold: float = 0.0
    metric: str | None = None

    name: ClassVar[str]

    @property
    def needs(self) -> Needs:
        """Messages, and rows that join responses of several requests that are graded."""
        return Needs(sends_text=True, grades_apart=True)

    def first(self, group_size: int) -> int:
        """Rollouts of the plain group."""
        return group_size

    def rewards(self, outcome: Outcome) -> np.ndarray:
        """Of a group: float32 ``[n]``."""
        if self.metric is None:
            return np.asarray(outcome.rewards, np.float32)
        if self.metric not in outcome.reward_components:
            names = ", ".join(sorted(outcome.reward_components)) or "none"
            raise ValueError(
                f"{self!r}: the reward has no part {self.metric!r}; its parts are: {names}."
            )
        return np.asarray(outcome.reward_components[self.metric], np.float32)

    def failed(self, outcome: Outcome) -> bool:
        """Whether no rollout of a group is right."""
        with on_host():
            rewards, where = self.rewards(outcome), np.asarray(outcome.where)
            return bool(needs_hint(rewards, where=where, threshold=self.threshold))

    def __repr__(self) -> str:
        first, options = [], []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not field.repr:
                continue
            if field.default is dataclasses.MISSING:
                first.append(stable_repr(value))
            elif value != field.default:
                options.append(f"{field.name}={stable_repr(value)}")
        return f"{self.name}({', '.join(first + options)})"


def check_policy(name: str, threshold: float, metric: str | None) -> None:
    """Raises unless the options of :class:`HintedPolicy` are in their ranges."""
    checks.check_real(name, finite=True, threshold=threshold)
    if metric is not None and not isinstance(metric, str):
        raise TypeError(f"{name}: metric must be the name of a part of the reward; got {metric!r}.")


def of_role(group: GuidedGroup, role: int) -> list[tuple[int, Outcome]]:
    """The requests of a role after the first one, by their numbers, with what came of them."""
    later = zip(group.numbers[1:], group.requests[1:], group.outcomes[1:], strict=True)
    return [(number, outcome) for number, request, outcome in later if request.role == role]


def rows_of(group: GuidedGroup) -> list[tuple[int, int]]:
    """All rollouts of a group, in the order of its requests."""
    every = zip(group.numbers, group.requests, strict=True)
    return [(number, member) for number, x in every for member in range(x.rollouts)]
