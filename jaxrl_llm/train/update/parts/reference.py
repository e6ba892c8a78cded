"""The reference: its log-probabilities and statistics, and the rule of one that moves."""

from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxrl_llm.core import masking
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.compose import bind
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.parts.denoiser import of_likelihood
from jaxrl_llm.regularizers import Iterates
from jaxrl_llm.train.models.denoising import PolicyScorer
from jaxrl_llm.train.models.moving import first_reference, moved_reference
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.part import At, Done, Part, Read, Setup, Source, Start, absent
from jaxrl_llm.train.update.rows import after_previous_prompt, unrouted

# Separates the random numbers of a moving reference from those of the sampler.
_REFERENCE = 0x72656664


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe whose reference moves."""
    del setup
    if recipe.reference is None:
        return None
    draws = recipe.reference_draws
    return Part(
        "reference", _init, reads=_reads_moving, after=_after, counts_steps=True, draws=draws
    )


def _init(recipe: Recipe, start: Start) -> ArrayTree:
    first = start.params if start.reference is None else start.reference
    state = first_reference(cast(Any, recipe.reference), first, adapter=start.adapter)
    if isinstance(state, Iterates):  # it moves away from the policy, not from the reference
        state = state._replace(previous=start.params)
    return jax.tree.map(jnp.copy, state)


def reads(batch: Batch, at: At) -> tuple[Read, ...]:
    """What the recipe reads of its reference and the batch lacks."""
    recipe, needs = at.recipe, at.recipe.required_fields
    statistics, found = absent(batch, recipe, "reference"), []
    if "kl_ref_logp" in needs and "kl_ref_logp" not in batch.extras:
        call = bind(total_logp, entry="kl_ref_logp")
        found.append(Read(SOURCE, {}, rows=after_previous_prompt, call=call))
    entries = {name: name for name in statistics}
    if "ref_logp" in needs and batch.ref_logp is None:
        entries["ref_logp"] = "logp"
    likelihood = of_likelihood(recipe, "ref").items()
    entries |= {entry: name for entry, name in likelihood if entry not in batch.extras}
    if entries:
        found.append(Read(SOURCE, entries, statistics, rows=unrouted))
    return tuple(found)


def total_logp(
    scorer: PolicyScorer, params: ArrayTree, batch: Batch, *, entry: str
) -> dict[str, Array]:
    """Log-probabilities ``[P, G]`` of whole responses, as an entry of the batch."""
    logp = scorer(params, batch).logp
    return {entry: jnp.sum(masking.zero_masked(logp, batch.mask), axis=-1)}


def _reads_moving(batch: Batch, at: At) -> tuple[Read, ...]:
    likelihood = of_likelihood(at.recipe, "anchor").items()
    anchor = {entry: name for entry, name in likelihood if entry not in batch.extras}
    return (*reads(batch, at), *([Read(_ANCHOR, anchor)] if anchor else []))


def _after(state: TrainState, done: Done | None, at: At) -> tuple[TrainState, dict[str, Array]]:
    """Its rule counts steps, so it also runs after one whose updates were skipped.

    A reference that is replaced once would otherwise never be.
    """
    del done
    rule: Any = at.recipe.reference
    # The same key in every step: a rule may draw once for several steps.
    drawn = jax.random.fold_in(at.key, _REFERENCE) if at.recipe.reference_draws else None
    new = moved_reference(rule, state.reference, state.params, at.policy_step, key=drawn)
    if isinstance(state.reference, Iterates):
        new, params = new
        state = state._replace(params=at.once_it_trains(params, state.params))
    return state.with_parts(reference=at.once_it_trains(new, state.reference)), {}


def _reference(at: At) -> tuple[PolicyScorer, ArrayTree]:
    return at.setup.scorer, at.state.reference_policy if at.reference is None else at.reference


def _anchor(at: At) -> tuple[PolicyScorer, ArrayTree]:
    return at.setup.scorer, at.state.anchor_policy


SOURCE, _ANCHOR = Source("reference", _reference), Source("anchor", _anchor)
