"""reinforce_pp and the two normalizations it shares with its sibling."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, grad
from rows import for_each

from jaxrl_llm.advantages import (
    batch_normalize,
    reinforce_pp,
    whiten,
)

MASK = np.arange(3) < np.array([[1], [3]])


def reference(rewards, mask, where, old_logp, ref_logp, kl_coef, gamma, eps=1e-8):
    """Float64, backwards over each row, statistics over a list of the kept tokens."""
    tokens = mask & where[..., None]
    to_go = np.zeros(mask.shape)
    for index in np.ndindex(*rewards.shape):
        kept = np.flatnonzero(tokens[index])
        running = 0.0
        for t in kept[::-1]:
            reward = rewards[index] if t == kept[-1] else 0.0
            kl = np.float64(old_logp[index][t]) - np.float64(ref_logp[index][t])
            running = reward - kl_coef * kl + gamma * running
            to_go[index][t] = running
    values = to_go[tokens]
    return np.where(tokens, (to_go - values.mean()) / np.sqrt(values.var(ddof=1) + eps), 0.0)


def data(seed):
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(3, 4)).astype(np.float32)
    mask, where = rng.random((3, 4, 6)) < 0.7, rng.random((3, 4)) < 0.8
    old_logp, ref_logp = -rng.exponential(size=(2, 3, 4, 6)).astype(np.float32)
    return rewards, mask, where, old_logp, ref_logp


def test_worked_numbers():
    out = reinforce_pp(np.array([1.0, 0.0]), MASK)
    close(out, [[1.5, 0, 0], [-0.5, -0.5, -0.5]], atol=1e-6)


@for_each(("kl_coef", "gamma"), [(0.0, 1.0), (0.3, 1.0), (0.1, 0.9)])
def test_equals_the_float64_reference(kl_coef, gamma):
    rewards, mask, where, old_logp, ref_logp = data(0)
    out = reinforce_pp(
        rewards,
        mask,
        where=where,
        old_logp=old_logp,
        ref_logp=ref_logp,
        kl_coef=kl_coef,
        gamma=gamma,
    )
    close(out, reference(rewards, mask, where, old_logp, ref_logp, kl_coef, gamma), atol=1e-5)
    kept = np.asarray(out, np.float64)[mask & where[..., None]]
    close([kept.mean(), kept.var(ddof=1)], [0.0, 1.0], atol=1e-5)


def test_the_number_zero_leaves_the_penalty_out():
    rewards, mask, where, old_logp, ref_logp = data(2)
    equal(
        reinforce_pp(rewards, mask, where=where),
        reinforce_pp(rewards, mask, where=where, old_logp=old_logp, ref_logp=ref_logp),
    )


def test_without_spread_everything_is_exactly_zero():
    square = jax.jit(lambda r, m: reinforce_pp(r, m))
    assert not square(np.full(2, 0.1), MASK).any()
    assert not square(np.array([1.0, 2.0]), MASK & np.array([[True], [False]])).any()
    assert not square(np.array([1.0, 2.0]), np.zeros_like(MASK)).any()


def test_whiten_adds_the_mean_back():
    x, mask = np.array([[1.0, 5.0, 9.0], [2.0, 0.0, 0.0]]), np.arange(3) < np.array([[2], [1]])
    kept = np.array([1.0, 5.0, 2.0])
    shifted = np.asarray(whiten(x, mask))[np.asarray(mask)]
    close(shifted, (kept - kept.mean()) / kept.std(ddof=1), rtol=1e-6)
    scaled = np.asarray(whiten(x, mask, shift_mean=False))[np.asarray(mask)]
    close(scaled, shifted + kept.mean(), rtol=1e-6)
    constant = whiten(np.full((2, 3), 0.1), mask, shift_mean=False)
    close(constant, np.where(mask, 0.1, 0.0), rtol=1e-6)


def test_whiten_counts_a_sequence_by_its_tokens_and_batch_normalize_once():
    x = np.array([1.0, 0.0])
    equal(whiten(x, MASK), whiten(np.broadcast_to(x[:, None], MASK.shape), MASK))
    close(batch_normalize(x), [np.sqrt(0.5), -np.sqrt(0.5)], rtol=1e-6)


@for_each("count", [0, 1, 3])
def test_batch_normalize_of_equal_or_too_few_values_is_zero(count):
    where = np.arange(4) < count
    x = np.where(where, 0.1, np.nan)
    assert not batch_normalize(x, where=where).any()
    gradient = grad(lambda v: jnp.sum(batch_normalize(v, where=where) ** 2))(x)
    assert np.isfinite(gradient).all()


def test_batch_normalize_puts_eps_on_the_deviation_and_whiten_in_the_root():
    x, mask = np.array([0.0, 2.0]), np.ones((2, 1), bool)
    std = np.sqrt(2.0)
    close(batch_normalize(x, eps=0.5)[1], 1 / (std + 0.5), rtol=1e-6)
    close(whiten(x, mask, eps=0.5)[1, 0], 1 / np.sqrt(2.5), rtol=1e-6)
