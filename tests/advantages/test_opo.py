"""opo: the mean of the rewards weighed by lengths is the baseline.

Rewards (1, 0, 1, 0) of 10, 20, 30 and 40 tokens have the mean (10 + 30) / 100 = 0.4 and so the
advantages (0.6, -0.4, 0.6, -0.4).
"""

import numpy as np
from cheap import close, quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_llm.advantages import opo

eighths = hnp.arrays(np.float32, (3, 4), elements=st.integers(-40, 40).map(lambda i: i / 8))
kept = hnp.arrays(np.bool_, (3, 4))
lengths_of = hnp.arrays(np.int32, (3, 4), elements=st.integers(0, 6))


def of_lengths(lengths, width=6):
    return np.arange(width) < np.asarray(lengths)[..., None]


def reference(rewards, lengths, where, singleton="zero"):
    out = np.zeros(rewards.shape)
    for row, length, keep, result in zip(np.float64(rewards), lengths, where, out, strict=True):
        r, n = row[keep], length[keep]
        if len(r) == 1:
            result[keep] = r if singleton == "raw" else 0.0
        elif len(r) and r.max() > r.min():
            result[keep] = r - ((n @ r) / n.sum() if n.sum() else r.mean())
    return out


def test_worked_numbers():
    mask = of_lengths([10, 20, 30, 40], 40)
    out = opo(np.array([1.0, 0.0, 1.0, 0.0]), mask)
    close(out, [0.6, -0.4, 0.6, -0.4], atol=1e-6)


@quick
@given(rewards=eighths, lengths=lengths_of, where=kept)
def test_equals_the_float64_reference(rewards, lengths, where):
    for singleton in ("zero", "raw"):
        out = opo(rewards, of_lengths(lengths), where=where, singleton=singleton)
        expected = reference(rewards, lengths, where, singleton)
        close(out, expected, rtol=1e-5, atol=2e-6)


def test_a_common_reward_costs_no_digits():
    rewards = np.array([1000.0, 1000.0, 1000.25, 1000.0])
    out = opo(rewards, of_lengths([1, 2, 3, 4]))
    close(out, [-0.075, -0.075, 0.175, -0.075], atol=1e-6)


def test_without_tokens_the_mean_serves():
    out = opo(np.array([1.0, 0.0]), np.zeros((2, 6), bool))
    close(out, [0.5, -0.5])
