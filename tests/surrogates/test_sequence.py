import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.aggregate import sequence_mean, sequence_sum, weighted_sum
from jaxrl_llm.surrogates import (
    gspo,
    gspo_token,
    luspo,
    ppo_clip,
    reinforce,
    sapo,
    sapo_sequence,
    sequence_ratio,
)

RNG = np.random.default_rng(0)
OLD = jnp.asarray(RNG.normal(-1.0, 0.5, (6, 5)), jnp.float32)
LOGP = OLD + jnp.asarray(RNG.normal(0, 0.3, (6, 5)), jnp.float32)
MASK = jnp.arange(5) < jnp.array([5, 3, 1, 2, 0, 4])[:, None]
ADVANTAGES = jnp.array([1.0, -1.0, 0.5, -2.0, 3.0, 0.0])


def loss_and_gradient(surrogate, logp, advantages=ADVANTAGES, old=OLD, mask=MASK, **options):
    def loss(x):
        return weighted_sum(surrogate(x, old, advantages, mask, **options), sequence_mean(mask))

    return jax.value_and_grad(loss)(logp)


def test_ratio_worked_number():
    difference = jnp.array([0.2, -0.1, 0.05])
    ratio = sequence_ratio(difference - 1.0, jnp.full(3, -1.0), jnp.ones(3, bool))
    np.testing.assert_allclose(ratio, 1.051271, atol=1e-6)


def test_ratio_of_an_empty_sequence_is_one():
    ratio = sequence_ratio(jnp.full((1, 3), jnp.nan), None, jnp.zeros((1, 3), bool))
    np.testing.assert_array_equal(ratio, [1.0])


def test_ratio_adds_raw_differences():
    # 60/3 = 20 before the cap; a clamp to 20 a token would give 20/3 and stay below the cap.
    logp, mask = jnp.array([60.0, 0.0, 0.0]), jnp.ones(3, bool)
    np.testing.assert_allclose(sequence_ratio(logp, jnp.zeros(3), mask), np.exp(10.0), rtol=1e-5)
    logp = jnp.array([-27.0, 0.0, 0.0])
    np.testing.assert_allclose(sequence_ratio(logp, jnp.zeros(3), mask), np.exp(-9.0), rtol=1e-5)


def test_on_policy_value_is_minus_the_advantage():
    for surrogate in (gspo, gspo_token):
        loss = surrogate(LOGP, LOGP, ADVANTAGES, MASK)
        np.testing.assert_array_equal(loss, jnp.where(MASK, -ADVANTAGES[:, None], 0.0))


def test_unclipped_gradient_is_minus_a_s_over_the_length():
    free = {"eps_low": np.inf, "eps_high": np.inf}
    _, gradient = loss_and_gradient(gspo, LOGP, **free)
    s = sequence_ratio(LOGP, OLD, MASK)[:, None]
    lengths = jnp.maximum(MASK.sum(-1, keepdims=True), 1)
    non_empty = 5  # the mean over sequences divides by this
    expected = jnp.where(MASK, -ADVANTAGES[:, None] * s / lengths / non_empty, 0.0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"eps_low": 0.05, "eps_high": 0.08}, {"eps_low": 5.0, "eps_high": 5.0}]
)
@pytest.mark.parametrize("shift", [0.0, 3e-4, 12.0])
def test_token_form_equals_sequence_form(options, shift):
    logp = OLD + shift if shift else LOGP
    plain = loss_and_gradient(gspo, logp, **options)
    token = loss_and_gradient(gspo_token, logp, **options)
    spread = jnp.broadcast_to(ADVANTAGES[:, None], LOGP.shape)
    per_token = loss_and_gradient(gspo_token, logp, advantages=spread, **options)
    for got in (token, per_token):
        np.testing.assert_allclose(got[0], plain[0], rtol=1e-6)
        np.testing.assert_allclose(got[1], plain[1], rtol=1e-5, atol=1e-9)


def test_clip_is_by_sequence():
    old, mask = jnp.zeros((1, 3)), jnp.ones((1, 3), bool)
    logp = jnp.array([[0.6, -0.1, 0.1]])  # s = e^0.2
    for surrogate in (gspo, gspo_token):
        options = {"advantages": jnp.ones(1), "old": old, "mask": mask, "eps_high": 0.1}
        value, gradient = loss_and_gradient(surrogate, logp, **options)
        np.testing.assert_allclose(value, -1.1, rtol=1e-6)
        assert not np.any(gradient)
        value, gradient = loss_and_gradient(surrogate, logp, **{**options, "eps_high": 0.3})
        np.testing.assert_allclose(value, -np.exp(0.2), rtol=1e-6)
        np.testing.assert_allclose(gradient, np.full((1, 3), -np.exp(0.2) / 3), rtol=1e-5)


def test_beyond_the_cap_the_value_is_flat():
    old, mask = jnp.zeros((1, 2)), jnp.ones((1, 2), bool)
    for surrogate in (gspo, gspo_token):
        value, gradient = loss_and_gradient(
            surrogate, jnp.full((1, 2), 11.0), advantages=-jnp.ones(1), old=old, mask=mask
        )
        np.testing.assert_allclose(value, np.exp(10.0), rtol=1e-5)
        assert not np.any(gradient)


