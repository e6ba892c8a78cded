"""DCPO's mix with another temperature: worked numbers, a float64 reference, its controller."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.advantages import dcpo_distribution, sampled_entropy, temperature_logp
from jaxrl_llm.core import traits_of

SHAPE = (2, 3, 4)


def sample(seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(*SHAPE, 7)).astype(np.float32)
    targets = rng.integers(0, 7, SHAPE)
    return {
        "advantages": rng.normal(size=SHAPE[:-1]).astype(np.float32),
        "mask": np.arange(SHAPE[-1]) < rng.integers(0, SHAPE[-1] + 1, SHAPE[:-1])[..., None],
        "rewards": rng.integers(0, 2, SHAPE[:-1]).astype(np.float32),
        "old_logp": np.asarray(temperature_logp(logits, targets, temperature=1.0)),
        "hot_logp": np.asarray(temperature_logp(logits, targets, temperature=1.2)),
        "cold_logp": np.asarray(temperature_logp(logits, targets, temperature=0.8)),
        "policy_entropy": jnp.float32(0.45),
        "where": rng.random(SHAPE[:-1]) < 0.8,
    }


def call(x, function=dcpo_distribution):
    x = dict(x)
    return function(x.pop("advantages"), x.pop("mask"), **x)


def reference(x, *, target=0.5, max_gap=0.1, threshold=0.05):
    entropy, where = float(np.ravel(x["policy_entropy"])[0]), x["where"]
    good = (x["rewards"] > threshold) & where
    share = good.sum() / max(where.sum(), 1)
    a0 = min(abs(target - entropy), max_gap) / share if share else 0.0
    a = a0 / (1 + a0)
    tempered = x["hot_logp"] if entropy <= target else x["cold_logp"]
    rho = np.exp(tempered.astype(np.float64) - x["old_logp"])
    mixed = (1 - a) * x["advantages"][..., None] + a * good[..., None] * rho
    return np.where(x["mask"] & where[..., None], mixed, 0.0)


def test_temperature_has_the_worked_numbers():
    logits = np.broadcast_to(np.array([2.0, 0.0, -1.0]), (3, 3))
    targets = np.arange(3)
    base = temperature_logp(logits, targets, temperature=1.0)
    hot = temperature_logp(logits, targets, temperature=1.2)
    close(np.exp(base), [0.8438, 0.1142, 0.0420], atol=5e-5)
    close(np.exp(hot), [0.7868, 0.1486, 0.0646], atol=5e-5)
    close(np.exp(hot - base), [0.9325, 1.3014, 1.5374], atol=5e-5)


@for_each(("entropy", "expected"), [(0.45, 0.1111), (0.3, 0.2), (0.5, 0.0), (0.7, 0.2)])
def test_strength_has_the_worked_numbers(entropy, expected):
    # Two of five rollouts are good; where the copy is the policy itself, rho is 1.
    rewards = np.array([1.0, 1.0, 0.0, 0.0, 0.0])
    logp, mask = np.zeros((5, 1)), np.ones((5, 1), bool)
    out = dcpo_distribution(
        np.zeros(5), mask, rewards=rewards, old_logp=logp, hot_logp=logp, cold_logp=logp,
        policy_entropy=jnp.float32(entropy),
    )  # fmt: skip
    close(out[:, 0], expected * rewards, atol=5e-5)


@for_each("entropy", [0.0, 0.45, 0.5, 0.55, 3.0])
def test_equals_the_float64_reference(entropy):
    for seed in range(3):
        x = sample(seed) | {"policy_entropy": jnp.float32(entropy)}
        close(call(x), reference(x), atol=2e-6)


def test_the_entropy_may_come_from_a_controller():
    x = sample(2)
    spread = x | {"policy_entropy": np.full((SHAPE[0], 1, 1), 0.45)}
    equal(call(spread), call(x))


def test_token_advantages_are_mixed_as_they_are():
    x = sample(3)
    tokens = np.broadcast_to(x["advantages"][..., None], SHAPE)
    equal(call(x | {"advantages": tokens}), call(x))
    assert traits_of(dcpo_distribution).token_values


def test_the_controller_hands_on_the_entropy_of_the_batch_before():
    control = sampled_entropy(start=0.25)
    rng, state = np.random.default_rng(0), control.init()
    step = jax.jit(lambda s, logp, mask: control.update(None, s, old_logp=logp, mask=mask, key=0))
    expected = 0.25
    for _ in range(3):
        logp = -rng.exponential(size=SHAPE).astype(np.float32)
        mask = rng.random(SHAPE) < 0.5
        value, state = step(state, np.where(mask, logp, np.nan), mask)
        close(value, expected, rtol=1e-6)
        expected = -logp[mask].mean()
    # Tokens of a rollout that takes no part do not count.
    mask, where = np.ones(SHAPE, bool), np.arange(3) < [[2], [1]]
    logp = np.where(where[..., None] & mask, -0.5, np.nan).astype(np.float32)
    _, other = control.update(None, state, old_logp=logp, mask=mask, where=where)
    close(other.entropy, 0.5, rtol=1e-6)
    # A batch without a token leaves it.
    _, state = step(state, np.full(SHAPE, np.nan), np.zeros(SHAPE, bool))
    close(state.entropy, expected, rtol=1e-6)
    assert sampled_entropy() == sampled_entropy() != sampled_entropy(start=1.0)
