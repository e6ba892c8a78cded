"""Plain calls of a model: rows of tokens in one pass, and the scores of what was sampled."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxrl_llm.core.kernels.soft_cap import soft_cap
from jaxrl_llm.models import AttentionContext
from jaxrl_llm.train.models.score import score


def hidden_of(model, params, tokens, **options):
    """Hidden states ``[P, G, T, width]`` of tokens ``[P, G, T]``."""
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
    context = AttentionContext(mask=jnp.ones(tokens.shape, bool))
    return model.apply(params, tokens, positions, context, **options)[0]


def logits_of(model, params, tokens, **options):
    """Logits ``[P, G, T, V]`` after each token."""
    hidden = hidden_of(model, params, tokens, **options)
    return soft_cap(hidden @ model.output_matrix(params).T, model.logit_cap)


def scores_of(model, params, rollout, *, delta=None, **options):
    """Log-probabilities ``[P, G, T]`` of a rollout's tokens, as a trainer computes them."""
    fields = (rollout.prompt_tokens, rollout.prompt_mask, rollout.tokens, rollout.mask)
    return jax.jit(partial(score, model, delta=delta, **options))(params, *fields)[0]
