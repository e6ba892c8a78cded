"""Rollouts of other sources: stored policies, teachers, demonstrations."""

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

merge = jax.jit(cur.icpo_merge)


def test_sources():
    # Stored prompts are drawn with their probability.
    masks = jax.vmap(lambda key: cur.mix_source_mask(key, prompts=5))(
        jax.random.split(jax.random.key(0), 2000)
    )
    close(masks.mean(0), 0.4, atol=0.05)
    assert not cur.mix_source_mask(jax.random.key(0), prompts=5, probability=0.0).any()
    assert cur.mix_source_mask(jax.random.key(0), prompts=5, probability=1.0).all()

    # Comprehension is the mean probability of the answer.
    logp = jnp.log(jnp.array([[0.5, 0.25, 0.9], [0.1, 0.2, 0.3]])).at[1].set(jnp.nan)
    mask = jnp.array([[True, True, False], [False, False, False]])
    close(cur.comprehension_score(logp, mask), [0.375, 0.0], rtol=1e-6)


def test_ampo():
    # Only groups that all fail take teacher answers.
    rewards = jnp.array([[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    scores = jnp.array([[0.1, 0.7, 0.3], [0.1, 0.7, 0.3]])
    swap = cur.ampo_select(rewards, scores)
    assert swap.teachers.tolist() == [[1, 2], [-1, -1]]
    assert swap.rollouts.tolist() == [[0, 1], [-1, -1]]
    swap = cur.ampo_select(rewards, scores, mode="always")
    assert swap.teachers.tolist() == [[1, 2], [1, 2]]
    assert swap.rollouts.tolist() == [[0, 1], [0, 2]]

    # No more answers than there are wrong rollouts or teachers.
    rewards = jnp.array([[9.0, 0.0, 9.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    where = jnp.array([[0, 1, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]], bool)
    scores = jnp.array([[0.2, 0.2], [0.9, jnp.nan], [jnp.nan, jnp.nan], [0.5, 0.6]])
    available = jnp.array([[1, 1], [1, 0], [0, 0], [1, 1]], bool)
    swap = jax.jit(lambda *x: cur.ampo_select(*x[:2], where=x[2], available=x[3]))(
        rewards, scores, where, available
    )
    # Of equal scores the earlier answer; a dropped rollout neither counts nor gives way.
    assert swap.rollouts.tolist() == [[1, -1], [0, -1], [-1, -1], [-1, -1]]
    assert swap.teachers.tolist() == [[0, -1], [0, -1], [-1, -1], [-1, -1]]


def test_icpo():
    # Hybrid injects by chance.
    rewards, scores = jnp.array([[1.0, 0.0]]), jnp.array([[0.5, 0.6]])
    draw = jax.vmap(
        lambda key: cur.ampo_select(rewards, scores, k_max=1, mode="hybrid", key=key).teachers[0, 0]
    )
    taken = draw(jax.random.split(jax.random.key(0), 2000)) >= 0
    close(taken.mean(), 0.3, atol=0.05)

    # Who leaves is drawn uniformly.
    rewards = jnp.array([[0.0, 1.0, 0.0, 1.0]])
    steered = jnp.array([[False, False, False, True]])
    draw = jax.vmap(lambda key: cur.icpo_merge(rewards, steered=steered, key=key)[0])
    share = draw(jax.random.split(jax.random.key(1), 2000)).mean(0)
    close(share, [2 / 3, 2 / 3, 2 / 3, 1.0], atol=0.05)

    # As good as delta is good enough.
    kept = cur.icpo_merge(
        jnp.array([[0.0, 1.0, 0.5]]),
        steered=jnp.array([[False, False, True]]),
        key=jax.random.key(0),
        delta=0.5,
    )
    assert kept.sum() == 2 and kept[0, 2]

    # A teacher without a reward keeps its probe.
    roles = jnp.array([0, 0, 2, 2, 2, 4, 4, 4])
    prob = jnp.zeros(8).at[5:].set(jnp.array([0.9, 0.1, 0.5]))[:, None]
    where = jnp.ones(8, bool).at[2].set(False)
    inputs = {"roles": roles, "mask": jnp.ones((8, 1), bool), "old_logp": jnp.log(prob)}
    kept = cur.best_teachers(jnp.zeros(8), **inputs, where=where, k_max=1)
    # The third teacher, whose probe is the third one, in the place of the first rollout.
    assert np.flatnonzero(kept).tolist() == [1, 4]


@quick
@given(
    rewards=hnp.arrays(np.float32, (2, 5), elements=st.sampled_from([0.0, 1.0])),
    steered=hnp.arrays(np.bool_, (2, 5)),
    where=hnp.arrays(np.bool_, (2, 5)),
    seed=st.integers(0, 5),
)
def test_good_steered_rollouts_take_the_place_of_plain_ones(rewards, steered, where, seed):
    junk = np.where(where, rewards, np.nan).astype(np.float32)
    kept = np.asarray(
        merge(junk, steered=jnp.asarray(steered), where=where, key=jax.random.key(seed))
    )
    good = where & steered & (rewards >= 1)
    plain = where & ~steered
    assert not (kept & ~where).any()
    equal(kept & steered, good)
    expected = np.maximum(plain.sum(-1), good.sum(-1))
    equal(kept.sum(-1), expected)
