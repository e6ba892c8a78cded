"""Argument checks shared by the advantages, and the cases that a formula leaves undefined."""

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats


def group_rewards(function: str, rewards: Array, where: Array | None, singleton: str) -> Array:
    """Checks the arguments; returns the rewards in float32, 0 where they take no part."""
    stats.check_group(function, rewards, where)
    checks.check_option(function, "singleton", singleton, ("zero", "raw"))
    return masking.zero_masked(rewards, where)


def settle_group(
    advantages: Array, alone: Array, rewards: Array, where: Array | None, singleton: str
) -> Array:
    """Fills in what the formula leaves undefined: constant, singleton and dropped entries.

    ``alone`` is what a group of one gets under ``singleton="raw"``; ``rewards`` are those of
    :func:`group_rewards`.
    """
    # The mean of three float32 rewards of 0.1 is not 0.1, and the difference over eps is visible.
    advantages = jnp.where(stats.group_is_constant(rewards, where), 0.0, advantages)
    if singleton == "raw":
        advantages = jnp.where(stats.group_count(rewards, where) == 1, alone, advantages)
    return masking.zero_masked(advantages, where)


def check_tokens(
    function: str, rewards: Array, mask: Array, where: Array | None, **arrays: Array | None
) -> Array:
    """Checks ``rewards [..., G]``, ``mask [..., G, T]`` and arrays of the mask's shape.

    Returns the tokens that take part: those of ``mask`` in the rollouts of ``where``.
    """
    stats.check_group(function, rewards, where)
    checks.check_mask(function, mask)
    if jnp.ndim(mask) == 0 or jnp.shape(mask)[:-1] != jnp.shape(rewards):
        raise ValueError(
            f"{function}: mask must have the shape of rewards and a token axis more; got "
            f"rewards {jnp.shape(rewards)} and mask {jnp.shape(mask)}."
        )
    checks.check_arrays(function, arrays, mask=mask)
    return mask if where is None else mask & where[..., None]


def check_token_rewards(
    function: str, token_rewards: Array, mask: Array, where: Array | None, **arrays: Array | None
) -> Array:
    """As :func:`check_tokens`, for ``token_rewards`` of the mask's shape."""
    checks.check_min_rank(function, 1, token_rewards=token_rewards)
    checks.check_mask(function, mask)
    checks.check_arrays(function, {"token_rewards": token_rewards} | arrays, mask=mask)
    if where is None:
        return mask
    checks.check_bool(function, where=where)
    checks.check_shape(function, "where", where, jnp.shape(mask)[:-1])
    return mask & where[..., None]
