"""Requests as host arrays of the shape of an engine's grid, as functions of slots take them."""

from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.rollout._inputs import check_limits, counts
from jaxrl_llm.rollout.engine.requests import Completion, Group
from jaxrl_llm.rollout.engine.scheduler import SlotIndex, StartedRequest
from jaxrl_llm.rollout.engine.spec import EngineSpec
from jaxrl_llm.rollout.slots import Requests, Tokens


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
    ids = np.zeros(spec.grid, np.int32)
    settings = {k: np.full(spec.grid, v, np.float32) for k, v in spec.draw.settings.items()}
    most = np.array([each.group.limits[each.request] for each in started], np.int64)
    length = np.array([len(each.group.partial.get(each.request, ())) for each in started], np.int64)
    ends = length + resume_budget(length, max_new_tokens=most, segment=segment)
    for (slot, request, group, _), end in zip(started, ends, strict=True):
        where[slot], ids[slot], limit[slot] = True, request, end
        for option, value in group.group.settings.items():
            settings[option][slot] = value
    return where, Requests(ids, limit, settings)


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
