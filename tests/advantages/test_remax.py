"""remax on rollouts and on tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import value_and_grad
from jax.test_util import check_grads

from jaxrl_llm import chain, stateless
from jaxrl_llm.advantages import kl_shaped_rewards, remax, remax_token, terminal_rewards

compiled, compiled_token = jax.jit(remax), jax.jit(remax_token)


def test_worked_numbers():
    greedy = np.array([0.4, 1.0])
    out = compiled(np.array([[1.0, 0.0], [1.0, 1.0]]), greedy_rewards=greedy)
    np.testing.assert_allclose(out, [[0.6, -0.4], [0.0, 0.0]], atol=1e-7)


def test_one_rollout_a_prompt_is_enough():
    out = compiled(np.array([[1.0], [0.0]]), greedy_rewards=np.array([0.25, 0.25]))
    assert out.tolist() == [[0.75], [-0.25]]


def test_a_terminal_reward_gives_every_token_the_advantage_of_the_rollout():
    rng = np.random.default_rng(0)
    rewards, greedy = (rng.normal(size=s).astype(np.float32) for s in ((3, 4), (3,)))
    mask = np.arange(5) < rng.integers(0, 6, size=(3, 4, 1))
    out = compiled_token(terminal_rewards(rewards, mask), mask, greedy_rewards=greedy)
    expected = np.where(mask, compiled(rewards, greedy_rewards=greedy)[..., None], 0.0)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_the_baseline_of_tokens_is_the_greedy_total_everywhere():
    rng = np.random.default_rng(1)
    token_rewards = rng.normal(size=(2, 3, 5)).astype(np.float32)
    greedy, mask = np.float32([0.5, -1.0]), rng.random((2, 3, 5)) < 0.6
    where = np.array([[True, False, True], [True, True, True]])
    expected = np.zeros(mask.shape)
    for i, j in zip(*np.nonzero(where), strict=True):
        for t in np.flatnonzero(mask[i, j]):
            later = [s for s in np.flatnonzero(mask[i, j]) if s >= t]
            expected[i, j, t] = np.float64(token_rewards[i, j])[later].sum() - greedy[i]
    out = compiled_token(token_rewards, mask, greedy_rewards=greedy, where=where)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_in_a_chain_after_the_kl_penalty():
    method = chain(stateless(kl_shaped_rewards, kl_coef=0.5), stateless(remax_token))
    context = {
        "mask": np.ones((1, 1, 2), bool),
        "old_logp": np.array([[[-1.0, -2.0]]]),
        "ref_logp": np.array([[[-1.5, -1.0]]]),
        "greedy_rewards": np.array([0.5]),
    }
    out, _ = method.update(np.array([[1.0]]), method.init(), **context)
    np.testing.assert_allclose(out, [[[0.75, 1.0]]])


def test_dropped_and_masked_entries_are_never_read():
    where, greedy = np.array([[True, False], [False, False]]), np.array([0.5, 1.0])
    mask = np.array([[[True, False], [True, True]], [[True, True], [False, True]]])
    tokens = mask & where[..., None]
    for junk in (1e4, np.nan, np.inf):
        rewards = np.where(where, 2.0, junk)
        out, gradient = value_and_grad(
            lambda r: remax(r, greedy_rewards=greedy, where=where).sum()
        )(rewards)
        assert out == 1.5
        np.testing.assert_array_equal(gradient, np.where(where, 1.0, 0.0))
        token_rewards = np.where(tokens, 2.0, junk)
        out, gradient = value_and_grad(
            lambda r: remax_token(r, mask, greedy_rewards=greedy, where=where).sum()
        )(token_rewards)
        assert out == 1.5
        np.testing.assert_array_equal(gradient, np.where(tokens, 1.0, 0.0))


def test_gradient_dtype_and_jit():
    rewards, greedy = np.array([[1.0, 0.5]], jnp.bfloat16), np.array([0.25], jnp.bfloat16)
    assert compiled(rewards, greedy_rewards=greedy).dtype == jnp.float32
    np.testing.assert_array_equal(
        compiled(rewards, greedy_rewards=greedy), remax(rewards, greedy_rewards=greedy)
    )
    full = np.array([[1.0, 0.5]])
    check_grads(lambda r, g: remax(r, greedy_rewards=g), (full, full[:, 0]), 1, modes=["rev"])
