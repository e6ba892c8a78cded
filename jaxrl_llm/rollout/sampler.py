"""The sampler: groups of responses to prompts, the whole decode inside one compiled function.

A prompt's keys and values are computed once and shared by its group. The last prompt token is the
first input of every response, in sampling as in training, so both go through the same computation.
The random number of a token depends only on the key, the request and the token's place in its
response: a rollout does not depend on its neighbours in the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.protocol import AttentionContext, Model, empty_cache, prefill
from jaxrl_llm.models.sharding import batch_sharding, batch_shards
from jaxrl_llm.rollout.rollout import LENGTH, STOP, Rollout
from jaxrl_llm.rollout.sampling import (
    GREEDY_BELOW,
    filter_logits,
    sample_from,
    sampled_logprobs,
)

# Powers of two and the numbers halfway between: padding is at most a third of the width.
BUCKETS = tuple(sorted([2**n for n in range(4, 18)] + [3 * 2**n for n in range(3, 17)]))


def pad_prompts(
    prompts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    room: int,
    buckets: Sequence[int] = BUCKETS,
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of token ids as one right-padded array, its width rounded up to a bucket.

    Args:
      prompts: P lists of token ids, none empty.
      vocab_size: Ids must lie below it.
      room: The longest prompt that leaves room for a response in the model's context.
      buckets: Widths to round up to, so that a few shapes are compiled and not one a prompt.

    Returns:
      Tokens int32 ``[P, Lp]`` and mask bool ``[P, Lp]``.

    Raises:
      ValueError: If there is no prompt, or one is empty, too long or holds an id outside the
        vocabulary; it names the prompt by its place.
    """
    if not prompts:
        raise ValueError("sample: there are no prompts.")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"sample: prompt {i} is empty; it needs at least one token.")
        if len(prompt) > room:
            raise ValueError(
                f"sample: prompt {i} has {len(prompt)} tokens, but the model's context leaves room "
                f"for {room} beside the response."
            )
        wrong = [t for t in prompt if not 0 <= t < vocab_size]
        if wrong:
            raise ValueError(
                f"sample: prompt {i} holds token {wrong[0]}, outside the vocabulary of "
                f"{vocab_size}."
            )
    longest = max(map(len, prompts))
    width = min((b for b in sorted(buckets) if b >= longest), default=longest)
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    mask = np.arange(width) < np.array([len(p) for p in prompts])[:, None]
    return tokens, mask


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
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[..., Rollout]:
    """Builds a compiled sampler of ``group_size`` responses a prompt.

    Args:
      model: The model.
      max_new_tokens: T, the longest response in tokens.
      group_size: G, responses a prompt.
      stop_ids: Token ids that end a response; they belong to it.
      temperature: 0 is greedy; then all responses of a group are alike.
      top_k: See :func:`~jaxrl_llm.rollout.sampling.filter_logits`, as for the next three.
      top_p: Likewise.
      min_p: Likewise.
      order: Likewise.
      pad_id: Fills ``tokens`` after the end of a response.
      buckets: Prompt widths that are compiled.
      mesh: Spreads the prompts over its axes ``data`` and ``fsdp``, which must divide P.

    Returns:
      ``sample(params, key, prompts, *, request_ids=None, version=0) -> Rollout``. ``prompts`` are P
      lists of token ids; ``request_ids`` int ``[P, G]`` name the requests (default: their place),
      and a request gives the same response in any batch; ``version`` is recorded. The key is
      consumed.

    Raises:
      ValueError: If an option is out of range, has no effect, or ``max_new_tokens`` leaves no room
        for a prompt. ``sample`` raises for a bad prompt and names it.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> sample = jr.rollout.make_sampler(model, max_new_tokens=4, group_size=2)
      >>> sample(params, jax.random.key(0), [[1, 2, 3], [4]]).tokens.shape
      (2, 2, 4)
    """
    name = "make_sampler"
    checks.check_positive(name, max_new_tokens=max_new_tokens, group_size=group_size)
    filters = _check_filters(name, temperature, top_k, top_p, min_p, order)
    room = model.config.max_length - max_new_tokens
    if room < 1:
        raise ValueError(
            f"{name}: max_new_tokens {max_new_tokens} leaves no room for a prompt in the model's "
            f"context of {model.config.max_length}."
        )
    draw = _make_draw(temperature, filters)
    decode = jax.jit(_make_decode(model, draw, max_new_tokens, group_size, tuple(stop_ids), pad_id))

    def sample(
        params: ArrayTree, key: Array, prompts, *, request_ids=None, version: int = 0
    ) -> Rollout:
        tokens, mask = pad_prompts(
            prompts, vocab_size=model.config.vocab_size, room=room, buckets=buckets
        )
        if request_ids is None:
            request_ids = np.arange(len(prompts) * group_size).reshape(len(prompts), group_size)
        request_ids = np.asarray(request_ids, np.int32)
        checks.check_shape("sample", "request_ids", request_ids, (len(prompts), group_size))
        inputs = _place((tokens, mask, request_ids), mesh)
        return decode(params, key, *inputs, jnp.int32(version))

    sample.compiled = decode  # type: ignore[attr-defined]
    return sample


