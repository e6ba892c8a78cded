"""Parts of a group: extremes, filtration by reward, clean traces, constrained pairs."""

import compiled_curation as curation
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

quick = settings(max_examples=40, deadline=None, database=None, derandomize=True)
few = st.sampled_from([0.0, 0.5, 1.0, 2.0])
extremes = jax.jit(curation.select_extremes, static_argnames=("best", "worst"))
roc = jax.jit(curation.resample_on_correct, static_argnames=("count", "min_wrong", "min_right"))
JUNK = (jnp.nan, jnp.inf, -jnp.inf, 1e4)


# --- extremes --------------------------------------------------------------------------------


def test_extremes():
    # The worked extremes.
    rewards = jnp.array([5.0, 1.0, 3.0, 2.0, 4.0, 0.0])
    keep = extremes(rewards, best=2, worst=2)
    assert np.flatnonzero(keep).tolist() == [0, 1, 4, 5]
    assert extremes(rewards, best=3, worst=3).all() and extremes(rewards, best=5, worst=5).all()
    assert not extremes(rewards, best=0, worst=0).any()
    ties = extremes(jnp.array([1.0, 1.0, 1.0, 1.0]), best=1, worst=1)
    assert ties.tolist() == [True, True, False, False]
    unknown = extremes(jnp.array([0.0, jnp.nan, 1.0]), best=1, worst=0)
    assert unknown.tolist() == [False, True, False]

    # Extremes tell more than the middle.
    rewards, quality = jnp.arange(4.0), jnp.array([0.0, 1.0, 0.0, 1.0])
    assert float(curation.r_squared(rewards, quality)) == pytest.approx(0.2)
    kept = curation.filtration_weights(rewards)
    assert float(curation.r_squared(rewards, quality, weights=kept)) == pytest.approx(1.0)


@quick
@given(
    rewards=hnp.arrays(np.float32, (2, 6), elements=few),
    where=hnp.arrays(np.bool_, (2, 6)),
)
def test_extremes_are_disjoint_bounded_and_blind_to_the_scale(rewards, where):
    keep = np.asarray(extremes(np.where(where, rewards, np.nan), best=2, worst=1, where=where))
    assert not (keep & ~where).any()
    np.testing.assert_array_equal(keep.sum(-1), np.minimum(where.sum(-1), 3))
    np.testing.assert_array_equal(extremes(np.exp(rewards), best=2, worst=1, where=where), keep)
    for k, r, w in zip(keep, rewards, where, strict=True):
        order = sorted(np.flatnonzero(w), key=lambda i: (-r[i], i))
        top, rest = order[:2], sorted(order[2:], key=lambda i: (r[i], i))
        assert set(np.flatnonzero(k)) == {*top, *rest[:1]}


# --- PF-PPO ----------------------------------------------------------------------------------


@for_each(
    ("rule", "weights"),
    [
        ("best", [0, 0, 0, 1]),
        ("best_random", [0.1, 0.1, 0.1, 0.4]),
        ("best_worst", [1, 0, 0, 1]),
        ("power", [0, 1, 4, 9]),
    ],
)
def test_weights_of_the_rules(rule, weights):
    rewards = jnp.array([[0.0, 1.0, 2.0, 3.0], [jnp.nan, 1.0, jnp.inf, 1.0]])
    where = jnp.array([[True] * 4, [False, True, False, False]])
    ours = curation.filtration_weights(rewards, rule=rule, where=where)
    np.testing.assert_allclose(ours[0], weights, rtol=1e-6)
    alone = {"best_random": 0.4}.get(rule, 1.0)
    np.testing.assert_allclose(ours[1], [0.0, alone, 0.0, 0.0], rtol=1e-6)


def test_rules():
    # Of equal rewards the first is worst and the last best.
    weights = curation.filtration_weights(jnp.ones((1, 3)))
    assert weights.tolist() == [[1.0, 0.0, 1.0]]
    assert curation.filtration_weights(jnp.ones(3), rule="power", power=0.0).tolist() == [1.0] * 3

    # Rollouts are drawn by their weights.
    weights = jnp.array([[1.0, 0.0], [3.0, 0.0]])
    drawn = curation.resample_rollouts(jax.random.key(0), weights, count=4000)
    counts = np.bincount(drawn, minlength=4)
    assert counts[1] == counts[3] == 0
    np.testing.assert_allclose(counts / 4000, [0.25, 0, 0.75, 0], atol=0.03)
    even = curation.resample_rollouts(jax.random.key(0), jnp.zeros(4), count=4000)
    np.testing.assert_allclose(np.bincount(even, minlength=4) / 4000, 0.25, atol=0.03)


