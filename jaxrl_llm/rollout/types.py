"""``Rollout``: what a sampler hands on, as one pytree."""

from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.support import Support

# Why a response ended: with its budget, with a stop token, with a number that is none, because it
# was not wanted any longer; or that it has not.
LENGTH, STOP, FAILED, CANCELLED, UNFINISHED = range(5)


class Rollout(NamedTuple):
    """G responses to each of P prompts.

    Three log-probabilities of one token must not be mixed up. With ``z`` the logits and T the
    temperature, the *plain* one is ``log softmax(z)``, the *tempered* one ``log softmax(z / T)``,
    and the *sampled* one the tempered one renormalized over ``support``, the tokens that top-k,
    top-p, min-p and a list of allowed tokens kept. A ratio needs the same kind above and below: a
    trainer that renormalizes over ``support`` compares with ``behavior_logp``, one that does not
    with ``tempered_logp``. The two are equal where nothing was truncated.

    Attributes:
      prompt_tokens: int32 ``[P, Lp]``, right padded.
      prompt_mask: bool ``[P, Lp]``.
      tokens: int32 ``[P, G, T]``; padding after the last token.
      mask: bool ``[P, G, T]``, True up to and including the stop token.
      behavior_logp: float32 ``[P, G, T]``, log-probability under the distribution really sampled,
        with temperature and truncation applied; 0 for greedy tokens.
      model_logp: float32 ``[P, G, T]``, log-probability under the plain model at temperature 1.
      log_kept: float32 ``[P, G, T]``, log of the tempered probability mass that truncation kept; 0
        where nothing was truncated.
      finish: int32 ``[P, G]``: 0 = ran to its length, 1 = ended with a stop token or stop string,
        2 = failed, since the model's logits were no numbers, 3 = cancelled, 4 = unfinished.
      version: int32 ``[P, G, T]``, of the weights that sampled each token; 0 in the padding.
      support: The tokens that each one was drawn from, with leading axes ``[P, G, T]``; None where
        nothing truncates. What stands in the padding means nothing.
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

    @property
    def tempered_logp(self) -> Array:
        """Log-probability at the sampling temperature over the whole vocabulary: ``[P, G, T]``."""
        return self.behavior_logp + self.log_kept


def trim(rollout: Rollout, *, parts: int = 4) -> Rollout:
    """A rollout without the last columns, as far as no response reaches them.

    Training on it costs less and gives the same. The width stays a multiple of the ``parts``-th
    part of what it was, so that no more than ``parts`` shapes are ever compiled.

    Args:
      rollout: ``[P, G, T]``.
      parts: Into how many parts T is divided.

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
    size = rollout.tokens.shape[-1]
    used = int(np.flatnonzero(np.asarray(rollout.mask).any(axis=(0, 1)))[-1:].sum()) + 1
    step = -(-size // parts)
    width = min(size, -(-used // step) * step)
    whole = {"prompt_tokens", "prompt_mask", "finish"}
    return rollout._replace(
        **{
            name: jax.tree.map(lambda x: x[:, :, :width], value)
            for name, value in rollout._asdict().items()
            if name not in whole
        }
    )
