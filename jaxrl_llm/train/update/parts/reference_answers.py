"""``answer_logp``: log-probabilities of reference answers after each turn of a response."""

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.train.models.score import Scorer
from jaxrl_llm.train.update.part import POLICY, At, Part, Read, Setup
from jaxrl_llm.train.update.rows import padded

_SOURCES = {"ground_truth", "ground_truth_mask", "turn_ids", "turn_where"}


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe that reads them."""
    del setup
    read = "answer_logp" in recipe.required_fields
    return Part("reference_answers", reads=_reads) if read else None


def _reads(batch: Batch, at: At) -> tuple[Read, ...]:
    if "answer_logp" in batch.extras:
        return ()
    if missing := sorted(_SOURCES - set(batch.extras)):
        raise ValueError(
            f"Recipe {at.recipe.name!r}: the batch has no {' and no '.join(missing)} in its "
            "extras, and no answer_logp computed from them."
        )
    return (Read(POLICY, {}, rows=_rows, call=_answers),)


def _rows(batch: Batch, at: At) -> tuple[Batch, int]:
    (G, T), L = batch.tokens.shape[1:], batch.extras["ground_truth"].shape[-1]
    return padded(batch, at.slices, batch.prompt_tokens.shape[-1] + G * (T + L))


def _answers(scorer: Scorer, params: ArrayTree, batch: Batch) -> dict[str, Array]:
    return {"answer_logp": scorer.answers(params, batch)}
