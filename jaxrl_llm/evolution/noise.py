"""Noise that is never stored: drawn again from a key, the leaf's path, the epoch and the member.

The package describes shared arguments, and the TypeError and ValueError that every function raises.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jaxrl_llm.core import Array, checks
from jaxrl_llm.evolution import _inputs


class LowRank(NamedTuple):
    """The factors of one matrix's noise, for each of some members.

    Attributes:
      a: ``[..., a, r]``, factor of the rows of a leaf ``[a, b]``; ``[..., E, a, r]`` for a stack.
      b: ``[..., b, r]``, factor of its columns.
      sign: float32 ``[...]``; the noise is ``sign a b^T / sqrt(r)``.
    """

    a: Array
    b: Array
    sign: Array


class Full(NamedTuple):
    """The dense noise of one leaf, for each of some members.

    Attributes:
      eps: ``[..., *shape]``, standard normal.
      sign: float32 ``[...]``; the noise is ``sign eps``.
    """

    eps: Array
    sign: Array


def leaf_key(key: Array, path: str) -> Array:
    """The key of one leaf, by its path alone.

        k = fold_in(fold_in(key, h0), h1)        h: 64 bits of a hash of the path

    The noise of a leaf does not depend on the other leaves, so a tree may be split, merged or
    partly loaded.

    Args:
      key: See the package.
      path: Path of the leaf, such as ``layers/0/mlp/up/kernel``.

    Returns:
      A typed key.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> key = jax.random.key(0)
      >>> one, other = (jr.evolution.leaf_key(key, path) for path in ("up/kernel", "down/kernel"))
      >>> bool(jax.random.bits(one) == jax.random.bits(other))
      False

    References:
      Ours. The code of EGGROLL (arXiv:2511.16652) splits the key over the leaves in the order of
      the tree, so one more leaf changes all noise.
    """
    checks.check_key("leaf_key", key)
    return leaf_keys(key, [path])[0]


def leaf_keys(key: Array, paths: Sequence[str]) -> Array:
    """:func:`leaf_key` of several leaves ``[L]``, in one draw; unchecked."""
    digests = [hashlib.blake2b(path.encode(), digest_size=8).digest() for path in paths]
    words = np.array([np.frombuffer(digest, "<u4") for digest in digests])

    def one(word: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, word[0]), word[1])

    return jax.vmap(one)(jnp.asarray(words))


def antithetic(members: Array, *, pairs: bool = True, baseline: int = 0) -> tuple[Array, Array]:
    """The draw of each member, and its sign.

        draw = n // 2,  sign = +1 for even n, -1 for odd n
        draw = n,       sign = +1                                       pairs=False

    Members 2k and 2k+1 are the two sides of one draw. Members below ``baseline`` have sign 0: they
    are the unperturbed model.

    Args:
      pairs, baseline: See the package.
      members: int ``[...]``, ids from 0. For a numpy array the results are numpy arrays too, so
        that duplicate draws are known while tracing.

    Returns:
      ``(draw, sign)``, int32 and float32 ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> draw, sign = jr.evolution.antithetic(jnp.arange(4))
      >>> draw.tolist(), sign.tolist()
      ([0, 0, 1, 1], [1.0, -1.0, 1.0, -1.0])

    References:
      EGGROLL (arXiv:2511.16652); ``baseline=2`` is the variant with a baseline in its repository.
    """
    _inputs.check_members("antithetic", members)
    _inputs.check_at_least("antithetic", 0, baseline=baseline)
    if pairs and baseline % 2:
        raise ValueError(f"antithetic: baseline must not split a pair; got {baseline}.")
    xp = np if isinstance(members, np.ndarray) else jnp
    members = xp.asarray(members, xp.int32)
    sign = xp.where(members % 2 == 0, 1.0, -1.0) if pairs else xp.ones(members.shape)
    sign = xp.where(members < baseline, 0.0, sign).astype(xp.float32)
    return (members // 2 if pairs else members), sign


class Draws(NamedTuple):
    """The arguments that determine the noise of a leaf, except its shape.

    If ``ids``, int ``[...]``, is a numpy array of pairs side by side, each pair is drawn once.
    """

    key: Array
    epoch: Array | int
    ids: Array
    dtype: Any
    noise_reuse: int

    def each(self, sample: Callable) -> Array:
        """``sample(key)`` of every draw, with the axes of the ids in front; unchecked."""
        reuse = self.noise_reuse
        fresh = jnp.asarray(self.epoch, jnp.int32) // reuse if reuse else 0
        key = jax.random.fold_in(self.key, fresh)
        known = isinstance(self.ids, np.ndarray)
        ids = self.ids.reshape(-1) if known else jnp.reshape(self.ids, -1)
        paired = known and ids.size % 2 == 0 and bool((ids[::2] == ids[1::2]).all())
        ids = jnp.asarray(ids[::2] if paired else ids)
        flat = jax.vmap(lambda i: sample(jax.random.fold_in(key, i)))(ids)
        flat = jnp.repeat(flat, 2, axis=0) if paired else flat
        return flat.reshape(*jnp.shape(self.ids), *flat.shape[1:])

    def dense(self, shape: tuple[int, ...]) -> Array:
        """Full noise ``[..., *shape]``; unchecked."""
        return self.each(lambda key: jax.random.normal(key, tuple(shape), self.dtype))

    def factors(self, shape: tuple[int, ...], rank: int) -> tuple[Array, Array]:
        """Factors ``[..., a, r]`` and ``[..., b, r]`` of a matrix or of each of a stack; unchecked.

        For a stack ``[E, a, b]`` they have the axis E behind those of the ids.
        """
        *stack, rows, columns = shape
        both = self.dense((*stack, rows + columns, rank))
        return both[..., columns:, :], both[..., :columns, :]


def everywhere(x: Array) -> Array:
    """On a mesh that is known while tracing, every device draws all noise, without transfers."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or set(mesh.axis_types) != {AxisType.Auto}:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec())


