"""Weights of tokens and of pairs in a loss of pairs.

One rule returns the log-probabilities that a loss takes, the other a factor of the loss. All raise
TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking


def desensitized_logp(logp: Array, mask: Array, other_lengths: Array, *, alpha: float) -> Array:
    """The log-probability of a response, with less weight on tokens past the other's length.

        sum of logp over the first min(l, other) tokens + alpha sum of logp over those behind them

    Apply it to policy and reference and to both responses of a pair, so that a long response does
    not win by its length. With ``alpha=1`` it is the sum.

    Args:
      logp: ``[..., T]``, floating point, log-probabilities (nats) of the tokens of a response.
      mask: bool ``[..., T]``, True for tokens that count; l is their number.
      other_lengths: ``[...]``, numbers, tokens of the other response of the pair.
      alpha: Weight of the tokens past the length of the other response, in [0, 1].

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([[-1.0, -2.0, -4.0]]), jnp.ones((1, 3), bool)
      >>> jr.preferences.desensitized_logp(logp, mask, jnp.array([2]), alpha=0.5).tolist()
      [-5.0]

    References:
      Liu et al., LD-DPO (arXiv:2409.06411); TRL's ``ld_alpha``.
    """
    function = "desensitized_logp"
    masking.check_tokens(function, mask, logp=logp)
    checks.check_shape(function, "other_lengths", other_lengths, jnp.shape(logp)[:-1])
    checks.check_share(function, alpha=alpha)
    place = jnp.cumsum(mask, axis=-1)
    factor = jnp.where(place <= jnp.asarray(other_lengths)[..., None], 1.0, alpha)
    return jnp.sum(factor * masking.zero_masked(logp, mask), axis=-1)


def alignment_weights(logp: Array, sum_pi_sq: Array, mask: Array) -> Array:
    """How likely a response is under the policy, relative to the policy's own samples.

        w = exp(mean over tokens of (logp - log sum_pi_sq))

    The weight of a pair is the product of the weights of its responses, so that pairs sampled by
    another policy are weighted as if this policy had sampled them. ``sum_pi_sq`` is the expected
    probability of a token that the policy samples, so its own samples have weights
    near 1 where it is nearly certain.

    Args:
      logp: ``[..., T]``, floating point, log-probabilities (nats) of the tokens under the policy.
      sum_pi_sq: ``[..., T]``, floating point, sum of squared probabilities over the vocabulary at
        each position: :func:`jaxrl_llm.advantages.sum_pi_squared`.
      mask: bool ``[..., T]``, True for tokens that count.

    Returns:
      ``[...]`` float32, without a gradient; 1 for a response without a token.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, half = jnp.log(jnp.array([[0.5, 0.25]])), jnp.array([[0.5, 0.5]])
      >>> jr.preferences.alignment_weights(logp, half, jnp.ones((1, 2), bool)).round(4).tolist()
      [0.707...]

    References:
      Zhou et al., WPO (arXiv:2406.11827), equation 2 with the sampled alignment; TRL's
      ``use_weighting``. The authors' code limits the product to 1: ``max_alignment`` of
      :func:`paired`.
    """
    masking.check_tokens("alignment_weights", mask, logp=logp, sum_pi_sq=sum_pi_sq)
    total = jnp.log(jnp.where(mask, jnp.asarray(sum_pi_sq, jnp.float32), 1.0))
    mean = masking.masked_mean(masking.zero_masked(logp, mask) - total, mask, axis=-1)
    return jax.lax.stop_gradient(jnp.exp(mean))
