"""Pairs of a group and win rates: worked numbers, ties, masks, bad input."""

import itertools

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close
from rows import for_each

R = jnp.array([3.0, 1.0, 2.0])


def of(pairs):
    """The pairs of one group as a list."""
    kept = [tuple(p) for p, there in zip(*map(np.asarray, pairs), strict=True) if there]
    absent = np.asarray(pairs.indices)[~np.asarray(pairs.where)]
    assert (absent == -1).all()
    return kept


def test_pairs():
    # The worked pairs.
    assert of(cur.select_pairs(R)) == [(0, 1)]
    assert of(cur.select_pairs(R[::-1], mode="first_two")) == [(0, 1)]
    assert of(cur.select_pairs(R[1:], mode="first_two")) == [(1, 0)]
    assert of(cur.select_pairs(R, mode="all_pairs")) == [(0, 1), (0, 2), (2, 1)]
    tied = jnp.array([1.0, 5, 5, 1])
    assert of(cur.select_pairs(tied)) == [
        (1, 0)
    ]  # the first of the greatest, the first of the least
    assert of(cur.select_pairs(tied, mode="first_two")) == [(1, 0)]

    # Every two of a group and random ones.
    rewards = jnp.asarray(np.random.default_rng(0).permutation(6), jnp.float32)
    pairs = of(cur.select_pairs(rewards, mode="all_pairs"))
    every = {frozenset(p) for p in itertools.combinations(range(6), 2)}
    assert {frozenset(p) for p in pairs} == every and len(pairs) == 15
    assert all(rewards[a] > rewards[b] for a, b in pairs)
    many = cur.select_pairs(jnp.broadcast_to(R, (400, 3)), mode="random", key=jax.random.key(1))
    drawn, counts = np.unique(np.asarray(many.indices[:, 0]), axis=0, return_counts=True)
    assert drawn.tolist() == [[0, 1], [0, 2], [2, 1]] and counts.min() > 100


@for_each("mode", ["max_min", "first_two", "all_pairs", "random"])
def test_equal_rewards_one_response_and_small_gaps_are_no_pair(mode):
    key = {"key": jax.random.key(0)} if mode == "random" else {}
    for rewards in (jnp.ones(4), jnp.array([2.0]), jnp.array([1.0, 1.4])):
        pairs = cur.select_pairs(rewards, mode=mode, min_gap=0.5, **key)
        assert pairs.indices.shape == (*pairs.where.shape, 2) and not of(pairs)
    assert of(cur.select_pairs(jnp.array([1.0, 1.5]), mode=mode, min_gap=0.5, **key)) == [(1, 0)]


@for_each("mode", ["max_min", "first_two", "all_pairs", "random"])
def test_what_is_masked_is_not_read_and_never_chosen(mode):
    where = jnp.array([[False, True, True, False, True], [True] + [False] * 4, [False] * 5])
    values = jnp.array([9.0, 1.0, 3.0, -9.0, 2.0])
    key = {"key": jax.random.key(0)} if mode == "random" else {}
    run = jax.jit(lambda r: cur.select_pairs(r, mode=mode, where=where, **key))
    for junk in (jnp.nan, jnp.inf, -jnp.inf):
        pairs = run(jnp.where(where, values, junk))
        first = [of(jax.tree.map(lambda x, i=i: x[i], pairs)) for i in range(3)]
        expected = {
            "max_min": [(2, 1)],
            "first_two": [(2, 1)],
            "all_pairs": [(2, 1), (4, 1), (2, 4)],
        }
        assert first[1:] == [[], []]
        assert first[0] == expected.get(mode, first[0])
        assert all(values[a] > values[b] and {a, b} <= {1, 2, 4} for a, b in first[0])
        assert first[0]


def test_win_rates():
    # Win rates have the worked numbers.
    rates = cur.win_rate_matrix(jnp.array([1.0, 0.0, -1.0]))
    close(rates + rates.T, np.ones((3, 3)), rtol=1e-6)
    close(cur.mean_win_rate(rates), [0.703952, 0.5, 0.296048], atol=1e-6)
    alone = cur.mean_win_rate(rates, include_self=False)
    close(alone, [0.805928, 0.5, 0.194072], atol=1e-6)

    # Win rates of a padded group.
    where = jnp.array([True, False, True])
    rates = jnp.where(where, cur.win_rate_matrix(jnp.array([1.0, jnp.nan, -1.0])), jnp.nan)
    two = cur.mean_win_rate(cur.win_rate_matrix(jnp.array([1.0, -1.0])))
    assert cur.mean_win_rate(rates, where=where).tolist() == [two[0], 0.0, two[1]]
    one = jnp.array([True, False, False])
    assert cur.mean_win_rate(rates, where=one, include_self=False).tolist() == [0, 0, 0]
    # A judge says nothing of a response against itself.
    judged = jnp.array([[jnp.nan, 1.0], [0.0, jnp.nan]])
    assert cur.mean_win_rate(judged).tolist() == [0.75, 0.25]


def test_ends_and_verifiers():
    # A response that did not end is not chosen.
    truncated = jnp.array([True, False, False])
    lower = cur.missing_eos_penalty(R, truncated=truncated, penalty=4.0)
    assert lower.tolist() == [-1.0, 1.0, 2.0]
    assert of(cur.select_pairs(lower)) == [(2, 0)]
    where = jnp.array([False, True, True])
    dirty = jnp.where(where, R, jnp.nan)
    assert cur.missing_eos_penalty(dirty, truncated=truncated, penalty=4.0, where=where)[0] == 0

    # Right responses stand over wrong ones. The side with fewer starts over; then there would be
    # pairs that came before.
    assert of(cur.right_over_wrong(GRADED, pairs=9)) == [(1, 0), (3, 2), (1, 4)]
    assert of(cur.right_over_wrong(GRADED, pairs=9, success=0.5)) == [(1, 0), (2, 4), (3, 0)]
    lengths = jnp.array([1, 5, 2, 4, 3])
    assert of(cur.right_over_wrong(GRADED, pairs=2, lengths=lengths)) == [(3, 0), (3, 2)]
    assert of(cur.right_over_wrong(GRADED, lengths=jnp.full(5, 7))) == [(1, 0)]


GRADED = jnp.array([0.0, 1.0, 0.5, 2.0, 0.0])


@for_each("short", [True, False])
def test_pairs_of_a_verifier_are_those_of_loops_and_masked_ones_are_not_read(short):
    rng = np.random.default_rng(3)
    rewards = rng.integers(0, 2, (40, 6)).astype(np.float32)
    where, lengths = rng.random((40, 6)) < 0.7, rng.integers(1, 9, (40, 6))
    options = {"lengths": jnp.where(where, lengths, -99)} if short else {}
    run = jax.jit(lambda x: cur.right_over_wrong(x, pairs=4, where=jnp.asarray(where), **options))
    for junk in (np.nan, np.inf):
        pairs = run(jnp.where(where, rewards, junk))
        for row in range(40):
            there = np.flatnonzero(where[row])
            right = [i for i in there if rewards[row, i] >= 1]
            wrong = [i for i in there if rewards[row, i] < 1]
            expected = []
            if right and wrong:
                if short:
                    right = [min(right, key=lambda i: lengths[row, i])]
                count = min(4, max(len(right), len(wrong)))
                for m in range(count):
                    expected.append((right[m % len(right)], wrong[m % len(wrong)]))
            assert of(jax.tree.map(lambda x, i=row: x[i], pairs)) == expected
            assert len(set(expected)) == len(expected)
