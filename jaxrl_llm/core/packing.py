"""Several responses to one prompt in a row: where each of them lies, and the way there and back."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree


class Packing(NamedTuple):
    """R rows of S cells in which the G responses to each of P prompts lie one after the other.

    Attributes:
      members: int32 ``[P, R, S]``, whose token a cell holds: 0 to G - 1, or -1 for none.
      starts: int32 ``[P, G]``, the cell where a response begins, counted over all rows of its
        prompt. Of an empty response it means nothing.
    """

    members: Array
    starts: Array


def plan_packing(mask: np.ndarray, *, size: int | None = None, most: float = 1.0) -> Packing | None:
    """Rows for responses of unequal length, as few as first fit decreasing needs.

    All prompts have as many rows as the one that needs most, rounded up to 1, 2, 3, 4, 6, 8, 12,
    ..., so that few shapes are ever compiled. The plan depends on the lengths alone.

    Args:
      mask: bool ``[P, G, T]`` on the host. A response ends with its last True: what stands between
        stays in, since later tokens may attend to it.
      size: S, cells of a row; T by default. Longer rows hold hardly more, and attention within a
        row grows with its length.
      most: The largest share of the ``G * T`` cells that is worth it, above 0.

    Returns:
      Host arrays, or None if there would be more cells than ``most`` allows.

    Raises:
      ValueError: If a response is longer than ``size``.

    Example:
      >>> import numpy as np
      >>> mask = np.arange(6) < np.array([[[6], [2], [1], [3]]])
      >>> packing = plan_packing(mask)
      >>> packing.members.tolist()
      [[[0, 0, 0, 0, 0, 0], [3, 3, 3, 1, 1, 2]]]
      >>> packing.starts.tolist()
      [[0, 9, 11, 6]]
      >>> plan_packing(mask, most=0.4) is None
      True
    """
    checks.check_rank("plan_packing", 3, mask=mask)
    checks.check_bool("plan_packing", mask=mask)
    checks.check_positive("plan_packing", most=most)
    P, G, T = mask.shape
    lengths = np.max(np.where(mask, np.arange(1, T + 1), 0), axis=-1, initial=0)
    size = T if size is None else size
    if lengths.max(initial=0) > size:
        raise ValueError(
            f"plan_packing: a response of {lengths.max()} tokens does not fit into size {size}."
        )
    starts, rows = first_fit(lengths, size)
    # The next of 1, 2, 3, 4, 6, 8, 12, ...: few shapes to compile.
    power = 1 << (rows - 1).bit_length()
    rounded = power * 3 // 4 if power > 2 and rows <= power * 3 // 4 else power
    rows = min(rounded, G)
    if rows * size > most * G * T:
        return None
    members = np.full((P, rows * size), -1, np.int32)
    p, g, t = np.nonzero(np.arange(T) < lengths[..., None])
    members[p, starts[p, g] + t] = g
    return Packing(members.reshape(P, rows, size), starts)


def pack(packing: Packing | None, tree: ArrayTree) -> ArrayTree:
    """Arrays ``[P, G, T, ...]`` in the cells of the rows, ``[P, R, S, ...]``; as they are for None.

    A cell without a token gets 0 (False).
    """
    if packing is None:
        return tree
    members, starts = packing
    P, R, S = members.shape
    cells = jnp.arange(R * S, dtype=jnp.int32).reshape(R, S)
    member = jnp.maximum(members, 0)
    begin = jnp.take_along_axis(starts, member.reshape(P, -1), axis=1, mode="clip")
    place = cells - begin.reshape(P, R, S)
    return jax.tree.map(
        lambda x: _zero_masked(members >= 0, _take(x, member * x.shape[2] + place)),
        tree,
    )


def unpack(packing: Packing | None, tree: ArrayTree, mask: Array) -> ArrayTree:
    """The inverse of :func:`pack`: ``[P, R, S, ...] -> [P, G, T, ...]``, 0 where ``mask`` is False.

    The mask, bool ``[P, G, T]``, is True nowhere behind the end of a response in the plan.
    """
    if packing is None:
        return jax.tree.map(lambda x: _zero_masked(mask, x), tree)
    index = packing.starts[..., None] + jnp.arange(mask.shape[-1], dtype=jnp.int32)
    return jax.tree.map(lambda x: _zero_masked(mask, _take(x, index)), tree)


def check_packing(function: str, packing: Packing | None, groups: tuple[int, int]) -> None:
    """Raises unless a packing (None is skipped) is one of ``groups = (P, G)``."""
    if packing is None:
        return
    if not isinstance(packing, Packing):
        raise TypeError(f"{function}: packing must be a Packing; got {type(packing).__name__}.")
    checks.check_integer(function, members=packing.members, starts=packing.starts)
    checks.check_rank(function, 3, members=packing.members)
    shape = (groups[0], *jnp.shape(packing.members)[1:])
    checks.check_shape(function, "packing.members", packing.members, shape)
    checks.check_shape(function, "packing.starts", packing.starts, groups)


def first_fit(lengths: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    """Where each response begins, the longest first, and how many rows the fullest prompt has."""
    P, G = lengths.shape
    every, filled = np.arange(P), np.zeros((P, G), np.int64)
    starts = np.zeros((P, G), np.int32)
    for member in np.argsort(-lengths, axis=1, kind="stable").T:
        length = lengths[every, member]
        row = np.argmax(filled + length[:, None] <= size, axis=1)
        starts[every, member] = row * size + filled[every, row]
        filled[every, row] += length
    return starts, int((filled > 0).sum(axis=1).max(initial=1))


def _take(x: Array, index: Array) -> Array:
    """``x [P, A, B, ...]`` at places ``[P, ...]`` of the axes A and B as one."""
    flat = x.reshape(x.shape[0], -1, *x.shape[3:])
    places = index.reshape(index.shape[0], -1, *(1,) * (x.ndim - 3))
    return jnp.take_along_axis(flat, places, axis=1, mode="clip").reshape(
        *index.shape, *x.shape[3:]
    )


def _zero_masked(mask: Array, x: Array) -> Array:
    """``x [P, A, B, ...]`` where a mask ``[P, A, B]`` is True, else 0."""
    return jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - 3)), x, jnp.zeros((), x.dtype))
