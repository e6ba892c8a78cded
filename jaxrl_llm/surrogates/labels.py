"""REAL: rewards as labels, which a response's log ratio to the old policy is to tell apart.

The method is REAL (arXiv:2602.05630). Shared arguments, TypeError and ValueError: see
:mod:`jaxrl_llm.surrogates`.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.surrogates import _inputs


@traits(takes_correction=False, policy_gradient=False, level="sequence", reads_sequence=True)
def real(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    tau: float = 0.5,
) -> Array:
    """Classifies the responses of a group as right or wrong by how much likelier they became.

        s_i = mean over tokens of (logp_i - old_logp_i)
        L = log(1 + sum_{i right} exp(-s_i / tau)) + log(1 + sum_{j wrong} exp(s_j / tau))
        loss[i, t] = L of the group                          at every token of the group

    The 1 is a logit of 0 that both kinds are compared with. The coefficient of a score is at most
    ``1 / tau``, falls as a response comes to the side of its label, and those of a kind add up to
    less than ``1 / tau``; for the old policy they are ``1 / tau / (1 + n)``, of n responses of the
    kind. A group without both kinds has L = 0 and counts in the mean.

    A response is right if its advantage is above 0 and wrong if it is below; at 0, or without
    tokens, it is neither. :func:`jaxrl_llm.advantages.dr_grpo` of a 0-1 reward gives such
    advantages. Under ``aggregate.group_mean`` the loss is the mean of L over the groups.

    Args:
      logp, old_logp, mask: See the package; here ``[..., G, T]``.
      advantages: ``[..., G]``, one value per sequence, of which the sign counts.
      tau: Temperature, above 0, in nats per token.

    Returns:
      Token loss ``[..., G, T]``, float32, 0 where masked.

    Raises:
      ValueError: If shapes differ, there are advantages per token, or ``tau`` is not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.full((3, 2), -1.0), jnp.ones((3, 2), bool)
      >>> loss = jr.surrogates.real(logp, None, jnp.array([1.0, -0.5, -0.5]), mask)
      >>> [f"{x:.4f}" for x in loss[:, 0]]  # log(1 + 1) + log(1 + 2)
      ['1.7918', '1.7918', '1.7918']

    References:
      Zhai et al., Rewards as Labels (arXiv:2602.05630), as the released code computes it. There a
      reward of 1 is right, one of 0 wrong, and any other neither. s is clamped to +-20, which they
      do not do. Their variants with a product of the sums and with a binary cross-entropy are not
      here. In ms-swift's ``loss_type=real`` a reward equal to the mean of its group is wrong, and a
      response without tokens has s = 0.
    """
    checks.check_min_rank("real", 2, logp=logp)
    hint = " It depends on whether a response is right, not a token."
    _inputs.check_sequence_advantages("real", logp, advantages, hint)
    checks.check_positive("real", tau=tau)
    x = _inputs.prepare("real", logp, old_logp, advantages, mask)
    lengths = masking.lengths(mask)
    score = masking.row_sum(x.log_ratio) / jnp.maximum(lengths, 1.0)
    score = jnp.clip(score, -masking.LOG_RATIO_CLAMP, masking.LOG_RATIO_CLAMP) / tau
    sides = jax.lax.stop_gradient(masking.zero_masked(advantages, lengths > 0))
    right, wrong = sides > 0, sides < 0
    both = jnp.any(right, axis=-1) & jnp.any(wrong, axis=-1)
    loss = jnp.where(both, _against_zero(-score, right) + _against_zero(score, wrong), 0.0)
    # A NaN advantage has no side and must reach the loss.
    loss = jnp.where(jnp.any(jnp.isnan(sides), axis=-1), jnp.nan, loss)
    return x.finish(jnp.broadcast_to(loss[..., None, None], jnp.shape(mask)))


def _against_zero(logits: Array, where: Array) -> Array:
    """``log(1 + sum of exp(logits))`` over the last axis, of the entries of ``where``."""
    logits = jnp.where(where, logits, -jnp.inf)
    anchor = jnp.zeros_like(logits[..., :1])
    return jax.nn.logsumexp(jnp.concatenate([logits, anchor], axis=-1), axis=-1)
