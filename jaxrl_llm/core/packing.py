"""Packing of several responses into a row: the layout, packing and unpacking.

A :class:`Packing` puts the responses to a prompt one after the other. A :class:`Tree` stores shared
prefixes once, so that a model reads each unique token once. A :class:`FlatPacking` also lets
different prompts share rows.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.sizes import power_of_two


class Packing(NamedTuple):
    """R rows of S cells that hold the G responses to each of P prompts one after the other.

    Attributes:
      members: int32 ``[P, R, S]``, the response of each cell: 0 to G - 1, or -1 for none.
      starts: int32 ``[P, G]``, the cell where a response begins, counted over all rows of its
        prompt. Undefined for an empty response.
    """

    members: Array
    starts: Array


class Tree(NamedTuple):
    """R rows of S cells that store the common prefixes of the responses to a prompt once.

    A cell is a node: a token after certain other tokens. The nodes of a tree are in depth-first
    order, so the descendants of a node are a range of cells after it.

    Attributes:
      sources: int32 ``[P, R, S]``, the token of a cell as ``g T + t``, of one of the responses that
        share it, or -1 for none.
      cells: int32 ``[P, G, T]``, the node of each token: its cell, counted over all rows of its
        prompt. Undefined after the end of a response.
      ends: int32 ``[P, R, S]``, the position in the row after the last descendant of a cell: cell i
        sees cell j where ``j <= i < ends[j]``.
      parents: int32 ``[P, G, T]``, for responses that are trees themselves (:func:`row_trees`): the
        token that each token directly follows, or -1 for the prompt. None if this is always the
        token before.
      depths: int32 ``[P, G, T]``, the number of response tokens that each token comes after.
    """

    sources: Array
    cells: Array
    ends: Array
    parents: Array | None = None
    depths: Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FlatPacking:
    """N rows that hold the prompts of any groups and then all responses to them.

    A row begins with the cells of L prompt tokens, in which prompts that begin alike share cells.
    The R parts of S cells that follow hold trees of responses, as the rows of a :class:`Tree` do.
    The rows are those of M microbatches: row n belongs to microbatch ``n % M``, like group p to
    ``p % M``, and all indices are relative to the arrays of the microbatch.

    Attributes:
      prompt_sources: int32 ``[N, L]``, the token of a prompt cell as ``p Lp + l``, or -1 for none.
      prompt_cells: int32 ``[P, Lp]``, the cell of each prompt token within its row. Undefined after
        the end of a prompt.
      prompt_ends: int32 ``[N, L]``, the cell after the last prompt token that follows a prompt
        cell: cell i sees cell j where ``j <= i < prompt_ends[j]``.
      sources: int32 ``[N, R, S]``, the token of a response cell as ``(p G + g) T + t``, or -1.
      cells: int32 ``[P, G, T]``, the cell of each response token, counted over the response cells
        of all rows. Undefined after the end of a response.
      ends: int32 ``[N, R, S]``, as in :class:`Tree`.
      microbatches: M of the full batch; static.
      budget: Maximum number of cells of a microbatch on each device, if the rows were planned for
        one; static.
    """

    prompt_sources: Array
    prompt_cells: Array
    prompt_ends: Array
    sources: Array
    cells: Array
    ends: Array
    microbatches: int = field(default=1, metadata={"static": True})
    budget: int | None = field(default=None, metadata={"static": True})

    @property
    def num_cells(self) -> int:
        """Cells of all rows, of prompts and responses."""
        return self.prompt_sources.size + self.sources.size

    @property
    def tree(self) -> Tree:
        """The response cells as a tree ``[1, N R, S]`` of responses ``[1, P G, T]``."""
        return Tree(*(x.reshape(1, -1, x.shape[-1]) for x in (self.sources, self.cells, self.ends)))


Layout = Packing | Tree | FlatPacking


def plan_packing(mask: np.ndarray, *, size: int | None = None, most: float = 1.0) -> Packing | None:
    """Packs responses of unequal length into rows by first-fit decreasing.

    Each prompt has as many rows as the prompt that needs the most, rounded up to 1, 2, 3, 4, 6, 8,
    12, ..., so that few shapes are compiled. The plan depends only on the lengths.

    Args:
      mask: bool ``[P, G, T]`` on the host. A response ends with its last True. Masked tokens before
        the end are packed too, since later tokens may attend to them.
      size: S, cells of a row; T by default. Longer rows hardly pack denser, and the cost of
        attention within a row grows with its length.
      most: The largest share of the ``G * T`` cells that a plan may use, above 0.

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
            f"plan_packing: a response of {lengths.max()} tokens does not fit in size {size}."
        )
    starts, rows = first_fit(lengths, size)
    rows = min(_rounded(rows), G)
    if rows * size > most * G * T:
        return None
    members = np.full((P, rows * size), -1, np.int32)
    p, g, t = np.nonzero(np.arange(T) < lengths[..., None])
    members[p, starts[p, g] + t] = g
    return Packing(members.reshape(P, rows, size), starts)


