"""Trees: where they fork, what is given up, which edges train; against plain Python."""

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

import jaxrl_llm as jr

few = st.sampled_from([0.0, 0.25, 0.5, 1.0])
forks = jax.jit(cur.top_entropy_forks, static_argnames="count")
distance = jax.jit(cur.edit_distance)
suffix, overlap = jax.jit(cur.suffix_match), jax.jit(cur.rouge_l)
capacity = jax.jit(cur.branch_capacity, static_argnames="capacity")
width = jax.jit(cur.width_prune, static_argnames=("ratio", "keep"))


@quick
@given(entropy=hnp.arrays(np.float32, (3, 5), elements=few), mask=hnp.arrays(np.bool_, (3, 5)))
def test_forks_are_at_the_greatest_entropies(entropy, mask):
    for count in (2, 7):
        places = forks(np.where(mask, entropy, np.nan), mask, count=count)
        for row, e, m in zip(places, entropy, mask, strict=True):
            order = sorted(np.flatnonzero(m), key=lambda t: (-e[t], t))[:count]
            assert row.tolist() == order + [-1] * (count - len(order))


@for_each(
    ("probs", "options", "keep"),
    [
        ([0.5, 0.3, 0.2], {"candidates": 3, "max_gap": 0.25}, [True, True, False]),
        ([0.3, 0.5, 0.2], {"candidates": 2}, [True, False]),
        ([1.0, 0.0, 0.0], {"candidates": 3, "min_prob": 0.0, "max_gap": 1.0}, [True, False, False]),
        ([0.4, 0.35, 0.25], {"candidates": 3, "min_prob": 0.2, "max_gap": 0.3}, [True] * 3),
    ],
)
def test_close_runners_up_branch(probs, options, keep):
    out = cur.branch_candidates(jnp.array(probs), **options)
    assert out.keep.tolist() == keep
    assert out.tokens.tolist() == np.argsort(-np.array(probs), kind="stable").tolist()[: len(keep)]
    ended = cur.branch_candidates(jnp.array(probs), done=jnp.array(True), **options)
    assert ended.keep.tolist() == [True] + [False] * (len(keep) - 1)


@quick
@given(
    keep=hnp.arrays(np.bool_, (5, 3)),
    roots=hnp.arrays(np.int32, 5, elements=st.integers(0, 2)),
    limit=st.integers(2, 4),
)
def test_a_root_has_a_limited_number_of_rows(keep, roots, limit):
    keep[:, 0] = True
    ours = np.asarray(capacity(keep, roots, capacity=limit))
    expected = np.zeros_like(keep)
    for root in range(3):
        rows = np.flatnonzero(roots == root)
        order = [(j, i) for j in range(3) for i in rows if keep[i, j]][:limit]
        for j, i in order:
            expected[i, j] = True
    equal(ours, expected)


def plain_distance(a, b):
    d = np.zeros((len(a) + 1, len(b) + 1), int)
    d[:, 0], d[0] = range(len(a) + 1), range(len(b) + 1)
    for i, x in enumerate(a, 1):
        for j, y in enumerate(b, 1):
            d[i, j] = min(d[i - 1, j] + 1, d[i, j - 1] + 1, d[i - 1, j - 1] + (x != y))
    return d[-1, -1]


@quick
@given(
    a=hnp.arrays(np.int32, (2, 5), elements=st.integers(0, 2)),
    b=hnp.arrays(np.int32, (2, 4), elements=st.integers(0, 2)),
)
def test_distances_equal_the_table(a, b):
    ours = distance(a, b)
    assert ours.tolist() == [plain_distance(x, y) for x, y in zip(a, b, strict=True)]
    equal(distance(b, a), ours)


def plain_suffix(a, b):
    def longest(x, y):
        windows = {tuple(y[i:j]) for i in range(len(y)) for j in range(i + 1, len(y) + 1)}
        return max((k for k in range(1, len(x) + 1) if tuple(x[-k:]) in windows), default=0)

    return max(longest(a, b), longest(b, a)) / len(a)


