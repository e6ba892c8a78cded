"""Small helpers over pytrees: paths, casts, norms."""

from collections.abc import Callable, Sequence

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


def as_arrays(tree: ArrayTree) -> ArrayTree:
    """Leaves as arrays of JAX, numbers in its default dtype; those that are, as they are."""

    def one(x):
        return x if isinstance(x, jax.Array) else jnp.asarray(x, jnp.result_type(x))

    return jax.tree.map(one, tree)


def zip_leaves(f: Callable[[list], Array], trees: Sequence[ArrayTree]) -> ArrayTree:
    """``f`` of the leaves that trees of one structure have at each place."""
    return jax.tree.map(lambda *leaves: f(list(leaves)), *trees)


def is_floating(x) -> bool:
    """Whether a leaf is floating point."""
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def check_alike(function: str, what: str, first: ArrayTree, other: ArrayTree) -> None:
    """Raises ValueError unless two trees have one structure and leaves of the same shapes."""
    if jax.tree.structure(first) != jax.tree.structure(other):
        one, two = (
            [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
            for tree in (first, other)
        )
        apart = [(path, "the first") for path in one if path not in set(two)]
        apart += [(path, "another") for path in two if path not in set(one)]
        why = "their containers differ"
        if apart:
            why = f"{apart[0][0]!r} is only in {apart[0][1]}"
        raise ValueError(f"{function}: {what} must have the same structure; {why}.")
    paths = jax.tree_util.tree_leaves_with_path(first)
    for (path, x), y in zip(paths, jax.tree.leaves(other), strict=True):
        if jnp.shape(x) != jnp.shape(y):
            raise ValueError(
                f"{function}: the leaves of {what} must have the same shapes; {path_str(path)} has "
                f"{jnp.shape(x)} and {jnp.shape(y)}."
            )


def norm(tree: ArrayTree) -> Array:
    """Euclidean norm over all leaves, summed in float32."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.float32(0.0)))


def size(tree: ArrayTree) -> int:
    """Number of elements over all leaves."""
    return sum(x.size for x in jax.tree.leaves(tree))
