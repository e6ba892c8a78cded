"""Budgets: DARS, the utility of V0, greedy allocation, XRPO's priority."""

import itertools
import math

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, quick
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

from jaxrl_llm.advantages import dr_grpo, grpo

EIGHTHS = jnp.arange(9) / 8.0
allocate = jax.jit(cur.greedy_allocate)


@for_each(
    ("schedule", "max_rollouts", "scaled", "expected"),
    [
        ("equal", 32, False, [24, 11, 3, 1, 0, 0, 0, 0, 0]),
        ("hardness", 64, False, [56, 24, 8, 3, 0, 0, 0, 0, 0]),
        ("equal", 32, True, [9, 5, 2, 1, 0, 0, 0, 0, 0]),
        ("hardness", 64, True, [23, 14, 6, 3, 0, 0, 0, 0, 0]),
    ],
)
def test_dars_worked_numbers(schedule, max_rollouts, scaled, expected):
    options = {"schedule": schedule, "scaled": scaled, "rollouts": 8, "max_rollouts": max_rollouts}
    extra = cur.dars_extra_rollouts(EIGHTHS, **options)
    assert extra.dtype == jnp.int32 and extra.tolist() == expected


def reference(right, n, n_max, schedule, scaled):
    """The released schedule in float64, with the ceiling of exact arithmetic."""
    u = right / n or 0.5 / n
    if u >= 0.5:
        return 0
    signal = 2 * math.sqrt(u * (1 - u)) if scaled else 2 * u * (1 - u)
    peak = n if scaled else 0.5 * n
    target = peak if schedule == "equal" else 2 * (1 - u) * peak
    return min(math.ceil((target - n * signal) / signal - 1e-9), n_max - n)


@for_each("n", [7, 64])
@for_each("schedule", ["equal", "hardness"])
@for_each("scaled", [False, True])
def test_dars_equals_the_float64_reference_at_every_accuracy(n, schedule, scaled):
    options = {"max_rollouts": 8 * n, "schedule": schedule, "scaled": scaled}
    extra = cur.dars_extra_rollouts(jnp.arange(n + 1) / jnp.float32(n), rollouts=n, **options)
    expected = [reference(c, n, 8 * n, schedule, scaled) for c in range(n + 1)]
    assert extra.tolist() == expected


