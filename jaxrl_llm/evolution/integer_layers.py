"""The rest of EGG's forward pass: norm, recurrent cell, and the score of a token, all integers."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, checks
from jaxrl_llm.evolution.integer import LIMIT, ONE_BITS, check_int8, saturate

_ONE = 2**ONE_BITS
# 2^(i / 16) in sixteenths, for a logit that was shifted to 1 .. 255.
_EXP2 = np.array([int(_ONE * 2.0 ** (i / _ONE)) for i in range(256)], np.int32)
# Where 16 log2(S / 16) reaches 1, 2, 3, ...: S has at most 31 bits.
_LOG2 = np.array([int(np.ceil(_ONE * 2.0 ** (i / _ONE))) for i in range(1, 27 * _ONE)], np.int32)


def egg_norm(x: Array, w: Array) -> Array:
    """Integers over their mean size, times a weight.

        y = sat((x w) // max(mean|x|, 1))             mean|x| = sum|x| // n

    Args:
      x: int8 ``[..., n]``.
      w: int8 ``[n]``, or ``[..., n]`` where it carries noise; 16 is 1.0.

    Returns:
      int8 ``[..., n]``, of mean size about 16 for ``w`` of 16.

    Raises:
      TypeError: If an argument is not int8.
      ValueError: If the last axes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> w = jnp.full(4, 16, jnp.int8)
      >>> jr.evolution.egg_norm(jnp.array([8, -4, 0, 4], jnp.int8), w).tolist()
      [32, -16, 0, 16]
      >>> jr.evolution.egg_norm(jnp.zeros(4, jnp.int8), w).tolist()
      [0, 0, 0, 0]

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. G. Its code keeps the sum above 0, not
      the mean, so that it still divides by 0 where the sum is below n.
    """
    check_int8("egg_norm", x=x, w=w)
    checks.check_min_rank("egg_norm", 1, x=x, w=w)
    if x.shape[-1] != w.shape[-1]:
        raise ValueError(f"egg_norm: x {x.shape} does not fit w {w.shape}.")
    x = x.astype(jnp.int32)
    size = jnp.sum(jnp.abs(x), axis=-1, keepdims=True) // x.shape[-1]
    return saturate((x * w) // jnp.maximum(size, 1))


def egg_gru(state: Array, forget: Array, propose: Callable[[Array], Array]) -> Array:
    """One step of the integer recurrent cell.

        g = ((f + 127) s) >> 8,   h = s + (((f + 127) (propose(g) - s)) >> 8)

    Args:
      state: int8 ``[..., D]``, s.
      forget: int8 ``[..., D]``, f: the saturated sum of what the layers make of input and state.
      propose: From g, int8 ``[..., D]``, to the proposed state of the same shape and dtype.

    Returns:
      int8 ``[..., D]``, between the old state and the proposed one.

    Raises:
      TypeError: If an array is not int8.
      ValueError: If the shapes differ.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> s, f = jnp.array([64, 64], jnp.int8), jnp.array([-127, 127], jnp.int8)
      >>> jr.evolution.egg_gru(s, f, lambda g: jnp.full(2, -64, jnp.int8)).tolist()
      [64, -63]

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. G.
    """
    check_int8("egg_gru", state=state, forget=forget)
    checks.check_same_shape("egg_gru", state=state, forget=forget)
    s, gate = state.astype(jnp.int32), forget.astype(jnp.int32) + LIMIT
    proposed = propose(saturate((gate * s) >> 8))
    check_int8("egg_gru", proposed=proposed)
    checks.check_same_shape("egg_gru", state=state, proposed=proposed)
    return saturate(s + ((gate * (proposed.astype(jnp.int32) - s)) >> 8))


def egg_log_likelihood(logits: Array, targets: Array) -> Array:
    """Score of tokens in sixteenths of a bit, by tables of integers.

        o = y[t] - LOG2[sum EXP2[y]],   y = logits + 128
        EXP2[i] = int(16 2^(i / 16)),   LOG2[S] = int(16 log2(S / 16))

    The bits of a text are ``-sum(o) / 16``.

    Args:
      logits: int8 ``[..., V]``, in sixteenths of a bit.
      targets: int ``[...]``.

    Returns:
      int32 ``[...]``.

    Raises:
      TypeError: If ``logits`` are not int8 or ``targets`` not integers.
      ValueError: If the shapes do not fit, or V is so large that the sum could overflow.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logits = jnp.array([10, -5, 0], jnp.int8)
      >>> int(jr.evolution.egg_log_likelihood(logits, jnp.array(0)))
      -17

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. G.
    """
    check_int8("egg_log_likelihood", logits=logits)
    checks.check_min_rank("egg_log_likelihood", 1, logits=logits)
    checks.check_integer("egg_log_likelihood", targets=targets)
    checks.check_shape("egg_log_likelihood", "targets", targets, logits.shape[:-1])
    if logits.shape[-1] * int(_EXP2[-1]) >= 2**31:
        raise ValueError(f"egg_log_likelihood: {logits.shape[-1]} logits are too many for int32.")
    y = logits.astype(jnp.int32) + LIMIT + 1
    total = jnp.sum(jnp.asarray(_EXP2)[y], axis=-1)
    log2 = jnp.searchsorted(jnp.asarray(_LOG2), total, side="right").astype(jnp.int32)
    return jnp.take_along_axis(y, targets[..., None], axis=-1)[..., 0] - log2