def plan_tree(
    tokens: np.ndarray,
    mask: np.ndarray,
    *,
    same: np.ndarray | None = None,
    least: float = 0.125,
    size: int | None = None,
    most: float = 1.0,
) -> Tree | None:
    """Plans rows that store each unique token of a group once, where this saves time.

    Responses are sorted by their tokens. A response joins the tree of the response before it if the
    two share a prefix of at least ``least`` of its length and the tree has at most ``size`` nodes;
    otherwise it starts a new tree. Trees are put into rows like the responses of
    :func:`plan_packing`. The plan depends only on tokens and mask.

    Args:
      tokens: ``[P, G, T]`` integers on the host.
      mask: bool ``[P, G, T]``. A response ends with its last True. Masked tokens before the end are
        part of the response, since later tokens may attend to them.
      same: ``[P, G, T, ...]``, values that shared tokens must also have in common where ``mask`` is
        True, such as the words of a sampler's support; None for no such values.
      least: The smallest share of a response that is worth sharing, in [0, 1].
      size: Largest number of nodes of a tree; 3 T by default, since the cost of attention within a
        row grows with its length. Rows have T, 3 T / 2, 2 T, ... cells, whichever leaves the fewest
        cells empty.
      most: The largest share of the ``G * T`` cells that a plan may use, above 0.

    Returns:
      Host arrays, or None if there would be more cells than ``most`` allows.

    Raises:
      ValueError: If ``size`` is below T.

    Example:
      >>> import numpy as np
      >>> tree = plan_tree(np.array([[[5, 6, 7], [5, 6, 8], [9, 9, 9]]]), np.ones((1, 3, 3), bool))
      >>> tree.cells.tolist(), tree.ends.tolist()
      ([[[0, 1, 2], [0, 1, 3], [4, 5, 6]]], [[[4, 4, 3, 4, 7, 7, 7]]])
    """
    name = "plan_tree"
    checks.check_rank(name, 3, tokens=tokens, mask=mask)
    checks.check_same_shape(name, tokens=tokens, mask=mask)
    checks.check_integer(name, tokens=tokens)
    checks.check_bool(name, mask=mask)
    checks.check_share(name, least=least)
    checks.check_positive(name, most=most)
    P, G, T = mask.shape
    size = 3 * T if size is None else size
    if size < T:
        raise ValueError(f"{name}: size must be at least the {T} tokens of a response; got {size}.")
    lengths = np.max(np.where(mask, np.arange(1, T + 1), 0), axis=-1, initial=0)
    paths = np.zeros((P, G, T), np.int32)  # the node of each token within its tree
    sizes, roots = np.zeros((P, G), np.int64), np.zeros((P, G), np.int32)  # by tree; by member
    ends: dict[tuple[int, int], np.ndarray] = {}
    for p in range(P):
        words = None
        if same is not None:
            words = np.where(mask[p].reshape(G, T, *(1,) * (same.ndim - 3)), same[p], 0)
        trees = grow(tokens[p], lengths[p], words, paths[p], least=least, size=size)
        for i, (members, nodes, seen_to) in enumerate(trees):
            roots[p, members], sizes[p, i], ends[p, i] = i, nodes, seen_to
    half, largest = -(-T // 2), int(sizes.max(initial=0))
    plans = []
    for width in range(T, max(size, largest) + half, half):
        if width >= largest:
            starts, rows = first_fit(sizes, width)
            plans.append((min(_rounded(rows), G) * width, width, starts))
    cells_of_all, width, starts = min(plans, key=lambda plan: plan[:2])
    rows = cells_of_all // width
    if rows * width > most * G * T:
        return None
    cells = np.take_along_axis(starts, roots, axis=1)[..., None] + paths
    sources = np.full((P, rows * width), -1, np.int32)
    p, g, t = np.nonzero(np.arange(T) < lengths[..., None])
    order = np.argsort(mask[p, g, t], kind="stable")  # a token that trains is written last
    p, g, t = p[order], g[order], t[order]
    sources[p, cells[p, g, t]] = g * T + t
    until = np.zeros((P, rows * width), np.int32)
    for (p, i), seen_to in ends.items():
        start = starts[p, i]
        until[p, start : start + len(seen_to)] = start % width + seen_to
    return Tree(sources.reshape(P, rows, width), cells, until.reshape(P, rows, width))


def row_trees(ends: np.ndarray) -> Tree:
    """Responses that are trees themselves: some tokens are not seen by all later ones.

        token t comes after token s where s < t < ends[s]

    An example is an episode that rewrites earlier text: the first version has its end where the
    rewritten text begins. Each response has a row of its own.

    Args:
      ends: ``[P, G, T]`` integers on the host, each above the position of its token. The ends of
        tokens that come after a token are at most the end of that token.

    Returns:
      Host arrays.

    Raises:
      ValueError: If ``ends`` are not those of trees in depth-first order.

    Example:
      >>> import numpy as np
      >>> tree = row_trees(np.array([[[5, 3, 3, 5, 5]]]))
      >>> tree.parents.tolist(), tree.depths.tolist()
      ([[[-1, 0, 1, 0, 3]]], [[[0, 1, 2, 1, 2]]])
    """
    name = "row_trees"
    checks.check_rank(name, 3, ends=ends)
    checks.check_integer(name, ends=ends)
    P, G, T = ends.shape
    flat = np.asarray(ends).reshape(-1, T)
    depths = np.tile(np.arange(T, dtype=np.int32), (P * G, 1))
    parents = depths - 1
    for i in np.flatnonzero((flat < T).any(axis=-1)):
        row, parent, depth = flat[i], parents[i], depths[i]
        path: list[int] = []
        for t, end in enumerate(row.tolist()):
            while path and row[path[-1]] <= t:
                path.pop()
            if end <= t or (path and end > row[path[-1]]):
                raise ValueError(
                    f"{name}: token {t} has end {end}; it must be above the token's position and "
                    "at most the end of the token before it."
                )
            parent[t], depth[t] = path[-1] if path else -1, len(path)
            path.append(t)
    places = np.broadcast_to(np.arange(G * T, dtype=np.int32).reshape(G, T), ends.shape)
    return Tree(
        sources=places,
        cells=places,
        ends=np.asarray(ends, np.int32),
        parents=parents.reshape(ends.shape),
        depths=depths.reshape(ends.shape),
    )


def rewritten_rows(packing: Layout | None) -> Tree | None:
    """The layout, if its responses are trees themselves (:func:`row_trees`); else None."""
    return packing if isinstance(packing, Tree) and packing.parents is not None else None


def apart(tree: Tree) -> Tree:
    """The trees of :func:`row_trees` as those of ``P G`` groups of one response each."""
    P, G, T = tree.ends.shape
    places = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (P * G, 1, T))
    ends, parents, depths = (
        None if x is None else x.reshape(P * G, 1, T)
        for x in (tree.ends, tree.parents, tree.depths)
    )
    return Tree(sources=places, cells=places, ends=ends, parents=parents, depths=depths)


