"""Small helpers over pytrees: paths, casts, norms."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array, ArrayTree


def path_str(path) -> str:
    """A key path as text: ``layers/0/mlp/up/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def map_with_path(f: Callable[[str, Array], ArrayTree], tree: ArrayTree) -> ArrayTree:
    """``f(path, leaf)`` of every leaf, with its path as text."""
    return jax.tree_util.tree_map_with_path(lambda path, x: f(path_str(path), x), tree)


def cast(tree: ArrayTree, dtype) -> ArrayTree:
    """Floating leaves in ``dtype``; the others as they are."""

    def one(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, tree)


def norm(tree: ArrayTree) -> Array:
    """Euclidean norm over all leaves, summed in float32."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.float32(0.0)))


def size(tree: ArrayTree) -> int:
    """Number of elements over all leaves."""
    return sum(x.size for x in jax.tree.leaves(tree))
