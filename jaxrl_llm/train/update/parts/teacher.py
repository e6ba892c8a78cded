"""The teacher: statistics of another model, or of the policy or its reference after other prompts.

A statistic of the policy may read all of its logits: the teacher's hidden states are then an entry
of the batch, and its output matrix is a constant of the step.
"""

import dataclasses
import math

import jax

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.denoising import check_causal
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.train.models.denoising import PolicyScorer
from jaxrl_llm.train.models.score import Scorer
from jaxrl_llm.train.update.part import At, Objective, Part, Read, Setup, Source, Teacher, absent
from jaxrl_llm.train.update.rows import padded


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe with a teacher on the devices."""
    del setup
    if not recipe.has_teacher:
        return None
    return Part("teacher", reads=_reads, wrap=_wrap if recipe.reads_teacher_logits else None)


def check_teacher(function: str, recipe: Recipe, model: Model, teacher: Model) -> None:
    """Raises ValueError if a recipe does not learn from another model, or cannot from this one."""
    if not recipe.learns_from_model:
        what = "is its own teacher" if recipe.has_teacher else "learns from none"
        raise ValueError(f"{function}: teacher has no effect: recipe {recipe.name!r} {what}.")
    check_causal(function, teacher, what="the teacher")
    sizes = teacher.config.vocab_size, model.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{function}: the teacher has {sizes[0]:,} tokens in its vocabulary, but the policy "
            f"has {sizes[1]:,}; for a teacher with another tokenizer, use spans of text and a "
            "train.AlignedTeacher."
        )
    if recipe.teacher_top > sizes[0]:
        raise ValueError(
            f"{function}: recipe {recipe.name!r} reads the {recipe.teacher_top} most probable "
            f"tokens of the teacher, but its vocabulary has {sizes[0]:,}."
        )


def _reads(batch: Batch, at: At) -> tuple[Read, ...]:
    recipe = at.recipe
    statistics = absent(batch, recipe, "teacher")
    states = recipe.reads_teacher_logits and "teacher_hidden" not in batch.extras
    if not statistics and not states:
        return ()
    own_prompts = "teacher_prompt_tokens" in batch.extras
    if at.teacher is None and not own_prompts:
        names = ", ".join([*statistics, *(["teacher_hidden"] if states else [])])
        raise ValueError(
            f"Recipe {recipe.name!r}: the batch needs teacher_prompt_tokens and "
            f"teacher_prompt_mask in its extras, or {names} computed from them, since no other "
            "model is the teacher."
        )

    def call(scorer: Scorer, params: ArrayTree, rows: Batch) -> dict[str, Array]:
        return scorer.teacher(params, rows, statistics, states=states)

    return (Read(_SOURCE, {}, rows=_own_prompts if own_prompts else None, call=call),)


def _own_prompts(batch: Batch, at: At) -> tuple[Batch, int]:
    """The batch as a teacher reads it that has a prompt for each response."""
    rows = batch.extras["teacher_prompt_tokens"].shape[1:], batch.tokens.shape[1:]
    return padded(batch, at.slices, sum(map(math.prod, rows)))


def _teacher(at: At) -> tuple[PolicyScorer, ArrayTree]:
    """The scorer and parameters: of another model, the moving reference or the policy."""
    if at.teacher is not None:
        scorer = dataclasses.replace(at.setup.scorer, model=at.teacher.model, remat="none")
        return scorer, at.teacher.params
    moving = at.recipe.reference is not None
    return at.setup.scorer, at.state.reference_policy if moving else at.state.policy


def _wrap(objective: Objective, at: At) -> Objective:
    """The loss with a scorer that knows the teacher's output matrix."""
    reader, params = _teacher(at)
    scorer = reads_logits_of(at.setup.scorer, Teacher(reader.model, params))
    return objective.of_scorer(scorer)


def reads_logits_of(scorer: PolicyScorer, teacher: Teacher) -> PolicyScorer:
    """The scorer with a teacher's output matrix and cap, which are constants of the step."""
    matrix = jax.lax.stop_gradient(teacher.model.output_matrix(teacher.params))
    cap = teacher.model.logit_cap
    return dataclasses.replace(scorer, teacher_matrix=matrix, teacher_logit_cap=cap)


_SOURCE = Source("teacher", _teacher)
