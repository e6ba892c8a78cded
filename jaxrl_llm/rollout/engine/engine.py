"""The engine: many requests through a fixed number of slots, on any number of weights.

The device side is a handful of compiled functions over :class:`~jaxrl_llm.rollout.slots.Slots`. The
host side is a :class:`~jaxrl_llm.rollout.Generation`, which fills slots and collects responses.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.core.runtime.threads import LAUNCHING
from jaxrl_llm.models.denoising import check_causal
from jaxrl_llm.models.protocol import Model, cast_params, has_states
from jaxrl_llm.models.sharding import batch_sharding, batch_shards, kv_sharding, sampling_on_mesh
from jaxrl_llm.rollout import slots as slot_functions
from jaxrl_llm.rollout._inputs import check_sizes, check_spread
from jaxrl_llm.rollout.compaction import compact_slots, decode_compacted, smaller_grid
from jaxrl_llm.rollout.decode import decode as decode_slots
from jaxrl_llm.rollout.decode import fill_extended as fill_extended_slots
from jaxrl_llm.rollout.decode import fill_prompts as fill_prompt_slots
from jaxrl_llm.rollout.decode import fill_responses as fill_response_slots
from jaxrl_llm.rollout.engine import memory
from jaxrl_llm.rollout.engine.request_arrays import (
    added_arrays,
    partial_arrays,
    prompt_arrays,
    request_arrays,
    row_arrays,
    slot_array,
    turn_arrays,
)
from jaxrl_llm.rollout.engine.scheduler import SlotIndex
from jaxrl_llm.rollout.engine.spec import EngineSpec
from jaxrl_llm.rollout.sampling.options import DrawOptions, make_draw, with_experts
from jaxrl_llm.rollout.slots import Slots, Tokens

# Prompts read in one call: enough to keep a device busy, few enough to have similar lengths. On a
# CPU, which is busy with fewer tokens, rows without a prompt take as long as the others.
_ROWS_READ, _TOKENS_READ_ON_CPU = 8, 256
# Added tokens read in one pass: most observations are short.
_ADDED_BLOCKS = (8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model with the compiled functions that decode in slots; see :func:`make_engine`.

    Methods that run on the device raise MemoryError if its memory is too small; the message names
    the number of slots for which it has room.

    Attributes:
      model: The model.
      spec: Its sizes, and how it draws.
      row_counts: How many rows of each device are read in one call: a few sizes.
      small_grid: Rows and width of a smaller grid for the last long responses, or None.
      row_bytes: Bytes of one row of slots on its device, with the keys and values of its prompt.
      devices: The devices of this process that hold slots; empty for the default one.
      has_states: Whether the model has linear attention; see `models.protocol.has_states`.
      functions: The compiled functions by name.
    """

    model: Model
    spec: EngineSpec
    row_counts: tuple[int, ...]
    small_grid: tuple[int, int] | None
    row_bytes: int
    devices: tuple[jax.Device, ...]
    has_states: bool
    functions: dict[str, Any]

    @classmethod
    def build(cls, model: Model, spec: EngineSpec, mesh: jax.sharding.Mesh | None) -> "Engine":
        """The engine of a spec; on a mesh, slots are spread by rows, keys and values by heads too.

        :func:`make_engine` checks options and makes the spec of them.
        """
        shapes, shardings = jax.eval_shape(lambda: _init_slots(model, spec)), None
        if mesh is not None:
            shardings = jax.tree.map(lambda x: batch_sharding(mesh), shapes)
            prefix, cache = jax.tree.map(
                lambda x: kv_sharding(x.shape, mesh), (shapes.prompts.prefix, shapes.cache)
            )
            prompts = shardings.prompts._replace(prefix=prefix)
            shardings = shardings._replace(prompts=prompts, cache=cache)
        return cls(
            model=model,
            spec=spec,
            row_counts=tuple(sorted({1, min(spec.shard_rows, _rows_read(spec.prompt_length))})),
            # On a mesh, slots would have to move from device to device.
            small_grid=smaller_grid(spec.rows, spec.width) if spec.shards == 1 else None,
            row_bytes=memory.row_bytes(shapes, shardings),
            devices=() if mesh is None else tuple(mesh.local_devices),
            has_states=has_states(model),
            functions=_compile(model, spec, mesh, shardings),
        )

    def init(self) -> Slots:
        """Empty slots on the device."""
        spec, devices = self.spec, self.devices
        if not memory.has_room(spec.rows, self.row_bytes, shards=spec.shards, devices=devices):
            raise MemoryError(self._out_of_memory())
        # No step of an environment waits for the lock yet while this compiles.
        with self._memory_errors(allocated=False), LAUNCHING:
            return self.functions["init"]()

    def call(self, name: str, *arguments):
        """Calls one of the other functions, which donates the slots that it gets."""
        with self._memory_errors(allocated=True):
            return self.functions[name](*arguments)

    def fetch(self, arrays: ArrayTree) -> ArrayTree:
        """Arrays on the host, once they are computed."""
        with self._memory_errors(allocated=True):
            return processes.to_host(arrays)

    def fill(
        self,
        params: ArrayTree,
        slots: Slots,
        deltas,
        rows: list[int],
        resumed: list[SlotIndex],
        copies: Mapping[int, int] = MappingProxyType({}),
    ) -> Slots:
        """Computes the keys and values of the prompts of rows, then of resumed responses.

        A call takes as long as its longest prompt, so rows of similar lengths should be neighbors.
        ``copies`` are rows that hold the same prompt as another row of their device, which they
        name.
        """
        for array in row_arrays(self.spec, rows, self.row_counts) if rows else ():
            slots = self.call("fill_prompts", params, slots, array, deltas)
        for array in row_arrays(self.spec, copies, self.row_counts) if copies else ():
            size = self.spec.shard_rows
            source = np.zeros_like(array)
            for s, k in np.argwhere(array < size).tolist():
                source[s, k] = copies[s * size + array[s, k]] % size
            slots = self.call("copy_prompts", slots, source, array)
        if resumed:
            where = np.zeros(self.spec.grid, bool)
            where[tuple(np.array(resumed).T)] = True
            size = self.spec.shard_rows
            (array,) = row_arrays(self.spec, np.flatnonzero(where.any(axis=1)).tolist(), (size,))
            count = np.int32((array < size).sum(axis=1).max())
            slots = self.call("fill_responses", params, slots, array, count, where, deltas)
        return slots

    def extend(
        self,
        params: ArrayTree,
        slots: Slots,
        deltas,
        turns: Mapping[SlotIndex, tuple[Sequence[int], int]],
        lengths: Mapping[SlotIndex, int],
        read_before: Mapping[SlotIndex, int],
    ) -> Slots:
        """Adds tokens to responses that have ended, and reads them.

        Args:
          params, slots, deltas: Of the run.
          turns: By slot, the tokens and the longest response from here on.
          lengths: By slot, the tokens before them; others leave the response.
          read_before: By slot, how many of these need not be read again.
        """
        slots = self.call("extend", slots, *turn_arrays(self.spec, turns, lengths))
        added = {}
        for slot, (tokens, _) in turns.items():
            first = read_before[slot]
            added[slot] = (first, lengths[slot] + len(tokens) - first)
        for index, first, longest in added_arrays(self.spec, added):
            block = next((n for n in _ADDED_BLOCKS if n >= longest), _ADDED_BLOCKS[-1])
            name = f"fill_extended_{block}"
            slots = self.call(name, params, slots, index, first, longest, deltas)
        return slots

    def outputs(self, slots: Slots, indices: list[SlotIndex]) -> list[Tokens]:
        """The sampled tokens of some slots, arrays ``[T]`` on the host."""
        if not indices:
            return []
        size = min(n for n in powers(self.spec.rows * self.spec.width) if n >= len(indices))
        padded = np.pad(np.array(indices, np.int32), ((0, size - len(indices)), (0, 0)))
        out = self.fetch(self.call("take_tokens", slots.out, padded[:, 0], padded[:, 1]))
        return [jax.tree.map(lambda x, i=i: x[i], out) for i in range(len(indices))]

    @contextlib.contextmanager
    def _memory_errors(self, *, allocated: bool) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise MemoryError(self._out_of_memory(allocated=allocated)) from error

    def _out_of_memory(self, *, allocated: bool = False) -> str:
        spec = self.spec
        return memory.out_of_memory(
            spec.rows,
            spec.width,
            self.row_bytes,
            shards=spec.shards,
            devices=self.devices,
            allocated=allocated,
        )

    def compiled(self) -> int:
        """Number of programs compiled so far: constant after :meth:`warm_up`."""
        return sum(f._cache_size() for f in self.functions.values())

    def warm_up(
        self,
        params: ArrayTree,
        *,
        resumed: bool = False,
        turns: bool = False,
        deltas: ArrayTree | None = None,
    ) -> None:
        """Compiles every program that :class:`~jaxrl_llm.rollout.Generation` may call.

        ``params`` and ``deltas`` are like those to come; ``resumed`` also compiles what resumes
        responses, after a stop or new weights, and ``turns`` what adds short observations.
        """
        call, spec, zero = self.call, self.spec, np.int32(0)
        params = cast_params(self.model, params)
        none, slot = np.zeros(spec.grid, bool), slot_array(spec, (0, 0))
        slots = call("put_prompts", self.init(), *prompt_arrays(spec, {}))
        for count in self.row_counts:
            (rows,) = row_arrays(spec, [], (count,))
            slots = call("fill_prompts", params, slots, rows, deltas)
            slots = call("copy_prompts", slots, np.zeros_like(rows), rows)
        slots = call("clear_cache", slots, none)
        slots = call("start", slots, *request_arrays(spec, [], segment=None))
        if resumed:
            slots = call("resume", slots, *partial_arrays(spec, {}))
            (rows,) = row_arrays(spec, [], (spec.shard_rows,))
            slots = call("fill_responses", params, slots, rows, zero, none, deltas)
        if turns:
            most = min(_ADDED_BLOCKS[-1], spec.max_new_tokens)
            counts = (1, 2) if spec.rows * spec.width > 1 else (1,)
            for count, n in itertools.product(counts, (*_ADDED_BLOCKS, most)):
                tokens = [spec.pad_id] * min(n, most)
                ends = {divmod(i, spec.width): (tokens, 1) for i in range(count)}
                none_before = dict.fromkeys(ends, 0)
                slots = self.extend(params, slots, deltas, ends, none_before, none_before)
            slots = call("end_slots", slots, ~none, zero)
            slots = call("put_slot", slots, slot, call("take_slot", slots, slot))
        key, one = jax.random.key(0), np.int32(1)
        slots = call("decode", params, slots, key, zero, one, zero, deltas, None)
        if self.small_grid is not None:
            compaction = compact_slots([], self.small_grid)
            slots = call("decode", params, slots, key, zero, one, zero, deltas, compaction)
        slots = call("copy_slot", slots, slot, slot, zero)
        slots = call("end_slots", slots, none, zero)
        for count in powers(spec.rows * spec.width):
            call("take_tokens", slots.out, np.zeros(count, np.int32), np.zeros(count, np.int32))
        jax.block_until_ready(slots)


