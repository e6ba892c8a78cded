"""remax: a reward minus that of the greedy rollout, of rollouts and of tokens.

Rewards ((1, 0), (1, 1)) with greedy ones (0.4, 1) have ((0.6, -0.4), (0, 0)). A token has what is
still to come minus the total of the greedy rollout.
"""

import jax
import numpy as np
from cheap import close

from jaxrl_llm.advantages import remax, remax_token, terminal_rewards

compiled, compiled_token = jax.jit(remax), jax.jit(remax_token)


def test_worked_numbers():
    greedy = np.array([0.4, 1.0])
    out = compiled(np.array([[1.0, 0.0], [1.0, 1.0]]), greedy_rewards=greedy)
    close(out, [[0.6, -0.4], [0.0, 0.0]], atol=1e-7)


def test_a_terminal_reward_gives_every_token_the_advantage_of_the_rollout():
    rng = np.random.default_rng(0)
    rewards, greedy = (rng.normal(size=s).astype(np.float32) for s in ((3, 4), (3,)))
    mask = np.arange(5) < rng.integers(0, 6, size=(3, 4, 1))
    out = compiled_token(terminal_rewards(rewards, mask), mask, greedy_rewards=greedy)
    expected = np.where(mask, compiled(rewards, greedy_rewards=greedy)[..., None], 0.0)
    close(out, expected, rtol=1e-6)


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
    close(out, expected, rtol=1e-5, atol=1e-6)
