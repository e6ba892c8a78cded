"""Pairwise PPO: worked numbers, its reduction to RLOO, the box, laws, bad input."""

import jax.numpy as jnp
import numpy as np
from cheap import close, grad, value_and_grad
from rows import for_each

from jaxrl_llm import advantages
from jaxrl_llm.preferences import p3o

CLIPS = ("separate", "joint")


def group(seed=0, size=4):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(x, jnp.float32) for x in rng.normal(-5, 0.1, (3, size)))


def test_the_worked_numbers_of_both_versions():
    logp, r = np.log(np.array([1.3, 0.9])), np.array([2.0, 1.0])
    close(p3o(logp, np.zeros(2), r, clip="separate"), 0.045, atol=1e-6)
    close(p3o(logp, np.zeros(2), r, clip="joint"), -0.117, atol=1e-6)


@for_each("clip", CLIPS)
def test_before_the_first_update_it_is_the_mean_of_rloo_over_the_group(clip):
    logp, _, r = group()
    slope = grad(p3o)(logp, logp, r, clip=clip)
    close(slope, -advantages.rloo(r) / 4, rtol=1e-5, atol=1e-7)
    pair = grad(p3o)(logp[:2], logp[:2], r[:2], clip=clip)
    close(pair, (r[0] - r[1]) / 2 * np.array([-1, 1]), rtol=1e-5)


@for_each("clip", CLIPS)
def test_inside_the_box_the_gradient_is_the_theorem_s_and_outside_a_better_one_stops(clip):
    logp, old, r = group(1, 2)
    old = logp + np.array([0.03, -0.05])
    slope = grad(p3o)(logp, old, r, clip=clip)
    ratio = np.exp(np.float64(logp) - np.float64(old)).prod()
    expected = -float(r[0] - r[1]) * ratio * np.array([1, -1]) / 2
    close(slope, expected, rtol=1e-4)
    # The better one is far likelier already, the worse one far less likely.
    better = np.where(r == r.max(), 1.0, -1.0)
    assert not grad(p3o)(old + better, old, r, clip=clip).any()
    assert (grad(p3o)(old - better, old, r, clip=clip) * better < 0).all()


@for_each("clip", CLIPS)
@for_each("pairs", ["all", "adjacent"])
def test_laws(clip, pairs):
    logp, old, r = group(2)
    run = lambda *x, **o: p3o(*x, clip=clip, pairs=pairs, **o)  # noqa: E731
    loss = run(logp, old, r)
    close(run(logp, old, r + 7.0), loss, rtol=1e-4)
    close(run(logp[::-1], old[::-1], r[::-1]), loss, rtol=1e-5)
    order = {
        "all": [(i, j) for j in range(4) for i in range(j)],
        "adjacent": [(0, 1), (1, 2), (2, 3)],
    }
    each = [p3o(*(x[np.array(p)] for x in (logp, old, r)), clip=clip) for p in order[pairs]]
    close(loss, np.mean(each), rtol=1e-5)
    value, slope = value_and_grad(run)(logp, old, np.ones(4))
    assert value == 0 and not slope.any()
    where = np.array([[True, True, False, False], [True] + [False] * 3, [False] * 4])
    dirty = [np.where(where, np.broadcast_to(x, (3, 4)), np.nan) for x in (logp, old, r)]
    total = value_and_grad(lambda *x: run(*x, where=where).sum())
    some, slope = total(*dirty)
    close(some, p3o(logp[:2], old[:2], r[:2], clip=clip), rtol=1e-5)
    assert np.isfinite(slope).all() and not slope[1:].any() and slope[0, 0] != 0


@for_each("clip", CLIPS)
def test_the_reference_is_in_the_reward(clip):
    logp, old, r = group(4)
    ref = old - np.array([0.5, -1.0, 0.0, 2.0])
    shaped = r - 0.3 * (logp - ref)
    options = {"ref_logp": ref, "kl_coef": 0.3, "clip": clip}
    loss, slope = value_and_grad(p3o)(logp, old, r, **options)
    expected = value_and_grad(p3o)(logp, old, shaped, clip=clip)
    close(loss, expected[0], rtol=1e-5)
    close(slope, expected[1], rtol=1e-4, atol=1e-7)
    assert p3o(logp, old, r, ref_logp=ref, clip=clip) == p3o(logp, old, r, clip=clip)


def test_the_gradient_stops_at_what_sampled_and_large_ratios_stay_finite():
    logp, old, r = group(3)
    assert not grad(p3o, argnums=1)(logp, old, r).any()
    for clip in CLIPS:
        value, slope = value_and_grad(p3o)(logp + 500, old, r, clip=clip)
        assert np.isfinite(value) and np.isfinite(slope).all()
