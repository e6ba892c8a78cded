"""A critic: its values of the batch, and its optimizer steps after the policy's."""

from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.parts.critic import Critic
from jaxrl_llm.train.batches import Passes, accumulate_gradients, run_passes
from jaxrl_llm.train.models.critic import CriticState, critic_values
from jaxrl_llm.train.optimizer import apply_if_finite, keep
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update.part import At, Done, Part, Read, Setup, Source, Start


def part(recipe: Recipe, setup: Setup) -> Part | None:
    """The part of a recipe with a critic."""
    del setup
    if recipe.critic is None:
        return None
    cost = "as many optimizer steps of the critic as of the policy"
    return Part("critic", init_second, reads=_reads, amend=_amend, after=_after, cost=cost)


def init_second(recipe: Recipe, start: Start) -> CriticState:
    """The state of a critic or a process reward model before the first step.

    Raises:
      ValueError: If its parameters or its optimizer are absent.
    """
    params, optimizer = start.second_params, start.second_optimizer
    rule: Any = recipe.second_model
    if params is None or optimizer is None:
        raise ValueError(
            f"init_state: recipe {recipe.name!r} has a critic; give critic="
            f"init_critic(model, params, heads={rule.heads}, key=...) and its critic_optimizer."
        )
    target = () if rule.target_rate is None else jax.tree.map(jnp.copy, params)
    copied = jax.tree.map(jnp.copy, params) if start.copy else params
    return CriticState(copied, start.optimizer_state(optimizer, params), target)


def _reads(batch: Batch, at: At) -> tuple[Read, ...]:
    del at
    return () if "old_values" in batch.extras else (Read(_SOURCE, {}, call=_values),)


def _values(model: Model, params: ArrayTree, batch: Batch) -> dict[str, Array]:
    return {"old_values": critic_values(model, params, batch)}


def _amend(state: TrainState, batch: Batch, at: At) -> tuple[TrainState, Batch]:
    if "values" not in batch.extras:
        rule: Any = at.recipe.critic
        values = rule.combine(batch.extras["old_values"])
        batch = batch.with_extras({"values": values})
    return state, batch


def _after(state: TrainState, done: Done, at: At) -> tuple[TrainState, dict[str, Array]]:
    rule: Any = at.recipe.critic
    new, of_update = update_critic(
        rule,
        state.critic,
        at.recipe,
        done.batch,
        passes=at.setup.passes.of(done.batch.packing),
        model=at.setup.second_model,
        optimizer=at.setup.second_optimizer,
        remat=at.setup.remat,
    )
    metrics = {f"critic_{name}": x for name, x in of_update.items()}
    return state.with_parts(critic=new), metrics


def update_critic(
    critic: Critic,
    state: CriticState,
    recipe: Recipe,
    batch: Batch,
    *,
    passes: Passes,
    model: Any,
    optimizer: Any,
    remat: str,
) -> tuple[CriticState, dict[str, Array]]:
    """The critic after the optimizer steps of a prepared batch, and their metrics."""
    batch = recipe.responses(batch)

    def loss(params: ArrayTree, part: Batch):
        return critic.total_loss(critic_values(model, params, part, remat=remat), part), ()

    def update(carry, part: Batch, trains: Array):
        part = recipe.weigh(part) if passes.minibatches > 1 else part
        trains &= jnp.any(part.extras["critic_weights"] != 0)
        value, _, grads = accumulate_gradients(loss, carry[0], part, passes.accumulated)
        carry, metrics = apply_if_finite(optimizer, carry, value, grads, trains=trains)
        return carry, (metrics, None)

    before = (state.params, state.opt_state)
    (params, opt_state), (metrics, _) = run_passes(passes, update, before, batch)
    target = _average(state.target, params, critic.target_rate)
    target = keep(metrics["updates"] > 0, target, state.target)
    return CriticState(params, opt_state, target), metrics


def _average(target: ArrayTree, params: ArrayTree, rate: float | None) -> ArrayTree:
    """The target after a step that moves it toward the parameters by ``rate``."""
    if rate is None:
        return ()
    return jax.tree.map(lambda a, b: a + rate * (b - a), target, params)


def _critic(at: At) -> tuple[Model | None, ArrayTree]:
    state, rule = at.state.critic, cast(Any, at.recipe.critic)
    params = state.params if rule.target_rate is None else state.target
    return at.setup.second_model, params


_SOURCE = Source("critic", _critic)
