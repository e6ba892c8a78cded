"""Estimates of KL(p || r) from samples of p, and which of them have its gradient.

Of p = (0.5, 0.3, 0.2) and r = (0.4, 0.4, 0.2) the divergence is 0.0252672 and its gradient in the
logits of p (0.098938, -0.093885, -0.005053). With d = log p - log r, in expectation over p:

    estimate           value      gradient
    k1  d              0.0252672  0
    k2  d^2 / 2        0.0248624  that of KL
    k3  exp(-d) - 1 + d  0.0252672  that of KL(r || p): (0.1, -0.1, 0)
    k1+, k3+, abs+     the value of the first, the gradient of k2
    unbiased           0.0252672  that of KL, also for samples of another policy

Differences are clamped to 20, masked cells are never read, the reference is a constant. ReMix mixes
two anchors in shares that add up to 1; the gate closes where the mean divergence is too large.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

from jaxrl_llm.regularizers import (
    k1,
    k2,
    k3,
    kl_convex,
    kl_gate,
    kl_to_reference,
    kl_token,
    kl_unbiased,
    remix_lambda,
    remix_schedule,
)

P = np.array([0.5, 0.3, 0.2])
R = np.array([0.4, 0.4, 0.2])
KL = 0.0252672
TRUE_GRADIENT = [0.098938, -0.093885, -0.005053]
ALL = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
MASK = np.array([[True, True, True, False], [True, False, False, False], [False] * 4])


def expected(token_loss):
    """Mean over the policy's own samples of a token loss, and of its gradient in the logits."""

    def mean(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.asarray(P) * token_loss(logp, jnp.log(jnp.asarray(R))))

    value, gradient = jax.value_and_grad(mean)(jnp.log(jnp.asarray(P)))
    return float(value), np.asarray(gradient)


def make(seed=0):
    rng = np.random.default_rng(seed)
    logp = rng.normal(-1.5, 0.7, MASK.shape)
    return logp.astype(np.float32), (logp + rng.normal(0, 0.8, MASK.shape)).astype(np.float32)


def reference(estimator, logp, ref):
    d = np.clip(logp.astype(np.float64) - ref.astype(np.float64), -20, 20)
    k3_value, k3_slope = np.exp(-d) - 1 + d, 1 - np.exp(-d)
    return {
        "k1": (d, np.ones_like(d)),
        "k2": (d**2 / 2, d),
        "k3": (k3_value, k3_slope),
        "abs": (np.abs(d), np.sign(d)),
        "k1+": (d, d),
        "k3+": (k3_value, d),
        "abs+": (np.abs(d), d),
    }[estimator]


@for_each(
    ("estimator", "value", "gradient"),
    [
        ("k1", KL, [0.0, 0.0, 0.0]),
        ("k2", 0.0248624, TRUE_GRADIENT),
        ("k3", KL, [0.1, -0.1, 0.0]),
        ("k1+", KL, TRUE_GRADIENT),
        ("k3+", KL, TRUE_GRADIENT),
        ("abs+", float(np.sum(P * np.abs(np.log(P / R)))), TRUE_GRADIENT),
    ],
)
def test_expectations(estimator, value, gradient):
    got = expected(lambda x, ref: kl_token(x, ref, None, estimator=estimator))
    close(got[0], value, atol=2e-7)
    close(got[1], gradient, atol=1e-6)


def test_expected_gradients():
    # The numbers above are those of the divergences.
    close(np.sum(P * np.log(P / R)), KL, atol=5e-8)
    kl = lambda x: jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - jnp.log(R)))  # noqa: E731
    close(jax.grad(kl)(jnp.log(P)), TRUE_GRADIENT, atol=1e-6)
    other = lambda x: -jnp.sum(R * jax.nn.log_softmax(x))  # noqa: E731
    close(jax.grad(other)(jnp.log(P)), [0.1, -0.1, 0.0], atol=1e-6)

    # Correction would not mend k2.
    _, gradient = expected(lambda x, ref: jnp.exp(x - jax.lax.stop_gradient(x)) * k2(x, ref))
    close(gradient, [0.09896, -0.08893, -0.01003], atol=6e-6)


@for_each("estimator", ["k1", "k3"])
def test_corrected_estimate_has_the_exact_expected_gradient(estimator):
    everything = jnp.ones(3, bool)
    value, gradient = expected(
        lambda x, ref: kl_unbiased(x, None, ref, everything, estimator=estimator, coef=1.0)
    )
    close(value, KL, atol=2e-7)
    close(gradient, TRUE_GRADIENT, atol=1e-6)


