"""Clip-Cov and KL-Cov: tokens that reduce the entropy most, selected by covariance.

The selection depends on the full batch. A recipe computes it once, before the batch is divided,
with one of the ``*_selection`` functions, as the computed entry ``selected``: before the first
update the policy being trained is the old policy. With ``selected=None`` a surrogate selects among
the tokens of its arguments, which may be a microbatch, so a Recipe requires a selection.

The method is of Cui et al., The Entropy Mechanism of RL (arXiv:2505.22617). ``ratio`` is the share
of the unmasked tokens to select, above 0. Shared arguments, TypeError and ValueError: see
:mod:`jaxrl_llm.surrogates`.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.surrogates import _inputs

# Defaults of the selections, and of the losses that make one themselves.
RATIO, LOWER, UPPER = 2e-4, 1.0, 5.0


def token_covariance(advantages: Array, logp: Array, mask: Array) -> Array:
    """The contribution of each token to the covariance of advantage and log-probability.

        cov[t] = (A[t] - mean(A)) * (logp[t] - mean(logp))         means over all unmasked tokens

    Where it is large, a probable token has a high advantage (or an improbable one a low one), and
    the update makes the distribution sharper.

    Args:
      advantages, logp, mask: See the package.

    Returns:
      ``[..., T]`` float32, a constant; 0 where masked. A sharded batch needs communication.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> advantages, logp = jnp.array([1.0, 1.0, -1.0, -1.0]), jnp.array([-0.1, -3.0, -0.1, -3.0])
      >>> jr.surrogates.token_covariance(advantages, logp, jnp.ones(4, bool)).round(2).tolist()
      [1.4..., -1.4..., -1.4..., 1.4...]

    References:
      Cui et al. (arXiv:2505.22617).
    """
    return covariance_of("token_covariance", advantages, logp, mask)


def clip_cov_selection(
    advantages: Array,
    old_logp: Array,
    mask: Array,
    key: Array,
    *,
    ratio: float = RATIO,
    lower: float = LOWER,
    upper: float = UPPER,
    exclude: Array | None = None,
) -> Array:
    """Tokens that :func:`clip_cov` drops: some of those whose covariance is high.

        candidates: unmasked tokens with lower < cov[t] < upper      (:func:`token_covariance`)
        selected: max(floor(ratio * unmasked tokens), 1) of them at random, or all if fewer

    In a recipe it is ``Computed("selected", clip_cov_selection, "batch")``; before the first update
    no ratio is clipped.

    Args:
      advantages, mask: See the package.
      old_logp: See the package.
      ratio: See the module.
      key: Typed PRNG key; any other key raises TypeError.
      lower: Candidates have a covariance above this, not above ``upper``.
      upper: Candidates have a covariance below this.
      exclude: bool ``[..., T]``, tokens that are not candidates, such as those whose ratio is
        already clipped; None for none.

    Returns:
      bool ``[..., T]``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> advantages, logp = jnp.array([1.0, 1.0, -1.0, -1.0]), jnp.array([-0.1, -3.0, -0.1, -3.0])
      >>> mask, key = jnp.ones(4, bool), jax.random.key(0)
      >>> jr.surrogates.clip_cov_selection(advantages, logp, mask, key, ratio=0.5).tolist()
      [True, False, False, True]

    References:
      Cui et al. (arXiv:2505.22617).
    """
    covariance = covariance_of("clip_cov_selection", advantages, old_logp, mask, "old_logp")
    checks.check_bool("clip_cov_selection", exclude=exclude)
    checks.check_same_shape("clip_cov_selection", mask=mask, exclude=exclude)
    return pick("clip_cov_selection", covariance, mask, exclude, key, (ratio, lower, upper))


def kl_cov_selection(
    advantages: Array, old_logp: Array, mask: Array, *, ratio: float = RATIO
) -> Array:
    """Tokens that :func:`kl_cov` penalizes: those of the highest covariance.

        selected: the max(floor(ratio * unmasked tokens), 1) unmasked tokens with the largest cov[t]

    In a recipe it is ``Computed("selected", kl_cov_selection, "batch")``.

    Args:
      advantages, mask: See the package.
      old_logp: See the package.
      ratio: See the module.

    Returns:
      bool ``[..., T]``. Among equal covariances, earlier tokens are selected first.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> advantages, logp = jnp.array([1.0, 1.0, -1.0, -1.0]), jnp.array([-0.5, -3.0, -0.5, -4.0])
      >>> jr.surrogates.kl_cov_selection(advantages, logp, jnp.ones(4, bool), ratio=0.25).tolist()
      [False, False, False, True]

    References:
      Cui et al. (arXiv:2505.22617).
    """
    checks.check_positive("kl_cov_selection", ratio=ratio)
    covariance = covariance_of("kl_cov_selection", advantages, old_logp, mask, "old_logp")
    return highest(covariance, mask, count(ratio, mask))


def covariance_of(function: str, advantages, logp, mask, name: str = "logp") -> Array:
    """:func:`token_covariance` with errors that name the caller and its argument ``name``."""
    masking.check_tokens(function, mask, **{name: logp})
    pair = masking.spread(function, "advantages", advantages, mask), masking.zero_masked(logp, mask)
    a, x = (v - masking.masked_mean(v, mask) for v in pair)
    return masking.zero_masked(jax.lax.stop_gradient(a * x), mask)


def count(ratio, mask: Array) -> Array:
    """The number of tokens that ``ratio`` selects, at least 1."""
    # 5000 tokens at 2e-4 are one token, though the float32 product may fall short of 1.
    share = ratio * jnp.sum(mask, dtype=jnp.int32) * (1.0 + 1e-6)
    return jnp.maximum(jnp.floor(share), 1.0).astype(jnp.int32)


def pick(function: str, covariance: Array, mask: Array, exclude, key: Array, options) -> Array:
    """A random choice of the tokens between the bounds."""
    ratio, lower, upper = options
    checks.check_positive(function, ratio=ratio)
    _inputs.check_order(function, lower=lower, upper=upper)
    if not jnp.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key):
        raise TypeError(f"{function}: key must be a typed PRNG key, of jax.random.key.")
    candidates = mask & (covariance > lower) & (covariance < upper)
    candidates = candidates if exclude is None else candidates & ~exclude
    # A key a position, so that padding behind a sequence changes no draw.
    keys = jax.vmap(lambda t: jax.random.fold_in(key, t))(jnp.arange(mask.shape[-1]))
    draws = jax.vmap(lambda k: jax.random.uniform(k, mask.shape[:-1]), out_axes=-1)(keys)
    return highest(draws, candidates, count(ratio, mask))


def highest(score: Array, candidates: Array, count: Array) -> Array:
    """The ``count`` candidates of the highest score; ``count`` may be traced."""
    order = jnp.argsort(jnp.where(candidates, score, -jnp.inf), axis=None, descending=True)
    first = jnp.arange(order.size) < count
    chosen = jnp.zeros(order.size, bool).at[order].set(first, unique_indices=True)
    return chosen.reshape(candidates.shape) & candidates


@traits(policy_gradient=False, clip="ratio")
def clip_cov(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    selected: Array | None,
    key: Array | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    ratio: float | None = None,
    lower: float | None = None,
    upper: float | None = None,
) -> Array:
    """PPO's clip without a few tokens whose covariance of advantage and log-probability is high.

        loss[t] = 0 if selected[t] else max(-A[t] r[t], -A[t] clip(r[t], 1 - eps_low, 1 + eps_high))

    A selected token has no gradient but still counts in the denominator. If no token is selected it
    is :func:`ppo_clip`. With ``selected=None``, :func:`clip_cov_selection` chooses, excluding
    tokens whose ratio is clipped.

    Args:
      logp, old_logp, advantages, mask, eps_low, eps_high: See the package.
      selected: bool ``[..., T]``, the tokens to drop; None to choose here.
      key: Typed PRNG key for the choice; required with ``selected=None``, else TypeError. This and
        the three options below are only for ``selected=None``.
      ratio: See the module; None means 2e-4.
      lower: Candidates have a covariance above this. None means 1.
      upper: Candidates have a covariance below this. None means 5.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.array([1.5, 1.5])), jnp.ones(2, bool)
      >>> selected = jnp.array([True, False])
      >>> jr.surrogates.clip_cov(logp, jnp.zeros(2), jnp.ones(2), mask, selected=selected)
      Array([ 0. , -1.2], dtype=float32)

    References:
      Cui et al. (arXiv:2505.22617). As in verl, except that verl's loss chooses in each microbatch.
    """
    checks.check_non_negative("clip_cov", eps_low=eps_low, eps_high=eps_high)
    x = _inputs.prepare("clip_cov", logp, old_logp, advantages, mask)
    loss = _inputs.clipped_loss(x.ratio, x.advantages, eps_low, eps_high)
    if selected is None:
        if key is None:
            raise TypeError("clip_cov: without selected it takes a key to choose tokens by.")
        chosen = (_or(ratio, RATIO), _or(lower, LOWER), _or(upper, UPPER))
        cov = covariance_of("clip_cov", advantages, logp, mask)
        selected = pick("clip_cov", cov, mask, loss > -x.advantages * x.ratio, key, chosen)
    else:
        _check_selected("clip_cov", selected, mask, key=key, ratio=ratio, lower=lower, upper=upper)
    return masking.zero_masked(x.finish(loss), ~selected)


@traits(policy_gradient=False, needs_updates=True)
def kl_cov(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    selected: Array | None,
    coef: float = 1.0,
    ratio: float | None = None,
) -> Array:
    """The unclipped ratio objective, with a penalty on tokens of high covariance.

        loss[t] = -A[t] r[t] + selected[t] coef |logp[t] - old_logp[t]|

    There is no clip: only the penalty keeps the selected tokens near the old policy. Where the two
    policies agree exactly its gradient is 0; a difference by rounding already has the full
    gradient, of either sign.

    Args:
      logp, old_logp, advantages, mask: See the package.
      selected: bool ``[..., T]``, the tokens to penalize; None for :func:`kl_cov_selection` here.
      coef: Penalty per nat of difference, in units of the policy loss, not negative.
      ratio: See the module; None means 2e-4. Only for ``selected=None``.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([-1.0, -1.0]), jnp.ones(2, bool)
      >>> jr.surrogates.kl_cov(
      ...     logp, logp + 0.5, jnp.zeros(2), mask, selected=jnp.array([True, False])).tolist()
      [0.5, 0.0]

    References:
      Cui et al. (arXiv:2505.22617). The default coefficient is that of verl's function; its
      configuration file has 0.1. Unlike there, the ratio is clamped to e^+-20.
    """
    checks.check_non_negative("kl_cov", coef=coef)
    x = _inputs.prepare("kl_cov", logp, old_logp, advantages, mask)
    if selected is None:
        ratio = _or(ratio, RATIO)
        checks.check_positive("kl_cov", ratio=ratio)
        cov = covariance_of("kl_cov", advantages, logp, mask)
        selected = highest(cov, mask, count(ratio, mask))
    else:
        _check_selected("kl_cov", selected, mask, ratio=ratio)
    pull = jnp.where(selected, masking.product(coef, masking.distance(x.log_ratio)), 0.0)
    return x.finish(-x.advantages * x.ratio + pull)


def _or(value, default):
    return default if value is None else value


def _check_selected(function: str, selected: Array, mask: Array, **unused) -> None:
    checks.check_bool(function, selected=selected)
    checks.check_same_shape(function, mask=mask, selected=selected)
    for name, value in unused.items():
        if value is not None:
            raise ValueError(f"{function}: {name} has no effect with selected; leave it out.")
