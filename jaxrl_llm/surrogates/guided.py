"""Losses for batches that also hold rollouts of a guide: a teacher's answers, or hinted ones.

- ``steered``: bool ``[...]`` or ``[..., T]``, True for the guide's sequences or tokens. For these
  the old policy is not read, and log-probabilities are conditioned on the plain prompt.
- ``gamma``: The likelihood at which the shaping is one half, above 0.

Other shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.surrogates`.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.surrogates import _inputs


def shaped_likelihood(logp: Array, *, gamma: float = 0.1) -> Array:
    """A shaped likelihood that emphasizes improbable tokens: f(x) = x / (x + gamma).

        f = exp(logp) / (exp(logp) + gamma),   df / dlogp = f (1 - f)

    The slope in logp is largest, 1/4, at x = gamma, where the slope of the likelihood itself is
    gamma. As gamma goes to 0, f tends to 1; as gamma grows, gamma * f tends to the likelihood.

    Args:
      logp: ``[...]`` log-probabilities (nats).
      gamma: See the module.

    Returns:
      ``[...]`` float32, between 0 and 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.surrogates.shaped_likelihood(jnp.log(jnp.array([0.01, 0.1, 0.9]))).round(4)
      Array([0.0909, 0.5   , 0.9   ], dtype=float32)

    References:
      Yan et al., LUFFY (arXiv:2504.14945); gamma 0.1 there, in AMPO and in ICPO.
    """
    checks.check_positive("shaped_likelihood", gamma=gamma)
    checks.check_float("shaped_likelihood", logp=logp)
    # x / (x + gamma) is the logistic function of log(x / gamma): no overflow, no division.
    return jax.nn.sigmoid(jnp.asarray(logp, jnp.float32) - jnp.log(jnp.float32(gamma)))


@traits(policy_gradient=False)
def luffy_shaping(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    steered: Array,
    gamma: float = 0.1,
    eps_low: float = float("inf"),
    eps_high: float = float("inf"),
    dual_clip: float | None = None,
) -> Array:
    """The ratio objective for the policy's rollouts, a shaped likelihood for a guide's.

        policy:   loss[t] = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)), dual clip as in PPO
        steered:  loss[t] = -A x / (x + gamma),   x = exp(logp[t])

    The probabilities of a guide's tokens under the guide are not available, so they have no ratio
    and no clip; the shaping (:func:`shaped_likelihood`) gives improbable tokens a larger gradient.
    The defaults are LUFFY's, without a clip; :func:`ampo` and :func:`icpo` clip.

    Args:
      logp, old_logp, advantages, mask, eps_low, eps_high, dual_clip: See the package.
      steered, gamma: See the module.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.full((2, 1), 0.3)), jnp.ones((2, 1), bool)
      >>> loss = jr.surrogates.luffy_shaping(
      ...     logp, logp, jnp.ones(2), mask, steered=jnp.array([False, True]))
      >>> loss.ravel().round(4)  # -1, -0.3 / 0.4
      Array([-1.  , -0.75], dtype=float32)

    References:
      Yan et al., LUFFY (arXiv:2504.14945), whose scripts turn off the clip and the division by the
      group's deviation, and divide by a constant length.
    """
    x = _inputs.prepare("luffy_shaping", logp, old_logp, advantages, mask)
    shaped = _shaped("luffy_shaping", x, gamma)
    return _guided("luffy_shaping", x, steered, shaped, eps_low, eps_high, dual_clip)


@traits(policy_gradient=False)
def ampo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    steered: Array,
    gamma: float = 0.1,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = 10.0,
) -> Array:
    """:func:`luffy_shaping` with dual-clip PPO, for the answers of teachers.

    AMPO substitutes teachers' answers only where every rollout of a group fails.

    Args:
      logp, old_logp, advantages, mask, eps_low, eps_high, dual_clip: See the package.
      steered, gamma: See the module.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.full((2, 1), 0.1)), jnp.ones((2, 1), bool)
      >>> jr.surrogates.ampo(
      ...     logp, logp, jnp.ones(2), mask, steered=jnp.array([False, True])).ravel()
      Array([-1. , -0.5], dtype=float32)

    References:
      Yuan et al., AMPO (arXiv:2510.02227), and its released code: dual clip 10, advantages without
      a division by the deviation, token sums divided by a constant length.
    """
    x = _inputs.prepare("ampo", logp, old_logp, advantages, mask)
    shaped = _shaped("ampo", x, gamma)
    return _guided("ampo", x, steered, shaped, eps_low, eps_high, dual_clip)


@traits(policy_gradient=False)
def icpo(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    steered: Array,
    gamma: float = 0.1,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Array:
    """:func:`luffy_shaping` with dual-clip PPO, for rollouts written after a demonstration.

    The steered rollouts come from the policy itself, but they are scored and trained without the
    demonstration. Gamma is the paper's lambda.

    Args:
      logp, old_logp, advantages, mask, eps_low, eps_high, dual_clip: See the package.
      steered, gamma: See the module.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.full((2, 1), 0.1)), jnp.ones((2, 1), bool)
      >>> jr.surrogates.icpo(
      ...     logp, logp, jnp.ones(2), mask, steered=jnp.array([False, True])).ravel()
      Array([-1. , -0.5], dtype=float32)

    References:
      In-context steered policy optimization (arXiv:2510.26519) and its released code, which has a
      dual clip of 3 and no clip for steered tokens; the paper has such a clip, and a note on it has
      0.01 for gamma.
    """
    x = _inputs.prepare("icpo", logp, old_logp, advantages, mask)
    shaped = _shaped("icpo", x, gamma)
    return _guided("icpo", x, steered, shaped, eps_low, eps_high, dual_clip)


@traits(policy_gradient=False, supervised=True)
def chord(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    steered: Array,
    phi: bool = True,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
) -> Array:
    """PPO's clip for the policy's rollouts, fine-tuning on an expert's.

        policy:   loss[t] = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)), dual clip as in PPO
        steered:  loss[t] = -phi[t] logp[t]
        phi[t] = stop_gradient(p (1 - p)), p = exp(logp[t]);   1 without ``phi``

    The expert's tokens have no advantage. With phi neither those that the policy already writes
    move it nor those that it would never write, which would disrupt it. Weigh the two losses with
    :func:`jaxrl_llm.aggregate.guided_token_mean`.

    Args:
      logp, old_logp, advantages, mask, eps_low, eps_high, dual_clip: See the package.
      steered: See the module.
      phi: Whether the expert's tokens are weighed; see above.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.full((2, 1), 0.5)), jnp.ones((2, 1), bool)
      >>> steered, advantages = jnp.array([False, True]), jnp.array([2.0, 0.0])
      >>> loss = lambda x: jr.surrogates.chord(x, logp, advantages, mask, steered=steered).sum()
      >>> jax.grad(loss)(logp).round(3).tolist()
      [[-2.0], [-0.25]]

    References:
      Zhang et al., CHORD (arXiv:2508.11408), as Trinity-RFT's ``mix_chord`` computes it, which has
      a dual clip of 3. The loss was compared with it at ``dual_clip=3``; no code confirmed it
      without one, the default here.
    """
    x = _inputs.prepare("chord", logp, old_logp, advantages, mask)
    weight = jnp.ones_like(x.logp)
    if phi:
        p = jax.lax.stop_gradient(jnp.exp(x.logp))
        weight = p * (1.0 - p)
    imitated = masking.product(-weight, x.logp)
    return _guided("chord", x, steered, imitated, eps_low, eps_high, dual_clip)


def _shaped(function: str, x: _inputs.Inputs, gamma: float) -> Array:
    """The token loss of a guide's tokens with the shaped likelihood."""
    checks.check_positive(function, gamma=gamma)
    return -x.advantages * shaped_likelihood(x.logp, gamma=gamma)


def _guided(
    function: str, x: _inputs.Inputs, steered: Array, loss: Array, eps_low, eps_high, dual_clip
) -> Array:
    """``ppo_clip`` where not steered, the guide's loss where steered."""
    checks.check_non_negative(function, eps_low=eps_low, eps_high=eps_high)
    checks.check_bool(function, steered=steered)
    shape = jnp.shape(x.mask)
    if jnp.shape(steered) not in (shape, shape[:-1]):
        raise ValueError(
            f"{function}: steered must have the shape of mask {shape} or of its sequences "
            f"{shape[:-1]}; got {jnp.shape(steered)}."
        )
    steered = steered if jnp.shape(steered) == shape else steered[..., None]
    # Replaced before the exponential: old_logp may hold anything for tokens of a guide.
    unguided = x._replace(log_ratio=masking.zero_masked(x.log_ratio, ~steered))
    clipped = _inputs.clipped_loss(unguided.ratio, x.advantages, eps_low, eps_high)
    clipped = _inputs.dual_clipped(function, clipped, x.advantages, dual_clip)
    return x.finish(jnp.where(steered, loss, clipped))
