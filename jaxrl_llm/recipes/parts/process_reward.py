"""``ProcessRewardModel``: a second model of a recipe, trained as a policy on its rollouts."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

from jaxrl_llm.core import Array
from jaxrl_llm.core.compose import call_with
from jaxrl_llm.recipes import wiring
from jaxrl_llm.recipes.inputs import EXTRAS
from jaxrl_llm.recipes.parts.second_model import SecondModel
from jaxrl_llm.recipes.records import format_fields
from jaxrl_llm.recipes.wiring import Reader


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ProcessRewardModel(SecondModel):
    """An implicit process reward model: a second model with a separate optimizer, and no head.

        for each batch:  its optimizer step on ``loss``, then
                         prm_logp[t] = log prm(token t | tokens before it)  goes into the batch

    The turn rewards thus come from the model after it has learned from their outcomes. It starts as
    a copy of the policy, and its state is stored as that of a critic (``TrainState.critic``).

    Attributes:
      loss: ``(logp, old_logp, mask, rewards, *, pairs, **context) -> []``, such as
        ``preferences.trajectory_dpo``, of some groups of the batch; ``pairs`` is the number of
        pairs in the batch, so that the losses of microbatches add up. A loss that names ``pairs``
        makes no step on a batch without any. A loss that compares no pairs, such as
        ``preferences.outcome_cross_entropy``, names ``rollouts``, the number of rollouts with
        tokens in the batch. ``ref_logp`` is that of the recipe's frozen reference.

    Raises:
      TypeError: If the loss is not a function.
    """

    loss: Callable

    keyword: ClassVar[str] = "prm"
    title: ClassVar[str] = "a process reward model"
    reserved: ClassVar[frozenset[str]] = frozenset({"prm_logp"})
    takes_texts: ClassVar[bool] = False
    steps_once: ClassVar[bool] = True

    def __post_init__(self):
        if not callable(self.loss):
            raise TypeError(f"ProcessRewardModel: loss must be a function; got {self.loss!r}.")

    def __repr__(self) -> str:
        """The function by its name."""
        return f"ProcessRewardModel({format_fields(self)})"

    def total_loss(self, logp: Array, batch, *, pairs: Array, rollouts: Array) -> Array:
        """The loss of some groups of a batch with ``old_logp``."""
        context = {"ref_logp": batch.ref_logp, **batch.extras, "where": batch.where}
        context |= {"pairs": pairs, "rollouts": rollouts}
        return call_with(
            self.loss, logp, batch.old_logp, batch.mask, batch.rewards, context=context
        )

    @property
    def _reader(self) -> Reader:
        return Reader("loss of the prm", self.loss, ("logp", "old_logp", "mask", "rewards"))

    def required(self, recipe, names: frozenset[str]) -> frozenset[str]:
        """Its log-probabilities, and those that its loss compares."""
        del recipe, names
        of_reference = {"ref_logp"} & wiring.named_by(self._reader)
        return frozenset({"prm_logp", "old_logp"} | of_reference)

    def computed_by_step(self, recipe) -> frozenset[str]:
        """Its log-probabilities."""
        del recipe
        return self.reserved

    def check(self, recipe) -> None:
        """Raises ValueError if its loss reads what it does not have, or there is a critic."""
        name = f"Recipe {recipe.name!r}"
        if recipe.critic is not None:
            raise ValueError(
                f"{name}: a recipe cannot have both a critic and a process reward model."
            )
        numbers = {"where", "pairs", "rollouts", "ref_logp"}
        offered = {*EXTRAS, *recipe.inputs, *numbers}
        wiring.check_arguments(recipe.name, self._reader, offered)
        if recipe.reference is not None and "ref_logp" in wiring.named_by(self._reader):
            raise ValueError(
                f"{name}: the loss of the prm reads ref_logp, which a moving reference scores only "
                "after the prm's step; leave one of them out."
            )
