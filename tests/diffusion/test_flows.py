"""Flow policies: steps as Gaussians, their divergence, and one loss for text and image."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, diffusion, preferences
from jaxrl_llm.core import masking

ONE, HALF = jnp.ones(1), jnp.full(1, 0.5)


def step(v, **options):
    return diffusion.flow_sde_step(ONE, jnp.full(1, v), 0.8, 0.6, sigma_1=0.9, **options)


def test_flow_grpo_worked_numbers():
    a = step(0.5, eps=jnp.full(1, 0.3))
    for name, value in (("std", 1.4), ("scale", 0.626099), ("logp", -0.495692)):
        np.testing.assert_allclose(getattr(a, name), value, rtol=1e-5)
    np.testing.assert_allclose(a.mean, [0.6305], rtol=1e-6)
    np.testing.assert_allclose(a.x, [0.818330], rtol=1e-5)
    b = step(0.6, x_next=a.x)
    np.testing.assert_allclose(b.mean, [0.6056], rtol=1e-5)
    np.testing.assert_allclose(b.logp - a.logp, -0.012722, rtol=1e-4)
    np.testing.assert_allclose(diffusion.latent_kl(b.mean, a.mean, a.std), 1.58166e-4, rtol=1e-4)
    true = diffusion.latent_kl(b.mean, a.mean, a.scale)
    np.testing.assert_allclose(true, 7.90829e-4, rtol=1e-4)
    first = diffusion.flow_sde_step(ONE, HALF, 1.0, 0.9, sigma_1=0.9, eps=ONE)
    np.testing.assert_allclose(first.std, 2.213594, rtol=1e-6)
    still = diffusion.flow_sde_step(ONE, HALF, 0.8, 0.6, sigma_1=0.9, noise=1e-4, eps=ONE)
    np.testing.assert_allclose(still.mean, [0.9], rtol=1e-6)
    # UniGRPO on the same step.
    normed = diffusion.ratio_norm(b.logp - a.logp, b.mean, a.mean, a.scale)
    np.testing.assert_allclose(normed, -0.00747, rtol=1e-4)
    weight = 0.2 / 2 * (1.4 * (1 - 0.8) / (2 * 0.8) + 1 / 1.4) ** 2
    mse = diffusion.velocity_mse(jnp.full(1, 0.6), HALF)
    np.testing.assert_allclose(weight, 0.0790829, rtol=1e-5)
    np.testing.assert_allclose(weight * mse, true, rtol=1e-4)


def test_the_sampler_keeps_the_marginals_of_the_flow():
    """From N(0, 1) noise to N(2, 0.5^2) data, whose exact velocity is known, in many small steps.

    The latent at sigma is (1 - sigma) data + sigma noise.
    """
    steps, rows = 200, 20000
    levels = np.linspace(1.0, 0.0, steps + 1)

    def velocity(x, sigma):
        variance = (1 - sigma) ** 2 * 0.25 + sigma**2
        residual = (x - (1 - sigma) * 2.0) / variance
        return sigma * residual - (2.0 + (1 - sigma) * 0.25 * residual)

    keys = jax.random.split(jax.random.key(0), steps + 1)

    def body(x, inputs):
        sigma, following, key = inputs
        made = diffusion.flow_sde_step(
            x,
            velocity(x, sigma),
            sigma,
            following,
            sigma_1=levels[1],
            eps=jax.random.normal(key, x.shape),
        )
        return made.x, None

    x = jax.random.normal(keys[-1], (rows, 1))
    inputs = jnp.float32(levels[:-1]), jnp.float32(levels[1:]), keys[:-1]
    x, _ = jax.jit(lambda x: jax.lax.scan(body, x, inputs))(x)
    np.testing.assert_allclose(x.mean(), 2.0, atol=0.03)
    np.testing.assert_allclose(x.std(), 0.5, atol=0.03)


def sample(seed=0, shape=(3, 2, 4)):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(4)]


def test_scoring_a_sampled_latent_gives_its_density_and_a_gradient_through_the_mean():
    x, v, old_v, eps = sample()
    sigma = jnp.array([[0.9, 0.5], [0.7, 0.3], [1.0, 0.2]])
    options = {"sigma_1": 0.95, "reduce": "sum"}
    made = diffusion.flow_sde_step(x, v, sigma, sigma - 0.1, eps=eps, **options)
    scored = diffusion.flow_sde_step(x, v, sigma, sigma - 0.1, x_next=made.x, **options)
    np.testing.assert_allclose(made.logp, scored.logp, rtol=1e-6)
    log_density = -0.5 * eps**2 - jnp.log(made.scale)[..., None] - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(made.logp, log_density.sum(-1), rtol=1e-4)

    def total(v, **kwargs):
        return diffusion.flow_sde_step(x, v, sigma, sigma - 0.1, **options, **kwargs).logp.sum()

    sampled, again = jax.grad(total)(v, eps=eps), jax.grad(total)(v, x_next=made.x)
    np.testing.assert_allclose(sampled, again, rtol=1e-5)
    assert np.abs(again).min() > 0
    # The mean over dimensions is the sum over their number.
    mean = diffusion.flow_sde_step(x, v, sigma, sigma - 0.1, sigma_1=0.95, x_next=made.x)
    np.testing.assert_allclose(4 * mean.logp, scored.logp, rtol=1e-5)
    # A normed ratio is the shift along the noise that was drawn, for both reductions.
    for reduce, reduced in (("sum", jnp.sum), ("mean", jnp.mean)):
        args = {"sigma_1": 0.95, "reduce": reduce, "x_next": made.x}
        old = diffusion.flow_sde_step(x, old_v, sigma, sigma - 0.1, **args)
        new = diffusion.flow_sde_step(x, v, sigma, sigma - 0.1, **args)
        normed = diffusion.ratio_norm(
            new.logp - old.logp, new.mean, old.mean, new.scale, reduce=reduce
        )
        noise = (made.x - old.mean) / old.scale[..., None]
        expected = reduced((new.mean - old.mean) * noise, axis=-1)
        np.testing.assert_allclose(normed, expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(
            diffusion.ratio_norm(new.logp - new.logp, new.mean, new.mean, 1.0), 0.0
        )


def test_branch_step_against_float64():
    x, v, _, eps = (np.float64(a) for a in sample(1))
    sigma, following, eta = 0.7, 0.55, 0.3
    start = x - sigma * v
    score = -(x - (1 - sigma) * start) / sigma**2
    mean = x + (following - sigma) * (v - 0.5 * eta**2 * score)
    scale = eta * np.sqrt(sigma - following)
    arrays = jnp.float32(x), jnp.float32(v)
    for noise in (1.0, 4.0):
        made = diffusion.branch_sde_step(
            *arrays, sigma, following, noise_scale=noise, eps=jnp.float32(eps)
        )
        np.testing.assert_allclose(made.mean, mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(made.x, mean + noise * scale * eps, rtol=1e-4, atol=1e-5)
        # The density is that of the noise before it is enlarged.
        density = (-0.5 * (noise * eps) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi)).mean(-1)
        np.testing.assert_allclose(made.logp, density, rtol=1e-3, atol=1e-4)


def test_normed_ratios_of_summed_densities():
    """At a small move the ratio has the slope of (mean - old) . eps, a sum or mean over D."""
    rng = np.random.default_rng(4)
    eps, scale = rng.normal(size=(3, 6)), jnp.array([0.1, 1.0, 10.0])
    old, mask = jnp.float32(rng.normal(size=(3, 6))), jnp.ones(3, bool)
    x = old + scale[:, None] * jnp.float32(eps)

    def loss(mean, reduce):
        logp, old_logp = (
            diffusion.gaussian_logprob(x, m, scale, reduce=reduce) for m in (mean, old)
        )
        return diffusion.flow_clip(
            logp,
            old_logp,
            jnp.array(0.5),
            mask,
            step_mean=mean,
            old_step_mean=old,
            step_scale=scale,
            eps=0.9,
            reduce=reduce,
        )

    moved = old + 0.1
    for reduce, size in (("mean", 6), ("sum", 1)):
        away = 0.1 * eps.sum(-1) / size
        ratio = np.clip(np.exp(away), 0.1, 1.9)
        expected = -0.5 * np.minimum(np.exp(away), ratio)
        np.testing.assert_allclose(loss(moved, reduce), expected, rtol=2e-3)


def test_tokens_of_a_text_have_no_part_in_steps():
    """Their statistics are 0, whether the mask has them or not."""
    mean, ref, *_ = sample(5, shape=(2, 5, 3))
    text = jnp.arange(5) < 2
    mean, ref = (jnp.where(text[:, None], 0.0, x) for x in (mean, ref))
    scale = jnp.where(text, 0.0, 0.5) * jnp.ones((2, 1))
    logp, old, A = -jnp.ones((2, 5)), jnp.full((2, 5), -1.1), jnp.array([1.0, -2.0])
    mask = jnp.ones((2, 5), bool)

    def kl(mean, mask):
        return diffusion.flow_kl(mean, ref, scale, mask)

    def clip(mean, mask):
        return diffusion.flow_clip(
            logp, old, A, mask, step_mean=mean, old_step_mean=ref, step_scale=scale, eps=0.5
        )

    for term in (kl, clip):
        loss = term(mean, mask)
        assert not loss[:, :2].any() and (loss[:, 2:] != 0).all()
        np.testing.assert_array_equal(loss, term(mean, mask & ~text))
        slope = jax.grad(lambda x, term=term: term(x, mask).sum())(mean)
        assert np.isfinite(slope).all() and not slope[:, :2].any() and slope[:, 2:].any()


def test_penalties_are_zero_at_the_reference_and_ignore_other_steps():
    v, ref, _, _ = sample(3)
    where = jnp.array([[True, False]] * 3)
    mse = diffusion.velocity_mse(jnp.where(where[..., None], v, jnp.nan), ref, where=where)
    expected = ((np.float64(v) - np.float64(ref)) ** 2).sum(-1)
    np.testing.assert_allclose(mse, np.where(where, expected, 0.0), rtol=1e-5)
    assert not diffusion.velocity_mse(v, v).any() and not diffusion.latent_kl(v, v, 0.1).any()
    # No step of a window: no penalty.
    none = masking.masked_mean(diffusion.velocity_mse(v, ref, where=where & False), where & False)
    assert none == 0
    reference = jax.grad(lambda x: diffusion.velocity_mse(v, x).sum())(ref)
    assert not reference.any()
    np.testing.assert_allclose(diffusion.diffusion_mse(v, ref), expected, rtol=1e-5)
    mean = diffusion.flow_mse(v, ref, jnp.ones((3, 2), bool), coef=2.0, reduce="mean")
    np.testing.assert_allclose(mean, 2 * expected / v.shape[-1], rtol=1e-5)


def test_errors_of_noise_stand_where_log_probabilities_of_pairs_stand():
    noise = jnp.zeros((4, 1, 2))
    errors = jnp.array([0.30, 0.50, 0.40, 0.45])[:, None]
    predicted = jnp.stack([jnp.sqrt(errors), jnp.zeros_like(errors)], axis=-1)
    mse = diffusion.diffusion_mse(noise, predicted)
    np.testing.assert_allclose(mse, errors, rtol=1e-6)
    loss = preferences.seppo(-mse[0], -mse[1], -mse[2], -mse[3], beta=1.0)
    np.testing.assert_allclose(loss, [0.620957], rtol=1e-5)


def nft(v, old, target, level, advantages, mask=None, **options):
    mask = jnp.ones(jnp.shape(level), bool) if mask is None else mask
    return diffusion.diffusion_nft(
        jnp.zeros(mask.shape),
        None,
        advantages,
        mask,
        velocity=v,
        ref_velocity=old,
        target_velocity=target,
        level=level,
        **options,
    )


def test_diffusion_nft_worked_numbers():
    """Errors of the clean sample at level 0.5: (0.5, 1) of v+ and (1, 0.5) of v-, mean 0.75."""
    v, old, target = (jnp.array([x]) for x in ([1.0, 2.0], [0.5, 2.5], [2.0, 4.0]))
    # beta 1: v+ = (1, 2), v- = (0, 3); r = 0.5 + 0.5 * 2 / 5 = 0.7.
    positive = (0.5**2 + 1.0**2) / 2 / 0.75
    negative = (1.0**2 + 0.5**2) / 2 / 0.75
    loss = nft(v, old, target, jnp.array([0.5]), jnp.array(2.0))
    np.testing.assert_allclose(loss, [5 * (0.7 * positive + 0.3 * negative)], rtol=1e-6)
    # beta 0.5: v+ = (0.75, 2.25), v- = (0.25, 2.75); an advantage of -10 is clipped: r = 0.
    loss = nft(v, old, target, jnp.array([0.5]), jnp.array(-10.0), beta=0.5)
    np.testing.assert_allclose(loss, [5 / 0.5 * (0.875**2 + 0.625**2) / 2 / 0.75], rtol=1e-6)
    plain = nft(v, old, target, jnp.array([0.5]), jnp.array(-10.0), beta=0.5, normalized=False)
    np.testing.assert_allclose(plain, [5 / 0.5 * (1.75**2 + 1.25**2) / 2], rtol=1e-6)
    far = nft(v, old, target, jnp.array([0.5]), jnp.array(1.0), bound=0.5)
    np.testing.assert_allclose(far, [0.5 * positive], rtol=1e-6)


NFT_LEVEL = jnp.array([[1.0, 0.6], [0.3, 0.9], [0.5, 0.2]])


@pytest.mark.parametrize("normalized", [True, False])
def test_at_the_reference_the_gradient_of_diffusion_nft_is_weighted_flow_matching(normalized):
    """By the clipped advantage, and whatever beta; an advantage of 0 has none."""
    v, target, *_ = sample(7)
    A = jnp.array([2.0, 0.0, -9.0])

    def gradient(beta):
        return jax.grad(
            lambda x: nft(x, v, target, NFT_LEVEL, A, beta=beta, normalized=normalized).sum()
        )(v)

    u, t, level = np.float64(v), np.float64(target), np.float64(NFT_LEVEL)[..., None]
    e = u - t if not normalized else level * (u - t)
    of_matching = 2 * e / 4
    if normalized:
        of_matching *= level / np.abs(e).mean(-1, keepdims=True)
    want = np.array([2.0, 0.0, -5.0])[:, None, None] * of_matching
    for beta in (0.1, 1.0, 3.0):
        np.testing.assert_allclose(gradient(beta), want, rtol=1e-4, atol=1e-4)


def test_masked_levels_of_diffusion_nft_are_not_read():
    v, old, target, _ = sample(10)
    mask = jnp.array([[True, False]] * 3)
    A, junk = jnp.array([1.0, -1.0, 0.5]), jnp.where(mask[..., None], 0.0, jnp.nan)

    def loss(x):
        return nft(x, old + junk, target + junk, NFT_LEVEL + junk[..., 0], A, mask)

    want = nft(v, old, target, NFT_LEVEL, A) * mask
    np.testing.assert_array_equal(loss(v + junk), want)
    slope = jax.grad(lambda x: loss(x).sum())(v + junk)
    assert np.isfinite(slope).all() and not slope[:, 1].any() and slope[:, 0].all()
    per_level = nft(v, old, target, NFT_LEVEL, jnp.broadcast_to(A[:, None], (3, 2)), mask)
    np.testing.assert_array_equal(per_level, want)


def test_diffusion_nft_is_finite_where_a_prediction_is_exact():
    """The denominator of an error of 0."""
    _, old, _, _ = sample(11)
    value, slope = jax.value_and_grad(lambda x: nft(x, old, old, NFT_LEVEL, jnp.ones(3)).sum())(old)
    assert value == 0 and not slope.any()


def test_a_flow_without_random_steps():
    likelihood = diffusion.forward_likelihood()
    assert likelihood == diffusion.forward_likelihood() != diffusion.flow_likelihood()
    assert likelihood.draws and not diffusion.flow_likelihood().draws
    assert [name for name, _ in likelihood.statistics] == ["velocity", "target_velocity", "level"]
    with pytest.raises(ValueError, match="without a step it has no densities"):
        likelihood.at(ONE, ONE, jnp.array(0), diffusion.flow_levels(2), eps=ONE)


def test_trees_of_latents():
    tree = diffusion.flow_tree(20, (0, 3, 6, 9))
    inner = np.unique(tree.parents[1:])
    assert (len(tree.parents) - 1, len(inner), (tree.depth == 20).sum()) == (218, 203, 16)
    assert (tree.depth[tree.parents[1:]] == tree.depth[1:] - 1).all()
    assert (np.diff(tree.depth) >= 0).all()
    # The worked numbers of a binary tree of two splits.
    small = diffusion.flow_tree(2, (0, 1))
    leaves = jnp.zeros(7).at[3:].set(jnp.array([1.0, 3.0, 2.0, 6.0]))
    args = {"max_depth": 2}
    rewards = advantages.node_rewards(small.parents, small.depth, leaves, **args)
    np.testing.assert_allclose(rewards[1:3], [2.0, 4.0])
    credit = advantages.depth_advantages(rewards, small.depth, jnp.zeros(7, int), trees=1, **args)
    expected = [0, -0.707107, 0.707107, -0.925820, 0, -0.462910, 1.388730]
    np.testing.assert_allclose(credit, expected, atol=1e-5)
    edges = jnp.array([0.0, -1.0, -2.0, -1.0, -2.0, -1.0, -2.0])
    weighted = advantages.node_rewards(small.parents, small.depth, leaves, edge_logp=edges, **args)
    np.testing.assert_allclose(weighted[1:3], [1.537883, 3.075766], rtol=1e-5)
