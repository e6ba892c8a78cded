"""Products of rows with the matrix of their group, as the experts of a mixture need them.

Rows are sorted by group, so that each group is one product. Accelerators take
``jax.lax.ragged_dot``. Its program for CPUs multiplies all rows with every matrix, E times the
work; there a loop goes over tiles of rows that have one matrix each.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.products import row_products, sum_over_rows

_SMALLEST_TILE, _LARGEST_TILE = 4, 128  # rows


def grouped_product(x: Array, kernels: Array, sizes: Array) -> Array:
    """``x[n] W[g(n)]``, where the first ``sizes[0]`` rows are group 0, the next group 1 ...

    Args:
      x: ``[N, in]``, sorted by group.
      kernels: ``[E, in, out]``, one matrix for each group, in the dtype of ``x``.
      sizes: int32 ``[E]``, number of rows of each group; their sum is N.

    Returns:
      ``[N, out]`` in the dtype of ``x``.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxrl_llm.core.kernels.grouped import grouped_product
      >>> x = jnp.array([[1.0], [2.0], [3.0]])
      >>> kernels = jnp.array([[[10.0]], [[20.0]], [[30.0]]])
      >>> grouped_product(x, kernels, jnp.array([2, 0, 1]))[:, 0].tolist()
      [10.0, 20.0, 90.0]
    """
    if jax.default_backend() != "cpu":
        return jax.lax.ragged_dot(x, kernels, sizes)
    return _in_tiles(x, kernels, sizes)


@jax.custom_vjp
def _in_tiles(x: Array, kernels: Array, sizes: Array) -> Array:
    tiles = _Tiles(len(x), sizes)

    def multiply(i, y):
        group, start, of_group = tiles.at(i)
        return tiles.put(y, row_products(tiles.rows(x, start), kernels[group]), start, of_group)

    return jax.lax.fori_loop(0, tiles.total, multiply, _buffer(x, kernels.shape[2]))


def _buffer(x: Array, width: int) -> Array:
    """``[N, width]``, of which a loop overwrites every row.

    Not of zeros: the compiler would allocate constants of all layers before the first.
    """
    return jnp.broadcast_to(x[0, 0], (len(x), width))


class _Tiles:
    """Tiles of equally many rows, for rows of one group each.

    Their size is about half a group of average size, so that few of the rows are not of the group.
    """

    def __init__(self, count: int, sizes: Array):
        average = max(count // len(sizes) // 2, _SMALLEST_TILE)
        self.count = count
        self.size = min(1 << (average.bit_length() - 1), _LARGEST_TILE, count)
        self.sizes, self.each = sizes, -(-sizes // self.size)
        self.ends, self.row_ends = jnp.cumsum(self.each), jnp.cumsum(sizes)
        self.total = self.ends[-1]

    def at(self, i: Array) -> tuple[Array, Array, Array]:
        """Of tile i, the group, the first row, and which rows are of the group: ``[size, 1]``."""
        group = jnp.searchsorted(self.ends, i, side="right", method="compare_all")
        before, end = i - (self.ends[group] - self.each[group]), self.row_ends[group]
        first = end - self.sizes[group] + before * self.size
        start = jnp.minimum(first, self.count - self.size)
        rows = start + jnp.arange(self.size)
        return group, start, ((first <= rows) & (rows < end))[:, None]

    def rows(self, x: Array, start: Array) -> Array:
        """The rows of a tile."""
        return jax.lax.dynamic_slice_in_dim(x, start, self.size)

    def put(self, x: Array, new: Array, start: Array, of_group: Array) -> Array:
        """``x`` with new rows of a tile, where they are of its group."""
        new = jnp.where(of_group, new, self.rows(x, start))
        return jax.lax.dynamic_update_slice_in_dim(x, new, start, axis=0)


def _forward(x, kernels, sizes):
    return _in_tiles(x, kernels, sizes), (x, kernels, sizes)


def _backward(saved, dy):
    x, kernels, sizes = saved
    tiles = _Tiles(len(x), sizes)

    def accumulate(i, sums):
        d_x, d_kernels = sums
        group, start, of_group = tiles.at(i)
        rows, d_rows = tiles.rows(x, start), tiles.rows(dy, start)
        new = row_products(d_rows, kernels[group], transposed=True)
        d_x = tiles.put(d_x, new, start, of_group)
        # Both, since rows of other groups may not even be finite.
        rows, d_rows = (jnp.where(of_group, x, 0) for x in (rows, d_rows))
        d_kernel = sum_over_rows(rows, d_rows, dtype=jnp.float32)
        return d_x, d_kernels.at[group].add(d_kernel)

    sums = _buffer(dy, x.shape[1]), jnp.zeros(kernels.shape, jnp.float32)
    d_x, d_kernels = jax.lax.fori_loop(0, tiles.total, accumulate, sums)
    return d_x, d_kernels.astype(kernels.dtype), None


_in_tiles.defvjp(_forward, _backward)
