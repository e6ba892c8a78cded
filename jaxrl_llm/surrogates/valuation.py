"""ROVER: regression to the value of the uniform policy in place of a policy gradient.

Shared arguments, TypeError and ValueError: see :mod:`jaxrl_llm.surrogates`.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits
from jaxrl_llm.surrogates import _inputs


def mean_log_probs(logits: Array, targets: Array | None = None) -> Array:
    """Mean log-probability over the vocabulary, the statistic of :func:`rover`.

        q = mean_v log softmax(logits)[v] = mean(logits) - logsumexp(logits)

    It is at most -log V, with equality for the uniform distribution. V excludes tokens that cannot
    be sampled.

    Args:
      logits, targets: See the package.

    Returns:
      ``[...]`` float32, in nats.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.surrogates.mean_log_probs(jnp.log(jnp.array([[0.5, 0.3, 0.2]]))).round(4)
      Array([-1.1689], dtype=float32)

    References:
      He et al., ROVER (arXiv:2509.24981), where it is the uniform policy's mean of Q.
    """
    checks.check_min_rank("mean_log_probs", 1, logits=logits)
    checks.check_float("mean_log_probs", logits=logits)
    logits = jnp.asarray(logits, jnp.float32)
    # Relative to the greatest logit: with an offset of 1e4 the difference would cancel to noise.
    below = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    possible = below > -jnp.inf
    below = jnp.where(possible, below, 0.0)
    total = jnp.sum(jnp.where(possible, jnp.exp(below), 0.0), axis=-1)
    count = jnp.sum(possible, axis=-1, dtype=jnp.float32)
    return jnp.sum(below, axis=-1) / count - jnp.log(total)


@traits(policy_gradient=False)
def rover(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    mean_log_probs: Array,
    old_mean_log_probs: Array | None,
    rho: float = 1.0,
    beta: float = 1.0,
) -> Array:
    """Squared error of the log-ratio, read as a Q-value, against a mean-Bellman target.

        Q[t] = rho (logp[t] - old_logp[t])
        q[t] = mean_log_probs[t] - old_mean_log_probs[t]
        loss[t] = (Q[t] - stop_gradient(A[t] + beta rho q[t+1]))^2,  q = 0 after the last token

    If the only reward comes at the end, the value of a uniformly random policy is enough to act
    optimally; the old policy times the softmax of Q is the language model itself. Where the policy
    has not changed, the gradient is 2 rho times that of :func:`reinforce`. Unlike a policy gradient
    it does not vanish where A is 0 and the policy has changed: the loss moves Q toward q.

    Args:
      logp, old_logp: See the package; the old policy is the one at the start of the step.
      advantages: ``[..., T]``, or ``[...]`` for one value per sequence: rewards minus their group
        mean (:func:`jaxrl_llm.advantages.dr_grpo`), as the reward of every token.
      mask: See the package. The continuation across a masked token is 0.
      mean_log_probs: ``[..., T]``, :func:`mean_log_probs` of the policy being trained before each
        token; the gradient stops at it.
      old_mean_log_probs: ``[..., T]``, the same of the old policy; None if ``old_logp`` is None,
        and only then.
      rho: Temperature of the Q-values, above 0.
      beta: Weight of the continuation, not negative; with 0 the target is only the reward.

    Returns:
      Token loss ``[..., T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp, logp = jnp.log(jnp.array([[0.5, 0.25], [0.55, 0.25]]))
      >>> q, old_q = jnp.array([-1.3, -1.4]), jnp.array([-1.2, -1.2])
      >>> loss = jr.surrogates.rover(
      ...     logp, old_logp, jnp.array(0.5), jnp.ones(2, bool),
      ...     mean_log_probs=q, old_mean_log_probs=old_q)
      >>> [round(x, 4) for x in loss.tolist()]  # (0.0953 - (0.5 - 0.2))^2, (0 - 0.5)^2
      [0.0419, 0.25]

    References:
      He et al., Random Policy Valuation is Enough (arXiv:2509.24981), paired with
      ``aggregate.token_mean``. The released countdown script centers the rewards; the one for
      mathematics uses GRPO's advantages. Its optional clip of the log-ratio is omitted.
    """
    checks.check_positive("rover", rho=rho)
    checks.check_non_negative("rover", beta=beta)
    x = _inputs.prepare("rover", logp, old_logp, advantages, mask)
    checks.check_float("rover", mean_log_probs=mean_log_probs)
    checks.check_float("rover", old_mean_log_probs=old_mean_log_probs)
    checks.check_same_shape(
        "rover", logp=logp, mean_log_probs=mean_log_probs, old_mean_log_probs=old_mean_log_probs
    )
    if old_mean_log_probs is None:
        if old_logp is not None:
            raise ValueError(
                "rover: old_logp needs old_mean_log_probs, the mean log-probability "
                "over the vocabulary under the same policy."
            )
        old_mean_log_probs = mean_log_probs
    gap = masking.zero_masked(mean_log_probs, mask) - masking.zero_masked(old_mean_log_probs, mask)
    later = jnp.concatenate([gap[..., 1:], jnp.zeros_like(gap[..., :1])], axis=-1)
    target = jax.lax.stop_gradient(x.advantages + beta * rho * later)
    return x.finish((rho * x.log_ratio - target) ** 2)