def test_stages_of_dars():
    # Cumulative advantage is the sum of absolute advantages.
    rewards = (jnp.arange(8) < jnp.arange(9)[:, None]).astype(jnp.float32)
    for scaled, advantages in ((False, dr_grpo(rewards)), (True, grpo(rewards, ddof=0, eps=1e-9))):
        total = jnp.abs(advantages).sum(-1)
        close(cur.cumulative_advantage(EIGHTHS, rollouts=8, scaled=scaled), total, rtol=1e-5)

    # Second stage keeps groups that are mixed and not too easy.
    rewards = jnp.array([[0, 0, 9, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [9, 9, 9, 9.0]])
    where = jnp.array([[1, 1, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    rewards = jnp.where(where, rewards, jnp.nan)
    keep = cur.dars_keep(rewards, where=where)
    equal(keep, where & np.array([[0], [1], [1], [0], [0]], bool))
    easy = cur.dars_keep(rewards, where=where, upper=0.75)
    equal(easy, where & np.array([[0], [1], [0], [0], [0]], bool))
    # As dynamic sampling where rewards are 0 and 1.
    equal(keep, cur.informative_groups(rewards, where=where))

    # Extra rollouts by the first accuracy, and statistics over all of them.
    first = jnp.array([[1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0.0]])
    extra = cur.dars_extra_rollouts(first.mean(-1), rollouts=8, max_rollouts=32)
    assert extra.tolist() == [11, 0]
    joined = jnp.concatenate([first, jnp.full((2, 11), jnp.nan).at[0].set(0.0)], -1)
    where = jnp.arange(19) < 8 + extra[:, None]
    assert cur.dars_keep(joined, where=where).sum(-1).tolist() == [19, 8]


def test_signal():
    cases = [(1, 0.5, 0), (2, 0.5, 0.5), (4, 0.5, 1.75), (8, 0.5, 3.96875), (4, 0.05, 0.541975),
             (4, 0.95, 0.199975), (8, 0.1, 3.7563), (8, 0.9, 0.8)]  # fmt: skip
    for b, p, worked in cases:
        close(cur.grpo_signal_utility(b, jnp.float32(p)), worked, atol=5e-5)
        # The expected number of wrong in a mixed group.
        expected = sum(math.comb(b, c) * p**c * (1 - p) ** (b - c) * (b - c) for c in range(1, b))
        close(cur.grpo_signal_utility(b, jnp.float32(p)), expected, rtol=1e-5)
    for success in (0.0, 1.0):
        assert not cur.grpo_signal_utility(jnp.arange(9), jnp.float32(success)).any()

    # Marginal signal falls for easy prompts and rises for hard ones.
    gains = jnp.diff(cur.grpo_signal_utility(jnp.arange(9), jnp.array([[0.9], [0.05]])))
    falling, rising = gains[:, jnp.array([1, 2, 3, 7])]
    close(falling, [0.18, 0.117, 0.1026, 0.1], atol=1e-4)
    close(rising, [0.095, 0.1829, 0.2641, 0.5310], atol=1e-4)


@for_each(
    ("success", "total", "greedy", "best", "value"),
    [
        ([0.25, 0.5, 0.75], 12, [6, 4, 2], [8, 2, 2], 6.074097),
        ([0.05, 0.1, 0.5, 0.9], 32, [2, 2, 26, 2], [2, 26, 2, 2], 22.4951),
    ],
)
def test_worked_allocations(success, total, greedy, best, value):
    utility = cur.grpo_signal_utility(jnp.arange(33), jnp.array(success)[:, None])
    for start in (2, np.int64(2)):
        assert cur.greedy_allocate(jnp.diff(utility), total=total, start=start).tolist() == greedy
    counts = cur.best_allocate(utility, total=total, low=2)
    assert counts.dtype == np.int32 and counts.tolist() == best
    close(sum(utility[i, c] for i, c in enumerate(counts)), value, rtol=1e-4)
    assert sum(utility[i, c] for i, c in enumerate(greedy)) < value - 0.5


def by_hand(gains, total, start):
    counts = list(start)
    while sum(counts) < total:
        both = enumerate(zip(gains, counts, strict=True))
        left = [(g[c], -i) for i, (g, c) in both if c < len(g)]
        if not left:
            break
        counts[-max(left)[1]] += 1
    return counts


@quick
@given(
    gains=hnp.arrays(np.float32, (3, 4), elements=st.integers(-2, 5).map(float)),
    start=hnp.arrays(np.int32, 3, elements=st.integers(0, 4)),
    total=st.integers(0, 14),
)
def test_greedy_equals_the_loop_and_is_best_where_gains_fall(gains, start, total):
    counts = allocate(gains, total=total, start=start)
    assert counts.tolist() == by_hand(gains.tolist(), total, start)
    falling = np.abs(-np.sort(-gains, axis=-1))
    counts = allocate(-np.sort(-falling, axis=-1), total=6, start=np.zeros(3, np.int32))
    value = sum(-np.sort(-falling, axis=-1)[i, :c].sum() for i, c in enumerate(counts.tolist()))
    close(value, np.sort(falling.reshape(-1))[-6:].sum())


def test_allocations():
    # Greedy gives a nan nothing and stops when all are full.
    gains = jnp.array([[jnp.nan, 1.0], [0.5, 0.5]])
    assert cur.greedy_allocate(gains, total=4).tolist() == [0, 2]
    assert cur.greedy_allocate(jnp.ones((2, 3)), total=100).tolist() == [3, 3]
    assert cur.greedy_allocate(jnp.ones((0, 3)), total=0).shape == (0,)

    # Best never gives what may not be.
    utility = jnp.array([[0.0, jnp.nan, 5.0, -jnp.inf], [0.0, 1.0, 1.5, 9.0]])
    assert cur.best_allocate(utility, total=4).tolist() == [0, 3]
    assert cur.best_allocate(utility, total=2).tolist() == [2, 0]

    # Square root worked numbers.
    share, variance = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.01, 0.16, 0.25])
    wanted = cur.sqrt_allocation(share, variance, mean_rollouts=4.0)
    close(wanted, [1.481481, 5.925926, 7.407407], rtol=1e-5)
    close((share * wanted).sum(), 4.0, rtol=1e-6)
    close((share * variance / wanted).sum(), 0.018225, rtol=1e-5)
    close(cur.sqrt_allocation(share, 9.0 * variance, mean_rollouts=4.0), wanted, rtol=1e-6)
    for even in (jnp.full(3, 0.3), jnp.zeros(3)):
        close(cur.sqrt_allocation(share, even, mean_rollouts=4.0), 4.0, rtol=1e-6)

    # Rounding gives the largest remainders one more.
    wanted = jnp.array([1.4815, 5.9259, 7.4074])
    assert cur.round_to_budget(wanted, total=15, low=2, high=8).tolist() == [2, 6, 7]
    wanted = jnp.array([2.2, 2.7, 2.5, 2.6])
    cases = {8: [2, 2, 2, 2], 9: [2, 3, 2, 2], 10: [2, 3, 2, 3], 7: [1, 2, 2, 2]}
    for total, expected in cases.items():
        assert cur.round_to_budget(wanted, total=total, low=1, high=8).tolist() == expected


@quick
@given(
    utility=hnp.arrays(np.float32, (3, 5), elements=st.integers(-3, 9).map(float)),
    total=st.integers(3, 14),
    low=st.integers(0, 1),
)
def test_best_is_the_best_of_all_allocations(utility, total, low):
    counts = cur.best_allocate(utility, total=total, low=low)
    every = [x for x in itertools.product(range(low, 5), repeat=3) if sum(x) <= total]
    values = [sum(utility[i, c] for i, c in enumerate(each)) for each in (counts, *every)]
    assert values[0] == max(values[1:])
    assert low <= counts.min() and counts.max() <= 4 and counts.sum() <= total


@quick
@given(
    wanted=hnp.arrays(np.float32, 4, elements=st.floats(0, 12, width=32)),
    counts=hnp.arrays(np.int32, 4, elements=st.integers(0, 3)),
    total=st.integers(12, 80),
)
def test_rounding_keeps_the_budget_and_the_bounds(wanted, counts, total):
    numbers = cur.round_to_budget(wanted, total=total, low=1, high=9, counts=counts)
    spent = int((counts * numbers).sum())
    assert numbers.min() >= 1 and numbers.max() <= 9 and spent <= total
    # Nothing more would fit.
    more = (numbers < 9) & (counts > 0)
    assert not (more & (spent + counts <= total)).any()


def test_xrpo():
    # A round of xrpo is its parts.
    rng = np.random.default_rng(0)
    where = np.arange(8) < rng.integers(1, 7, 6)[:, None]
    rewards = jnp.where(where, rng.integers(0, 2, (6, 8)).astype(np.float32), jnp.nan)
    extra = cur.xrpo_extra_rollouts(rewards, budget=20, max_rollouts=16, where=jnp.asarray(where))
    counts, groups = where.sum(-1), zip(rewards, where, strict=True)
    std = np.float32([np.std(r[w], ddof=1) if w.sum() > 1 else 0 for r, w in groups])
    table = cur.rollout_priority(jnp.asarray(std)[:, None], jnp.arange(16), counts.sum())
    expected = by_hand(table.tolist(), counts.sum() + 20, counts)
    assert (counts + np.asarray(extra)).tolist() == expected
    assert int(extra.sum()) == 20 and (extra >= 0).all()

    # Xrpo prefers a coin flip and ends when all are full.
    rewards = jnp.array([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1.0]])
    first = cur.xrpo_extra_rollouts(rewards, budget=1, max_rollouts=16, bonus=0.0)
    assert first.tolist() == [1, 0, 0, 0]
    # Rollouts without a reward count for the limit.
    rest = cur.xrpo_extra_rollouts(
        rewards, budget=99, max_rollouts=6, counts=jnp.array([5, 6, 4, 6])
    )
    assert rest.tolist() == [1, 0, 2, 0]
    assert cur.xrpo_extra_rollouts(rewards, budget=99, max_rollouts=6).tolist() == [2, 2, 2, 2]


def test_priorities():
    # The tables of t: 3.182446 with 3 degrees of freedom, 2.776445 with 4.
    std, count = jnp.array([0.57735, 0.5, 0.0, 0.7]), jnp.array([4, 4, 4, 1])
    plain = cur.rollout_priority(std, count, 12, bonus=0.0)
    close(plain[:3], [0.201816, 0.174778, 0.0], atol=5e-6)
    assert jnp.isinf(plain[3])
    close(cur.rollout_priority(std, count, 12)[:3] - plain[:3], [0.800773] * 3, atol=2e-6)

    # 12.706205 and 4.302653 (95%), 6.313752 and 2.919986 (90%) with 1 and 2 degrees of freedom.
    one = jnp.float32(1.0)
    for level, first, second in ((0.05, 12.706205, 4.302653), (0.1, 6.313752, 2.919986)):
        expected = first / math.sqrt(2) - second / math.sqrt(3)
        close(cur.rollout_priority(one, jnp.int32(2), 0, level=level), expected, rtol=1e-5)
    held = cur.rollout_priority(one, jnp.int32(10_000), 0)
    close(held, 1.96 * (1e-2 - 10_001**-0.5), rtol=2e-2)

    # Priority spends a round on what is uncertain.
    std = jnp.array([0.5, 0.0, 0.5])
    table = cur.rollout_priority(std[:, None], jnp.arange(16), 12, bonus=0.0)
    assert cur.greedy_allocate(table, total=18, start=jnp.array([4, 4, 4])).tolist() == [7, 4, 7]
    # Without two rollouts there is no interval: such a prompt goes first.
    assert cur.greedy_allocate(table, total=10, start=jnp.array([4, 0, 4])).tolist() == [4, 2, 4]
