"""Checks of a recipe together with the train step and a checkpoint.

Each check raises an AssertionError that names the check, the recipe and the number that differs.
``extras`` are arrays that the recipe reads under names of its own, see ``cases.make_case``.
"""

import tempfile
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.core import ArrayTree, bind
from jaxrl_llm.diffusion import Draws, FlowLikelihood, Likelihood
from jaxrl_llm.models import AttentionContext, Model, param_shardings
from jaxrl_llm.models.sharding import batch_sharding, batch_shards, shard
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.recipes.wiring import DRAW_LOGP
from jaxrl_llm.testing import cases
from jaxrl_llm.testing.array_checks import MeshSizes, meshes
from jaxrl_llm.testing.cases import (
    Extras,
    compiled,
    expect_close,
    fail,
    make_case,
    with_computed,
)
from jaxrl_llm.testing.model import tiny_flow_model, tiny_model
from jaxrl_llm.testing.model_checks import layout, model, model_case, packed, score_batch
from jaxrl_llm.train import (
    StepOptions,
    TrainState,
    draw_masks,
    init_critic,
    init_state,
    make_step,
)
from jaxrl_llm.train.checkpoint import Checkpoints
from jaxrl_llm.train.models.denoising import draws_of_pass
from jaxrl_llm.train.models.score import ModelScores
from jaxrl_llm.train.update.part import prepare_key

# Temperature of the policy in the train step: at 1, a step that ignores it would pass.
TEMPERATURE = 0.7


def _model_and_batch(
    recipe: Recipe, extras: Extras = None
) -> tuple[tuple[Model, ArrayTree], Batch]:
    """A model that the recipe can train, and a batch for the model."""
    if recipe.likelihood is None:
        return model(), model_case(recipe, extras).batch
    if isinstance(recipe.likelihood, FlowLikelihood):
        batch = make_case(recipe=recipe, extras=extras).batch
        others = {k: v for k, v in batch.extras.items() if k != "old_step_mean"}
        batch = batch.replace(old_logp=None, behavior_logp=None, extras=others)
        return tiny_flow_model(), batch
    network, params = tiny_model(num_layers=1, causal=False, vocab_size=260, mask_id=259)
    batch = make_case(recipe=recipe, extras=extras).batch
    draws = draw_masks(recipe.likelihood, jax.random.key(3), batch)
    batch = batch.replace(extras={**batch.extras, **draws}, advantages=None, behavior_logp=None)
    scored = jax.jit(bind(plain_scores, network=network, recipe=recipe))(params, batch)
    rng = np.random.default_rng(1)

    def near(x) -> np.ndarray:
        x = np.asarray(x)
        return np.where(x == 0, 0.0, x + rng.normal(0.0, 0.1, x.shape)).astype(np.float32)

    of_draws = [name for name in ("old_draw_logp", "ref_draw_logp") if name in batch.extras]
    terms = {name: near(scored.statistics[DRAW_LOGP]) for name in of_draws}
    batch = batch.with_extras(terms)
    batch = batch.replace(old_logp=near(scored.logp), ref_logp=near(scored.logp))
    return (network, params), batch


