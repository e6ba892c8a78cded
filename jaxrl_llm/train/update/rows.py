"""Other rows than those of the batch that a model reads: other prompts, no packing, no experts."""

import math

import jax
import jax.numpy as jnp

from jaxrl_llm.core.packing import FlatPacking, rewritten_rows
from jaxrl_llm.models.sharding import batch_shards
from jaxrl_llm.recipes import Batch
from jaxrl_llm.train.update.part import At


def unrouted(batch: Batch, at: At) -> tuple[Batch, int]:
    """The batch for a model that chooses its experts: those of the batch are the policy's."""
    return batch.replace(experts=None), at.slices


def after_previous_prompt(batch: Batch, at: At) -> tuple[Batch, int]:
    """The responses after the previous row's prompt; the first row takes that of the last row.

    Raises:
      ValueError: For a batch of one prompt.
    """
    if batch.prompt_tokens.shape[0] < 2:
        raise ValueError(
            "score_batch: kl_logp scores responses after another row's prompt, so a batch needs at "
            f"least 2 prompts; got {batch.prompt_tokens.shape[0]}."
        )
    # A packing that shares prompts is wrong after the roll; trees of responses stay right.
    cells = batch.prompt_tokens.shape[-1] + math.prod(batch.tokens.shape[1:])
    others, slices = padded(batch, at.slices, cells)
    others = others.replace(
        prompt_tokens=jnp.roll(batch.prompt_tokens, 1, axis=0),
        prompt_mask=jnp.roll(batch.prompt_mask, 1, axis=0),
        experts=None,
    )
    return others, slices


def padded(batch: Batch, microbatches: int, cells: int) -> tuple[Batch, int]:
    """The batch without a packing that a model cannot use, and in how many slices it is read then.

    A packing for a budget of cells has too few microbatches for padded rows. These are within the
    budget in the smallest number of slices of equally many groups, from ``microbatches`` on; or in
    slices of one group on each device, if even that exceeds it.

    Args:
      batch: With the packing, of which only rewritten responses remain.
      microbatches: Those of the packing.
      cells: The padded cells of a group.
    """
    packing, without = batch.packing, batch.replace(packing=rewritten_rows(batch.packing))
    if not isinstance(packing, FlatPacking) or packing.budget is None:
        return without, microbatches
    groups = batch.tokens.shape[0] // batch_shards(jax.sharding.get_abstract_mesh())
    counts = (n for n in range(microbatches, groups + 1) if groups % n == 0)
    return without, next((n for n in counts if groups // n * cells <= packing.budget), groups)
