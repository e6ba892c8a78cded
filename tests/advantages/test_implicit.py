"""Implicit rewards of turns, credit of two two_level, and the loss of their model."""

import numpy as np
from cheap import close, value_and_grad
from rows import for_each

from jaxrl_llm.advantages import implicit_turn_rewards, oprl, prime, rloo, two_level
from jaxrl_llm.preferences import outcome_cross_entropy, trajectory_dpo

P, G, T, K = 3, 4, 7, 3


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
    ours = implicit_turn_rewards(*junk, mask, turn_ids=turn_ids, turns=K, beta=0.5)
    ratio = np.where(mask, np.float64(prm) - old, 0.0)
    expected = np.stack([0.5 * (ratio * (turn_ids == k)).sum(-1) for k in range(K)], -1)
    close(ours, expected, atol=1e-5)
    close(np.sum(ours, -1), 0.5 * ratio.sum(-1), atol=1e-5)
    same = implicit_turn_rewards(prm, prm, mask, turn_ids=turn_ids, turns=K)
    assert not np.asarray(same).any()


def leave_one_out(x):
    n = len(x)
    return x * n / (n - 1) - x.mean() * n / (n - 1) if n > 1 else np.zeros(n)


BASES = {
    "rloo": leave_one_out,
    "grpo": lambda x: (x - x.mean()) / (x.std(ddof=1) + 1e-6) if np.ptp(x) else 0 * x,
    "center": lambda x: x - x.mean(),
}


@for_each("base", BASES)
def test_two_levels_equal_a_table_of_steps(base):
    prm, old, mask, turn_ids, rewards, where = arrays(1)
    turn_where = np.stack([(mask & (turn_ids == k)).any(-1) for k in range(K)], -1)
    turns = np.asarray(implicit_turn_rewards(prm, old, mask, turn_ids=turn_ids, turns=K))
    junk = np.where(turn_where & where[..., None], turns, np.nan)
    ours = two_level(
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
        close(ours[p], expected, atol=2e-4)


def test_worked_numbers_and_the_base_algorithm():
    rewards, none = np.array([1.0, 0.0, 0.0]), np.zeros((3, 2))
    ours = two_level(rewards, turn_rewards=none)
    close(ours, np.repeat([[1.0], [-0.5], [-0.5]], 2, axis=1), rtol=1e-6)
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
    close(without, np.repeat(rloo(rewards)[..., None], K, -1), atol=1e-6)


@for_each("mean", [False, True])
def test_the_loss_is_the_mean_over_all_pairs_of_the_batch(mean):
    prm, old, mask, turn_ids, rewards, where = arrays(3)
    ids = turn_ids if mean else None
    options = {"where": where, "beta": 0.3, "turn_ids": ids}

    def loss(x):
        return trajectory_dpo(x, np.where(mask, old, np.nan), mask, rewards, **options)

    value, gradient = value_and_grad(loss)(prm)
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
    close(value, np.mean(losses), rtol=1e-5)
    # It raises the log-probabilities of the better and lowers those of the worse.
    assert (np.sign(-np.asarray(gradient))[mask] == np.repeat(raised[..., None], T, -1)[mask]).all()
    assert not np.asarray(gradient)[~mask].any()
    equal = trajectory_dpo(prm, prm, mask, rewards, **options)
    close(equal, np.log(2), rtol=1e-6)
    assert float(trajectory_dpo(prm, old, mask, np.ones((P, G)), **options)) == 0.0


def prime_by_hand(prm, ref, mask, rewards, where, *, beta, alpha, normalize):
    """The recipe for verl: leave-one-out of tokens with means of rollouts, then sums to the end."""
    taken = mask & where[..., None]
    q = np.where(taken, beta * (np.float64(prm) - ref), 0.0)
    for p, g in zip(*np.nonzero(taken.any(-1)), strict=True):
        q[p, g, np.flatnonzero(taken[p, g])[-1]] = 0.0
    if normalize:
        q /= np.abs(np.cumsum(q[..., ::-1], -1)).max() + 1e-6
    out = np.zeros((P, G, T))
    for p in range(P):
        rows = np.flatnonzero(where[p])
        n, means = len(rows), sum(q[p, g].sum() / taken[p, g].sum() for g in rows)
        for g, outcome in zip(rows, BASES["rloo"](np.float64(rewards[p, rows])), strict=True):
            if n > 1:
                to_come = np.where(taken[p, g], (n * q[p, g] - means) / (n - 1), 0.0)
                out[p, g] = outcome + alpha * np.cumsum(to_come[::-1])[::-1]
    return np.where(taken, out, 0.0)


@for_each("normalize", [True, False])
def test_process_rewards_of_tokens_join_the_outcome(normalize):
    prm, ref, mask, _, rewards, where = arrays(5)
    where[0] = np.arange(G) == 1  # alone in its group
    options = {"beta": 0.3, "alpha": 0.7, "normalize": normalize}
    expected = prime_by_hand(prm, ref, mask, rewards, where, **options)
    taken = mask & where[..., None]
    ours = prime(
        np.where(where, rewards, np.nan),
        prm_logp=np.where(taken, prm, np.nan),
        ref_logp=np.where(taken, ref, 1e4),
        mask=mask,
        where=where,
        **options,
    )
    close(ours, expected, atol=2e-5)
    assert np.any(expected[1:]) and not np.any(expected[0])


@for_each("frozen", [True, False])
def test_the_cross_entropy_is_that_of_each_outcome(frozen):
    prm, old, mask, _, rewards, where = arrays(8)
    rewards = np.where(rewards > 0, 1.0, 0.25).astype(np.float32)  # grades count in part
    mask[1, 2] = False  # a rollout without a token counts in no mean
    ref = old - 0.3 if frozen else None
    base = old if ref is None else ref
    there = where & mask.any(-1)

    def loss(x, sampled):
        return outcome_cross_entropy(x, sampled, mask, rewards, ref_logp=ref, where=where, beta=0.4)

    value, gradients = value_and_grad(loss, argnums=(0, 1))(prm, np.where(mask, old, np.nan))
    q = 0.4 * np.where(mask, np.float64(prm) - base, 0.0).sum(-1)
    right = 1 / (1 + np.exp(-q))
    each = -(rewards * np.log(right) + (1 - rewards) * np.log(1 - right))
    close(value, each[there].mean(), rtol=1e-5)
    expected = 0.4 * (right - rewards)[..., None] * (mask & there[..., None]) / there.sum()
    close(gradients[0], expected, atol=1e-6)
    assert not np.any(gradients[1])
    # Parts of a batch add up with the count of all.
    parts = [
        outcome_cross_entropy(
            prm[i : i + 1],
            old[i : i + 1],
            mask[i : i + 1],
            rewards[i : i + 1],
            ref_logp=None if ref is None else ref[i : i + 1],
            where=where[i : i + 1],
            beta=0.4,
            rollouts=there.sum(),
        )
        for i in range(P)
    ]
    close(sum(parts), value, rtol=1e-5)
    nothing = np.zeros_like(where)
    assert float(outcome_cross_entropy(prm, old, mask, rewards, where=nothing)) == 0.0
