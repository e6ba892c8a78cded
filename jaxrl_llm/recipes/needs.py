"""``RunNeeds``: what a training run does for a method, whatever the algorithm that trains it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxrl_llm.diffusion import FlowLikelihood, Likelihood
from jaxrl_llm.recipes.parts import SecondModel, Subagent
from jaxrl_llm.recipes.wiring import Computed


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunNeeds:
    """What a method needs of a run; the defaults are those of a method without the feature.

    Both kinds of recipes have one as ``needs``, so what several algorithms share asks for a
    property and not for the kind of recipe.

    Attributes:
      samples_responses: Whether some weights sample the responses; else the data have them.
      sampled_by, teacher_mixture, sampler_quantization: As in :class:`~jaxrl_llm.recipes.Recipe`.
      samples_members: Whether each rollout is of other weights, the member of a population.
      shares_prefix: Whether rollouts of different prompts can read a common beginning at once.
      tries: Responses of a rollout, next to each other in a row.
      keeps_places: Whether the update knows a rollout by its place in the batch.
      drops_failed: Whether a rollout that fails is left out; else it ends the run.
      sums_gradients: Whether the update differentiates the model on each part of a batch.
      reads_logp: Whether log-probabilities of the policy are computed.
      reads_extras: Whether its batches have extras, which the run computes from rollouts and rows.
      epochs, minibatches: Passes over a batch, and optimizer steps of a pass, in its paper.
      divides_batch: Whether it always makes several optimizer steps of a batch, one for each turn.
      needs_updates: Whether a part of it has an effect only after the first update on a batch.
      freezes_leaves: Whether some leaves never move, by its method ``moving``.
      waits: First steps in which the critic alone trains.
      head: The unit that a reward model's head scores; None for a policy.
      likelihood: Of a denoising or flow model; None for a causal one.
      second_model, subagent: The models that are trained with the policy.
      uses_reference, moves_reference: Whether it reads a reference, and whether that moves.
      has_teacher, learns_from_model: Whether it has a teacher, and whether that is another model.
      fields: The names of the inputs that it requires.
      computed: Numbers that it computes beyond the batch.
      reads_behavior: Whether it compares with the policy that sampled.
      reward_range: The smallest and largest reward that it is defined for.
      reward_functions: Its functions of the rewards, in their order.
    """

    samples_responses: bool = True
    sampled_by: str | tuple[str, str] = "policy"
    teacher_mixture: float = 0.0
    sampler_quantization: str | None = None
    samples_members: bool = False
    shares_prefix: bool = True
    tries: int = 1
    keeps_places: bool = False
    drops_failed: bool = False
    sums_gradients: bool = True
    reads_logp: bool = True
    reads_extras: bool = True
    epochs: int = 1
    minibatches: int = 1
    divides_batch: bool = False
    needs_updates: bool = False
    freezes_leaves: bool = False
    waits: int = 0
    head: str | None = None
    likelihood: Likelihood | FlowLikelihood | None = None
    second_model: SecondModel | None = None
    subagent: Subagent | None = None
    uses_reference: bool = False
    moves_reference: bool = False
    has_teacher: bool = False
    learns_from_model: bool = False
    fields: frozenset[str] = frozenset()
    computed: tuple[Computed, ...] = ()
    reads_behavior: bool = False
    reward_range: tuple[float, float] = (-math.inf, math.inf)
    reward_functions: tuple[Callable, ...] = ()

    def computed_from(self, *sources: str) -> dict[str, Any]:
        """The functions of ``computed`` from these sources by name, in their order."""
        return {x.name: x.function for x in self.computed if x.source in sources}


def is_recipe(value: Any) -> bool:
    """Whether a value is a recipe of any kind.

    Example:
      >>> import jaxrl_llm as jr
      >>> is_recipe(jr.recipes.grpo()), is_recipe(jr.recipes.eggroll()), is_recipe("grpo")
      (True, True, False)
    """
    return isinstance(getattr(value, "needs", None), RunNeeds)
