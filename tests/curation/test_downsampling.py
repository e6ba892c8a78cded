"""Parts of a group: extremes, filtration by reward, clean traces, constrained pairs."""

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal, quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

few = st.sampled_from([0.0, 0.5, 1.0, 2.0])
extremes = jax.jit(cur.select_extremes, static_argnames=("best", "worst"))
roc = jax.jit(cur.resample_on_correct, static_argnames=("count", "min_wrong", "min_right"))
JUNK = (jnp.nan, jnp.inf, -jnp.inf, 1e4)


def test_worked_numbers():
    rewards = jnp.array([5.0, 1.0, 3.0, 2.0, 4.0, 0.0])
    assert np.flatnonzero(extremes(rewards, best=2, worst=2)).tolist() == [0, 1, 4, 5]
    assert extremes(rewards, best=5, worst=5).all()
    assert not extremes(rewards, best=0, worst=0).any()
    assert extremes(jnp.ones(4), best=1, worst=1).tolist() == [True, True, False, False]
    unknown = extremes(jnp.array([0.0, jnp.nan, 1.0]), best=1, worst=0)
    assert unknown.tolist() == [False, True, False]

    # Extremes tell more than the middle.
    rewards, quality = jnp.arange(4.0), jnp.array([0.0, 1.0, 0.0, 1.0])
    assert float(cur.r_squared(rewards, quality)) == pytest.approx(0.2)
    kept = cur.filtration_weights(rewards)
    assert float(cur.r_squared(rewards, quality, weights=kept)) == pytest.approx(1.0)

    # Clean traces of a group of right and wrong ones.
    penalty = jnp.array([0.5, 0.0, 1.0, 0.2, 0.1, 0.0, 0.0, 0.0])
    mixed = jnp.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    keep = roc(mixed, penalty=penalty, count=4, min_wrong=1, min_right=1)
    assert np.flatnonzero(keep).tolist() == [1, 4, 5, 6]
    assert np.flatnonzero(roc(jnp.eye(8)[0], penalty=penalty, count=4)).tolist() == [0, 1, 2, 3]
    ours = cur.trace_penalty(
        jnp.array([1, 0, 0, 2, 0, 0]),
        jnp.array([4, 0, 1, 2, 1, 1]),
        answers=jnp.array([1, 1, 0, 3, 1, 5]),
        opened=jnp.array([1, 1, 0, 3, 2, 5]),
        closed=jnp.array([1, 1, 1, 3, 1, 5]),
        turns=jnp.array([3, 3, 3, 4, 3, 2]),
    )
    close(ours, [0.25, 0.5, 1.0, 1.5, 1.0, 1.0])


@quick
@given(rewards=hnp.arrays(np.float32, (2, 6), elements=few), where=hnp.arrays(np.bool_, (2, 6)))
def test_extremes_are_disjoint_bounded_and_blind_to_the_scale(rewards, where):
    keep = np.asarray(extremes(np.where(where, rewards, np.nan), best=2, worst=1, where=where))
    equal(extremes(np.exp(rewards), best=2, worst=1, where=where), keep)
    for k, r, w in zip(keep, rewards, where, strict=True):
        order = sorted(np.flatnonzero(w), key=lambda i: (-r[i], i))
        top, rest = order[:2], sorted(order[2:], key=lambda i: (r[i], i))
        assert set(np.flatnonzero(k)) == {*top, *rest[:1]}


@for_each(
    ("rule", "weights", "alone"),
    [
        ("best", [0, 0, 0, 1], 1.0),
        ("best_random", [0.1, 0.1, 0.1, 0.4], 0.4),
        ("best_worst", [1, 0, 0, 1], 1.0),
        ("power", [0, 1, 4, 9], 1.0),
    ],
)
def test_weights_of_the_rules(rule, weights, alone):
    rewards = jnp.array([[0.0, 1.0, 2.0, 3.0], [jnp.nan, 1.0, jnp.inf, 1.0]])
    where = jnp.array([[True] * 4, [False, True, False, False]])
    ours = cur.filtration_weights(rewards, rule=rule, where=where)
    close(ours, [weights, [0.0, alone, 0.0, 0.0]], rtol=1e-6)


