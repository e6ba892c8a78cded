"""Checks of a recipe together with the train step and a checkpoint.

Each raises AssertionError with its name, the recipe and the number that differs.
"""

import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.core import ArrayTree, bind
from jaxrl_llm.models import Model, param_shardings
from jaxrl_llm.models.sharding import batch_sharding, batch_shards, shard
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.testing import cases
from jaxrl_llm.testing.array_checks import meshes
from jaxrl_llm.testing.cases import compiled, expect_close, fail, make_case
from jaxrl_llm.testing.model import tiny_model
from jaxrl_llm.testing.model_checks import layout, model, model_case, packed, score_batch
from jaxrl_llm.train import TrainState, draw_masks, init_critic, init_state, make_step
from jaxrl_llm.train.checkpoint import Checkpoints
from jaxrl_llm.train.policy_gradient import prepare_key

# Of the policy in the train step: at 1, a step that forgets it would pass.
TEMPERATURE = 0.7


def _model_and_batch(recipe: Recipe) -> tuple[tuple[Model, ArrayTree], Batch]:
    """A model that the recipe trains, and a batch for it."""
    if recipe.likelihood is None:
        return model(), model_case(recipe).batch
    network = tiny_model(num_layers=1, causal=False, vocab_size=260, mask_id=259)
    batch = make_case(recipe=recipe).batch.replace(old_logp=None, behavior_logp=None)
    draws = draw_masks(recipe.likelihood, jax.random.key(3), batch)
    extras = {k: v for k, v in batch.extras.items() if k != "old_draw_logp"}
    return network, batch.replace(extras={**extras, **draws})


def _descended(recipe: Recipe, *, microbatches: int = 1, mesh=None, rows=False) -> ArrayTree:
    """What one step of plain gradient descent subtracts: the gradient, as training applies it."""
    (network, params), batch = _model_and_batch(recipe)
    batch = packed(batch) if rows else batch
    optimizer = optax.sgd(1.0)
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
    step = make_step(
        network,
        recipe,
        optimizer,
        microbatches=microbatches,
        temperature=TEMPERATURE,
        mesh=mesh,
        remat="none",
        critic_optimizer=critic_optimizer,
    )
    after, _ = step(state, batch)
    return jax.tree.map(lambda a, b: np.asarray(b) - np.asarray(a), after.params, params)


def check_train_step(
    recipe: Recipe,
    *,
    sizes: Sequence[tuple[int, int, int]] = ((2, 2, 2),),
    microbatches: int = 2,
    rows: bool = True,
) -> None:
    """One train step is the gradient of the loss: in microbatches, packed in rows, and on a mesh.

    At a temperature other than 1; the expected gradient is put together by hand. The mesh of the
    default has all three axes at once; with too few devices, the step is that of one. Without
    ``rows``, responses are padded. Of a recipe that updates turn by turn, it is the step that all
    turns at once would make.
    """
    if recipe.likelihood is not None:
        return _check_denoising_step(recipe, sizes)
    recipe = recipe.replace(turn_updates=None)
    params, batch = model()[1], model_case(recipe).batch
    way, functions = layout(bind(score_batch, temperature=TEMPERATURE), recipe), compiled(recipe)
    if recipe.draws:
        key = prepare_key(jax.random.key(0), 0)
        prepared, _ = jax.jit(recipe.prepare)(batch, recipe.init(), key=key)
    else:
        prepared, _ = functions.prepare(batch, recipe.init())
    scored = way.score(params, batch)
    prepared = recipe.measure(prepared, scored.logp)
    grads = functions.loss_and_grad(scored.logp, scored.entropy, scored.statistics, prepared)[1]
    scale = prepared.extras["update_scale"][0, 0, 0] if "update_scale" in prepared.extras else 1.0
    want = jax.tree.map(lambda x: scale * x, way.pull(params, batch, grads))
    for mesh in meshes(sizes) or [None]:
        count = microbatches if mesh is None else min(microbatches, cases.P // batch_shards(mesh))
        where = f"in {count} microbatches" + (", packed in rows" if rows else "")
        where += "" if mesh is None else f", on the mesh {dict(mesh.shape)}"
        got = _descended(recipe, mesh=mesh, microbatches=count, rows=rows)
        expect_close("check_train_step", recipe, f"the update {where}", got, want, tolerance=1e-4)


def _check_denoising_step(recipe: Recipe, sizes: Sequence[tuple[int, int, int]]) -> None:
    """One step is the same in one piece, in microbatches and on a mesh: all see the same masks."""
    want = _descended(recipe)
    updates = {"in 4 microbatches": _descended(recipe, microbatches=4)}
    for mesh in meshes(sizes):
        updates[f"on the mesh {dict(mesh.shape)}"] = _descended(recipe, mesh=mesh)
    for where, got in updates.items():
        expect_close("check_train_step", recipe, f"the update {where}", got, want, tolerance=1e-4)


def check_checkpoint(recipe: Recipe) -> None:
    """The state survives a checkpoint, and what follows depends on it alone."""
    name = "check_checkpoint"
    first, second = (make_case(seed, recipe=recipe).batch for seed in (0, 1))
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