def plain_scores(params: ArrayTree, batch: Batch, *, network: Model, recipe: Recipe) -> ModelScores:
    """The scores that training computes for a denoiser's batch, from all logits at once.

    Each draw is one forward pass over rows with the padding between prompt and response. The mask
    id is removed from the vocabulary before the softmax.
    """
    likelihood, mask_id = cast("Likelihood", recipe.likelihood), network.config.mask_id
    (P, G, _), extras = batch.tokens.shape, batch.extras
    draws = Draws(
        *(jnp.moveaxis(extras[name], -1, 0) for name in ("masked", "noise", "masked_prompt"))
    )
    there = jnp.concatenate([batch.prompt_mask, jnp.ones((P, batch.tokens.shape[-1]), bool)], -1)
    there = jnp.broadcast_to(there[:, None], (P, G, there.shape[-1]))
    places = (jnp.cumsum(there, axis=-1) - 1).astype(jnp.int32)
    targets = (batch.tokens - (batch.tokens > mask_id))[..., None]
    logp, entropy = [], []
    for masked, hidden in zip(draws.masked, draws.prompt, strict=True):
        prompts = jnp.where(hidden, mask_id, batch.prompt_tokens[:, None])
        shown = jnp.where(masked | ~extras["written"], mask_id, batch.tokens)
        row = jnp.concatenate([prompts, shown], axis=-1)
        states, _ = network.apply(params, row, places, AttentionContext(there))
        logits = states[:, :, prompts.shape[-1] :] @ network.output_matrix(params).T / TEMPERATURE
        log_probs = jax.nn.log_softmax(jnp.delete(logits, mask_id, axis=-1))
        logp.append(jnp.take_along_axis(log_probs, targets, axis=-1)[..., 0])
        each = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
        entropy.append(jnp.where(masked, each, 0.0))
    logp, seen = jnp.stack(logp), jnp.maximum(jnp.sum(draws.masked, axis=0), 1)
    advantages = batch.advantages if likelihood.reads_advantages else None
    estimate = likelihood.estimate(logp, draws, extras["written"], advantages=advantages)
    each = jnp.where(draws.masked, logp / jnp.where(draws.masked, draws.t[..., None], 1.0), 0.0)
    return ModelScores(
        jnp.where(batch.mask, estimate, 0.0),
        jnp.where(batch.mask, sum(entropy) / seen, 0.0),
        {DRAW_LOGP: jnp.moveaxis(each, 0, -1)},
    )


def _descended(
    recipe: Recipe, *, extras: Extras, microbatches: int = 1, mesh=None, rows=False
) -> ArrayTree:
    """The gradient as training applies it: what one step of plain gradient descent subtracts."""
    (network, params), batch = _model_and_batch(recipe, extras)
    batch = packed(batch) if rows else batch
    # Of several passes over a batch only the first moves the parameters.
    optimizer = optax.sgd(lambda count: 1.0 * (count == 0))
    if mesh is not None:
        params = shard(params, param_shardings(params, mesh))
        batch = jax.device_put(batch, batch_sharding(mesh))
    critic, critic_optimizer = None, None
    if recipe.second_model is not None:
        heads = recipe.second_model.heads
        critic = init_critic(network, params, heads=heads, key=jax.random.key(1))
        critic_optimizer = optax.sgd(1e-2)
    state = init_state(
        params,
        optimizer,
        recipe,
        key=jax.random.key(0),
        mesh=mesh,
        critic=critic,
        critic_optimizer=critic_optimizer,
    )
    if recipe.critic is not None:  # in whose warmup the policy would not move
        state = state._replace(step=state.step + recipe.critic.warmup)
    step = make_step(
        network,
        recipe,
        optimizer,
        microbatches=microbatches,
        temperature=TEMPERATURE if network.velocity is None else 1.0,
        mesh=mesh,
        remat="none",
        options=StepOptions(
            epochs=getattr(recipe.likelihood, "passes", 1),
            minibatches=1,
            critic_optimizer=critic_optimizer,
        ),
    )
    after, _ = step(state, batch)
    return jax.tree.map(lambda a, b: np.asarray(b) - np.asarray(a), after.params, params)


