"""PS-GRPO's agreement across paraphrases, against sums written out pair by pair."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.advantages import grpo
from jaxrl_llm.rewards import cross_paraphrase_reward, paraphrase_rewards, sample_pair_mask

WORKED = np.array(
    [[1, 0.5, 0.2, 0.4], [0.5, 1, 0.6, 0.8], [0.2, 0.6, 1, 0.3], [0.4, 0.8, 0.3, 1]], np.float32
).reshape(2, 2, 2, 2)


def reference(similarity, pairs):
    """Each pair in turn, float64."""
    count, group = similarity.shape[:2]
    out = np.zeros((count, group))
    for n in range(count):
        for i in range(group):
            values = [
                float(similarity[n, i, m, j])
                for m in range(count)
                for j in range(group)
                if m != n and pairs[n, i, m, j]
            ]
            out[n, i] = np.mean(values) if values else 0.0
    return out


def test_worked_numbers():
    reward = cross_paraphrase_reward(jnp.asarray(WORKED))
    np.testing.assert_allclose(reward, [[0.3, 0.7], [0.4, 0.6]], rtol=1e-6)
    np.testing.assert_allclose(grpo(reward), [[-0.7071, 0.7071], [-0.7071, 0.7071]], atol=1e-4)


def test_similarities_inside_a_paraphrase_are_never_read():
    junk = WORKED.copy()
    for n in range(2):
        junk[n, :, n, :] = np.nan
    np.testing.assert_array_equal(
        cross_paraphrase_reward(junk), cross_paraphrase_reward(jnp.asarray(WORKED))
    )


def test_equals_the_reference_with_and_without_a_sample():
    rng = np.random.default_rng(0)
    similarity = rng.random((3, 4, 3, 4)).astype(np.float32)
    everything = np.ones(similarity.shape, bool)
    sample = rng.random(similarity.shape) < 0.4
    sample[1, 2] = False
    np.testing.assert_allclose(
        cross_paraphrase_reward(similarity), reference(similarity, everything), rtol=1e-5
    )
    junk = np.where(sample, similarity, np.nan)
    out = jax.jit(cross_paraphrase_reward)(junk, pair_mask=sample)
    np.testing.assert_allclose(out, reference(similarity, sample), rtol=1e-5)
    assert out[1, 2] == 0
    assert cross_paraphrase_reward(jnp.ones((1, 4, 1, 4), jnp.bfloat16)).tolist() == [[0.0] * 4]


@for_each(("paraphrases", "rollouts"), [(1, 1), (2, 1), (3, 1), (2, 3), (3, 4)])
def test_sampled_pairs(paraphrases, rollouts):
    draw = jax.jit(
        lambda key: sample_pair_mask(
            key, shape=(5, 4, 4), paraphrases=paraphrases, rollouts=rollouts
        )
    )
    mask = np.asarray(draw(jax.random.key(0)))
    assert mask.shape == (5, 4, 4, 4, 4)
    own = np.eye(4, dtype=bool)[:, None, :, None]
    assert not (mask & own).any()
    per_paraphrase = mask.sum(-1)
    assert set(np.unique(per_paraphrase)) <= {0, rollouts}
    assert ((per_paraphrase > 0).sum(-1) == paraphrases).all()
    if (paraphrases, rollouts) == (3, 4):
        np.testing.assert_array_equal(mask, np.broadcast_to(~own, mask.shape))
    else:
        assert (mask != np.asarray(draw(jax.random.key(1)))).any()


def test_every_pair_is_drawn_equally_often():
    masks = jax.vmap(lambda key: sample_pair_mask(key, shape=(4, 2), paraphrases=2))(
        jax.random.split(jax.random.key(0), 2000)
    )
    share = np.asarray(masks.mean(0))
    other = np.broadcast_to(~np.eye(4, dtype=bool)[:, None, :, None], share.shape)
    np.testing.assert_allclose(share[other], 2 / 3 / 2, atol=0.05)
    assert not share[~other].any()


def test_batch_form_takes_sets_of_consecutive_prompts():
    rng = np.random.default_rng(1)
    sets, count, group = 2, 3, 2
    blocks = rng.random((sets, count, group, count, group)).astype(np.float32)
    similarity = blocks.reshape(sets * count, group, count * group)
    where = np.ones((6, 2), bool)
    where[4, 1] = False
    kept = where.reshape(sets, count, group)
    junk = similarity.copy()
    junk[3:, :, 3] = np.nan  # what would be compared with the dropped rollout
    junk[4, 1] = np.inf
    accuracy = rng.random((6, 2)).astype(np.float32)
    accuracy[4, 1] = np.nan
    out = jax.jit(
        lambda r, s, w: paraphrase_rewards(r, similarity=s, where=w, agreement=2.0, accuracy=0.5)
    )(accuracy, junk, where)
    expected = np.concatenate(
        [
            reference(block, np.broadcast_to(keep, block.shape))
            for block, keep in zip(blocks, kept, strict=True)
        ]
    )
    expected = np.where(where, 2.0 * expected + 0.5 * np.where(where, accuracy, 0.0), 0.0)
    np.testing.assert_allclose(out, expected, rtol=1e-5)


def sampled(shape=(4, 2), **options):
    return sample_pair_mask(jax.random.key(0), shape=shape, **options)


SQUARE = jnp.ones((2, 2, 2, 2))


@for_each(
    ("error", "call", "message"),
    bad_calls(r"""
