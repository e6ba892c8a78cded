"""FIPO: PPO's clip where a token counts by what the policy does with the tokens after it.

The method is FIPO (arXiv:2603.19835).

- ``half_life``: Tokens after which a later token counts half, above 0.
- ``w_min``, ``w_max``: Smallest and largest weight, with 1 between them; 0 means no lower bound.
- ``dual_clip``: As in the package. A token beyond it, of either sign of the advantage, also counts
  as unchanged in the sums of the tokens before it. None for no such bound.
- ``safe_ratio``: A token of negative advantage whose ratio is above it has a weight between 0.8
  and 1; None for no such rule.

Other shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.surrogates`.
"""

import numbers

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.core.scans import recur_back
from jaxrl_llm.surrogates import _inputs

# Bounds of the weight of a token that the safe ratio holds back, in the released code.
_SAFE = (0.8, 1.0)


def fipo_weights(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    half_life: float = 32.0,
    w_min: float = 1.0,
    w_max: float = 1.2,
    dual_clip: float | None = 10.0,
    safe_ratio: float | None = 10.0,
) -> Array:
    """Weights of tokens by the change of the policy from there to the end of the response.

        d[t] = logp[t] - old_logp[t],   r[t] = exp(d[t]),   gamma = 2^(-1 / half_life)
        F[t] = sum_{u >= t} gamma^(u - t) d[u]             over u with r[u] <= dual_clip
        f[t] = clip(exp(F[t]), w_min, w_max)
        where A[t] < 0 and r[t] > safe_ratio:  f[t] = clip(f[t], 0.8, 1)

    A token counts more if the policy has come to prefer what followed it. Distances count unmasked
    tokens only. All weights are 1 as long as the policy is the old one.

    Args:
      logp, old_logp, mask: See the package.
      advantages: ``[..., T]``, or ``[...]`` for one value per sequence; only their sign matters.
      half_life, w_min, w_max, dual_clip, safe_ratio: See the module.

    Returns:
      Weights ``[..., T]``, float32, 0 where masked; no gradient flows through them.

    Raises:
      ValueError: If shapes differ or an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([0.0, 0.04, -0.02, 0.1]), jnp.ones(4, bool)
      >>> w = jr.surrogates.fipo_weights(logp, 0 * logp, jnp.ones(4), mask, half_life=1)
      >>> [f"{x:.3f}" for x in w]
      ['1.028', '1.057', '1.030', '1.105']

    References:
      FIPO (arXiv:2603.19835); the released code, which clamps each log ratio to +-20, as here, and
      in whose distances masked tokens count too.
    """
    x = _inputs.prepare("fipo_weights", logp, old_logp, advantages, mask)
    return _weights("fipo_weights", x, half_life, w_min, w_max, dual_clip, safe_ratio)


@traits(clip="ratio", reads_sequence=True)
def fipo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    half_life: float = 32.0,
    w_min: float = 1.0,
    w_max: float = 1.2,
    safe_ratio: float | None = 10.0,
    max_clipped: int | None = 1,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = 10.0,
    weight: Array | None = None,
) -> Array:
    """:func:`dapo_clip` with the advantages of tokens scaled by the weights of their future.

        f[t] = fipo_weights[t], a constant
        loss[t] = f[t] max(-A[t] r[t], -A[t] clip(r[t], 1 - eps_low, 1 + eps_high))
        dual clip, only where A[t] < 0:  loss[t] = min(loss[t], -f[t] A[t] dual_clip)
        loss[t] = 0 in a response where the dual clip bounds more than max_clipped tokens

    In the first update on a batch it is :func:`dapo_clip`.

    Args:
      logp, old_logp, advantages, mask, eps_low, eps_high, weight: See the package.
      half_life, w_min, w_max, dual_clip, safe_ratio: See the module. A ``safe_ratio`` that is not
        below ``dual_clip`` changes the value of the loss, but no gradient.
      max_clipped: Dual-clipped tokens of a response that still trains, 0 or more; None for any
        number.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Raises:
      ValueError: If shapes differ, an option is out of its range, or there is ``max_clipped``
        without ``dual_clip``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([0.0, 0.0, 0.1]), jnp.ones(3, bool)
      >>> loss = jr.surrogates.fipo(logp, 0 * logp, jnp.ones(3), mask, half_life=1)
      >>> [f"{x:.3f}" for x in loss]
      ['-1.025', '-1.051', '-1.221']

    References:
      FIPO (arXiv:2603.19835), with the settings of the released run with 32B parameters. The code's
      own ``safe_ratio`` is 4. It leaves the tokens of a response with more than one dual-clipped
      token out of the mean over tokens; here they count in it, with loss 0. ms-swift's
      ``loss_type=fipo`` has no such rule (``max_clipped=None``), ``safe_ratio=4``, and by default
      no dual clip and ``eps_high=0.2``.
    """
    name = "fipo"
    checks.check_non_negative(name, eps_low=eps_low, eps_high=eps_high)
    if max_clipped is not None:
        if dual_clip is None:
            raise ValueError(f"{name}: max_clipped has no effect without dual_clip.")
        checks.check_non_negative(name, max_clipped=max_clipped)
    x = _inputs.prepare(name, logp, old_logp, advantages, mask, weight)
    loss = _inputs.clipped_loss(x.ratio, x.advantages, eps_low, eps_high)
    loss = _inputs.dual_clipped(name, loss, x.advantages, dual_clip)
    loss = loss * _weights(name, x, half_life, w_min, w_max, dual_clip, safe_ratio)
    if max_clipped is not None:
        clipped = mask & (x.advantages < 0) & (x.ratio > dual_clip)
        loss = jnp.where(jnp.sum(clipped, -1, keepdims=True) > max_clipped, 0.0, loss)
    return x.finish(loss)


def _weights(
    function: str, x: _inputs.Inputs, half_life, w_min, w_max, dual_clip, safe_ratio
) -> Array:
    _check_options(function, half_life, w_min, w_max, dual_clip, safe_ratio)
    ratio, change = jax.lax.stop_gradient((x.ratio, x.log_ratio))
    change = jnp.clip(change, -masking.LOG_RATIO_CLAMP, masking.LOG_RATIO_CLAMP)
    if dual_clip is not None:
        change = jnp.where(ratio > dual_clip, 0.0, change)
    factors = jnp.where(x.mask, jnp.exp2(-1.0 / jnp.asarray(half_life, jnp.float32)), 1.0)
    weights = jnp.clip(jnp.exp(recur_back(factors, change)), w_min, w_max)
    if safe_ratio is not None:
        held_back = (x.advantages < 0) & (ratio > safe_ratio)
        weights = jnp.where(held_back, jnp.clip(weights, *_SAFE), weights)
    return masking.zero_masked(weights, x.mask)


def _check_options(function: str, half_life, w_min, w_max, dual_clip, safe_ratio) -> None:
    checks.check_positive(function, half_life=half_life)
    checks.check_non_negative(function, w_min=w_min)
    checks.check_positive(function, finite=True, w_max=w_max)
    numeric = isinstance(w_min, numbers.Real) and isinstance(w_max, numbers.Real)
    if numeric and not float(w_min) <= 1 <= float(w_max):
        raise ValueError(
            f"{function}: w_min and w_max must have 1 between them, the weight of an unchanged "
            f"policy; got {w_min:g} and {w_max:g}."
        )
    for option, value in (("dual_clip", dual_clip), ("safe_ratio", safe_ratio)):
        if isinstance(value, numbers.Real) and not float(value) > 1:
            raise ValueError(
                f"{function}: {option} must be above 1, the ratio of an unchanged policy; "
                f"got {value:g}."
            )
