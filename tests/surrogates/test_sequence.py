"""Surrogates of whole responses: GSPO, LUSPO, GMPO and VESPO.

With d_t = log pi(t) - log old(t) over the n tokens of a response, its ratio is

    s = exp(mean_t d_t), of d = (0.2, -0.1, 0.05) exp(0.05) = 1.051271.

- GSPO clips s once a response, so that a clipped response has no gradient at any token.
- LUSPO is GSPO times n: lengths 2 and 4 with A = 1 and -1 have the mean loss (-2 + 4) / 2 = 1.
- GMPO is the geometric mean of clipped ratios: d = (0.6, -0.1, 0.2), A = 1 and a clip of 0.4 give
  -exp(0.5 / 3) = -1.181360, and the clipped token alone has no gradient.
- VESPO weighs by phi(w) = w^k exp(lambda (1 - w)) of the ratio of the whole response, which is
  1 at w = 1 and greatest at k / lambda: phi(0.5) = 1.120422 for k = 2, lambda = 3.

The values and gradients of these are compared with float64 in `test_surrogates.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, compiled, equal
from rows import for_each

from jaxrl_llm.aggregate import sequence_mean, weighted_sum
from jaxrl_llm.surrogates import (
    gmpo,
    gspo,
    gspo_token,
    gspo_turns,
    luspo,
    reinforce,
    sequence_ratio,
    vespo,
    vespo_weights,
)

RNG = np.random.default_rng(0)
OLD = jnp.asarray(RNG.normal(-1.0, 0.5, (6, 5)), jnp.float32)
LOGP = OLD + jnp.asarray(RNG.normal(0, 0.3, (6, 5)), jnp.float32)
MASK = jnp.arange(5) < jnp.array([5, 3, 1, 2, 0, 4])[:, None]
ADVANTAGES = jnp.array([1.0, -1.0, 0.5, -2.0, 3.0, 0.0])


@compiled
def loss_and_gradient(surrogate, logp, advantages=ADVANTAGES, old=OLD, mask=MASK, **options):
    def loss(x):
        return weighted_sum(surrogate(x, old, advantages, mask, **options), sequence_mean(mask))

    return jax.value_and_grad(loss)(logp)


def test_sequence_ratio():
    # Ratio worked number.
    difference = jnp.array([0.2, -0.1, 0.05])
    ratio = sequence_ratio(difference - 1.0, jnp.full(3, -1.0), jnp.ones(3, bool))
    close(ratio, 1.051271, atol=1e-6)

    # Ratio of an empty sequence is one.
    ratio = sequence_ratio(jnp.full((1, 3), jnp.nan), None, jnp.zeros((1, 3), bool))
    equal(ratio, [1.0])

    # Ratio adds raw differences.
    # 60/3 = 20 before the cap; a clamp to 20 a token would give 20/3 and stay below the cap.
    logp, mask = jnp.array([60.0, 0.0, 0.0]), jnp.ones(3, bool)
    close(sequence_ratio(logp, jnp.zeros(3), mask), np.exp(10.0), rtol=1e-5)
    logp = jnp.array([-27.0, 0.0, 0.0])
    close(sequence_ratio(logp, jnp.zeros(3), mask), np.exp(-9.0), rtol=1e-5)


def test_gspo_clips_a_whole_sequence():
    # Clip is by sequence.
    old, mask = jnp.zeros((1, 3)), jnp.ones((1, 3), bool)
    logp = jnp.array([[0.6, -0.1, 0.1]])  # s = e^0.2
    for surrogate in (gspo, gspo_token):
        options = {"advantages": jnp.ones(1), "old": old, "mask": mask, "eps_high": 0.1}
        value, gradient = loss_and_gradient(surrogate, logp, **options)
        close(value, -1.1, rtol=1e-6)
        assert not np.any(gradient)
        value, gradient = loss_and_gradient(surrogate, logp, **{**options, "eps_high": 0.3})
        close(value, -np.exp(0.2), rtol=1e-6)
        close(gradient, np.full((1, 3), -np.exp(0.2) / 3), rtol=1e-5)

    # Beyond the cap the value is flat.
    old, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    for surrogate in (gspo, gspo_token):
        value, gradient = loss_and_gradient(
            surrogate, jnp.full((1, 2), 11.0), advantages=-jnp.ones(1), old=old, mask=mask
        )
        close(value, np.exp(10.0), rtol=1e-5)
        assert not np.any(gradient)


def test_luspo():
    # Luspo worked number.
    mask = jnp.arange(4) < jnp.array([2, 4])[:, None]
    logp = jnp.full((2, 4), -1.0)
    loss = luspo(logp, None, jnp.array([1.0, -1.0]), mask)
    close(weighted_sum(loss, sequence_mean(mask)), 1.0, rtol=1e-6)

    # Luspo clips a whole sequence.
    old, mask = jnp.zeros((1, 3)), jnp.ones((1, 3), bool)
    options = {"advantages": jnp.ones(1), "old": old, "mask": mask}
    value, gradient = loss_and_gradient(luspo, jnp.full((1, 3), 0.1), **options)
    close(value, -3 * 1.0025, rtol=1e-6)
    assert not np.any(gradient)


def test_one_turn_is_a_sequence_and_turns_are_sequences():
    one = {"turn_ids": jnp.zeros((6, 5), jnp.int32)}
    options = {"eps_low": 0.1, "eps_high": 0.15}
    plain = loss_and_gradient(gspo_token, LOGP, **options)
    turns = loss_and_gradient(gspo_turns, LOGP, **options, **one)
    for got, expected in zip(turns, plain, strict=True):
        close(got, expected, atol=1e-6)
    # Two turns in one row are two rows; what is of no turn is not read.
    logp, old = LOGP[:1], OLD[:1]
    turn_ids = jnp.array([[0, 0, -1, 1, 1]])
    both = gspo_turns(logp.at[0, 2].set(9.0), old, ADVANTAGES[:1], MASK[:1], turn_ids=turn_ids)
    for turn in (slice(0, 2), slice(3, 5)):
        mask = jnp.ones((1, 2), bool)
        alone = gspo(logp[:, turn], old[:, turn], ADVANTAGES[:1], mask)
        close(both[:, turn], alone, atol=1e-6)
    assert float(both[0, 2]) == 0.0


# GMPO: the geometric mean of clipped ratios.


@jax.jit
def value_and_gradient(log_ratio, advantage, eps_low=0.4, eps_high=0.4):
    """Loss of one sequence and its gradient, under the mean over sequences."""
    old = jnp.full(log_ratio.shape, -2.0)
    mask = jnp.ones(log_ratio.shape, bool)

    def loss(x):
        tokens = gmpo(x, old, advantage, mask, eps_low=eps_low, eps_high=eps_high)
        return weighted_sum(tokens, sequence_mean(mask))

    return jax.value_and_grad(loss)(old + log_ratio)


@for_each(
    ("advantage", "value", "gradient"),
    [
        (1.0, -1.181360, [0.0, -0.393787, -0.393787]),
        (-1.0, 1.262802, [0.420934, 0.420934, 0.420934]),
        (0.0, 0.0, [0.0, 0.0, 0.0]),
    ],
)
def test_worked_numbers(advantage, value, gradient):
    got = value_and_gradient(jnp.array([0.6, -0.1, 0.2]), jnp.float32(advantage))
    close(got[0], value, atol=2e-6)
    close(got[1], gradient, atol=2e-6)
    assert (np.asarray(got[1]) == 0).tolist() == [g == 0 for g in gradient]


def test_gmpo():
    # A clipped token keeps the others moving.
    # Far above for a good sequence, far below for a bad one: that token alone has no gradient.
    for sign in (1.0, -1.0):
        _, gradient = value_and_gradient(sign * jnp.array([0.5, 0.1, -0.1]), jnp.float32(sign))
        assert (np.asarray(gradient) == 0).tolist() == [True, False, False]

    # An empty sequence is zero and does not count.
    mask = jnp.array([[True, True], [False, False]])
    loss = gmpo(jnp.zeros((2, 2)), None, jnp.array([1.0, jnp.nan]), mask)
    assert loss.tolist() == [[-1.0, -1.0], [0.0, 0.0]]
    assert weighted_sum(loss, sequence_mean(mask)) == -1.0

    # Nothing but the clip bounds the mean.
    value, _ = value_and_gradient(jnp.array([30.0]), jnp.float32(-1.0))
    close(value, np.exp(30.0), rtol=1e-5)
    value, gradient = value_and_gradient(jnp.array([30.0]), jnp.float32(1.0))
    close(value, -np.exp(0.4), rtol=1e-6)
    assert gradient[0] == 0

    # Without an advantage no ratio is too far.
    mask, advantages = jnp.ones((1, 2), bool), jnp.zeros(1)
    loss = lambda x: gmpo(x, jnp.zeros((1, 2)), advantages, mask).sum()  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(jnp.full((1, 2), 200.0))
    assert value == 0
    equal(gradient, [[0.0, 0.0]])


# VESPO: the soft weight of a sequence, and the policy gradient with it.

VESPO_RNG = np.random.default_rng(0)
VESPO_OLD = VESPO_RNG.normal(-2, 1, (3, 4, 5)).astype(np.float32)
VESPO_LOGP = (VESPO_OLD + VESPO_RNG.normal(0, 0.4, VESPO_OLD.shape)).astype(np.float32)
BEHAVIOR = (VESPO_OLD + VESPO_RNG.normal(0, 0.2, VESPO_OLD.shape)).astype(np.float32)
VESPO_MASK = VESPO_RNG.random(VESPO_OLD.shape) < 0.7
VESPO_MASK[0, 0] = False
VESPO_ADVANTAGES = VESPO_RNG.normal(size=VESPO_MASK.shape[:-1]).astype(np.float32)


def reference(logp, behavior, advantages, mask, pos=(2.0, 3.0), neg=(3.0, 2.0)):
    """Sequence by sequence in float64."""
    out = np.zeros(mask.shape)
    for i in np.ndindex(advantages.shape):
        d = (logp[i].astype(np.float64) - behavior[i])[mask[i]]
        log_w = np.clip(d.sum(), np.log(1e-8), 20.0)
        k, rate = pos if advantages[i] >= 0 else neg
        out[i][mask[i]] = np.exp(log_w * k + rate * (1 - np.exp(log_w)))
    return out


def test_vespo_weights():
    # Vespo worked numbers.
    logp, mask = jnp.log(jnp.array([[0.5], [2.0], [1.0], [1.0]])), jnp.ones((4, 1), bool)
    advantages = jnp.array([1.0, -1.0, 1.0, -1.0])
    phi = vespo_weights(logp, jnp.zeros((4, 1)), advantages, mask)
    close(phi[:, 0], [1.120422, 1.082682, 1.0, 1.0], atol=2e-6)

    # Weights equal the float64 reference.
    phi = vespo_weights(VESPO_LOGP, BEHAVIOR, VESPO_ADVANTAGES, VESPO_MASK)
    close(phi, reference(VESPO_LOGP, BEHAVIOR, VESPO_ADVANTAGES, VESPO_MASK), rtol=2e-5, atol=1e-7)
    options = {"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 0.0, "lambda_neg": 4.0}
    phi = vespo_weights(VESPO_LOGP, BEHAVIOR, VESPO_ADVANTAGES, VESPO_MASK, **options)
    expected = reference(
        VESPO_LOGP, BEHAVIOR, VESPO_ADVANTAGES, VESPO_MASK, pos=(1.0, 0.5), neg=(0.0, 4.0)
    )
    close(phi, expected, rtol=2e-5, atol=1e-7)

    # The weight is greatest at k over lambda and dies out.
    w = np.array([0.1, 0.5, 2 / 3, 0.9, 3.0, 40.0], np.float32)
    phi = vespo_weights(
        np.log(w)[:, None],
        np.zeros((6, 1), np.float32),
        np.ones(6, np.float32),
        np.ones((6, 1), bool),
    )[:, 0]
    assert int(jnp.argmax(phi)) == 2
    assert float(phi[-1]) < 1e-40


@for_each("shift", [-1e4, -30.0, 30.0, 1e4])
def test_far_off_it_is_finite(shift):
    phi = vespo_weights(VESPO_OLD + shift, VESPO_OLD, VESPO_ADVANTAGES, VESPO_MASK)
    loss = vespo(VESPO_OLD + shift, VESPO_OLD, VESPO_ADVANTAGES, VESPO_MASK)
    assert np.isfinite(phi).all() and np.isfinite(loss).all()


def test_vespo():
    # Token advantages choose their branch token by token.
    advantages = np.where(VESPO_RNG.random(VESPO_MASK.shape) < 0.5, 1.0, -1.0).astype(np.float32)
    phi = vespo_weights(VESPO_LOGP, BEHAVIOR, advantages, VESPO_MASK)
    good = vespo_weights(
        VESPO_LOGP, BEHAVIOR, np.ones(VESPO_MASK.shape[:-1], np.float32), VESPO_MASK
    )
    bad = vespo_weights(
        VESPO_LOGP, BEHAVIOR, -np.ones(VESPO_MASK.shape[:-1], np.float32), VESPO_MASK
    )
    equal(phi, jnp.where(advantages > 0, good, bad))

    # Loss and gradient are those of weighted reinforce.
    phi = reference(VESPO_LOGP, BEHAVIOR, VESPO_ADVANTAGES, VESPO_MASK)
    options = {"behavior_logp": BEHAVIOR}
    loss = vespo(VESPO_LOGP, VESPO_OLD, VESPO_ADVANTAGES, VESPO_MASK, **options)
    expected = np.where(VESPO_MASK, -phi * VESPO_ADVANTAGES[..., None] * VESPO_LOGP, 0.0)
    close(loss, expected, rtol=2e-5, atol=1e-6)
    gradient = jax.grad(
        lambda x: vespo(x, VESPO_OLD, VESPO_ADVANTAGES, VESPO_MASK, **options).sum()
    )(VESPO_LOGP)
    close(gradient, -phi * VESPO_ADVANTAGES[..., None], rtol=2e-5, atol=1e-6)

    # An impossible token of advantage zero gives exactly zero.
    logp, mask, advantages = jnp.array([[-jnp.inf, -1.0]]), jnp.ones((1, 2), bool), jnp.zeros(1)
    loss = lambda x: vespo(x, None, advantages, mask)  # noqa: E731
    assert not np.any(loss(logp))
    assert not np.any(jax.grad(lambda x: loss(x).sum())(logp))

    # Without a behavior policy it takes the proximal one.
    equal(
        vespo(VESPO_LOGP, VESPO_OLD, VESPO_ADVANTAGES, VESPO_MASK),
        vespo(VESPO_LOGP, BEHAVIOR, VESPO_ADVANTAGES, VESPO_MASK, behavior_logp=VESPO_OLD),
    )
    for old, behavior in ((None, None), (None, VESPO_LOGP), (VESPO_OLD, VESPO_LOGP)):
        equal(
            vespo(VESPO_LOGP, old, VESPO_ADVANTAGES, VESPO_MASK, behavior_logp=behavior),
            reinforce(VESPO_LOGP, None, VESPO_ADVANTAGES, VESPO_MASK),
        )


def test_masked_cells_are_never_read():
    cotangent = jnp.ones(VESPO_MASK.shape)

    def both(logp, old, behavior, advantages):
        loss = lambda x: vespo(x, old, advantages, VESPO_MASK, behavior_logp=behavior)  # noqa: E731
        value, pullback = jax.vjp(loss, logp)
        return value, pullback(cotangent)[0]

    clean = both(VESPO_LOGP, VESPO_OLD, BEHAVIOR, VESPO_ADVANTAGES)
    for junk in (1e4, np.nan, np.inf):
        arrays = [
            np.where(VESPO_MASK, x, np.float32(junk)) for x in (VESPO_LOGP, VESPO_OLD, BEHAVIOR)
        ]
        advantages = np.where(VESPO_MASK.any(-1), VESPO_ADVANTAGES, np.float32(junk))
        value, gradient = both(*arrays, advantages)
        equal(value, clean[0])
        equal(gradient, clean[1])


def test_vespo_in_bfloat16():
    low = [jnp.asarray(x, jnp.bfloat16) for x in (VESPO_LOGP, VESPO_OLD, VESPO_ADVANTAGES)]
    loss = jax.jit(vespo)(*low, VESPO_MASK)
    assert loss.dtype == jnp.float32
    close(loss, vespo(*low, VESPO_MASK), rtol=1e-5, atol=1e-6)
