"""Three policies: that of the sampler, the proximal one that the clip is around, and the present.

Of probabilities 0.25, 0.2 and 0.3 with A = 1:

- decoupled PPO weighs the clipped ratio to the proximal policy by proximal over sampler:
  0.8 clip(1.5, 0.8, 1.2) = 0.96;
- Mix-PPG clips the ratio to the sampler around that weight: clip(1.2, 0.6, 1.0) = 1.0.

Where the sampler is the last policy, both are PPO (`test_surrogates.py`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, compiled, equal
from rows import for_each
from surrogate_cases import clipped, numeric_gradient, ratio

from jaxrl_llm.surrogates import decoupled_ppo, mix_ppg, ppo_clip

ONE = jnp.ones(1, bool)
SHAPE = (3, 4, 5)
RNG = np.random.default_rng(0)
BEHAVIOR = RNG.normal(-1.5, 0.6, SHAPE).astype(np.float32)
OLD = BEHAVIOR + RNG.normal(0.1, 0.4, SHAPE).astype(np.float32)
LOGP = OLD + RNG.normal(0.0, 0.3, SHAPE).astype(np.float32)
TOKENS = RNG.normal(size=SHAPE).astype(np.float32)
MASK = RNG.random(SHAPE) < 0.8
BOTH = [decoupled_ppo, mix_ppg]


def at(function, theta, prox, behavior, advantage=1.0, **options):
    """Loss and d/dlogp of one token, from the probabilities of three policies."""
    theta, prox, behavior = (jnp.log(jnp.array([p])) for p in (theta, prox, behavior))

    def loss(x):
        advantages = jnp.array([advantage])
        return function(x, prox, advantages, ONE, behavior_logp=behavior, **options)[0]

    value, gradient = jax.value_and_grad(loss)(theta)
    return float(value), float(gradient[0])


@compiled
def both(function, old=OLD, behavior=BEHAVIOR, **options):
    if behavior is not None:
        options["behavior_logp"] = behavior
    loss = lambda x: function(x, old, TOKENS, MASK, **options)  # noqa: E731
    return loss(LOGP), jax.grad(lambda x: loss(x).sum())(LOGP)


def assert_same(got, expected, rtol=1e-6):
    for a, b in zip(got, expected, strict=True):
        close(a, b, rtol=rtol, atol=1e-7)


def test_worked_numbers():
    close(at(decoupled_ppo, 0.3, 0.2, 0.25), (-0.96, 0.0), atol=1e-6)
    close(at(mix_ppg, 0.3, 0.2, 0.25), (-1.0, 0.0), atol=1e-6)
    # A clip centered on 1 that holds the same distance from q would have left it active.
    close(at(ppo_clip_around_the_sampler, 0.3, 0.2, 0.25), (-1.2, -1.2), rtol=1e-6)


def ppo_clip_around_the_sampler(logp, old_logp, advantages, mask, *, behavior_logp):
    return ppo_clip(logp, behavior_logp, advantages, mask, eps_low=0.25, eps_high=0.25)


@for_each("function", BOTH)
@for_each("seed", range(2))
def test_value_and_gradient_match_float64(function, seed):
    weights = np.random.default_rng(seed).uniform(0.5, 1.5, SHAPE)
    options = {"eps_low": 0.15, "eps_high": 0.25}
    x64, old, behavior, a = (x.astype(np.float64) for x in (LOGP, OLD, BEHAVIOR, TOKENS))

    def reference(x):
        if function.__name__ == "decoupled_ppo":
            return ratio(old, behavior) * clipped(ratio(x, old), a, 0.85, 1.25)
        center = ratio(old, behavior)
        return clipped(ratio(x, behavior), a, center - 0.15, center + 0.25)

    def loss(x):
        return function(x, OLD, TOKENS, MASK, behavior_logp=BEHAVIOR, **options)

    close(loss(LOGP), MASK * reference(x64), rtol=1e-5, atol=1e-6)
    got = jax.grad(lambda x: jnp.sum(weights * loss(x)))(LOGP)
    expected = numeric_gradient(lambda x: np.sum(weights * MASK * reference(x)), x64)
    close(got, expected, rtol=1e-4, atol=1e-5)


def test_decoupled_ppo():
    # Decoupled is ppo with a weight.
    weight = np.exp(OLD - BEHAVIOR)
    options = {"dual_clip": 1.2}
    got = both(decoupled_ppo, **options)
    assert_same(got, both(ppo_clip, behavior=None, weight=weight, **options))


@for_each("beyond", [None, "clamp", "mask"])
def test_weights_beyond_the_cap(beyond):
    weight = np.exp(OLD - BEHAVIOR)
    assert (weight > 1.2).any() and (weight < 1.2).any()
    capped = np.where(weight > 1.2, 0.0 if beyond == "mask" else 1.2, weight)
    got = both(decoupled_ppo, cap=1.2, beyond_cap=beyond)
    assert_same(got, both(ppo_clip, behavior=None, weight=capped))
    if beyond == "mask":
        assert not np.asarray(got[1])[weight > 1.2].any()


def test_mix_ppg():
    # Mix ppg has exactly no gradient beyond its band.
    _, gradient = both(mix_ppg)
    q, center = np.exp(LOGP - BEHAVIOR), np.exp(OLD - BEHAVIOR)
    stopped = np.where(TOKENS > 0, q > center + 0.2, q < center - 0.2) & MASK
    assert stopped.any()
    equal(np.asarray(gradient) == 0, stopped | ~MASK)

    # Mix ppg counts its band in units of the weight.
    # The sampler is rarer by half: q = 2 at the last policy, and the band is 1.8 to 2.2.
    close(at(mix_ppg, 0.41, 0.4, 0.2), (-2.05, -2.05), rtol=1e-5)
    close(at(mix_ppg, 0.46, 0.4, 0.2), (-2.2, 0.0), rtol=1e-5)


@for_each("function", BOTH)
def test_the_sampler_is_a_constant_and_masked_cells_are_not_read(function):
    clean = both(function, behavior=BEHAVIOR)
    for junk in (1e4, np.nan, -np.inf):
        dirty = np.where(MASK, BEHAVIOR, np.float32(junk))
        assert_same(both(function, behavior=dirty), clean, rtol=0)
    loss = lambda b: function(LOGP, OLD, TOKENS, MASK, behavior_logp=b).sum()  # noqa: E731
    assert not np.any(jax.grad(loss)(jnp.asarray(BEHAVIOR)))


@for_each("function", BOTH)
def test_far_log_ratios_are_clamped(function):
    mask = jnp.ones(2, bool)
    behavior = jnp.array([-60.0, 60.0])
    loss = lambda x: function(x, jnp.zeros(2), -jnp.ones(2), mask, behavior_logp=behavior)  # noqa: E731
    close(loss(jnp.zeros(2))[0], np.exp(20.0), rtol=1e-5)
    assert np.isfinite(jax.grad(lambda x: loss(x).sum())(jnp.zeros(2))).all()
