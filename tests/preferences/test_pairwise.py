"""Losses of pairs: worked numbers, float64 values and gradients, masked pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import preferences

LN2 = np.log(2.0)
LENGTHS = np.array([3, 7, 1, 12])


def arrays(seed=0):
    return np.random.default_rng(seed).normal(-8.0, 3.0, (4, 4)).astype(np.float32)


def softplus(x):
    return np.logaddexp(0.0, x)


def reference(name, logp, ref, beta, center, weights=(0.8, 0.2, 1.0)):
    x = beta * (np.float64(logp) - np.float64(ref))
    dpo = softplus(x[1] - x[0])
    bco = softplus(center - x[0]) + softplus(x[1] - center)
    if name != "mpo":
        return {"dpo": dpo, "bco": bco}[name]
    return weights[0] * dpo + weights[1] * bco - weights[2] * np.float64(logp[0]) / LENGTHS


def call(name, w, l, ref_w, ref_l, **options):  # noqa: E741
    more = {"lengths": LENGTHS} if name == "mpo" else {}
    return getattr(preferences, name)(w, l, ref_w, ref_l, **more, **options)


@pytest.mark.parametrize(("name", "value"), [("dpo", LN2), ("bco", 2 * LN2), ("mpo", 1.2 * LN2)])
def test_a_policy_equal_to_its_reference(name, value):
    zero = jnp.zeros(4)
    np.testing.assert_allclose(call(name, zero, zero, zero, zero), np.full(4, value), rtol=1e-6)


@pytest.mark.parametrize("name", ["dpo", "bco", "mpo"])
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_equal_float64(name, seed):
    w, l, ref_w, ref_l = arrays(seed)  # noqa: E741
    center = {} if name == "dpo" else {"center": 0.2}
    value = center.get("center", 0.0)
    ours = call(name, w, l, ref_w, ref_l, beta=0.5, **center)
    logp, ref = np.stack([w, l]), np.stack([ref_w, ref_l])
    np.testing.assert_allclose(ours, reference(name, logp, ref, 0.5, value), rtol=2e-5)
    slope = jax.jit(
        jax.grad(lambda x: call(name, x[0], x[1], x[2], x[3], beta=0.5, **center).sum())
    )(jnp.stack([w, l, ref_w, ref_l]))
    step = 1e-5
    for row in range(2):
        high, low = np.float64(logp).copy(), np.float64(logp).copy()
        high[row] += step
        low[row] -= step
        up, down = (reference(name, x, ref, 0.5, value) for x in (high, low))
        np.testing.assert_allclose(slope[row], (up - down) / (2 * step), atol=1e-4)
    assert not slope[2:].any()  # the gradient stops at the reference


def test_codpo_is_mpo_with_its_weights():
    w, l, ref_w, ref_l = arrays(5)  # noqa: E741
    ours = call("mpo", w, l, ref_w, ref_l, preference=1.0, quality=0.0, likelihood=5.0)
    logp, ref = np.stack([w, l]), np.stack([ref_w, ref_l])
    expected = reference("mpo", logp, ref, 0.1, 0.0, (1.0, 0.0, 5.0))
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["dpo", "bco", "mpo"])
@pytest.mark.parametrize("junk", [jnp.nan, jnp.inf, -jnp.inf, 1e4])
def test_absent_pairs_are_not_read(name, junk):
    where = jnp.array([True, False, True, False])
    clean = call(name, *arrays(1))
    dirty = jnp.where(where, arrays(1), junk)
    loss, slope = jax.value_and_grad(lambda x: call(name, *x, where=where).sum())(dirty)
    np.testing.assert_allclose(loss, jnp.where(where, clean, 0.0).sum(), rtol=1e-5)
    assert np.isfinite(slope).all() and not slope[:, 1].any() and slope[0, 0] != 0


@pytest.mark.parametrize(
    ("run", "error", "words"),
    [
        (
            lambda: preferences.dpo(jnp.zeros(2), jnp.zeros(3), jnp.zeros(2), jnp.zeros(2)),
            ValueError,
            "dpo: these must have one shape",
        ),
        (
            lambda: preferences.bco(*jnp.zeros((4, 2)), beta=0.0),
            ValueError,
            "bco: beta must be above 0; got 0",
        ),
        (
            lambda: preferences.mpo(*jnp.zeros((4, 2)), lengths=jnp.ones(3)),
            ValueError,
            "mpo: these must have one shape",
        ),
        (
            lambda: preferences.mpo(*jnp.zeros((4, 2)), lengths=jnp.ones(2), quality=-1.0),
            ValueError,
            "mpo: quality must not be negative; got -1",
        ),
    ],
)
def test_bad_input_is_one_sentence(run, error, words):
    with pytest.raises(error, match=words):
        run()
