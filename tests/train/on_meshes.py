"""A train step of a tiny model on a mesh, and its change beside that of one device."""

import math
from typing import Any

import jax
import numpy as np
import optax
from helpers import make_batch

import jaxrl_llm as jr
from jaxrl_llm.models.sharding import batch_shards, param_shardings, shard
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import init_state, make_mesh, make_step, pack_batch
from jaxrl_llm.train.mesh import place_batch


def mesh_of(sizes):
    """The mesh of the first devices, as many as it has."""
    return make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])


def step_on(
    sizes, packing="never", *, parts: dict[str, Any], length=21, microbatches=1, remat="full"
):
    """The step of plain descent on a mesh, its state, and the batch as the step reads it.

    ``parts`` are those of the model. 21 tokens and prompts of 9 are divided by no size of a mesh.
    """
    model, params = tiny_model(**{"num_layers": 1} | parts, max_length=4096)
    mesh = mesh_of(sizes)
    batch, _ = pack_batch(
        make_batch(4, 3, length, 9), packing, model=model, shards=batch_shards(mesh)
    )
    if mesh is not None:
        params = shard(params, param_shardings(params, mesh, model.sharding_rules))
    optimizer, recipe = optax.sgd(1.0), jr.recipes.dr_grpo(length=21)
    state = init_state(params, optimizer, recipe, key=jax.random.key(0), mesh=mesh)
    step = make_step(
        model,
        recipe,
        optimizer,
        mesh=mesh,
        microbatches=microbatches,
        temperature=0.8,
        remat=remat,
        donate=False,
    )
    return step, state, place_batch(batch, mesh)


def update_on(*args, **options):
    """The change of the parameters by one step, and its metrics."""
    step, state, batch = step_on(*args, **options)
    after, metrics = step(state, batch)
    change = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), after.params, state.params)
    return change, metrics


def assert_update_of_one_device(sizes, packing="never", *, parts, tolerance=1e-5, **options):
    """Fails unless a step on a mesh changes the parameters as one on a device does."""
    want, of_one = update_on({}, parts=parts)
    got, metrics = update_on(sizes, packing, parts=parts, **options)
    scale = max(np.abs(x).max() for x in jax.tree.leaves(want))
    assert scale > 1e-3
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)
    for name in ("loss", "grad_norm", "entropy"):
        np.testing.assert_allclose(
            metrics[name], of_one[name], rtol=max(tolerance, 1e-5), atol=1e-6
        )
