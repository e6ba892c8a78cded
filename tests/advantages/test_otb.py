"""otb: at each position, the mean of returns weighed by the energy of the gradient so far.

    W_t = sum_{s <= t} (1 - 2 pi_s + sum pi^2),    baseline_t = sum_i W_ti G_ti / sum_i W_ti

Energies ((0.4, 0.1), (0.02, 0.3)) and rewards (1, 0) have the advantages
((0.047619, 0.390244), (-0.952381, -0.609756)). A group of one keeps its reward; positions may be
those of the kept tokens alone (compact), and the longest rollout may have no baseline (zero_tail).
"""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from jax.test_util import check_grads
from rows import for_each

from jaxrl_llm.advantages import otb, otb_token, sum_pi_squared

# exp(logp) = 0.5 gives w = sum_pi_sq.
HALF = float(np.log(0.5))


def reference(token_rewards, mask, where, old_logp, sum_pi_sq, weights, zero_tail, compact, eps):
    """One group after the other, position after position."""
    out = np.zeros(mask.shape)
    for p in range(len(mask)):
        rows = []
        for g in np.flatnonzero(where[p]):
            kept = np.flatnonzero(mask[p, g])
            if compact and not len(kept):
                continue
            w = 1 - 2 * np.exp(np.float64(old_logp[p, g])) + sum_pi_sq[p, g]
            w = np.maximum(w, 0) * np.float64(weights[p, g]) ** 2
            rewards = np.float64(token_rewards[p, g])
            # position -> (column, return, energy)
            rows.append(
                {
                    (rank if compact else t): (
                        t,
                        rewards[kept[rank:]].sum(),
                        w[kept[: rank + 1]].sum(),
                    )
                    for rank, t in enumerate(kept)
                }
                | {"row": g, "length": len(kept)}
            )
        lengths = sorted(row["length"] for row in rows)
        for row in rows:
            longest = len(rows) > 1 and row["length"] == lengths[-1] > lengths[-2]
            for position, cell in row.items():
                if isinstance(position, str):
                    continue
                column, value, _ = cell
                others = [r[position] for r in rows if position in r]
                baseline = sum(v * e for _, v, e in others) / (sum(e for *_, e in others) + eps)
                if len(rows) == 1 or (zero_tail and longest and position >= lengths[-2]):
                    baseline = 0.0
                out[p, row["row"], column] = value - baseline
    return out


def data(seed=0, gaps=True):
    rng = np.random.default_rng(seed)
    token_rewards = rng.normal(size=(4, 3, 6)).astype(np.float32)
    if gaps:
        mask = rng.random((4, 3, 6)) < 0.6
    else:
        mask = np.arange(6) < rng.integers(0, 7, size=(4, 3, 1))
    where = np.array([[1, 1, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0]], bool)
    mask[0, 1] = False
    logits = rng.normal(size=(4, 3, 6, 5)) * 2
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    old_logp = np.log(p[..., 0]).astype(np.float32)
    sum_pi_sq = (p**2).sum(-1).astype(np.float32)
    weights = rng.uniform(0.5, 2.0, size=mask.shape).astype(np.float32)
    return token_rewards, mask, where, old_logp, sum_pi_sq, weights


def test_worked_numbers():
    w = np.array([[0.4, 0.1], [0.02, 0.3]])
    mask, old_logp = np.ones((2, 2), bool), np.full((2, 2), HALF)
    expected = [[0.047619, 0.390244], [-0.952381, -0.609756]]
    # In the worked example the returns are [[1, 1], [0, 0]]: rewards on the last token.
    out = otb(np.array([1.0, 0.0]), mask, old_logp=old_logp, sum_pi_sq=w)
    close(out, expected, atol=1e-6)
    token_rewards = np.array([[0.0, 1.0], [0.0, 0.0]])
    out = otb_token(token_rewards, mask, old_logp=old_logp, sum_pi_sq=w)
    close(out, expected, atol=1e-6)


@for_each("zero_tail", [False, True])
@for_each("compact", [False, True])
@for_each("gaps", [False, True])
def test_equals_the_float64_reference(zero_tail, compact, gaps):
    for seed in range(3):
        token_rewards, mask, where, old_logp, sum_pi_sq, weights = data(seed, gaps)
        out = otb_token(
            token_rewards,
            mask,
            where=where,
            old_logp=old_logp,
            sum_pi_sq=sum_pi_sq,
            weights=weights,
            zero_tail=zero_tail,
            compact=compact,
        )
        expected = reference(
            token_rewards, mask, where, old_logp, sum_pi_sq, weights, zero_tail, compact, 1e-8
        )
        close(out, expected, rtol=2e-4, atol=1e-5)


def test_two_longest_rollouts_have_no_tail():
    mask = np.arange(3) < np.array([[3], [3], [1]])
    options = {"old_logp": np.full((3, 3), HALF), "sum_pi_sq": np.ones((3, 3))}
    rewards = np.array([1.0, 0.0, 0.0])
    equal(otb(rewards, mask, **options, zero_tail=True), otb(rewards, mask, **options))


def test_a_group_of_one_keeps_its_reward():
    mask, half = np.ones((2, 2), bool), np.full((2, 2), HALF)
    where = np.array([True, False])
    options = {"old_logp": half, "sum_pi_sq": half + 1, "where": where}
    out = otb(np.array([3.0, np.nan]), mask, **options)
    equal(out, [[3.0, 3.0], [0.0, 0.0]])
    # A rollout without tokens is a member of the group, unless positions are compact.
    empty = mask & where[:, None]
    options = {"old_logp": half, "sum_pi_sq": half + 1}
    rewards = np.array([3.0, 1.0])
    close(otb(rewards, empty, **options)[0], [0.0, 0.0], atol=1e-6)
    equal(otb(rewards, empty, **options, compact=True)[0], [3.0, 3.0])


def test_rounding_below_zero_is_no_negative_weight():
    # A sure policy: 1 - 2 + 1 can come out as -1e-7, and two of them could cancel the sum.
    mask = np.ones((2, 1), bool)
    sure = {"old_logp": np.zeros((2, 1)), "sum_pi_sq": np.array([[1.0 - 1e-6], [1.0 + 1e-6]])}
    out = otb(np.array([1.0, 0.0]), mask, **sure)
    close(out, [[1.0], [0.0]], atol=1e-6)


@for_each("offset", [0.0, 100.0, 1000.0])
def test_sum_pi_squared_does_not_round_at_the_size_of_the_logits(offset):
    logits = np.random.default_rng(9).normal(size=(3, 4, 7)).astype(np.float32) * 3
    shifted = logits + np.float32(offset)
    p = np.exp(np.float64(shifted) - offset)
    p /= p.sum(-1, keepdims=True)
    close(sum_pi_squared(shifted), (p**2).sum(-1), rtol=2e-6)


def test_sum_pi_squared():
    close(sum_pi_squared(np.zeros((2, 8))), [0.125, 0.125], rtol=1e-6)
    logits = np.random.default_rng(9).normal(size=(3, 4, 7)).astype(np.float32) * 3
    targets = np.zeros((3, 4), jnp.int32)
    equal(sum_pi_squared(logits, targets), sum_pi_squared(logits))
    masked = np.array([0.0, -np.inf, 0.0])
    close(sum_pi_squared(masked), 0.5, rtol=1e-6)
    assert sum_pi_squared(masked.astype(jnp.bfloat16)).dtype == jnp.float32
    check_grads(jax.jit(sum_pi_squared), (logits[0, 0],), 1, modes=["rev"], atol=1e-2, rtol=1e-2)
