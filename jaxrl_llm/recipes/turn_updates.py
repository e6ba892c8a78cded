"""``TurnUpdates``: one optimizer step for each turn of the rollouts of a batch."""

import dataclasses

from jaxrl_llm.core import checks
from jaxrl_llm.corrections.sequential import Order
from jaxrl_llm.recipes.records import format_fields


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TurnUpdates:
    """Updates the turns of a batch one after another, like agents that act in turn.

        for each turn k in order:
            old_logp = that of the policy now;   A_k = A factor
            an optimizer step on the tokens of turn k
            factor = sequential_factor(factor, logp after the step, old_logp, tokens of turn k)

    The batch holds ``turn_ids`` and ``turn_where``. A turn that no rollout has is skipped.

    Attributes:
      order: "backward", "forward" or "random", see ``corrections.turn_order``.
      eps_low: The factor is at least ``1 - eps_low``.
      eps_high: The factor is at most ``1 + eps_high``.

    Raises:
      ValueError: If an option is unknown or out of its range.
    """

    order: Order = "backward"
    eps_low: float = 0.2
    eps_high: float = 0.2

    def __post_init__(self):
        name = "TurnUpdates"
        checks.check_option(name, "order", self.order, ("backward", "forward", "random"))
        checks.check_share(name, eps_low=self.eps_low)
        checks.check_non_negative(name, finite=True, eps_high=self.eps_high)

    def __repr__(self) -> str:
        return f"TurnUpdates({format_fields(self)})"
