"""``make_evolution_step``: one compiled update from what the members of a population scored."""

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import diagnostics, evolution
from jaxrl_llm.core import masking
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.sharding import on_mesh
from jaxrl_llm.recipes import Batch, EvolutionRecipe
from jaxrl_llm.train.guards import guarded_update
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.step import Step, compiled_step


def make_evolution_step(
    recipe: EvolutionRecipe,
    optimizer: optax.GradientTransformation,
    *,
    mesh: jax.sharding.Mesh | None = None,
    donate: bool = True,
) -> Step:
    """A compiled function that makes the scores of a population into an update of the state.

    In order: missing scores become the worst of their prompt; the recipe shapes fitness; the noise
    of epoch ``state.step`` is drawn again and contracted to a gradient; one update of the
    optimizer. Of the batch only ``rewards`` ``[P, G]`` and ``where`` decide; with a mesh every
    device has all of them and draws the same noise, so that no more than numbers of the size of the
    scores, and norms, go from device to device.

    Leaves that the recipe freezes stay bit for bit what they were, whatever the optimizer makes of
    their zero gradient. ``optax.masked(optimizer, jr.evolution.moving(classes))`` spares the memory
    of its state for them. An update that is no finite number is not made, as in :func:`make_step`.

    Args:
      recipe: The method.
      optimizer: Any optax transformation; the one given to ``init_state``.
      mesh: The mesh that the state lives on.
      donate: Reuse the memory of the state that comes in, which then cannot be used again.

    Returns:
      ``step(state, batch) -> (state, metrics)``; metrics are float32 scalars: ``reward``, the mean
      score; ``reward_std``, of the members of a prompt; ``member_std``, of the members' means over
      prompts; ``informative``, the share of prompts on which members differ; ``missing``, scores
      that count as the worst; ``flat``, 1 where all fitness is equal, so that the gradient is zero;
      ``length`` and ``tokens`` of the responses; ``loss``, minus the mean score; ``grad_norm``,
      ``update_norm`` and ``skipped`` as in :func:`make_step`.

    Raises:
      ValueError: When called, if the members do not fit the recipe, or it moves no leaf.

    Example:
      >>> import jax, optax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> recipe, optimizer = jr.recipes.eggroll(sigma=0.01), optax.sgd(0.5)
      >>> state = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0))
      >>> sample = jr.rollout.make_population_sampler(model, max_new_tokens=4)
      >>> step = jr.train.make_evolution_step(recipe, optimizer)
      >>> prompts, members = [[1, 2, 3], [4]], jnp.arange(8)
      >>> classes = recipe.classes(params)
      >>> delta = jax.jit(lambda state: recipe.delta(
      ...     state.params, classes, state.key, state.step, members))(state)
      >>> rollout = sample(state.params, delta, state.key, prompts)
      >>> scores = (rollout.tokens > 100).mean(axis=-1, dtype=jnp.float32)
      >>> batch = jr.recipes.Batch(
      ...     tokens=rollout.tokens, mask=rollout.mask, rewards=scores,
      ...     where=jnp.ones_like(scores, bool), prompt_tokens=rollout.prompt_tokens,
      ...     prompt_mask=rollout.prompt_mask)
      >>> state, metrics = step(state, batch)
      >>> int(state.step), float(metrics["missing"])
      (1, 0.0)

    References:
      EGGROLL (arXiv:2511.16652), sec. 4.
    """

    def prepare(state: TrainState, batch: Batch, key: Array | None) -> tuple[Batch, ArrayTree]:
        del key
        return batch, state.algo_state

    def step(state: TrainState, batch: Batch, key: Array, base: ArrayTree):
        del base
        classes = recipe.classes(state.params)
        fitness, missing = recipe.shape(batch.rewards, where=batch.where)
        grads = recipe.gradient(state.params, classes, key, state.step, fitness)
        metrics = population_metrics(recipe, batch, fitness, missing)
        carry = (state.params, state.opt_state)
        carry, made = guarded_update(optimizer, carry, -metrics["reward"], grads)
        params = jax.tree.map(
            lambda moves, new, old: new if moves else old,
            evolution.moving(classes),
            carry[0],
            state.params,
        )
        state = state._replace(params=params, opt_state=carry[1], step=state.step + 1)
        return state, metrics | made

    return compiled_step(on_mesh(step, mesh), on_mesh(prepare, mesh), donate=donate, draws=True)


def moving_only(recipe, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer without a state for the leaves that an evolution recipe freezes.

    That of any other recipe stays as it is.
    """
    if not isinstance(recipe, EvolutionRecipe):
        return optimizer
    return optax.masked(optimizer, lambda params: evolution.moving(recipe.classes(params)))


def population_metrics(
    recipe: EvolutionRecipe, batch: Batch, fitness: Array, missing: Array
) -> dict[str, Array]:
    """What there is to know of a population's scores; see :func:`make_evolution_step`."""
    where = batch.where & jnp.isfinite(batch.rewards)
    scores = masking.zero_masked(batch.rewards, where)
    spread = diagnostics.group_spread(scores, where=where)
    metrics = {
        "reward": masking.masked_mean(scores, where),
        "reward_std": spread.mean_std,
        "informative": spread.informative,
        "missing": missing,
        "flat": jnp.all(fitness == fitness[0]),
        "length": masking.masked_mean(masking.lengths(batch.mask), jnp.any(batch.mask, axis=-1)),
        "tokens": jnp.sum(batch.mask),
    }
    if recipe.shared:
        metrics["member_std"] = jnp.std(masking.masked_mean(scores, where, axis=0))
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics)
