"""The engine: many requests through a fixed number of slots, on any number of weights.

The device side is a handful of compiled functions over :class:`~jaxrl_llm.rollout.slots.Slots`, the
host side a :class:`~jaxrl_llm.rollout.generation.Generation` that decides what enters and takes
what leaves.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import batch_sharding, batch_shards
from jaxrl_llm.rollout import decoding
from jaxrl_llm.rollout import slots as slot
from jaxrl_llm.rollout.draw import Draw, make_draw
from jaxrl_llm.rollout.slots import Requests, Slots


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
      prompt_widths: To which prompts are padded when they are read.
      own_widths: To which responses are padded when they are read again.
      row_counts: How many rows are read in one call.
      mesh: Over whose axes ``data`` and ``fsdp`` the rows are spread, or None.
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
    prompt_widths: tuple[int, ...]
    own_widths: tuple[int, ...]
    row_counts: tuple[int, ...]
    mesh: jax.sharding.Mesh | None
    functions: dict[str, Any]

    def init(self) -> Slots:
        """Empty slots on the device.

        Raises:
          MemoryError: If they are more than the device's memory holds; it says how many would fit.
        """
        check_memory(self)
        if self.mesh is None:
            return self._blank()
        return jax.jit(self._blank, out_shardings=batch_sharding(self.mesh))()

    def _blank(self) -> Slots:
        sizes = (self.rows, self.width, self.prompt_length, self.max_new_tokens)
        return slot.init_slots(
            self.model, *sizes, blank=self.draw.blank, settings=self.draw.settings
        )

    def row_bytes(self) -> int:
        """Bytes of one row of slots, its share of the prompts' keys and values included."""
        leaves = jax.tree.leaves(jax.eval_shape(self._blank))
        return sum(x.size * x.dtype.itemsize for x in leaves) // self.rows

    def compiled(self) -> int:
        """How many programs have been compiled so far: constant after :meth:`warm_up`."""
        return sum(f._cache_size() for f in self.functions.values())

    def warm_up(self, params: ArrayTree, *, resumed: bool = False) -> None:
        """Compiles every program that :class:`Generation` may call.

        Args:
          params: Parameters like those to come.
          resumed: Those too that continue responses, after an interruption or new weights.
        """
        call, key = self.functions, jax.random.key(0)
        slots, grid = self.init(), (self.rows, self.width)
        for count in self.row_counts:
            rows = np.full(count, self.rows, np.int32)
            prompts = np.zeros((count, self.prompt_length), np.int32)
            ones = np.ones(count, np.int32)
            slots = call["put_prompts"](slots, rows, prompts, ones, ones - 1)
            for prompt_width in self.prompt_widths:
                for own_width in (0, *(self.own_widths if resumed else ())):
                    widths = {"prompt_width": prompt_width, "own_width": own_width}
                    slots = call["fill"](params, slots, rows, None, **widths)
        nobody = np.zeros(grid, bool)
        slots = call["start"](slots, nobody, blank_requests(self))
        if resumed:
            zero = np.int32(0)
            row = jax.tree.map(lambda x: np.zeros(x.shape[2:], x.dtype), slots.out)
            slots = call["resume"](slots, zero, zero, row, zero)
        slots = call["decode"](params, slots, key, np.int32(0), np.int32(1), np.int32(0), None)
        slots = call["release"](slots, nobody, np.int32(0))
        count = 1
        while count < 2 * self.rows * self.width:
            call["gather"](slots.out, np.zeros(count, np.int32), np.zeros(count, np.int32))
            count *= 2
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
    prompt_widths: Sequence[int] | None = None,
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
      prompt_widths: Widths to which prompts are padded when they are read, so that a few shapes are
        compiled and not one a prompt; by default ``prompt_length``, its half, quarter and eighth.
      mesh: Spreads the rows over its axes ``data`` and ``fsdp``, which must divide them.
      **sampling: Options of :func:`~jaxrl_llm.rollout.draw.make_draw`: temperature, top_k, ...

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
    """
    name = "make_engine"
    checks.check_positive(name, rows=rows, width=width, chunk=chunk)
    checks.check_positive(name, prompt_length=prompt_length, max_new_tokens=max_new_tokens)
    room = model.config.max_length - max_new_tokens
    if room < prompt_length:
        raise ValueError(
            f"{name}: prompt_length {prompt_length} and max_new_tokens {max_new_tokens} do not fit "
            f"the model's context of {model.config.max_length}."
        )
    if rows % batch_shards(mesh):
        raise ValueError(
            f"{name}: {rows} rows cannot be spread over the {batch_shards(mesh)} devices of the "
            "mesh axes data and fsdp."
        )
    if prompt_widths is None:
        prompt_widths = [-(-prompt_length // part) for part in (8, 4, 2, 1)]
        prompt_widths = [w for w in prompt_widths if w >= min(16, prompt_length)]
    elif max(prompt_widths) != prompt_length or min(prompt_widths) < 1:
        raise ValueError(
            f"{name}: prompt_widths must lie between 1 and prompt_length {prompt_length} and end "
            f"with it; got {tuple(prompt_widths)}."
        )
    draw = make_draw(name, vocab_size=model.config.vocab_size, stop_ids=stop_ids, **sampling)
    return Engine(
        model=model,
        rows=rows,
        width=width,
        prompt_length=prompt_length,
        max_new_tokens=max_new_tokens,
        chunk=chunk,
        pad_id=pad_id,
        draw=draw,
        prompt_widths=tuple(sorted(set(prompt_widths))),
        own_widths=_powers(max_new_tokens, least=16),
        row_counts=_powers(rows, least=1),
        mesh=mesh,
        functions=_compile(model, draw, tuple(stop_ids)),
    )


def _compile(model: Model, draw: Draw, stop_ids: tuple[int, ...]) -> dict[str, Callable]:
    """The functions of ``slots``, compiled; each gives away (donates) the slots it is given."""

    def fill(params, slots, rows, deltas, prompt_width, own_width):
        widths = {"prompt_width": prompt_width, "own_width": own_width}
        return decoding.fill(model, params, slots, rows, deltas=deltas, **widths)

    def decode(params, slots, key, version, steps, leave_at, deltas):
        limits = {"version": version, "steps": steps, "leave_at": leave_at}
        options = {"stop_ids": stop_ids, "deltas": deltas}
        return decoding.decode(model, draw.draw, params, slots, key, **limits, **options)

    def gather(out, rows, columns):
        return jax.tree.map(lambda x: x[rows, columns], out)

    first, second = partial(jax.jit, donate_argnums=0), partial(jax.jit, donate_argnums=1)
    return {
        "put_prompts": first(slot.put_prompts),
        "start": first(slot.start),
        "resume": first(slot.resume),
        "release": first(slot.release),
        "copy_slot": first(slot.copy_slot),
        "wipe": first(slot.wipe),
        "fill": second(fill, static_argnames=("prompt_width", "own_width")),
        "decode": second(decode),
        "gather": jax.jit(gather),
    }


def _powers(most: int, *, least: int) -> tuple[int, ...]:
    """``most``, and the powers of four from ``least`` on that lie below it."""
    sizes = {most}
    while least < most:
        sizes.add(least)
        least *= 4
    return tuple(sorted(sizes))


def fits(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest size that holds what is wanted."""
    return min(size for size in sizes if size >= wanted)


