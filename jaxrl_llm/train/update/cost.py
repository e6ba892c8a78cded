"""What a method costs besides its optimizer steps: forward passes before the update, by model."""

from collections import Counter
from typing import Any

import jax

from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.inputs import shaped_extras
from jaxrl_llm.train.batches import Passes
from jaxrl_llm.train.update.part import At, Part, Setup, Teacher
from jaxrl_llm.train.update.parts import parts_of, reference
from jaxrl_llm.train.update.reads import merged_reads


def forward_passes(
    recipe: Recipe, *, epochs: int = 1, minibatches: int = 1, stale: bool = False
) -> dict[str, int]:
    """Number of forward passes over the rows of a batch before its update, by the model's name.

    Entries that one pass gives count once. A frozen reference, which a run scores before the step,
    counts too.

    Args:
      recipe: The method.
      epochs, minibatches, stale: Those of :func:`~jaxrl_llm.train.make_step`.

    Example:
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.train.update.cost import forward_passes
      >>> forward_passes(jr.recipes.dr_grpo(length=4))
      {}
      >>> forward_passes(jr.recipes.grpo(kl_coef=0.1), minibatches=2)
      {'policy': 1, 'reference': 1}
    """
    setup = _setup(recipe, epochs, minibatches, stale)
    parts = parts_of(setup)
    if recipe.reference is None and recipe.uses_reference:
        parts = (*parts, Part("reference", reads=reference.reads))
    nothing: Any = None
    other = Teacher(nothing, nothing) if recipe.learns_from_model else None
    at = At(setup, nothing, 1, teacher=other)
    counts = Counter[str]()
    for reads in merged_reads(parts, _unread_batch(recipe), at):
        counts[reads[0].source.name] += reads[0].count
    return dict(counts)


def describe(recipe: Recipe, *, epochs: int = 1, minibatches: int = 1, stale: bool = False) -> str:
    """The cost of a method as one sentence, such as "Before each update: policy 1 pass."."""
    passes = forward_passes(recipe, epochs=epochs, minibatches=minibatches, stale=stale)
    told = [f"{name} {n} pass{'' if n == 1 else 'es'}" for name, n in passes.items()]
    setup = _setup(recipe, epochs, minibatches, stale)
    told += [part.cost for part in parts_of(setup) if part.cost]
    return f"Beside its optimizer steps, a batch costs: {'; '.join(told) or 'no pass'}."


def _setup(recipe: Recipe, epochs: int, minibatches: int, stale: bool) -> Setup:
    nothing: Any = None
    return Setup(
        recipe=recipe,
        scorer=nothing,
        passes=Passes(epochs, minibatches),
        stale=stale,
        score_old=epochs * minibatches > 1 and recipe.compares_old,
    )


def _unread_batch(recipe: Recipe) -> Batch:
    """Shapes of a batch as a run hands it to a step: without what the step computes."""

    def shaped(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    prompts, group, length = 2, 2, 3
    extras = shaped_extras(recipe, prompts, group, length)
    if "answer_logp" in recipe.required_fields:
        names = ("ground_truth", "ground_truth_mask", "turn_ids", "turn_where")
        extras |= {name: shaped(prompts, group, length) for name in names}
    if recipe.has_teacher and not recipe.learns_from_model:
        names = ("teacher_prompt_tokens", "teacher_prompt_mask")
        extras |= {name: shaped(prompts, group, length) for name in names}
    if recipe.computed_from("last_visit"):
        extras["prompt_ids"] = shaped(prompts)
    return Batch(
        tokens=shaped(prompts, group, length, dtype="int32"),
        mask=shaped(prompts, group, length, dtype="bool"),
        rewards=shaped(prompts, group),
        where=shaped(prompts, group, dtype="bool"),
        prompt_tokens=shaped(prompts, length, dtype="int32"),
        prompt_mask=shaped(prompts, length, dtype="bool"),
        behavior_logp=shaped(prompts, group, length),
        extras={k: v for k, v in extras.items() if k not in recipe.step_fields},
    )
