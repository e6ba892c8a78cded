"""HAPO's signal and group mean, ETTRL's reshaping: worked numbers and float64."""

import jax.numpy as jnp
import numpy as np
from cheap import close, equal, grad
from rows import for_each

from jaxrl_llm import advantages as adv
from jaxrl_llm.surrogates import hapo

WORKED = np.array([0.1, 0.2, 0.4, 0.8, 1.6])
JUNK = (np.nan, np.inf, -np.inf, 1e4)


def test_the_worked_signal():
    signal, stats = adv.entropy_signal(WORKED, np.ones(5, bool))
    close(signal, [-1, -2 / 3, -1 / 3, 0, 1], atol=1e-5)
    close(stats, [np.log(0.8), 1.200566, 0.577350, 1.732051], atol=1e-5)
    # The bounds that the surrogate makes of it.
    ratio = np.array([0.61, 0.59, 1.55, 1.57])
    h = np.array([-1.0, -1.0, 1.0, 1.0])
    rising = np.where(h > 0, 1.0, -1.0)
    slope = grad(
        lambda x: hapo(jnp.log(x), np.zeros(4), rising, np.ones(4, bool), signal=h, beta=0.0).sum()
    )(ratio)
    assert (slope != 0).tolist() == [True, False, True, False]  # 1 - 0.4, 1 + 0.56


def numpy_signal(entropy, mask, quantile):
    level = np.log(np.maximum(np.float64(entropy), 1e-8))
    kept = np.sort(level[mask])
    if not kept.size:
        return np.zeros(entropy.shape)
    z = level - kept[round(quantile * (kept.size - 1))]
    z = np.where(mask, z / np.sqrt(max((z[mask] ** 2).mean(), 1e-8)), 0.0)
    return np.where(z > 0, z / max(z.max(), 1e-8), z / max(-z.min(), 1e-8))


@for_each("quantile", [0.0, 0.5, 0.8, 1.0])
@for_each("seed", range(3))
def test_the_signal_equals_float64(quantile, seed):
    rng = np.random.default_rng(seed)
    entropy = rng.exponential(0.5, (2, 3, 4)).astype(np.float32)
    mask = rng.random(entropy.shape) < 0.7
    junk = np.where(mask, entropy, np.nan).astype(np.float32)
    ours = adv.entropy_signal(junk, mask, quantile=quantile).signal
    close(ours, numpy_signal(entropy, mask, quantile), atol=2e-5)
    close(adv.entropy_signal(3.0 * junk, mask, quantile=quantile).signal, ours, atol=1e-5)


def test_a_batch_without_tokens_has_no_signal():
    empty = adv.entropy_signal(WORKED, np.zeros(5, bool))
    assert not empty.signal.any() and float(empty.stats.high) == 0.0
    assert not adv.entropy_signal(np.ones(5), np.ones(5, bool)).signal.any()


def test_temperatures_follow_the_signal_of_the_last_step():
    signal, stats = adv.entropy_signal(WORKED, np.ones(5, bool))
    again = adv.signal_temperature(WORKED, stats, base=0.8, tau=0.1)
    close(again, 0.8 * (1 + 0.1 * signal), rtol=1e-5)
    far = adv.signal_temperature(np.array([0.0, 100.0]), stats, tau=0.1)
    close(far, [0.9, 1.1], rtol=1e-5)
    zero = adv.EntropyStats(*np.zeros(4))
    assert adv.signal_temperature(WORKED, zero).tolist() == [1.0] * 5


def test_a_mean_over_tokens():
    mask = np.arange(6) < np.array([[2], [6]])
    ours = adv.token_grpo(np.array([1.0, 0.0]), mask)
    close(ours, [1.732047, -0.577349], atol=1e-5)
    assert abs(float((mask * ours[:, None]).sum())) < 1e-5
    even = adv.token_grpo(np.array([1.0, 0.0, 0.0]), np.ones((3, 4), bool))
    close(even, adv.grpo(np.array([1.0, 0.0, 0.0]), ddof=0), atol=1e-5)


