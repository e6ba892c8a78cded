"""Estimates of a log-likelihood against what enumeration over all orders says, in float64."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

from benchmarks.diffusion_world import bernoulli, consistent, denoiser
from jaxrl_llm import diffusion

L = 4
LEVELS = 2  # ceil(L / 2): quadrature is exact
TOKENS = np.array([0, 1, 1, 0])
VALID = np.ones(L, bool)


@pytest.fixture(scope="module")
def model():
    return denoiser(0, length=L)


@pytest.fixture(scope="module")
def exact(model):
    return model.exact(TOKENS)


def weighted(exact, chances, levels, estimate=diffusion.elbo):
    """An estimator's expectation: every mask is a draw that weighs its chance."""
    logp, masks = np.float32(exact.logp), exact.masks
    return estimate(logp, masks, np.float32(levels), weights=np.float32(chances))


def counts_of(exact):
    """Levels and chances of masks of an exact size, drawn from 1 to L."""
    counts = exact.masks.sum(-1)
    return counts / L, 1.0 / (L * np.array([math.comb(L, m) for m in counts]))


def test_worked_numbers():
    logp = jnp.array([[-0.5, -1.0, -2.0, -0.25]])
    masked = jnp.array([[True, False, True, True]])
    tokens = diffusion.elbo(logp, masked, jnp.array([0.75]))
    np.testing.assert_allclose(tokens.sum(), -3.666667, rtol=1e-6)
    t = diffusion.count_levels(masked, jnp.ones(4, bool))
    np.testing.assert_allclose(diffusion.elbo_terms(logp, masked, t), [4 / 3 * -2.75], rtol=1e-6)


def test_exact_counts_are_unbiased(exact):
    levels, chances = counts_of(exact)
    np.testing.assert_allclose(weighted(exact, chances, levels).sum(), exact.elbo, rtol=1e-5)


def test_quadrature_is_exact_from_half_as_many_levels_as_tokens(exact):
    def expectation(samples):
        t, weights = diffusion.quadrature_levels(samples)
        levels = np.repeat(np.float64(t)[:, None], len(exact.masks), axis=1)
        chances = np.float64(weights)[:, None] * bernoulli(exact.masks, levels[..., None])
        logp = np.tile(np.float32(exact.logp), (samples, 1))
        masks = np.tile(exact.masks, (samples, 1))
        flat = np.float32(levels).reshape(-1), np.float32(chances).reshape(-1)
        return float(diffusion.elbo(logp, masks, flat[0], weights=flat[1]).sum())

    assert abs(expectation(1) - exact.elbo) > 1e-3
    for samples in (LEVELS, 5):
        np.testing.assert_allclose(expectation(samples), exact.elbo, rtol=1e-5)


def test_complements_of_counts_from_zero_are_unbiased(model, exact):
    masks = np.concatenate([np.zeros((1, L), bool), exact.masks])
    both = diffusion.complementary(masks, VALID)
    t = diffusion.count_levels(both, VALID, least=0)
    counts = masks.sum(-1)
    chances = 1.0 / ((L + 1) * np.array([math.comb(L, m) for m in counts]))
    tokens = diffusion.elbo(
        np.float32(model(TOKENS, np.asarray(both))),
        both,
        t,
        weights=np.float32(np.tile(chances, 2) / 2),
    )
    np.testing.assert_allclose(tokens.sum(), exact.elbo, rtol=1e-5)
    # Each of the two is unbiased alone.
    assert np.array_equal(np.asarray(both)[: len(masks)], ~np.asarray(both)[len(masks) :])


def test_coupled_weighs_a_likelihood_three_halves(model):
    t = 0.3
    masks = np.array(list(itertools.product([False, True], repeat=L)))
    both = np.stack([masks, ~masks], axis=1)  # [M, 2, L]
    full = np.float32(model(TOKENS, VALID))

    def expectation(logp):
        levels = jnp.array([t, 1.0 - t])
        tokens = jax.vmap(lambda a, b: diffusion.coupled(full, a, b, levels, VALID))(logp, both)
        return bernoulli(masks, t) @ np.float64(tokens)

    logp = model(TOKENS, both)
    parts = [bernoulli(masks, s) @ (masks * model(TOKENS, masks) / s) for s in (t, 1.0 - t)]
    np.testing.assert_allclose(
        expectation(np.float32(logp)), (full + parts[0] + parts[1]) / 2, rtol=1e-5
    )
    # A model whose tokens are independent of what it sees.
    same = expectation(np.broadcast_to(full, both.shape))
    np.testing.assert_allclose(same, 1.5 * full, rtol=1e-5)


