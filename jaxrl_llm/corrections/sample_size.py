"""Effective number of weighted samples, and a step size that follows it.

Shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.corrections`.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.corrections import _inputs


def ess(weights: Array, *, where: Array | None = None) -> Array:
    """Effective number of samples of a weighted sample (Kish).

        (sum w)^2 / sum w^2

    Equal weights give the number of samples; one dominant weight gives 1. The squares do not
    overflow. For the effective share of samples from log-probabilities, see
    :func:`jaxrl_llm.diagnostics.effective_sample_size`.

    Args:
      weights: Any shape, floating point, not negative, one per sample.
      where: bool, of the same shape, True for samples to include. None for all.

    Returns:
      Number of samples, float32 scalar; 0 if everything is masked or all weights are 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> round(float(jr.corrections.ess(jnp.array([1.0, 2.0, 0.5, 4.0]))), 4)
      2.6471

    References:
      Kish, Survey Sampling (1965). VCPO (arXiv:2602.17616) adds 1e-8 to the divisor.
    """
    checks.check_float("ess", weights=weights)
    checks.check_bool("ess", where=where)
    checks.check_same_shape("ess", weights=weights, where=where)
    weights = masking.zero_masked(weights, where)
    greatest = jax.lax.stop_gradient(jnp.max(weights, initial=0.0))
    weights = weights / jnp.where(greatest > 0, greatest, 1.0)
    squares = jnp.sum(weights**2)
    return jnp.sum(weights) ** 2 / jnp.where(squares > 0, squares, 1.0)


def ess_lr_scale(
    advantages: Array,
    *,
    old_logp: Array,
    behavior_logp: Array,
    mask: Array,
    rho_base: float = 1.0,
    power: float = 0.5,
) -> Array:
    """A learning-rate factor that decreases when few sequences dominate the weights (VCPO).

        w = exp(clip(sum over the sequence of old_logp - behavior_logp, -20, 20))
        rho = (sum w)^2 / sum w^2 / number of non-empty sequences
        scale = min(1, rho / rho_base)^power

    Stale data gives a gradient of fewer effective samples, so the step is reduced as for a smaller
    batch. Use it as the ``computed`` entry ``update_scale`` of a Recipe, which multiplies the
    update.

    Args:
      advantages: Not read: the slot passes them first.
      mask, old_logp, behavior_logp: See the package; the old policy starts the update.
      rho_base: Share of effective samples at which the factor reaches 1, above 0.
      power: 0.5 for optimizers that normalize the gradient, such as AdamW; 1 for SGD; not negative.

    Returns:
      Factor in [0, 1], float32 scalar, without a gradient; 1 if everything is masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, mask = jnp.log(jnp.array([[1.0], [2.0], [0.5], [4.0]])), jnp.ones((4, 1), bool)
      >>> jr.corrections.ess_lr_scale(
      ...     None, old_logp=old_logp, behavior_logp=jnp.zeros((4, 1)), mask=mask).round(4).item()
      0.813...

    References:
      VCPO, Stable Asynchrony (arXiv:2602.17616), CODE reading.
    """
    del advantages
    checks.check_positive("ess_lr_scale", rho_base=rho_base)
    checks.check_non_negative("ess_lr_scale", power=power)
    log_ratio = _inputs.log_ratio("ess_lr_scale", old_logp, behavior_logp, mask)
    weight = jnp.exp(_inputs.clamped(masking.row_sum(log_ratio)))
    valid = jnp.any(mask, axis=-1)
    share = ess(weight, where=valid) / jnp.maximum(jnp.sum(valid, dtype=jnp.float32), 1.0)
    return jnp.where(jnp.any(valid), jnp.minimum(share / rho_base, 1.0) ** power, 1.0)