def numpy_token_grpo(rewards, lengths, where):
    out = np.zeros(rewards.shape)
    for p, (r, n, w) in enumerate(zip(np.float64(rewards), lengths, where, strict=True)):
        tokens = np.repeat(r[w], n[w])
        if not w.any() or np.ptp(r[w]) == 0 or not tokens.size:
            continue
        a = (r - tokens.mean()) / (tokens.std() + 1e-6)
        if (np.abs(a[w & (n > 0)]) >= 5).any():
            a = (r - r[w].mean()) / (r[w].std(ddof=1) + 1e-6)
        out[p] = np.where(w, a, 0.0)
    return out


def test_the_mean_over_tokens_equals_float64_and_falls_back():
    rng = np.random.default_rng(0)
    rewards = rng.choice([0.0, 1.0], (6, 4)).astype(np.float32)
    lengths = rng.integers(1, 40, (6, 4))
    rewards[0], lengths[0] = [1, 0, 0, 0], [1, 40, 40, 40]  # a deviation of 10 for the first
    where = rng.random((6, 4)) < 0.8
    where[0] = True
    mask = np.arange(40) < lengths[..., None]
    junk = np.where(where, rewards, np.nan).astype(np.float32)
    ours = adv.token_grpo(junk, mask, where=where)
    close(ours, numpy_token_grpo(rewards, lengths, where), atol=1e-4)
    close(ours[0], adv.grpo(np.asarray(rewards[0])), atol=1e-5)


def test_a_rollout_without_tokens_has_no_advantage():
    mask = np.arange(4) < np.array([[2], [3], [0]])
    for rewards in ([1.0, 1.0, 0.0], [0.1, 0.1, 0.7], [1.0, 0.0, 0.5]):
        out = adv.token_grpo(np.array(rewards), mask)
        alone = adv.token_grpo(np.array(rewards[:2]), mask[:2])
        close(out, [*alone, 0.0], rtol=1e-6)

    def total(rewards):
        return adv.token_grpo(rewards, mask).sum()

    for rewards in (np.ones(3), np.array([1.0, 1.0, 0.0])):
        equal(grad(total)(rewards), np.zeros(3))


def test_certain_answers_count_for_more():
    entropy, mask = np.array([[0.2], [0.4], [0.6]]), np.ones((3, 1), bool)
    advantages = np.array([2.0, -0.5, -0.5])
    close(
        adv.entropy_reshaping(advantages, mask, old_entropy=entropy), [3.0, -0.5, -0.25], atol=1e-6
    )
    ones = adv.entropy_reshaping(np.ones(3), mask, old_entropy=entropy)
    close(ones.mean(), 1.0, rtol=1e-6)
    scaled = adv.entropy_reshaping(advantages, mask, old_entropy=7.0 * entropy)
    close(scaled, [3.0, -0.5, -0.25], atol=1e-5)
    same = adv.entropy_reshaping(advantages, mask, old_entropy=np.full((3, 1), 0.3))
    close(same, advantages, rtol=1e-6)
    none = adv.entropy_reshaping(advantages, mask, old_entropy=0.0 * entropy)
    equal(none, advantages)


def test_a_floor_keeps_the_sign():
    entropy, mask = np.array([[0.1], [0.1], [1.0]]), np.ones((3, 1), bool)
    literal = adv.entropy_reshaping(np.ones(3), mask, old_entropy=entropy, floor=None)
    close(literal[2], -0.5, rtol=1e-5)
    assert float(adv.entropy_reshaping(np.ones(3), mask, old_entropy=entropy)[2]) == 0.0


@for_each("junk", JUNK)
def test_dropped_rollouts_and_tokens_are_not_read(junk):
    mask = np.array([[True, False], [True, True], [True, True]])
    entropy = np.array([[0.2, junk], [0.4, 0.8], [junk, junk]])
    where = np.array([True, True, False])
    ours = adv.entropy_reshaping(np.array([1.0, 1.0, junk]), mask, old_entropy=entropy, where=where)
    close(ours, [1.5, 0.5, 0.0], rtol=1e-5)
    bonus = np.array([1.0, 1.0, junk])
    raised = adv.bounded_bonus(np.array([1.0, 1.0, junk]), mask, bonus=bonus, where=where)
    assert raised.tolist() == [1.5, 1.5, 0.0]
