"""The sampler of a population: each member answers with its own low-rank delta of one model.

A member's row of slots begins with what all prompts have in common, which is computed once for the
member; its slots go on with the rest of each prompt it is asked, and then with its responses. So
the cost follows unique tokens here as well, and the weights are read once for the whole population.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.models.protocol import Model, cast_params
from jaxrl_llm.models.sharding import batch_sharding, batch_shards
from jaxrl_llm.rollout import decode as decoding
from jaxrl_llm.rollout.engine.requests import count_deltas
from jaxrl_llm.rollout.sampler import BUCKETS, check_shared_prefix, pad_prompts, prompt_room
from jaxrl_llm.rollout.sampling.options import make_draw
from jaxrl_llm.rollout.slots import Requests, Slots, init_slots, put_prompts, resume, start
from jaxrl_llm.rollout.types import Rollout

# What is left of short prompts without what they share is read for every member and prompt.
_SHORT = (0, 2, 4, 6, 8, 10, 12, 14)
# Tokens that are read in one pass: enough to keep a device busy, while what a layer holds of them
# stays small beside the weights.
_READ = 16_384


class Asked(NamedTuple):
    """What each slot of a population is asked.

    Attributes:
      first: int32 ``[R, c]``, the first tokens of a row's prompts.
      rest: int32 ``[R, W, n]``, the tokens of each prompt after them, right padded.
      length: int32 ``[R, W]``, how many those are.
      member: int32 ``[R]``, whose delta a row has.
      request: int32 ``[R, W]``, names the random numbers of a response.
    """

    first: Array
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
    """Builds a compiled sampler of the responses of N members, each the model with its own delta.

    Args:
      model: The model.
      max_new_tokens: T, the longest response in tokens.
      shared: Whether every member answers every prompt, so that G = N; else the members are dealt
        out in order, G = N / P to a prompt.
      tries: Responses of a member to a prompt; more than one needs a temperature.
      stop_ids: Token ids that end a response; they belong to it.
      temperature: 0 is greedy: then all that differs between responses is the members' weights.
      top_k: See :func:`~jaxrl_llm.rollout.filter_logits`, as for the next three.
      top_p: Likewise.
      min_p: Likewise.
      order: Likewise.
      pad_id: Fills ``tokens`` after the end of a response.
      buckets: Lengths of prompts, less what is common, that are compiled.
      shared_prefix_len: How many first tokens all prompts share; a member computes them once.
      mesh: Spreads the members over its axes ``data`` and ``fsdp``, which must divide their number.

    Returns:
      ``sample(params, deltas, key, prompts, *, version=0) -> Rollout``, ``[P, G * tries, T]`` with
      the tries of a member beside each other. ``deltas`` have one leading axis ``[N]``, as
      ``evolution.model_delta`` makes them, also where pairs share their factors. The key is
      consumed; a greedy sampler reads none of it.

    Raises:
      ValueError: If an option is out of range, has no effect, or ``max_new_tokens`` leaves no room
        for a prompt. ``sample`` raises for a bad prompt, and where the prompts or the mesh do not
        divide the members.

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
      EGGROLL (arXiv:2511.16652), sec. 4: one batch holds many members. That a member computes what
      prompts have in common once is ours.
    """
    name = "make_population_sampler"
    checks.check_positive(name, max_new_tokens=max_new_tokens, tries=tries)
    checks.check_non_negative(name, shared_prefix_len=shared_prefix_len)
    if tries > 1 and temperature == 0:
        raise ValueError(f"{name}: tries={tries} has no effect at temperature 0: all are alike.")
    draw = make_draw(
        name,
        vocab_size=model.config.vocab_size,
        stop_ids=stop_ids,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        order=order,
    )
    room = prompt_room(name, model, max_new_tokens)
    decode = jax.jit(_make_decode(model, draw, max_new_tokens, tuple(stop_ids), pad_id))

    def sample(
        params: ArrayTree, deltas: ArrayTree, key: Array, prompts, *, version: int = 0
    ) -> Rollout:
        tokens, mask = pad_prompts(
            prompts, vocab_size=model.config.vocab_size, room=room, buckets=buckets
        )
        check_shared_prefix("sample", prompts, shared_prefix_len)
        if deltas is None:
            raise ValueError("sample: a population needs deltas; see evolution.model_delta.")
        members = count_deltas("sample", deltas, pairs=True)
        asked, back = _ask(
            prompts,
            members,
            shared=shared,
            tries=tries,
            shared_prefix_len=shared_prefix_len,
            buckets=buckets,
        )
        out = decode(params, deltas, key, _place(asked, mesh), back, np.int32(version))
        return Rollout(prompt_tokens=tokens, prompt_mask=mask, **out)

    sample.compiled = decode  # type: ignore[attr-defined]
    return sample


def _ask(
    prompts,
    members: int,
    *,
    shared: bool,
    tries: int,
    shared_prefix_len: int,
    buckets: Sequence[int],
) -> tuple[Asked, np.ndarray]:
    """Who is asked what, and where in the grid the responses ``[P, G * tries]`` are.

    Prompts with nothing in common take a row each of every member that is asked them.
    """
    P, N = len(prompts), members
    if not shared and N % P:
        raise ValueError(f"sample: {N} members cannot be dealt out to {P} prompts.")
    group = N if shared else N // P
    places = np.arange(P * group).reshape(P, group)
    # Member by member, so that the rows of each stand in a line and none needs its factors twice.
    places = places.T if shared else places
    of_prompt, of_member = places // group, places % group if shared else places
    request = places[..., None] * tries + np.arange(tries)
    # Rows [R], slots of them [W], and the prompt of each.
    grid = (N, P * tries) if shared and shared_prefix_len else (P * group, tries)
    prompt_of = np.repeat(of_prompt, tries).reshape(grid)
    member_of = np.repeat(of_member, tries).reshape(grid)[:, 0]
    ids = request.reshape(grid)
    c = max(shared_prefix_len, 1)
    rest = [list(prompt[c:]) for prompt in prompts]
    longest = max(map(len, rest))
    sizes = (*_SHORT, *sorted(buckets))
    width = next((b for b in sizes if b >= longest), longest)
    tokens = np.zeros((P, width), np.int32)
    for row, own in zip(tokens, rest, strict=True):
        row[: len(own)] = own
    first = np.array([prompt[:c] for prompt in prompts], np.int32)
    back = np.empty(P * group * tries, np.int32)
    back[ids.reshape(-1)] = np.arange(ids.size)
    asked = Asked(
        first=first[prompt_of[:, 0]],
        rest=tokens[prompt_of],
        length=np.array([len(own) for own in rest], np.int32)[prompt_of],
        member=member_of.astype(np.int32),
        request=ids.astype(np.int32),
    )
    return asked, back.reshape(P, group * tries)


def _place(asked: Asked, mesh: jax.sharding.Mesh | None) -> Asked:
    """The rows over the mesh, as they are without one."""
    if mesh is None:
        return asked
    rows, shards = len(asked.member), batch_shards(mesh)
    if rows % shards:
        raise ValueError(
            f"sample: {rows} rows of members cannot be spread over the {shards} devices of the "
            "mesh axes data and fsdp."
        )
    return processes.place(asked, batch_sharding(mesh))


def _make_decode(model: Model, draw, max_new_tokens: int, stop_ids: tuple[int, ...], pad_id: int):
    """The compiled part: what is common, the rest of the prompts, then a token a step."""

    def decode(params, deltas, key, asked: Asked, back, version) -> dict[str, Array]:
        params, deltas = cast_params(model, params), decoding.OwnRows(deltas)
        slots = _begin(model, draw, params, deltas, asked, max_new_tokens)
        limits = {"version": version, "steps": max_new_tokens, "stop_ids": stop_ids}
        limits["begun"] = asked.length
        slots = decoding.decode(model, draw.draw, params, slots, key, deltas=deltas, **limits)

        def answers(x: Array) -> Array:
            """Those of each prompt, without the prompt's own tokens."""
            places = asked.length[..., None] + jnp.arange(max_new_tokens)
            places = places.reshape(*places.shape, *(1,) * (x.ndim - 3))
            return grouped(jnp.take_along_axis(x, places, axis=2))

        def grouped(x: Array) -> Array:
            return x.reshape(-1, *x.shape[2:])[back]

        out = jax.tree.map(answers, slots.out)
        mask = jnp.arange(max_new_tokens) < grouped(slots.length - asked.length)[..., None]
        return {
            "tokens": jnp.where(mask, out.tokens, pad_id),
            "mask": mask,
            "behavior_logp": out.behavior_logp,
            "model_logp": out.model_logp,
            "log_kept": out.log_kept,
            "finish": grouped(slots.finish),
            "version": out.version,
            "support": out.support,
        }

    return decode


def _begin(model: Model, draw, params, deltas, asked: Asked, max_new_tokens: int) -> Slots:
    """Slots that have read all of their prompts."""
    (R, c), (_, W, n) = asked.first.shape, asked.rest.shape
    slots = init_slots(model, R, W, c, n + max_new_tokens, blank=draw.blank)
    everyone = jnp.ones((R, W), bool)
    lengths = jnp.full(R, c, jnp.int32)
    slots = put_prompts(slots, everyone[:, 0], asked.first, lengths, asked.member)
    limit = asked.length + max_new_tokens
    slots = start(slots, everyone, Requests(asked.request, limit, slots.requests.settings))
    if c > 1:
        rows = jnp.arange(R, dtype=jnp.int32)[None]
        slots = decoding.fill_prompts(model, params, slots, rows, block=c, deltas=deltas)
    if not n:
        return slots
    tokens = jnp.pad(asked.rest, ((0, 0), (0, 0), (0, max_new_tokens)))
    out = slots.out._replace(tokens=tokens)
    slots = resume(slots, everyone, out, asked.length)
    block = max(1, min(n, _READ // (R * W)))
    return decoding.fill_all(model, params, slots, n, block=block, deltas=deltas)
