"""Diagnostics against float64 references and numbers worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from cheap import close, equal, grad, one_program_a_call, put  # noqa: F401
from rows import for_each

from jaxrl_llm import diagnostics, surrogates
from jaxrl_llm.advantages import grpo

SHAPE = (3, 4, 5)
RNG = np.random.default_rng(0)
LOGP = RNG.normal(-1.0, 0.5, SHAPE).astype(np.float32)
OLD = (LOGP + RNG.normal(0.0, 0.3, SHAPE)).astype(np.float32)
MASK = np.arange(5) < RNG.integers(0, 6, SHAPE[:-1])[..., None]
ADVANTAGES = RNG.normal(size=SHAPE[:-1]).astype(np.float32)
D = (LOGP.astype(np.float64) - OLD)[MASK]

PAIRS = {
    "clip_fraction": lambda logp, old, mask: diagnostics.clip_fraction(logp, old, ADVANTAGES, mask),
    "clip_fraction_sequence": lambda logp, old, mask: diagnostics.clip_fraction(
        logp, old, ADVANTAGES, mask, level="sequence", eps_low=0.05, eps_high=0.05
    ),
    "dual_clip_fraction": lambda logp, old, mask: diagnostics.dual_clip_fraction(
        logp, old, ADVANTAGES, mask, dual_clip=1.1
    ),
    "dual_clip_fraction_sequence": lambda logp, old, mask: diagnostics.dual_clip_fraction(
        logp, old, ADVANTAGES, mask, level="sequence", dual_clip=1.01
    ),
    "approx_kl": diagnostics.approx_kl,
    "approx_kl_k3": lambda *a: diagnostics.approx_kl(*a, estimator="k3"),
    "ratio_range": diagnostics.ratio_range,
    "ess_sequence": diagnostics.effective_sample_size,
    "ess_token": lambda *a: diagnostics.effective_sample_size(*a, level="token"),
    "mismatch": diagnostics.mismatch,
}
every_pair = for_each("name", PAIRS)


def test_clip_fraction_counts_what_leaves_the_gradient():
    # The rows of the worked PPO numbers: ratio and advantage, then whether the gradient is zero.
    ratios = np.array([[1.5, 0.5, 1.5, 0.5, 1.1, 1.5]])
    advantages = np.array([[1.0, 1.0, -1.0, -1.0, 1.0, 0.0]])
    mask = np.ones((1, 6), bool)
    share = diagnostics.clip_fraction(np.log(ratios), np.zeros((1, 6)), advantages, mask)
    assert float(share) == pytest.approx(2 / 6)


def test_clip_fraction_equals_the_reference_with_uneven_bounds():
    ratio = np.exp(D)
    a = np.broadcast_to(ADVANTAGES[..., None], SHAPE)[MASK]
    expected = np.mean((a > 0) & (ratio > 1.28) | (a < 0) & (ratio < 0.9))
    ours = diagnostics.clip_fraction(LOGP, OLD, ADVANTAGES, MASK, eps_low=0.1, eps_high=0.28)
    assert 0.0 < expected < 1.0
    assert float(ours) == pytest.approx(expected, rel=1e-6)


def test_dual_clip_fraction_counts_what_leaves_the_gradient():
    ratios = np.array([[4.0, 4.0, 2.0, 0.5, 4.0]])
    advantages = np.array([[-1.0, 1.0, -1.0, -1.0, 0.0]])
    arrays = (np.log(ratios), np.zeros((1, 5)), advantages, np.ones((1, 5), bool))
    assert float(diagnostics.dual_clip_fraction(*arrays, dual_clip=3.0)) == pytest.approx(1 / 5)


@for_each("dual_clip", [1.1, 1.4])
def test_both_fractions_are_the_share_without_a_gradient(dual_clip):
    arrays = (OLD, ADVANTAGES, MASK)
    gradient = grad(lambda x: surrogates.ppo_clip(x, *arrays, dual_clip=dual_clip).sum())(LOGP)
    dual = diagnostics.dual_clip_fraction(LOGP, *arrays, dual_clip=dual_clip)
    both = diagnostics.clip_fraction(LOGP, *arrays) + dual
    assert dual > 0
    assert float(both) == pytest.approx(np.mean(np.asarray(gradient)[MASK] == 0), rel=1e-6)


@for_each("tokens", [False, True])
def test_both_fractions_of_sequences_are_the_share_without_a_gradient(tokens):
    advantages = RNG.normal(size=SHAPE).astype(np.float32) if tokens else ADVANTAGES
    surrogate = surrogates.gspo_token if tokens else surrogates.gspo
    bounds, dual = {"eps_low": 0.05, "eps_high": 0.1}, {"dual_clip": 1.1}
    arrays = (OLD, np.asarray(advantages), MASK)
    options = bounds | dual
    gradient = np.asarray(grad(lambda x: surrogate(x, *arrays, **options).sum())(LOGP))
    rows = zip(gradient.reshape(-1, 5), MASK.reshape(-1, 5), strict=True)
    expected = np.mean([np.mean(g[m] == 0) for g, m in rows if m.any()])
    clipped = diagnostics.clip_fraction(LOGP, *arrays, level="sequence", **bounds)
    bounded = diagnostics.dual_clip_fraction(LOGP, *arrays, level="sequence", **dual)
    assert bounded > 0
    assert float(clipped + bounded) == pytest.approx(expected, rel=1e-6)


def test_ratios_beyond_the_clamp_stay_finite():
    logp, mask = np.array([200.0, -200.0]), np.ones(2, bool)
    ratios = diagnostics.ratio_range(logp, np.zeros(2), mask)
    close(ratios, [np.exp(20.0) / 2, np.exp(-20.0), np.exp(20.0)], rtol=1e-5)
    kl = diagnostics.approx_kl(logp, np.zeros(2), mask, estimator="k3")
    assert np.isfinite(kl)


@for_each(
    ("estimator", "expected"),
    [("k1", np.mean(-D)), ("k2", np.mean(D**2) / 2), ("k3", np.mean(np.exp(D) - 1 - D))],
)
def test_approx_kl_equals_the_reference(estimator, expected):
    ours = diagnostics.approx_kl(LOGP, OLD, MASK, estimator=estimator)
    assert float(ours) == pytest.approx(expected, rel=1e-5)


def test_k3_of_a_tiny_difference_does_not_cancel_to_nothing():
    d = np.float32(1e-4)
    ours = diagnostics.approx_kl(np.full(4, d), np.zeros(4), np.ones(4, bool), estimator="k3")
    assert float(ours) == pytest.approx(0.5e-8, rel=0.05)


def test_ratio_range():
    ours = diagnostics.ratio_range(LOGP, OLD, MASK)
    close(ours, [np.exp(D).mean(), np.exp(D).min(), np.exp(D).max()], rtol=1e-5)


@for_each("level", ["token", "sequence"])
def test_effective_sample_size_equals_the_reference(level):
    d = np.where(MASK, LOGP.astype(np.float64) - OLD, 0.0)
    w = np.exp(d)[MASK] if level == "token" else np.exp(d.sum(-1))[MASK.any(-1)]
    ours = diagnostics.effective_sample_size(LOGP, OLD, MASK, level=level)
    assert float(ours) == pytest.approx(1 / np.mean((w / w.mean()) ** 2), rel=1e-5)


def test_effective_sample_size_bounds_and_overflow():
    n, mask = 8, np.ones((8, 3), bool)
    ess = diagnostics.effective_sample_size
    # Equal weights, whatever they are; e^600 overflows float32.
    assert float(ess(np.full((n, 3), 200.0), np.zeros((n, 3)), mask)) == pytest.approx(1.0)
    one = put(np.zeros((n, 3)), 0, 100.0)
    assert float(ess(one, np.zeros((n, 3)), mask)) == pytest.approx(1 / n)
    assert float(ess(np.full((n, 3), -np.inf), np.zeros((n, 3)), mask)) == 0.0


def test_mismatch():
    ours = diagnostics.mismatch(LOGP, OLD, MASK)
    close(ours, [np.abs(D).mean(), np.abs(D).max(), -D.mean()], rtol=1e-5, atol=1e-7)


@every_pair
def test_the_same_policy_is_no_distance(name):
    values = jax.tree.leaves(PAIRS[name](LOGP, LOGP, MASK))
    expected = 1.0 if name.startswith(("ratio", "ess")) else 0.0
    close(values, expected, atol=1e-6)


@every_pair
def test_junk_in_masked_cells_is_never_read(name):
    function = jax.jit(PAIRS[name])
    clean = jax.tree.leaves(function(LOGP, OLD, MASK))
    for junk in (1e4, np.nan, np.inf):
        dirty = function(
            np.where(MASK, LOGP, np.float32(junk)), np.where(MASK, OLD, np.float32(-junk)), MASK
        )
        equal(jax.tree.leaves(dirty), clean)


@every_pair
def test_nothing_kept_is_finite(name):
    values = jax.tree.leaves(PAIRS[name](LOGP, OLD, np.zeros(SHAPE, bool)))
    equal(values, 1.0 if name == "ratio_range" else 0.0)


@every_pair
def test_bfloat16_in_float32_out(name):
    logp, old = np.asarray(LOGP, jnp.bfloat16), np.asarray(OLD, jnp.bfloat16)
    ours = jax.tree.leaves(PAIRS[name](logp, old, MASK))
    theirs = PAIRS[name](logp.astype(jnp.float32), old.astype(jnp.float32), MASK)
    assert all(x.dtype == jnp.float32 and x.shape == () for x in ours)
    equal(ours, jax.tree.leaves(theirs))


def test_group_spread():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1], [3.0, 5.0, 9.0, 9.0]])
    spread = diagnostics.group_spread(rewards[:2])
    assert float(spread.informative) == 0.5
    assert float(spread.mean_std) == pytest.approx(np.std([1, 0, 0, 1], ddof=1) / 2, rel=1e-6)
    # Of the kept: one group varies, one is a single rollout, one is empty and does not count.
    where = np.array([[True] * 4, [False] * 4, [True, False, False, False]])
    spread = diagnostics.group_spread(np.where(where, rewards, np.nan), where=where)
    assert float(spread.informative) == 0.5
    assert float(spread.mean_std) == pytest.approx(np.std([1, 0, 0, 1], ddof=1) / 2, rel=1e-6)
    assert [float(x) for x in diagnostics.group_spread(rewards, where=where & False)] == [0.0, 0.0]


def test_an_uninformative_group_is_one_without_an_advantage():
    rewards = np.array([[0.1, 0.1, 0.1], [0.1, 0.1, 0.2], [1.0, 1.0, 1.0], [1.1, 1.1, 1.1]])
    moved = np.mean(np.any(grpo(rewards) != 0, axis=-1))
    assert float(diagnostics.group_spread(rewards).informative) == float(moved) == 0.25


def test_mean_entropy():
    entropy = np.array([[2.0, 1.0, np.nan], [3.0, np.inf, 0.0]])
    mask = np.array([[True, True, False], [True, False, False]])
    assert float(diagnostics.mean_entropy(entropy, mask)) == 2.0
    assert float(diagnostics.mean_entropy(entropy, mask & False)) == 0.0


@every_pair
def test_bad_arrays_name_function_argument_and_shapes(name):
    function = {"ess": "effective_sample_size"}.get(name.split("_")[0], name)
    function = function.removesuffix("_k3").removesuffix("_sequence")
    with pytest.raises(TypeError, match=f"{function}: mask must be bool"):
        PAIRS[name](LOGP, LOGP, MASK.astype(jnp.float32))
    with pytest.raises(TypeError, match=f"{function}: mask must be a bool array.*; got None"):
        PAIRS[name](LOGP, LOGP, None)
    with pytest.raises(TypeError, match=f"{function}: logp must be floating point"):
        PAIRS[name](LOGP.astype(int), LOGP, MASK)
    with pytest.raises(ValueError, match=rf"{function}: .*logp \(3, 4, 5\), .* \(3, 4, 4\)"):
        PAIRS[name](LOGP, LOGP[..., :4], MASK)


A, E = ADVANTAGES, np.zeros((2, 3))
NAMES = vars(diagnostics) | globals()
BAD = r"""
ValueError:
clip_fraction(LOGP, OLD, A, MASK, eps_low=-0.1)  # eps_low must not be negative
clip_fraction(LOGP, OLD, A, MASK, level="group")  # level must be one of
clip_fraction(LOGP, OLD, A[:2], MASK)  # advantages must have the shape of logp
dual_clip_fraction(LOGP, OLD, A, MASK, dual_clip=3.0, level="group")  # level must be one of
dual_clip_fraction(LOGP, OLD, A, MASK, dual_clip=1.0)  # dual_clip must be above 1; got 1
approx_kl(LOGP, OLD, MASK, estimator="k4")  # estimator must be one of
effective_sample_size(LOGP, OLD, MASK, level="group")  # level must be one of
mean_entropy(E, np.ones((2, 2), bool))  # these must have the same shape
TypeError:
group_spread(np.ones((2, 2), int))  # rewards must be floating point
"""


@for_each("error, call, message", bad_calls(BAD))
def test_bad_options(error, call, message):
    raises(error, call, message, NAMES)
