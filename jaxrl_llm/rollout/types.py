"""``Rollout``: the result of a sampler, as one pytree."""

import math
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.support import Support, Temperature
from jaxrl_llm.rollout._inputs import check_sizes

# Why a response ended: at its longest length, with a stop token or string, with non-finite logits,
# or because it was cancelled; or that it has not ended.
LENGTH, STOP, FAILED, CANCELLED, UNFINISHED = range(5)


class Rollout(NamedTuple):
    """G responses to each of P prompts.

    A token has three log-probabilities. With ``z`` the logits and T the temperature, the *plain*
    one is ``log softmax(z)``, the *tempered* one ``log softmax(z / T)``, and the *sampled* one is
    the tempered one renormalized over ``support``, the tokens that remain after top-k, top-p, min-p
    and a list of allowed tokens. A ratio needs the same kind in numerator and denominator: a
    trainer that renormalizes over ``support`` compares with ``behavior_logp``, others with
    ``tempered_logp``. The two are equal if nothing was truncated.

    Attributes:
      prompt_tokens: int32 ``[P, Lp]``, right padded.
      prompt_mask: bool ``[P, Lp]``.
      tokens: int32 ``[P, G, T]``; padding after the last token.
      mask: bool ``[P, G, T]``, True up to and including the stop token.
      behavior_logp: float32 ``[P, G, T]``, log-probability under the sampling distribution, with
        temperature and truncation applied; 0 for greedy tokens.
      model_logp: float32 ``[P, G, T]``, log-probability under the plain model at temperature 1.
      log_kept: float32 ``[P, G, T]``, log of the tempered probability mass that remains after
        truncation; 0 if nothing was truncated.
      finish: int32 ``[P, G]``: ``LENGTH`` (0) = ran to its length, ``STOP`` (1) = ended with a stop
        token or stop string, ``FAILED`` (2) = the model's logits were non-finite, ``CANCELLED``
        (3), ``UNFINISHED`` (4).
      version: int32 ``[P, G, T]``, version of the weights that sampled each token; 0 in the
        padding.
      support: The candidates of each token, with leading axes ``[P, G, T]``; None if nothing
        truncates. Its padding has no meaning.
      ends: int32 ``[P, G, T]``, for each token the index after the last token that reads it: later
        tokens do not, because the policy's context was rewritten; see
        :func:`~jaxrl_llm.core.packing.row_trees`. None if all tokens read those before them.
      latents: float32 ``[P, G, T, 2, D]``, for a flow policy, whose steps take the positions of
        tokens: the latent before and after each. None for a language model.
      experts: int16 ``[P, G, T, L, k]``, of a model of L layers with experts: the k that read the
        input from which each token is predicted, counted from 1; 0 where nobody recorded them, as
        for tokens that were not sampled. None for a sampler that does not record them.
      sampled_at: The temperature of all tokens, of :func:`make_sampler` and
        :func:`make_denoising_sampler`; None where it varies, is 0 or is not known. It is no array
        but a part of the tree's structure: of rollouts with different ones that ``jax.tree.map``
        joins, set it to None first.
    """

    prompt_tokens: Array
    prompt_mask: Array
    tokens: Array
    mask: Array
    behavior_logp: Array
    model_logp: Array
    log_kept: Array
    finish: Array
    version: Array
    support: Support | None = None
    ends: Array | None = None
    latents: Array | None = None
    experts: Array | None = None
    sampled_at: Temperature | None = None

    @property
    def tempered_logp(self) -> Array:
        """Log-probability at the sampling temperature over the full vocabulary: ``[P, G, T]``."""
        return self.behavior_logp + self.log_kept


def trim(rollout: Rollout, *, parts: int = 4, least: int = 0) -> Rollout:
    """A rollout ``[P, G, T']`` without the last columns that no response reaches.

    Training on it costs less and has the same result. The width is rounded up to a multiple of
    ``T / parts``, so that at most ``parts`` shapes are compiled.

    Args:
      rollout: A rollout with T' columns.
      parts: Number of widths.
      least: Minimum number of cells to save; otherwise nothing is trimmed, since compiling a new
        step takes longer than many steps with a few empty cells.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> sample = jr.rollout.make_sampler(
      ...     model, max_new_tokens=8, group_size=1, stop_ids=range(400))
      >>> rollout = sample(params, jax.random.key(0), [[1, 2, 3]])
      >>> int(rollout.mask.sum()), jr.rollout.trim(rollout).tokens.shape
      (1, (1, 1, 2))
    """
    check_sizes("trim", parts=parts)
    size = rollout.tokens.shape[-1]
    used = int(np.flatnonzero(np.asarray(rollout.mask).any(axis=(0, 1)))[-1:].sum()) + 1
    step = -(-size // parts)
    width = min(size, -(-used // step) * step)
    if (size - width) * math.prod(rollout.tokens.shape[:2]) < least:
        return rollout
    unchanged = {"prompt_tokens", "prompt_mask", "finish"}
    return rollout._replace(
        **{
            name: jax.tree.map(lambda x: x[:, :, :width], value)
            for name, value in rollout._asdict().items()
            if name not in unchanged
        }
    )
