"""The size of a batch: worked numbers, laws, simulated plateaus, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, grad
from rows import for_each

from jaxrl_llm import diagnostics as d


def test_noise_and_signal_come_back_from_two_batch_sizes():
    signal, noise = np.array([0.51, 2.03, 1.07]), np.array([3.3, 0.0, 101.0])
    norms = [np.asarray(signal + noise / size, jnp.float32) for size in (4, 32)]
    seen = jax.jit(lambda *n: d.gradient_noise(*n, small_batch=4, large_batch=32))(*norms)
    close(seen.signal, signal, rtol=1e-4)
    close(seen.noise, noise, rtol=1e-4, atol=1e-5)
    close(seen.critical_batch, noise / signal, rtol=1e-3, atol=1e-5)


def test_the_estimates_are_unbiased():
    rng, exact = np.random.default_rng(0), np.array([0.3, -0.2])
    samples = exact + rng.standard_normal((20000, 16, 2))
    small, large = samples[:, :2].mean(1), samples.mean(1)
    norms = [np.float32(np.mean(np.sum(g**2, -1))) for g in (small, large)]
    seen = d.gradient_noise(*norms, small_batch=2, large_batch=16)
    assert float(seen.signal) == pytest.approx(np.sum(exact**2), abs=0.01)
    assert float(seen.noise) == pytest.approx(2.0, rel=0.03)


def test_without_signal_no_batch_is_large_enough():
    seen = d.gradient_noise(4.0, 0.5, small_batch=1, large_batch=8)
    assert float(seen.signal) == 0.0 and float(seen.critical_batch) == np.inf
    # A norm that grew with the batch has no noise to average.
    assert float(d.gradient_noise(1.0, 2.0, small_batch=1, large_batch=8).critical_batch) == 0.0


def test_fewer_steps_are_paid_for_in_samples():
    cost = d.batch_cost(np.array([1.0, 30.0, 9000.0]), critical_batch=30)
    close((cost.steps - 1) * (cost.samples - 1), 1.0, rtol=1e-4)
    assert cost.steps[1] == cost.samples[1] == 2.0


def test_no_batch_reaches_the_goal_sooner_than_the_fastest():
    critical, fixed, per_sample = 100.0, 3.0, 0.02
    best = float(d.fastest_batch(critical, fixed=fixed, per_sample=per_sample))
    assert best == pytest.approx((critical * fixed / per_sample) ** 0.5)

    def time(batch):
        return float(d.batch_cost(batch, critical_batch=critical).steps) * (
            fixed + per_sample * batch
        )

    assert time(best) < min(time(best * 1.2), time(best / 1.2))


@for_each(("alpha", "count"), [(0.3, 5), (1.5, 2), (0.3, 10), (0.15, 5)])
def test_the_plateau_is_where_the_recursion_stays(alpha, count):
    h, noise, variance = 1.2, 0.7, 0.0
    for _ in range(2000):
        variance = (1 - alpha * h) ** 2 * variance + alpha**2 * noise / count
    seen = d.outer_plateau(alpha, count, curvature=h, noise=noise)
    assert float(seen) == pytest.approx(h * variance / 2, rel=1e-5)


def test_too_large_a_step_never_settles_and_the_gradient_is_finite_beside_it():
    assert d.outer_plateau(np.array([1.0, 1.5]), 4, curvature=2.0).tolist() == [np.inf, np.inf]
    grads = jax.jit(jax.vmap(grad(lambda a: d.outer_plateau(a, 4, curvature=2.0))))(
        np.array([0.5, 1.5])
    )
    assert grads[0] > 0 and grads[1] == 0


def test_rollouts_and_minibatches_grow_together():
    for factor in (1, 3):
        step = d.scale_rollouts(factor, samples=96, minibatches=4)
        assert step == (96 * factor, 4 * factor, 24)
        assert step.samples == step.minibatches * step.minibatch_size
