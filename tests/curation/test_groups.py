"""Dynamic sampling, overlong filtering and rejection by coverage."""

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_llm.advantages import grpo
from jaxrl_llm.core import bind, connect, stateless

compiled = jax.jit(cur.informative_groups, static_argnames="keep_singletons")
advantages_of = jax.jit(grpo)


def test_worked_groups():
    # Worked groups.
    rewards = jnp.array([[1.0, 1.0, 1.0], [0.0, 0.0, 9.0], [1.0, 0.0, 9.0], [5.0, 9.0, 9.0]])
    where = jnp.array([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0]], bool)
    kept = compiled(rewards, where=where)
    assert kept.any(-1).tolist() == [False, False, True, False]
    equal(kept, where & np.array([[0], [0], [1], [0]], bool))
    kept = compiled(rewards, where=where, keep_singletons=True)
    assert kept.any(-1).tolist() == [False, False, True, True]

    # An empty group is never kept.
    rewards, where = jnp.ones((2, 3)), jnp.zeros((2, 3), bool)
    assert not compiled(rewards, where=where, keep_singletons=True).any()
    assert compiled(jnp.zeros((0, 3))).shape == (0, 3)

    # Entries that do not apply are not compared.
    nan = jnp.nan
    accuracy = jnp.array([[1.0, nan, 1.0], [1.0, nan, 0.0], [nan, nan, nan], [nan, 1.0, nan]])
    rewards, components = jnp.arange(12.0).reshape(4, 3), {"accuracy": accuracy}
    keep = cur.informative_groups(rewards, metric=components, name="accuracy")
    assert keep.tolist() == [[False] * 3, [True] * 3, [False] * 3, [False] * 3]
    alone = cur.informative_groups(
        rewards, metric=components, name="accuracy", keep_singletons=True
    )
    assert alone[:, 0].tolist() == [False, True, False, True]

    # Another metric than the reward, also in a recipe.
    shaped, accuracy = jnp.array([[1.0, 0.5]] * 2), jnp.array([[1.0, 1.0], [1.0, 0.0]])
    kept = cur.informative_groups(shaped, metric=accuracy)
    assert kept.tolist() == [[False, False], [True, True]]
    rule = bind(cur.informative_groups, name="accuracy")
    batch = {"reward_components": {"accuracy": accuracy, "length": shaped}, "where": shaped > 0}
    where, _ = stateless(connect(rule, metric="reward_components")).update(shaped, (), **batch)
    equal(where, kept)

    # Truncated responses leave the mask.
    mask = jnp.array([[[True, True], [True, False]], [[True, True], [False, False]]])
    truncated = jnp.array([[False, True], [True, False]])
    keep = cur.truncation_mask(jnp.full((2, 2), jnp.nan), mask, truncated=truncated)
    equal(keep, np.asarray(mask) & ~np.asarray(truncated)[..., None])


@quick
@given(
    rewards=hnp.arrays(np.float32, (3, 4), elements=st.sampled_from([0.0, 0.5, 1.0])),
    where=hnp.arrays(np.bool_, (3, 4)),
    shift=st.integers(-3, 3),
    log_scale=st.integers(-2, 2),
)
def test_what_is_dropped_had_advantage_zero(rewards, where, shift, log_scale):
    kept = np.asarray(compiled(rewards, where=where))
    assert not (kept & ~where).any()
    advantages = advantages_of(rewards, where=where)
    equal(advantages, advantages_of(rewards, where=kept))
    informative = (np.asarray(advantages) != 0).any(-1)
    equal(kept.any(-1), informative)
    moved = rewards * np.float32(2.0**log_scale) + np.float32(shift)
    equal(compiled(moved, where=where), kept)


def test_dropped_rewards_are_never_read_and_a_kept_nan_is_seen():
    where = jnp.array([[True, True, False]])
    for junk in (jnp.nan, jnp.inf, -jnp.inf):
        rewards = jnp.array([[1.0, 1.0, junk]])
        assert not compiled(rewards, where=where).any()
        assert compiled(jnp.array([[1.0, 0.0, junk]]), where=where).tolist() == where.tolist()
    assert compiled(jnp.array([[1.0, jnp.nan, 1.0]])).all()


@quick
@given(keep=hnp.arrays(np.bool_, 6), target=st.sampled_from([1, 3, 6]))
def test_compacting_keeps_the_first_kept_groups_in_order(keep, target):
    tree = {"x": jnp.arange(6), "y": (jnp.arange(12.0).reshape(6, 2),)}
    out = cur.compact_groups(tree, jnp.asarray(keep), n_target=target)
    expected = np.flatnonzero(keep)[:target]
    assert int(out.count) == keep.sum()
    equal(out.where, np.arange(target) < keep.sum())
    equal(out.tree["x"][: len(expected)], expected)
    equal(out.tree["y"][0], tree["y"][0][out.tree["x"]])
    assert out.tree["x"].shape == (target,)
    assert not keep[np.asarray(out.tree["x"])[len(expected) :]].any()


def test_prs():
    # Probability of keeping by coverage.
    coverage = jnp.array([0.0, 0.3, 0.325, 0.35, 0.4, 1.0])
    right, wrong = jnp.ones(6, bool), jnp.zeros(6, bool)
    close(cur.prs_keep_prob(coverage, right), [0, 0, 0.25, 0.5, 1, 1], atol=1e-6)
    assert cur.prs_keep_prob(coverage, wrong).tolist() == [1.0] * 6
    close(
        cur.prs_keep_prob(coverage, right, threshold=0.0, width=0.5),
        np.clip(coverage / 0.5, 0, 1),
        rtol=1e-6,
    )

    # Drawing by coverage keeps the share that it says.
    rewards = jnp.array([[1.0, 1.0, 1.0, 0.0, jnp.nan]])
    where = jnp.array([[True, True, True, True, False]])
    coverage = jnp.array([[0.2, 0.35, 0.9, 0.0, 1.0]])
    draw = jax.jit(
        jax.vmap(lambda key: cur.prs_where(rewards, coverage=coverage, key=key, where=where))
    )
    share = draw(jax.random.split(jax.random.key(0), 2000)).mean(0)[0]
    close(share, [0.0, 0.5, 1.0, 1.0, 0.0], atol=0.05)
