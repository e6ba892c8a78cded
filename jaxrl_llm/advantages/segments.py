"""Credit of segments of a response from the values of their prefixes.

A segment is a line, a run of tokens or a turn; its prefix is the text before it. The collector
:func:`jaxrl_llm.curation.valued` samples continuations of each prefix; their mean reward is the
prefix's value.

- ``rewards``: floating point ``[..., G]``, one per rollout.
- ``prefix_values``: floating point ``[..., G, K]``, the value of each segment's prefix.
- ``segment_where``: bool ``[..., G, K]``, True for segments that exist.
- Results are float32. :func:`turns_to_tokens` spreads them, with ``segment_ids`` for turns.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import jax.numpy as jnp

from jaxrl_llm.advantages.batch import whiten
from jaxrl_llm.advantages.returns import gae, terminal_rewards
from jaxrl_llm.core import Array, checks, masking, traits

__all__ = ["best_of_value", "pav", "segment_advantages", "whiten_uncertain"]


def segment_advantages(rewards: Array, prefix_values: Array, segment_where: Array) -> Array:
    """The change in value over each segment.

        A_k = V_(k+1) - V_k;   for the last segment r - V_k

    The advantages of a rollout add up to its reward minus the value before the first segment. It is
    :func:`gae` over segments with ``lam=0``.

    Args:
      rewards, prefix_values, segment_where: See the module.

    Returns:
      Advantages ``[..., G, K]``, in units of reward.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values = jnp.array([[0.5, 0.25, 0.75]])
      >>> jr.advantages.segment_advantages(
      ...     jnp.array([1.0]), values, jnp.ones((1, 3), bool)).tolist()
      [[-0.25, 0.5, 0.25]]

    References:
      VinePPO (arXiv:2410.01679) and SPO-chain (arXiv:2505.23564), as in their released code.
    """
    placed = terminal_rewards(rewards, segment_where)
    return gae(placed, prefix_values, segment_where, gamma=1.0, lam=0.0)


def best_of_value(values: Array, *, k: int = 4) -> Array:
    """The success rate of the best of k attempts, from the success rate of one.

        1 - (1 - V)^k

    Args:
      values: ``[...]``, floating point, success rates in [0, 1].
      k: Number of attempts, at least 1.

    Returns:
      ``[...]`` float32, in [0, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.advantages.best_of_value(jnp.array([0.5, 0.75])).tolist()
      [0.9375, 0.99609375]

    References:
      Setlur et al., PAV (arXiv:2410.08146).
    """
    checks.check_float("best_of_value", values=values)
    checks.check_count("best_of_value", k=k)
    return 1.0 - (1.0 - jnp.asarray(values, jnp.float32)) ** k


@traits(reward_range=(0.0, 1.0))
def pav(
    rewards: Array,
    prefix_values: Array,
    segment_where: Array,
    *,
    k: int = 4,
    alpha: float = 5.0,
    baseline: bool = True,
) -> Array:
    """The change in the policy's value over a segment, plus the change in a prover's value.

        A_i = Q_i - V_i + alpha (mu_(i+1) - mu_i),   Q_i = V_(i+1), of the last segment r
        mu = 1 - (1 - V)^k,   the prover is the best of k rollouts of the policy

    A prover that always or never succeeds gives no progress. Progress is credited only to its
    segment; summed over later segments it would cancel.

    Args:
      rewards: See the module; in [0, 1].
      prefix_values, segment_where: See the module; values in [0, 1].
      k: Attempts of the prover, at least 1.
      alpha: Weight of the progress, not negative.
      baseline: Whether V is subtracted from Q.

    Returns:
      Advantages ``[..., G, K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> values, where = jnp.array([[0.5, 0.75]]), jnp.ones((1, 2), bool)
      >>> jr.advantages.pav(jnp.array([1.0]), values, where, alpha=1.0).tolist()
      [[0.30859375, 0.25390625]]

    References:
      Setlur et al., PAV (arXiv:2410.08146), ABSTRACT. The weight of 5, four attempts, Q without a
      baseline and no learned verifier follow the baseline of that name in the released code of
      SPO-chain (arXiv:2505.23564).
    """
    name = "pav"
    checks.check_non_negative(name, finite=True, alpha=alpha)
    checks.check_count(name, k=k)
    gained = segment_advantages(rewards, prefix_values, segment_where)
    values = masking.zero_masked(prefix_values, segment_where)
    provers = best_of_value(values, k=k)
    progress = segment_advantages(
        best_of_value(jnp.asarray(rewards, jnp.float32), k=k), provers, segment_where
    )
    return gained + alpha * progress + (0.0 if baseline else 1.0) * values


@traits(token_values=True)
def whiten_uncertain(advantages: Array, mask: Array, *, old_logp: Array, rho: float = 0.9) -> Array:
    """Advantages shifted and scaled over the uncertain tokens of the batch; 0 at the others.

        uncertain = exp(old_logp) < rho;   A' = (A - mean) / std over those

    If no token is uncertain, the statistics and the result are over all tokens.

    Args:
      advantages: ``[..., T]``, floating point.
      mask: bool ``[..., T]``.
      old_logp: ``[..., T]`` log-probabilities (nats) of the policy that sampled.
      rho: Probability from which a token counts as certain, above 0.

    Returns:
      Advantages ``[..., T]``, 0 where masked or certain.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old_logp = jnp.log(jnp.array([[0.5, 0.95, 0.5]]))
      >>> jr.advantages.whiten_uncertain(jnp.array([[1.0, 9.0, -1.0]]), jnp.ones((1, 3), bool),
      ...     old_logp=old_logp).round(3).tolist()
      [[0.70..., 0.0, -0.70...]]

    References:
      SPO-chain (arXiv:2505.23564), the released code.
    """
    name = "whiten_uncertain"
    masking.check_tokens(name, mask, advantages=advantages, old_logp=old_logp)
    checks.check_positive(name, rho=rho)
    uncertain = masking.unlikely(old_logp, mask, rho)
    uncertain = jnp.where(jnp.any(uncertain), uncertain, mask)
    return whiten(advantages, uncertain)