def check_train_step(
    recipe: Recipe,
    *,
    sizes: Sequence[MeshSizes] = ({"context": 2, "fsdp": 2, "tensor": 2},),
    microbatches: int = 2,
    rows: bool = True,
    extras: Extras = None,
) -> None:
    """A train step applies the gradient of the loss: in microbatches, packed rows and on a mesh.

    The temperature is not 1, and the expected gradient is assembled by hand. The default mesh has
    the axes that split tokens, rows with weights, and heads; with too few devices, the step runs on
    one. Without ``rows``, responses are padded. A recipe that updates turn by turn is checked with
    one update for all turns.
    """
    if recipe.likelihood is not None:
        return _check_denoising_step(recipe, sizes, extras)
    recipe = recipe.replace(turn_updates=None)
    params, batch = model()[1], model_case(recipe, extras).batch
    way, functions = layout(bind(score_batch, temperature=TEMPERATURE), recipe), compiled(recipe)
    if recipe.draws:
        key = prepare_key(jax.random.key(0), 0)
        prepared, _ = jax.jit(recipe.prepare)(batch, recipe.init(), key=key)
    else:
        prepared, _ = functions.prepare(batch, recipe.init())
    batch = with_computed(recipe, batch, prepared)
    scored = way.score(params, batch)
    prepared = recipe.measure(prepared, scored.logp)
    grads = functions.loss_and_grad(scored.logp, scored.entropy, scored.statistics, prepared)[1]
    scale = prepared.extras["update_scale"][0, 0, 0] if "update_scale" in prepared.extras else 1.0
    want = jax.tree.map(lambda x: scale * x, way.pull(params, batch, grads))
    for mesh in meshes(sizes) or [None]:
        count = microbatches if mesh is None else min(microbatches, cases.P // batch_shards(mesh))
        where = f"in {count} microbatches" + (", packed in rows" if rows else "")
        where += "" if mesh is None else f", on the mesh {dict(mesh.shape)}"
        got = _descended(recipe, extras=extras, mesh=mesh, microbatches=count, rows=rows)
        expect_close("check_train_step", recipe, f"the update {where}", got, want, tolerance=1e-4)


def _check_denoising_step(recipe: Recipe, sizes: Sequence[MeshSizes], extras: Extras) -> None:
    """A step applies the gradient of the loss over :func:`plain_scores`, however a batch is split.

    All parts of the batch see the same masks. The expected step of a flow policy is that of the
    undivided batch.
    """
    (network, params), batch = _model_and_batch(recipe, extras)
    score = bind(plain_scores, network=network, recipe=recipe)

    def loss(params):
        prepared, _ = cases.prepare(recipe)(batch, recipe.init())
        likelihood: Any = recipe.likelihood
        if likelihood.passes > 1:  # the first uses the first of their draws
            prepared = draws_of_pass(prepared, jnp.int32(0), likelihood=likelihood)
        scores = score(params, prepared)
        prepared = recipe.measure(prepared, scores.logp)
        statistics = scores.statistics if "old_draw_logp" in recipe.required_fields else None
        return recipe.loss(scores.logp, prepared, entropy=scores.entropy, statistics=statistics)

    flow = isinstance(recipe.likelihood, FlowLikelihood)
    want = _descended(recipe, extras=extras) if flow else jax.jit(jax.grad(loss))(params)
    updates = {"in 4 microbatches": _descended(recipe, extras=extras, microbatches=4)}
    for mesh in meshes(sizes):
        updates[f"on the mesh {dict(mesh.shape)}"] = _descended(recipe, extras=extras, mesh=mesh)
    for where, got in updates.items():
        expect_close("check_train_step", recipe, f"the update {where}", got, want, tolerance=1e-4)


def check_checkpoint(recipe: Recipe, *, extras: Extras = None) -> None:
    """The state survives a checkpoint, and alone determines how the next batch is prepared."""
    name = "check_checkpoint"
    first, second = (make_case(seed, recipe=recipe, extras=extras).batch for seed in (0, 1))
    prepare = cases.prepare(recipe)
    _, state = prepare(first, recipe.init())
    for leaf in jax.tree.leaves(state):
        if not isinstance(leaf, jax.Array | np.ndarray):
            fail(name, recipe, f"the state holds {leaf!r}, which is no array.")
    train_state = TrainState({"w": jnp.zeros(2)}, (), state, jax.random.key(0), jnp.int32(1), ())
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder, model=model()[0])
        checkpoints.save(train_state)
        checkpoints.wait()
        back = checkpoints.restore(jax.tree.map(jnp.zeros_like, train_state)).algo_state
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        if a.dtype != b.dtype or not np.array_equal(a, b, equal_nan=True):
            fail(name, recipe, f"{b} came back as {a}.")
    want, got = prepare(second, state), prepare(second, back)
    for what in ("mask", "advantages", "weights"):
        a, b = getattr(got[0], what), getattr(want[0], what)
        expect_close(name, recipe, f"after a restart, {what}", a, b, tolerance=0.0)
    expect_close(name, recipe, "after a restart, the state", got[1], want[1], tolerance=0.0)
