"""Results of a recipe's slots: checked, and put into the batch."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxrl_llm.core import Array, call_with, checks, masking
from jaxrl_llm.recipes import wiring
from jaxrl_llm.recipes.batch import Batch


def with_extra(batch: Batch, name: str, value: Array) -> Batch:
    """The batch with one more extra; a scalar becomes ``[P, 1, 1]``, split like the prompts."""
    if jnp.ndim(value) == 0:
        value = jnp.broadcast_to(jnp.asarray(value, jnp.float32), (batch.where.shape[0], 1, 1))
    return batch.with_extras({name: value})


def with_computed(recipe, batch: Batch, name: str, value: Array) -> Batch:
    """The batch with one more computed entry; what scales the update must be a scalar."""
    if name == wiring.UPDATE_SCALE:
        wiring.check_output(recipe.name, f"computed {name!r}", value, ())
    return with_extra(batch, name, value)


def corrected(recipe, batch: Batch) -> Batch:
    """The batch with the weights of the correction, without the tokens that it drops."""
    name = f"correction of recipe {recipe.name!r}"
    returned = recipe.correction(batch.old_logp, batch.behavior_logp, batch.mask)
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(
            f"{name} must return (weights, keep); got {type(returned).__name__}. A function of "
            "weights, or a rule, goes into corrections.rollout_correction."
        )
    weights, keep = returned
    checks.check_shape(name, "weights", weights, batch.mask.shape)
    return without(recipe, "correction", batch.replace(correction=weights), keep)


def without(recipe, slot: str, batch: Batch, keep: Array) -> Batch:
    """The batch without the tokens that a slot leaves out."""
    name = f"{slot} of recipe {recipe.name!r}"
    checks.check_shape(name, "keep", keep, batch.mask.shape)
    checks.check_bool(name, keep=keep)
    mask, correction = batch.mask & keep, batch.correction
    if correction is not None:
        correction = masking.zero_masked(correction, mask)
    return batch.replace(mask=mask, correction=correction)


def weights_of(
    recipe, function, batch: Batch, context: Mapping[str, Any], *shapes: tuple[int, ...]
) -> Array:
    """Weights of a weighting, 0 where masked; of these shapes, or of the mask's."""
    weights = call_with(function, batch.mask, context=context)
    wiring.check_output(recipe.name, "weights", weights, *(shapes or (batch.mask.shape,)))
    checks.check_float(f"Recipe {recipe.name!r}", weights=weights)
    by_head = weights.ndim > batch.mask.ndim
    return masking.zero_masked(weights, batch.mask[..., None] if by_head else batch.mask)
