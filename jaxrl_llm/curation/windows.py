"""The latest numbers of a series, in a ring buffer of fixed size.

Raises TypeError for an array of the wrong dtype, and ValueError for shapes that do not match.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks

__all__ = ["Window", "window_push"]


class Window(NamedTuple):
    """The latest numbers of a series, such as lengths of finished responses.

    Attributes:
      values: ``[H]``, a ring buffer.
      count: int32 ``[]``, total count of numbers; the first ``min(count, H)`` places are filled.
    """

    values: Array
    count: Array


def window_push(window: Window, values: Array, *, where: Array | None = None) -> Window:
    """The window after more numbers, in their order.

    Args:
      window: :class:`Window` of H places; ``Window(jnp.zeros(H, dtype), jnp.int32(0))`` is empty.
      values: ``[B]``, of the dtype of the window.
      where: bool ``[B]``, True for numbers that are added.

    Returns:
      The next :class:`Window`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> window = jr.curation.Window(jnp.zeros(3, jnp.int32), jnp.int32(0))
      >>> window = jr.curation.window_push(window, jnp.array([5, 6, 7, 8]))
      >>> window.values.tolist(), int(window.count)
      ([8, 6, 7], 4)

    References:
      Past-Future scheduler (arXiv:2507.10150): ``rollout.predict_remaining`` reads the lengths of
      the latest rows.
    """
    name = "window_push"
    checks.check_rank(name, 1, values=values)
    checks.check_bool(name, where=where)
    checks.check_same_shape(name, values=values, where=where)
    if jnp.result_type(values) != window.values.dtype:
        raise TypeError(
            f"{name}: values must be {window.values.dtype} as the window; "
            f"got {jnp.result_type(values)}."
        )
    (size,) = window.values.shape
    new = jnp.ones(jnp.shape(values), bool) if where is None else where
    rank, total = jnp.cumsum(new) - 1, jnp.sum(new, dtype=jnp.int32)
    # Of more than H numbers only the last H are written: no place is written twice.
    place = jnp.where(new & (total - rank <= size), (window.count + rank) % size, size)
    return Window(window.values.at[place].set(values, mode="drop"), window.count + total)
