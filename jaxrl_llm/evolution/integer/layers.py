"""EGG: a network of int8 weights and activations, with noise in the same integers.

All values are fixed point, with 16 for 1.0, clipped to +-127. This saturation is the only
nonlinearity. Activations and weights, noisy or not, are int8; other dtypes raise TypeError, and
shapes that disagree ValueError. The noise of a leaf ``w`` is from :func:`int8_noise`. The package
describes shared arguments and errors.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, checks
from jaxrl_llm.evolution import _inputs, noise
from jaxrl_llm.evolution.noise import LowRank

ONE_BITS = 4  # 16 is 1.0
LIMIT = 127


def saturate(x: Array) -> Array:
    """Integers clipped to +-127, as int8.

    Args:
      x: Integers of any shape.

    Returns:
      int8 of the same shape.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.evolution.saturate(jnp.array([-300, -128, 5, 200])).tolist()
      [-127, -127, 5, 127]

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. G.
    """
    checks.check_integer("saturate", x=x)
    return jnp.clip(x, -LIMIT, LIMIT).astype(jnp.int8)


def int8_table(key: Array, *, size: int = 2**20) -> Array:
    """The table from which all integer noise is read: ``trunc(16 normal)``.

    Args:
      key: See the package.
      size: Number of entries, a power of two.

    Returns:
      int8 ``[size]``.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> jr.evolution.int8_table(jax.random.key(0), size=8).shape
      (8,)

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. G; its code has 2^30 entries.
    """
    checks.check_key("int8_table", key)
    _inputs.check_at_least("int8_table", 1, size=size)
    if size & (size - 1):
        raise ValueError(f"int8_table: size must be a power of two; got {size}.")
    return saturate(jnp.trunc(2**ONE_BITS * jax.random.normal(key, (size,))).astype(jnp.int32))


def read_table(table, key, epoch, draws, shape, *, rank, noise_reuse) -> tuple[Array, Array]:
    """int8 factors of a leaf's draws, each one contiguous slice of the table; unchecked."""
    fresh = 0 if noise_reuse == 0 else jnp.asarray(epoch, jnp.int32) // noise_reuse
    word = jnp.ravel(jax.random.key_data(jax.random.fold_in(key, fresh)))[0].astype(jnp.uint32)
    draws = jnp.asarray(draws).astype(jnp.uint32)
    start = word ^ (((draws >> 16) ^ draws) * jnp.uint32(0x45D9F3B))
    first, second = shape if len(shape) == 2 else (shape[0], shape[0])
    count = (first + second) * rank
    place = start[..., None] + jnp.arange(count, dtype=jnp.uint32)
    values = table[place & jnp.uint32(table.shape[0] - 1)].reshape(*draws.shape, -1, rank)
    a, b = values[..., second:, :], values[..., :second, :]
    return (a, b) if len(shape) == 2 else (a[..., 0], b[..., 0])


