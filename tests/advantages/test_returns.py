"""Rewards of tokens and what is still to come: loops in float64, gaps in the mask, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, compiled, equal, grad, put, quick, value_and_grad
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.test_util import check_grads
from rows import for_each

from jaxrl_llm.advantages import kl_shaped_rewards, reward_to_go, terminal_rewards
from jaxrl_llm.advantages.returns import errors_back
from jaxrl_llm.core.scans import recur_back

SHAPE = (2, 3, 6)
numbers = hnp.arrays(np.float32, SHAPE, elements=st.integers(-16, 16).map(lambda i: i / 8))
masks = hnp.arrays(np.bool_, SHAPE)


def loop(rewards, mask, gamma):
    """Backwards over each row; what is masked is stepped over."""
    out = np.zeros(rewards.shape)
    for row, keep, result in zip(
        rewards.reshape(-1, rewards.shape[-1]).astype(np.float64),
        mask.reshape(-1, rewards.shape[-1]),
        out.reshape(-1, rewards.shape[-1]),
        strict=True,
    ):
        running = 0.0
        for t in range(len(row) - 1, -1, -1):
            if keep[t]:
                running = row[t] + gamma * running
                result[t] = running
    return out


@quick
@given(rewards=numbers, mask=masks, gamma=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_reward_to_go_equals_a_loop(rewards, mask, gamma):
    close(
        reward_to_go(rewards, mask, gamma=gamma), loop(rewards, mask, gamma), rtol=1e-5, atol=1e-5
    )


def test_gamma_may_be_traced_and_is_differentiated():
    rewards, mask = np.array([0.5, 1.0, -2.0]), np.array([True, False, True])
    check_grads(lambda r, g: reward_to_go(r, mask, gamma=g), (rewards, 0.7), order=1, modes=["rev"])


def test_the_reward_stands_on_the_last_kept_token_and_an_empty_rollout_loses_it():
    mask = np.array([[True, False, True, False], [False] * 4, [True] * 4])
    out = terminal_rewards(np.array([2.0, np.nan, 0.5]), mask)
    equal(out, [[0, 0, 2.0, 0], [0] * 4, [0, 0, 0, 0.5]])


def estimates(d):
    return {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d, "abs": np.abs(d)}


@for_each("estimator", ["k1", "k2", "k3", "abs"])
def test_kl_shaped_rewards_equal_the_formula(estimator):
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(2, 3)).astype(np.float32)
    mask = rng.random((2, 3, 5)) < 0.7
    old_logp, ref_logp = -rng.exponential(size=(2, 2, 3, 5)).astype(np.float32)
    out = kl_shaped_rewards(
        rewards, mask, old_logp=old_logp, ref_logp=ref_logp, kl_coef=0.3, estimator=estimator
    )
    kl = estimates(np.float64(old_logp) - np.float64(ref_logp))[estimator]
    expected = np.where(mask, -0.3 * kl, 0.0)
    for i, j in np.ndindex(2, 3):
        if mask[i, j].any():
            expected[i, j, np.flatnonzero(mask[i, j])[-1]] += rewards[i, j]
    close(out, expected, rtol=1e-5, atol=1e-6)


def test_the_difference_is_clamped_and_masked_junk_is_never_read():
    old_logp = np.array([[-1.0, -35.0, np.nan, -np.inf]])
    ref_logp = np.array([[-31.0, -1.0, np.inf, -np.inf]])
    mask = np.array([[True, True, False, False]])

    def total(old_logp):
        out = kl_shaped_rewards(
            np.array([1.0]), mask, old_logp=old_logp, ref_logp=ref_logp, kl_coef=0.1
        )
        return out.sum(), out

    (_, out), gradient = value_and_grad(total, has_aux=True)(old_logp)
    close(out, [[-2.0, 3.0, 0.0, 0.0]], rtol=1e-6)
    assert np.isfinite(gradient).all()


def test_a_coefficient_for_each_prompt():
    logp, ref_logp = np.zeros((2, 2, 3)), np.full((2, 2, 3), -1.0)
    coef = np.array([0.5, 2.0]).reshape(2, 1, 1)
    mask = np.ones((2, 2, 3), bool)
    out = kl_shaped_rewards(np.zeros((2, 2)), mask, old_logp=logp, ref_logp=ref_logp, kl_coef=coef)
    close(out, -np.broadcast_to(coef, mask.shape))


def test_bfloat16_comes_out_as_float32():
    mask = np.ones((2, 3), bool)
    half = np.ones((2, 3), jnp.bfloat16)
    assert reward_to_go(half, mask).dtype == jnp.float32
    assert terminal_rewards(half[:, 0], mask).dtype == jnp.float32
    out = kl_shaped_rewards(half[:, 0], mask, old_logp=half, ref_logp=half, kl_coef=0.1)
    assert out.dtype == jnp.float32


def test_empty_axes():
    assert reward_to_go(np.zeros((2, 0)), np.zeros((2, 0), bool)).shape == (2, 0)
    assert reward_to_go(np.zeros((0, 3)), np.zeros((0, 3), bool)).shape == (0, 3)
    assert terminal_rewards(np.zeros(2), np.zeros((2, 0), bool)).shape == (2, 0)


def test_factors_whose_product_overflows_meet_no_reward():
    """A product of ratios beyond float32 times no reward is no reward."""
    mask = np.ones(512, bool)
    ratio = np.exp(np.where(np.arange(512) < 256, 0.5, 0.0))
    rewards, values = put(np.zeros(512), 0, 1.0), np.zeros(512)
    out = errors_back(rewards, values, values, mask, gamma=1.0, trace=ratio, weight=ratio)
    close(out, rewards * np.exp(0.5), rtol=1e-6)
    assert not np.any(compiled(recur_back)(np.exp(np.full(512, 0.4)), np.zeros(512)))


def test_gradients_of_factors_whose_product_overflows():
    def first(log_ratio, rewards):
        return recur_back(jnp.exp(log_ratio), rewards)[0]

    slopes = grad(first, (0, 1))
    of_ratios, of_rewards = slopes(np.where(np.arange(512) < 256, 0.5, 0.0), np.eye(1, 512)[0])
    assert not np.any(of_ratios)
    close(of_rewards[:170], np.exp(0.5 * np.arange(170)), rtol=1e-4)
    assert (of_rewards[200:] > 1e38).all()
    of_ratios, of_rewards = slopes(np.full(512, 0.4), np.zeros(512))
    assert not np.any(of_ratios) and not np.isnan(of_rewards).any()


def test_gradients_of_the_recursion():
    rng = np.random.default_rng(3)
    factors = np.where(rng.random((2, 9)) < 0.3, 0.0, rng.normal(size=(2, 9))).astype(np.float32)
    terms = np.where(rng.random((2, 9)) < 0.5, 0.0, rng.normal(size=(2, 9))).astype(np.float32)
    recur = jax.jit(recur_back)
    check_grads(recur, (factors, terms), order=1, modes=("fwd", "rev"), atol=0.05, rtol=0.05)
    # The slope of a reward of 0 is the product of the factors before it.
    slope = grad(lambda r: recur_back(np.full(3, 0.5), r)[0])(np.zeros(3))
    assert slope.tolist() == [1.0, 0.5, 0.25]
