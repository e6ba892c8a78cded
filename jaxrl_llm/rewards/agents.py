"""Rewards of agents that another agent calls."""

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking


def call_rewards(
    formats: Array,
    rewards: Array,
    *,
    call_where: Array | None = None,
    quality: Array | None = None,
    weights: tuple[float, float, float] = (0.1, 0.9, 0.0),
    form: Literal["weighted", "steps"] = "weighted",
) -> Array:
    """The reward of each call: its format, the outcome of the calling rollout, its quality.

        "weighted":  b1 format + b2 reward + b3 quality
        "steps":     0 where format is 0, else 0.1 where reward is at most 0.1, else 1

    Args:
      formats: ``[..., G, S]``, floating point, format rewards of up to S calls in each of G
        rollouts.
      rewards: ``[..., G]``, floating point, rewards of the calling agent.
      call_where: bool ``[..., G, S]``, True for the calls that exist; None for all. The others
        are not read and get 0.
      quality: ``[..., G, S]``, floating point, scores of a judge; only if b3 is above 0.
      weights: b1, b2 and b3, not negative; only with "weighted".
      form: "weighted" or "steps".

    Returns:
      ``[..., G, S]`` float32.

    Raises:
      TypeError: If an argument has a wrong dtype.
      ValueError: If shapes do not match, or an option is out of its range or without effect.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> formats, rewards = jnp.array([[1.0, 0.0], [1.0, 0.0]]), jnp.array([1.0, 0.1])
      >>> (10 * jr.rewards.call_rewards(formats, rewards, form="steps")).tolist()
      [[10.0, 0.0], [1.0, 0.0]]

    References:
      M-GRPO (arXiv:2511.13288), ABSTRACT reading, with our weights; "steps" is the released code
      (MrlX), in which a valid format alone earns 0.1.
    """
    function = "call_rewards"
    checks.check_float(function, formats=formats, rewards=rewards, quality=quality)
    checks.check_bool(function, call_where=call_where)
    checks.check_min_rank(function, 2, formats=formats)
    checks.check_same_shape(function, formats=formats, call_where=call_where, quality=quality)
    checks.check_shape(function, "rewards", rewards, jnp.shape(formats)[:-1])
    checks.check_option(function, "form", form, ("weighted", "steps"))
    b1, b2, b3 = weights
    checks.check_non_negative(function, finite=True, b1=b1, b2=b2, b3=b3)
    if (quality is None) != (b3 == 0 or form == "steps"):
        raise ValueError(f"{function}: quality goes with a third weight above 0 and 'weighted'.")
    formats = masking.zero_masked(formats, call_where)
    # The outcome of a rollout without calls is not read.
    made = None if call_where is None else jnp.any(call_where, axis=-1)
    outcome = masking.zero_masked(rewards, made)[..., None]
    if form == "steps":
        earned = jnp.where(formats == 0, 0.0, jnp.where(outcome <= 0.1 + 1e-6, 0.1, 1.0))
    else:
        earned = b1 * formats + b2 * outcome
        if quality is not None:
            earned += b3 * masking.zero_masked(quality, call_where)
    return masking.zero_masked(earned, call_where)
