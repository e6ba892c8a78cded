"""Smooth standardization over visits, against float64 written visit by visit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from jax.test_util import check_grads
from rows import for_each

from jaxrl_llm.advantages import (
    prompt_stats_init,
    prompt_stats_update,
    smooth_advantage,
    smooth_standardization,
)

smooth = smooth_standardization(num_prompts=3)
step = jax.jit(lambda r, s, ids, where: smooth.update(r, s, prompt_ids=ids, where=where, key=1))
everyone = np.ones((2, 4), bool)


class Reference:
    """The statistics of one prompt, and its advantages, as the paper writes them."""

    def __init__(self):
        self.n, self.mean, self.var = 0, 0.0, 0.0

    def merged(self, kept):
        new, s2 = kept.mean(), kept.var(ddof=1) if len(kept) > 1 else 0.0
        n = self.n
        mean = (n * self.mean + new) / (n + 1)
        var = (n * self.var + s2 + n / (n + 1) * (new - self.mean) ** 2) / (n + 1)
        return new, s2, mean, var

    def visit(self, kept):
        _, _, self.mean, self.var = self.merged(kept)
        self.n += 1

    def advantages(self, kept):
        new, s2, mean, var = self.merged(kept)
        now = (kept - new) / np.sqrt(s2) if s2 > 1e-12 else 0.0 * kept
        total = (kept - mean) / np.sqrt(var) if var > 1e-12 else 0.0 * kept
        i = self.n + 1
        first = (i - 1) / i * now + total / i
        second = now / i + (i - 1) / i * total
        return np.where(np.abs(first) < np.abs(second), first, second)


@for_each(("visits", "expected"), [(1, 0.8), (2, 0.5), (4, 0.35)])
def test_smooth_advantage_has_the_worked_numbers(visits, expected):
    current = jnp.float32(0.8)
    total = current if visits == 1 else jnp.float32(0.2)
    close(smooth_advantage(current, total, visits), expected, rtol=1e-6)


@for_each("seed", range(3))
def test_equals_the_reference_over_many_visits(seed):
    rng = np.random.default_rng(seed)
    state, known = smooth.init(), [Reference() for _ in range(3)]
    for _ in range(12):
        ids = rng.permutation(3)[:2]
        rewards = rng.integers(0, 3, (2, 4)).astype(np.float32) / 4
        where = rng.random((2, 4)) < 0.7
        out, state = step(rewards, state, ids, where)
        for row, q in enumerate(ids):
            kept = rewards[row][where[row]].astype(np.float64)
            assert not np.asarray(out)[row][~where[row]].any()
            if len(kept):
                expected = known[q].advantages(kept)
                close(out[row][where[row]], expected, atol=2e-5)
                known[q].visit(kept)
    close(state.mean, [k.mean for k in known], rtol=1e-5)
    close(state.var, [k.var for k in known], rtol=1e-4, atol=1e-6)
    assert state.count.tolist() == [k.n for k in known]


def test_several_rows_of_one_prompt_are_visits_in_any_order():
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(3, 4)).astype(np.float32)
    before = prompt_stats_update(prompt_stats_init(2), np.array([1]), rewards[:1] + 2.0)
    results = []
    for order in itertools.permutations(range(3)):
        together = prompt_stats_update(before, np.full(3, 1), rewards[list(order)])
        one_by_one = before
        for row in order:
            one_by_one = prompt_stats_update(one_by_one, np.array([1]), rewards[row : row + 1])
        for a, b in zip(together, one_by_one, strict=True):
            close(a, b, rtol=1e-5, atol=1e-6)
        results.append(together)
    for a, b in zip(results[0], results[-1], strict=True):
        close(a, b, rtol=1e-5)


def test_a_constant_group_still_learns_from_earlier_visits():
    ids = np.array([0, 1])
    _, state = step(np.array([[1.0, 0, 0, 1], [0.1, 0.1, 0.1, 0.1]]), smooth.init(), ids, everyone)
    out, state = step(np.array([[1.0, 1, 1, 1], [0.1, 0.1, 0.1, 0.1]]), state, ids, everyone)
    assert (np.asarray(out)[0] > 0.1).all()
    # Equal in every visit: exactly 0, though the float32 deviation of 0.1s is not.
    for _ in range(3):
        out, state = step(np.full((2, 4), 0.1), state, ids, everyone)
        assert not np.asarray(out)[1].any()


def test_alone_in_its_group_a_rollout_is_compared_with_earlier_visits():
    alone = np.array([[True, False, False, False], [False] * 4])
    ids = np.array([0, 1])
    out, state = step(np.ones((2, 4)), smooth.init(), ids, alone)
    assert not np.asarray(out).any()
    assert state.count.tolist() == [1, 0, 0]
    out, _ = step(np.zeros((2, 4)), state, ids, alone)
    # Mean 1/2 and deviation 1/2 over both visits, A_now = 0, i = 2.
    close(out[0], [-0.5, 0, 0, 0], rtol=1e-6)


def test_a_foreign_prompt_is_loud_and_changes_nothing():
    for foreign in (-1, 3, 99):
        ids = np.array([foreign, 1])
        rewards = np.array([[1.0, 0, 0, 1], [1.0, 0, 0, 1]])
        out, state = step(rewards, smooth.init(), ids, everyone)
        assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
        assert state.count.tolist() == [0, 1, 0]
        dropped = np.array([[False] * 4, [True] * 4])
        out, _ = step(rewards, smooth.init(), ids, dropped)
        assert np.isfinite(out).all()


def test_dropped_rollouts_are_never_read_in_value_or_gradient():
    rng = np.random.default_rng(1)
    clean = rng.normal(size=(2, 4)).astype(np.float32)
    where = np.array([[1, 1, 0, 1], [0, 1, 1, 0]], bool)
    ids = np.array([2, 0])
    _, state = step(rng.normal(size=(2, 4)).astype(np.float32), smooth.init(), ids, everyone)
    state = jax.tree.map(jnp.asarray, state)
    weights = rng.normal(size=(2, 4)).astype(np.float32)

    @jax.jit
    def value_and_grad(rewards):
        def total(r):
            return jnp.sum(weights * smooth.update(r, state, prompt_ids=ids, where=where)[0])

        return jax.value_and_grad(total)(rewards)

    value, slope = value_and_grad(clean)
    assert np.isfinite(slope).all() and not np.asarray(slope)[~where].any()
    for junk in (1e4, np.nan, np.inf):
        rewards = np.where(where, clean, np.float32(junk))
        other, gradient = value_and_grad(rewards)
        assert other == value
        equal(gradient, slope)
        for a, b in zip(
            step(rewards, state, ids, where)[1], step(clean, state, ids, where)[1], strict=True
        ):
            equal(a, b)


def test_a_kept_nan_is_not_hidden():
    rewards = np.array([[1.0, np.nan, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0]], np.float32)
    out, state = step(rewards, smooth.init(), np.array([0, 1]), everyone)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
    assert np.isnan(state.mean[0]) and np.isfinite(state.mean[1:]).all()


def test_gradient_equals_finite_differences():
    ids = np.array([2, 0])
    rewards = np.array([[1.0, 0.2, -0.4, 0.6], [0.1, 0.9, 0.3, -0.8]])
    _, state = step(rewards[::-1], smooth.init(), ids, everyone)
    check_grads(
        lambda r: step(r, state, ids, everyone)[0], (rewards,), order=1, modes=["rev"],
        atol=1e-2, rtol=1e-2, eps=1e-3,
    )  # fmt: skip


def test_state_is_float32_compares_by_value_and_eager_equals_compiled():
    assert smooth == smooth_standardization(num_prompts=3) != smooth_standardization(num_prompts=4)
    rewards = np.array([[1.0, 0.5, 0.0, 0.25], [0.5, 0.5, 1.0, 0.0]], jnp.bfloat16)
    ids = np.array([0, 1])
    eager = smooth.update(rewards, smooth.init(), prompt_ids=ids)
    compiled = step(rewards.astype(jnp.float32), smooth.init(), ids, everyone)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        assert a.dtype == b.dtype
        close(a, b, rtol=1e-6)