@for_each("estimator", ["k1", "k3"])
def test_corrected_estimate_is_right_for_tokens_of_another_policy(estimator):
    behavior = np.array([0.2, 0.3, 0.5])
    tokens = kl_unbiased(
        jnp.log(P), jnp.log(behavior), jnp.log(R), jnp.ones(3, bool), estimator=estimator, coef=1.0
    )
    close(np.sum(behavior * tokens), KL, atol=2e-7)


@for_each("estimator", ALL)
@for_each("seed", range(3))
def test_value_and_gradient_match_float64(estimator, seed):
    logp, ref = make(seed)
    value, slope = reference(estimator, logp, ref)
    token = lambda x: kl_token(x, ref, MASK, estimator=estimator)  # noqa: E731
    close(token(logp), MASK * value, rtol=1e-5, atol=1e-6)
    got = jax.grad(lambda x: token(x).sum())(jnp.asarray(logp))
    close(got, MASK * slope, rtol=1e-5, atol=1e-6)


@for_each("estimator", ["k1", "k3"])
def test_corrected_value_and_gradient_match_float64(estimator):
    logp, ref = make(3)
    old = make(4)[0]
    value, slope = reference(estimator, logp, ref)
    ratio = np.exp(logp.astype(np.float64) - old)
    term = lambda x: kl_unbiased(x, old, ref, MASK, estimator=estimator, coef=0.5)  # noqa: E731
    close(term(logp), MASK * 0.5 * ratio * value, rtol=1e-5, atol=1e-6)
    got = jax.grad(lambda x: term(x).sum())(jnp.asarray(logp))
    close(got, MASK * 0.5 * ratio * (value + slope), rtol=1e-5, atol=1e-6)


@for_each(
    ("estimator", "ratio", "value", "gradient"),
    [
        ("k3", 1.0, math.e - 2, -1.0),  # k3 + dk3 = d = -1
        ("k3", 20.0, 10.0, 0.0),  # 20 (e - 2) = 14.4
        ("k1", 4.0, -4.0, 0.0),  # 4 (d + 1)
        ("k1", 20.0, -10.0, 0.0),
    ],
)
def test_the_cap_of_the_corrected_estimate_is_on_the_product(estimator, ratio, value, gradient):
    logp = jnp.array([-2.0])
    old, ref = logp - jnp.log(ratio), jnp.array([-1.0])
    term = lambda x: kl_unbiased(  # noqa: E731
        x, old, ref, jnp.ones(1, bool), estimator=estimator, coef=0.5, cap=10.0
    )[0]
    got = jax.value_and_grad(term)(logp)
    close(got[0], 0.5 * value, rtol=1e-5)
    close(got[1], [0.5 * gradient], atol=1e-5)


def test_estimators():
    # Plain estimators are those of kl token.
    logp, ref = make()
    for name, function in (("k1", k1), ("k2", k2), ("k3", k3)):
        for mask in (MASK, None):
            token = kl_token(logp, ref, mask, estimator=name)
            equal(function(logp, ref, mask), token)

    # Differences are clamped.
    far = jnp.array([-1e4, 1e4])
    for estimator, expected_values in (("k1", [-20, 20]), ("abs", [20, 20]), ("k2", [200, 200])):
        token = lambda x, e=estimator: kl_token(x, jnp.zeros(2), None, estimator=e)  # noqa: E731
        equal(token(far), expected_values)
        assert not np.any(jax.grad(lambda x, t=token: t(x).sum())(far))
    close(k3(far, jnp.zeros(2)), [np.exp(20.0) - 21, 19.0], rtol=1e-6)

    # Cap bounds k3 with no gradient beyond.
    logp, ref = jnp.array([-4.0, -1.0]), jnp.array([-1.0, -1.5])  # k3 = 16.1 and 0.107
    capped = lambda x, e: kl_token(x, ref, None, estimator=e, cap=10.0)  # noqa: E731
    free = kl_token(logp, ref, None, estimator="k3")
    for estimator in ("k3", "k3+"):
        equal(capped(logp, estimator), [10.0, free[1]])
    gradient = jax.grad(lambda x: capped(x, "k3").sum())(logp)
    close(gradient, [0.0, 1 - np.exp(-0.5)], rtol=1e-5)
    gradient = jax.grad(lambda x: capped(x, "k3+").sum())(logp)
    close(gradient, [-3.0, 0.5], rtol=1e-6)

    # Penalty is coef times the estimate.
    logp, ref = make()
    for estimator in ALL:
        kl = kl_token(logp, ref, MASK, estimator=estimator)
        term = kl_to_reference(logp, ref, MASK, estimator=estimator, coef=0.25)
        equal(term, 0.25 * kl)
    default = kl_to_reference(logp, ref, MASK)
    close(default, 1e-3 * k3(logp, ref, MASK), rtol=1e-6)
    assert not np.any(kl_to_reference(logp, ref, MASK, coef=0.0))
    capped = kl_to_reference(logp, ref, MASK, coef=1.0, cap=0.01)
    equal(capped, np.minimum(k3(logp, ref, MASK), np.float32(0.01)))


