"""Products of rows with the matrix of their group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.kernels.grouped import grouped_product

# Groups without rows at both ends and in the middle; one row; tiles that end within a group.
SIZES = {"some": [0, 7, 0, 1, 30, 0], "one": [0, 0, 0, 38, 0, 0], "few": [1, 0, 0, 1, 0, 1]}


def arrays(sizes, dtype="float32"):
    count = sum(sizes)
    x, kernels, dy = (
        jax.random.normal(jax.random.key(i), shape, dtype)
        for i, shape in enumerate([(count, 5), (len(sizes), 5, 3), (count, 3)])
    )
    return x, kernels, jnp.array(sizes), dy


@pytest.mark.parametrize("name", SIZES)
def test_each_row_is_multiplied_by_the_matrix_of_its_group(name):
    x, kernels, sizes, dy = arrays(SIZES[name])
    y, pullback = jax.vjp(jax.jit(lambda x, w: grouped_product(x, w, sizes)), x, kernels)
    d_x, d_kernels = pullback(dy)
    of_rows = np.asarray(kernels)[np.repeat(np.arange(len(sizes)), sizes)]
    np.testing.assert_allclose(y, np.einsum("ni,nio->no", x, of_rows), atol=1e-6)
    np.testing.assert_allclose(d_x, np.einsum("no,nio->ni", dy, of_rows), atol=1e-6)
    ends = np.cumsum(sizes)
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        rows = slice(end - size, end)
        np.testing.assert_allclose(d_kernels[group], x[rows].T @ dy[rows], atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loop_gives_what_accelerators_compute(dtype):
    x, kernels, sizes, dy = arrays(SIZES["some"], dtype)

    def both(product):
        y, pullback = jax.vjp(lambda x, w: product(x, w, sizes), x, kernels)
        return y, *pullback(dy)

    tolerance = {"float32": 1e-5, "bfloat16": 0.1}[dtype]
    for ours, theirs in zip(both(grouped_product), both(jax.lax.ragged_dot), strict=True):
        assert ours.dtype == theirs.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(theirs, np.float32), atol=tolerance
        )


def test_rows_beyond_a_group_are_not_in_its_gradient():
    """A tile goes on into the next group, whose rows may be anything."""
    x, kernels, sizes, dy = arrays(SIZES["some"])
    spoiled = x.at[7:].set(jnp.nan)
    gradient = jax.grad(lambda w: jnp.sum(grouped_product(spoiled, w, sizes) * dy))(kernels)
    assert np.isfinite(gradient[1]).all()
