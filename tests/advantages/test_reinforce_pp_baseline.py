"""reinforce_pp_baseline: both normalizations against worked numbers and a float64 reference."""

import jax.numpy as jnp
import numpy as np
from cheap import close, put, value_and_grad
from rows import for_each

from jaxrl_llm.advantages import reinforce_pp_baseline

REWARDS = np.array([[1.0, 0.0], [1.0, 1.0]])
MASK = np.arange(3) < np.array([[1, 3], [2, 2]])[..., None]


def reference(rewards, mask, where=None, *, norm, eps=1e-8):
    """Float64; the statistics of the token form come from a list of one value a kept token."""
    rewards = np.asarray(rewards, np.float64)
    where = np.ones(rewards.shape, bool) if where is None else where
    centered = np.zeros(rewards.shape)
    for row, keep, out in zip(rewards, where, centered, strict=True):
        if keep.sum() == 1:
            out[keep] = row[keep]
        elif keep.any():
            out[keep] = row[keep] - row[keep].mean()
    tokens = mask & where[..., None]
    spread = np.broadcast_to(centered[..., None], mask.shape)
    if norm == "token":
        values = spread[tokens]
        normalized = (spread - values.mean()) / np.sqrt(values.var(ddof=1) + eps)
    else:
        values = centered[where]
        normalized = (spread - values.mean()) / (values.std(ddof=1) + eps)
    return np.where(tokens, normalized, 0.0)


@for_each(
    ("norm", "expected"),
    [
        ("token", [[1.767767, -1.060660], [0.353553, 0.353553]]),
        ("sequence", [[1.224745, -1.224745], [0.0, 0.0]]),
    ],
)
def test_worked_numbers(norm, expected):
    advantages = reinforce_pp_baseline(REWARDS, MASK, norm=norm)
    close(advantages, np.where(MASK, np.array(expected)[..., None], 0.0), atol=1e-6)


@for_each("norm", ["token", "sequence"])
@for_each("masked", [False, True])
def test_equals_the_float64_reference(norm, masked):
    rng = np.random.default_rng(3)
    rewards = rng.normal(size=(4, 5)).astype(np.float32)
    mask = np.arange(7) < rng.integers(0, 8, size=(4, 5))[..., None]
    where = rng.random((4, 5)) < 0.7 if masked else None
    if masked:
        where[0] = False
        where[1] = np.arange(5) == 3
    close(
        reinforce_pp_baseline(np.asarray(rewards), np.asarray(mask), where=where, norm=norm),
        reference(rewards, mask, where, norm=norm),
        rtol=1e-5,
        atol=1e-6,
    )


@for_each("norm", ["token", "sequence"])
@for_each("rewards", [[[0.1], [0.1], [0.1]], [[5.0]], [[0.1, 0.1, 0.1], [2.0, 2.0, 2.0]]])
def test_without_spread_everything_is_exactly_zero(norm, rewards):
    rewards = np.array(rewards)
    mask = np.ones((*rewards.shape, 2), bool)
    squares, gradient = value_and_grad(
        lambda r: jnp.sum(reinforce_pp_baseline(r, mask, norm=norm) ** 2)
    )(rewards)
    assert squares == 0.0
    assert np.isfinite(gradient).all()


@for_each("norm", ["token", "sequence"])
def test_one_kept_token_or_none(norm):
    none = np.zeros((2, 2, 3), bool)
    assert not reinforce_pp_baseline(REWARDS, none, norm=norm).any()
    one = reinforce_pp_baseline(REWARDS, put(none, np.s_[0, 0, 0], True), norm=norm)
    assert np.isfinite(one).all()
    if norm == "token":
        assert not one.any()
    assert not reinforce_pp_baseline(REWARDS, MASK, where=np.zeros((2, 2), bool), norm=norm).any()
