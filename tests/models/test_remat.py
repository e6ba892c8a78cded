"""Rematerialization: the same gradients, and less memory in the compiled program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.models.remat import POLICIES, product, recomputed, rematerialized
from jaxrl_llm.train.models.score import score_hidden


def _loss(model, batch, params, remat):
    return jnp.sum(jnp.sin(score_hidden(model, params, *batch, remat=remat)))


@pytest.fixture(scope="module")
def compiled():
    """The gradient of four layers under each policy, for arrays of these shapes."""
    model, params = jr.testing.tiny_model(num_layers=4)
    prompts = 1 + jnp.arange(16).reshape(2, 8)
    responses = 1 + jnp.arange(256).reshape(2, 4, 32)
    batch = (prompts, prompts > 0, responses, responses > 0)
    programs = {
        remat: jax.jit(jax.grad(functools.partial(_loss, model, batch, remat=remat)))
        .lower(params)
        .compile()
        for remat in POLICIES
    }
    return programs, params


@pytest.mark.slow
def test_what_is_kept_shows_in_the_compiled_program(compiled):
    programs, _ = compiled
    memory = {name: p.memory_analysis().temp_size_in_bytes for name, p in programs.items()}
    assert memory["full"] < memory["dots"] < memory["none"]
    assert memory["full"] < 0.5 * memory["none"]


@pytest.mark.slow
def test_gradients_are_the_same(compiled):
    programs, params = compiled
    whole = programs["none"](params)
    for name in ("dots", "full"):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
            programs[name](params),
            whole,
        )


@for_each("first", [0.0, np.nan, np.inf, -1.0])
def test_a_cotangent_that_is_no_number_opens_the_fence_too(first):
    run = rematerialized(lambda x: jnp.sin(product(x)) ** 2, POLICIES["full"])
    x = jnp.linspace(-1.0, 1.0, 8).reshape(1, 1, 2, 4)
    _, pullback = jax.vjp(run, x)
    cotangent = jnp.ones_like(x).at[0, 0, 0, 0].set(first)
    (got,) = pullback(cotangent)
    want = cotangent * jnp.sin(2 * x)
    np.testing.assert_allclose(got.ravel()[1:], want.ravel()[1:], rtol=1e-6)


def test_a_function_that_is_computed_again_keeps_its_arguments_alone():
    def square(x):
        return jnp.tanh(jnp.tanh(x)) ** 2

    x = jnp.linspace(-1.0, 1.0, 8)
    (value, pullback), (wanted, pull) = (jax.vjp(f, x) for f in (recomputed(square), square))
    np.testing.assert_allclose(value, wanted)
    np.testing.assert_allclose(pullback(x)[0], pull(x)[0], rtol=1e-6)
    kept = [a for a in jax.tree.leaves(pullback) if jnp.shape(a) == x.shape]
    assert len(kept) == 1
    np.testing.assert_array_equal(kept[0], x)


def test_rotary_tables_are_computed_once():
    model, params = jr.testing.tiny_model(num_layers=3)
    tokens = jnp.ones((1, 2, 4), int)
    positions = jnp.broadcast_to(jnp.arange(4) + params["norm"]["scale"][0].astype(int), (1, 2, 4))

    def loss(params, positions):
        context = jr.models.AttentionContext(tokens > 0)
        return jnp.sum(model.apply(params, tokens, positions, context)[0])

    program = jax.jit(jax.grad(loss)).lower(params, positions).compile().as_text()
    assert program.count(" cosine(") == program.count(" sine(") == 1
