"""The pieces of a decode step, each compiled as a loop of its own at the shapes of the sampler."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models import KV, AttentionContext, Model, empty_cache, prefill
from jaxrl_llm.models.context import context_attention
from jaxrl_llm.rollout.sampling.draw import draw_tokens

# Of each loop, in the middle of a response.
STEPS = 8


def _middle(cache) -> int:
    """Tokens before those of the loop, of a response as long as the cache."""
    return (cache[0].keys.shape[-1] - STEPS) // 2


def forward(model: Model, params, tokens, prefix, cache):
    """Passes of the model over one token a slot; the output matrix is left out."""
    shape, first = tokens.shape, _middle(cache)
    kept = jnp.ones((shape[0], prefix[0].keys.shape[-1]), bool)

    def body(t, carry):
        tokens, cache = carry
        index = jnp.full(shape, first + t, jnp.int32)
        context = AttentionContext(jnp.ones((*shape, 1), bool), prefix, kept, cache, index)
        positions = (index + kept.shape[-1])[..., None]
        hidden, cache = model.apply(params, tokens[..., None], positions, context)
        tokens = (tokens + (hidden[:, :, 0, 0] > 0)) % model.config.vocab_size
        return tokens, cache

    return jax.lax.fori_loop(0, STEPS, body, (tokens, cache))


def attention(model: Model, query, prefix, cache):
    """Attention of all layers to prompts and responses, and the writing of keys and values."""
    shape, kv_heads, first = query.shape[:2], model.config.num_kv_heads, _middle(cache)
    kept = jnp.ones((shape[0], prefix[0].keys.shape[-1]), bool)

    def body(t, carry):
        query, cache = carry
        index = jnp.full(shape, first + t, jnp.int32)
        context = AttentionContext(jnp.ones((*shape, 1), bool), prefix, kept, cache, index)
        cache = list(cache)
        for layer in range(len(cache)):
            own = query[:, :, 0, :kv_heads]
            own = KV(own[..., None], own[..., None, :])
            query, cache[layer] = context_attention(query, own, context.of_layer(layer))
        return query, tuple(cache)

    return jax.lax.fori_loop(0, STEPS, body, (query, cache))


def output_and_draw(model: Model, params, hidden):
    """The logits of one token a slot, and the draw from them."""
    matrix = model.output_matrix(params)

    def body(t, hidden):
        logits = jnp.einsum("pgd,vd->pgv", hidden, matrix, preferred_element_type=jnp.float32)
        uniform = jnp.full(hidden.shape[:2], (t + 1) / (STEPS + 1), jnp.float32)
        drawn = draw_tokens(logits, uniform)
        change = drawn.tokens % 2 + drawn.behavior_logp + drawn.model_logp + drawn.log_kept
        return hidden + change[..., None].astype(hidden.dtype)

    return jax.lax.fori_loop(0, STEPS, body, hidden)


def pieces(model: Model, params, size) -> dict[str, Callable[[], Any]]:
    """The pieces by name, ready to run: "prefill" once, the others ``STEPS`` times in a run."""
    config, grid = model.config, (size["prompts"], size["rollouts"])
    length = max(STEPS, size["new_tokens"])
    prompts = jnp.ones((size["prompts"], size["prompt_tokens"]), jnp.int32)
    prefix = empty_cache(model, grid[:1], size["prompt_tokens"])
    tokens = jnp.ones(grid, jnp.int32)
    query = jnp.ones((*grid, 1, config.num_heads, config.head_dim), config.dtype)
    hidden = jnp.ones((*grid, config.width), config.dtype)
    # The cache is given away at every run and comes back with its result.
    held = {"cache": empty_cache(model, grid, length)}
    passes = jax.jit(partial(forward, model), donate_argnums=3)
    attends = jax.jit(partial(attention, model), donate_argnums=2)
    draws = jax.jit(partial(output_and_draw, model))
    reads = jax.jit(partial(prefill, model))

    def run_forward():
        out, held["cache"] = passes(params, tokens, prefix, held["cache"])
        return out

    def run_attention():
        out, held["cache"] = attends(query, prefix, held["cache"])
        return out

    return {
        "prefill": lambda: reads(params, prompts, jnp.ones(prompts.shape, bool)),
        "forward": run_forward,
        "attention": run_attention,
        "output_and_draw": lambda: draws(params, hidden),
    }
