"""Masks of responses and their noise levels: what they cover, how often, and by which key."""

import jax
import jax.numpy as jnp
import numpy as np
from rows import for_each

from jaxrl_llm import diffusion

KEY = jax.random.key(0)
VALID = jnp.arange(6) < jnp.array([[6], [4], [0]])


def test_tokens_are_masked_as_often_as_the_level_says():
    rows = jnp.ones((2000, 6), bool).at[:, 5].set(False)
    t = jnp.array([0.0, 0.25, 1.0])
    masked = np.asarray(diffusion.mask_tokens(KEY, rows, t))
    assert masked.shape == (3, 2000, 6)
    assert not masked[..., 5].any() and not masked[0].any() and masked[2, :, :5].all()
    error = 4 * np.sqrt(0.25 * 0.75 / 2000)
    np.testing.assert_allclose(masked[1, :, :5].mean(0), 0.25, atol=error)


def test_exact_sizes_and_every_token_alike():
    rows = jnp.ones((3000, 4), bool).at[:, 1].set(False)
    masked = np.asarray(diffusion.mask_exact(KEY, rows, jnp.array([1, 2, 9])))
    assert (masked.sum(-1) == np.array([[1], [2], [3]])).all() and not masked[..., 1].any()
    shares = masked.mean(1)[:, [0, 2, 3]]
    np.testing.assert_allclose(shares[:2], [[1 / 3] * 3, [2 / 3] * 3], atol=0.035)
    one = diffusion.mask_exact(KEY, VALID, jnp.array(2))
    assert one.shape == VALID.shape and one.sum(-1).tolist() == [2, 2, 0]


def test_one_key_gives_one_mask():
    t = diffusion.noise_levels(KEY, (3,), samples=2)
    a, b = (diffusion.mask_tokens(KEY, VALID, t) for _ in range(2))
    assert np.array_equal(a, b)
    assert not np.array_equal(a, diffusion.mask_tokens(jax.random.key(1), VALID, t))
    assert np.array_equal(a, jax.jit(diffusion.mask_tokens)(KEY, VALID, t))


def test_blocks_are_hidden_from_the_last_on():
    valid = jnp.broadcast_to((jnp.arange(9) >= 1) & (jnp.arange(9) < 8), (3000, 9))
    masked = np.asarray(diffusion.mask_blocks(KEY, valid, block=3, samples=2))
    assert masked.shape == (2, 3000, 9) and not masked[..., [0, 8]].any()
    parts = [masked[..., 1:4], masked[..., 4:7], masked[..., 7:8]]
    some, complete = (np.stack([f(x, axis=-1) for x in parts]) for f in (np.any, np.all))
    # After a block of which something is hidden all is hidden.
    assert (complete[1:] | ~some[:-1]).all() and some[-1].all()
    first = some.argmax(0)
    np.testing.assert_allclose(np.bincount(first.ravel()) / 6000, 1 / 3, atol=0.03)
    inside = parts[0].sum(-1)[first == 0]
    np.testing.assert_allclose(np.bincount(inside)[1:] / len(inside), 1 / 3, atol=0.05)
    np.testing.assert_allclose(parts[0][first == 0].mean(0), 2 / 3, atol=0.05)
    assert not diffusion.mask_blocks(KEY, valid & False, block=3, samples=2).any()
    # One block of all is an exact count from 1.
    sizes = diffusion.mask_blocks(KEY, valid, block=9, samples=2).sum(-1)
    np.testing.assert_allclose(np.bincount(sizes.ravel())[1:] / 6000, 1 / 7, atol=0.02)


def test_tokens_before_the_block_are_hidden_by_chance():
    """Those of the block and behind it are as without."""
    valid = jnp.broadcast_to((jnp.arange(9) >= 1) & (jnp.arange(9) < 8), (3000, 9))
    plain = np.asarray(diffusion.mask_blocks(KEY, valid, block=3, samples=2))
    masked = np.asarray(diffusion.mask_blocks(KEY, valid, block=3, samples=2, p=0.3))
    first = (plain[..., 1:].argmax(-1) // 3)[..., None]
    before = np.asarray(valid) & ((np.arange(9) - 1) // 3 < first)
    assert (masked == plain)[~before].all() and not plain[before].any()
    np.testing.assert_allclose(masked[before].mean(), 0.3, atol=0.02)
    complete = diffusion.mask_blocks(KEY, valid, block=3, samples=2, p=1.0)
    assert np.array_equal(complete, plain | before)


def test_complements_cover_each_token_once():
    masked = diffusion.mask_tokens(KEY, VALID, jnp.array([0.3, 0.6]))
    both = diffusion.complementary(masked, VALID)
    assert both.shape == (4, 3, 6) and np.array_equal(both[:2], masked)
    assert np.array_equal(both.sum(0), 2 * VALID)
    t = diffusion.count_levels(both, VALID, least=0)
    lengths = np.array([6, 4, 0])
    np.testing.assert_allclose(t[:2] + t[2:], np.tile(lengths / (lengths + 1), (2, 1)), rtol=1e-6)


def test_prompt_masks():
    prompt = jnp.arange(8) < 3
    valid = (jnp.arange(8) >= 3) & (jnp.arange(8) < 7)
    for p, masked in ((0.0, valid), (1.0, valid | prompt)):
        assert np.array_equal(diffusion.diffu_mask(KEY, prompt, valid, p=p), masked)
    # Without masked prompts the key does not matter.
    other = diffusion.diffu_mask(jax.random.key(5), prompt, valid, p=0.0)
    assert np.array_equal(other, valid)
    rows = jnp.broadcast_to(prompt, (3000, 8))
    share = diffusion.diffu_mask(KEY, rows, jnp.broadcast_to(valid, rows.shape))[:, :3].mean()
    np.testing.assert_allclose(share, 0.15, atol=0.02)


@for_each("draws", ["independent", "antithetic", "stratified"])
def test_levels_are_uniform(draws):
    t = np.asarray(diffusion.noise_levels(KEY, (2000,), samples=4, draws=draws, least=0.1))
    assert t.shape == (4, 2000) and t.min() >= 0.1 and t.max() <= 1.0
    np.testing.assert_allclose(t.mean(), 0.55, atol=0.01)
    np.testing.assert_allclose(t.std(), 0.9 / np.sqrt(12), atol=0.01)
    if draws == "antithetic":
        np.testing.assert_allclose(t[:2] + t[2:], 1.1, rtol=1e-6)
    if draws == "stratified":
        assert (np.floor((t - 0.1) / 0.9 * 4 - 1e-4) == np.arange(4)[:, None]).mean() > 0.99
    for least in (0, 1):
        valid = jnp.broadcast_to(VALID[:, None], (3, 3000, 6))
        counts = diffusion.mask_counts(KEY, valid, samples=4, draws=draws, least=least)
        assert counts.shape == (4, 3, 3000) and not counts[:, 2].any()
        for row, length in ((0, 6), (1, 4)):
            share = np.bincount(counts[:, row].reshape(-1), minlength=length + 1) / 12000
            expected = np.arange(length + 1) >= least
            np.testing.assert_allclose(share, expected / expected.sum(), atol=0.02)


def test_quadrature_integrates_polynomials():
    for samples in (1, 2, 3):
        t, weights = diffusion.quadrature_levels(samples)
        for degree in range(2 * samples):
            np.testing.assert_allclose((weights * t**degree).sum(), 1 / (degree + 1), rtol=1e-5)
        missed = (weights * t ** (2 * samples)).sum()
        assert abs(missed - 1 / (2 * samples + 1)) > 1e-4
