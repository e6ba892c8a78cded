"""The noise class of each leaf of a model's parameters: by rules, and as a table.

The package describes ``params`` and ``classes``. Trees that do not match, and an unknown class,
raise ValueError.
"""

import fnmatch
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, ArrayTree, checks, trees
from jaxrl_llm.evolution import _inputs, noise

LeafClass = Literal["lowrank", "embedding", "full", "frozen"]
CLASSES: tuple[LeafClass, ...] = ("lowrank", "embedding", "full", "frozen")
# Their noise is a product of two thin factors.
FACTORED = ("lowrank", "embedding")
# Tables of the vocabulary: nothing perturbs them unless a rule matches.
_TABLES = ("embed/*", "head/*", "*/embed/*", "*/head/*")


def leaf_classes(
    params: ArrayTree,
    *,
    rules: Sequence[tuple[str, LeafClass]] = (),
    others: Literal["frozen", "full"] = "frozen",
) -> ArrayTree:
    """The noise class of every leaf.

        lowrank     a matrix that multiplies activations: noise of rank r; of a stack ``[E, in,
                    out]``, such as the matrices of experts, each matrix has its own
        embedding   a table ``[V, D]`` that rows are read from: noise of rank r, row by row
        full        any other leaf: a draw for each of its entries
        frozen      none, and no update

    A leaf has the class of the first rule whose pattern matches its path. Without a matching rule,
    a floating-point matrix is ``lowrank``, and so is a stack of them at ``.../experts/.../kernel``;
    other floating-point leaves are ``others``, and the tables of the vocabulary (``embed/...``,
    ``head/...``) and integers are frozen.

    Args:
      params: See the package.
      rules: ``(pattern, class)``; in a pattern ``*`` stands for any text, also with ``/`` in it:
        ``("*/mlp/*", "frozen")``.
      others: Class of norms, biases and other leaves that are not matrices.

    Returns:
      Pytree of the class names, in the form of ``params``.

    Raises:
      ValueError: If a rule matches no leaf, or its class does not suit a leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> params = {"up": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}}
      >>> jr.evolution.leaf_classes(params)["up"] == {"kernel": "lowrank", "bias": "frozen"}
      True
      >>> jr.evolution.leaf_classes(params, rules=[("*bias", "full")])["up"]["bias"]
      'full'

    References:
      EGGROLL (arXiv:2511.16652): its scripts for language models freeze the embedding, the head and
      all leaves that are not low rank. Its float code has no noise for embeddings; the paper and
      the integer code do.
    """
    checks.check_option("leaf_classes", "others", others, ("frozen", "full"))
    matched = set()

    def one(path: str, leaf) -> str:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        for i, (pattern, name) in enumerate(rules):
            checks.check_option("leaf_classes", "class", name, CLASSES)
            if not fnmatch.fnmatchcase(path, pattern):
                continue
            matched.add(i)
            stack = name == "lowrank" and floating and len(leaf.shape) == 3
            if name in FACTORED and len(leaf.shape) != 2 and not stack:
                raise ValueError(
                    f"leaf_classes: {path!r} has shape {tuple(leaf.shape)}, so it cannot be "
                    f"{name!r}."
                )
            # Integer weights are perturbed as numbers, in units of their scale.
            if not floating and name != "frozen" and leaf.dtype != jnp.int8:
                raise ValueError(
                    f"leaf_classes: {path!r} is {leaf.dtype}, so it cannot be {name!r}."
                )
            return name
        if not floating or any(fnmatch.fnmatchcase(path, table) for table in _TABLES):
            return "frozen"
        # The biases of experts are a matrix too, but multiply nothing.
        *modules, last = path.split("/")
        stack = len(leaf.shape) == 3 and last == "kernel" and "experts" in modules
        matrix = len(leaf.shape) == 2 and last != "bias"
        return "lowrank" if matrix or stack else others

    classes = trees.map_with_path(one, params)
    paths = [trees.path_str(path) for path, _ in jax.tree.leaves_with_path(params)]
    for i, (pattern, _) in enumerate(rules):
        # A rule behind a wider one may still match, to no effect.
        if i not in matched:
            hidden = any(fnmatch.fnmatchcase(path, pattern) for path in paths)
            why = "is behind a rule that matches the same" if hidden else "matches no leaf"
            some = ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if paths[4:] else "")
            raise ValueError(f"leaf_classes: rule {pattern!r} {why}; leaves are {some}.")
    return classes


def moving(classes: ArrayTree) -> ArrayTree:
    """The leaves that an optimizer may change: all but the frozen ones.

    ``optax.masked(optax.adamw(...), moving(classes))`` excludes frozen leaves from weight decay
    (their gradient is zero but their weights are not) and stores no state for them.

    Args:
      classes: See the package.

    Returns:
      Pytree of bool.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.evolution.moving({"kernel": "lowrank", "bias": "frozen"}) == {
      ...     "kernel": True, "bias": False}
      True

    References:
      Ours; in the code of EGGROLL (arXiv:2511.16652) weight decay also changes excluded leaves.
    """

    def one(name: str) -> bool:
        checks.check_option("moving", "class", name, CLASSES)
        return name != "frozen"

    return jax.tree.map(one, classes)


