"""asymre: worked numbers, what the shift does to the gradient, and where its policy settles."""

import jax
import jax.numpy as jnp
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
    got = jax.jit(asymre, static_argnames="shift")(junk, where=WHERE, shift=shift)
    close(got, expected, atol=1e-6)
    assert got.dtype == np.float32 and not np.any(np.asarray(got)[~WHERE])
    equal(asymre(junk, where=WHERE, shift=shift), got)
    if shift == 0.0:
        equal(got, dr_grpo(junk, where=WHERE))


def test_below_the_mean_the_policy_settles_and_at_it_collapses():
    """The bandit of the paper: samples of a fixed policy, here all of them by their share."""
    behavior = np.array([0.125, 0.375, 0.25, 0.25])
    rewards = np.array([0.9, 0.5, 0.6, 0.1])
    group = np.repeat(rewards, (behavior * 8).astype(int))
    arms = np.repeat(np.arange(4), (behavior * 8).astype(int))

    @jax.jit
    def climb(advantages, steps):
        mean = jax.grad(lambda z: (advantages * jax.nn.log_softmax(z)[arms]).mean())
        logits = jax.lax.fori_loop(0, steps, lambda _, z: z + mean(z), jnp.zeros(4))
        return jax.nn.softmax(logits)

    def settle(shift, steps=4000):
        return np.asarray(climb(asymre(group, shift=shift), steps))

    # With V so low that all advantages are positive, the limit is mu (r - V), normalized.
    shift = -1.0
    baseline = behavior @ rewards + shift
    limit = behavior * (rewards - baseline)
    close(settle(shift), limit / limit.sum(), atol=1e-3)
    # What is below a higher baseline, but one below the mean, goes; the others stay.
    some = settle(-0.1)
    assert (some > 0.05).tolist() == [True, True, True, False]
    # With the mean as the baseline one response is left, and of two good ones only one.
    assert settle(0.0, 20000).max() > 0.95 > some.max()
