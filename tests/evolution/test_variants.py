"""Variants: members without noise, and noise at a few entries, held to the same laws."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close

from jaxrl_llm import evolution as es

KEY = jax.random.key(4)


def test_baseline_members_have_no_part_in_the_update():
    params = {"w": jnp.zeros((5, 4))}
    classes = es.leaf_classes(params)
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
    fitness = es.baseline_fitness(scores)
    found = es.eggroll_grad(params, classes, KEY, 0, fitness, sigma=0.1)["w"]
    rest = es.eggroll_grad(params, classes, KEY, 0, fitness[2:], sigma=0.1, draws=jnp.arange(1, 4))
    close(found, rest["w"] * (6 / 8) ** 0.5, atol=1e-6)
    assert es.lowrank_noise(KEY, 0, jnp.arange(8), (5, 4), baseline=2).sign[:2].tolist() == [0, 0]


def dense(noise: es.Sparse, shape):
    """The sparse noise of several members as matrices, signed, in NumPy."""
    found = np.zeros((*noise.sign.shape, *shape))
    for place in np.ndindex(noise.rows.shape):
        row, column = int(noise.rows[place]), int(noise.columns[place])
        found[(*place[:-1], row, column)] += float(noise.values[place] * noise.sign[place[:-1]])
    return found


def test_sparse_worked_numbers():
    noise = es.Sparse(
        jnp.array([0, 2, 0]), jnp.array([1, 0, 1]), jnp.array([1.0, -2, 3]), jnp.array(-1.0)
    )
    x, w = jnp.array([[1.0, 2.0, 3.0]]), jnp.ones((3, 2))
    # -0.5 * (-2 * 3) in column 0, -0.5 * (1 + 3) * 1 in column 1
    assert es.sparse_matmul(x, w, noise, sigma=0.5).tolist() == [[9.0, 4.0]]


def test_sparse_equals_dense():
    shape = (6, 2)
    rng = np.random.default_rng(0)
    members = jnp.arange(4).reshape(2, 2)
    noise = jax.jit(lambda e: es.sparse_noise(KEY, e, members, shape))(2)
    assert noise.rows.shape == (2, 2, max(shape))
    assert int(noise.rows.max()) < shape[0] and int(noise.columns.max()) < shape[1]
    x = jnp.asarray(rng.normal(size=(2, 2, 3, shape[0])), jnp.float32)
    w = jnp.asarray(rng.normal(size=shape), jnp.float32)
    expected = x @ (w + 0.3 * dense(noise, shape))
    product = jax.jit(partial(es.sparse_matmul, sigma=0.3))
    close(product(x, w, noise), expected, atol=1e-5)
    close(product(x, w, None), x @ w, atol=1e-6)
    fitness = jnp.array([1.0, -0.5, 0.25, 2.0])
    total = np.tensordot(fitness.reshape(2, 2), dense(noise, shape), 2)
    share = max(shape) / (shape[0] * shape[1])
    of_step, of_gradient = (
        jax.jit(lambda f, s=s: es.sparse_grad(KEY, 2, f, shape, sigma=0.3, scale=s))(fitness)
        for s in ("step", "gradient")
    )
    close(of_step, -0.3 / (4 * share) ** 0.5 * total, atol=1e-6)
    close(of_gradient, -total / (4 * 0.3 * share), atol=1e-5)
