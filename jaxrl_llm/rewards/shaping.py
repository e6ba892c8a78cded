"""Rewards from a judge's verdict: plain functions of arrays, for a chain or for the host.

They come before the advantage, at the head of its chain::

    chain(stateless(fapo_reward, lam=1.0), stateless(advantages.grpo))

``rewards`` are floating point ``[..., G]`` and ``where`` is bool ``[..., G]``, True for rollouts to
include; the rest are not read and get 0. Every function returns rewards of the same shape, float32,
for any advantage, and raises TypeError for another dtype and ValueError where shapes differ or a
number is out of its range.
"""

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats


def fapo_reward(
    rewards: Array, *, flawed: Array, lam: float = 1.0, where: Array | None = None
) -> Array:
    """Less reward for a right answer with flawed reasoning than for a clean one.

        r_i = 2 c_i - 1 - lam c_i f_i,    c_i = [rewards_i > 0],  f_i = [flawed_i]

    With ``lam=1`` a clean right answer gets 1, a flawed one 0, a wrong one -1. With a group mean as
    the baseline, the advantage of a flawed answer is positive as long as wrong answers outnumber
    clean ones, and negative later. ``lam=0`` ignores flaws, ``lam=2`` counts them as wrong.

    Args:
      rewards, where: See the module; any shape. Above 0 is a right answer, as 0/1 or -1/1.
      flawed: bool ``[..., G]``, True where the judge found a flaw. It does not affect wrong
        answers; an unreadable verdict is False.
      lam: Cost of a flaw, 0 or above.

    Returns:
      Rewards ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> flawed = jnp.array([False, True, False, True])
      >>> jr.rewards.fapo_reward(jnp.array([1.0, 1.0, 0.0, 0.0]), flawed=flawed).tolist()
      [1.0, 0.0, -1.0, -1.0]

    References:
      FAPO, flawed-aware policy optimization (arXiv:2510.22543), as in the released reward function
      (verl-recipe), with GRPO's advantage after it.
    """
    checks.check_min_rank("fapo_reward", 0, rewards=rewards, flawed=flawed)
    checks.check_float("fapo_reward", rewards=rewards)
    checks.check_bool("fapo_reward", flawed=flawed, where=where)
    checks.check_same_shape("fapo_reward", rewards=rewards, flawed=flawed, where=where)
    checks.check_non_negative("fapo_reward", lam=lam)
    rewards = masking.zero_masked(rewards, where)
    right = rewards > 0
    shaped = jnp.where(right, jnp.where(flawed, 1.0 - lam, 1.0), -1.0)
    # A comparison swallows a NaN, which an included reward must not hide.
    return masking.zero_masked(jnp.where(jnp.isnan(rewards), jnp.nan, shaped), where)


def genrm_step_reward(
    predicted: Array, truth: Array, steps: Array, *, valid: Array | None = None
) -> Array:
    """Reward of a judge that names the first wrong step, by its distance from the truth.

        truth = -1:   1 if predicted = -1, else -1
        truth >= 0:   -1 if predicted = -1, else 1 - |predicted - truth| / steps
        not valid, or predicted outside -1 .. steps - 1:   -1

    Args:
      predicted: int ``[...]``, the step that the judge names, from 0; -1 for "no error".
      truth: int ``[...]``, the first wrong step, or -1.
      steps: int ``[...]``, number of steps of the solution.
      valid: bool ``[...]``, False where the judge's answer is unreadable; None if all are readable.

    Returns:
      Rewards ``[...]`` in [-1, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> predicted, truth = jnp.array([3, 2, -1, 7]), jnp.array([3, 4, 3, 3])
      >>> jr.rewards.genrm_step_reward(predicted, truth, jnp.full(4, 5)).round(3).tolist()
      [1.0, 0.6..., -1.0, -1.0]

    References:
      FAPO (arXiv:2510.22543), the training reward of its generative judge (verl-recipe).
    """
    function = "genrm_step_reward"
    checks.check_min_rank(function, 0, predicted=predicted, truth=truth, steps=steps)
    checks.check_integer(function, predicted=predicted, truth=truth, steps=steps)
    checks.check_bool(function, valid=valid)
    checks.check_same_shape(function, predicted=predicted, truth=truth, steps=steps, valid=valid)
    predicted, truth = jnp.asarray(predicted), jnp.asarray(truth)
    legible = (predicted >= -1) & (predicted < jnp.asarray(steps))
    legible = legible if valid is None else legible & valid
    distance = jnp.abs(predicted - truth) / jnp.maximum(steps, 1)
    located = jnp.where(predicted == -1, -1.0, 1.0 - distance)
    reward = jnp.where(truth == -1, jnp.where(predicted == -1, 1.0, -1.0), located)
    return jnp.where(legible, reward, -1.0).astype(jnp.float32)


def steered_bonus(
    rewards: Array, *, steered: Array, bonus: Array | float, where: Array | None = None
) -> Array:
    """Multiplies the rewards of steered rollouts by a factor; the form for a chain.

        r_i bonus where steered, else r_i

    Args:
      rewards, where: See the module.
      steered: bool ``[..., G]``, True for steered rollouts.
      bonus: The factor, such as ``curation.icpo_bonus``: a number, or an array of one value
        repeated, as a controller returns it.

    Returns:
      Rewards ``[..., G]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> steered = jnp.array([False, True])
      >>> jr.rewards.steered_bonus(jnp.ones(2), steered=steered, bonus=1.5).tolist()
      [1.0, 1.5]

    References:
      ICPO (arXiv:2510.26519); for rewards of 0 and 1 it agrees with the released code.
    """
    stats.check_group("steered_bonus", rewards, where)
    checks.check_min_rank("steered_bonus", 1, steered=steered)
    checks.check_bool("steered_bonus", steered=steered)
    checks.check_same_shape("steered_bonus", rewards=rewards, steered=steered)
    factor = jnp.max(jnp.asarray(bonus, jnp.float32))
    rewards = masking.zero_masked(rewards, where)
    return jnp.where(steered, rewards * factor, rewards)
