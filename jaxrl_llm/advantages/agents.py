"""Credit between an agent and the agents that it calls, each call a rollout of its own."""

import jax.numpy as jnp

from jaxrl_llm.advantages import group
from jaxrl_llm.core import Array, checks, masking

__all__ = ["m_grpo", "of_calls"]


def of_calls(rewards: Array, *, call_advantages: Array) -> Array:
    """The advantages of calls, where each call is a row of its own: ``call_advantages``.

    Calls of one query have different prompts, so no axis of a batch of rows holds all of them;
    :func:`m_grpo` compares them before.

    Args:
      rewards: ``[P, G]``, which give the shape only.
      call_advantages: ``[P, G]``.

    Returns:
      ``[P, G]`` float32.

    Raises:
      TypeError: If ``call_advantages`` is not floating point.
      ValueError: If the shapes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> of_rows = jnp.array([[1.5], [0.0]])
      >>> jr.advantages.of_calls(jnp.ones((2, 1)), call_advantages=of_rows).tolist()
      [[1.5], [0.0]]

    References:
      None; ours. See :func:`m_grpo`.
    """
    function = "of_calls"
    checks.check_float(function, call_advantages=call_advantages)
    checks.check_same_shape(function, rewards=rewards, call_advantages=call_advantages)
    return jnp.asarray(call_advantages, jnp.float32)


def m_grpo(
    call_rewards: Array, calls: Array, *, call_where: Array, eps: float | None = None
) -> Array:
    """Rewards of aligned calls, standardized over all calls of all rollouts of a query.

        A = (r - mean) / (std + eps),   mean and std over the G D calls, ddof 1

    The main agent's advantages are :func:`grpo` of its rewards.

    Args:
      call_rewards: ``[..., G, S]``, floating point, rewards of up to S calls in each of G rollouts.
      calls: integers ``[..., G, D]``, the indices of the calls that take part, from
        ``curation.align_calls``; a call may occur several times.
      call_where: bool ``[..., G, D]``, True where there is a call.
      eps: Above 0, in units of reward; None means 1e-6.

    Returns:
      ``[..., G, D]`` float32, 0 where there is no call.

    Raises:
      TypeError: If an argument has a wrong dtype.
      ValueError: If shapes do not match or ``eps`` is not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards, calls = jnp.array([[0.8, 0.6], [0.2, 0.0]]), jnp.array([[0, 1], [0, 0]])
      >>> out = jr.advantages.m_grpo(rewards, calls, call_where=jnp.ones((2, 2), bool))
      >>> (100 * out).round().tolist()
      [[117.0, 50.0], [-83.0, -83.0]]

    References:
      M-GRPO (arXiv:2511.13288), ABSTRACT reading of the alignment and of the group; the released
      code takes calls from a queue.
    """
    function = "m_grpo"
    checks.check_min_rank(function, 2, call_rewards=call_rewards, calls=calls)
    checks.check_float(function, call_rewards=call_rewards)
    checks.check_integer(function, calls=calls)
    checks.check_bool(function, call_where=call_where)
    checks.check_same_shape(function, calls=calls, call_where=call_where)
    lead, shape = jnp.shape(call_rewards)[:-1], jnp.shape(calls)
    if shape[:-1] != lead:
        raise ValueError(
            f"{function}: calls must have the leading axes {lead} of call_rewards; got {shape}."
        )
    taken = jnp.where(call_where, calls, 0)
    rewards = masking.zero_masked(jnp.take_along_axis(call_rewards, taken, axis=-1), call_where)
    flat = (*shape[:-2], shape[-2] * shape[-1])
    advantages = group.grpo(rewards.reshape(flat), where=call_where.reshape(flat), eps=eps)
    return advantages.reshape(shape)