@quick
@given(
    x=hnp.arrays(np.float32, 8, elements=few),
    y=hnp.arrays(np.float32, 8, elements=few),
    w=hnp.arrays(np.float32, 8, elements=st.sampled_from([0.0, 1.0, 2.0])),
)
def test_r_squared_is_the_squared_correlation(x, y, w):
    ours = float(curation.r_squared(np.where(w > 0, x, np.nan), y, weights=w))
    copies = np.repeat(np.arange(8), w.astype(int))
    if copies.size and np.ptp(x[copies]) > 0 and np.ptp(y[copies]) > 0:
        expected = np.corrcoef(np.float64(x[copies]), np.float64(y[copies]))[0, 1] ** 2
        assert ours == pytest.approx(expected, abs=2e-6)
    else:
        assert ours == pytest.approx(0.0, abs=1e-6)


# --- GRPO-RoC --------------------------------------------------------------------------------


def by_rule(rewards, penalty, where, count, min_wrong, min_right):
    """The published rule with plain numbers, the second share as what the first leaves."""
    out = np.zeros(len(rewards), bool)
    index = np.flatnonzero(where)
    if len(index) <= count:
        out[index] = len(index) == count
        return out
    wrong = [i for i in index if rewards[i] <= 0]
    right = sorted((i for i in index if rewards[i] > 0), key=lambda i: penalty[i])
    a = round(len(wrong) * count / len(index))
    b = count - a
    if a <= min(min_wrong, len(wrong)):
        a = min(min_wrong, len(wrong))
        b = count - a
    if b <= min(min_right, len(right)):
        b = min(min_right, len(right))
        a = count - b
    out[[*right[:b], *wrong[:a]]] = True
    return out


def test_roc_and_traces():
    # The worked groups of roc.
    penalty = jnp.array([0.5, 0.0, 1.0, 0.2, 0.1, 0.0, 0.0, 0.0])
    mixed = jnp.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    keep = roc(mixed, penalty=penalty, count=4, min_wrong=1, min_right=1)
    assert np.flatnonzero(keep).tolist() == [1, 4, 5, 6]
    lone = jnp.eye(8)[0]
    assert np.flatnonzero(roc(lone, penalty=penalty, count=4)).tolist() == [0, 1, 2, 3]
    assert roc(mixed, penalty=penalty, count=8).all()
    assert not roc(mixed[:3], penalty=penalty[:3], count=4).any()

    # Penalties of traces.
    ours = curation.trace_penalty(
        jnp.array([1, 0, 0, 2, 0, 0]),
        jnp.array([4, 0, 1, 2, 1, 1]),
        answers=jnp.array([1, 1, 0, 3, 1, 5]),
        opened=jnp.array([1, 1, 0, 3, 2, 5]),
        closed=jnp.array([1, 1, 1, 3, 1, 5]),
        turns=jnp.array([3, 3, 3, 4, 3, 2]),
    )
    np.testing.assert_allclose(ours, [0.25, 0.5, 1.0, 1.5, 1.0, 1.0])


@quick
@given(
    rewards=hnp.arrays(np.float32, (2, 8), elements=st.sampled_from([0.0, 1.0])),
    penalty=hnp.arrays(np.float32, (2, 8), elements=few),
    where=hnp.arrays(np.bool_, (2, 8), elements=st.sampled_from([True, True, True, False])),
    count=st.integers(3, 6),
)
def test_roc_equals_the_rule(rewards, penalty, where, count):
    mins = {"min_wrong": 1, "min_right": 2}
    junk = np.where(where, rewards, np.nan)
    keep = np.asarray(roc(junk, penalty=penalty, count=count, where=where, **mins))
    for k, r, p, w in zip(keep, rewards, penalty, where, strict=True):
        np.testing.assert_array_equal(k, by_rule(r, p, w, count, **mins))
        assert k.sum() == (count if w.sum() >= count else 0)


# --- pairs -----------------------------------------------------------------------------------


