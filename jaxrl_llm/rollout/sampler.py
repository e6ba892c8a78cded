"""The sampler: groups of responses to prompts, all decoding inside one compiled function.

A prompt's keys and values are computed once and shared by its group. Prompts and responses are the
rows and slots of :mod:`jaxrl_llm.rollout.slots`, and all start together. ``sample`` in a
message is the function that :func:`make_sampler` or
:func:`~jaxrl_llm.rollout.make_population_sampler` builds.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.core.runtime.threads import compile_aside, wait_for_one
from jaxrl_llm.core.support import Temperature
from jaxrl_llm.models.denoising import check_causal
from jaxrl_llm.models.protocol import Model, cast_params, prefill
from jaxrl_llm.models.sharding import batch_sharding, batch_shards, sampling_on_mesh
from jaxrl_llm.rollout._inputs import check_ids, check_sizes, check_spread, check_tokens
from jaxrl_llm.rollout.compaction import compact_active, decode_compacted, smaller_grid
from jaxrl_llm.rollout.decode import decode as decode_slots
from jaxrl_llm.rollout.sampling.options import (
    ENTROPY_STATS,
    Draw,
    DrawOptions,
    make_draw,
    with_experts,
)
from jaxrl_llm.rollout.slots import Prompts, Slots, init_slots, join_rollout, start
from jaxrl_llm.rollout.types import Rollout

# Prompt widths: powers of two and the numbers halfway between, so padding is at most a third.
BUCKETS = tuple(sorted([2**n for n in range(4, 18)] + [3 * 2**n for n in range(3, 17)]))

# Sharing fewer tokens saves less than the second pass over the rest of the prompts costs.
_MIN_SHARED = 8

# A second loop for the last rows is more to compile, which shorter responses do not repay.
_SHRINKS_FROM = 64


def count_shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all prompts share, less than any has; 0 where it is not worth it."""
    shared = len(os.path.commonprefix([list(p) for p in prompts]))
    shared = min([shared, *(len(p) - 1 for p in prompts)])
    return shared if shared >= _MIN_SHARED else 0


def bucket_of(longest: int, buckets: Sequence[int] = BUCKETS) -> int:
    """The width of a batch whose longest prompt has this many tokens."""
    return min((b for b in buckets if b >= longest), default=longest)


def prompt_room(function: str, model: Model, max_new_tokens: int) -> int:
    """The longest prompt that leaves room for a response in the context; raises if none does."""
    room = model.config.max_length - max_new_tokens
    if room < 1:
        raise ValueError(
            f"{function}: max_new_tokens {max_new_tokens} leaves no room for a prompt in the "
            f"model's context of {model.config.max_length}."
        )
    return room


