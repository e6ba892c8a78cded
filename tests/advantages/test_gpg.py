"""gpg: worked numbers, both factors, and the loss they are made for."""

import numpy as np
from cheap import close, quick, value_and_grad
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

from jaxrl_llm.advantages import gpg, informative_share

REWARDS = np.array([[1.0, 0.0], [1.0, 1.0]])
eighths = hnp.arrays(np.float32, (3, 4), elements=st.integers(-4, 4).map(lambda i: i / 8))
kept = hnp.arrays(np.bool_, (3, 4))


def reference(rewards, where, *, scale, mode, singleton="zero"):
    """Float64, group by group."""
    rewards = np.float64(rewards)
    groups = [row[keep] for row, keep in zip(rewards, where, strict=True) if keep.any()]
    spread = [len(g) > 1 and g.max() > g.min() for g in groups]
    if mode == "informative":
        alpha = 1 / (np.mean(spread) + 1e-5) if groups else 0.0
    else:
        alpha = where.sum() / max(np.count_nonzero(rewards[where]), 1)
    out = np.zeros(rewards.shape)
    for row, keep, result in zip(rewards, where, out, strict=True):
        group = row[keep]
        if len(group) == 1 and singleton == "raw":
            result[keep] = alpha * group
        elif len(group) > 1 and group.max() > group.min():
            divisor = group.std(ddof=1) + 1e-4 if scale == "group" else 1.0
            result[keep] = alpha * (group - group.mean()) / divisor
    return out


def test_worked_numbers():
    close(informative_share(REWARDS), 0.5)
    close(gpg(REWARDS), [[0.99998, -0.99998], [0, 0]], atol=1e-5)
    close(gpg(REWARDS, mode="nonzero_reward"), [[2 / 3, -2 / 3], [0, 0]], rtol=1e-6)


@quick
@given(
    rewards=eighths,
    where=kept,
    scale=st.sampled_from(["none", "group"]),
    mode=st.sampled_from(["informative", "nonzero_reward"]),
)
def test_equals_the_float64_reference(rewards, where, scale, mode):
    singleton = "raw" if mode == "nonzero_reward" else "zero"
    out = gpg(rewards, where=where, scale=scale, mode=mode, singleton=singleton)
    expected = reference(rewards, where, scale=scale, mode=mode, singleton=singleton)
    close(out, expected, rtol=2e-5, atol=2e-6)


@for_each("value", [0.0, 0.1, 1000.1])
@for_each("mode", ["informative", "nonzero_reward"])
def test_a_batch_without_signal_is_exactly_zero(value, mode):
    rewards = np.full((2, 3), value)
    out, gradient = value_and_grad(lambda r: gpg(r, mode=mode).sum())(rewards)
    assert out == 0.0
    assert np.isfinite(gradient).all()
    assert informative_share(rewards) == 0.0


def test_singletons_and_dropped_groups_are_not_informative():
    rewards = np.array([[1.0, 0.0], [5.0, np.nan], [np.nan, np.nan]])
    where = np.array([[True, True], [True, False], [False, False]])
    assert informative_share(rewards, where=where) == 0.5
    close(gpg(rewards, where=where), [[1, -1], [0, 0], [0, 0]], atol=1e-4)
    raw = gpg(rewards, where=where, mode="nonzero_reward", singleton="raw")
    close(raw, [[0.75, -0.75], [7.5, 0], [0, 0]], rtol=1e-6)
    assert informative_share(rewards, where=np.zeros_like(where)) == 0.0
