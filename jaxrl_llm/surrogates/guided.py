"""Rollouts of a guide next to those of the policy: a teacher's answers, or hinted ones."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.surrogates import _inputs


def shaped_likelihood(logp: Array, *, gamma: float = 0.1) -> Array:
    """A likelihood that is raised most where it is low: f(x) = x / (x + gamma).

        f = exp(logp) / (exp(logp) + gamma),   df / dlogp = f (1 - f)

    The slope is greatest, 1/4, at x = gamma, where the likelihood itself has slope gamma. A small
    gamma makes f a constant 1; a large one makes gamma * f the likelihood.

    Args:
      logp: ``[...]`` log-probabilities (nats).
      gamma: The likelihood at which f is one half, above 0.

    Returns:
      ``[...]`` float32, between 0 and 1.

    Raises:
      ValueError: If ``gamma`` is not above 0.
      TypeError: If ``logp`` is not floating point.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> shaped = jr.surrogates.shaped_likelihood(jnp.log(jnp.array([0.01, 0.1, 0.9])))
      >>> [round(x, 4) for x in shaped.tolist()]
      [0.0909, 0.5, 0.9]

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
    """The ratio objective for the policy's rollouts, shaped likelihoods for a guide's.

        policy:   loss[t] = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)), dual clip as in PPO
        steered:  loss[t] = -A x / (x + gamma),   x = exp(logp[t])

    A guide's tokens have no usable probability under the policy that wrote them, so they have no
    ratio and no clip; the shaping gives their improbable tokens the greater gradient. The defaults
    are LUFFY's, without a clip; :func:`ampo` and :func:`icpo` clip.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained, of all rollouts
        after the plain prompt.
      old_logp: ``[..., T]`` under the proximal policy; None for the policy being trained. Not read
        where steered.
      advantages: ``[..., T]``, or ``[...]`` for one value a sequence.
      mask: bool ``[..., T]``, True = keep.
      steered: bool ``[...]`` or ``[..., T]``, True for the guide's sequences or tokens.
      gamma: As in :func:`shaped_likelihood`, above 0.
      eps_low: The ratio of the policy's tokens is clipped below at ``1 - eps_low``.
      eps_high: The ratio of the policy's tokens is clipped above at ``1 + eps_high``.
      dual_clip: As in :func:`ppo_clip`.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Raises:
      ValueError: If shapes differ or an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.full((2, 1), 0.3)), jnp.ones((2, 1), bool)
      >>> loss = jr.surrogates.luffy_shaping(
      ...     logp, logp, jnp.ones(2), mask, steered=jnp.array([False, True]))
      >>> loss.ravel().round(4)  # -1, -0.3 / 0.4
      Array([-1.  , -0.75], dtype=float32)

    References:
      Yan et al., LUFFY (arXiv:2504.14945), whose scripts switch the clip and the division by the
      group's deviation off and divide by a constant length.
    """
    name = "luffy_shaping"
    return _guided(
        name, logp, old_logp, advantages, mask, steered, gamma, eps_low, eps_high, dual_clip
    )


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
    """Dual-clip PPO for the policy's rollouts, shaped likelihoods for the answers of teachers.

        policy:   loss[t] = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)), dual clip as in PPO
        steered:  loss[t] = -A x / (x + gamma),   x = exp(logp[t])

    The loss of AMPO, which swaps teachers' answers in only where every rollout of a group fails;
    :func:`luffy_shaping` with other defaults.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained.
      old_logp: ``[..., T]`` under the proximal policy; None for the policy being trained. Not read
        where steered.
      advantages: ``[..., T]``, or ``[...]`` for one value a sequence.
      mask: bool ``[..., T]``, True = keep.
      steered: bool ``[...]`` or ``[..., T]``, True for the teachers' sequences or tokens.
      gamma: As in :func:`shaped_likelihood`, above 0.
      eps_low: The ratio of the policy's tokens is clipped below at ``1 - eps_low``.
      eps_high: The ratio of the policy's tokens is clipped above at ``1 + eps_high``.
      dual_clip: Greatest ratio that counts where the advantage is negative, above 1; None for none.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Raises:
      ValueError: If shapes differ or an option is out of its range.

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
    return _guided(
        "ampo", logp, old_logp, advantages, mask, steered, gamma, eps_low, eps_high, dual_clip
    )


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
    """PPO for the policy's rollouts, shaped likelihoods for those written after a demonstration.

        policy:   loss[t] = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)), dual clip as in PPO
        steered:  loss[t] = -A x / (x + gamma),   x = exp(logp[t])

    The steered rollouts come from the policy itself, but they are scored and trained without the
    demonstration; :func:`luffy_shaping` with other defaults.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy being trained, of all rollouts
        after the plain prompt.
      old_logp: ``[..., T]`` under the proximal policy; None for the policy being trained. Not read
        where steered.
      advantages: ``[..., T]``, or ``[...]`` for one value a sequence.
      mask: bool ``[..., T]``, True = keep.
      steered: bool ``[...]`` or ``[..., T]``, True for rollouts with a demonstration.
      gamma: As in :func:`shaped_likelihood`, above 0; lambda of the paper.
      eps_low: The ratio of the policy's tokens is clipped below at ``1 - eps_low``.
      eps_high: The ratio of the policy's tokens is clipped above at ``1 + eps_high``.
      dual_clip: Greatest ratio that counts where the advantage is negative, above 1; None for none.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Raises:
      ValueError: If shapes differ or an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.full((2, 1), 0.1)), jnp.ones((2, 1), bool)
      >>> jr.surrogates.icpo(
      ...     logp, logp, jnp.ones(2), mask, steered=jnp.array([False, True])).ravel()
      Array([-1. , -0.5], dtype=float32)

    References:
      In-context steered policy optimization (arXiv:2510.26519) and its released code, which has the
      dual clip of 3 and no clip for steered tokens; the paper prints one, and a note of it says
      0.01 for gamma.
    """
    return _guided(
        "icpo", logp, old_logp, advantages, mask, steered, gamma, eps_low, eps_high, dual_clip
    )


def _guided(
    function, logp, old_logp, advantages, mask, steered, gamma, eps_low, eps_high, dual_clip
) -> Array:
    """``ppo_clip`` where not steered, the shaped likelihood where steered."""
    checks.check_positive(function, gamma=gamma)
    checks.check_non_negative(function, eps_low=eps_low, eps_high=eps_high)
    x = _inputs.prepare(function, logp, old_logp, advantages, mask)
    checks.check_bool(function, steered=steered)
    shape = jnp.shape(mask)
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
    shaped = -x.advantages * shaped_likelihood(x.logp, gamma=gamma)
    return x.finish(jnp.where(steered, shaped, clipped))
