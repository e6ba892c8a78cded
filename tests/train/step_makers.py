"""Train steps of the tiny model; equal ones are compiled once for all files of a process."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.models.sharding import param_shardings, shard
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import StepOptions, init_state, make_scorer, make_step
from jaxrl_llm.train.mesh import place_batch

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
one_layer = functools.cache(lambda: tiny_model(num_layers=1))
sgd = functools.cache(optax.sgd)
_FURTHER = {field.name for field in dataclasses.fields(StepOptions)}


def flat_step(model, recipe, optimizer, *, make=make_step, **options):
    """``make_step`` with the fields of ``StepOptions`` beside its own arguments."""
    further = StepOptions(**{name: options.pop(name) for name in _FURTHER & options.keys()})
    return make(model, recipe, optimizer, options=further, **options)


shared_step, shared_scorer = functools.cache(flat_step), functools.cache(make_scorer)


def state_of(recipe, optimizer=OPTIMIZER, *, mesh=None, **options):
    """The first state of the tiny model, on a mesh if one is given."""
    params = one_layer()[1]
    if mesh is not None:
        params = shard(params, param_shardings(params, mesh))
    return init_state(params, optimizer, recipe, key=jax.random.key(0), mesh=mesh, **options)


def run(recipe, batch, *, mesh=None, steps=1, optimizer=OPTIMIZER, state=None, **options):
    """The state, the metrics and the function after some steps on one batch."""
    state = state_of(recipe, optimizer, mesh=mesh) if state is None else state
    # Quicker to compile, and one update whatever the recipe asks for.
    options = {"remat": "none", "epochs": 1, "minibatches": 1} | options
    make = shared_step if mesh is None else flat_step
    step = make(one_layer()[0], recipe, optimizer, mesh=mesh, **options)
    for _ in range(steps):
        state, metrics = step(state, place_batch(batch, mesh))
    return state, metrics, step


def assert_close(a, b, atol=2e-5, rtol=1e-7):
    """Fails unless all leaves are close."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=rtol), a, b)


def distance(a, b):
    """The largest difference of two trees."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.abs(x - y).max()) for x, y in pairs)


def arrays_of(batch):
    """What ``score`` reads of a batch."""
    return batch.prompt_tokens, batch.prompt_mask, batch.tokens, batch.mask


def moved(tree, seed=0, size=0.1):
    """The tree with noise on every leaf."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = [size * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, [x + n for x, n in zip(leaves, noise, strict=True)])