def pad_rows(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Lists of token ids as int32 ``[N, width]``, padded with 0 on the right."""
    tokens = np.zeros((len(rows), width), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    return tokens


class PromptSpec(NamedTuple):
    """The prompts that a sampler takes: ids below ``vocab_size``, at most ``room`` of them.

    The widths of ``buckets`` are compiled, few shapes and not one per prompt. All prompts begin
    with the same ``shared_prefix_len`` tokens and are longer.
    """

    vocab_size: int
    room: int
    buckets: Sequence[int] = BUCKETS
    shared_prefix_len: int = 0

    def pad(self, prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 ``[P, Lp]``, right padded, and mask bool ``[P, Lp]``.

        Raises ValueError without prompts, and for a wrong one, which it names by its index.
        """
        if not len(prompts):
            raise ValueError("sample: there are no prompts.")
        for i, prompt in enumerate(prompts):
            check_tokens(f"sample: prompt {i}", prompt, self.vocab_size)
            if not len(prompt):
                raise ValueError(f"sample: prompt {i} is empty; it needs at least one token.")
            if len(prompt) > self.room:
                raise ValueError(
                    f"sample: prompt {i} has {len(prompt)} tokens, but the model's context leaves "
                    f"room for {self.room} before the response."
                )
        shared = self.shared_prefix_len
        first = list(prompts[0][:shared])
        for i, prompt in enumerate(prompts if shared else ()):
            if len(prompt) <= shared or list(prompt[:shared]) != first:
                raise ValueError(
                    f"sample: prompt {i} must begin with the {shared} tokens of shared_prefix_len "
                    "that all prompts share, and have at least one more."
                )
        width = bucket_of(max(map(len, prompts)), self.buckets)
        mask = np.arange(width) < np.array([len(p) for p in prompts])[:, None]
        return pad_rows(prompts, width), mask


class SamplerSpec(NamedTuple):
    """The sizes and constants of a compiled sampler; see :func:`make_sampler`."""

    max_new_tokens: int
    group_size: int
    stop_ids: tuple[int, ...]
    pad_id: int
    shared_prefix_len: int
    shrinks: bool  # where a device has all rows and responses are long enough to gain by it


def make_sampler(
    model: Model,
    *,
    max_new_tokens: int,
    group_size: int,
    stop_ids: Sequence[int] = (),
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    order: str = "hf",
    pad_id: int = 0,
    buckets: Sequence[int] = BUCKETS,
    shared_prefix_len: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    entropy_tau: float | None = None,
    record_experts: bool = False,
) -> Callable[..., Rollout]:
    """Builds a compiled sampler of ``group_size`` responses per prompt.

    Args:
      model: The model.
      max_new_tokens: T, the maximum length of a response in tokens.
      group_size: G, responses per prompt.
      stop_ids: Token ids that end a response; they are part of it.
      temperature: 0 is greedy; then all responses of a group are equal.
      top_k, top_p, min_p, order: See :func:`~jaxrl_llm.rollout.filter_logits`.
      pad_id: Fills ``tokens`` after the end of a response.
      buckets: Prompt widths that are compiled.
      shared_prefix_len: Number of first tokens that all prompts share, such as those of a chat
        template. They are computed once for all prompts; every prompt must be longer.
      mesh: Shards the prompts over its axes ``data``, ``fsdp`` and ``expert``, which must divide P.
      entropy_tau: See :class:`~jaxrl_llm.rollout.DrawOptions`; None is off and costs nothing.
      record_experts: Whether rollouts have ``experts``, for a model with experts.

    Returns:
      ``sample(params, key, prompts, *, request_ids=None, version=0, entropy_stats=None) ->
      Rollout``. ``prompts`` are P lists of token ids; ``request_ids`` int ``[P, G]`` name the
      requests (default: their index), and a request has the same response in any batch; ``version``
      is recorded; ``entropy_stats`` are the four numbers that ``entropy_tau`` reads. The key is
      consumed. ``sample.compile_for(params, key, prompts)`` begins to compile the program of such
      a call in another thread, which the call then waits for, and returns its future. There,
      ``params`` and ``key`` may be ``jax.ShapeDtypeStruct``.

    Raises:
      ValueError: If an option is out of range or has no effect, or ``max_new_tokens`` leaves no
        space for a prompt. ``sample`` raises for a bad prompt and names it.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> sample = jr.rollout.make_sampler(model, max_new_tokens=4, group_size=2)
      >>> sample(params, jax.random.key(0), [[1, 2, 3], [4]]).tokens.shape
      (2, 2, 4)
    """
    name = "make_sampler"
    check_causal(name, model)
    check_sizes(name, max_new_tokens=max_new_tokens, group_size=group_size)
    checks.check_non_negative(name, shared_prefix_len=shared_prefix_len)
    if shared_prefix_len:
        check_sizes(name, shared_prefix_len=shared_prefix_len)
    checks.check_token_ids(name, pad_id=(pad_id,))
    options = DrawOptions(
        stop_ids=stop_ids,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        order=order,
        entropy_tau=entropy_tau,
    )
    draw = make_draw(name, options, vocab_size=model.config.vocab_size)
    if record_experts:
        draw = with_experts(name, draw, model)
    room = prompt_room(name, model, max_new_tokens)
    prompt_spec = PromptSpec(model.config.vocab_size, room, buckets, shared_prefix_len)
    spec = SamplerSpec(
        max_new_tokens=max_new_tokens,
        group_size=group_size,
        stop_ids=tuple(stop_ids),
        pad_id=pad_id,
        shared_prefix_len=shared_prefix_len,
        shrinks=max_new_tokens >= _SHRINKS_FROM and (mesh is None or batch_shards(mesh) == 1),
    )
    decode = jax.jit(sampling_on_mesh(_make_decode(model, draw, spec), mesh, model.sharding_rules))

    # With `entropy_tau` each token has a temperature of its own, and greedy tokens have none.
    known = temperature > 0 and entropy_tau is None
    sampled_at = Temperature(float(temperature)) if known else None
    programs: dict[tuple[int, int], Future] = {}  # by the shape of the prompts

    def arguments(params: ArrayTree, key: Array, prompts, request_ids, version: int) -> tuple:
        checks.check_key("sample", key)
        tokens, mask = prompt_spec.pad(prompts)
        if request_ids is None:
            request_ids = np.arange(len(prompts) * group_size).reshape(len(prompts), group_size)
        request_ids = check_ids("sample", request_ids=request_ids)
        check_ids("sample", version=version)
        checks.check_shape("sample", "request_ids", request_ids, (len(prompts), group_size))
        shape = tokens.shape
        if mesh is not None:
            check_spread("sample", len(prompts), "prompts", batch_shards(mesh))
            tokens, mask, request_ids = processes.place(
                (tokens, mask, request_ids), batch_sharding(mesh)
            )
        return shape, (params, key, tokens, mask, request_ids, np.int32(version))

    def sample(
        params: ArrayTree,
        key: Array,
        prompts,
        *,
        request_ids=None,
        version: int = 0,
        entropy_stats=None,
    ) -> Rollout:
        shape, args = arguments(params, key, prompts, request_ids, version)
        if entropy_stats is None:
            if shape in programs:  # if it failed, the same error comes from here
                wait_for_one([programs[shape]])
            result = decode(*args)
            programs.setdefault(shape, _done())
            return result._replace(sampled_at=sampled_at)
        if entropy_tau is None:
            raise ValueError("sample: entropy_stats has no effect without entropy_tau.")
        stats = np.asarray(entropy_stats, np.float32)
        checks.check_shape("sample", "entropy_stats", stats, (len(ENTROPY_STATS),))
        return decode(*args, dict(zip(ENTROPY_STATS, stats, strict=True)))

    def compile_for(params: ArrayTree, key: Array, prompts) -> Future:
        shape, args = arguments(params, key, prompts, None, 0)
        if shape not in programs:
            programs[shape] = compile_aside(
                "compile a sampler", lambda: decode.lower(*args).compile()
            )
        return programs[shape]

    sample.compiled = decode  # type: ignore[attr-defined]
    sample.compile_for = compile_for  # type: ignore[attr-defined]
    return sample


def _done() -> Future:
    future: Future = Future()
    future.set_result(None)
    return future


def _make_decode(model: Model, draw: Draw, spec: SamplerSpec) -> Callable[..., Rollout]:
    """The compiled part of the sampler: prefill, then a token a step until all rows have ended."""

    def decode(
        params, key, prompt_tokens, prompt_mask, request_ids, version, settings=None
    ) -> Rollout:
        (rows, prompt_length), T = prompt_tokens.shape, spec.max_new_tokens
        grid = (rows, spec.group_size)
        params = cast_params(model, params)
        length = jnp.sum(prompt_mask, axis=-1, dtype=jnp.int32)
        slots = init_slots(
            model,
            rows,
            spec.group_size,
            prompt_length,
            T,
            blank=draw.blank,
            settings=draw.settings,
        )
        all_slots = jnp.ones(grid, bool)
        chosen = {k: jnp.full(grid, x) for k, x in (settings or {}).items()}
        requests = slots.requests._replace(
            id=request_ids, limit=jnp.full(grid, T), settings=slots.requests.settings | chosen
        )
        slots = start(slots, all_slots, requests)
        prefix_mask = jnp.arange(prompt_length) < length[:, None] - 1
        prefix = prefill(
            model, params, prompt_tokens, prefix_mask, shared_prefix_len=spec.shared_prefix_len
        )
        slots = slots._replace(
            prompts=Prompts(prompt_tokens, length, jnp.zeros_like(length), prefix)
        )

        def run(slots: Slots, **until) -> Slots:
            return decode_slots(
                model,
                draw.next_token,
                params,
                slots,
                key,
                version=version,
                steps=T,
                stop_ids=spec.stop_ids,
                **until,
            )

        small = smaller_grid(*grid) if spec.shrinks else None
        if small is not None:  # the last responses go on by themselves
            slots = run(slots, leave_at=small[0], siblings=small[1])
            slots = decode_compacted(run, slots, compact_active(slots.active, small))
        else:
            slots = run(slots)
        mask, out = jnp.arange(T) < slots.length[..., None], slots.out
        out = out._replace(tokens=jnp.where(mask, out.tokens, spec.pad_id))
        return join_rollout(prompt_tokens, prompt_mask, out, mask, slots.finish)

    return decode