def test_bounds_hold_for_every_response(model):
    tokens = list(itertools.product(range(2), repeat=L))
    facts = [model.exact(np.array(x)) for x in tokens]
    levels, chances = counts_of(facts[0])
    logp = np.float32(np.stack([x.logp for x in facts], axis=1))  # [M, B, L]
    masked = np.broadcast_to(facts[0].masks[:, None], logp.shape)
    valid = np.ones(logp.shape[1:], bool)
    shared = masked, np.float32(levels)
    truth = np.array([x.log_likelihood for x in facts])

    def upper(beta):
        args = logp, *shared, valid
        return np.asarray(diffusion.eubo(*args, beta=beta, weights=np.float32(chances)).sum(-1))

    lower = np.asarray(diffusion.elbo(logp, *shared, weights=np.float32(chances)).sum(-1))
    np.testing.assert_allclose(lower, [x.elbo for x in facts], rtol=1e-5)
    assert (lower < truth).all() and (truth < upper(float(L))).all()
    for below, above in itertools.pairwise((1e-3, 0.5, 1.0, 1.5, float(L))):
        assert (upper(below) < upper(above)).all()
    np.testing.assert_allclose(upper(1e-3), lower, atol=1e-2)
    # One step of all tokens is above for some responses and below for others.
    one_step = np.array([model(np.array(x), VALID).sum() for x in tokens])
    assert (one_step < truth).any() and (one_step > truth).any()


def test_the_lower_bound_is_the_likelihood_of_a_model_whose_orders_agree():
    joint = 2.0 * np.random.default_rng(5).normal(size=(2,) * L)
    model, chances = consistent(joint), np.exp(joint) / np.exp(joint).sum()
    below = []
    for tokens in itertools.product(range(2), repeat=L):
        facts = model.exact(np.array(tokens))
        np.testing.assert_allclose(facts.log_likelihood, np.log(chances[tokens]), rtol=1e-10)
        levels, weights = counts_of(facts)
        logp = np.where(np.isfinite(facts.logp), facts.logp, 0.0)
        bound = weighted(facts._replace(logp=logp), weights, levels).sum()
        np.testing.assert_allclose(bound, facts.log_likelihood, rtol=1e-5)
        below.append(model(np.array(tokens), VALID).sum() < facts.log_likelihood)
    assert any(below) and not all(below)


@for_each("form", ["independent", "exact"])
def test_sampled_masks_are_unbiased(model, exact, form):
    rows, J = 4000, 4
    valid = jnp.ones((rows, L), bool)
    spread = {}
    for i, draws in enumerate(("independent", "antithetic", "stratified")):
        one, two = jax.random.split(jax.random.key(i))
        if form == "exact":
            counts = diffusion.mask_counts(one, valid, samples=J, draws=draws)
            masked = diffusion.mask_exact(two, valid, counts)
            t = diffusion.count_levels(masked, valid)
        else:
            t = diffusion.noise_levels(one, (rows,), samples=J, draws=draws, least=0.02)
            masked = diffusion.mask_tokens(two, valid, t)
        logp = jnp.float32(model(TOKENS, np.asarray(masked)))
        estimates = np.float64(diffusion.elbo(logp, masked, t).sum(-1))
        error = estimates.std() / math.sqrt(rows)
        bias = 0.0 if form == "exact" else 0.02 * abs(exact.elbo)
        assert abs(estimates.mean() - exact.elbo) < 4.0 * error + bias
        spread[draws] = estimates.std()
    if form == "exact":  # of independent masks, which tokens are masked varies most
        assert spread["stratified"] < 0.97 * spread["independent"]


def sample(seed=0, shape=(3, 2, 5)):
    rng = np.random.default_rng(seed)
    logp = -rng.random(shape).astype(np.float32)
    valid = np.arange(shape[-1]) < np.array([[5], [3]])
    masked = (rng.random(shape) < 0.6) & valid
    return logp, masked, rng.uniform(0.2, 1.0, shape[:-1]).astype(np.float32), valid


