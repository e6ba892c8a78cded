"""Estimates of a response's log-likelihood, one value per token, which replace ``logp``.

The log-likelihood of a masked-diffusion model is a sum over all orders of unmasking. One forward
returns ``logp``, the log-probability of each masked token given the visible tokens. The sum of an
estimate over the tokens of a response estimates the log-likelihood of the response. Any surrogate,
regularizer or weighting therefore takes ``[..., T]`` as it takes the log-probabilities of an
autoregressive model, with ``valid`` as its mask: ``surrogates.gspo`` has the ratio
``exp((elbo - old elbo) / L)``, and ``surrogates.ppo_clip`` one ratio per token.

Raises: see :mod:`jaxrl_llm.diffusion`, TypeError and ValueError.
"""

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.diffusion import _inputs


def elbo(logp: Array, masked: Array, t: Array, *, weights: Array | None = None) -> Array:
    """The evidence lower bound, token by token.

        elbo[i] = sum_j weights[j] 1[masked_j[i]] logp_j[i] / t_j          (weights 1 / J)

    In expectation its sum is at most the log-likelihood: it equals the mean over all orders of the
    log-probability under that order. A single draw that masks everything at level 1 gives
    :func:`mean_field`.

    ===============  ==========================================  =================================
    form             masks                                       t, weights
    ===============  ==========================================  =================================
    LLaDA            `mask_tokens` at `noise_levels`             the levels
    exact counts     `mask_exact` of `mask_counts`               `count_levels`
    ESPO             `complementary` of counts from 0            `count_levels` with ``least=0``
    GDPO             `mask_tokens` at `quadrature_levels`        both of `quadrature_levels`
    ===============  ==========================================  =================================

    Args:
      logp, masked, t, weights: See the package.

    Returns:
      ``[..., T]`` float32; 0 for tokens that no draw masks.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.array([[-0.5, -1.0, -2.0, -0.25]])
      >>> masked = jnp.array([[True, False, True, True]])
      >>> jr.diffusion.elbo(logp, masked, jnp.array([0.5])).tolist()
      [-1.0, 0.0, -4.0, -0.5]

    References:
      Nie et al., LLaDA (arXiv:2502.09992); Zhu et al., VRPO (arXiv:2505.19223); Rojas et al., GDPO
      (arXiv:2510.08554); Ou et al., ESPO (arXiv:2512.03759), which counts the padding of a response
      of fixed length: pass a ``valid`` of all True for that.
    """
    scaled = _scaled("elbo", logp, masked, t)
    return jnp.sum(_inputs.draw_weights("elbo", weights, jnp.shape(logp)) * scaled, axis=0)


def elbo_terms(logp: Array, masked: Array, t: Array) -> Array:
    """The evidence lower bound of each response from each single draw, for :func:`bgpo_terms`.

        l_j = sum_i 1[masked_j[i]] logp_j[i] / t_j

    Args:
      logp, masked, t: See the package.

    Returns:
      ``[J, ...]`` float32; 0 where nothing is masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.array([[-0.5, -1.0], [-0.5, -1.5]])
      >>> masked = jnp.array([[True, False], [True, True]])
      >>> jr.diffusion.elbo_terms(logp, masked, jnp.array([0.5, 1.0])).tolist()
      [-1.0, -2.0]

    References:
      Nie et al., LLaDA (arXiv:2502.09992); Lin et al., BGPO (arXiv:2510.11683).
    """
    return masking.row_sum(_scaled("elbo_terms", logp, masked, t))


def mean_field(logp: Array, valid: Array) -> Array:
    """One-step log-probabilities: all tokens of the response are masked at once.

        mean_field[i] = mean_j logp_j[i]

    It is the product of the marginals, which is neither an upper nor a lower bound. It is exact if
    the tokens are independent. Several draws differ in the prompt tokens that they mask, see
    :func:`diffu_mask`.

    Args:
      logp: See the package; the response is masked completely in every draw.
      valid: See the package.

    Returns:
      ``[..., T]`` float32; 0 where not valid.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> valid = jnp.array([True, True, False])
      >>> jr.diffusion.mean_field(jnp.array([[-1.0, -2.0, jnp.nan]]), valid).tolist()
      [-1.0, -2.0, 0.0]

    References:
      Zhao et al., d1 (arXiv:2504.12216), diffu-GRPO.
    """
    function = "mean_field"
    _inputs.check_token_mask(function, "valid", valid)
    checks.check_float(function, logp=logp)
    checks.check_min_rank(function, 2, logp=logp)
    checks.check_shape(function, "logp", logp, (jnp.shape(logp)[0], *jnp.shape(valid)))
    return jnp.mean(masking.zero_masked(logp, valid), axis=0)


def coupled(full_logp: Array, logp: Array, masked: Array, t: Array, valid: Array) -> Array:
    """One forward with all tokens masked, and pairs of forwards with complementary masks.

        coupled[i] = (full[i] + sum_j 1[masked_j[i]] logp_j[i] / t_j) / (J / 2 + 1)

    Each pair covers every token. The weights follow the released code: for J draws they add up to
    ``(J + 1) / (J / 2 + 1)`` in expectation, 1.5 for one pair, so ratios are sharper than those of
    a log-likelihood.

    Args:
      full_logp: ``[..., T]``, floating point: ``logp`` with the complete response masked.
      logp, valid: See the package; J is even.
      masked: See the package; :func:`complementary`.
      t: See the package; ``concatenate([t, 1 - t])``.

    Returns:
      ``[..., T]`` float32; 0 where not valid.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> valid, masked = jnp.ones(2, bool), jnp.array([[True, False], [False, True]])
      >>> logp = jnp.array([[-1.0, 0.0], [0.0, -2.0]])
      >>> jr.diffusion.coupled(
      ...     jnp.array([-3.0, -4.0]), logp, masked, jnp.array([0.5, 0.5]), valid).tolist()
      [-2.5, -4.0]

    References:
      Gong et al., DiffuCoder's coupled-GRPO (arXiv:2506.20639), whose released code uses one pair
      and t uniform in [0.2, 0.8].
    """
    function = "coupled"
    _inputs.check_token_mask(function, "valid", valid)
    scaled = _scaled(function, logp, masked, t)
    if jnp.shape(logp)[0] % 2:
        raise ValueError(f"{function}: logp must have pairs of draws; got {jnp.shape(logp)}.")
    checks.check_float(function, full_logp=full_logp)
    checks.check_same_shape(function, full_logp=full_logp, valid=valid)
    checks.check_shape(function, "logp", logp, (jnp.shape(logp)[0], *jnp.shape(valid)))
    total = masking.zero_masked(full_logp, valid) + jnp.sum(scaled, axis=0)
    return masking.zero_masked(total / (jnp.shape(logp)[0] / 2 + 1), valid)


def _scaled(function: str, logp: Array, masked: Array, t: Array) -> Array:
    """``1[masked] logp / t`` in float32; levels of draws that mask nothing are ignored."""
    _inputs.check_draws(function, logp, masked)
    t = _inputs.of_draws(function, "t", t, jnp.shape(logp))
    return masking.zero_masked(logp, masked) / jnp.where(masked, t, 1.0)