def test_rules_and_draws():
    # Of equal rewards the first is worst and the last best.
    assert cur.filtration_weights(jnp.ones((1, 3))).tolist() == [[1.0, 0.0, 1.0]]
    assert cur.filtration_weights(jnp.ones(3), rule="power", power=0.0).tolist() == [1.0] * 3

    # Rollouts are drawn by their weights, evenly where there are none.
    for weights, share in (([[1.0, 0.0], [3.0, 0.0]], [0.25, 0, 0.75, 0]), ([0.0] * 4, [0.25] * 4)):
        drawn = cur.resample_rollouts(jax.random.key(0), jnp.array(weights), count=4000)
        counts = np.bincount(drawn, minlength=4)
        close(counts / 4000, share, atol=0.03)
        assert not counts[np.array(share) == 0].any()

    # The first rollouts.
    where = jnp.array([[True, False, True, True], [False] * 4])
    two = cur.first_rollouts(where, count=2)
    assert two.tolist() == [[True, False, True, False], [False] * 4]
    assert not cur.first_rollouts(where, count=0).any()


@quick
@given(
    x=hnp.arrays(np.float32, 8, elements=few),
    y=hnp.arrays(np.float32, 8, elements=few),
    w=hnp.arrays(np.float32, 8, elements=st.sampled_from([0.0, 1.0, 2.0])),
)
def test_r_squared_is_the_squared_correlation(x, y, w):
    ours = float(cur.r_squared(np.where(w > 0, x, np.nan), y, weights=w))
    copies, expected = np.repeat(np.arange(8), w.astype(int)), 0.0
    if copies.size and np.ptp(x[copies]) > 0 and np.ptp(y[copies]) > 0:
        expected = np.corrcoef(np.float64(x[copies]), np.float64(y[copies]))[0, 1] ** 2
    assert ours == pytest.approx(expected, abs=2e-6)


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
        equal(k, by_rule(r, p, w, count, **mins))
        assert k.sum() == (count if w.sum() >= count else 0)


def test_pairs():
    # Pairs of a satisfying and a violating rollout; without a violation the worst is rejected.
    rewards = jnp.array([[1.0, 2.0, -1.0, 0.0], [-3.0, -2.0, -1.0, -4.0], [0.0] * 4, [1.0] * 4])
    satisfied = jnp.array([[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
    pairs = cur.constrained_pairs(rewards, satisfied=satisfied)
    assert pairs.chosen.tolist() == [0, 1, -1, -1] and pairs.rejected.tolist() == [1, 3, -1, -1]
    assert pairs.where.tolist() == [True, True, False, False]
    every = cur.constrained_pairs(rewards[:1], satisfied=jnp.ones((1, 4), bool))
    assert (int(every.chosen[0]), int(every.rejected[0])) == (1, 2)
    where, satisfied = jnp.array([[1, 0, 1, 0], [1, 1, 0, 0]], bool)
    for junk in JUNK:
        pairs = cur.constrained_pairs(
            jnp.array([1.0, junk, 0.0, junk]), satisfied=satisfied, where=where
        )
        assert (int(pairs.chosen), int(pairs.rejected)) == (0, 2)

    # The best rollout is imitated or the reference.
    rewards = jnp.array([[0.73, 0.0, 0.27, 0.5], [0.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    reference = jnp.array([[False, False, False, True]] * 3)
    ours = cur.best_constrained(rewards, reference=reference)
    close(ours, [[0.73, 0, 0, 0], [0, 0, 0, 0.5], [0] * 4], rtol=1e-6)
    assert cur.best_constrained(jnp.array([0.5, 0.5, 0.1])).tolist() == [0.5, 0.0, 0.0]
    every = cur.best_constrained(jnp.array([[0.5, 0.5, 0.1], [0.0, -1.0, 0.0]]), ties="all")
    assert every.tolist() == [[0.5, 0.5, 0], [0, 0, 0]]
    # The best by another order, among those with a reward.
    order, ones = jnp.array([20.0, 30.0, 30.0, 40.0]), jnp.array([1.0, 1.0, 1.0, 0.0])
    assert cur.best_constrained(ones, order=order).tolist() == [0, 1, 0, 0]
    assert cur.best_constrained(ones, order=order, ties="all").tolist() == [0, 1, 1, 0]
    assert cur.best_constrained(ones, order=-order, ties="all").tolist() == [1, 0, 0, 0]
    where = jnp.array([False, True, True])
    for junk in JUNK:
        best = cur.best_constrained(jnp.array([junk, 0.25, 0.5]), where=where)
        assert best.tolist() == [0.0, 0.0, 0.5]
