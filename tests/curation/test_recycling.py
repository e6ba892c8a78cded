"""Rollouts used again: tasks for a judge, a swarm's groups, a pool of successes, certain steps."""

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

binary = st.sampled_from([0.0, 1.0])
items_of = jax.jit(cur.judge_items, static_argnames="point")
steps_of = jax.jit(cur.top_entropy_steps, static_argnames=("turns", "keep"))
keys = jax.random.split(jax.random.key(0), 2000)


@quick
@given(
    rewards=hnp.arrays(np.float32, (3, 5), elements=binary),
    answered=hnp.arrays(np.bool_, (3, 5)),
    where=hnp.arrays(np.bool_, (3, 5)),
    seed=st.integers(0, 5),
)
def test_items_show_what_they_claim(rewards, answered, where, seed):
    junk = np.where(where, rewards, np.nan)
    items = items_of(jax.random.key(seed), junk, answered=answered, where=where)
    for p in range(3):
        kind, first, second, label, reflect = (int(x[p]) for x in items)
        right, wrong = where[p] & (rewards[p] > 0), where[p] & (rewards[p] <= 0)
        assert (reflect >= 0) == wrong.any() and (reflect < 0 or wrong[reflect])
        if kind == 0:
            assert first == second == label == -1
            assert not ((right & answered[p]).any() and (wrong & answered[p]).any())
            continue
        shown = [first] if kind == 1 else [first, second]
        assert all(where[p, i] and answered[p, i] for i in shown)
        if kind == 1:
            assert second == -1 and bool(right[first]) == (label == 1)
        else:
            assert right[shown[label]] and wrong[shown[1 - label]]


