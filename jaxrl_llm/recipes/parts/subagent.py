"""``Subagent``: a second policy that the first one calls, and how its answers are credited."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jaxrl_llm.core import checks
from jaxrl_llm.recipes.parts.part import RecipePart
from jaxrl_llm.recipes.records import format_fields


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Subagent(RecipePart):
    """The method of a policy that answers questions of the main policy's environment.

    Each rollout of a query is given the same number of answers, some of them several times or not
    at all; they are credited together and train the subagent, one row each:

        calls = align_calls(where, key, count=count)
        A = advantage(rewards(forms, rewards of the rollouts), calls)

    Attributes:
      recipe: Its ``Recipe``, which names ``call_advantages`` and updates once per batch.
      rewards: ``(forms [P, G, S], rewards [P, G], *, call_where [P, G, S]) -> [P, G, S]``, the
        reward of each answer, such as ``rewards.call_rewards``.
      advantage: ``(call_rewards [P, G, S], calls [P, G, D], *, call_where [P, G, D]) -> [P, G,
        D]``, such as ``advantages.m_grpo``.
      count: D, the number of answers of a rollout that train.

    Raises:
      TypeError: If a slot has a wrong type.
      ValueError: If ``count`` is below 1, or the recipe does not name ``call_advantages``, has a
        second model, a teacher or a subagent itself, or makes several updates.
    """

    recipe: Any
    rewards: Callable
    advantage: Callable
    count: int = 2

    keyword: ClassVar[str] = "subagent"
    title: ClassVar[str] = "a subagent"
    left_to_right: ClassVar[bool] = True
    takes_texts: ClassVar[bool] = False
    reads_turns: ClassVar[bool] = True

    def __post_init__(self):
        checks.check_count("Subagent", count=self.count)
        for slot in ("rewards", "advantage"):
            if not callable(value := getattr(self, slot)):
                raise TypeError(f"Subagent: {slot} must be a function; got {value!r}.")
        recipe = self.recipe
        if not hasattr(recipe, "required_fields"):
            raise TypeError(f"Subagent: recipe must be a Recipe; got {recipe!r}.")
        if "call_advantages" not in recipe.required_fields:
            raise ValueError(f"Subagent: recipe {recipe.name!r} does not read call_advantages.")
        absent = recipe.required_fields - recipe.step_fields - {"call_advantages"}
        filled = [part.title for part in recipe.parts]
        filled += ["a collector"] if recipe.collector is not None else []
        if absent or filled or recipe.uses_reference or recipe.has_teacher or recipe.computed:
            what = ", ".join([*sorted(absent), *filled]) or "another model or computed numbers"
            raise ValueError(
                f"Subagent: recipe {recipe.name!r} reads {what}, which a run does not bring for "
                "answers."
            )
        if recipe.epochs * recipe.minibatches > 1:
            raise ValueError(
                f"Subagent: recipe {recipe.name!r} makes {recipe.epochs * recipe.minibatches} "
                "optimizer steps per batch; a subagent makes one."
            )

    def __repr__(self) -> str:
        return f"Subagent({format_fields(self)})"

    def check(self, recipe) -> None:
        """Raises ValueError if the policy waits for its critic, while a subagent trains."""
        if recipe.critic is not None and recipe.critic.warmup:
            raise ValueError(
                f"Recipe {recipe.name!r}: the critic trains alone in the first "
                f"{recipe.critic.warmup} steps, but a subagent trains in every step; leave out the "
                "critic's warmup or the subagent."
            )

    def refuses_other_sampler(self) -> str:
        """Its answers are of the current weights of both policies."""
        return "trains a subagent on the answers of its own weights"
