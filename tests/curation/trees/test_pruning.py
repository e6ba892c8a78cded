"""Pruning of rollouts: calibrated scores, balanced survivors, gates and cuts by predictions."""

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close
from rows import for_each

JUNK = (jnp.nan, jnp.inf, -jnp.inf, 1e4)
survivors = jax.jit(cur.systematic_survivors, static_argnames="count")
keys = jax.random.split(jax.random.key(0), 3000)


def test_scores():
    # The loss of the head is cross entropy.
    logits, rewards = jnp.array([0.3, -2.0, 1.0]), jnp.array([1.0, 0.0, 0.0])
    p = 1 / (1 + np.exp(-np.float64(logits)))
    expected = -(np.log(p[0]) + np.log(1 - p[1])) / 2
    where = jnp.array([True, True, False])
    for junk in JUNK:
        dirty = jnp.where(where, logits, junk), jnp.where(where, rewards, junk)
        ours = cur.quality_loss(*dirty, where=where)
        close(ours, expected, rtol=1e-6)
    slope = jax.grad(cur.quality_loss)(logits, rewards)
    close(slope, (p - np.array([1, 0, 0])) / 3, atol=1e-6)

    # Bins count outcomes and give rates.
    state = cur.score_bins_init(bins=4)
    scores = jnp.array([[0.0, 0.24, 1.0], [0.26, 0.74, jnp.nan]])
    rewards = jnp.array([[0.0, 1.0, 1.0], [1.0, 0.0, jnp.nan]])
    where = jnp.array([[True, True, True], [True, True, False]])
    state = cur.score_bins_update(state, scores, rewards, where=where)
    assert state.count.tolist() == [2.0, 1.0, 1.0, 1.0]
    assert state.right.tolist() == [1.0, 1.0, 0.0, 1.0]
    rates = cur.score_rates(state, jnp.array([0.1, 0.3, 0.6, 0.9]))
    close(rates, [1 / 2, 2 / 3, 1 / 3, 2 / 3], rtol=1e-6)
    faded = cur.score_bins_update(state, scores[:, :1], rewards[:, :1], decay=0.5)
    close(faded.count, [2.0, 1.5, 0.5, 0.5])


def test_survivors():
    # Worked survival.
    rates = jnp.array([0.9, 0.9, 0.9, 0.1])
    ours = cur.survival_rates(rates)
    close(ours, [0.404762] * 3 + [0.785714], atol=1e-5)
    close(ours.sum(), 2.0, rtol=1e-6)
    even = cur.survival_rates(jnp.full(4, 0.3), keep=0.25)
    close(even, 0.25, rtol=1e-6)
    certain = cur.survival_rates(jnp.array([1.0, 1.0, 1.0, 0.0]))
    close([certain[:3].sum(), certain[3]], [1.0, 1.0], rtol=1e-5)
    assert (cur.survival_rates(jnp.full(4, 0.5), keep=1.0) == 1.0).all()
    for junk in JUNK:
        where = jnp.array([True, True, True, True, False])
        padded = cur.survival_rates(jnp.append(rates, junk), where=where)
        close(padded, [*ours, 0.0], rtol=1e-5)

    # Few likely rollouts are filled up.
    rates = jnp.array([[1.0, 1.0, 0.0, 0.0], [0.0] * 4, [1.0] * 4])
    where = jnp.array([[True] * 4, [True] * 4, [True, True, False, False]])
    drawn = jax.vmap(lambda k: survivors(k, rates, count=3, where=where))(keys[:50])
    assert (drawn[:, 0, :2]).all() and (drawn[:, :2].sum(-1) == 3).all()
    assert (drawn[:, 2] == where[2]).all()
    one = survivors(keys[0], jnp.array([0.9, 0.9, 0.9]), count=1)
    assert int(one.sum()) == 1


@for_each(
    "rates", [[0.4, 0.4, 0.4, 0.8], [1.0, 0.2, 0.3, 0.5], [0.05, 0.05, 0.95, 0.95], [0.5] * 4]
)
def test_survivors_are_as_many_as_asked_and_drawn_by_their_rates(rates):
    rates = jnp.array(rates)
    drawn = jax.vmap(lambda k: survivors(k, rates, count=2))(keys)
    assert (drawn.sum(-1) == 2).all()
    close(drawn.mean(0), rates, atol=0.04)


@for_each(
    ("predicted", "keep"),
    [
        ([1.0, 1.0, 1.0], False),
        ([0.0, 0.0, 0.0], False),
        ([0.0, 0.0, 1.0], True),  # the predictions differ
        ([0.5, 0.5, 0.5], True),
        ([0.875, 1.0, 1.0], True),  # not sure enough by default
    ],
)
def test_prompts_of_a_known_outcome_are_skipped(predicted, keep):
    assert bool(cur.predictive_gate(jnp.array(predicted))) == keep
    if keep and max(predicted) - min(predicted) < 0.2:
        assert not cur.predictive_gate(jnp.array(predicted), low=0.5, high=0.9)
    unknown = jnp.full(3, jnp.nan)
    assert cur.predictive_gate(unknown, where=jnp.zeros(3, bool))


def test_rollouts_stop_at_twice_the_prediction():
    lengths = jnp.array([[100.0, 201.0], [900.0, 900.0], [jnp.nan, 7.0], [jnp.nan, jnp.nan]])
    stop = cur.length_cutoff(lengths, max_length=1024, where=~jnp.isnan(lengths))
    assert stop.tolist() == [301, 1024, 14, 1024]
    assert int(cur.length_cutoff(jnp.array([0, 0]), max_length=8)) == 1
