"""Requests as host arrays of the shape of an engine's grid, as functions of slots take them."""

from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.sizes import power_of_two
from jaxrl_llm.rollout._inputs import check_limits, counts
from jaxrl_llm.rollout.engine.requests import Completion, Group
from jaxrl_llm.rollout.engine.scheduler import SlotIndex, StartedRequest
from jaxrl_llm.rollout.engine.spec import EngineSpec
from jaxrl_llm.rollout.slots import Requests, Slots, Tokens

# The narrowest array of added tokens, and how many slots read theirs in one call.
_FEWEST, _SLOTS_READ = 16, 8


def resume_budget(length, *, max_new_tokens, segment: int | None = None) -> np.ndarray:
    """How many tokens a response may add when it starts or goes on.

        max(max_new_tokens - length, 0), at most ``segment``

    Where it is 0 the response has ended by its length. With a ``segment``, a long response is
    sampled over several rounds, a part in each.

    Args:
      length: int ``[...]``, tokens so far.
      max_new_tokens: int or ``[...]``, the longest response.
      segment: The most tokens it may add in one round, above 0; None for no such limit.

    Returns:
      int64 ``[...]``.

    Raises:
      TypeError: If counts are not integers.
      ValueError: If a count is negative, shapes do not match or ``segment`` is not above 0.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rollout.resume_budget([0, 90, 100], max_new_tokens=100, segment=25).tolist()
      [25, 10, 0]

    References:
      APRIL (arXiv:2509.18521); UloRL (arXiv:2507.19766) for segments, of which it has 8.
    """
    function = "resume_budget"
    length, limit = counts(function, length=length, max_new_tokens=max_new_tokens)
    check_limits(function, limit, length=length)
    checks.check_positive(function, segment=segment)
    left = np.maximum(limit - length, 0)
    return left if segment is None else np.minimum(left, segment)


def prompt_arrays(spec: EngineSpec, groups: Mapping[int, Group]) -> tuple[np.ndarray, ...]:
    """Prompts by row: ``(where, tokens, length, adapter)`` of ``slots.put_prompts``."""
    where = np.zeros(spec.rows, bool)
    tokens = np.full((spec.rows, spec.prompt_length), spec.pad_id, np.int32)
    length, adapter = np.ones(spec.rows, np.int32), np.zeros(spec.rows, np.int32)
    for row, group in groups.items():
        where[row], length[row], adapter[row] = True, len(group.prompt), group.adapter
        tokens[row, : len(group.prompt)] = group.prompt
    return where, tokens, length, adapter


def request_arrays(
    spec: EngineSpec, started: Sequence[StartedRequest], *, segment: int | None
) -> tuple[np.ndarray, Requests]:
    """Requests by slot: ``(where, requests)`` of ``slots.start``.

    ``segment`` is the most tokens that a response adds from here on.
    """
    where, limit = np.zeros(spec.grid, bool), np.ones(spec.grid, np.int32)
    ids, skipped = np.zeros(spec.grid, np.int32), np.zeros(spec.grid, np.int32)
    settings = {k: np.full(spec.grid, v, np.float32) for k, v in spec.draw.settings.items()}
    most = np.array([each.group.limits[each.request] for each in started], np.int64)
    length = np.array([len(each.group.partial.get(each.request, ())) for each in started], np.int64)
    ends = length + resume_budget(length, max_new_tokens=most, segment=segment)
    for each, begun, end in zip(started, length.tolist(), ends.tolist(), strict=True):
        slot, turn = each.slot, each.group.group.turn_limit
        end = end if turn is None else min(end, begun + turn)
        where[slot], ids[slot], limit[slot] = True, each.request, end
        skipped[slot] = each.group.left[each.request]
        for option, value in each.group.group.settings.items():
            settings[option][slot] = value
    return where, Requests(ids, limit, skipped, settings)


def partial_arrays(
    spec: EngineSpec, partial: Mapping[SlotIndex, Completion]
) -> tuple[np.ndarray, Tokens, np.ndarray]:
    """Partial responses by slot: ``(where, out, length)`` of ``slots.resume``."""
    where, length = np.zeros(spec.grid, bool), np.zeros(spec.grid, np.int32)
    out = jax.tree.map(
        lambda x: np.zeros((*spec.grid, spec.max_new_tokens, *x.shape), x.dtype), spec.draw.blank
    )
    for slot, each in partial.items():
        where[slot], length[slot] = True, len(each)
        for buffer, new in zip(jax.tree.leaves(out), jax.tree.leaves(each.out), strict=True):
            buffer[slot][: len(each)] = new
    return where, out, length