def _rows_read(prompt_length: int) -> int:
    """The most prompts that are read in one call."""
    if jax.default_backend() != "cpu":
        return _ROWS_READ
    return min(max(1, _TOKENS_READ_ON_CPU // prompt_length), _ROWS_READ)


def make_engine(
    model: Model,
    *,
    rows: int = 8,
    width: int = 8,
    prompt_length: int = 256,
    max_new_tokens: int = 256,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
    chunk: int = 16,
    block: int = 128,
    mesh: jax.sharding.Mesh | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    order: str = "hf",
    repetition_penalty: float | None = None,
    allowed: np.ndarray | None = None,
    min_new_tokens: int = 0,
    vary: Sequence[str] = (),
    entropy: bool = False,
    runner_up: bool = False,
    model_entropy: bool = False,
    entropy_tau: float | None = None,
    record_experts: bool = False,
) -> Engine:
    """Builds an engine of ``rows * width`` slots.

    A row holds one prompt, whose keys and values exist once, and decodes ``width`` of its responses
    at a time. A larger group streams through its row: as soon as one response ends, the next
    sibling takes its slot. A large ``width`` shares a prompt among more slots (prompt memory and
    prefill grow only with ``rows``); a small ``width`` keeps slots busy if lengths differ widely or
    prompts have one response each.

    Args:
      model: The model.
      rows: R, prompts that decode at one time.
      width: W, slots per row.
      prompt_length: Maximum length of a prompt, in tokens.
      max_new_tokens: Maximum length of a response, in tokens; a request may set a lower limit.
      pad_id: Any id of the vocabulary.
      chunk: Tokens that a slot decodes before the host collects finished responses.
      block: Tokens of a prompt, or of a resumed response, that are read in one pass.
      mesh: Shards the rows over its axes ``data``, ``fsdp`` and ``expert``, which must divide
        them, and keys and values over ``tensor`` if it divides their heads.
      stop_ids, temperature, top_k, top_p, min_p, order, repetition_penalty, allowed: See
        :class:`~jaxrl_llm.rollout.DrawOptions`.
      min_new_tokens, vary, entropy, runner_up, model_entropy, entropy_tau: Likewise.
      record_experts: Whether completions have ``experts``, for a model with experts.

    Returns:
      The engine; :class:`~jaxrl_llm.rollout.Generation` runs it.

    Raises:
      ValueError: If an option is out of range or has no effect, prompts and responses together are
        longer than the model's context, or the mesh does not divide the rows.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> engine = jr.rollout.make_engine(
      ...     model, rows=1, width=2, prompt_length=8, max_new_tokens=4)
      >>> generation = jr.rollout.Generation(engine, params, key=jax.random.key(0))
      >>> generation.submit(jr.rollout.Group(id="a", prompt=[1, 2, 3], requests=(0, 1, 2)))
      >>> [[len(c.tokens) for c in done.completions] for done in generation]
      [[4, 4, 4]]

    References:
      None; ours. Slots as in MaxText's engine, all decoding in one program as in Tunix.
    """
    name = "make_engine"
    check_causal(name, model)
    check_sizes(name, rows=rows, width=width, chunk=chunk, block=block)
    check_sizes(name, prompt_length=prompt_length, max_new_tokens=max_new_tokens)
    context, vocab_size = model.config.max_length, model.config.vocab_size
    if prompt_length + max_new_tokens > context:
        raise ValueError(
            f"{name}: prompt_length {prompt_length} and max_new_tokens {max_new_tokens} together "
            f"are longer than the model's context of {context}."
        )
    checks.check_token_ids(name, pad_id=(pad_id,))
    if pad_id >= vocab_size:
        raise ValueError(f"{name}: pad_id {pad_id} lies outside the vocabulary of {vocab_size}.")
    shards = batch_shards(mesh)
    check_spread(name, rows, "rows", shards)
    options = DrawOptions(
        stop_ids=stop_ids,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        order=order,
        repetition_penalty=repetition_penalty,
        allowed=allowed,
        min_new_tokens=min_new_tokens,
        vary=vary,
        entropy=entropy,
        runner_up=runner_up,
        model_entropy=model_entropy,
        entropy_tau=entropy_tau,
    )
    draw = make_draw(name, options, vocab_size=vocab_size)
    spec = EngineSpec(
        vocab_size=vocab_size,
        rows=rows,
        width=width,
        prompt_length=prompt_length,
        max_new_tokens=max_new_tokens,
        chunk=chunk,
        block=block,
        stop_ids=tuple(stop_ids),
        pad_id=pad_id,
        shards=shards,
        draw=with_experts(name, draw, model) if record_experts else draw,
    )
    return Engine.build(model, spec, mesh)


class _Program:
    """A jitted function of slots that compiles before it takes the lock LAUNCHING to start.

    Compiling may take minutes, and a step that asks a subagent waits for the lock while its
    deadline runs.

    Args:
      function: Its arguments are the parameters if it calls the model, slots, and others.
      slots: The place of the slots among them.
    """

    def __init__(self, function: Any, slots: int = 0):
        self._function, self._slots = function, slots
        self._compiled: set[tuple] = set()

    def __call__(self, *arguments):
        # Parameters and slots are hundreds of arrays, with the same shapes in every call. Slots are
        # committed to their device from the first call on whose parameters are.
        slots = arguments[self._slots]
        while isinstance(slots, tuple):
            slots = slots[0]
        rest, tree = jax.tree.flatten(arguments[self._slots + 1 :])
        kind = (slots.committed, tree, *map(np.shape, rest))
        if kind not in self._compiled:
            self.lower(*arguments).compile()  # the call below finds the program
            self._compiled.add(kind)
        with LAUNCHING:
            return self._function(*arguments)

    def lower(self, *arguments) -> Any:
        """As of a jitted function."""
        return self._function.lower(*arguments)

    def _cache_size(self) -> int:
        return self._function._cache_size()


def _init_slots(model: Model, spec: EngineSpec) -> Slots:
    return slot_functions.init_slots(
        model,
        spec.rows,
        spec.width,
        spec.prompt_length,
        spec.max_new_tokens,
        blank=spec.draw.blank,
        settings=spec.draw.settings,
    )


def _compile(
    model: Model, spec: EngineSpec, mesh: jax.sharding.Mesh | None, shardings: Slots | None
) -> dict[str, Any]:
    """The functions of slots; each donates the slots that it gets."""

    def init():
        return _init_slots(model, spec)

    def fill_prompts(params, slots, rows, deltas):
        return fill_prompt_slots(model, params, slots, rows, block=spec.block, deltas=deltas)

    def fill_responses(params, slots, rows, count, where, deltas):
        return fill_response_slots(
            model, params, slots, rows, count, where, block=spec.block, deltas=deltas
        )

    def fill_extended(params, slots, index, first, longest, deltas, *, block):
        return fill_extended_slots(
            model, params, slots, index, first, longest, block=block, deltas=deltas
        )

    def decode(params, slots, key, version, steps, leave_at, deltas, compaction=None):
        def run(slots):
            return decode_slots(
                model,
                spec.draw.next_token,
                params,
                slots,
                key,
                version=version,
                steps=steps,
                leave_at=leave_at,
                stop_ids=spec.stop_ids,
                deltas=deltas,
            )

        return run(slots) if compaction is None else decode_compacted(run, slots, compaction)

    def take_tokens(out, rows, columns):
        return jax.tree.map(lambda x: x[rows, columns], out)

    # On a mesh, every array of the slots has a fixed sharding, whatever the compiler would prefer.
    compiled = jax.jit if shardings is None else partial(jax.jit, out_shardings=shardings)

    def first(function: Callable) -> _Program:
        return _Program(compiled(function, donate_argnums=0))

    def second(function: Callable) -> _Program:
        """Of a function that calls the model."""
        function = sampling_on_mesh(function, mesh, model.sharding_rules)
        return _Program(compiled(function, donate_argnums=1), slots=1)

    names = ("put_prompts", "copy_prompts", "start", "resume", "extend", "end_slots")
    names += ("copy_slot", "put_slot", "clear_cache")
    # Each partial is a new function, so engines do not share compiled programs.
    functions = {name: first(partial(getattr(slot_functions, name))) for name in names}
    for block in _ADDED_BLOCKS:
        functions[f"fill_extended_{block}"] = second(partial(fill_extended, block=block))
    return functions | {
        "init": compiled(init),
        "fill_prompts": second(fill_prompts),
        "fill_responses": second(fill_responses),
        "take_slot": _Program(jax.jit(slot_functions.take_slot)),
        "decode": second(decode),
        "take_tokens": _Program(jax.jit(take_tokens)),
    }


def powers(most: int) -> tuple[int, ...]:
    """``most``, and the powers of four below it."""
    sizes = [4**n for n in range(most.bit_length()) if 4**n < most]
    return (*sizes, most)
