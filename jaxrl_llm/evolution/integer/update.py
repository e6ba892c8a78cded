"""EGG's update: pairs vote on every weight; weights with enough votes change by 1.

The package describes shared arguments, and the TypeError and ValueError that every function raises.
"""

import math

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks
from jaxrl_llm.evolution import _inputs, gradient
from jaxrl_llm.evolution.integer.layers import (
    ONE_BITS,
    check_int8,
    check_table,
    read_table,
    saturate,
)

_TRITS = 5  # of three values each, in a byte


def egg_alpha(step: Array | int, *, decay: float = 0.015) -> Array:
    """The share of weights that would move under random votes; it decreases with the step.

        alpha = 1 / (decay t + 1)

    Args:
      step: int ``[...]``, t, updates made so far.
      decay: Rate of the decrease, not negative.

    Returns:
      float32 ``[...]``, in (0, 1].

    Example:
      >>> import jaxrl_llm as jr
      >>> float(jr.evolution.egg_alpha(1000))
      0.0625

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. H.
    """
    checks.check_non_negative("egg_alpha", decay=decay)
    return 1.0 / (decay * jnp.asarray(step, jnp.float32) + 1.0)


def egg_threshold(alpha: Array | float) -> Array:
    """Vote threshold, in sixteenths of a deviation, that a share alpha passes by chance.

        th = int(16 Phi^-1(1 - alpha / 2))

    Args:
      alpha: float ``[...]``, in (0, 1]; with 1 every weight moves that any pair votes on.

    Returns:
      int32 ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.evolution.egg_threshold(jnp.array([1.0, 0.5, 0.1, 0.0625, 0.01])).tolist()
      [0, 10, 26, 29, 41]

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. H.
    """
    checks.check_share("egg_threshold", zero=False, alpha=alpha)
    # The lower tail: near alpha = 0 the upper one is lost in rounding.
    deviation = -jax.scipy.special.ndtri(jnp.asarray(alpha, jnp.float32) / 2)
    return jnp.floor(2**ONE_BITS * deviation).astype(jnp.int32)


def egg_step(w: Array, votes: Array, *, num_pairs: int, threshold: Array | int) -> Array:
    """Changes weights with enough votes by 1, within +-127.

        w <- sat(w + sign(Z))   where |Z| >= th 16 isqrt(pairs)

    Under random fitness ``Z / (256 sqrt(pairs))`` is about standard normal, for noise of rank 1.

    Args:
      threshold: See the package.
      w: int8 of any shape.
      votes: int32 of the same shape, Z: the sum of ``F_k A_k B_k^T`` over pairs.
      num_pairs: Number of pairs, including tied ones.

    Returns:
      int8 of the same shape.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> w, votes = jnp.array([5, 127, -3], jnp.int8), jnp.array([4000, 4000, -3000])
      >>> jr.evolution.egg_step(w, votes, num_pairs=64, threshold=29).tolist()
      [6, 127, -3]

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. H. At threshold 0 its code subtracts 1
      where no pair voted; here such a weight is unchanged.
    """
    check_int8("egg_step", w=w)
    checks.check_integer("egg_step", votes=votes)
    checks.check_same_shape("egg_step", w=w, votes=votes)
    _inputs.check_at_least("egg_step", 1, num_pairs=num_pairs)
    limit = jnp.asarray(threshold, jnp.int32) * (2**ONE_BITS * math.isqrt(num_pairs))
    move = jnp.where(jnp.abs(votes) >= limit, jnp.sign(votes), 0)
    return saturate(w.astype(jnp.int32) + move)


