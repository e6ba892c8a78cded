"""The factor of turns that were updated before, and their order."""

import jax
import numpy as np
from cheap import close, equal, grad

from jaxrl_llm import advantages
from jaxrl_llm.corrections import sequential_factor, turn_order


def test_the_factor_equals_float64_and_stays_within_its_bounds():
    rng = np.random.default_rng(0)
    factor = np.ones(40, np.float32)
    expected = np.ones(40)
    for _ in range(4):
        logp, old = rng.normal(-1, 0.2, (2, 40, 6)).astype(np.float32)
        mask = np.arange(6) < rng.integers(0, 7, (40, 1))
        logp[0], old[0] = 100.0, -100.0
        change = np.where(mask, np.float64(logp) - old, 0).sum(-1) / np.maximum(mask.sum(-1), 1)
        q = np.clip(np.exp(np.clip(change, -10, 10)), 0.8, 1.2)
        expected = np.clip(expected * q, 0.8, 1.2)
        junk = np.where(mask, logp, np.nan), np.where(mask, old, np.inf)
        factor = sequential_factor(factor, *junk, mask)
        close(factor, expected, rtol=1e-5)
    assert 0.8 <= factor.min() < factor.max() <= 1.2 + 1e-6
    # A policy that does not move leaves it at 1.
    same = sequential_factor(np.ones(40), old, old, np.ones((40, 6), bool))
    equal(same, 1.0)
    gradient = grad(lambda x: sequential_factor(factor, x, old, mask).sum())
    assert not gradient(logp).any()
    wide = sequential_factor(
        np.ones(2), np.zeros((2, 3)), -np.ones((2, 3)), np.ones((2, 3), bool), eps_high=9.0
    )
    close(wide, np.e, rtol=1e-6)


def test_the_worked_advantages():
    rewards = np.array([[1.0, 0.0], [1.0, 1.0]])
    centered = advantages.dr_grpo(rewards, singleton="raw")
    assert centered.tolist() == [[0.5, -0.5], [0.0, 0.0]]
    ours = advantages.clip(advantages.batch_normalize(centered), bound=3.0)
    close(ours, [[1.2247, -1.2247], [0, 0]], atol=5e-5)
    where = np.array([[True, False], [True, True]])  # a group of one has its reward
    alone = advantages.dr_grpo(rewards, where=where, singleton="raw")
    assert alone.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_orders():
    assert turn_order(4).tolist() == [3, 2, 1, 0]
    assert turn_order(4, order="forward").tolist() == [0, 1, 2, 3]
    drawn = {
        tuple(turn_order(3, order="random", key=jax.random.key(i)).tolist()) for i in range(40)
    }
    assert len(drawn) == 6 and all(sorted(x) == [0, 1, 2] for x in drawn)