def test_judged_items():
    # Kinds follow the group.
    rewards = jnp.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    draw = jax.vmap(lambda k: cur.judge_items(k, rewards))(keys)
    assert (draw.kind[:, :2] == 1).all() and (draw.first[:, 0] == 0).all()
    assert draw.label[:, 0].min() == 1 and draw.label[:, 1].max() == 0
    assert (draw.reflect[:, 0] == -1).all()
    close(np.bincount(draw.first[:, 1]) / 2000, 1 / 3, atol=0.04)
    close((draw.kind[:, 2] == 1).mean(), 0.3, atol=0.04)
    pairs = draw.kind[:, 2] == 2
    close(draw.label[:, 2][pairs].mean(), 0.5, atol=0.04)
    always = cur.judge_items(keys[0], rewards, point=0.0).kind
    assert always.tolist() == [1, 1, 2]
    assert cur.judge_items(keys[0], rewards, point=1.0).kind.tolist() == [1, 1, 1]

    # Caps hold.
    flags = jnp.array([True, False, True, True])
    drawn = jax.vmap(lambda k: cur.cap_items(k, flags, count=2))(keys)
    assert (drawn.sum(-1) == 2).all() and not drawn[:, 1].any()
    close(drawn.mean(0), [2 / 3, 0, 2 / 3, 2 / 3], atol=0.04)
    assert cur.cap_items(keys[0], flags, count=9).tolist() == flags.tolist()

    # A swarm shares groups that differ.
    local = jnp.array([True, True, False, False, False])
    informative = jnp.array([False, True, True, False, True])

    def draw(k):
        return cur.swarm_groups(k, informative, local=local, count=1, foreign=2)

    shared = jax.jit(jax.vmap(draw))(keys)
    assert shared.where.all()
    close((shared.index[:, 0] == 0).mean(), 0.5, atol=0.04)
    assert (jnp.sort(shared.index[:, 1:], -1) == jnp.array([2, 4])).all()
    close((shared.index[:, 1] == 2).mean(), 0.5, atol=0.04)

    # A stored success replaces the oldest failure.
    rewards = jnp.array([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    age = jnp.array([[3.0, 9.0, 4.0]] * 4)
    stored = jnp.array([True, False, True, True])
    pooled = cur.pooled_groups(rewards, age=age, stored=stored, count=3)
    assert pooled.replace.tolist() == [1, -1, -1, -1]
    assert pooled.keep.tolist() == [True, False, False, True]
    where = jnp.array([[True, False, True]] * 4)
    junk = jnp.where(where, rewards, jnp.nan)
    aged = jnp.where(where, age, jnp.nan)
    fewer = cur.pooled_groups(junk, age=aged, stored=stored, count=2, where=where)
    assert fewer.replace.tolist() == [2, -1, -1, -1]
    assert not cur.pooled_groups(rewards, age=age, stored=stored, count=4).keep.any()
    half = cur.pooled_groups(rewards, age=age, stored=stored, count=3, max_accuracy=0.3)
    assert half.keep.tolist() == [True, False, False, False]


@for_each(
    ("informative", "foreign", "where"),
    [
        ([True, False, False], 2, [True, False, False]),
        ([True, True, False], 2, [True, True, False]),
        ([True, True, True], 0, [True]),
        ([True, True, True], 4, [True, True, True, False, False]),
    ],
)
def test_a_batch_shrinks_where_others_have_nothing(informative, foreign, where):
    shared = cur.swarm_groups(
        keys[0], jnp.array(informative), local=jnp.arange(3) == 0, count=1, foreign=foreign
    )
    assert shared.where.tolist() == where and shared.index.shape == (1 + foreign,)
    assert 0 not in shared.index[1:][shared.where[1:]].tolist()


@quick
@given(
    rewards=hnp.arrays(np.float32, (2, 6), elements=binary),
    where=hnp.arrays(np.bool_, (2, 6)),
    seed=st.integers(0, 3),
)
def test_a_part_of_a_mixed_group_is_mixed(rewards, where, seed):
    junk = np.where(where, rewards, np.nan)
    keep = np.asarray(cur.mixed_subset(jax.random.key(seed), junk, count=3, where=where))
    assert not (keep & ~where).any()
    equal(keep.sum(-1), np.minimum(where.sum(-1), 3))
    for k, r, w in zip(keep, rewards, where, strict=True):
        for value in (0.0, 1.0):
            assert (k & (r == value)).any() == (w & (r == value)).any()


def test_counts_and_steps():
    # Counts stay within their bounds.
    rates = jnp.linspace(0.0, 1.0, 41)
    counts = cur.adaptive_rollouts(rates, low=3, high=6, threshold=0.5)
    assert counts.min() == 3 and counts.max() == 6 and (jnp.diff(counts) <= 0).all()
    exact = [8 if k / 8 < 0.6 else max(1, min(8, int(9 / (k / 8) - 7))) for k in range(9)]
    assert cur.adaptive_rollouts(jnp.arange(9) / 8).tolist() == exact

    # Certain steps do not train.
    rng = np.random.default_rng(0)
    steps = rng.permutation(10).astype(np.float32)
    turn_ids = jnp.arange(20).reshape(1, 1, 20) // 2
    entropy = jnp.repeat(jnp.asarray(steps), 2).reshape(1, 1, 20)
    mask = jnp.ones((1, 1, 20), bool)
    keep = steps_of(None, mask, old_entropy=entropy, turn_ids=turn_ids, turns=10)
    expected = np.repeat(steps >= 2, 2)
    equal(keep[0, 0], expected)
    tied = steps_of(None, mask, old_entropy=0.0 * entropy, turn_ids=turn_ids, turns=10)
    assert tied.all()

    # Steps beyond the maximum count as the last one.
    turn_ids, mask = jnp.array([[[0, 1, 2, 5], [0, 0, 3, -1]]]), jnp.ones((1, 2, 4), bool)
    entropy = jnp.array([[[1.0, 3.0, 4.0, 5.0], [2.0, 2.0, 3.5, 9.0]]])
    options = {"old_entropy": entropy, "turns": 2}
    for keep in (1.0, 0.5):
        got = steps_of(None, mask, turn_ids=turn_ids, keep=keep, **options)
        merged = steps_of(None, mask, turn_ids=jnp.minimum(turn_ids, 1), keep=keep, **options)
        equal(got, merged)
        assert got[0, 0, 1:].all() and got[0, 1, 2] and not got[0, 1, 3]

    # Steps are ranked over the group and masked tokens are not read.
    turn_ids = jnp.array([[[0, 0, 1, -1], [0, 1, 1, 1]]])
    mask = jnp.array([[[True, True, True, False], [True, True, False, True]]])
    entropy = jnp.array([[[1.0, 3.0, 0.5, jnp.nan], [4.0, 0.1, jnp.inf, 0.3]]])
    keep = steps_of(None, mask, old_entropy=entropy, turn_ids=turn_ids, turns=2, keep=0.5)
    assert keep.tolist() == [[[True, True, False, False], [True, False, False, False]]]