def int8_noise(
    table: Array,
    key: Array,
    epoch: Array | int,
    members: Array,
    shape: tuple[int, ...],
    *,
    rank: int = 1,
    noise_reuse: int = 1,
) -> LowRank:
    """Integer noise of some members for one leaf: slices of the table.

        start = (u32(fold_in(key, epoch // noise_reuse)) xor hash(pair)) mod size

    A matrix ``[a, b]`` reads ``(a + b) r`` entries, B first; a vector reads 2 n, whose halves are
    multiplied entry by entry. Reading wraps at the end of the table.

    Args:
      table, key, epoch, members, rank, noise_reuse: See the package.
      shape: ``[a, b]`` or ``[n]``, of the leaf.

    Returns:
      :class:`LowRank` of int8 factors ``[..., a, r]`` and ``[..., b, r]``, or ``[..., n]`` twice,
      and int32 signs.

    Raises:
      ValueError: If the leaf is neither a matrix nor a vector, or reads more entries than ``table``
        has.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> table = jr.evolution.int8_table(jax.random.key(0), size=1024)
      >>> noise = jr.evolution.int8_noise(table, jax.random.key(1), 0, jnp.arange(4), (6, 3))
      >>> noise.a.shape, noise.b.shape, noise.sign.tolist()
      ((4, 6, 1), (4, 3, 1), [1, -1, 1, -1])

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. G, and its code.
    """
    check_table("int8_noise", table, key, shape, rank, noise_reuse)
    _inputs.check_members("int8_noise", members)
    members = jnp.asarray(members, jnp.int32)
    a, b = read_table(table, key, epoch, members // 2, shape, rank=rank, noise_reuse=noise_reuse)
    # No function of floats here, so that not one is in the program.
    return LowRank(a, b, 1 - 2 * (members % 2))


def check_table(function, table, key, shape, rank, noise_reuse) -> None:
    """Raises unless a leaf of this shape can read its noise from the table."""
    checks.check_key(function, key)
    check_int8(function, table=table)
    checks.check_rank(function, 1, table=table)
    _inputs.check_at_least(function, 1, rank=rank)
    _inputs.check_at_least(function, 0, noise_reuse=noise_reuse)
    if len(shape) not in (1, 2):
        raise ValueError(f"{function}: shape must be that of a matrix or vector; got {shape}.")
    if len(shape) == 1 and rank != 1:
        raise ValueError(f"{function}: rank={rank} has no effect on a vector, shape {shape}.")
    count = (sum(shape) if len(shape) == 2 else 2 * shape[0]) * rank
    if count > table.shape[0]:
        raise ValueError(
            f"{function}: a leaf of shape {shape} reads {count} entries; "
            f"table has {table.shape[0]}."
        )


def check_int8(function: str, **arrays) -> None:
    """Raises TypeError unless every array is int8."""
    for name, x in arrays.items():
        if jnp.result_type(x) != jnp.int8:
            raise TypeError(f"{function}: {name} must be int8; got {jnp.result_type(x)}.")


def _wide(x: Array) -> Array:
    return x.astype(jnp.int32)


def egg_matmul(x: Array, w: Array, perturbation: LowRank | None, *, shift: int = 4) -> Array:
    """An integer linear layer with a member's noise.

        y = sat((x W^T + ((x B) (sign A)^T >> (4 + shift))) // (16 isqrt(in)))

    Sums are int32: safe for all values up to ``in r = 1048``, and far beyond for activations of
    usual size. The shift rounds down, so a pair is not exactly antithetic.

    Args:
      perturbation, shift: See the package.
      x: int8 ``[..., T, in]``, with the axes of the members, if any, in front.
      w: int8 ``[out, in]``.

    Returns:
      int8 ``[..., T, out]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> x = jnp.array([[16, -8, 4, 20]], jnp.int8)
      >>> w = jnp.array([[16, 8, -4, 2], [-16, 0, 16, 32]], jnp.int8)
      >>> a, b = jnp.array([[16], [-32]], jnp.int8), jnp.array([[8], [-16], [0], [24]], jnp.int8)
      >>> for sign in (1, -1):
      ...     jr.evolution.egg_matmul(x, w, jr.evolution.LowRank(a, b, jnp.array(sign))).tolist()
      [[8, 11]]
      [[5, 16]]

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. G.
    """
    check_int8("egg_matmul", x=x, w=w)
    _inputs.check_at_least("egg_matmul", 0, shift=shift)
    checks.check_min_rank("egg_matmul", 2, x=x)
    checks.check_rank("egg_matmul", 2, w=w)
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"egg_matmul: x {x.shape} does not match w {w.shape}.")
    total = jnp.matmul(x, w.T, preferred_element_type=jnp.int32)
    if perturbation is not None:
        a, b = perturbation.a, perturbation.b
        if (a.shape[-2], b.shape[-2]) != w.shape:
            raise ValueError(f"egg_matmul: factors {a.shape}, {b.shape} do not match w {w.shape}.")
        low = jnp.matmul(x, b, preferred_element_type=jnp.int32)
        signed = perturbation.sign[..., None, None] * _wide(a)
        total = total + (jnp.matmul(low, jnp.swapaxes(signed, -1, -2)) >> (ONE_BITS + shift))
    return saturate(total // (2**ONE_BITS * math.isqrt(w.shape[1])))


def egg_embed(tokens: Array, w: Array, perturbation: LowRank | None, *, shift: int = 4) -> Array:
    """Rows of an integer embedding with a member's noise.

        y[t] = sat(W[t] + ((sign A[t] B^T) >> (4 + shift)))

    Args:
      tokens, perturbation, shift: See the package.
      w: int8 ``[V, D]``.

    Returns:
      int8 ``[..., T, D]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> w = jnp.array([[16, 0], [0, 120]], jnp.int8)
      >>> a, b = jnp.array([[16], [32]], jnp.int8), jnp.array([[-8], [90]], jnp.int8)
      >>> noise = jr.evolution.LowRank(a, b, jnp.array(1))
      >>> jr.evolution.egg_embed(jnp.array([1, 0]), w, noise).tolist()
      [[-1, 127], [15, 5]]

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. G.
    """
    check_int8("egg_embed", w=w)
    checks.check_integer("egg_embed", tokens=tokens)
    checks.check_min_rank("egg_embed", 1, tokens=tokens)
    _inputs.check_at_least("egg_embed", 0, shift=shift)
    rows = w[tokens]
    if perturbation is None:
        return rows
    a, b = perturbation.a, perturbation.b
    if (a.shape[-2], b.shape[-2]) != w.shape:
        raise ValueError(f"egg_embed: factors {a.shape}, {b.shape} do not match w {w.shape}.")
    low = _wide(noise.take_rows(a, tokens)) * perturbation.sign[..., None, None]
    change = jnp.matmul(low, jnp.swapaxes(_wide(b), -1, -2)) >> (ONE_BITS + shift)
    return saturate(_wide(rows) + change)


def egg_vector(w: Array, perturbation: LowRank | None, *, shift: int = 4) -> Array:
    """An integer vector (of a norm or a bias) with noise, one row per member.

        y = sat(w + ((sign e1 e2) >> (4 + shift)))

    Args:
      perturbation, shift: See the package.
      w: int8 ``[n]``.

    Returns:
      int8 ``[..., n]``, with the axes of the members in front.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> e = jnp.array([16, 32], jnp.int8)
      >>> noise = jr.evolution.LowRank(e, e, jnp.array(-1))
      >>> jr.evolution.egg_vector(jnp.array([16, 16], jnp.int8), noise, shift=4).tolist()
      [15, 12]

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. G.
    """
    check_int8("egg_vector", w=w)
    checks.check_rank("egg_vector", 1, w=w)
    _inputs.check_at_least("egg_vector", 0, shift=shift)
    if perturbation is None:
        return w
    a, b = perturbation.a, perturbation.b
    if a.shape[-1:] != w.shape or a.shape != b.shape:
        raise ValueError(f"egg_vector: factors {a.shape}, {b.shape} do not match w {w.shape}.")
    change = (_wide(a) * _wide(b) * perturbation.sign[..., None]) >> (ONE_BITS + shift)
    return saturate(_wide(w) + change)


_ONE = 2**ONE_BITS
# 2^(i / 16) in sixteenths, for a logit that was shifted to 1 .. 255.
_EXP2 = np.array([int(_ONE * 2.0 ** (i / _ONE)) for i in range(256)], np.int32)
# Where 16 log2(S / 16) reaches 1, 2, 3, ...: S has at most 31 bits.
_LOG2 = np.array([int(np.ceil(_ONE * 2.0 ** (i / _ONE))) for i in range(1, 27 * _ONE)], np.int32)


def egg_norm(x: Array, w: Array) -> Array:
    """Integers divided by their mean absolute value, times a weight.

        y = sat((x w) // max(mean|x|, 1))             mean|x| = sum|x| // n

    Args:
      x: int8 ``[..., n]``.
      w: int8 ``[n]``, or ``[..., n]`` with noise; 16 is 1.0.

    Returns:
      int8 ``[..., n]``, of mean size about 16 for ``w`` of 16.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> w = jnp.full(4, 16, jnp.int8)
      >>> jr.evolution.egg_norm(jnp.array([8, -4, 0, 4], jnp.int8), w).tolist()
      [32, -16, 0, 16]
      >>> jr.evolution.egg_norm(jnp.zeros(4, jnp.int8), w).tolist()
      [0, 0, 0, 0]

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. G. Its code keeps the sum above 0 instead
      of the mean, so it still divides by 0 if the sum is below n.
    """
    check_int8("egg_norm", x=x, w=w)
    checks.check_min_rank("egg_norm", 1, x=x, w=w)
    if x.shape[-1] != w.shape[-1]:
        raise ValueError(f"egg_norm: x {x.shape} does not match w {w.shape}.")
    x = x.astype(jnp.int32)
    size = jnp.sum(jnp.abs(x), axis=-1, keepdims=True) // x.shape[-1]
    return saturate((x * w) // jnp.maximum(size, 1))


def egg_gru(state: Array, forget: Array, propose: Callable[[Array], Array]) -> Array:
    """One step of the integer recurrent cell.

        g = ((f + 127) s) >> 8,   h = s + (((f + 127) (propose(g) - s)) >> 8)

    Args:
      state: int8 ``[..., D]``, s.
      forget: int8 ``[..., D]``, f: the saturated sum of the layers of input and state.
      propose: Function from g, int8 ``[..., D]``, to the proposed state, same shape and dtype.

    Returns:
      int8 ``[..., D]``, between the old state and the proposed one.

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
    """Log-likelihood of tokens in sixteenths of a bit, by integer tables.

        o = y[t] - LOG2[sum EXP2[y]],   y = logits + 128
        EXP2[i] = int(16 2^(i / 16)),   LOG2[S] = int(16 log2(S / 16))

    The bits of a text are ``-sum(o) / 16``.

    Args:
      logits: int8 ``[..., V]``, in sixteenths of a bit.
      targets: int ``[...]``.

    Returns:
      int32 ``[...]``.

    Raises:
      ValueError: If V is so large that the sum could overflow.

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