def check_classes(function: str, params: ArrayTree, classes: ArrayTree, rank: int | None) -> None:
    """Raises ValueError unless ``classes`` matches ``params`` and something moves."""
    if jax.tree.structure(params) != jax.tree.structure(classes):
        raise ValueError(f"{function}: classes must have the form of params; see leaf_classes.")
    if not any(jax.tree.leaves(moving(classes))):
        raise ValueError(f"{function}: every leaf is frozen, so that there is nothing to evolve.")
    if rank is not None:
        for path, leaf, name in by_leaf(params, classes):
            if name in FACTORED:
                check = _inputs.check_matrices if name == "lowrank" else _inputs.check_matrix
                check(function, tuple(leaf.shape), rank, f"leaf {path!r}")


def check_evolution(function, params, classes, key, *, rank, noise_reuse, sigma=None) -> None:
    """Raises unless these arguments, which several functions share, are consistent."""
    checks.check_key(function, key)
    _inputs.check_at_least(function, 0, noise_reuse=noise_reuse)
    check_classes(function, params, classes, rank)
    checks.check_non_negative(function, sigma=sigma)


def by_leaf(params: ArrayTree, classes: ArrayTree) -> list[tuple[str, jax.Array, str]]:
    """``(path, leaf, class)`` of every leaf, in the order of the tree."""
    names = jax.tree.leaves(classes)
    rows = jax.tree.leaves_with_path(params)
    return [
        (trees.path_str(path), leaf, name) for (path, leaf), name in zip(rows, names, strict=True)
    ]


def num_drawn(name: str, shape: tuple[int, ...], rank: int) -> int:
    """Number of random values that a member draws for a leaf of this class and shape."""
    if name not in FACTORED:
        return 0 if name == "frozen" else math.prod(shape)
    *stack, rows, columns = shape
    return math.prod(stack) * (rows + columns) * rank


def map_alike(params, classes, key: Array, one: Callable) -> list:
    """``one(leaf_key, class, leaf)`` of every leaf that moves, None for the others, in tree order.

    A model has many leaves of few kinds. Leaves that are alike in all layers, and have the same
    sharding on a mesh, are processed one after the other by one loop, which compiles in a fraction
    of the time of compiling each alone. Without ``jit`` it would compile at every call.
    """
    rows = by_leaf(params, classes)
    results: list = [None] * len(rows)
    kinds: dict[tuple, list[int]] = {}
    for i, (path, leaf, name) in enumerate(rows):
        if name != "frozen":
            kind = (_in_any_layer(path), name, tuple(leaf.shape), leaf.dtype)
            kinds.setdefault(kind, []).append(i)
    for (_, name, shape, dtype), places in kinds.items():
        keys = noise.leaf_keys(key, [rows[i][0] for i in places])
        alike = functools.partial(one, name=name, leaf=jax.ShapeDtypeStruct(shape, dtype))
        if len(places) == 1:
            results[places[0]] = alike(keys[0])
            continue
        many = jax.lax.map(alike, keys)
        for j, i in enumerate(places):
            results[i] = jax.tree.map(lambda x, j=j: x[j], many)
    return results


def _in_any_layer(path: str) -> str:
    """A path with its numbers as ``*``."""
    return "/".join("*" if name.isdigit() else name for name in path.split("/"))


def leaf_table(params: ArrayTree, classes: ArrayTree, *, rank: int = 1) -> str:
    """The classes as a readable table: one line per kind of leaf, with numbers in paths as ``*``.

    Args:
      params, classes, rank: See the package.

    Returns:
      Lines without a final newline: path, class, shape, number of such leaves, number of their
      parameters, and number of random values that a member draws for them.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> layer = {"kernel": jnp.zeros((64, 32)), "bias": jnp.zeros(32)}
      >>> params = {"layers": {"0": layer, "1": layer}}
      >>> print(jr.evolution.leaf_table(params, jr.evolution.leaf_classes(params)))
      leaf             class    shape    leaves  parameters  drawn
      layers/*/bias    frozen   32            2          64      0
      layers/*/kernel  lowrank  64 x 32       2       4,096    192
      total                                   4       4,160    192

    References:
      Ours.
    """
    check_classes("leaf_table", params, classes, rank)
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for path, leaf, name in by_leaf(params, classes):
        general = _in_any_layer(path)
        shape, size = " x ".join(map(str, leaf.shape)) or "1", math.prod(leaf.shape)
        drawn = num_drawn(name, leaf.shape, rank)
        count = kinds.setdefault((general, name, shape), [0, 0, 0])
        for i, more in enumerate((1, size, drawn)):
            count[i] += more
    rows = [(*kind, *(f"{n:,}" for n in count)) for kind, count in kinds.items()]
    totals = [f"{sum(column):,}" for column in zip(*kinds.values(), strict=True)]
    header = ("leaf", "class", "shape", "leaves", "parameters", "drawn")
    rows = [header, *rows, ("total", "", "", *totals)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = []
    for row in rows:
        cells = list(zip(row, widths, strict=True))
        text = [cell.ljust(width) for cell, width in cells[:3]]
        lines.append("  ".join([*text, *(cell.rjust(width) for cell, width in cells[3:])]))
    return "\n".join(lines)
