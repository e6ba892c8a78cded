"""HBPO's advantage: worked numbers, a float64 reference, budgets that differ and groups of one."""

import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.advantages import hbpo

BUDGETS = np.array([512.0, 1024.0, 2048.0, 2560.0], np.float32)


def sample(seed, shape=(3, 6)):
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=shape).astype(np.float32)
    return rewards, rng.choice(BUDGETS, shape), rng.random(shape) < 0.7


def ideal(budget):
    return 4 * np.cos(np.pi * float(budget) / 8192)


def reference(rewards, budgets, where, *, weight=1.0, eps=1e-6, singleton="zero"):
    out = np.zeros(rewards.shape)
    for p in range(len(rewards)):
        kept = rewards[p][where[p]].astype(np.float64)
        told = budgets[p][where[p]]
        if len(kept) == 0:
            continue
        if len(kept) == 1:
            result = kept / (1 + eps) if singleton == "raw" else 0 * kept
        else:
            std = kept.std(ddof=1)
            result = (kept - kept.mean()) / (std + eps) if std > 1e-12 else 0 * kept
            result = result + weight * np.array([kept[told == b].mean() - ideal(b) for b in told])
        out[p][where[p]] = result
    return out


def test_worked_numbers():
    close([ideal(b) for b in BUDGETS], [3.923141, 3.695518, 2.828427, 2.222281], atol=1e-6)
    rewards = np.array([3.9231, 0.0, 2.8284, 2.8284])
    budgets = np.array([512.0, 512.0, 2048.0, 2048.0])
    inter = hbpo(rewards, budgets=budgets, intra_weight=0.0)
    close(inter, [0.910696, -1.427301, 0.258302, 0.258302], atol=1e-5)
    both = hbpo(rewards, budgets=budgets)
    close(both, [-1.050895, -3.388892, 0.258275, 0.258275], atol=1e-5)
    close(both - inter, [-1.961591, -1.961591, 0.0, 0.0], atol=5e-5)
    # The released code adds the second term twice.
    code = hbpo(rewards, budgets=budgets, intra_weight=2.0)
    close(code, 2 * both - inter, atol=1e-5)


@for_each("singleton", ["zero", "raw"])
@for_each("weight", [1.0, 2.0])
def test_equals_the_float64_reference(singleton, weight):
    for seed in range(4):
        rewards, budgets, where = sample(seed)
        where[0] = np.arange(6) == 2  # a group of one, and an empty one
        where[1] &= seed % 2 == 0
        out = hbpo(rewards, budgets=budgets, where=where, singleton=singleton, intra_weight=weight)
        expected = reference(rewards, budgets, where, weight=weight, singleton=singleton)
        close(out, expected, atol=2e-5)
        assert out.dtype == jnp.float32


def test_a_rollout_that_was_told_no_budget_has_an_ideal_of_zero():
    out = hbpo(np.ones(2), budgets=np.array([4096.0, 1e9]))
    equal(out, [1.0, 1.0])
