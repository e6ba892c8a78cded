"""The effect of more rollouts per prompt: flow of probability mass, and unsampled answers.

- ``probs``: floating point ``[..., V]``, adding up to 1.
- A wrong dtype raises TypeError; shapes that differ and a bad number raise ValueError.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks


class MassBalance(NamedTuple):
    """Terms of the first-order change of the mass on right answers, ``[...]`` float32.

    Their sum, times the learning rate over the number of rollouts, is the change.

    Attributes:
      reward: S_R, reward of the mass that was sampled.
      correct: Contribution of the sampled right answers; never negative.
      wrong: Contribution of the sampled wrong answers; never negative.
      unsampled: Contribution of the answers that were not sampled: of either sign, 0 if all were.
    """

    reward: Array
    correct: Array
    wrong: Array
    unsampled: Array


def mass_balance(
    probs: Array,
    correct: Array,
    sampled: Array,
    *,
    correct_reward: float = 1.0,
    wrong_reward: float = -1.0,
) -> MassBalance:
    """How one policy-gradient step on sampled answers moves mass between right and wrong answers.

        S_R       = R_c P_pos + R_w P_neg
        correct   = (R_c - S_R) Q_neg A2
        wrong     = (S_R - R_w) Q_pos B2
        unsampled = S_R (Q_pos U_neg2 - Q_neg U_pos2)
        change of Q_pos = lr / N (correct + wrong + unsampled),  to first order in lr

    for a softmax over answers and the objective 1/N sum over the sampled of R_i p_i. Q are the
    masses of all right and wrong answers, P of the sampled ones; A2, B2 are the sums of p^2 over
    the sampled right and wrong answers, U_pos2, U_neg2 over those not sampled. Only the last term
    can lower the mass of right answers, and it vanishes as more answers are sampled.

    Args:
      probs: See the module.
      correct: bool ``[..., V]``, True for right answers.
      sampled: bool ``[..., V]``, True for answers drawn at least once.
      correct_reward: R_c, 0 or above.
      wrong_reward: R_w, 0 or below.

    Returns:
      :class:`MassBalance`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> probs = jnp.array([0.4, 0.3, 0.2, 0.1])
      >>> correct, sampled = jnp.array([1, 1, 0, 0], bool), jnp.array([1, 0, 1, 0], bool)
      >>> balance = jr.diagnostics.mass_balance(probs, correct, sampled)
      >>> [round(float(x), 4) for x in balance]
      [0.2, 0.0384, 0.0336, -0.004]

    References:
      BroRL (arXiv:2510.01180). PAPER reading, from its full text.
    """
    function = "mass_balance"
    checks.check_min_rank(function, 1, probs=probs)
    checks.check_float(function, probs=probs)
    checks.check_min_rank(function, 1, correct=correct, sampled=sampled)
    checks.check_bool(function, correct=correct, sampled=sampled)
    checks.check_same_shape(function, probs=probs, correct=correct, sampled=sampled)
    checks.check_non_negative(function, correct_reward=correct_reward)
    if wrong_reward > 0:
        raise ValueError(f"{function}: wrong_reward must not be above 0; got {wrong_reward:g}.")
    probs = jnp.asarray(probs, jnp.float32)

    def total(where, power=1):
        return jnp.sum(jnp.where(where, probs**power, 0.0), axis=-1)

    right, wrong = total(correct), total(~correct)
    reward = correct_reward * total(correct & sampled) + wrong_reward * total(~correct & sampled)
    unsampled = right * total(~correct & ~sampled, 2) - wrong * total(correct & ~sampled, 2)
    return MassBalance(
        reward=reward,
        correct=(correct_reward - reward) * wrong * total(correct & sampled, 2),
        wrong=(reward - wrong_reward) * right * total(~correct & sampled, 2),
        unsampled=reward * unsampled,
    )


def unsampled_second_moment(probs: Array, *, rollouts: int) -> Array:
    """Expected sum of squared probabilities of the answers that N rollouts miss.

        sum_i p_i^2 (1 - p_i)^N

    It bounds the term of :func:`mass_balance` that can lower the mass of right answers.

    Args:
      probs: See the module.
      rollouts: N, 0 or above.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> probs = jnp.array([0.4, 0.3, 0.2, 0.1])
      >>> round(float(jr.diagnostics.unsampled_second_moment(probs, rollouts=16)), 6)
      0.003323

    References:
      BroRL (arXiv:2510.01180). PAPER reading, from its full text.
    """
    checks.check_min_rank("unsampled_second_moment", 1, probs=probs)
    checks.check_float("unsampled_second_moment", probs=probs)
    checks.check_non_negative("unsampled_second_moment", rollouts=rollouts)
    probs = jnp.asarray(probs, jnp.float32)
    return jnp.sum(probs**2 * (1.0 - probs) ** rollouts, axis=-1)
