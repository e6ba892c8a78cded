"""mc_grpo: medians, the deviation from them, and the rollout that does not train."""

import jax
import numpy as np
from cheap import close, equal, quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

from jaxrl_llm.advantages import mc_grpo, mc_grpo_keep, mc_grpo_pivot

SHAPE = (3, 5)
eighths = hnp.arrays(np.float32, SHAPE, elements=st.integers(-8, 8).map(lambda i: i / 8))
kept = hnp.arrays(np.bool_, SHAPE)


def lower_median(x):
    return np.sort(x)[(len(x) - 1) // 2]


def reference(rewards, where, scale="mad", eps=1e-3, rescale_nonzero=False):
    rewards = np.asarray(rewards, np.float64)
    out = np.zeros(rewards.shape)
    for row, keep, result in zip(rewards, where, out, strict=True):
        r = row[keep]
        if len(r) < 2:
            continue
        a = r - lower_median(r)
        if scale == "mad":
            a = a / (lower_median(np.abs(a)) + eps)
        elif scale == "std":
            a = a / (np.std(r, ddof=1) + eps)
        nonzero = np.abs(a) > 1e-6
        if rescale_nonzero and nonzero.any():
            a = a * len(a) / nonzero.sum()
        result[keep] = a
    return out


@for_each(
    ("rewards", "expected", "at"),
    [
        ([0.0, 0.5, 1.0], [-0.998004, 0.0, 0.998004], 1),
        ([0.0, 0.0, 1.0], [0.0, 0.0, 1000.0], 0),
        ([0.0, 1.0, 1.0], [-1000.0, 0.0, 0.0], 1),
        ([0.3, 0.3, 0.3], [0.0, 0.0, 0.0], 0),
        ([1.0, 0.0, 0.0, 1.0], [1000.0, 0.0, 0.0, 1000.0], 1),
    ],
)
def test_worked_numbers(rewards, expected, at):
    rewards = np.array(rewards)
    close(mc_grpo(rewards), expected, rtol=1e-6, atol=1e-6)
    assert np.flatnonzero(mc_grpo_pivot(rewards)).tolist() == [at]


@for_each("scale", ["mad", "std", "none"])
@for_each("rescale", [False, True])
@quick
@given(rewards=eighths, where=kept)
def test_equals_the_float64_reference(scale, rescale, rewards, where):
    options = {"scale": scale, "rescale_nonzero": rescale}
    close(
        mc_grpo(rewards, where=where, **options),
        reference(rewards, where, **options),
        rtol=2e-5,
        atol=1e-5,
    )


@quick
@given(rewards=eighths, where=kept)
def test_one_pivot_a_group_with_advantage_zero(rewards, where):
    is_pivot = np.asarray(mc_grpo_pivot(rewards, where=where))
    assert (is_pivot.sum(-1) == where.any(-1)).all()
    assert not (is_pivot & ~where).any()
    assert not np.asarray(mc_grpo(rewards, where=where))[is_pivot].any()
    for row, keep, at in zip(rewards, where, is_pivot, strict=True):
        if keep.any():
            first = np.flatnonzero(keep & (row == lower_median(row[keep])))[0]
            assert at[first]


def test_the_pivot_is_one_of_the_kept():
    where = np.array([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]], bool)
    clean = np.random.default_rng(0).normal(size=SHAPE)
    expected = mc_grpo_pivot(np.where(where, clean, 1e4), where=where)
    for junk in (np.nan, np.inf, -np.inf):
        equal(mc_grpo_pivot(np.where(where, clean, junk), where=where), expected)
    assert mc_grpo_pivot(np.zeros((4, 0))).shape == (4, 0)


def test_keep_drops_the_tokens_of_the_pivot_and_nothing_else():
    rewards = np.array([[0.0, 0.5, 1.0, 9.0], [1.0, 1.0, 1.0, 1.0]])
    where = np.array([[True, True, True, False], [True] * 4])
    mask = np.arange(3) < np.array([[3, 2, 1, 2], [0, 2, 3, 1]])[..., None]
    mask = mask & where[..., None]
    keep = mc_grpo_keep(mc_grpo(rewards, where=where), mask, rewards=rewards, where=where)
    expected = np.array(mask)
    expected[0, 1] = expected[1, 0] = False
    equal(keep, expected)


def test_with_a_key_the_pivot_is_drawn_among_equals():
    rewards = np.array(
        [[1.0, 0.0, 0.0, 0.0, 2.0], [3.0, 3.0, 3.0, 3.0, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0]]
    )
    where = np.array([[True] * 5, [False, True, True, False, True], [True] * 5])
    draw = jax.jit(jax.vmap(lambda key: mc_grpo_pivot(rewards, where=where, key=key)))
    draws = np.asarray(draw(jax.random.split(jax.random.key(0), 900)))
    assert (draws.sum(-1) == 1).all()
    share = draws.mean(0)
    expected = np.array([[0, 1, 1, 1, 0], [0, 1, 1, 0, 1], [0, 0, 3, 0, 0]]) / 3
    close(share, expected, atol=0.06)
    mask, key = np.ones((3, 5, 2), bool), jax.random.key(1)
    equal(
        mc_grpo_keep(rewards, mask, rewards=rewards, where=where, key=key)[..., 0],
        ~mc_grpo_pivot(rewards, where=where, key=key),
    )
