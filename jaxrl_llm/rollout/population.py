"""The sampler of a population: each member is the model with its own low-rank delta.

A member's row of slots begins with the shared prefix of all prompts, which is computed once for the
member. Its slots continue with the rest of each prompt, and then with the responses. The cost thus
follows unique tokens, and the weights are read once for all members.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.models.denoising import check_causal
from jaxrl_llm.models.protocol import Model, cast_params
from jaxrl_llm.models.sharding import batch_sharding, batch_shards
from jaxrl_llm.rollout._inputs import check_ids, check_sizes, check_spread
from jaxrl_llm.rollout.decode import RowDeltas, count_deltas, fill_all, fill_prompts
from jaxrl_llm.rollout.decode import decode as decode_slots
from jaxrl_llm.rollout.sampler import BUCKETS, PromptSpec, pad_rows, prompt_room
from jaxrl_llm.rollout.sampling.filters import GREEDY_BELOW
from jaxrl_llm.rollout.sampling.options import Draw, DrawOptions, make_draw
from jaxrl_llm.rollout.slots import (
    Slots,
    init_slots,
    join_rollout,
    put_prompts,
    resume,
    start,
)
from jaxrl_llm.rollout.types import Rollout

# Compiled lengths of short prompts without their shared prefix: every member reads them.
_SHORT_BUCKETS = (0, 2, 4, 6, 8, 10, 12, 14)
# Tokens read in one pass: enough to keep a device busy, while the activations of a layer stay small
# next to the weights.
_READ_TOKENS = 16_384


class MemberRequests(NamedTuple):
    """The prompts and requests of a population's slots.

    Attributes:
      prefix: int32 ``[R, c]``, the shared prefix of a row's prompts.
      rest: int32 ``[R, W, n]``, the tokens of each prompt after the prefix, right padded.
      length: int32 ``[R, W]``, how many tokens ``rest`` holds.
      member: int32 ``[R]``, the member whose delta a row has.
      request: int32 ``[R, W]``, names the random numbers of a response.
    """

    prefix: Array
    rest: Array
    length: Array
    member: Array
    request: Array


def make_population_sampler(
    model: Model,
    *,
    max_new_tokens: int,
    shared: bool = True,
    tries: int = 1,
    stop_ids: Sequence[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    order: str = "hf",
    pad_id: int = 0,
    buckets: Sequence[int] = BUCKETS,
    shared_prefix_len: int = 0,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[..., Rollout]:
    """Builds a compiled sampler of the responses of N members, each the model plus a delta.

    Args:
      model, max_new_tokens, stop_ids, top_k, top_p, min_p, order, pad_id: As in
        :func:`~jaxrl_llm.rollout.make_sampler`.
      shared: Whether every member answers every prompt, so that G = N; else the members are
        assigned in order, G = N / P per prompt.
      tries: Responses of a member to a prompt; more than one needs a temperature.
      temperature: 0 is greedy: then responses differ only by the members' weights.
      buckets: Lengths of prompts, without the shared prefix, that are compiled.
      shared_prefix_len: Number of first tokens that all prompts share; a member computes them once.
      mesh: Shards the members over its axes ``data`` and ``fsdp``, which must divide their number.

    Returns:
      ``sample(params, deltas, key, prompts, *, version=0) -> Rollout``, ``[P, G * tries, T]`` with
      the tries of a member next to each other. ``deltas`` have one leading axis ``[N]``, as
      ``evolution.model_delta`` makes them, also where pairs share their factors. The key is
      consumed; a greedy sampler reads none of it.

    Raises:
      ValueError: As in :func:`~jaxrl_llm.rollout.make_sampler`, and where the prompts or the mesh
        do not divide the members.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> classes, members = jr.evolution.leaf_classes(params), jnp.arange(6)
      >>> delta = jr.evolution.model_delta(
      ...     params, classes, jax.random.key(0), 0, members, sigma=0.01)
      >>> sample = jr.rollout.make_population_sampler(model, max_new_tokens=4)
      >>> sample(params, delta, jax.random.key(1), [[1, 2, 3], [4]]).tokens.shape
      (2, 6, 4)

    References:
      EGGROLL (arXiv:2511.16652), sec. 4: one batch holds many members. Computing the common prefix
      once per member is ours.
    """
    name = "make_population_sampler"
    check_causal(name, model)
    check_sizes(name, max_new_tokens=max_new_tokens, tries=tries)
    checks.check_non_negative(name, shared_prefix_len=shared_prefix_len)
    if shared_prefix_len:
        check_sizes(name, shared_prefix_len=shared_prefix_len)
    checks.check_token_ids(name, pad_id=(pad_id,))
    if tries > 1 and temperature < GREEDY_BELOW:
        raise ValueError(
            f"{name}: tries={tries} has no effect at temperature 0, where all tries are equal."
        )
    options = DrawOptions(
        stop_ids=stop_ids,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        order=order,
    )
    draw = make_draw(name, options, vocab_size=model.config.vocab_size)
    room = prompt_room(name, model, max_new_tokens)
    prompt_spec = PromptSpec(model.config.vocab_size, room, buckets, shared_prefix_len)
    decode = jax.jit(_make_decode(model, draw, max_new_tokens, tuple(stop_ids), pad_id))

    def sample(
        params: ArrayTree, deltas: ArrayTree, key: Array, prompts, *, version: int = 0
    ) -> Rollout:
        tokens, mask = prompt_spec.pad(prompts)
        check_ids("sample", version=version)
        if deltas is None:
            raise ValueError("sample: a population needs deltas; see evolution.model_delta.")
        members = count_deltas("sample", deltas, pairs=True)
        requests, order = _assign(prompts, prompt_spec, members, shared=shared, tries=tries)
        if mesh is not None:
            check_spread("sample", len(requests.member), "rows of members", batch_shards(mesh))
            requests = processes.place(requests, batch_sharding(mesh))
        out, response_mask, finish = decode(params, deltas, key, requests, order, np.int32(version))
        return join_rollout(tokens, mask, out, response_mask, finish)

    sample.compiled = decode  # type: ignore[attr-defined]
    return sample


def _assign(
    prompts, spec: PromptSpec, members: int, *, shared: bool, tries: int
) -> tuple[MemberRequests, np.ndarray]:
    """Which slot answers which prompt, and where in the grid the responses ``[P, G * tries]`` are.

    Where all members share a prefix, each has one row for all prompts; else a row for each prompt.
    """
    P, N, prefix_len = len(prompts), members, max(spec.shared_prefix_len, 1)
    if not shared and N % P:
        raise ValueError(f"sample: {N} members cannot be divided evenly among {P} prompts.")
    group = N if shared else N // P
    index = np.arange(P * group).reshape(P, group)
    # Member by member, so that the rows of each are consecutive and share its factors.
    index = index.T if shared else index
    prompt_of, member_of = index // group, index % group if shared else index
    request = index[..., None] * tries + np.arange(tries)
    # Rows [R], their slots [W], and the prompt of each.
    grid = (N, P * tries) if shared and spec.shared_prefix_len else (P * group, tries)
    prompt_of = np.repeat(prompt_of, tries).reshape(grid)
    member_of = np.repeat(member_of, tries).reshape(grid)[:, 0]
    ids = request.reshape(grid)
    rest = [list(prompt[prefix_len:]) for prompt in prompts]
    longest = max(map(len, rest))
    sizes = (*_SHORT_BUCKETS, *sorted(spec.buckets))
    tokens = pad_rows(rest, next((b for b in sizes if b >= longest), longest))
    prefix = np.array([prompt[:prefix_len] for prompt in prompts], np.int32)
    order = np.empty(P * group * tries, np.int32)
    order[ids.reshape(-1)] = np.arange(ids.size)
    requests = MemberRequests(
        prefix=prefix[prompt_of[:, 0]],
        rest=tokens[prompt_of],
        length=np.array([len(x) for x in rest], np.int32)[prompt_of],
        member=member_of.astype(np.int32),
        request=ids.astype(np.int32),
    )
    return requests, order.reshape(P, group * tries)


def _make_decode(model: Model, draw: Draw, T: int, stop_ids: tuple[int, ...], pad_id: int):
    """The compiled part: the shared prefix, the rest of the prompts, then a token a step."""

    def read_prompts(params, deltas: RowDeltas, requests: MemberRequests) -> Slots:
        (R, c), (_, W, n) = requests.prefix.shape, requests.rest.shape
        slots = init_slots(model, R, W, c, n + T, blank=draw.blank)
        all_slots = jnp.ones((R, W), bool)
        lengths = jnp.full(R, c, jnp.int32)
        slots = put_prompts(slots, all_slots[:, 0], requests.prefix, lengths, requests.member)
        limit = requests.length + T
        new = slots.requests._replace(id=requests.request, limit=limit)
        slots = start(slots, all_slots, new)
        if c > 1:
            rows = jnp.arange(R, dtype=jnp.int32)[None]
            slots = fill_prompts(model, params, slots, rows, block=c, deltas=deltas)
        if not n:
            return slots
        tokens = jnp.pad(requests.rest, ((0, 0), (0, 0), (0, T)))
        slots = resume(slots, all_slots, slots.out._replace(tokens=tokens), requests.length)
        # Each expert of a token has factors of its own.
        experts = getattr(model.config, "experts", None)
        tokens_at_once = _READ_TOKENS // (experts.active if experts else 1)
        block = max(1, min(n, tokens_at_once // (R * W)))
        return fill_all(model, params, slots, n, block=block, deltas=deltas)

    def decode(params, deltas, key, requests: MemberRequests, order, version):
        params, deltas = cast_params(model, params), RowDeltas(deltas)
        slots = read_prompts(params, deltas, requests)
        slots = decode_slots(
            model,
            draw.next_token,
            params,
            slots,
            key,
            deltas=deltas,
            version=version,
            steps=T,
            stop_ids=stop_ids,
            prompt_tokens=requests.length,
        )

        def by_prompt(x: Array) -> Array:
            return x.reshape(-1, *x.shape[2:])[order]

        def responses(x: Array) -> Array:
            """Those of each prompt, without the tokens of the prompt."""
            index = requests.length[..., None] + jnp.arange(T)
            index = index.reshape(*index.shape, *(1,) * (x.ndim - 3))
            return by_prompt(jnp.take_along_axis(x, index, axis=2))

        out = jax.tree.map(responses, slots.out)
        mask = jnp.arange(T) < by_prompt(slots.length - requests.length)[..., None]
        out = out._replace(tokens=jnp.where(mask, out.tokens, pad_id))
        return out, mask, by_prompt(slots.finish)

    return decode