def plain_overlap(a, b):
    table = np.zeros((len(a) + 1, len(b) + 1), int)
    for i, x in enumerate(a, 1):
        for j, y in enumerate(b, 1):
            longer = max(table[i - 1, j], table[i, j - 1])
            table[i, j] = table[i - 1, j - 1] + 1 if x == y else longer
    return 2 * table[-1, -1] / (len(a) + len(b))


@quick
@given(
    a=hnp.arrays(np.int32, (2, 5), elements=st.integers(0, 2)),
    b=hnp.arrays(np.int32, (2, 5), elements=st.integers(0, 2)),
)
def test_similarities_equal_plain_searches(a, b):
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    close(suffix(a, b), [plain_suffix(*p) for p in pairs], rtol=1e-6)
    close(overlap(a, b), [plain_overlap(*p) for p in pairs], rtol=1e-6)
    shorter = [plain_overlap(x, y[:3]) for x, y in pairs]
    close(overlap(a, b[:, :3]), shorter, rtol=1e-6)


def test_likeness():
    # Branches with the same end or order are dropped.
    tokens = jnp.array([[1, 2, 3, 4], [9, 8, 3, 4], [9, 1, 8, 3], [9, 8, 7, 6]])
    parents, birth = jnp.array([-1, 0, 0, 0]), jnp.zeros(4, int)
    options = {"ages": (4,), "eos_id": 0, "max_distance": None}
    ends = cur.lookahead_prune(tokens, parents, birth, 4, min_suffix=0.4, **options)
    assert ends.tolist() == [False, True, False, False]
    order = cur.lookahead_prune(tokens, parents, birth, 4, min_overlap=0.4, **options)
    assert order.tolist() == [False, True, True, False]

    # Branches like their parents are dropped.
    tokens = jnp.array(
        [[5, 1, 2, 3, 4], [5, 9, 2, 3, 4], [5, 9, 8, 7, 6], [5, 1, 9, 3, 4], [5, 9, 2, 0, 4]]
    )
    parents, birth = jnp.array([-1, 0, 0, 0, 0]), jnp.array([1, 1, 1, 2, 1])
    prune = jax.jit(cur.lookahead_prune, static_argnames=("ages", "max_distance", "eos_id"))
    options = {"max_distance": 0.4, "eos_id": 0}
    at_four = prune(tokens, parents, birth, 5, ages=(4,), **options)
    assert at_four.tolist() == [False, True, False, False, False]
    both = prune(tokens, parents, birth, 5, ages=(3, 4), **options)
    assert both.tolist() == [False, True, False, True, False]
    assert not prune(tokens, parents, birth, 4, ages=(4,), **options).any()
    strict = prune(tokens, parents, birth, 5, ages=(4,), max_distance=0.25, eos_id=0)
    assert not strict.any()  # the share must be below the threshold


# Two nodes, of which the first has three leaves and the second two; the last row ended early.
NODES = jnp.array([[0, 0, 3], [0, 0, 4], [0, 0, 5], [1, 1, 6], [1, 1, 7], [2, 9, 9]])
THERE = jnp.array([[True] * 3] * 5 + [[True, False, False]])
VALUES = jnp.array([[1, 1, 3.0], [1, 1, -1], [1, 1, 2], [0, 0, 0.5], [0, 0, -2], [4, 9, 9]])


@for_each(
    ("options", "leaves", "inner"),
    [
        ({}, [0, 1, 2, 3, 4, 5], True),
        ({"ratio": 0.5}, [5, 1, 4], True),  # of six leaves the best and two of the worst
        ({"ratio": 0.5, "keep": "best"}, [0, 3, 5], True),
        ({"window": (1,)}, [5], True),
        ({"window": (0,)}, [0, 1, 2, 3, 4], False),
        ({"window": (2,), "interval": 10}, [5], True),
    ],
)
def test_each_node_trains_once_less_what_is_pruned(options, leaves, inner):
    step = jnp.array(12) if "interval" in options else None
    made = jax.jit(lambda a, m, n: cur.branch_tokens(a, m, n, step, **options))
    keep = np.asarray(made(VALUES, THERE, NODES))
    expected = np.zeros((6, 3), bool)
    expected[[0, 3], :2] = inner
    for row in leaves:
        expected[row, 0 if row == 5 else 2] = True
    assert keep.tolist() == expected.tolist()
    # Groups do not mix.
    two = (
        made(jnp.stack([VALUES, VALUES]), jnp.stack([THERE, THERE]), jnp.stack([NODES, NODES]))
        if step is None
        else None
    )
    assert two is None or np.array_equal(two, np.stack([keep, keep]))


