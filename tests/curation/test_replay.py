"""The replay buffer: eviction, draws."""

import heapq
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
from cheap import equal
from compiled_curation import replacements, replay_add, replay_fresh, replay_init, replay_sample
from rows import for_each
from scipy import stats

KEY = jax.random.key(0)
KEYS = jax.random.split(jax.random.key(1), 3000)
ADD = jax.jit(replay_add, static_argnames=("evict", "unique"))


def add(buffer, items, ids, *, version=0, **options):
    options = {k: jnp.asarray(x) if isinstance(x, list) else x for k, x in options.items()}
    items = jax.tree.map(jnp.asarray, items)
    return ADD(buffer, items, prompt_ids=jnp.asarray(ids), version=version, **options)


def batches(seed, size=4, prompts=6, steps=9):
    """Items that hold their (step, row), with prompt, score and whether they are added."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        items = np.stack([np.full(size, step), np.arange(size)], -1).astype(np.float32)
        scores = rng.permutation(100)[:size].astype(np.float32)
        yield step, items, rng.integers(0, prompts, size), scores, rng.random(size) < 0.7


def held(buffer):
    """What a buffer holds, from old to new: (item, prompt, version)."""
    order = np.asarray(buffer.order)
    places = [p for p in np.argsort(order, kind="stable") if order[p] >= 0]
    return [
        (tuple(np.asarray(buffer.items["x"][p]).tolist()), int(buffer.prompt_ids[p]),
         int(buffer.versions[p])) for p in places
    ]  # fmt: skip


@for_each("capacity", [2, 5, 9])
@for_each("unique", [False, True])
def test_the_newest_stay(capacity, unique):
    buffer, expected = replay_init({"x": jnp.zeros(2)}, capacity=capacity), deque(maxlen=capacity)
    for step, items, ids, _, where in batches(0):
        buffer = add(buffer, {"x": items}, ids, version=step, where=where, unique=unique)
        # Of one batch the last item of a prompt alone enters, and the prompt's older ones leave.
        rows = [i for i in range(len(ids)) if where[i]]
        if unique:
            rows = [i for i in rows if ids[i] not in [ids[j] for j in rows if j > i]]
            others = [x for x in expected if x[1] not in ids[rows]]
            expected = deque(others, maxlen=capacity)
        expected.extend((tuple(items[i].tolist()), int(ids[i]), step) for i in rows)
        assert held(buffer) == list(expected)


@for_each("capacity", [1, 3, 8])
def test_the_best_stay_as_in_a_heap(capacity):
    buffer, heap = replay_init({"x": jnp.zeros(2)}, capacity=capacity), []
    for step, items, ids, scores, where in batches(1):
        scores = scores + step / 64  # no ties between batches
        junk = np.where(where, scores, np.nan).astype(np.float32)
        buffer = add(buffer, {"x": items}, ids, version=step, scores=junk, evict="lowest")
        for i in np.flatnonzero(where):
            entry = (float(scores[i]), tuple(items[i].tolist()))
            if len(heap) < capacity:
                heapq.heappush(heap, entry)
            else:
                heapq.heappushpop(heap, entry)
        filled = np.flatnonzero(np.asarray(buffer.order) >= 0)
        ours = {(float(buffer.scores[p]), tuple(buffer.items["x"][p].tolist())) for p in filled}
        assert ours == set(heap)


def test_who_stays():
    # An equal score does not replace and a full batch keeps its last.
    buffer = replay_init(jnp.zeros(()), capacity=1)
    for x in (1.0, 2.0):
        buffer = add(buffer, np.float32([x]), [0], scores=[1.0], evict="lowest")
    assert buffer.items.tolist() == [1.0]
    many = add(replay_init(jnp.zeros(()), capacity=2), jnp.arange(5.0), np.arange(5))
    assert sorted(many.items.tolist()) == [3.0, 4.0] and int(many.added) == 5

    # An older item of a prompt leaves even if the new one is not taken.
    buffer = replay_init(jnp.zeros(()), capacity=2)
    for items, ids, scores, expected in (
        ([1.0, 2.0], [0, 1], [5.0, 6.0], {1.0: 5.0, 2.0: 6.0}),
        ([3.0], [1], [1.0], {1.0: 5.0, 3.0: 1.0}),
        ([4.0, 5.0], [2, 0], [2.0, 0.5], {3.0: 1.0, 4.0: 2.0}),
    ):
        buffer = add(buffer, jnp.array(items), ids, scores=scores, evict="lowest", unique=True)
        assert dict(zip(buffer.items.tolist(), buffer.scores.tolist(), strict=True)) == expected

    # Items may be any arrays and the state survives jit.
    item = {"tokens": jnp.ones((2, 3), jnp.int32), "mask": jnp.ones((2, 3), bool)}
    buffer = replay_init(jax.eval_shape(lambda: item), capacity=3)
    out = add(buffer, jax.tree.map(lambda x: x[None], item), [4], version=7)
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in (buffer, out)]
    assert kinds[0] == kinds[1]
    sample = jax.jit(lambda k, b: replay_sample(k, b, count=2))(KEY, out)
    equal(sample.items["tokens"][0], np.ones((2, 3)))
    equal(sample.where, [True, False])


def filled(versions=0):
    return add(
        replay_init(jnp.zeros(()), capacity=4), jnp.arange(4.0), np.arange(4), version=versions
    )


@for_each(("max_lag", "expected"), [(0, 1), (2, 2), (5, 4), (None, 4)])
def test_no_draw_is_older_than_allowed(max_lag, expected):
    buffer = filled(jnp.array([6, 4, 1, 3]))
    fresh = replay_fresh(buffer, version=6, max_lag=max_lag)
    sample = replay_sample(KEY, buffer, count=4, where=fresh)
    assert int(sample.where.sum()) == expected
    ages = 6 - np.asarray(buffer.versions)[np.asarray(sample.index[sample.where])]
    assert max_lag is None or (ages <= max_lag).all()
    assert not replay_fresh(replay_init(jnp.zeros(()), capacity=2), version=0).any()


def test_draws():
    # Draws follow the weights.
    buffer, probs = filled(), np.array([0.5, 0.2, 0.0, 0.3])
    weights = jnp.asarray(probs).at[2].set(jnp.nan)
    for replace in (False, True):
        options = {"count": 2, "weights": weights, "replace": replace}
        draw = jax.vmap(lambda key, o=options: replay_sample(key, buffer, **o).index)
        ids = np.asarray(jax.jit(draw)(KEYS))
        first = np.bincount(ids[:, 0], minlength=4)
        assert first[2] == 0
        assert stats.chisquare(first[[0, 1, 3]], probs[[0, 1, 3]] * len(KEYS)).pvalue > 0.01
        assert (ids[:, 0] == ids[:, 1]).any() == replace
    few = replay_sample(KEY, buffer, count=4, weights=weights)
    assert few.index[3] == -1 and few.where.tolist() == [True, True, True, False]
    empty = replay_init(jnp.zeros(()), capacity=2)
    assert not replay_sample(KEY, empty, count=3, replace=True).where.any()

    # Groups that teach nothing are replaced while there are others.
    keep = jnp.array([False, True, False, False])
    assert replacements(keep, 2).tolist() == [0, -1, 1, -1]
    assert replacements(keep, jnp.int32(9)).tolist() == [0, -1, 1, 2]
    assert replacements(keep, 0).tolist() == [-1] * 4
