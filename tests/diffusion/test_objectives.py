"""Terms of losses: a ratio as a sum, a penalty on bounds, weighted likelihood."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import aggregate, diffusion
from jaxrl_llm.core import traits_of

D = jnp.array([0.4, -0.5, 0.4])


def test_bgpo_worked_numbers():
    bound = {A: diffusion.bgpo_terms(D, jnp.zeros(3), jnp.array(A)).sum() for A in (1.5, -1.5)}
    np.testing.assert_allclose(bound[1.5], 1.65, rtol=1e-6)
    np.testing.assert_allclose(bound[-1.5], -1.795090, rtol=1e-6)
    exact = 1.5 * np.exp(np.mean(D))
    np.testing.assert_allclose(exact, 1.657756, rtol=1e-6)

    def total(terms, A):
        return diffusion.bgpo_terms(terms, jnp.zeros(3), A).sum()

    gradient = jax.grad(total)(D, jnp.array(-1.5))
    np.testing.assert_allclose(gradient, [-0.745912, -0.303265, -0.745912], rtol=1e-5)
    np.testing.assert_allclose(jax.grad(total)(D, jnp.array(1.5)), [0.5] * 3, rtol=1e-6)


def test_bgpo_is_a_lower_bound_that_touches_on_policy():
    rng = np.random.default_rng(0)
    terms, old = rng.normal(size=(2, 4, 30)).astype(np.float32)
    A = rng.normal(size=30).astype(np.float32)
    bound = np.asarray(diffusion.bgpo_terms(terms, old, A)).sum(0)
    exact = A * np.exp(np.float64(terms - old).mean(0))
    assert (bound <= exact + 1e-5).all()
    one = diffusion.bgpo_terms(terms[:1], old[:1], -jnp.abs(A))[0]
    np.testing.assert_allclose(one, -np.abs(A) * np.exp(terms[0] - old[0]), rtol=1e-5)

    def of_bound(x):
        return diffusion.bgpo_terms(x, old, A).sum()

    def of_ratio(x):
        return (A * jnp.exp((x - old).mean(0))).sum()

    for function in (of_bound, of_ratio):
        value, gradient = jax.value_and_grad(function)(jnp.asarray(old))
        np.testing.assert_allclose(value, A.sum(), rtol=1e-5)
        np.testing.assert_allclose(gradient, np.tile(A / 4, (4, 1)), rtol=1e-5)


def test_bgpo_far_off_policy_stays_finite():
    terms, old = jnp.full((2, 2), 500.0), jnp.zeros((2, 2))
    A = jnp.array([1.0, -1.0])

    def total(terms, cap):
        return diffusion.bgpo_terms(terms, old, A, cap=cap).sum()

    gradient = jax.grad(total)(terms, 10.0)
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(gradient[:, 0], 0.5)
    # Without a cap the bad response explodes, the good one does not.
    assert np.isfinite(jax.grad(total)(terms, None)[:, 0]).all()


def test_elbo_kl_is_the_square_of_sums():
    rng = np.random.default_rng(2)
    logp, ref = rng.normal(size=(2, 3, 4)).astype(np.float32)
    mask = np.arange(4) < np.array([[4], [2], [0]])
    each = diffusion.elbo_kl(np.where(mask, logp, np.nan), ref, mask, coef=0.5)
    sums = np.where(mask, np.float64(logp) - ref, 0.0).sum(-1)
    lengths = mask.sum(-1)
    expected = 0.5 * sums[:2] ** 2 / (2 * lengths[:2])
    loss = aggregate.weighted_sum(each, aggregate.sequence_mean(jnp.asarray(mask)))
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)
    assert traits_of(diffusion.elbo_kl).level == "sequence"
    gradient = jax.grad(lambda x: diffusion.elbo_kl(x, ref, mask)[1, 0])(jnp.asarray(logp))
    np.testing.assert_allclose(gradient[1], np.where(mask[1], sums[1] / 2, 0.0), rtol=1e-5)
    assert not diffusion.elbo_kl(logp, logp, mask).any()


def test_wd1_by_hand():
    A = np.array([[0.75, -0.25, -0.25, -0.25], [0.0, 0.0, 0.0, 0.0]])
    w = diffusion.wd1_weights(jnp.float32(A))
    good, bad = np.exp(A), np.exp(-A)
    expected = good / good.sum(-1, keepdims=True) - bad / bad.sum(-1, keepdims=True)
    np.testing.assert_allclose(w, expected, rtol=1e-5, atol=1e-7)
    assert not w[1].any() and w[0, 0] > 0 > w[0, 1]
    np.testing.assert_allclose(w.sum(-1), 0.0, atol=1e-6)
    # The mean of a group does not matter, and a huge advantage takes all.
    np.testing.assert_allclose(diffusion.wd1_weights(jnp.float32(A + 3.0)), w, atol=1e-6)
    extreme = diffusion.wd1_weights(jnp.array([500.0, 0.0, 0.0]))
    np.testing.assert_allclose(extreme, [1.0, -0.5, -0.5], atol=1e-6)


def test_wd1_is_a_weighted_likelihood_of_the_group():
    rng = np.random.default_rng(3)
    logp = rng.normal(size=(2, 3, 4)).astype(np.float32)
    mask = np.arange(4) < rng.integers(1, 5, (2, 3, 1))
    mask[0, 2] = False
    A = rng.normal(size=(2, 3)).astype(np.float32)

    def loss(logp):
        return diffusion.wd1(logp, None, A, mask).sum()

    where = mask.any(-1)
    w = diffusion.wd1_weights(A, where=where)
    assert w[0, 2] == 0
    np.testing.assert_allclose(w.sum(-1), 0.0, atol=1e-6)
    dirty = jnp.where(mask, logp, jnp.nan)
    value, gradient = jax.value_and_grad(loss)(dirty)
    np.testing.assert_allclose(value, -(w * np.where(mask, logp, 0).sum(-1)).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, np.where(mask, -w[..., None], 0.0), rtol=1e-6)
    order = np.array([2, 0, 1])
    np.testing.assert_allclose(
        diffusion.wd1(logp[:, order], None, A[:, order], mask[:, order]),
        diffusion.wd1(logp, None, A, mask)[:, order],
        atol=1e-6,
    )
    facts = traits_of(diffusion.wd1)
    assert not facts.has_ratio and not facts.policy_gradient
    assert facts.reuses_samples
