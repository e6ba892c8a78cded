"""The plan of rows that different prompts share: which groups share a row, and how large it is.

All rows have one shape, ``L + R S`` cells, and each shape is compiled. So that few occur in a run,
S and the number of rows depend only on the shapes of the batch, and L and R are rounded up to the
next of a few sizes, of which each saves enough cells to be worth its compilation.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.packing import FlatPacking, first_fit, grow

# A smaller size must save so many cells of all rows, since each shape is compiled; and if it saves
# a quarter of the response cells, not a half, more.
LEAST_SAVED, _QUARTER = 128, 2048


def plan_flat(
    tokens: np.ndarray,
    mask: np.ndarray,
    prompt_tokens: np.ndarray,
    prompt_mask: np.ndarray,
    *,
    same: np.ndarray | None = None,
    least: float = 0.125,
    span: int = 1024,
    microbatches: int = 1,
    shards: int = 1,
    most: float = 1.0,
    shared_prefix_len: int = 0,
    least_saved: int = LEAST_SAVED,
) -> FlatPacking | None:
    """Plans rows that hold prompts of any groups and all responses to them.

    Groups are put into rows largest first, each into the row with the fewest tokens. Prompts of a
    row that begin alike share cells, and so do responses of a group, as in
    :func:`~jaxrl_llm.core.packing.plan_tree`. The plan depends only on the arrays.

    Longer rows waste fewer cells, since they differ less, but the cost of attention to the prompt
    cells of a row grows with its length. A row is planned for k groups, the number that minimizes

        (1 + 1 / (2 sqrt(k))) (1 + Lr / (2 span)),    Lr = c + k (Lp - c)

    where the first factor allows for cells that differences between rows leave empty, Lr are the
    prompt cells of a row, and c is ``shared_prefix_len``.

    Args:
      tokens: ``[P, G, T]`` integers on the host.
      mask: bool ``[P, G, T]``. A response ends with its last True. Masked tokens before the end are
        part of the response, since later tokens may attend to them.
      prompt_tokens: ``[P, Lp]`` integers, right padded.
      prompt_mask: bool ``[P, Lp]``, at least one token per prompt.
      same: ``[P, G, T, ...]``, values that shared response tokens must also have in common where
        ``mask`` is True; None for no such values.
      least: The smallest share of a response that is worth sharing, in [0, 1].
      span: Number of keys for which attention costs as much as the other products of a token.
      microbatches: M; group p belongs to microbatch ``p % M``, and rows do not cross microbatches.
      shards: Number of devices that the rows of a microbatch are split over.
      most: The largest share of the ``P (Lp + G T)`` cells that a plan may use, above 0.
      shared_prefix_len: Number of first tokens that all prompts share, below Lp; what they share
        beyond it is found, too, but rows are not planned for it.
      least_saved: The fewest cells of all rows for which a smaller size of L or of R is worth its
        compilation.

    Returns:
      Host arrays, or None if there would be more cells than ``most`` allows.

    Raises:
      ValueError: If the microbatches do not divide P, or ``shared_prefix_len`` is not below Lp.

    Example:
      >>> import numpy as np
      >>> prompts = np.array([[5, 6, 7], [5, 6, 8]])
      >>> tokens = np.array([[[1, 2], [1, 3]], [[4, 0], [4, 0]]])
      >>> mask = np.array([[[True, True]] * 2, [[True, False]] * 2])
      >>> flat = plan_flat(tokens, mask, prompts, np.ones((2, 3), bool), least_saved=1)
      >>> flat.prompt_sources.tolist(), flat.prompt_ends.tolist()
      ([[3, 4, 2, 5]], [[4, 4, 3, 4]])
      >>> flat.sources.tolist(), flat.cells.tolist()
      ([[[2, 1, 3, 6]]], [[[0, 1], [0, 2]], [[3, 3], [3, 3]]])
    """
    name = "plan_flat"
    checks.check_rank(name, 3, tokens=tokens, mask=mask)
    checks.check_same_shape(name, tokens=tokens, mask=mask)
    checks.check_rank(name, 2, prompt_tokens=prompt_tokens, prompt_mask=prompt_mask)
    checks.check_same_shape(name, prompt_tokens=prompt_tokens, prompt_mask=prompt_mask)
    checks.check_integer(name, tokens=tokens, prompt_tokens=prompt_tokens)
    checks.check_bool(name, mask=mask, prompt_mask=prompt_mask)
    checks.check_share(name, least=least)
    checks.check_positive(name, span=span, microbatches=microbatches, shards=shards, most=most)
    checks.check_non_negative(name, shared_prefix_len=shared_prefix_len, least_saved=least_saved)
    P, G, T = mask.shape
    Lp = prompt_mask.shape[1]
    if shared_prefix_len >= Lp:
        raise ValueError(
            f"{name}: shared_prefix_len must be below the {Lp} tokens of a prompt; got "
            f"{shared_prefix_len}."
        )
    if P % microbatches:
        raise ValueError(f"{name}: {P} prompts do not split into {microbatches} microbatches.")
    groups = P // microbatches
    most_groups = _groups_of_row(groups, Lp, span, shared_prefix_len)
    count = shards * math.ceil(groups / (most_groups * shards))  # rows of a microbatch
    each = groups / count  # groups of a row, on average
    S = 2 * T if span >= 8 * T else T

    lengths = np.max(np.where(mask, np.arange(1, T + 1), 0), axis=-1, initial=0)
    forests, paths = _grow_forests(tokens, mask, lengths, same, least=least, size=S)
    prompt_lengths = prompt_mask.sum(axis=-1)
    loads = prompt_lengths + [sum(tree.nodes for tree in forest) for forest in forests]
    rows: list[list[int]] = [[] for _ in range(count * microbatches)]
    for m in range(microbatches):
        _assign(range(m, P, microbatches), loads, rows[m::microbatches])
    row_of = np.zeros(P, np.int64)
    for n, members in enumerate(rows):
        row_of[members] = n

    prompt_cells, prompt_ends = _share_prompts(rows, prompt_tokens, prompt_lengths)
    full = _prompt_cells(each, Lp, shared_prefix_len)
    L = _rounded_up(max(map(len, prompt_ends)), full, least=least_saved / len(rows))
    sizes = np.zeros((len(rows), max(sum(len(forests[p]) for p in row) for row in rows)), np.int64)
    for n, members in enumerate(rows):
        of_row = [tree.nodes for p in members for tree in forests[p]]
        sizes[n, : len(of_row)] = of_row
    starts, needed = first_fit(sizes, S)
    full, part = each * G * T / S, len(rows) * S  # the cells that one more part takes in all rows
    R = _rounded_up(needed, full, least=least_saved / part, quarter=_QUARTER / part)
    if len(rows) * (L + R * S) > most * P * (Lp + G * T):
        return None

    cells, ends = _place_responses(rows, forests, paths, starts, shape=(len(rows), R * S), size=S)
    p, g, t = np.nonzero(np.arange(T) < lengths[..., None])
    order = np.argsort(mask[p, g, t], kind="stable")  # a token that trains is written last
    p, g, t = p[order], g[order], t[order]
    sources = np.full((len(rows), R * S), -1, np.int32)
    sources[row_of[p], cells[p, g, t]] = ((p // microbatches) * G + g) * T + t

    prompt_sources = np.full((len(rows), L), -1, np.int32)
    p, place = np.nonzero(np.arange(Lp) < prompt_lengths[:, None])
    prompt_sources[row_of[p], prompt_cells[p, place]] = (p // microbatches) * Lp + place
    return FlatPacking(
        prompt_sources=prompt_sources,
        prompt_cells=prompt_cells,
        prompt_ends=np.stack([np.pad(x, (0, L - len(x))) for x in prompt_ends]),
        sources=sources.reshape(-1, R, S),
        cells=(cells + (row_of // microbatches * R * S)[:, None, None]).astype(np.int32),
        ends=ends.reshape(-1, R, S),
        microbatches=microbatches,
    )


class _Tree(NamedTuple):
    """Responses of a group that begin alike; see :func:`~jaxrl_llm.core.packing.grow`."""

    members: list[int]
    nodes: int  # cells
    ends: np.ndarray


def _grow_forests(
    tokens: np.ndarray,
    mask: np.ndarray,
    lengths: np.ndarray,
    same: np.ndarray | None,
    *,
    least: float,
    size: int,
) -> tuple[list[list[_Tree]], np.ndarray]:
    """The trees of each group's responses, and the node ``[P, G, T]`` of each token in its tree."""
    P, G, T = mask.shape
    paths = np.zeros((P, G, T), np.int32)
    forests = []
    for p in range(P):
        words = None
        if same is not None:
            words = np.where(mask[p].reshape(G, T, *(1,) * (same.ndim - 3)), same[p], 0)
        grown = grow(tokens[p], lengths[p], words, paths[p], least=least, size=size)
        forests.append([_Tree._make(tree) for tree in grown])
    return forests, paths