def grow(tokens, lengths, words, paths, *, least: float, size: int):
    """Yields the members, the number of nodes and the ends of each tree of responses ``[G, T]``.

    The node of each token is written to ``paths``.
    """
    rows = [tokens[g, :length].astype(">i8").tobytes() for g, length in enumerate(lengths)]
    members: list[int] = []
    nodes, ends = 0, np.zeros(0, np.int32)
    for g in sorted(np.flatnonzero(lengths), key=lambda g: (rows[g], g)):
        length, common = int(lengths[g]), 0
        if members:
            last = members[-1]
            shorter = min(length, int(lengths[last]))
            equal = tokens[g, :shorter] == tokens[last, :shorter]
            if words is not None:
                differ = words[g, :shorter] != words[last, :shorter]
                equal &= ~differ.reshape(shorter, -1).any(axis=-1)
            common = shorter if equal.all() else int(np.argmin(equal))
            if common < max(1.0, least * length) or nodes + length - common > size:
                ends[paths[last, : lengths[last]]] = nodes
                yield members, nodes, ends[:nodes]
                members, nodes, common = [], 0, 0
            else:
                ends[paths[last, common : lengths[last]]] = nodes
                paths[g, :common] = paths[last, :common]
        if not members:
            ends = np.zeros(size, np.int32)
        paths[g, common:length] = nodes + np.arange(length - common)
        nodes += length - common
        members.append(int(g))
    if members:
        ends[paths[members[-1], : lengths[members[-1]]]] = nodes
        yield members, nodes, ends[:nodes]


