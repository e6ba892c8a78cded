"""``earlier_logp``: the weighted mean of log-probabilities under policies of earlier iterations."""

from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.regularizers import Earlier
from jaxrl_llm.train.models.denoising import PolicyScorer
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.part import At, Done, Part, Read, Setup, Source, Start
from jaxrl_llm.train.update.rows import unrouted


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe that keeps policies of earlier iterations."""
    del setup
    if recipe.earlier is None:
        return None
    return Part("earlier", _init, reads=_reads, after=_after, counts_steps=True)


def _init(recipe: Recipe, start: Start) -> Earlier:
    state = jax.tree.map(jnp.copy, cast(Any, recipe.earlier).init(start.params))
    return state._replace(count=start.replicated(state.count))


def _reads(batch: Batch, at: At) -> tuple[Read, ...]:
    if "earlier_logp" in batch.extras:
        return ()
    rule: Any = at.recipe.earlier
    count = len(rule.weights)
    return (Read(_SOURCE, {}, rows=unrouted, call=_mean_logp, count=count),)


def _mean_logp(scorer: PolicyScorer, earlier: Any, batch: Batch) -> dict[str, Array]:
    shares, policies = earlier
    total = jnp.zeros(batch.mask.shape)
    for share, policy in zip(shares, policies, strict=True):
        total += share * jax.lax.stop_gradient(scorer(policy, batch).logp)
    return {"earlier_logp": total}


def _after(state: TrainState, done: Done | None, at: At) -> tuple[TrainState, dict[str, Array]]:
    del done  # the rule counts steps
    rule: Any = at.recipe.earlier
    new = rule(state.earlier, state.params, at.policy_step)
    return state.with_parts(earlier=at.once_it_trains(new, state.earlier)), {}


def _earlier(at: At) -> tuple[PolicyScorer, ArrayTree]:
    """Their scorer, and their shares with their parameters."""
    state, rule = at.state, cast(Any, at.recipe.earlier)
    policies = [state.with_base(params) for params in state.earlier.policies]
    return at.setup.scorer, (rule.shares(state.earlier), policies)


_SOURCE = Source("earlier", _earlier)