def estimates(logp, masked, t, valid):
    pairs = jnp.concatenate([logp, logp[:1]]), jnp.concatenate([masked, masked[:1]])
    levels = jnp.concatenate([t, t[:1]])
    advantages = jnp.array([1.0, -1.0])
    return {
        "elbo": diffusion.elbo(logp, masked, t),
        "terms": diffusion.elbo_terms(logp, masked, t),
        "eubo": diffusion.eubo(logp, masked, t, valid),
        "sandwiched": diffusion.sandwiched(logp, masked, t, advantages, valid),
        "coupled": diffusion.coupled(jnp.where(valid, -1.0, jnp.nan), *pairs, levels, valid),
        "mean_field": diffusion.mean_field(jnp.where(valid, logp, jnp.nan), valid),
    }


def test_what_is_not_masked_is_never_read_and_jit_changes_nothing():
    logp, masked, t, valid = sample()
    eager, compiled = estimates(logp, masked, t, valid), jax.jit(estimates)
    clean = compiled(logp, masked, t, valid)
    for name, x in clean.items():
        np.testing.assert_allclose(x, eager[name], rtol=1e-6, atol=1e-7, err_msg=name)
        if x.shape == valid.shape:
            assert not np.any(np.asarray(x)[~valid]), name
    for junk in (np.nan, 1e4, -np.inf):
        dirty = np.where(masked, logp, np.float32(junk))
        for name, x in compiled(dirty, masked, t, valid).items():
            if name != "mean_field":
                assert np.array_equal(x, clean[name]), name

    def totals(x):
        made = estimates(x, masked, t, valid)
        return jnp.stack([made[name].sum() for name in ("elbo", "eubo", "sandwiched", "coupled")])

    dirty = np.where(masked, logp, np.float32(np.nan))
    for gradient in np.asarray(jax.jit(jax.jacrev(totals))(dirty)):
        assert np.isfinite(gradient).all() and not gradient[~masked].any()
        assert (gradient[masked] > 0).all()


def test_statistics_are_float32_and_rows_are_independent():
    logp, masked, t, valid = sample(6)
    half = estimates(jnp.asarray(logp, jnp.bfloat16), masked, t, valid)
    full = estimates(jnp.asarray(logp, jnp.bfloat16).astype(jnp.float32), masked, t, valid)
    for name, x in half.items():
        assert x.dtype == jnp.float32
        if name != "coupled":
            np.testing.assert_allclose(x, full[name], rtol=1e-6, atol=1e-7)
    swapped = estimates(logp[:, ::-1], masked[:, ::-1], t[:, ::-1], valid[::-1])
    ordered = estimates(logp, masked, t, valid)
    for name in ("elbo", "eubo", "coupled", "mean_field"):
        np.testing.assert_allclose(swapped[name][::-1], ordered[name], rtol=1e-6, atol=1e-7)


def test_tokens_that_no_draw_masks_have_the_mean_of_the_others_in_the_upper_bound():
    logp = jnp.log(jnp.array([[0.5, 0.25, 0.1]]))
    masked = jnp.array([[True, True, False]])
    tokens = diffusion.eubo(logp, masked, jnp.ones(1), jnp.ones(3, bool), beta=2.0)
    np.testing.assert_allclose(tokens[2], (tokens[0] + tokens[1]) / 2, rtol=1e-6)
    np.testing.assert_allclose(tokens[:2], logp[0, :2], rtol=1e-6)
    nothing = diffusion.eubo(logp, masked & False, jnp.ones(1), jnp.ones(3, bool))
    assert not nothing.any()


def test_sign_chooses_the_bound():
    logp, masked, t, valid = sample(2)
    lower = diffusion.elbo(logp, masked, t)
    upper = diffusion.eubo(logp, masked, t, valid, beta=2.0)
    for signs, mix in (((1.0, -1.0), 0.25), ((-0.5, 0.0), 1.0)):
        tokens = diffusion.sandwiched(logp, masked, t, jnp.array(signs), valid, beta=2.0, mix=mix)
        for row, sign in enumerate(signs):
            expected = lower[row] if sign >= 0 else mix * upper[row] + (1 - mix) * lower[row]
            np.testing.assert_allclose(tokens[row], expected, rtol=1e-6)