ValueError:
    cross_paraphrase_reward(jnp.ones((2, 3, 3, 2)))
    # similarity must be \[..., N, G, N, G\].*\(2, 3, 3, 2\)
    cross_paraphrase_reward(jnp.ones((4, 4)))  # similarity must have at least 4
    paraphrase_rewards(jnp.ones((3, 4)), similarity=jnp.ones((3, 4, 8)))
    # must be sets of the 2 paraphrases
    paraphrase_rewards(jnp.ones((4, 3)), similarity=jnp.ones((4, 3, 5)))
    # similarity must have shape \(4, 3, 3\)
    sampled(paraphrases=0)  # !sample_pair_mask: .* must be from 1 to
    sampled(paraphrases=4)  # !sample_pair_mask: .* must be from 1 to
    sampled(rollouts=3)  # !sample_pair_mask: .* must be from 1 to
    sampled(shape=(4,))  # !sample_pair_mask: shape must be
TypeError:
    cross_paraphrase_reward(SQUARE, pair_mask=SQUARE)  # pair_mask must be bool
"""),
)
def test_bad_input(error, call, message):
    raises(error, call, message, globals())


def test_bleu_by_hand():
    bleu = jr.rewards.bleu
    # 3 of 4 words and 2 of 3 pairs are in the reference.
    assert bleu("a b c d", "a b c x") == pytest.approx((3 / 4 * 2 / 3) ** 0.5)
    # A word counts at most as often as the reference has it; a short candidate pays exp(1 - 3/2).
    assert bleu("a a", "a b c", order=1) == pytest.approx(np.exp(-0.5) / 2)
    assert bleu("a b c d", "a", order=4) == pytest.approx(1 / 4)  # as many orders as it has words
    assert bleu("", "") == 0.0 and bleu("x", "x", order=4) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="bleu: order must be above 0"):
        bleu("a", "b", order=0)


def test_similarities_of_a_batch_are_of_the_paraphrases_of_a_question():
    texts = [["a b", "c"], ["a b", "d"], ["c", "a"], ["x", "a"]]
    rows = [{"paraphrases": ["one", "two"]}] * 4
    similarity = jr.rewards.paraphrase_similarity(texts, metadata=rows)
    assert similarity.shape == (4, 2, 4) and similarity.dtype == np.float32
    expected = np.zeros((4, 2, 2, 2))
    expected[0, 0, 1, 0] = expected[1, 0, 0, 0] = 1.0
    expected[2, 1, 1, 1] = expected[3, 1, 0, 1] = 1.0
    np.testing.assert_allclose(similarity.reshape(expected.shape), expected)
    # Which is what the rewards of the batch read.
    reward = jr.rewards.paraphrase_rewards(jnp.zeros((4, 2)), similarity=jnp.asarray(similarity))
    assert reward.tolist() == [[0.5, 0], [0.5, 0], [0, 0.5], [0, 0.5]]