def pack(packing: Layout | None, tree: ArrayTree) -> ArrayTree:
    """Packs arrays ``[P, G, T, ...]`` into rows ``[P, R, S, ...]``; None leaves them unchanged.

    A :class:`FlatPacking` gives ``[N, R, S, ...]``, the response cells of all rows.

    A cell without a token gets 0 (False). A cell that several responses share gets the value of one
    of them, if possible of one that was in the mask when the plan was made. A mask is True if it is
    True for any of them, even if tokens have left the mask since.
    """
    if packing is None:
        return tree
    if isinstance(packing, FlatPacking):
        shape = packing.sources.shape
        packed = pack(packing.tree, jax.tree.map(lambda x: _one_prompt(x), tree))
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[3:]), packed)
    if isinstance(packing, Tree):
        sources = packing.sources

        def take(x: Array) -> Array:
            if jnp.result_type(x) == jnp.bool_ and jnp.shape(x) == packing.cells.shape:
                # Count the True tokens of each cell, then test whether there is any.
                P, R, S = sources.shape
                count = jax.vmap(lambda cells, index, m: cells.at[index].add(m.astype(jnp.int32)))
                none, index = jnp.zeros((P, R * S), jnp.int32), jnp.reshape(packing.cells, (P, -1))
                return (count(none, index, jnp.reshape(x, (P, -1))) > 0).reshape(P, R, S)
            return _zero_masked(sources >= 0, _take(x, jnp.maximum(sources, 0)))

        return jax.tree.map(take, tree)
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


def unpack(packing: Layout | None, tree: ArrayTree, mask: Array) -> ArrayTree:
    """The inverse of :func:`pack`: ``[P, R, S, ...] -> [P, G, T, ...]``, 0 where ``mask`` is False.

    All tokens that share a cell get its value, and its gradient is the sum of their gradients.

    The mask, bool ``[P, G, T]``, must be False after the end of a response in the plan.
    """
    if packing is None:
        return jax.tree.map(lambda x: _zero_masked(mask, x), tree)
    if isinstance(packing, FlatPacking):
        rows = jax.tree.map(lambda x: _one_prompt(x), tree)
        unpacked = unpack(packing.tree, rows, _one_prompt(mask))
        return jax.tree.map(lambda x: x.reshape(*mask.shape, *x.shape[3:]), unpacked)
    if isinstance(packing, Tree):
        index = packing.cells
    else:
        index = packing.starts[..., None] + jnp.arange(mask.shape[-1], dtype=jnp.int32)
    return jax.tree.map(lambda x: _zero_masked(mask, _take(x, index)), tree)