def turn_arrays(
    spec: EngineSpec,
    turns: Mapping[SlotIndex, tuple[Sequence[int], int]],
    lengths: Mapping[SlotIndex, int],
) -> tuple[np.ndarray, ...]:
    """Tokens and limits by slot: ``(where, tokens, count, limit, keep)`` of ``slots.extend``.

    The width of ``tokens`` is a power of two, so that few shapes are compiled.
    """
    longest = max(len(tokens) for tokens, _ in turns.values())
    width = min(power_of_two(max(longest, _FEWEST)), spec.max_new_tokens)
    where, count = np.zeros(spec.grid, bool), np.zeros(spec.grid, np.int32)
    limit, keep = np.ones(spec.grid, np.int32), np.zeros(spec.grid, np.int32)
    array = np.full((*spec.grid, width), spec.pad_id, np.int32)
    for slot, (tokens, most) in turns.items():
        where[slot], count[slot], limit[slot] = True, len(tokens), most
        array[slot][: len(tokens)], keep[slot] = tokens, lengths[slot]
    return where, array, count, limit, keep


def added_arrays(
    spec: EngineSpec, added: Mapping[SlotIndex, tuple[int, int]]
) -> list[tuple[np.ndarray, np.ndarray, np.int32]]:
    """Places and lengths of added tokens by slot: ``(index, first, longest)`` of ``fill_extended``.

    Slots with as many tokens stand in one call.
    """
    size = spec.shard_rows * spec.width
    shards: list[list[tuple[int, int, int]]] = [[] for _ in range(spec.shards)]
    for (row, column), (first, count) in sorted(added.items(), key=lambda each: each[1][1]):
        number = (row % spec.shard_rows) * spec.width + column
        shards[row // spec.shard_rows].append((number, first, count))
    arrays = []
    for start in range(0, max(map(len, shards)), _SLOTS_READ):
        taken = [shard[start : start + _SLOTS_READ] for shard in shards]
        longest = max(map(len, taken))
        width = 1 if longest == 1 else _SLOTS_READ
        index = np.full((spec.shards, width), size, np.int32)
        first = np.zeros((spec.shards, width), np.int32)
        for s, shard in enumerate(taken):
            for i, (number, begin, _) in enumerate(shard):
                index[s, i], first[s, i] = number, begin
        most = max(count for shard in taken for _, _, count in shard)
        arrays.append((index, first, np.int32(most)))
    return arrays


def row_arrays(spec: EngineSpec, rows: Iterable[int], sizes: Sequence[int]) -> list[np.ndarray]:
    """Distinct rows as ``decode.fill_prompts`` takes them: at least one array int32 ``[S, k]``.

    ``sizes`` are how many rows of each shard an array may hold, ascending; rows beyond the last
    size go into further arrays. The padding is a row beyond the end of a shard.
    """
    size, most = spec.shard_rows, sizes[-1]
    shards: list[list[int]] = [[] for _ in range(spec.shards)]
    for row in rows:
        shards[row // size].append(row % size)
    arrays = []
    for start in range(0, max(1, *map(len, shards)), most):
        taken = [shard[start : start + most] for shard in shards]
        longest = max(map(len, taken))
        array = np.full((spec.shards, min(n for n in sizes if n >= longest)), size, np.int32)
        for row, shard in zip(array, taken, strict=True):
            row[: len(shard)] = shard
        arrays.append(array)
    return arrays


def slot_array(spec: EngineSpec, slot: SlotIndex) -> np.ndarray:
    """One slot as ``slots.copy_slot`` takes it: int32 ``[S, 2]``."""
    row, column = slot
    array = np.tile(np.array([spec.shard_rows, 0], np.int32), (spec.shards, 1))
    array[row // spec.shard_rows] = row % spec.shard_rows, column
    return array


def taken_from(spec: EngineSpec, slot: SlotIndex, taken: Slots) -> Slots:
    """The result of ``slots.take_slot`` repeated for every shard, since it may return to any.

    ``take_slot`` takes a slot of each shard; only the one at ``slot`` was asked for.
    """
    shard = slot[0] // spec.shard_rows
    return jax.tree.map(lambda x: np.repeat(x[shard : shard + 1], spec.shards, axis=0), taken)
