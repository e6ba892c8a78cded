"""``TurnUpdates``: one optimizer step for each turn of the rollouts of a batch."""

import dataclasses
from typing import ClassVar

from jaxrl_llm.core import checks
from jaxrl_llm.corrections.sequential import Order
from jaxrl_llm.recipes.parts.part import RecipePart
from jaxrl_llm.recipes.records import format_fields


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TurnUpdates(RecipePart):
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

    keyword: ClassVar[str] = "turn_updates"
    title: ClassVar[str] = "turn_updates"
    left_to_right: ClassVar[bool] = True
    takes_texts: ClassVar[bool] = False
    divides_batch: ClassVar[bool] = True

    def __post_init__(self):
        name = "TurnUpdates"
        checks.check_option(name, "order", self.order, ("backward", "forward", "random"))
        checks.check_share(name, eps_low=self.eps_low)
        checks.check_non_negative(name, finite=True, eps_high=self.eps_high)

    def __repr__(self) -> str:
        return f"TurnUpdates({format_fields(self)})"

    def required(self, recipe, names: frozenset[str]) -> frozenset[str]:
        """The turn of each token, and which turns exist."""
        del recipe, names
        return frozenset({"turn_ids", "turn_where"})

    def check(self, recipe) -> None:
        """Raises ValueError if the recipe compares the policy with ``old_logp`` in each step."""
        if measured := recipe.computed_from("update"):
            raise ValueError(
                f"Recipe {recipe.name!r}: computed {next(iter(measured))!r} (update) compares the "
                "policy with old_logp, which turn_updates scores before each step, so they are "
                "always equal; leave one of them out."
            )

    def check_passes(self, recipe, epochs: int, minibatches: int) -> None:
        """Raises ValueError unless each batch has one pass, in which each turn is a step."""
        if epochs * minibatches > 1:
            raise ValueError(
                f"recipe {recipe.name!r} makes an optimizer step of each turn of a batch; got "
                f"epochs {epochs} and minibatches {minibatches}; use 1 and 1."
            )

    def refuses_other_sampler(self) -> str:
        """The ratio of a turn is to the policy just before its step."""
        return "takes the ratio of each turn to the policy just before its step"
