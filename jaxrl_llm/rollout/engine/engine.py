"""The engine: many requests through a fixed number of slots, on any number of weights.

The device side is a handful of compiled functions over :class:`~jaxrl_llm.rollout.slots.Slots`. The
host side is a :class:`~jaxrl_llm.rollout.Generation`, which fills slots and collects responses.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.models.protocol import Model, cast_params
from jaxrl_llm.models.sharding import batch_sharding, batch_shards, kv_sharding
from jaxrl_llm.rollout import decode as decoding
from jaxrl_llm.rollout import slots as slot
from jaxrl_llm.rollout.engine import compaction, memory
from jaxrl_llm.rollout.engine.request_arrays import (
    begun_arrays,
    place_array,
    prompt_arrays,
    request_arrays,
    row_arrays,
)
from jaxrl_llm.rollout.engine.scheduler import Place
from jaxrl_llm.rollout.sampling.options import Draw, make_draw
from jaxrl_llm.rollout.slots import Slots, Tokens


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model with everything compiled that decoding in slots takes; see :func:`make_engine`.

    Attributes:
      model: The model.
      rows: R, prompts that decode at one time.
      width: W, slots of a row.
      prompt_length: L, the longest prompt.
      max_new_tokens: T, the longest response.
      chunk: Tokens a slot decodes between two looks of the host.
      pad_id: Fills prompts.
      draw: How a token is drawn.
      shards: S, over how many devices the rows are spread.
      row_counts: How many rows of each device are read in one call: a few sizes.
      tail: Rows and width of a smaller grid for the last long responses, or None.
      row_bytes: Bytes of one row of slots on a device that holds it, its prompt's keys and values
        among them.
      functions: The compiled functions by name.
    """

    model: Model
    rows: int
    width: int
    prompt_length: int
    max_new_tokens: int
    chunk: int
    pad_id: int
    draw: Draw
    shards: int
    row_counts: tuple[int, ...]
    tail: tuple[int, int] | None
    row_bytes: int
    functions: dict[str, Any]

    def init(self) -> Slots:
        """Empty slots on the device.

        Raises:
          MemoryError: If they are more than the device's memory holds; it says how many would fit.
        """
        if not memory.fit(self.rows, self.row_bytes, shards=self.shards):
            raise MemoryError(self._too_many())
        return self.call("init")

    def call(self, name: str, *arguments):
        """Calls one of the functions; the slots that it is given are given away.

        Raises:
          MemoryError: If the device's memory is not enough; it says how many slots would fit.
        """
        with self._memory_errors(held=name != "init"):
            return self.functions[name](*arguments)

    def fetch(self, arrays: ArrayTree) -> ArrayTree:
        """Arrays on the host, once they are computed; raises as :meth:`call` does."""
        with self._memory_errors(held=True):
            return processes.to_host(arrays)

    def read(
        self, params: ArrayTree, slots: Slots, deltas, rows: list[int], places: list[Place]
    ) -> Slots:
        """Computes keys and values: of the prompts of rows, then of the responses in places.

        A call takes as long as the longest prompt in it, so rows of like lengths should be beside
        each other.
        """
        for array in row_arrays(self, rows, self.row_counts) if rows else ():
            slots = self.call("fill_prompts", params, slots, array, deltas)
        if places:
            where = np.zeros((self.rows, self.width), bool)
            where[tuple(zip(*places, strict=True))] = True
            begun = np.flatnonzero(where.any(axis=1)).tolist()
            size = self.rows // self.shards
            (array,) = row_arrays(self, begun, (size,))
            count = np.int32((array < size).sum(axis=1).max())
            given = (params, slots, array, count, where, deltas)
            slots = self.call("fill_responses", *given)
        return slots

    def outputs(self, slots: Slots, places: list[Place]) -> list[Tokens]:
        """What was sampled in some slots, arrays ``[T]`` on the host."""
        if not places:
            return []
        size = min(n for n in powers(self.rows * self.width) if n >= len(places))
        rows, columns = np.pad(np.array(places, np.int32), ((0, size - len(places)), (0, 0))).T
        out = self.fetch(self.call("gather", slots.out, rows, columns))
        return [jax.tree.map(lambda x, i=i: x[i], out) for i in range(len(places))]

    @contextlib.contextmanager
    def _memory_errors(self, *, held: bool) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise MemoryError(self._too_many(held=held)) from error

    def _too_many(self, *, held: bool = False) -> str:
        sizes = (self.rows, self.width, self.row_bytes)
        return memory.too_many(*sizes, shards=self.shards, held=held)

    def compiled(self) -> int:
        """How many programs have been compiled so far: constant after :meth:`warm_up`."""
        return sum(f._cache_size() for f in self.functions.values())

    def warm_up(
        self, params: ArrayTree, *, resumed: bool = False, deltas: ArrayTree | None = None
    ) -> None:
        """Compiles every program that :class:`~jaxrl_llm.rollout.Generation` may call.

        Args:
          params: Parameters like those to come.
          resumed: Those too that continue responses, after an interruption or new weights.
          deltas: Deltas like those to come, if any.
        """
        call, zero = self.call, np.int32(0)
        params = cast_params(self.model, params)
        nobody, place = (
            np.zeros((self.rows, self.width), bool),
            place_array(self, (0, 0)),
        )
        slots = call("put_prompts", self.init(), *prompt_arrays(self, {}))
        for count in self.row_counts:
            (rows,) = row_arrays(self, [], (count,))
            slots = call("fill_prompts", params, slots, rows, deltas)
        slots = call("wipe", slots, nobody)
        slots = call("start", slots, *request_arrays(self, [], segment=None))
        if resumed:
            slots = call("resume", slots, *begun_arrays(self, {}))
            (rows,) = row_arrays(self, [], (self.rows // self.shards,))
            slots = call("fill_responses", params, slots, rows, zero, nobody, deltas)
        for packing in (None,) if self.tail is None else (None, compaction.pack([], self.tail)):
            limits = (jax.random.key(0), zero, np.int32(1), zero, deltas, packing)
            slots = call("decode", params, slots, *limits)
        slots = call("copy_slot", slots, place, place, zero)
        slots = call("release", slots, nobody, zero)
        for count in powers(self.rows * self.width):
            call("gather", slots.out, np.zeros(count, np.int32), np.zeros(count, np.int32))
        jax.block_until_ready(slots)


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
    **sampling,
) -> Engine:
    """Builds an engine of ``rows * width`` slots.

    A row holds one prompt, whose keys and values exist once, and decodes ``width`` of its rollouts
    at a time. A group that is larger streams through its row: as soon as one rollout ends, the
    next sibling takes its slot. So ``width`` is what shares a prompt (memory and prefill grow with
    ``rows`` alone), and a small ``width`` is what keeps slots busy when lengths differ much or
    prompts have one rollout each.

    Args:
      model: The model.
      rows: R, prompts that decode at one time.
      width: W, slots of a row.
      prompt_length: The longest prompt, in tokens.
      max_new_tokens: The longest response, in tokens; a request may ask for less.
      stop_ids: Token ids that end a response; they belong to it.
      pad_id: Any id of the vocabulary.
      chunk: Tokens a slot decodes between two looks of the host.
      block: Tokens of a prompt, or of a response that goes on, that are read in one pass.
      mesh: Spreads the rows over its axes ``data`` and ``fsdp``, which must divide them, and keys
        and values over ``tensor`` where it divides their heads.
      **sampling: Options of :func:`~jaxrl_llm.rollout.sampling.options.make_draw`.

    Returns:
      The engine; :class:`~jaxrl_llm.rollout.Generation` runs it.

    Raises:
      ValueError: If an option is out of range or has no effect, prompts and responses together do
        not fit the model's context, or the mesh does not divide the rows.

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
      None; ours. Slots as in MaxText's engine, the whole decode in one program as in Tunix.
    """
    name = "make_engine"
    checks.check_positive(name, rows=rows, width=width, chunk=chunk, block=block)
    checks.check_positive(name, prompt_length=prompt_length, max_new_tokens=max_new_tokens)
    room = model.config.max_length - max_new_tokens
    if room < prompt_length:
        raise ValueError(
            f"{name}: prompt_length {prompt_length} and max_new_tokens {max_new_tokens} do not fit "
            f"the model's context of {model.config.max_length}."
        )
    if not 0 <= pad_id < model.config.vocab_size:
        raise ValueError(
            f"{name}: pad_id {pad_id} lies outside the vocabulary of {model.config.vocab_size}."
        )
    shards = batch_shards(mesh)
    if rows % shards:
        raise ValueError(
            f"{name}: {rows} rows cannot be spread over the {shards} devices of the mesh axes data "
            "and fsdp."
        )
    draw = make_draw(name, vocab_size=model.config.vocab_size, stop_ids=stop_ids, **sampling)
    sizes = (rows, width, prompt_length, max_new_tokens)
    functions = _compile(model, draw, sizes, tuple(stop_ids), block, mesh)
    stored = jax.eval_shape(functions["init"])
    return Engine(
        model=model,
        rows=rows,
        width=width,
        prompt_length=prompt_length,
        max_new_tokens=max_new_tokens,
        chunk=chunk,
        pad_id=pad_id,
        draw=draw,
        shards=shards,
        row_counts=tuple(sorted({1, min(rows // shards, _ROWS_READ)})),
        # On a mesh, slots would have to move from device to device.
        tail=compaction.smaller_grid(rows, width) if shards == 1 else None,
        row_bytes=memory.row_bytes(stored, None if mesh is None else _shardings(stored, mesh)),
        functions=functions,
    )


def _compile(model: Model, draw: Draw, sizes, stop_ids, block, mesh) -> dict[str, Callable]:
    """The functions of ``slots``, compiled; each gives away (donates) the slots it is given."""

    def init():
        return slot.init_slots(model, *sizes, blank=draw.blank, settings=draw.settings)

    def fill_prompts(params, slots, rows, deltas):
        return decoding.fill_prompts(model, params, slots, rows, block=block, deltas=deltas)

    def fill_responses(params, slots, rows, count, where, deltas):
        options = {"block": block, "deltas": deltas}
        return decoding.fill_responses(model, params, slots, rows, count, where, **options)

    def decode(params, slots, key, version, steps, leave_at, deltas, packing=None):
        def run(slots):
            limits = {"version": version, "steps": steps, "leave_at": leave_at}
            options = {"stop_ids": stop_ids, "deltas": deltas}
            return decoding.decode(model, draw.draw, params, slots, key, **limits, **options)

        return run(slots) if packing is None else compaction.decode_packed(run, slots, packing)

    def gather(out, rows, columns):
        return jax.tree.map(lambda x: x[rows, columns], out)

    # On a mesh, all that is in slots stays where it is, whatever the compiler would prefer.
    placed = {} if mesh is None else {"out_shardings": _shardings(jax.eval_shape(init), mesh)}
    compiled = partial(jax.jit, **placed)
    first, second = partial(compiled, donate_argnums=0), partial(compiled, donate_argnums=1)
    names = ("put_prompts", "start", "resume", "release", "copy_slot", "wipe")
    # A partial is a function of its own: engines do not share what is compiled.
    return {name: first(partial(getattr(slot, name))) for name in names} | {
        "init": compiled(init),
        "fill_prompts": second(fill_prompts),
        "fill_responses": second(fill_responses),
        "decode": second(decode),
        "gather": jax.jit(gather),
    }


def _shardings(slots: Slots, mesh: jax.sharding.Mesh) -> Slots:
    """Where slots lie: by rows, and keys and values by their heads."""
    placed = jax.tree.map(lambda x: batch_sharding(mesh), slots)
    prefix, cache = jax.tree.map(
        lambda x: kv_sharding(x.shape, mesh), (slots.prompts.prefix, slots.cache)
    )
    return placed._replace(prompts=placed.prompts._replace(prefix=prefix), cache=cache)


# Prompts that are read in one call: enough to keep a device busy, few enough to be of like lengths.
_ROWS_READ = 8


def powers(most: int) -> tuple[int, ...]:
    """``most``, and the powers of four below it."""
    sizes = [4**n for n in range(most.bit_length()) if 4**n < most]
    return (*sizes, most)
