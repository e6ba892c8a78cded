"""grpo, dr_grpo, rloo and grpo_split: a reward against those of its group.

    grpo      (r - mean) / (std + eps)     (1, 0, 0, 1) -> (0.866, -0.866, -0.866, 0.866)
    dr_grpo   r - mean                     (1, 0, 0, 0) -> (3/4, -1/4, -1/4, -1/4)
    rloo      r - mean of the others       (1, 0, 0, 0) -> (1, -1/3, -1/3, -1/3)

grpo_from_baseline takes its mean from the batch, from the others or from nowhere. grpo may take its
deviation from the batch. grpo_split takes the mean of the rollouts that no guide steered. Equal
rewards give exactly zero, a lone rollout zero or, with singleton="raw", its reward.
`test_common.py` has their laws.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, normal, quick, value_and_grad
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding, PartitionSpec
from rows import for_each

from jaxrl_llm.advantages import dr_grpo, grpo, grpo_from_baseline, grpo_split, rloo


def reference(rewards, where=None, *, scale="group", ddof=1, eps=1e-6, singleton="zero"):
    """The formula row by row in float64, with the edge cases written out."""
    rewards = np.asarray(rewards, np.float64)
    where = np.ones(rewards.shape, bool) if where is None else where
    out = np.zeros(rewards.shape)
    batch = rewards[where]
    batch_std = 1.0 if batch.max() == batch.min() else batch.std(ddof=ddof)
    for row, keep, result in zip(
        rewards.reshape(-1, rewards.shape[-1]),
        where.reshape(-1, rewards.shape[-1]),
        out.reshape(-1, rewards.shape[-1]),
        strict=True,
    ):
        kept = row[keep]
        if len(kept) == 1 and singleton == "raw":
            center, std = 0.0, 1.0
        elif len(kept) == 0 or kept.max() == kept.min():
            continue
        else:
            center, std = kept.mean(), kept.std(ddof=ddof)
        divisor = {"group": std + eps, "batch": batch_std + eps, "none": 1.0}[scale]
        result[keep] = (kept - center) / divisor
    return out


@for_each(
    ("rewards", "options", "expected"),
    [
        ([1, 0, 0, 1], {}, [0.866024, -0.866024, -0.866024, 0.866024]),
        ([1, 0, 0, 1], {"ddof": 0}, [0.999998, -0.999998, -0.999998, 0.999998]),
        ([1, 0, 0, 0], {}, [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1, 0, 0, 0], {"scale": "none"}, [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_worked_numbers(rewards, options, expected):
    advantages = grpo(np.array(rewards, jnp.float32), **options)
    close(advantages, expected, atol=1.2e-6)


def other_baselines(rewards, where, baseline, ddof, eps, singleton, scale="group"):
    """Differences to the baseline over their root mean square, reward by reward in float64."""
    rewards = np.asarray(rewards, np.float64)
    left, out = np.zeros(rewards.shape), np.zeros(rewards.shape)
    for place in zip(*np.nonzero(where), strict=True):
        others = where.copy()
        others[place] = baseline == "batch"
        if baseline == "leave_one_out":
            others &= np.eye(where[..., 0].size, dtype=bool).reshape(
                *where.shape[:-1], *where.shape[:-1]
            )[place[:-1]][..., None]
        mean = rewards[others].mean() if others.any() and baseline != "zero" else 0.0
        left[place] = rewards[place] - mean
    for index in np.ndindex(*rewards.shape[:-1]):
        keep = np.flatnonzero(where[index])
        row = rewards[index][keep]
        if len(row) < 2:
            out[index][keep] = row / (1 + eps) if singleton == "raw" else 0.0
            left[index] = 0.0 if baseline == "leave_one_out" else left[index]
        elif baseline == "leave_one_out" and row.max() == row.min():
            left[index] = 0.0
    for index in np.ndindex(*rewards.shape[:-1]):
        keep = np.flatnonzero(where[index])
        if len(keep) > 1:
            over = left[index][keep] if scale == "group" else left[where]
            out[index][keep] = left[index][keep] / (
                np.sqrt((over**2).sum() / (len(over) - ddof)) + eps
            )
    return out


@for_each(
    ("scale", "ddof", "singleton"),
    [("group", 0, "zero"), ("group", 1, "raw"), ("batch", 1, "zero"), ("batch", 0, "raw")],
)
@for_each("baseline", ["batch", "leave_one_out", "batch_leave_one_out", "zero"])
def test_other_baselines_equal_the_float64_reference(baseline, scale, ddof, singleton):
    rng = np.random.default_rng(1)
    rewards = rng.normal(size=(3, 5, 6)).astype(np.float32)
    rewards[0, 0] = 0.1
    where = rng.random(rewards.shape) < 0.6
    where[1, 0], where[1, 1] = False, np.arange(6) == 2
    options = {"baseline": baseline, "ddof": ddof, "eps": 1e-4, "singleton": singleton}
    options["scale"] = scale
    got = grpo_from_baseline(np.where(where, rewards, np.nan), where=where, **options)
    close(got, other_baselines(rewards, where, **options), atol=2e-6)


@for_each(
    ("rewards", "options", "expected"),
    [
        ([[1, 0], [1, 1]], {"baseline": "batch"}, [[0.316228, -0.948683], [0.707107, 0.707107]]),
        ([[0.1, 0.1, 0.1]] * 3, {"baseline": "batch"}, [[0, 0, 0]] * 3),
        ([[0.1, 0.1, 0.1]] * 3, {"baseline": "batch_leave_one_out"}, [[0, 0, 0]] * 3),
        # Means of the other three: 2/3, 1, 2/3, 2/3; so 1/3, -1, 1/3, 1/3 above them.
        (
            [[1, 0], [1, 1]],
            {"baseline": "batch_leave_one_out", "ddof": 0},
            [[0.447214, -1.341641], [1, 1]],
        ),
        ([[3, 4], [0, 0]], {"baseline": "zero"}, [[0.6, 0.8], [0, 0]]),
        ([[3, 4], [0, 0]], {"baseline": "zero", "scale": "batch"}, [[1.039230, 1.385641], [0, 0]]),
        (
            [3, 0, 0, 0],
            {"baseline": "leave_one_out", "ddof": 0},
            [1.732051, -0.577350, -0.577350, -0.577350],
        ),
        ([3, 0, 0, 0], {"baseline": "leave_one_out"}, [1.5, -0.5, -0.5, -0.5]),
        ([0.1, 0.1, 0.1], {"baseline": "leave_one_out", "ddof": 0}, [0, 0, 0]),
    ],
)
def test_worked_numbers_of_other_baselines(rewards, options, expected):

    def total(rewards):
        out = grpo_from_baseline(rewards, **options)
        return (out * rewards).sum(), out

    (_, out), slope = value_and_grad(total, has_aux=True)(np.array(rewards, np.float32))
    close(out, expected, atol=3e-6)
    assert np.isfinite(slope).all()


@for_each("baseline", ["group", "zero"])
def test_the_deprecated_keyword_of_grpo_still_works(baseline):
    rewards = np.array([[3.0, 4.0], [0.0, 1.0]], np.float32)
    with pytest.warns(DeprecationWarning, match="grpo_from_baseline"):
        got = grpo(rewards, baseline=baseline, ddof=0)
    new = grpo if baseline == "group" else partial(grpo_from_baseline, baseline=baseline)
    assert got.tolist() == new(rewards, ddof=0).tolist()


@for_each("scale, ddof", [("group", 0), ("group", 1), ("batch", 0), ("batch", 1), ("none", None)])
@for_each("singleton", ["zero", "raw"])
def test_equals_the_float64_reference(scale, ddof, singleton):
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(3, 5, 6)).astype(np.float32)
    rewards[0, 0] = 0.1
    some = rng.random(rewards.shape) < 0.6
    some[1, 0], some[1, 1] = False, np.arange(6) == 2
    options = {"scale": scale, "singleton": singleton}
    options |= {} if scale == "none" else {"ddof": ddof, "eps": 1e-4}
    for where in (some, np.ones_like(some)):
        out = grpo(rewards, where=where, **options)
        close(out, reference(rewards, where, **options), rtol=2e-5, atol=2e-6)


def test_raw_singletons_of_a_batch_without_spread_are_not_blown_up():
    rewards = np.full((3, 1), 0.1)
    close(grpo(rewards, scale="batch", singleton="raw"), np.full((3, 1), 0.1), rtol=1e-5)


def test_a_tiny_spread_around_a_large_reward_survives_float32():
    # E[x^2] - E[x]^2 would cancel to nothing here; two passes do not.
    rewards = np.array([1000.0, 1000.0, 1000.0, 1000.25])
    close(grpo(rewards), [-0.5, -0.5, -0.5, 1.5], atol=1e-4)


def test_only_the_batch_scale_communicates_on_a_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    rewards = jax.device_put(normal(2, (16, 4)), sharding)

    def collectives(scale):
        program = jax.jit(lambda r: grpo(r, scale=scale)).lower(rewards).compile()
        close(program(rewards), grpo(jnp.asarray(np.asarray(rewards)), scale=scale), rtol=1e-5)
        names = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
        return sum(program.as_text().count(name) for name in (*names, "collective-broadcast"))

    assert collectives("group") == 0
    assert collectives("none") == 0
    assert collectives("batch") > 0


def test_worked_numbers_of_the_others():
    rewards, third = np.array([1.0, 0.0, 0.0, 0.0]), 1.0 / 3.0
    assert dr_grpo(rewards).tolist() == [0.75, -0.25, -0.25, -0.25]
    close(rloo(rewards), [1.0, -third, -third, -third], rtol=1e-6)
    # Only the teachers are right: rollouts of the policy get exactly 0, the teachers' 1.
    steered = np.array([False, False, True, True])
    assert grpo_split(np.array([0.0, 0.0, 1.0, 1.0]), steered=steered).tolist() == [0, 0, 1, 1]
    # A group of one is zero, or keeps its reward.
    alone, where = np.array([[3.0, np.nan]]), np.array([[True, False]])
    for function in (dr_grpo, rloo):
        assert function(alone, where=where, singleton="raw").tolist() == [[3.0, 0.0]]
        assert function(alone, where=where).tolist() == [[0.0, 0.0]]


def test_dr_grpo_and_rloo_equal_float64_with_dropped_rollouts():
    rng = np.random.default_rng(1)
    rewards, where = rng.normal(size=(5, 6)).astype(np.float32), rng.random((5, 6)) < 0.7
    centered, left_out = np.zeros((5, 6)), np.zeros((5, 6))
    for p, g in itertools.product(range(5), range(6)):
        others = where[p] & (np.arange(6) != g)
        if where[p, g] and others.any():
            kept = np.float64(rewards[p])
            centered[p, g] = kept[g] - kept[where[p]].mean()
            left_out[p, g] = kept[g] - kept[others].mean()
    close(dr_grpo(rewards, where=where), centered, atol=1e-6)
    close(rloo(rewards, where=where), left_out, atol=1e-6)


SHAPE = (3, 4)
eighths = hnp.arrays(np.float32, SHAPE, elements=st.integers(-40, 40).map(lambda i: i / 8))
bools = hnp.arrays(np.bool_, SHAPE)


def split_reference(rewards, steered, where):
    out = np.zeros(rewards.shape)
    for row in range(len(rewards)):
        plain = rewards[row][where[row] & ~steered[row]].astype(np.float64)
        out[row] = np.where(where[row], rewards[row] - (plain.mean() if len(plain) else 0.0), 0.0)
    return out


@quick
@given(rewards=eighths, steered=bools, where=bools)
def test_grpo_split_against_float64(rewards, steered, where):
    junk = np.where(where, rewards, np.nan)
    out = np.asarray(grpo_split(junk, steered=steered, where=where))
    close(out, split_reference(rewards, steered, where), atol=1e-5)
    close(np.where(~steered, out, 0).sum(-1), 0.0, atol=2e-5)


def test_a_group_of_equal_rewards_has_no_signal_for_the_guide_either():
    steered = np.array([False, False, False, True])
    assert grpo_split(np.full(4, 0.1), steered=steered).tolist() == [0.0] * 4
    assert grpo_split(np.full(4, 0.1), steered=np.ones(4, bool)).tolist() == [np.float32(0.1)] * 4