def test_places_of_splits():
    # The share of tree rollouts falls.
    steps = jnp.array([0, 99, 100, 199, 200, 300, 5000])
    assert cur.tree_rollouts(steps, group_size=8).tolist() == [8, 8, 6, 6, 4, 2, 2]
    none = cur.tree_rollouts(steps, group_size=8, starts=(0,), shares=(0.0,))
    assert not none.any()

    # Points of splits.
    assert cur.split_points(20, rounds=4) == (0, 5, 10, 15)
    assert cur.split_points(10, rounds=3) == (0, 3, 6)
    assert cur.split_points(8, points=(9, -1, 3)) == (0, 3, 7)

    # The window slides up to its stop.
    depth = jnp.arange(20)
    for step, first in ((0, 15), (29, 15), (65, 13), (999, 9)):
        keep = cur.depth_prune(depth, window=(15, 16, 17), step=step, interval=30, stop=9)
        assert np.flatnonzero(~np.asarray(keep)).tolist() == [first, first + 1, first + 2]
    fixed = cur.depth_prune(depth, window=(2,), step=999)
    assert np.flatnonzero(~np.asarray(fixed)).tolist() == [2]

    # The worked extremes of eight edges.
    keep = width(jnp.array([3.0, 1.0, -2.0, 0.5, -1.0, 2.0, 0.0, 0.1]))
    assert np.flatnonzero(keep).tolist() == [0, 2, 4, 5]


def test_branch_grpo():
    # The window of each tree slides by its own step.
    steps, options = jnp.array([0, 12, 40]), {"window": (2,), "interval": 10}
    several = [jnp.broadcast_to(x, (3, *jnp.shape(x))) for x in (VALUES, THERE, NODES)]
    got = cur.branch_tokens(*several, steps, **options)
    alone = [cur.branch_tokens(VALUES, THERE, NODES, step, **options) for step in steps]
    assert got.tolist() == [each.tolist() for each in alone]
    assert len({str(each) for each in got.tolist()}) > 1

    # Branch grpo with a window that slides reads the step.
    recipe = jr.recipes.branch_grpo(prune="depth", interval=2)
    assert "current_version" in recipe.required_fields
    batch, _ = jax.jit(recipe.prepare)(jr.testing.make_case().batch, recipe.init())
    assert batch.mask.any()

    # Bad prunings are named.
    for options, words in (
        ({"keep": "best"}, "keep='best' has no effect without ratio"),
        ({"stop": 1}, "stop=1 has no effect without window"),
        ({"window": (1,), "interval": 3}, "interval needs current_version"),
    ):
        with pytest.raises(ValueError, match=words):
            cur.branch_tokens(VALUES, THERE, NODES, **options)
    with pytest.raises(ValueError, match="no effect"):
        jr.recipes.branch_grpo(prune="depth", keep="best")


@quick
@given(
    advantages=hnp.arrays(np.float32, (2, 8), elements=few),
    where=hnp.arrays(np.bool_, (2, 8)),
    ratio=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)
def test_the_best_and_the_worst_edges(advantages, where, ratio):
    junk = np.where(where, advantages, np.nan)
    best = np.asarray(width(junk, ratio=ratio, keep="best", where=where))
    both = np.asarray(width(junk, ratio=ratio, where=where))
    for i in range(2):
        order = sorted(np.flatnonzero(where[i]), key=lambda j: (-advantages[i, j], j))
        n = len(order)
        assert set(np.flatnonzero(best[i])) == set(order[: max(1, int(ratio * n))])
        count = max(2, int(ratio * n))
        ends = order[: count // 2] + order[max(n - (count - count // 2), 0) :]
        assert set(np.flatnonzero(both[i])) == set(ends)
