"""Sequential updates of turns: their order, and the ratio of the earlier updates."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking

Order = Literal["backward", "forward", "random"]


def turn_order(turns: int, *, order: Order = "backward", key: Array | None = None) -> Array:
    """The order in which turns are updated.

    Args:
      turns: K, at least 1.
      order: "backward" from the last to the first, "forward", or "random".
      key: A typed key; only with "random".

    Returns:
      int32 ``[K]``.

    Raises:
      ValueError: If an option is unknown, a key is passed without "random", or is missing with it.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.corrections.turn_order(3).tolist()
      [2, 1, 0]

    References:
      SeeUPO (arXiv:2602.06554), and its released code; "backward" is the method.
    """
    function = "turn_order"
    checks.check_count(function, turns=turns)
    checks.check_option(function, "order", order, ("backward", "forward", "random"))
    if (key is None) == (order == "random"):
        raise ValueError(f"{function}: order={order!r} takes {'a' if key is None else 'no'} key.")
    places = jnp.arange(turns, dtype=jnp.int32)
    if key is not None:
        return jax.random.permutation(key, places)
    return places[::-1] if order == "backward" else places


def sequential_factor(
    factor: Array,
    logp: Array,
    old_logp: Array,
    mask: Array,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Array:
    """The factor of the next turn's advantages, after the update of one turn.

        q = clip(exp(mean over tokens of (logp - old_logp)), 1 - eps_low, 1 + eps_high)
        factor' = clip(factor q, 1 - eps_low, 1 + eps_high)

    The mean log-ratio is first clamped to +-10. The factor of a rollout without a token of the turn
    does not change. The result has no gradient.

    Args:
      factor: ``[...]``, floating point, one per rollout; 1 before the first turn.
      logp: ``[..., T]``, floating point, log-probabilities (nats) after the update.
      old_logp: ``[..., T]``, before the update.
      mask: bool ``[..., T]``, True for the tokens of the turn.
      eps_low: In [0, 1].
      eps_high: Not negative.

    Returns:
      ``[...]`` float32.

    Raises:
      TypeError: If an array has a wrong dtype.
      ValueError: If shapes do not match or an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, old_logp = jnp.array([-0.9, -1.0]), jnp.array([-1.0, -1.0])
      >>> mask = jnp.ones(2, bool)
      >>> jr.corrections.sequential_factor(jnp.array(1.0), logp, old_logp, mask).round(4).item()
      1.051...

    References:
      SeeUPO (arXiv:2602.06554), and its released code; HAPPO has the same factor for agents that
      were updated before.
    """
    function = "sequential_factor"
    masking.check_tokens(function, mask, logp=logp, old_logp=old_logp)
    checks.check_float(function, factor=factor)
    checks.check_shape(function, "factor", factor, jnp.shape(mask)[:-1])
    checks.check_share(function, eps_low=eps_low)
    checks.check_non_negative(function, finite=True, eps_high=eps_high)
    change = masking.masked_mean(masking.safe_log_ratio(logp, old_logp, mask), mask, axis=-1)
    low, high = 1.0 - eps_low, 1.0 + eps_high
    moved = jnp.clip(jnp.exp(jnp.clip(change, -10.0, 10.0)), low, high)
    return jax.lax.stop_gradient(jnp.clip(jnp.asarray(factor, jnp.float32) * moved, low, high))
