"""LLDS: a penalty if correct or neutral responses lose likelihood.

Shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.regularizers`.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.regularizers import _inputs


def chunk_ids_from_mask(mask: Array) -> Array:
    """Numbers the contiguous runs of a mask: the actions of a response with tool calls.

    Args:
      mask: bool ``[..., T]``, False for prompts, observations and padding.

    Returns:
      int32 ``[..., T]``: 1 to K in each row, 0 outside the mask.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.regularizers.chunk_ids_from_mask(jnp.array([False, True, True, False, True])).tolist()
      [0, 1, 1, 0, 2]

    References:
      Ours; the runs are the action level of LLDS (arXiv:2512.04220).
    """
    checks.check_mask("chunk_ids_from_mask", mask)
    checks.check_min_rank("chunk_ids_from_mask", 1, mask=mask)
    before = jnp.concatenate([jnp.zeros_like(mask[..., :1]), mask[..., :-1]], axis=-1)
    return jnp.where(mask, jnp.cumsum(mask & ~before, axis=-1, dtype=jnp.int32), 0)


@traits(needs_updates=True)
def llds(
    logp: Array,
    old_logp: Array | None,
    mask: Array,
    advantages: Array,
    *,
    chunk_ids: Array | None = None,
    answer_tokens: Array | None = None,
    level: Literal["action", "response"] = "action",
    coef: float = 0.1,
    tolerance: float = 1e-4,
) -> Array:
    """A penalty for lost likelihood of responses whose advantage is not negative.

        d[t] = stop_gradient(old_logp[t]) - logp[t], 0 up to tolerance
        gate = 1 where A >= 0 and the sum of d over the token's action (or response) is above 0
        loss[t] = coef * gate * max(0, d[t])

    The penalty applies only to an action that has lost likelihood in total, and in it only to the
    tokens that lost: the gradient is -coef there and 0 elsewhere. It is 0 until the policy has
    changed, so a batch must have several updates. The paper's weighting is
    ``aggregate.token_mean``.

    Args:
      logp, mask, coef: See the package.
      old_logp: ``[..., T]`` under the policy at the start of the step; None for the policy being
        trained, which makes the term 0.
      advantages: ``[..., T]``, or ``[...]`` for one value per sequence.
      chunk_ids: int32 ``[..., T]``, 1 to at most T in each row, 0 outside any action; None for the
        contiguous runs of the mask. Only for level "action".
      answer_tokens: bool ``[..., T]``, True for tokens to exclude from the sums and the penalty,
        such as those of the final answer; None for none.
      level: Unit whose total likelihood must have decreased: each "action" or the full "response".
      tolerance: Differences up to this, in nats, not negative, are ignored, such as the rounding
        between two computations of one log-probability.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, old_logp = jnp.array([[-1.5, -0.4, -2.1, -0.4], [-1.0, -0.5, -2.0, -1.0]])
      >>> jr.regularizers.llds(logp, old_logp, jnp.ones(4, bool), jnp.array(0.0), coef=1.0,
      ...                      chunk_ids=jnp.array([1, 1, 2, 2]))
      Array([0.5, 0. , 0. , 0. ], dtype=float32)

    References:
      Deng et al., On GRPO Collapse in Search-R1: the Lazy Likelihood-Displacement Death Spiral
      (arXiv:2512.04220). The paper's coefficient is 0.1, the one of the code
      (github.com/vengdeng/LLDS) 0.2. The tolerance is ours; 0 is theirs.
    """
    checks.check_option("llds", "level", level, ("action", "response"))
    checks.check_non_negative("llds", finite=True, coef=coef, tolerance=tolerance)
    if chunk_ids is not None and level == "response":
        raise ValueError("llds: chunk_ids has no effect with level='response'; leave it out.")
    checks.check_mask("llds", mask)
    old_logp = logp if old_logp is None else old_logp
    _inputs.check_tokens("llds", mask, logp=logp, old_logp=old_logp)
    checks.check_bool("llds", answer_tokens=answer_tokens)
    checks.check_same_shape("llds", mask=mask, answer_tokens=answer_tokens)
    valid = mask if answer_tokens is None else mask & ~answer_tokens
    lost = masking.safe_log_ratio(jax.lax.stop_gradient(old_logp), logp, valid)
    lost = jnp.where(jnp.abs(lost) > tolerance, lost, 0.0)
    constant = jax.lax.stop_gradient(lost)
    if level == "response":
        total = jnp.sum(constant, axis=-1, keepdims=True)
    else:
        chunk_ids = chunk_ids_from_mask(mask) if chunk_ids is None else chunk_ids
        checks.check_integer("llds", chunk_ids=chunk_ids)
        checks.check_same_shape("llds", mask=mask, chunk_ids=chunk_ids)
        length, count = jnp.shape(mask)[-1], math.prod(jnp.shape(mask)[:-1])
        # Row 0 of each response collects what is in no action; its tokens then count as no loss.
        ids = jnp.where(mask, jnp.clip(chunk_ids, 0, length), 0).reshape(count, length)
        flat = (ids + jnp.arange(count)[:, None] * (length + 1)).ravel()
        sums = jax.ops.segment_sum(constant.ravel(), flat, num_segments=count * (length + 1))
        total = jnp.where(ids > 0, sums[flat].reshape(ids.shape), 0.0).reshape(jnp.shape(mask))
    gate = (total > 0) & (masking.spread("llds", "advantages", advantages, mask) >= 0) & valid
    return _inputs.scaled(coef, jnp.where(gate & (lost > 0), lost, 0.0))


@traits(supervised=True)
def imitation(logp: Array, mask: Array, *, imitated: Array, coef: float = 0.1) -> Array:
    """The negative log-likelihood of imitated responses: fine-tuning as a term next to RL.

        loss[t] = -coef logp[t] where imitated, else 0

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained.
      mask, coef: See the package.
      imitated: bool ``[...]``, one per response.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.full((2, 1), -2.0), jnp.ones((2, 1), bool)
      >>> loss = jr.regularizers.imitation(logp, mask, imitated=jnp.array([True, False]))
      >>> jnp.abs(loss).ravel()
      Array([0.2, 0. ], dtype=float32)

    References:
      Cog-Rethinker (arXiv:2510.15979), ABSTRACT reading; the coefficient is ours.
    """
    checks.check_non_negative("imitation", finite=True, coef=coef)
    checks.check_mask("imitation", mask)
    checks.check_bool("imitation", imitated=imitated)
    checks.check_shape("imitation", "imitated", imitated, jnp.shape(mask)[:-1])
    _inputs.check_tokens("imitation", mask, logp=logp)
    return masking.zero_masked(_inputs.scaled(-coef, logp), mask & imitated[..., None])
