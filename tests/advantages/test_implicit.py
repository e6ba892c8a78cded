"""Implicit rewards of turns, credit of two levels, and the loss of their model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import implicit_turn_rewards, oprl, rloo, two_level
from jaxrl_llm.preferences import trajectory_dpo

P, G, T, K = 3, 4, 7, 3
implicit = jax.jit(implicit_turn_rewards, static_argnames=("turns", "beta"))
levels = jax.jit(two_level, static_argnames=("base", "alpha"))
loss_of = jax.jit(trajectory_dpo, static_argnames=("beta",))


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    prm, old = rng.normal(-1.5, 0.6, (2, P, G, T)).astype(np.float32)
    mask = np.arange(T) < rng.integers(2, T + 1, (P, G, 1))
    turn_ids = np.minimum(np.arange(T) // 2, K - 1) * np.ones((P, G, 1), int)
    turn_ids[..., 2] = -1  # an observation
    mask &= turn_ids >= 0
    rewards = rng.integers(0, 2, (P, G)).astype(np.float32)
    where = rng.random((P, G)) < 0.8
    return prm, old, mask, turn_ids, rewards, where


def test_rewards_of_turns_add_up_to_the_log_ratio():
    prm, old, mask, turn_ids, *_ = arrays()
    junk = np.where(mask, prm, np.nan), np.where(mask, old, 1e4)
    ours = implicit(*junk, mask, turn_ids=turn_ids, turns=K, beta=0.5)
    ratio = np.where(mask, np.float64(prm) - old, 0.0)
    expected = np.stack([0.5 * (ratio * (turn_ids == k)).sum(-1) for k in range(K)], -1)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    np.testing.assert_allclose(np.sum(ours, -1), 0.5 * ratio.sum(-1), atol=1e-5)
    same = implicit(prm, prm, mask, turn_ids=turn_ids, turns=K)
    assert not np.asarray(same).any()


def leave_one_out(x):
    n = len(x)
    return x * n / (n - 1) - x.mean() * n / (n - 1) if n > 1 else np.zeros(n)


BASES = {
    "rloo": leave_one_out,
    "grpo": lambda x: (x - x.mean()) / (x.std(ddof=1) + 1e-6) if np.ptp(x) else 0 * x,
    "center": lambda x: x - x.mean(),
}


@pytest.mark.parametrize("base", BASES)
def test_two_levels_equal_a_table_of_steps(base):
    prm, old, mask, turn_ids, rewards, where = arrays(1)
    turn_where = np.stack([(mask & (turn_ids == k)).any(-1) for k in range(K)], -1)
    turns = np.asarray(implicit(prm, old, mask, turn_ids=turn_ids, turns=K))
    junk = np.where(turn_where & where[..., None], turns, np.nan)
    ours = levels(
        np.where(where, rewards, np.nan),
        turn_rewards=junk,
        turn_where=turn_where,
        where=where,
        alpha=0.7,
        base=base,
    )
    for p in range(P):
        rows = np.flatnonzero(where[p])
        steps = [(g, k) for g in rows for k in range(K) if turn_where[p, g, k]]
        outcome = dict(zip(rows, BASES[base](np.float64(rewards[p, rows])), strict=True))
        of_steps = BASES[base](np.float64([turns[p, g, k] for g, k in steps]))
        expected = np.zeros((G, K))
        for (g, k), a in zip(steps, of_steps, strict=True):
            expected[g, k] = outcome[g] + 0.7 * a
        np.testing.assert_allclose(ours[p], expected, atol=2e-4)


def test_worked_numbers_and_the_base_algorithm():
    rewards, none = jnp.array([1.0, 0.0, 0.0]), jnp.zeros((3, 2))
    ours = levels(rewards, turn_rewards=none)
    np.testing.assert_allclose(ours, np.repeat([[1.0], [-0.5], [-0.5]], 2, axis=1), rtol=1e-6)
    prm, old, mask, turn_ids, rewards, where = arrays(2)
    turn_where = np.ones((P, G, K), bool)
    without = oprl(
        rewards,
        prm_logp=prm,
        old_logp=old,
        mask=mask,
        turn_ids=turn_ids,
        turn_where=turn_where,
        alpha=0.0,
    )
    np.testing.assert_allclose(without, np.repeat(rloo(rewards)[..., None], K, -1), atol=1e-6)


@pytest.mark.parametrize("mean", [False, True])
def test_the_loss_is_the_mean_over_all_pairs_of_the_batch(mean):
    prm, old, mask, turn_ids, rewards, where = arrays(3)
    ids = turn_ids if mean else None
    options = {"where": where, "beta": 0.3, "turn_ids": ids}

    def loss(x):
        return loss_of(x, np.where(mask, old, np.nan), mask, rewards, **options)

    value, gradient = jax.value_and_grad(loss)(prm)
    q, losses, raised = np.zeros((P, G)), [], np.zeros((P, G))
    for p, g in np.ndindex(P, G):
        q[p, g] = (np.float64(prm) - old)[p, g][mask[p, g]].sum()
        if mean:
            q[p, g] /= max(len(set(turn_ids[p, g][mask[p, g]])), 1)
    for p in range(P):
        for w, l in np.ndindex(G, G):  # noqa: E741
            if where[p, w] and where[p, l] and rewards[p, w] > rewards[p, l]:
                losses.append(np.logaddexp(0, -0.3 * (q[p, w] - q[p, l])))
                raised[p, w], raised[p, l] = 1, -1
    assert losses
    np.testing.assert_allclose(value, np.mean(losses), rtol=1e-5)
    # It raises the log-probabilities of the better and lowers those of the worse.
    assert (np.sign(-np.asarray(gradient))[mask] == np.repeat(raised[..., None], T, -1)[mask]).all()
    assert not np.asarray(gradient)[~mask].any()
    equal = loss_of(prm, prm, mask, rewards, **options)
    np.testing.assert_allclose(equal, np.log(2), rtol=1e-6)
    assert float(loss_of(prm, old, mask, jnp.ones((P, G)), **options)) == 0.0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: two_level(jnp.ones(2), turn_rewards=jnp.ones((3, 2))),
            ValueError,
            r"two_level: rewards must have shape \(3,\)",
        ),
        (
            lambda: two_level(jnp.ones(2), turn_rewards=jnp.ones((2, 2)), base="mean"),
            ValueError,
            "two_level: base must be one of",
        ),
        (
            lambda: trajectory_dpo(*[jnp.ones((2, 3))] * 2, jnp.ones((2, 3), bool), jnp.ones(3)),
            ValueError,
            r"trajectory_dpo: rewards must have shape \(2,\)",
        ),
    ],
)
def test_bad_input_is_one_sentence(call, error, words):
    with pytest.raises(error, match=words):
        call()