def test_pairs():
    # Pairs of a satisfying and a violating rollout.
    rewards = jnp.array([[1.0, 2.0, -1.0, 0.0], [-3.0, -2.0, -1.0, -4.0], [0.0] * 4, [1.0] * 4])
    satisfied = jnp.array([[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
    pairs = jax.jit(curation.constrained_pairs)(rewards, satisfied=satisfied)
    assert pairs.chosen.tolist() == [0, 1, -1, -1]
    assert pairs.rejected.tolist() == [1, 3, -1, -1]
    assert pairs.where.tolist() == [True, True, False, False]
    # Without a violation the worst of all is rejected.
    every = curation.constrained_pairs(rewards[:1], satisfied=jnp.ones((1, 4), bool))
    assert (int(every.chosen[0]), int(every.rejected[0])) == (1, 2)

    # The best rollout is imitated or the reference.
    rewards = jnp.array([[0.73, 0.0, 0.27, 0.5], [0.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    reference = jnp.array([[False, False, False, True]] * 3)
    ours = jax.jit(curation.best_constrained)(rewards, reference=reference)
    np.testing.assert_allclose(ours, [[0.73, 0, 0, 0], [0, 0, 0, 0.5], [0] * 4], rtol=1e-6)
    ties = curation.best_constrained(jnp.array([0.5, 0.5, 0.1]))
    assert ties.tolist() == [0.5, 0.0, 0.0]
    every = curation.best_constrained(jnp.array([[0.5, 0.5, 0.1], [0.0, -1.0, 0.0]]), ties="all")
    assert every.tolist() == [[0.5, 0.5, 0], [0, 0, 0]]
    # The best by another order, among those with a reward.
    order, ones = jnp.array([20.0, 30.0, 30.0, 40.0]), jnp.array([1.0, 1.0, 1.0, 0.0])
    assert curation.best_constrained(ones, order=order).tolist() == [0, 1, 0, 0]
    assert curation.best_constrained(ones, order=order, ties="all").tolist() == [0, 1, 1, 0]
    assert curation.best_constrained(ones, order=-order, ties="all").tolist() == [1, 0, 0, 0]
    where = jnp.array([False, True, True])
    for junk in JUNK:
        assert curation.best_constrained(jnp.array([junk, 0.25, 0.5]), where=where).tolist() == [
            0.0,
            0.0,
            0.5,
        ]

    # The first rollouts.
    where = jnp.array([[True, False, True, True], [False] * 4])
    two = curation.first_rollouts(where, count=2)
    assert two.tolist() == [[True, False, True, False], [False] * 4]
    assert not curation.first_rollouts(where, count=0).any()


@for_each("junk", JUNK)
def test_what_takes_no_part_is_in_no_pair(junk):
    rewards, where = jnp.array([1.0, junk, 0.0, junk]), jnp.array([True, False, True, False])
    satisfied = jnp.array([True, True, False, False])
    pairs = curation.constrained_pairs(rewards, satisfied=satisfied, where=where)
    assert (int(pairs.chosen), int(pairs.rejected)) == (0, 2)


BAD = {
    ValueError: {
        "select_extremes: best must not be negative; got -1": lambda: curation.select_extremes(
            jnp.zeros(3), best=-1, worst=1
        ),
        "filtration_weights: rule must be one of .*Did you mean 'best_worst'": lambda: (
            curation.filtration_weights(jnp.zeros(3), rule="best_wrst")
        ),
        "filtration_weights: power=2.0 has no effect with rule='best_worst'": lambda: (
            curation.filtration_weights(jnp.zeros(3), power=2.0)
        ),
        "resample_rollouts: count must be above 0; got 0": lambda: curation.resample_rollouts(
            jax.random.key(0), jnp.ones(3), count=0
        ),
        r"min_wrong \+ min_right must be at most count=3; got 2 \+ 2": lambda: (
            curation.resample_on_correct(jnp.zeros(4), penalty=jnp.zeros(4), count=3)
        ),
    },
    TypeError: {
        "constrained_pairs: satisfied must be bool": lambda: curation.constrained_pairs(
            jnp.zeros(4), satisfied=jnp.ones(4)
        ),
        "first_rollouts: where must be bool": lambda: curation.first_rollouts(jnp.ones(3), count=1),
    },
}


@for_each("error, words, call", [(e, *x) for e, each in BAD.items() for x in each.items()])
def test_bad_input_is_one_sentence(error, words, call):
    with pytest.raises(error, match=words):
        call()
