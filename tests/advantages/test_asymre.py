"""asymre: worked numbers, what the shift does to the gradient, and where its policy settles."""

import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.advantages import asymre, dr_grpo

RNG = np.random.default_rng(0)
REWARDS = RNG.integers(0, 9, (4, 5)).astype(np.float32) / 8
REWARDS[1] = 0.3  # equal, and no sum of powers of two
WHERE = RNG.random((4, 5)) < 0.7
WHERE[2] = np.arange(5) == 3  # alone
WHERE[3] = False


def test_worked_numbers():
    close(asymre(np.array([1.0, 0.0, 0.0, 0.0])), [0.85, -0.15, -0.15, -0.15])
    close(asymre(np.array([1.0, 0.0]), shift=0.2), [0.3, -0.7], rtol=1e-6)
    assert asymre(np.full((1, 3), 0.1), shift=-0.25).tolist() == [[0.25] * 3]
    assert asymre(np.array([7.0]), shift=-0.25).tolist() == [0.25]


@for_each("shift", [-0.1, 0.0, 0.4])
def test_equals_the_float64_reference(shift):
    expected = np.zeros(REWARDS.shape)
    for row, keep, out in zip(np.float64(REWARDS), WHERE, expected, strict=True):
        if keep.any():
            out[keep] = row[keep] - (row[keep].mean() + shift)
    junk = np.where(WHERE, REWARDS, np.nan)
    got = asymre(junk, where=WHERE, shift=shift)
    close(got, expected, atol=1e-6)
    assert got.dtype == np.float32 and not np.any(np.asarray(got)[~WHERE])
    equal(asymre(junk, where=WHERE, shift=shift), got)
    if shift == 0.0:
        equal(got, dr_grpo(junk, where=WHERE))
