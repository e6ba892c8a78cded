"""VeRPO: worked numbers of the weights, a float64 reference over padded attempts and tests."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, value_and_grad
from jax.test_util import check_grads
from rows import for_each

from jaxrl_llm.advantages import density_weights, verpo

PASSES = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]], bool)


def sample(seed, shape=(2, 4, 3, 5)):
    rng = np.random.default_rng(seed)
    p, g, k, u = shape
    return {
        "rewards": rng.integers(0, 2, (p, g)).astype(np.float32),
        "test_passes": rng.random(shape) < rng.random((p, 1, 1, u)),
        "test_where": rng.random((p, u)) < 0.8,
        "turn_where": np.arange(k) < rng.integers(0, k + 1, (p, g))[..., None],
        "where": rng.random((p, g)) < 0.8,
    }


def call(x, **options):
    x = dict(x)
    return verpo(x.pop("rewards"), **x, **options)


def reference(x, *, sigma=0.1, a=2.0, delta=1e-6, gamma=0.95, b=0.5):
    shape = x["test_passes"].shape
    out = np.zeros(shape[:-1])
    taken = x["turn_where"] & x["where"][..., None]
    for p in range(shape[0]):
        attempts = list(zip(*np.nonzero(taken[p]), strict=True))
        tests = np.nonzero(x["test_where"][p])[0]
        if not attempts:
            continue
        rho = {j: np.mean([x["test_passes"][p, g, k, j] for g, k in attempts]) for j in tests}
        density = {
            j: sum(np.exp(-((rho[j] - rho[m]) ** 2) / (2 * sigma**2)) for m in tests) for j in tests
        }
        weight = {j: np.exp(-a * rho[j]) / (density[j] + delta) for j in tests}
        dense = {
            (g, k): sum(weight[j] for j in tests if x["test_passes"][p, g, k, j])
            for g, k in attempts
        }
        members = sorted({g for g, _ in attempts})
        outcome = {g: float(x["rewards"][p, g]) * gamma ** taken[p, g].sum() for g in members}
        for g, k in attempts:
            turn = dense[g, k] - np.mean(list(dense.values()))
            out[p, g, k] = outcome[g] - np.mean(list(outcome.values())) + b * turn
    return out


def test_worked_numbers():
    rates = np.array([1.0, 0.75, 0.25, 0.0])
    weights = density_weights(rates)
    close(weights, [0.129639, 0.213738, 0.581001, 0.957911], atol=1e-6)
    density = np.exp(-2 * np.asarray(rates)) / np.asarray(weights)
    close(density, [1.043937, 1.043941, 1.043941, 1.043937], atol=2e-6)
    # No outcome to tell them apart: half the turn advantage is left.
    out = verpo(np.zeros(4), test_passes=PASSES[:, None])
    expected = [0.489185, -0.091816, -0.305554, -0.091816]
    close(2 * out[:, 0], expected, atol=2e-6)


@for_each("seed", range(4))
def test_equals_the_float64_reference(seed):
    x = sample(seed)
    out = call(x)
    close(out, reference(x), atol=3e-6)
    assert out.dtype == jnp.float32
    options = {"sigma": 0.3, "difficulty": 1.0, "delta": 0.1, "gamma": 0.5, "turn_weight": 2.0}
    named = {"sigma": 0.3, "a": 1.0, "delta": 0.1, "gamma": 0.5, "b": 2.0}
    close(call(x, **options), reference(x, **named), atol=3e-6)


def test_a_single_turn_is_not_discounted_unless_told():
    x = sample(6, (2, 4, 1, 5))
    x["turn_where"][:], x["where"][:] = True, True
    equal(call(x), call(x, gamma=1.0))
    assert (np.asarray(call(x)) != np.asarray(call(x, gamma=0.95))).any()
    x = sample(6)
    equal(call(x), call(x, gamma=0.95))


def test_dropped_outcomes_are_never_read_in_value_or_gradient():
    x = sample(9)
    taken = x["where"] & x["turn_where"].any(-1)
    weights = np.random.default_rng(0).normal(size=x["turn_where"].shape).astype(np.float32)

    run = value_and_grad(lambda r: jnp.sum(weights * call({**x, "rewards": r})))

    value, slope = run(x["rewards"])
    assert not np.asarray(slope)[~taken].any()
    for junk in (1e4, np.nan, np.inf):
        other, gradient = run(np.where(taken, x["rewards"], np.float32(junk)))
        assert other == value
        equal(gradient, slope)


def test_gradient_of_the_weights_and_of_the_outcome():
    options = {"order": 1, "modes": ["rev"], "atol": 2e-2, "rtol": 2e-2}
    rates = np.array([0.9, 0.4, 0.45, 0.1])
    check_grads(jax.jit(density_weights), (rates,), **options, eps=1e-3)
    x = sample(10)
    outcome = jax.jit(lambda r: call({**x, "rewards": r}))
    check_grads(outcome, (x["rewards"],), **options, eps=1e-2)


def test_constant_and_empty():
    x = sample(11)
    same = {**x, "rewards": np.full_like(x["rewards"], 0.1)}
    same["test_passes"] = np.ones_like(x["test_passes"])
    same["turn_where"] = np.ones_like(x["turn_where"])
    assert not call(same).any()
    nothing = {**x, "where": np.zeros_like(x["where"])}
    assert not np.asarray(call(nothing)).any()
    none = {**x, "test_where": np.zeros_like(x["test_where"])}
    assert np.isfinite(call(none, delta=0.0)).all()
    half = {**x, "rewards": np.asarray(x["rewards"], jnp.bfloat16)}
    close(call(half), call(x), rtol=1e-6, atol=1e-7)
