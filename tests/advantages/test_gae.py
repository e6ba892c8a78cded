"""gae and gae_returns: errors of one step, summed backwards over the kept tokens.

    delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1}

What is masked costs no discount, the value behind the last token is 0 or given, and a lambda of
1 - 1 / (alpha n) grows with the length n: 0.98 at 1,000 tokens with VAPO's alpha.
"""

import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.advantages import (
    gae,
    gae_returns,
    kl_shaped_rewards,
    length_adaptive_gae,
    terminal_rewards,
)


def data(seed=0):
    """Rewards ``[P, G]``; values, two sets of log-probabilities and a mask ``[P, G, T]``."""
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(2, 3)).astype(np.float32)
    values = rng.normal(size=(2, 3, 7)).astype(np.float32)
    old_logp, ref_logp = -rng.exponential(size=(2, 2, 3, 7)).astype(np.float32)
    mask = rng.random((2, 3, 7)) < 0.7
    mask[0, 2] = False
    return rewards, values, mask, old_logp, ref_logp


def reference(token_rewards, values, mask, gamma, lam, bootstrap=None):
    """Over the list of kept tokens of each row, as if the others were not there."""
    out = np.zeros(mask.shape)
    for index in np.ndindex(*mask.shape[:-1]):
        following = 0.0 if bootstrap is None else np.float64(bootstrap[index])
        running = 0.0
        for t in np.flatnonzero(mask[index])[::-1]:
            reward = np.float64(token_rewards[index][t])
            delta = reward + gamma * following - values[index][t]
            running = delta + gamma * lam * running
            following = np.float64(values[index][t])
            out[index][t] = running
    return out


@for_each("bootstrapped", [False, True])
@for_each(
    ("kl_coef", "gamma", "lam"), [(0.0, 1.0, 0.95), (0.2, 0.9, 0.5), (0.1, 1.0, 0.0), (0, 1, 1)]
)
def test_equals_the_float64_reference(kl_coef, gamma, lam, bootstrapped):
    rewards, values, mask, old_logp, ref_logp = data()
    penalty = {"old_logp": old_logp, "ref_logp": ref_logp, "kl_coef": kl_coef}
    token_rewards = kl_shaped_rewards(rewards, mask, **penalty)
    bootstrap = rewards[:, ::-1] if bootstrapped else None
    options = {"gamma": gamma, "lam": lam, "bootstrap_value": bootstrap}
    expected = reference(np.asarray(token_rewards), values, mask, gamma, lam, bootstrap)
    plain = gae(token_rewards, values, mask, **options)
    close(plain, expected, rtol=2e-5, atol=2e-6)
    close(
        gae_returns(token_rewards, values, mask, **options),
        np.where(mask, expected + values, 0.0),
        rtol=2e-5,
        atol=2e-6,
    )


@for_each("alpha", [0.05, 0.3, 2.0])
def test_lambda_grows_with_the_length_of_the_response(alpha):
    rewards, values, mask, *_ = data(6)
    token_rewards = np.asarray(terminal_rewards(rewards, mask))
    bootstrap = rewards[:, ::-1]
    found = length_adaptive_gae(
        token_rewards, values, mask, gamma=0.9, alpha=alpha, bootstrap_value=bootstrap
    )
    for index in np.ndindex(*mask.shape[:-1]):
        length = mask[index].sum()
        lam = max(1 - 1 / (alpha * length), 0.0) if length else 0.0
        one = index[0], slice(index[1], index[1] + 1)
        row = token_rewards[one], values[one], mask[one], 0.9, lam, bootstrap[one]
        close(found[one], reference(*row), rtol=2e-5, atol=2e-6)


def test_a_long_response_has_a_lambda_of_its_length():
    # VAPO's alpha: at 1,000 tokens a lambda of 0.98, at 20 and fewer the one-step error.
    mask = np.arange(1000) < np.array([[1000], [20], [7]])
    rewards = terminal_rewards(np.ones(3), mask)
    found = length_adaptive_gae(rewards, np.zeros(mask.shape), mask)
    close(found[0, 900], 0.98**99, rtol=1e-4)
    equal(found[1:], rewards[1:])
    # A correction that rejects half of the tokens makes no response shorter.
    half = mask & (np.arange(1000) >= 500)
    found = length_adaptive_gae(rewards, np.zeros(mask.shape), half, response_mask=mask)
    close(found[0, 900], 0.98**99, rtol=1e-4)


def test_a_large_token_reward_stays_whole():
    rewards, mask = np.array([[0.0, 50.0, 0.0, 50.0]]), np.ones((1, 4), bool)
    options = {"gamma": 1.0, "lam": 1.0}
    to_go = gae(rewards, np.zeros((1, 4)), mask, **options)
    equal(to_go, [[100.0, 100.0, 50.0, 50.0]])
    cut = gae(rewards, np.zeros((1, 4)), mask, **options, bootstrap_value=np.array([30.0]))
    equal(cut, [[130.0, 130.0, 80.0, 80.0]])
