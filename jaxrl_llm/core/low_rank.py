"""Matrices as products of two thin factors, and their averages at a fixed rank."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array


class Factors(NamedTuple):
    """The product ``a b`` of a matrix of rank r, or of a stack of them.

    Attributes:
      a: ``[..., in, r]``.
      b: ``[..., r, out]``.
    """

    a: Array
    b: Array


def is_factors(x) -> bool:
    """Whether a node of a tree is a product."""
    return isinstance(x, Factors)


def widen(factors: Factors, times: int) -> Factors:
    """The same product, with zeros up to ``times`` the rank, and at most the rank of a matrix."""
    a, b = factors
    return _padded(factors, min(times * a.shape[-1], a.shape[-2], b.shape[-1]))


def _padded(factors: Factors, rank: int) -> Factors:
    """The same product, with zeros up to a rank."""
    a, b = factors
    more = max(rank - a.shape[-1], 0)
    lead = [(0, 0)] * (a.ndim - 2)
    return Factors(jnp.pad(a, [*lead, (0, 0), (0, more)]), jnp.pad(b, [*lead, (0, more), (0, 0)]))


def average(old: Factors, new: Factors, rate: Array | float) -> Factors:
    """``(1 - rate) old + rate new`` as products, at the rank of ``old``.

        a b = the nearest matrix of rank r to  (1 - rate) a_old b_old + rate a_new b_new

    The sum has the factors ``[a_old a_new]`` and ``[(1 - rate) b_old; rate b_new]``; two QR
    decompositions and the singular values of a small matrix reduce them to rank r, so no matrix
    ``[in, out]`` is made. The result is exact if the sum has at most rank r.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxrl_llm.core.low_rank import Factors, average, widen
      >>> old = widen(Factors(jnp.array([[1.0], [0.0]]), jnp.array([[2.0, 0.0]])), 2)
      >>> new = widen(Factors(jnp.array([[0.0], [1.0]]), jnp.array([[0.0, 4.0]])), 2)
      >>> a, b = average(old, new, 0.5)
      >>> (a @ b).round(3).tolist()
      [[1.0, 0.0], [0.0, 2.0]]
    """
    rank = old.a.shape[-1]
    old, new = (Factors(*(jnp.asarray(x, jnp.float32) for x in pair)) for pair in (old, new))
    a = jnp.concatenate([old.a, new.a], axis=-1)
    b = jnp.concatenate([(1.0 - rate) * old.b, rate * new.b], axis=-2)
    left, small_a = jnp.linalg.qr(a)
    right, small_b = jnp.linalg.qr(jnp.swapaxes(b, -1, -2))
    high = jax.lax.Precision.HIGHEST
    core = jnp.matmul(small_a, jnp.swapaxes(small_b, -1, -2), precision=high)
    u, s, v = jnp.linalg.svd(core, full_matrices=False)
    root = jnp.sqrt(s[..., :rank])  # both factors of one size
    a = jnp.matmul(left, u[..., :rank] * root[..., None, :], precision=high)
    b = jnp.matmul(root[..., None] * v[..., :rank, :], jnp.swapaxes(right, -1, -2), precision=high)
    return _padded(Factors(a, b), rank)  # of a matrix that has a lower rank