def _check_filters(name: str, temperature, top_k, top_p, min_p, order: str) -> dict[str, Any]:
    """The options of ``filter_logits``; raises for one out of range or without effect."""
    checks.check_non_negative(name, temperature=temperature)
    checks.check_positive(name, top_k=top_k, top_p=top_p, min_p=min_p)
    for option, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None and value >= 1:
            raise ValueError(f"{name}: {option} must be below 1; got {value:g}. None is off.")
    checks.check_option(name, "order", order, ("hf", "vllm"))
    given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    filters: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    if temperature < GREEDY_BELOW and filters:
        raise ValueError(f"{name}: {', '.join(filters)} has no effect at temperature 0.")
    if order != "hf":
        if min_p is None:
            raise ValueError(f"{name}: order={order!r} has no effect without min_p.")
        filters["order"] = order
    return filters


def _place(arrays: tuple, mesh: jax.sharding.Mesh | None) -> tuple:
    """Arrays ``[P, ...]`` over the mesh, as they are without one."""
    if mesh is None:
        return arrays
    prompts, shards = len(arrays[0]), batch_shards(mesh)
    if prompts % shards:
        raise ValueError(
            f"sample: {prompts} prompts cannot be spread over the {shards} devices of the mesh "
            "axes data and fsdp."
        )
    return jax.device_put(arrays, batch_sharding(mesh))


def _make_draw(temperature: float, filters: dict[str, Any]) -> Callable:
    """``draw(logits, keys, t) -> (tokens, (behavior_logp, model_logp, log_kept))``."""
    uniform = jax.vmap(jax.vmap(lambda key, t: jax.random.uniform(jax.random.fold_in(key, t))))

    def plain(logits: Array, keys: Array, t: Array):
        # At temperature 1 without filters the three log-probabilities are one.
        tokens = sample_from(logits, uniform(keys, jnp.full(keys.shape, t)))
        logp = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        logp = logp - jax.nn.logsumexp(logits, axis=-1)
        return tokens, (logp, logp, jnp.zeros_like(logp))

    def filtered(logits: Array, keys: Array, t: Array):
        kept = filter_logits(logits, temperature=temperature, **filters)
        tokens = sample_from(kept, uniform(keys, jnp.full(keys.shape, t)))
        return tokens, sampled_logprobs(logits, kept, tokens, temperature=temperature)

    return plain if temperature == 1.0 and not filters else filtered


def _make_decode(model, draw, max_new_tokens, group_size, stop_ids, pad_id):
    """The compiled part of the sampler: prefill, then a token a step until all rows have ended."""

    def decode(params, key, prompt_tokens, prompt_mask, request_ids, version) -> Rollout:
        prompts, G, T = prompt_tokens.shape[0], group_size, max_new_tokens
        ends = jnp.sum(prompt_mask, axis=-1, dtype=jnp.int32) - 1
        shared_mask = jnp.arange(prompt_tokens.shape[-1]) < ends[:, None]
        prefix = prefill(model, params, prompt_tokens, shared_mask)
        keys = jax.vmap(jax.vmap(lambda request: jax.random.fold_in(key, request)))(request_ids)
        matrix = model.output_matrix(params)
        first = jnp.take_along_axis(prompt_tokens, ends[:, None], axis=-1)

        def step(carry):
            t, last, done, cache, (tokens, mask, *logps) = carry
            context = AttentionContext(
                jnp.ones((prompts, G, 1), bool), prefix, shared_mask, cache, t
            )
            positions = jnp.broadcast_to((ends + t)[:, None, None], (prompts, G, 1))
            hidden, cache = model.apply(params, last[..., None], positions, context)
            logits = jnp.einsum(
                "pgd,vd->pgv", hidden[:, :, 0], matrix, preferred_element_type=jnp.float32
            )
            token, logp = draw(logits, keys, t)
            token = jnp.where(done, pad_id, token)
            news = (token, ~done, *(jnp.where(done, 0.0, x) for x in logp))
            out = tuple(
                jax.lax.dynamic_update_index_in_dim(old, new, t, axis=-1)
                for old, new in zip((tokens, mask, *logps), news, strict=True)
            )
            done = done | jnp.isin(token, jnp.array(stop_ids, jnp.int32))
            return t + 1, token, done, cache, out

        def running(carry):
            t, _, done, _, _ = carry
            return (t < T) & ~jnp.all(done)

        shape = (prompts, G, T)
        blank = jnp.zeros(shape, jnp.float32)
        out = (jnp.full(shape, pad_id, jnp.int32), jnp.zeros(shape, bool), blank, blank, blank)
        carry = (
            jnp.int32(0),
            jnp.broadcast_to(first, (prompts, G)),
            jnp.zeros((prompts, G), bool),
            empty_cache(model, (prompts, G), T),
            out,
        )
        _, _, done, _, (tokens, mask, behavior, plain_logp, kept) = jax.lax.while_loop(
            running, step, carry
        )
        return Rollout(
            prompt_tokens=prompt_tokens,
            prompt_mask=prompt_mask,
            tokens=tokens,
            mask=mask,
            behavior_logp=behavior,
            model_logp=plain_logp,
            log_kept=kept,
            finish=jnp.where(done, STOP, LENGTH).astype(jnp.int32),
            version=jnp.full((prompts, G), version, jnp.int32),
        )

    return decode