def _share_prompts(
    rows: list[list[int]], prompt_tokens: np.ndarray, prompt_lengths: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The cell of each prompt token in its row, ``[P, Lp]``, and the ends of each row's cells."""
    Lp = prompt_tokens.shape[1]
    prompt_cells, prompt_ends = np.zeros(prompt_tokens.shape, np.int32), []
    for groups in rows:
        nodes_of_row = np.zeros(0, np.int32)
        cells_of_row = np.zeros((len(groups), Lp), np.int32)
        grown = grow(
            prompt_tokens[groups],
            prompt_lengths[groups],
            None,
            cells_of_row,
            least=0.0,
            size=len(groups) * Lp,
        )
        for members, nodes, ends in grown:
            cells_of_row[members] += len(nodes_of_row)
            nodes_of_row = np.concatenate([nodes_of_row, len(nodes_of_row) + ends[:nodes]])
        prompt_cells[groups] = cells_of_row
        prompt_ends.append(nodes_of_row)
    return prompt_cells, prompt_ends


def _place_responses(
    rows: list[list[int]],
    forests: list[list[_Tree]],
    paths: np.ndarray,
    starts: np.ndarray,
    *,
    shape: tuple[int, int],
    size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The cell of each response token in its row, ``[P, G, T]``, and the ends of all cells."""
    cells, ends = np.zeros(paths.shape, np.int64), np.zeros(shape, np.int32)
    for n, groups in enumerate(rows):
        places = iter(starts[n])
        for p in groups:
            for members, nodes, seen_to in forests[p]:
                start = next(places)
                cells[p, members] = start + paths[p, members]
                ends[n, start : start + nodes] = start % size + seen_to
    return cells, ends


def _prompt_cells(groups: float, length: int, shared: int) -> float:
    """Cells of the prompts of so many groups in one row, which share only their first tokens."""
    return shared + groups * (length - shared)


def _groups_of_row(groups: int, length: int, span: int, shared: int) -> int:
    """The number of groups for which a row is planned; see :func:`plan_flat`."""

    def cost(k: int) -> float:
        cells = _prompt_cells(k, length, shared)
        return (1 + 0.5 / math.sqrt(k)) * (1 + cells / (2 * span))

    return min(range(1, groups + 1), key=cost)


def _assign(groups: Iterable[int], loads: np.ndarray, rows: Sequence[list[int]]) -> None:
    """Puts each group into the row with the smallest load, largest first."""
    filled = [0] * len(rows)
    for p in sorted(groups, key=lambda p: (-loads[p], p)):
        n = int(np.argmin(filled))
        rows[n].append(p)
        filled[n] += int(loads[p])


def _rounded_up(needed: int, full: float, *, least: float, quarter: float = 0.0) -> int:
    """The smallest of a few sizes that is at least ``needed``: ``full``, multiples and parts of it.

    A smaller size is three quarters of the next larger one if that saves at least ``quarter`` and
    ``least``; else it saves so much, or a half. The sizes end where a half is less than ``least``.
    """
    sizes = _sizes(needed, full, least=least, quarter=quarter)
    return min(size for size in sizes if size >= needed)


def _sizes(needed: int, full: float, *, least: float, quarter: float = 0.0) -> Iterator[int]:
    """The sizes of :func:`_rounded_up`, from the smallest multiple of ``full`` that suffices."""
    size = math.ceil(full - 1e-9)
    size *= math.ceil(needed / size)
    yield size
    while size > 1:
        saved = math.ceil(max(quarter, least))
        smaller = min(math.ceil(max(size / 2, min(0.75 * size, size - saved))), size - 1)
        if size - smaller < least:
            return
        yield (size := smaller)


def smaller_rows(packing: FlatPacking, *, least_saved: int = LEAST_SAVED) -> FlatPacking | None:
    """The shapes of the rows that :func:`plan_flat` makes next if responses become shorter.

    Args:
      packing: Made with the same ``least_saved``.
      least_saved: See :func:`plan_flat`.

    Returns:
      The packing with shapes in the place of its response cells, or None if no rows are smaller.
    """
    (N, R, S), (P, G, T) = np.shape(packing.sources), np.shape(packing.cells)
    full, part = P / N * G * T / S, N * S
    sizes = list(_sizes(R, full, least=least_saved / part, quarter=_QUARTER / part))
    after = sizes[sizes.index(R) + 1 :] if R in sizes else []
    if not after:
        return None
    shape = jax.ShapeDtypeStruct((N, after[0], S), np.int32)
    return dataclasses.replace(packing, sources=shape, ends=shape)
