"""A process reward model: it learns from a batch before the policy reads its log-probabilities."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.compose import accepted
from jaxrl_llm.preferences.groups import count_pairs
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.parts.process_reward import ProcessRewardModel
from jaxrl_llm.train.batches import accumulate_gradients
from jaxrl_llm.train.models.critic import CriticState
from jaxrl_llm.train.models.denoising import PolicyScorer
from jaxrl_llm.train.optimizer import apply_if_finite
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.part import At, Part, Read, Setup, Source
from jaxrl_llm.train.update.parts import old_policy
from jaxrl_llm.train.update.parts.critic import init_second
from jaxrl_llm.train.update.reads import read_batch
from jaxrl_llm.train.update.rows import unrouted


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe with a process reward model."""
    del setup
    if recipe.prm is None:
        return None
    cost = "an optimizer step of the process reward model"
    return Part("critic", init_second, first=_first, reads=_reads, cost=cost)


def _first(state: TrainState, batch: Batch, at: At) -> tuple[TrainState, Batch, dict[str, Array]]:
    """It learns before the batch is scored, as the policy learns from what it says."""
    state, batch = read_batch((old_policy.part(at.recipe, at.setup),), state, batch, at)
    rule: Any = at.recipe.prm
    new, of_update = update_prm(
        rule,
        state.critic,
        batch,
        scorer=_scorer(at),
        optimizer=at.setup.second_optimizer,
        microbatches=at.slices,
    )
    metrics = {f"critic_{name}": x for name, x in of_update.items()}
    return state.with_parts(critic=new), batch, metrics


def _reads(batch: Batch, at: At) -> tuple[Read, ...]:
    del at
    if "prm_logp" in batch.extras:
        return ()
    return (Read(_SOURCE, {"prm_logp": "logp"}, rows=unrouted),)


def update_prm(
    rule: ProcessRewardModel,
    state: CriticState,
    batch: Batch,
    *,
    scorer: PolicyScorer,
    optimizer: Any,
    microbatches: int,
) -> tuple[CriticState, dict[str, Array]]:
    """The process reward model after an optimizer step on a batch with ``old_logp``."""
    pairs = count_pairs(batch.rewards, batch.mask, where=batch.where)
    rollouts = jnp.sum(batch.where & jnp.any(batch.mask, axis=-1))
    batch = batch.replace(experts=None)  # which are those of the policy

    def loss(params: ArrayTree, part: Batch):
        logp = scorer(params["model"], part).logp
        return rule.total_loss(logp, part, pairs=pairs, rollouts=rollouts), ()

    value, _, grads = accumulate_gradients(loss, state.params, batch, microbatches)
    carry = (state.params, state.opt_state)
    # Without anything to learn from, the momentum alone would move it.
    trains = rollouts > 0
    if "pairs" in accepted(rule.loss):
        trains &= pairs > 0
    (params, opt_state), metrics = apply_if_finite(optimizer, carry, value, grads, trains=trains)
    return CriticState(params, opt_state, ()), metrics


def _scorer(at: At) -> PolicyScorer:
    return dataclasses.replace(at.setup.scorer, model=at.setup.second_model)


def _prm(at: At) -> tuple[PolicyScorer, ArrayTree]:
    return _scorer(at), at.state.critic.params["model"]


_SOURCE = Source("process reward model", _prm)
