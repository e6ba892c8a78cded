"""Squared norms of the score of responses: the gradient of their log-probability.

    n[p, g] = || d/d params  sum_t mask[p, g, t] logp[p, g, t] ||^2

They weigh rewards in the baseline of least variance, :func:`jaxrl_llm.advantages.opob`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.packing import apart, rewritten_rows
from jaxrl_llm.models.lora import merge_adapter
from jaxrl_llm.models.sharding import batch_shards, keep_apart
from jaxrl_llm.recipes import Batch
from jaxrl_llm.train.batches import reorder, trained_first
from jaxrl_llm.train.models.score import Scorer


def score_sq_norms(scorer: Scorer, params: ArrayTree, batch: Batch, *, base=()) -> Array:
    """The squared norm ``[P, G]`` of the score of each response, with one backward pass for each.

    The norm of a sum is not that of its terms, so a response needs a gradient of its own. Each
    device computes one response at a time and has the gradient of no other in memory. The cost is
    that of one more gradient of the batch in rows of one response, each behind its own prompt: G
    (Lp + T) padded cells a group, whatever the packing and the number of microbatches. Responses
    without a token to train on cost almost nothing; a mesh takes as long as the device with most
    others.

    Args:
      scorer: The policy and its temperature. What ``remat`` keeps is kept for one response.
      params: The trained parameters: those of the model, or an adapter.
      batch: ``[P, G, T]``. On a mesh, the devices that it is spread over compute their own rows.
      base: The frozen parameters below an adapter; ``()`` for none.

    Returns:
      float32 ``[P, G]``, summed over all trained parameters in float32; 0 for a response without a
      token to train on, and where ``batch.where`` is False.

    Example:
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> batch = jr.testing.make_case().batch
      >>> norms = jr.train.score_sq_norms(jr.train.Scorer(model), params, batch)
      >>> norms.shape, bool(((norms > 0) == (batch.mask.any(-1) & batch.where)).all())
      ((8, 4), True)
    """
    P, G, _ = batch.tokens.shape
    scorer = dataclasses.replace(scorer, shared_prefix_len=0)  # a row shares with no other
    shards = batch_shards(jax.sharding.get_abstract_mesh())
    shards = shards if P % shards == 0 else 1

    def norm(row: Batch) -> Array:
        grads = jax.grad(lambda p: jnp.sum(scorer(merge_adapter(base, p), row).logp))(params)
        return trees.norm(grads) ** 2

    def norms(rows: Batch) -> Array:
        if shards == 1:
            return norm(jax.tree.map(lambda x: x[0], rows))[None]
        return jax.vmap(norm)(jax.tree.map(keep_apart, rows))

    def norms_or_zeros(rows: Batch) -> Array:
        return jax.lax.cond(jnp.any(rows.mask), norms, lambda _: jnp.zeros(shards), rows)

    def split(x: Array) -> Array:  # [P G, 1, ...] -> [P G / shards, shards, 1, 1, ...]
        x = x.reshape(shards, P * G // shards, 1, *x.shape[1:])
        return jnp.swapaxes(x, 0, 1)

    rows = _rows(batch)
    order = trained_first(rows.mask, P * G // shards)  # so that all devices skip at the same time
    values = jax.lax.map(norms_or_zeros, jax.tree.map(split, reorder(rows, order)))
    values = jnp.swapaxes(values, 0, 1).reshape(P * G)
    return reorder(values, jnp.argsort(order, axis=1)).reshape(P, G)


def _rows(batch: Batch) -> Batch:
    """The responses as ``P G`` groups of one, with what a scorer reads of them."""
    P, G, _ = batch.tokens.shape

    def alone(x: Array) -> Array:
        return x.reshape(P * G, 1, *x.shape[2:])

    tree = rewritten_rows(batch.packing)
    return Batch(
        tokens=alone(batch.tokens),
        mask=alone(batch.mask & batch.where[..., None]),
        rewards=alone(batch.rewards),
        where=alone(batch.where),
        prompt_tokens=jnp.repeat(batch.prompt_tokens, G, axis=0),
        prompt_mask=jnp.repeat(batch.prompt_mask, G, axis=0),
        support=jax.tree.map(alone, batch.support),
        experts=None if batch.experts is None else alone(batch.experts),
        packing=None if tree is None else apart(tree),
    )
