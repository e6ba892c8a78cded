"""Rewards of turns and tokens from an implicit process reward model, and advantages from them.

- ``turn_where``: bool ``[..., G, K]``, True for turns that happened; None for all.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all. Rollouts and turns
  that take no part count in no mean, get 0 and may hold anything.
- ``turn_ids``: integers ``[..., G, T]``, the turn of each token, from 0; below 0 for none.
- Results are float32.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group
from jaxrl_llm.advantages.returns import reward_to_go
from jaxrl_llm.advantages.turns import check_turns
from jaxrl_llm.core import Array, checks, masking, stats, traits

__all__ = ["implicit_turn_rewards", "oprl", "prime", "two_level"]


def implicit_turn_rewards(
    prm_logp: Array,
    old_logp: Array,
    mask: Array,
    *,
    turn_ids: Array,
    turns: int,
    beta: float = 0.05,
) -> Array:
    """The reward of each turn: the log-ratio of a process reward model to the policy.

        r_k = beta * sum over tokens t of turn k of (prm_logp - old_logp)

    Over all turns they add up to beta times the rollout's log-ratio. The gradient is stopped.

    Args:
      prm_logp: ``[..., T]``, floating point, log-probabilities (nats) under the reward model.
      old_logp: ``[..., T]``, under the policy that sampled, its reference.
      mask: bool ``[..., T]``, True for sampled tokens.
      turn_ids: See the module.
      turns: K.
      beta: Above 0.

    Returns:
      ``[..., K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> prm, old = jnp.array([-1.0, -2.0, -1.5]), jnp.array([-1.5, -2.5, -0.5])
      >>> mask, turn_ids = jnp.ones(3, bool), jnp.array([0, 0, 1])
      >>> jr.advantages.implicit_turn_rewards(
      ...     prm, old, mask, turn_ids=turn_ids, turns=2, beta=0.5).tolist()
      [0.5, -0.5]

    References:
      OPRL or iStar (arXiv:2509.19199), and its released code.
    """
    function = "implicit_turn_rewards"
    masking.check_tokens(function, mask, prm_logp=prm_logp, old_logp=old_logp)
    checks.check_integer(function, turn_ids=turn_ids)
    checks.check_same_shape(function, mask=mask, turn_ids=turn_ids)
    checks.check_count(function, turns=turns)
    checks.check_positive(function, finite=True, beta=beta)
    ratio = jax.lax.stop_gradient(masking.safe_log_ratio(prm_logp, old_logp, mask))
    at = (jnp.asarray(turn_ids)[..., None, :] == jnp.arange(turns)[:, None]) & mask[..., None, :]
    return beta * jnp.sum(jnp.where(at, ratio[..., None, :], 0.0), axis=-1)


def two_level(
    rewards: Array,
    *,
    turn_rewards: Array,
    turn_where: Array | None = None,
    where: Array | None = None,
    alpha: float = 1.0,
    base: Literal["rloo", "grpo", "center"] = "rloo",
) -> Array:
    """An advantage of the rollout plus one of the turn, each within the group.

        A[i, k] = base(R)_i + alpha base(r)[i, k]

    The statistics of the second term are over all turns of the group. With ``alpha=0`` the result
    is the base algorithm.

    Args:
      rewards: ``[..., G]``, floating point, one per rollout; each counts once, whatever its turns.
      turn_rewards: ``[..., G, K]``, floating point: those of :func:`implicit_turn_rewards`.
      turn_where, where: See the module.
      alpha: Weight of the turns, not negative.
      base: "rloo" for :func:`rloo`, "grpo" for :func:`grpo`, "center" for :func:`dr_grpo`.

    Returns:
      ``[..., G, K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> turns = jnp.array([[0.5, 0.0], [0.0, 0.0]])
      >>> jr.advantages.two_level(jnp.array([1.0, 0.0]), turn_rewards=turns, base="center").tolist()
      [[0.875, 0.375], [-0.625, -0.625]]

    References:
      OPRL or iStar (arXiv:2509.19199): "rloo" and alpha 1. The released code takes the mean over
      the first turn of each rollout, so its turn advantages are not centered; the paper and this
      function take it over all turns. A group of one gets 0 here, and its reward there.
    """
    function = "two_level"
    taken = check_turns(function, turn_rewards, turn_where, where, name="turn_rewards")
    checks.check_float(function, rewards=rewards)
    checks.check_shape(function, "rewards", rewards, jnp.shape(turn_rewards)[:-1])
    checks.check_option(function, "base", base, ("rloo", "grpo", "center"))
    checks.check_non_negative(function, finite=True, alpha=alpha)
    rule = {"rloo": group.rloo, "grpo": group.grpo, "center": group.dr_grpo}[base]
    shape = jnp.shape(turn_rewards)
    flat = (*shape[:-2], shape[-2] * shape[-1])
    turns = rule(
        jnp.reshape(turn_rewards, flat), where=None if taken is None else taken.reshape(flat)
    )
    advantages = rule(rewards, where=where)[..., None] + alpha * turns.reshape(shape)
    return masking.zero_masked(advantages, taken)


def oprl(
    rewards: Array,
    *,
    prm_logp: Array,
    old_logp: Array,
    mask: Array,
    turn_ids: Array,
    turn_where: Array,
    where: Array | None = None,
    beta: float = 0.05,
    alpha: float = 1.0,
    base: Literal["rloo", "grpo", "center"] = "rloo",
) -> Array:
    """:func:`two_level` with the turn rewards of :func:`implicit_turn_rewards`.

    Follow it with :func:`turns_to_tokens`.

    Args:
      rewards: ``[..., G]``, floating point, one per rollout.
      prm_logp, old_logp: ``[..., G, T]``, see :func:`implicit_turn_rewards`.
      mask: bool ``[..., G, T]``, True for sampled tokens.
      turn_ids, turn_where, where: See the module.
      beta: Above 0.
      alpha, base: See :func:`two_level`.

    Returns:
      ``[..., G, K]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.full((2, 2), -1.0), jnp.ones((2, 2), bool)
      >>> jr.advantages.oprl(
      ...     jnp.array([1.0, 0.0]), prm_logp=logp, old_logp=logp, mask=mask,
      ...     turn_ids=jnp.array([[0, 1], [0, 1]]), turn_where=mask).tolist()
      [[1.0, 1.0], [-1.0, -1.0]]

    References:
      OPRL or iStar (arXiv:2509.19199).
    """
    checks.check_positive("oprl", finite=True, beta=beta)
    checks.check_non_negative("oprl", finite=True, alpha=alpha)
    checks.check_option("oprl", "base", base, ("rloo", "grpo", "center"))
    turn_rewards = implicit_turn_rewards(
        prm_logp,
        old_logp,
        mask,
        turn_ids=turn_ids,
        turns=jnp.shape(turn_where)[-1],
        beta=beta,
    )
    return two_level(
        rewards,
        turn_rewards=turn_rewards,
        turn_where=turn_where,
        where=where,
        alpha=alpha,
        base=base,
    )


@traits(token_values=True, reward_range=(0.0, 1.0))
def prime(
    rewards: Array,
    *,
    prm_logp: Array,
    ref_logp: Array,
    mask: Array,
    where: Array | None = None,
    beta: float = 0.05,
    alpha: float = 1.0,
    normalize: bool = True,
) -> Array:
    """The outcome plus the process rewards of the tokens to come, both against the group.

        q[i, t] = beta (prm_logp - ref_logp), 0 at the last token
        c = 1 / max over i, t of the batch of |sum over s >= t of q[i, s]|;  1 without normalize
        p[i, t] = c (n q[i, t] - sum over j of mean_t q[j, t]) / (n - 1)     n rollouts in the group
        A[i, t] = rloo(r)_i + alpha sum over s >= t of p[i, s]

    The last token has the outcome in place of a process reward. Follow it with :func:`whiten`.
    Without process rewards, as before the model has learned, it is :func:`rloo`. The gradient is
    stopped. With ``normalize`` it must see the global batch.

    Args:
      rewards: ``[..., G]``, floating point, outcomes from 0 to 1.
      prm_logp: ``[..., G, T]``, floating point, log-probabilities (nats) under the reward model.
      ref_logp: ``[..., G, T]``, under its reference: a frozen model, or the policy that sampled.
      mask: bool ``[..., G, T]``, True for sampled tokens.
      where: See the module.
      beta: Above 0.
      alpha: Weight of the process rewards, not negative.
      normalize: Whether the largest return of process rewards in the batch has magnitude 1.

    Returns:
      ``[..., G, T]``; 0 in a group with one rollout.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> prm, ref = jnp.array([[-1.0, -1.0], [-2.0, -1.0]]), jnp.full((2, 2), -1.0)
      >>> jr.advantages.prime(
      ...     jnp.array([1.0, 0.0]), prm_logp=prm, ref_logp=ref, mask=jnp.ones((2, 2), bool),
      ...     beta=0.5, normalize=False).tolist()
      [[1.5, 1.25], [-1.5, -0.75]]

    References:
      Cui et al., PRIME (arXiv:2502.01456), as the authors' recipe for verl computes it: beta 0.05
      and equal weights. There the baseline of a token is scaled as here, with the rollout's own
      mean in the sum; in the paper it is the mean of ``mean_t q`` over the other rollouts.
    """
    function = "prime"
    stats.check_group(function, rewards, where)
    masking.check_tokens(function, mask, prm_logp=prm_logp, ref_logp=ref_logp)
    checks.check_shape(function, "rewards", rewards, jnp.shape(mask)[:-1])
    checks.check_positive(function, finite=True, beta=beta)
    checks.check_non_negative(function, finite=True, alpha=alpha)
    taken = mask if where is None else mask & where[..., None]
    ratio = jax.lax.stop_gradient(masking.safe_log_ratio(prm_logp, ref_logp, taken))
    q = jnp.where(masking.last_token(taken), 0.0, beta * ratio)
    if normalize:
        q /= jnp.max(jnp.abs(reward_to_go(q, taken))) + 1e-6
    n = stats.group_count(rewards, where)
    means = masking.masked_mean(q, taken, axis=-1)
    p = n[..., None] * q - masking.masked_sum(means, where, axis=-1, keepdims=True)[..., None]
    p /= jnp.maximum(n - 1, 1)[..., None]
    returns = reward_to_go(masking.zero_masked(p, taken & (n > 1)[..., None]), taken)
    outcomes = group.rloo(rewards, where=where)[..., None]
    return masking.zero_masked(outcomes + alpha * returns, taken)