@for_each("scale", [1e-7, 1e-5, 1e-3, 0.029, 0.031, 0.1, 1.0, 10.0])
def test_k3_is_accurate_and_never_negative_for_small_differences(scale):
    d = np.linspace(-scale, scale, 201).astype(np.float32)
    d64 = d.astype(np.float64)
    value, slope = jax.vmap(jax.value_and_grad(lambda x: k3(x[None], jnp.zeros(1))[0]))(d)
    assert np.all(value >= 0)
    close(value, np.expm1(-d64) + d64, rtol=2e-5, atol=1e-20)
    close(slope, -np.expm1(-d64), rtol=1e-4, atol=1e-20)
    assert np.all(k2(d, np.zeros_like(d)) >= 0)


TERMS = {
    **{e: lambda x, old, ref, m, e=e: kl_to_reference(x, ref, m, estimator=e) for e in ALL},
    "unbiased": lambda x, old, ref, m: kl_unbiased(x, old, ref, m),
    "unbiased_k1": lambda x, old, ref, m: kl_unbiased(x, old, ref, m, estimator="k1"),
}


@for_each("name", TERMS)
def test_masked_cells_are_never_read(name):
    logp, ref = make(5)
    old = make(6)[0]

    @jax.jit
    def both(*arrays):
        loss = lambda x: TERMS[name](x, *arrays[1:], MASK)  # noqa: E731
        return loss(arrays[0]), jax.grad(lambda x: loss(x).sum())(arrays[0])

    clean = both(logp, old, ref)
    assert np.all(np.asarray(clean)[:, ~MASK] == 0)
    for junk in np.float32([1e4, np.nan, np.inf, -np.inf]):
        dirty = [np.where(MASK, x, junk) for x in (logp, old, ref)]
        for only in ((0,), (1,), (2,), (0, 1, 2)):
            arrays = [dirty[i] if i in only else x for i, x in enumerate((logp, old, ref))]
            equal(both(*arrays), clean)


@for_each("name", TERMS)
def test_reference_and_old_policy_are_constants(name):
    logp, ref = map(jnp.asarray, make(7))
    gradients = jax.grad(lambda *x: TERMS[name](*x, MASK).sum(), argnums=(0, 1, 2))(logp, ref, ref)
    assert np.any(gradients[0])
    assert not np.any(gradients[1])
    assert not np.any(gradients[2])


# ReMix: two anchors in shares that add up to 1.

RNG = np.random.default_rng(0)
SHAPE = (2, 3, 5)
CONVEX_LOGP = RNG.normal(-1.5, 0.6, SHAPE).astype(np.float32)
OLD = CONVEX_LOGP + RNG.normal(0, 0.3, SHAPE).astype(np.float32)
CONVEX_REF = CONVEX_LOGP + RNG.normal(0, 0.5, SHAPE).astype(np.float32)
CONVEX_MASK = RNG.random(SHAPE) < 0.8


@for_each(
    ("step", "share"), [(1, 1), (50, 1), (51, 0.9), (60, 0.9), (61, 0.8), (100, 0.5), (900, 0.5)]
)
def test_worked_shares(step, share):
    close(remix_lambda(step), share, rtol=1e-6)


def test_schedule_counts_the_updates_from_one():
    schedule = remix_schedule()

    def step(state, _):
        share, state = schedule.update(jnp.zeros((2, 3)), state, mask=CONVEX_MASK)
        return state, share

    _, shares = jax.lax.scan(step, schedule.init(), length=105)
    close(shares, remix_lambda(jnp.arange(1, 106)), rtol=1e-6)
    assert shares.shape == (105,) and shares.dtype == jnp.float32
    assert schedule == remix_schedule()