def blank_requests(engine: Engine) -> Requests:
    """Requests ``[R, W]`` that ask for nothing, to be filled in on the host."""
    grid = (engine.rows, engine.width)
    settings = {k: np.full(grid, v, np.float32) for k, v in engine.draw.settings.items()}
    return Requests(np.zeros(grid, np.int32), np.ones(grid, np.int32), settings)


def device_memory() -> tuple[int, int] | None:
    """Bytes of memory that a device has and that are in use, or None if it does not tell."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"], stats["bytes_in_use"]
    if jax.default_backend() == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0
    return None


def check_memory(engine: Engine) -> None:
    """Raises MemoryError if the slots cannot fit the memory of their devices."""
    known = device_memory()
    rows, each = engine.rows // batch_shards(engine.mesh), engine.row_bytes()
    if known is not None and rows * each > known[0] - known[1]:
        raise MemoryError(too_large(engine))


def too_large(engine: Engine) -> str:
    """What to say when the device is out of memory."""
    shards, each = batch_shards(engine.mesh), engine.row_bytes()
    text = (
        f"The engine's {engine.rows} rows of {engine.width} slots take "
        f"{engine.rows * each / 2**30:.1f} GiB for keys, values and outputs"
    )
    known = device_memory()
    if known is None:
        return text + ", more than the device has left; make rows, width or lengths smaller."
    # A tenth is left to the activations of a step.
    most = max(0, int(0.9 * (known[0] - known[1])) // each) * shards
    return (
        f"{text}, but {(known[0] - known[1]) * shards / 2**30:.1f} GiB are free: about {most} rows "
        f"({most * engine.width} slots) would fit."
    )
