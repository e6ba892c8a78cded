"""Sets of tokens: the part of the vocabulary that a token was sampled from, one set per token.

A sampler that truncates (top-k, top-p, min-p, a list of allowed tokens) draws from the policy
renormalized over a set. The set is stored exactly, since a threshold computed again from slightly
other numbers would give another one.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array

_WORD = 32


class Support(NamedTuple):
    """A set of token ids at each place, in one of two forms.

    An empty set stands for the full vocabulary.

    Attributes:
      ids: int32 ``[..., K]``, at most K distinct ids in any order, -1 where there are fewer. Small
        where a sampler keeps at most K tokens.
      bits: uint32 ``[..., ceil(V / 32)]``: bit ``v % 32`` of word ``v // 32`` is 1 if token ``v``
        is in the set.
    """

    ids: Array | None = None
    bits: Array | None = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Temperature:
    """A temperature at which tokens were sampled; a part of a pytree without an array.

    Example:
      >>> import jax
      >>> from jaxrl_llm.core.support import Temperature
      >>> jax.tree.leaves(Temperature(0.7))
      []
    """

    value: float


def pack_bits(mask: Array) -> Array:
    """A bool mask ``[..., V]`` as uint32 ``[..., ceil(V / 32)]``, 32 tokens a word.

    Example:
      >>> import jax.numpy as jnp
      >>> pack_bits(jnp.array([True, False, True])).tolist()
      [5]
    """
    checks.check_min_rank("pack_bits", 1, mask=mask)
    checks.check_bool("pack_bits", mask=mask)
    mask = jnp.asarray(mask)
    mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % _WORD)])
    words = mask.reshape(*mask.shape[:-1], -1, _WORD).astype(jnp.uint32)
    return jnp.sum(words << jnp.arange(_WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def unpack_bits(bits: Array, vocab_size: int) -> Array:
    """The inverse of :func:`pack_bits`: bool ``[..., V]``."""
    bits = jnp.asarray(bits)
    mask = (bits[..., None] >> jnp.arange(_WORD, dtype=jnp.uint32)) & 1
    return mask.astype(bool).reshape(*bits.shape[:-1], -1)[..., :vocab_size]


def keep_mask(support: Support, vocab_size: int) -> Array:
    """The sets as bool ``[..., V]``; all True where a set is empty.

    Ids outside the vocabulary belong to no set.

    Example:
      >>> import jax.numpy as jnp
      >>> keep_mask(Support(ids=jnp.array([[2, 0, -1], [-1, -1, -1]])), 3).tolist()
      [[True, False, True], [True, True, True]]
    """
    if support.ids is None:
        allowed = unpack_bits(support.bits, vocab_size)
    else:
        ids = jnp.asarray(support.ids)
        flat = ids.reshape(-1, ids.shape[-1])
        # Negative ids would count from the end.
        flat = jnp.where(flat < 0, vocab_size, flat)
        allowed = jnp.zeros((len(flat), vocab_size), bool)
        allowed = allowed.at[jnp.arange(len(flat))[:, None], flat].set(True, mode="drop")
        allowed = allowed.reshape(*ids.shape[:-1], vocab_size)
    return allowed | ~jnp.any(allowed, axis=-1, keepdims=True)


def in_support(support: Support, tokens: np.ndarray) -> np.ndarray:
    """Whether each token is in its set, or the set is empty; on the host.

    Args:
      support: Sets ``[..., K]`` or ``[..., ceil(V / 32)]``.
      tokens: Integers ``[...]``, inside the vocabulary.

    Returns:
      bool ``[...]``.

    Example:
      >>> import numpy as np
      >>> in_support(Support(ids=np.array([[2, 0, -1], [2, 0, -1]])), np.array([0, 1])).tolist()
      [True, False]
    """
    if support.bits is None:
        ids = np.asarray(support.ids)
        return (ids == tokens[..., None]).any(-1) | (ids < 0).all(-1)
    bits = np.asarray(support.bits)
    words = np.take_along_axis(bits, tokens[..., None] // _WORD, axis=-1)[..., 0]
    return (words >> (tokens % _WORD).astype(np.uint32) & 1).astype(bool) | ~bits.any(-1)


def check_support(
    function: str, support: Support | None, leading: tuple[int, ...], vocab_size: int | None = None
) -> None:
    """Raises unless a support (None is skipped) has one form, for tokens of shape ``leading``.

    A value that is not a :class:`Support`, ids that are not integers and bits that are not uint32
    raise TypeError; both forms, neither, and a shape that disagrees raise ValueError.
    """
    if support is None:
        return
    if not isinstance(support, Support):
        raise TypeError(f"{function}: support must be a Support; got {type(support).__name__}.")
    if (support.ids is None) == (support.bits is None):
        raise ValueError(f"{function}: support must have either ids or bits.")
    checks.check_integer(function, ids=support.ids, bits=support.bits)
    if support.bits is not None and jnp.result_type(support.bits) != jnp.uint32:
        raise TypeError(
            f"{function}: the bits of support must be uint32; got {jnp.result_type(support.bits)}."
        )
    (array,) = jax.tree.leaves(support)
    name = "ids" if support.bits is None else "bits"
    shape = jnp.shape(array)
    words = None if vocab_size is None or name == "ids" else -(-vocab_size // _WORD)
    if shape[:-1] != tuple(leading) or words not in (None, shape[-1]):
        last = "K" if name == "ids" else words or "ceil(V / 32)"
        want = ", ".join(map(str, (*leading, last)))
        raise ValueError(f"{function}: support.{name} must have shape ({want}); got {shape}.")
