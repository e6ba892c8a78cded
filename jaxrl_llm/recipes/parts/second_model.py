"""``SecondModel``: a model that is trained beside the policy, with its own optimizer."""

from typing import ClassVar

from jaxrl_llm.recipes.parts.part import RecipePart


class SecondModel(RecipePart):
    """A critic or a process reward model; a recipe has at most one of them.

    Attributes:
      steps_once: Whether it makes one optimizer step of a batch, however many the policy makes.
    """

    left_to_right: ClassVar[bool] = True
    steps_once: ClassVar[bool] = False

    @property
    def heads(self) -> int:
        """Number of predictions per token; 0 for a model that writes tokens."""
        return 0

    @property
    def target_rate(self) -> float | None:
        """Rate of the moving average of its parameters that is read; None for none."""
        return None
