"""The parts of a step, one file a part; :data:`PARTS` is the order in which a step runs them."""

from collections.abc import Callable, Collection

from jaxrl_llm.recipes import Recipe
from jaxrl_llm.train.update.part import Part, Setup
from jaxrl_llm.train.update.parts import (
    critic,
    denoiser,
    earlier_policies,
    gradient_norms,
    last_kl,
    last_visit,
    learned_state,
    mismatched_prompts,
    old_policy,
    process_reward,
    reference,
    reference_answers,
    teacher,
    token_steps,
    turn_by_turn,
    update_scale,
    warmup,
)

PARTS: tuple[Callable[[Recipe, Setup], Part | None], ...] = (
    process_reward.part,
    last_visit.part,
    old_policy.part,
    gradient_norms.part,
    last_kl.part,
    learned_state.part,
    reference.part,
    teacher.part,
    reference_answers.part,
    mismatched_prompts.part,
    earlier_policies.part,
    token_steps.part,
    warmup.part,
    update_scale.part,
    turn_by_turn.part,
    denoiser.part,
    critic.part,
)


def parts_of(setup: Setup, *, without: Collection[Callable] = ()) -> tuple[Part, ...]:
    """The parts of a recipe's step, but those that the functions ``without`` make.

    Parts of a user's own come last, from the method ``step_part`` of their records.
    """
    made = [make(setup.recipe, setup) for make in PARTS if make not in without]
    made += [record.step_part(setup) for record in setup.recipe.parts]
    return tuple(part for part in made if part is not None)