def pack_prompts(packing: FlatPacking, x: Array) -> Array:
    """Packs an array ``[P, Lp]`` into the prompt cells ``[N, L]``; 0 in cells without a token."""
    taken = jnp.take(jnp.reshape(x, -1), jnp.maximum(packing.prompt_sources, 0), axis=0)
    return _zero_masked(packing.prompt_sources >= 0, taken)


def check_packing(function: str, packing: Layout | None, shape: tuple[int, int, int]) -> None:
    """Raises unless a packing is None or is for responses of ``shape = (P, G, T)``."""
    if packing is None:
        return
    if isinstance(packing, FlatPacking):
        checks.check_integer(function, **{f"packing.{k}": x for k, x in vars(packing).items()})
        checks.check_rank(function, 3, sources=packing.sources)
        checks.check_rank(function, 2, prompt_sources=packing.prompt_sources)
        checks.check_shape(function, "packing.cells", packing.cells, shape)
        checks.check_same_shape(function, sources=packing.sources, ends=packing.ends)
        prompts = {"prompt_sources": packing.prompt_sources, "prompt_ends": packing.prompt_ends}
        checks.check_same_shape(function, **prompts)
        return
    if isinstance(packing, Tree):
        checks.check_integer(function, **{f"packing.{k}": x for k, x in packing._asdict().items()})
        checks.check_rank(function, 3, sources=packing.sources)
        checks.check_shape(function, "packing.cells", packing.cells, shape)
        rows = (shape[0], *jnp.shape(packing.sources)[1:])
        checks.check_shape(function, "packing.sources", packing.sources, rows)
        checks.check_shape(function, "packing.ends", packing.ends, rows)
        for name in ("parents", "depths"):
            if (value := getattr(packing, name)) is not None:
                checks.check_shape(function, f"packing.{name}", value, shape)
        return
    if not isinstance(packing, Packing):
        raise TypeError(
            f"{function}: packing must be a Packing, a Tree or a FlatPacking; got "
            f"{type(packing).__name__}."
        )
    checks.check_integer(function, members=packing.members, starts=packing.starts)
    checks.check_rank(function, 3, members=packing.members)
    rows = (shape[0], *jnp.shape(packing.members)[1:])
    checks.check_shape(function, "packing.members", packing.members, rows)
    checks.check_shape(function, "packing.starts", packing.starts, shape[:2])


def first_fit(lengths: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    """The start of each response, placed longest first, and the largest row count of a prompt."""
    P, G = lengths.shape
    every, filled = np.arange(P), np.zeros((P, G), np.int64)
    starts = np.zeros((P, G), np.int32)
    for member in np.argsort(-lengths, axis=1, kind="stable").T:
        length = lengths[every, member]
        row = np.argmax(filled + length[:, None] <= size, axis=1)
        starts[every, member] = row * size + filled[every, row]
        filled[every, row] += length
    return starts, int((filled > 0).sum(axis=1).max(initial=1))


def _rounded(rows: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, ...: few shapes to compile."""
    power = power_of_two(rows)
    return power * 3 // 4 if power > 2 and rows <= power * 3 // 4 else power


def _one_prompt(x: Array) -> Array:
    """``[A, B, ...]`` as ``[1, A B, ...]``."""
    return jnp.reshape(x, (1, -1, *jnp.shape(x)[2:]))


def _take(x: Array, index: Array) -> Array:
    """``x [P, A, B, ...]`` at indices ``[P, ...]`` into the merged axes A and B."""
    flat = x.reshape(x.shape[0], -1, *x.shape[3:])
    places = index.reshape(index.shape[0], -1, *(1,) * (x.ndim - 3))
    return jnp.take_along_axis(flat, places, axis=1, mode="clip").reshape(
        *index.shape, *x.shape[3:]
    )


def _zero_masked(mask: Array, x: Array) -> Array:
    """``x [P, A, B, ...]`` where a mask ``[P, A, B]`` is True, else 0."""
    return jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - 3)), x, jnp.zeros((), x.dtype))