def egg_update(
    w: Array,
    table: Array,
    key: Array,
    epoch: Array | int,
    signs: Array,
    *,
    threshold: Array | int,
    rank: int = 1,
    noise_reuse: int = 1,
    chunk: int = 64,
) -> Array:
    """One leaf after an update: the votes of all pairs, then :func:`egg_step`.

        Z = sum_k F_k A_k B_k^T                     a vector:  Z = sum_k F_k e1_k e2_k

    Args:
      table, key, epoch, signs, threshold, rank, noise_reuse, chunk: See the package.
      w: int8 ``[a, b]`` or ``[n]``.

    Returns:
      int8 of the shape of ``w``; no weight moves by more than 1.

    Raises:
      ValueError: If ``signs`` is empty, or the leaf reads more entries than ``table`` has.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> table = jr.evolution.int8_table(jax.random.key(0), size=1024)
      >>> w, signs = jnp.zeros((4, 3), jnp.int8), jnp.array([1, -1, 0], jnp.int8)
      >>> new = jr.evolution.egg_update(w, table, jax.random.key(1), 0, signs, threshold=10)
      >>> new.dtype.name, int(abs(new).max())
      ('int8', 1)

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. H.
    """
    check_int8("egg_update", w=w)
    check_table("egg_update", table, key, w.shape, rank, noise_reuse)
    checks.check_integer("egg_update", signs=signs)
    checks.check_rank("egg_update", 1, signs=signs)
    _inputs.check_at_least("egg_update", 1, chunk=chunk)
    if signs.shape[0] == 0:
        raise ValueError("egg_update: signs must be of at least one pair; got none.")

    def votes(draws: Array, signs: Array) -> Array:
        a, b = read_table(table, key, epoch, draws, w.shape, rank=rank, noise_reuse=noise_reuse)
        a = a * jnp.expand_dims(signs.astype(jnp.int8), range(1, a.ndim))
        form = "kir,kjr->ij" if w.ndim == 2 else "ki,ki->i"
        return jnp.einsum(form, a, b, preferred_element_type=jnp.int32)

    total = gradient.sum_chunks(jnp.arange(signs.shape[0]), signs, chunk, votes)
    return egg_step(w, total, num_pairs=signs.shape[0], threshold=threshold)


def pack_ternary(values: Array) -> Array:
    """Packs values of -1, 0 and 1, five per byte, to send between devices.

        byte = sum_i (1 - v_i) 3^i

    Args:
      values: int ``[..., N]``, each -1, 0 or 1.

    Returns:
      uint8 ``[..., ceil(N / 5)]``; zeros fill the last byte.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.evolution.pack_ternary(jnp.array([1, -1, 0, 1, 0])).tolist()
      [96]

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. H.
    """
    checks.check_min_rank("pack_ternary", 1, values=values)
    checks.check_integer("pack_ternary", values=values)
    extra = -values.shape[-1] % _TRITS
    digits = 1 - jnp.asarray(values, jnp.int32)
    digits = jnp.pad(digits, [(0, 0)] * (values.ndim - 1) + [(0, extra)], constant_values=1)
    digits = digits.reshape(*values.shape[:-1], -1, _TRITS)
    return jnp.sum(digits * 3 ** jnp.arange(_TRITS), axis=-1).astype(jnp.uint8)


def unpack_ternary(packed: Array, count: int) -> Array:
    """The values that :func:`pack_ternary` packed.

    Args:
      packed: uint8 ``[..., K]``.
      count: Number of values along the last axis, at most 5 K.

    Returns:
      int8 ``[..., count]``, each -1, 0 or 1.

    Raises:
      ValueError: If there are fewer than ``count`` values, or surplus bytes.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values = jnp.array([1, -1, 0, 1, 0, -1])
      >>> jr.evolution.unpack_ternary(jr.evolution.pack_ternary(values), 6).tolist()
      [1, -1, 0, 1, 0, -1]

    References:
      The integer form of EGGROLL (arXiv:2511.16652), app. H.
    """
    checks.check_min_rank("unpack_ternary", 1, packed=packed)
    if jnp.result_type(packed) != jnp.uint8:
        raise TypeError(f"unpack_ternary: packed must be uint8; got {jnp.result_type(packed)}.")
    _inputs.check_at_least("unpack_ternary", 0, count=count)
    if -(-count // _TRITS) != packed.shape[-1]:
        raise ValueError(f"unpack_ternary: {packed.shape[-1]} bytes do not hold {count} values.")
    digits = packed.astype(jnp.int32)[..., None] // 3 ** jnp.arange(_TRITS) % 3
    return (1 - digits).reshape(*packed.shape[:-1], -1)[..., :count].astype(jnp.int8)
