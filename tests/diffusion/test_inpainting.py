"""Hints for groups that are all wrong."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import advantages, diffusion

KEY = jax.random.key(0)


def test_chunks_are_contiguous_and_of_the_asked_lengths():
    trace = jnp.ones((50, 40), bool).at[:, :3].set(False).at[:, 33:].set(False)
    chunks = np.asarray(diffusion.hint_chunks(KEY, trace, shortest=2, longest=5))
    assert (chunks[:, :3] == -1).all() and (chunks[:, 33:] == -1).all()
    seen = set()
    for row in chunks:
        inside = row[3:33]
        assert inside[0] == 0 and set(np.diff(inside)) <= {0, 1}
        lengths = np.bincount(inside)
        assert all(2 <= x <= 5 for x in lengths[:-1]) and 1 <= lengths[-1] <= 5
        seen |= set(lengths[:-1].tolist())
    assert seen == {2, 3, 4, 5}
    assert (diffusion.hint_chunks(KEY, trace & False) == -1).all()


def test_a_share_of_the_chunks_is_held():
    chunks = jnp.array([[0, 0, 1, 1, 2, 3, 4, -1]]).repeat(2000, axis=0)
    for share, count in ((0.0, 0), (0.19, 0), (0.6, 3), (1.0, 5)):
        hint = np.asarray(diffusion.hint_mask(KEY, chunks, share))
        held = np.stack([hint[:, [0, 2, 4, 5, 6]]])[0]
        assert (held.sum(-1) == count).all() and not hint[:, 7].any()
        assert (hint[:, 0] == hint[:, 1]).all() and (hint[:, 2] == hint[:, 3]).all()
        np.testing.assert_allclose(held.mean(0), count / 5, atol=0.05)
    shares = jnp.where(jnp.arange(2000) < 1000, 0.2, 0.8)
    held = diffusion.hint_mask(KEY, chunks, shares)[:, [0, 2, 4, 5, 6]].sum(-1)
    assert set(held[:1000].tolist()) == {1} and set(held[1000:].tolist()) == {4}


def test_each_response_has_its_share_of_the_chunks():
    trace = jnp.ones((4000, 10), bool).at[0].set(False)
    hints = np.asarray(diffusion.draw_hints(KEY, trace, shortest=1, longest=1, low=0.2, high=0.6))
    counts = hints.sum(-1)
    assert counts[0] == 0 and set(counts[1:].tolist()) == {2, 3, 4, 5}
    # floor(10 share) of a share in [0.2, 0.6] is each of the four with the same chance.
    np.testing.assert_allclose(np.bincount(counts[1:])[2:] / 3999, 0.25, atol=0.03)
    np.testing.assert_allclose(hints[1:].mean(0), 0.35, atol=0.03)
    assert not diffusion.draw_hints(KEY, trace, low=0.0, high=0.0).any()


def test_worked_numbers_of_replacement():
    wrong, new = jnp.zeros(4), jnp.array([1.0, 0.0, 1.0, 1.0])
    source = diffusion.igpo_replace(wrong, new, share=0.5)
    assert source.tolist() == [0, 2, -1, -1]
    rewards = jnp.where(source >= 0, new[source], wrong)
    np.testing.assert_allclose(advantages.dr_grpo(rewards), [0.5, 0.5, -0.5, -0.5])
    # A group with a right response stays, whatever the hints made.
    rows = jnp.array([[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1.0, 1, 1, 1]])
    news = jnp.array([[1.0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1.0], [1.0, 1, 1, 1]])
    source = jax.jit(diffusion.igpo_replace)(rows, news)
    assert source.tolist() == [[-1] * 4, [-1] * 4, [3, -1, -1, -1], [-1] * 4]
    assert diffusion.igpo_replace(wrong, jnp.ones(4), share=0.0).tolist() == [-1] * 4
    assert diffusion.igpo_replace(wrong, jnp.ones(4), share=1.0).tolist() == [0, 1, 2, 3]


def test_uncertain_hints_train():
    entropy = jnp.array([[0.1, 0.9, 0.5, 0.5, 0.7, jnp.nan], [jnp.nan] * 6])
    hint = jnp.array([[True, True, True, True, False, True], [False] * 6])
    mask = jnp.arange(6) < 5 * jnp.ones((2, 1))
    entropy = jnp.where(hint & mask, entropy, jnp.nan)
    none, some = [0, 0, 0, 0, 1, 0], [0, 1, 1, 0, 1, 0]
    # A fifth of four is none, but one trains, as long as any is asked for.
    expected = {0.0: none, 0.2: [0, 1, 0, 0, 1, 0], 0.5: some, 1.0: [1, 1, 1, 1, 1, 0]}
    for share, row in expected.items():
        train = diffusion.entropy_top_mask(entropy, hint, mask, share=share)
        assert train[0].tolist() == [bool(x) for x in row]
        assert np.array_equal(train[1], mask[1])