def lowrank_noise(
    key: Array,
    epoch: Array | int,
    members: Array,
    shape: tuple[int, ...],
    *,
    rank: int = 1,
    dtype=jnp.float32,
    noise_reuse: int = 1,
    pairs: bool = True,
    baseline: int = 0,
) -> LowRank:
    """Noise of rank r for a matrix, or each matrix of a stack, as two thin factors per member.

        Z = normal(fold_in(fold_in(key, epoch // noise_reuse), draw), [..., a + b, r])
        B = first b rows,  A = the rest,  E = sign A B^T / sqrt(r)

    The entries of E have mean 0 and variance 1 and are uncorrelated, for any rank; their kurtosis
    is ``3 + 6 / r``. Two calls with the same arguments draw the same noise, on any number of
    devices.

    Args:
      key, epoch, members, shape, rank, dtype, noise_reuse, pairs, baseline: See the package.

    Returns:
      :class:`LowRank`, with the axes of ``members`` in front.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> noise = jr.evolution.lowrank_noise(jax.random.key(0), 3, jnp.arange(8), (3, 2))
      >>> noise.a.shape, noise.b.shape
      ((8, 3, 1), (8, 2, 1))
      >>> noise.b[7, :, 0].round(4), noise.sign[7].item()
      (Array([0.4308, 0.6375], dtype=float32), -1.0)

    References:
      EGGROLL (arXiv:2511.16652), sec. 4. There the noise has the dtype of the leaf and
      ``noise_reuse`` is 0 by default; for the same key of a leaf the draws are the same.
    """
    checks.check_key("lowrank_noise", key)
    _inputs.check_matrices("lowrank_noise", shape, rank, "shape")
    _inputs.check_at_least("lowrank_noise", 0, noise_reuse=noise_reuse)
    draw, sign = antithetic(members, pairs=pairs, baseline=baseline)
    a, b = Draws(key, epoch, draw, dtype, noise_reuse).factors(tuple(shape), rank)
    return LowRank(a, b, sign)


def full_noise(
    key: Array,
    epoch: Array | int,
    members: Array,
    shape: tuple[int, ...],
    *,
    dtype=jnp.float32,
    noise_reuse: int = 1,
    pairs: bool = True,
    baseline: int = 0,
) -> Full:
    """Noise of full rank for a leaf of any shape, by the same rule as :func:`lowrank_noise`.

        eps = normal(fold_in(fold_in(key, epoch // noise_reuse), draw), shape)

    Args:
      key, epoch, members, shape, dtype, noise_reuse, pairs, baseline: See the package.

    Returns:
      :class:`Full`, with the axes of ``members`` in front.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> noise = jr.evolution.full_noise(jax.random.key(0), 0, jnp.arange(4), (5,))
      >>> noise.eps.shape, bool((noise.eps[2] == noise.eps[3]).all())
      ((4, 5), True)

    References:
      OpenAI-ES (arXiv:1703.03864); the leaves of EGGROLL (arXiv:2511.16652) that are not matrices.
    """
    checks.check_key("full_noise", key)
    _inputs.check_at_least("full_noise", 0, noise_reuse=noise_reuse)
    draw, sign = antithetic(members, pairs=pairs, baseline=baseline)
    return Full(Draws(key, epoch, draw, dtype, noise_reuse).dense(shape), sign)


def sign_and_scale(sign: Array, sigma, rank: int | None = None) -> Array:
    """``sign sigma / sqrt(rank)`` in float32: the coefficient of a member's draw."""
    return sign * jnp.asarray(sigma, jnp.float32) / (1.0 if rank is None else math.sqrt(rank))


def take_rows(a: Array, tokens: Array) -> Array:
    """Rows of a factor ``[..., V, r]``, for each member: ``[..., T, r]``."""
    return a[tokens] if a.ndim == 2 else jnp.take_along_axis(a, tokens[..., None], axis=-2)
