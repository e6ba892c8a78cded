"""Tokens that the policy has mastered do not train, where it has become too certain: UloRL."""

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits


def mpt_mask(
    logp: Array,
    entropy: Array,
    mask: Array,
    rewards: Array,
    *,
    tau: float | Array = 0.99,
    sigma: float | Array = 0.2,
) -> Array:
    """Drops well-mastered tokens of right responses whose entropy is too low.

        drop[i, t] = rewards[i] > 0  and  exp(logp[i, t]) >= tau  and  H_i < sigma
        H_i        = mean entropy of the kept tokens of response i

    What is almost certain already is left alone before its entropy collapses. ``sigma=0`` drops
    nothing; an infinite one drops mastered tokens whatever the entropy.

    Args:
      logp: ``[..., T]`` log-probabilities (nats) under the policy.
      entropy: ``[..., T]`` entropy (nats) of the policy at each token.
      mask: bool ``[..., T]``, True = keep; what is masked is not read.
      rewards: ``[...]``, floating point, above 0 for a right response.
      tau: Probability from which a token is mastered, in (0, 1].
      sigma: Entropy below which a response is watched, in nats, not negative.

    Returns:
      Keep: bool ``[..., T]``, False where masked.

    Raises:
      TypeError: If ``mask`` is not bool or another array is not floating point.
      ValueError: If the shapes do not match or an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.array([0.995, 0.5, 0.999])), jnp.ones(3, bool)
      >>> jr.curation.mpt_mask(logp, jnp.full(3, 0.1), mask, jnp.array(1.0)).tolist()
      [False, True, False]

    References:
      UloRL (arXiv:2507.19766), PAPER reading; rewards are 0 and 1 there. Its equation of the
      entropy has no minus sign, which is taken for a slip.
    """
    function = "mpt_mask"
    checks.check_mask(function, mask)
    checks.check_min_rank(function, 1, mask=mask)
    checks.check_float(function, logp=logp, entropy=entropy, rewards=rewards)
    checks.check_same_shape(function, logp=logp, entropy=entropy, mask=mask)
    checks.check_shape(function, "rewards", rewards, jnp.shape(mask)[:-1])
    checks.check_share(function, tau=tau, zero=False)
    checks.check_non_negative(function, sigma=sigma)
    mastered = masking.zero_masked(logp, mask) >= jnp.log(jnp.asarray(tau, jnp.float32))
    certain = masking.masked_mean(entropy, mask, axis=-1) < sigma
    watched = certain & (jnp.asarray(rewards, jnp.float32) > 0)
    return mask & ~(mastered & watched[..., None])


@traits(token_values=True)
def mpt_advantages(
    advantages: Array,
    mask: Array,
    *,
    rewards: Array,
    old_logp: Array,
    old_entropy: Array,
    tau: float | Array = 0.99,
    sigma: float | Array = 0.2,
) -> Array:
    """:func:`mpt_mask` as the last of a chain of advantages, so that no denominator changes.

        A'[i, t] = A[i] where mpt_mask keeps the token, else 0

    A token without an advantage has no gradient and still counts in the mean. A ``selection`` would
    take it out of the mean as well, which is another method.

    Args:
      advantages: ``[..., G]`` spread over the tokens, or ``[..., G, T]``; floating point.
      mask: bool ``[..., G, T]``, True for the response tokens that are trained.
      rewards: ``[..., G]``, floating point, above 0 for a right response.
      old_logp: ``[..., G, T]`` log-probabilities (nats) under the policy the step starts from.
      old_entropy: ``[..., G, T]``, nats: its entropy.
      tau: Probability from which a token is mastered, in (0, 1].
      sigma: Entropy below which a response is watched, in nats, not negative.

    Returns:
      Advantages ``[..., G, T]``, float32, 0 where masked.

    Raises:
      TypeError: If ``mask`` is not bool or another array is not floating point.
      ValueError: If the shapes do not match or an option is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, logp = jnp.ones((1, 2), bool), jnp.log(jnp.array([[0.995, 0.5]]))
      >>> jr.curation.mpt_advantages(
      ...     jnp.array([2.0]), mask, rewards=jnp.array([1.0]), old_logp=logp,
      ...     old_entropy=jnp.full((1, 2), 0.1)).tolist()
      [[0.0, 2.0]]

    References:
      UloRL (arXiv:2507.19766), PAPER reading: its loss is divided by the number of all tokens. With
      one update a batch, as there, the old policy is the one being trained.
    """
    keep = mpt_mask(old_logp, old_entropy, mask, rewards, tau=tau, sigma=sigma)
    return masking.zero_masked(
        masking.spread("mpt_advantages", "advantages", advantages, mask), keep
    )