def test_kl_convex():
    # Value in float64.
    def k3(d):
        return np.exp(-d) - 1 + d

    logp, old, ref = (x.astype(np.float64) for x in (CONVEX_LOGP, OLD, CONVEX_REF))
    expected = np.where(CONVEX_MASK, 0.25 * (0.7 * k3(logp - ref) + 0.3 * k3(logp - old)), 0)
    got = kl_convex(CONVEX_LOGP, OLD, CONVEX_REF, CONVEX_MASK, share=0.7, coef=0.25)
    close(got, expected, rtol=1e-5, atol=1e-7)

    # A share of one is the penalty of the base.
    equal(
        kl_convex(CONVEX_LOGP, OLD, CONVEX_REF, CONVEX_MASK, coef=0.1),
        kl_to_reference(CONVEX_LOGP, CONVEX_REF, CONVEX_MASK, coef=0.1),
    )

    # Without an old policy only the base counts.
    close(
        kl_convex(CONVEX_LOGP, None, CONVEX_REF, CONVEX_MASK, share=0.6, coef=1.0),
        0.6 * kl_to_reference(CONVEX_LOGP, CONVEX_REF, CONVEX_MASK, coef=1.0),
        rtol=1e-6,
    )

    # A base that was reset to the policy costs nothing.
    loss = lambda x: kl_convex(x, CONVEX_LOGP, CONVEX_LOGP, CONVEX_MASK, share=0.5, coef=1.0).sum()  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(CONVEX_LOGP)
    assert value == 0
    assert not np.any(gradient)

    # No gradient reaches share and coefficient.
    def loss(numbers):
        return kl_convex(
            CONVEX_LOGP, OLD, CONVEX_REF, CONVEX_MASK, share=numbers[0], coef=numbers[1]
        ).sum()

    equal(jax.grad(loss)(jnp.array([0.7, 0.1])), [0.0, 0.0])

    # Masked cells are not read and anchors are constants.
    clean = kl_convex(CONVEX_LOGP, OLD, CONVEX_REF, CONVEX_MASK, share=0.5)
    dirty = [np.where(CONVEX_MASK, x, np.float32(np.nan)) for x in (CONVEX_LOGP, OLD, CONVEX_REF)]
    equal(kl_convex(*dirty, CONVEX_MASK, share=0.5), clean)
    gradients = jax.grad(lambda *x: kl_convex(*x, CONVEX_MASK, share=0.5).sum(), argnums=(0, 1, 2))
    moving, *fixed = gradients(*map(jnp.asarray, dirty))
    assert np.isfinite(moving).all() and np.any(moving)
    assert not np.any(fixed)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (CONVEX_LOGP, OLD, CONVEX_REF)]
    assert kl_convex(*low, CONVEX_MASK).dtype == jnp.float32


def test_a_coefficient_and_a_share_may_have_any_shape_that_broadcasts():
    for fits in ((), (2, 1, 1), (1, 3, 1), SHAPE):
        half, arrays = jnp.full(fits, 0.5), (CONVEX_LOGP, OLD, CONVEX_REF, CONVEX_MASK)
        got = kl_to_reference(CONVEX_LOGP, CONVEX_REF, CONVEX_MASK, coef=half)
        expected = kl_to_reference(CONVEX_LOGP, CONVEX_REF, CONVEX_MASK, coef=0.5)
        close(got, expected, rtol=1e-6)
        close(kl_convex(*arrays, share=half), kl_convex(*arrays, share=0.5), rtol=1e-6)


def test_the_gate_closes_above_the_mean_divergence_of_all_tokens():
    new, old = make()
    d = np.where(MASK, new.astype(np.float64) - old, 0.0)
    divergence = (np.exp(d) - 1 - d)[MASK].mean()
    gate = jax.jit(kl_gate, static_argnames="max_kl")
    junk = np.where(MASK, new, np.nan)
    for logp in (new, junk):
        assert float(gate(logp, old, MASK, max_kl=float(divergence) * 1.001)) == 1.0
        assert float(gate(logp, old, MASK, max_kl=float(divergence) * 0.999)) == 0.0
    assert float(gate(old, old, MASK, max_kl=1e-9)) == 1.0
    assert float(gate(junk, old, np.zeros_like(MASK), max_kl=1e-9)) == 1.0
    assert float(gate(np.full_like(old, np.nan), old, MASK, max_kl=1.0)) == 0.0