@pytest.mark.parametrize("surrogate", [gspo, gspo_token])
def test_one_token_is_ppo(surrogate):
    logp, old, mask = LOGP[:, :1], OLD[:, :1], jnp.ones((6, 1), bool)
    options = {"old": old, "mask": mask, "eps_low": 0.1, "eps_high": 0.15}
    got = loss_and_gradient(surrogate, logp, **options)
    expected = loss_and_gradient(ppo_clip, logp, **options)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-6)


def test_token_advantages_act_token_by_token():
    advantages = jnp.asarray(RNG.normal(size=(6, 5)), jnp.float32)
    _, gradient = loss_and_gradient(
        gspo_token, LOGP, advantages=advantages, eps_low=np.inf, eps_high=np.inf
    )
    s = sequence_ratio(LOGP, OLD, MASK)[:, None]
    np.testing.assert_allclose(gradient, -advantages * s * sequence_mean(MASK), rtol=1e-5)


def test_luspo_worked_number():
    mask = jnp.arange(4) < jnp.array([2, 4])[:, None]
    logp = jnp.full((2, 4), -1.0)
    loss = luspo(logp, None, jnp.array([1.0, -1.0]), mask)
    np.testing.assert_allclose(weighted_sum(loss, sequence_mean(mask)), 1.0, rtol=1e-6)


@pytest.mark.parametrize("epsilon", [0.02, np.inf])
def test_luspo_is_length_times_gspo_at_equal_lengths(epsilon):
    mask = jnp.zeros((6, 5), bool).at[:, 1:4].set(True)
    options = {"mask": mask, "eps_low": epsilon, "eps_high": epsilon}
    for got, expected in zip(
        loss_and_gradient(luspo, LOGP, **options),
        loss_and_gradient(gspo, LOGP, **options),
        strict=True,
    ):
        np.testing.assert_allclose(got, 3 * expected, rtol=1e-6, atol=1e-6)


def test_luspo_gradient_of_a_token_does_not_depend_on_the_length():
    _, gradient = loss_and_gradient(luspo, LOGP, eps_low=np.inf, eps_high=np.inf)
    s = sequence_ratio(LOGP, OLD, MASK)[:, None]
    expected = jnp.where(MASK, -ADVANTAGES[:, None] * s / 5, 0.0)  # five are not empty
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_luspo_on_policy_has_the_gradient_of_the_summed_policy_gradient():
    _, gradient = loss_and_gradient(luspo, LOGP, old=LOGP)
    weights = sequence_sum(MASK)
    plain = jax.grad(lambda x: weighted_sum(reinforce(x, None, ADVANTAGES, MASK), weights))(LOGP)
    np.testing.assert_allclose(gradient, plain, rtol=1e-6)


def test_luspo_clips_a_whole_sequence():
    old, mask = jnp.zeros((1, 3)), jnp.ones((1, 3), bool)
    options = {"advantages": jnp.ones(1), "old": old, "mask": mask}
    value, gradient = loss_and_gradient(luspo, jnp.full((1, 3), 0.1), **options)
    np.testing.assert_allclose(value, -3 * 1.0025, rtol=1e-6)
    assert not np.any(gradient)


def test_luspo_refuses_bad_options():
    with pytest.raises(ValueError, match=r"luspo: advantages .*\(6,\); got \(6, 5\)\."):
        luspo(LOGP, OLD, jnp.ones((6, 5)), MASK)
    with pytest.raises(ValueError, match="luspo: eps_low must not be negative"):
        luspo(LOGP, OLD, ADVANTAGES, MASK, eps_low=-0.1)


def test_gspo_refuses_token_advantages():
    with pytest.raises(ValueError, match=r"gspo: advantages .*\(6,\); got \(6, 5\).*gspo_token"):
        gspo(LOGP, OLD, jnp.ones((6, 5)), MASK)


@pytest.mark.parametrize("surrogate", [gspo, gspo_token])
def test_a_dual_clip_below_one_is_refused(surrogate):
    with pytest.raises(ValueError, match=f"^{surrogate.__name__}: dual_clip must be above 1"):
        surrogate(LOGP, OLD, ADVANTAGES, MASK, dual_clip=0.5)


@pytest.mark.parametrize(
    ("advantages", "options", "message"),
    [
        (LOGP, {}, r"advantages .*\(6,\); got \(6, 5\). Use sapo"),
        (ADVANTAGES, {"tau_pos": 0.0}, "tau_pos must be above 0"),
        (ADVANTAGES, {"tau_neg": np.inf}, "tau_neg must be finite"),
    ],
)
def test_sapo_sequence_refuses_bad_options(advantages, options, message):
    with pytest.raises(ValueError, match=f"^sapo_sequence: {message}"):
        sapo_sequence(LOGP, OLD, advantages, MASK, **options)


def test_one_token_sequences_are_sapo():
    ones = (LOGP[:, :1], OLD[:, :1], ADVANTAGES, MASK[:, :1])
    np.testing.assert_allclose(sapo_sequence(*ones), sapo(*ones), rtol=1e-6)
