"""Credit of segments from values of prefixes, the prover's progress, uncertain tokens."""

import jax
import numpy as np
from cheap import close, equal

from jaxrl_llm import advantages as adv
from jaxrl_llm import curation

P = np.array([[0.5, 0.95, 0.6, 0.99, 0.3, 0.97]])


def test_worked_numbers():
    values, where = np.array([[0.5, 0.25, 0.75]]), np.ones((1, 3), bool)
    out = adv.segment_advantages(np.array([1.0]), values, where)
    assert out.tolist() == [[-0.25, 0.5, 0.25]]
    rates = np.array([0.5, 0.75, 0.05, 0.2])
    best = adv.best_of_value(rates, k=4)
    close(best, [0.9375, 0.99609, 0.18549, 0.5904], atol=1e-5)
    close(best[1::2] - best[::2], [0.05859, 0.40491], atol=1e-5)


def test_worked_numbers_of_uncertain_segments():
    """From cut points to token advantages and the tokens that train."""
    mask, old_logp = np.ones((1, 6), bool), np.log(P)
    starts = curation.spo_cutpoints(old_logp, mask, count=3, interval=1)
    assert starts.tolist() == [[0, 2, 4]]
    assert curation.spo_cutpoints(old_logp, mask, count=3, interval=2).tolist() == [[0, 4, -1]]
    ids = np.array([[0, 0, 1, 1, 2, 2]])
    values, where = np.array([[0.5, 0.25, 0.75]]), np.ones((1, 3), bool)
    raw = adv.segment_advantages(np.array([1.0]), values, where)
    raw = adv.turns_to_tokens(raw, mask, turn_ids=ids)
    assert raw.tolist() == [[-0.25, -0.25, 0.5, 0.5, 0.25, 0.25]]
    keep = curation.uncertain_tokens(raw, mask, old_logp=old_logp)
    assert np.where(keep, raw, 0).tolist() == [[-0.25, 0, 0.5, 0, 0.25, 0]] and keep.sum() == 3
    white = adv.whiten_uncertain(raw, mask, old_logp=old_logp)
    x = np.array([-0.25, 0.5, 0.25])
    expected = np.zeros(6)
    expected[[0, 2, 4]] = (x - x.mean()) / x.std(ddof=1)
    close(white, [expected], atol=1e-5)
    # Without an uncertain token, over all.
    sure = adv.whiten_uncertain(raw, mask, old_logp=np.zeros((1, 6)))
    close(sure, adv.whiten(raw, mask), atol=1e-6)


def test_they_add_up_to_the_reward_minus_the_first_value():
    rng = np.random.default_rng(0)
    rewards, values = rng.random((3, 4)).astype(np.float32), rng.random((3, 4, 5), np.float32)
    where = np.arange(5) < rng.integers(0, 6, (3, 4))[..., None]
    out = adv.segment_advantages(rewards, np.where(where, values, np.nan), where)
    expected = np.where(where[..., 0], rewards - values[..., 0], 0.0)
    close(out.sum(-1), expected, atol=1e-6)


def test_what_a_prover_sees():
    rng = np.random.default_rng(1)
    rewards = rng.integers(0, 2, (2, 3)).astype(np.float32)
    values, where = rng.random((2, 3, 4), np.float32), np.ones((2, 3, 4), bool)
    plain = adv.segment_advantages(rewards, values, where)
    equal(adv.pav(rewards, values, where, alpha=0.0), plain)
    # With one try the prover is the policy.
    close(adv.pav(rewards, values, where, k=1, alpha=2.0), 3 * plain,
                               atol=1e-5)  # fmt: skip
    # One that always succeeds sees no progress: what is left is Q.
    ones = adv.pav(np.ones((2, 3)), np.ones((2, 3, 4)), where, baseline=False)
    equal(ones, np.ones((2, 3, 4)))
    out = jax.jit(lambda r, v: adv.pav(r, v, where, k=4, alpha=0.5))(rewards, values)
    mu = 1 - (1 - np.float64(values)) ** 4
    after = np.concatenate([mu[..., 1:], rewards[..., None]], -1)
    close(out, plain + 0.5 * (after - mu), atol=1e-5)
