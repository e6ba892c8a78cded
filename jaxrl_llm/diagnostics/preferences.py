"""How a policy ranks responses whose order is known, from a person or a reward."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking


class PairOrder(NamedTuple):
    """Result of :func:`pair_order`, float32 scalars; 0 if there are no pairs.

    Attributes:
      accuracy: Share of the pairs in the right order.
      margin: Mean difference of their scores.
      chosen: Mean score of the better responses.
      rejected: Mean score of the worse responses.
      pairs: Number of pairs.
    """

    accuracy: Array
    margin: Array
    chosen: Array
    rejected: Array
    pairs: Array


def response_scores(logp: Array, ref_logp: Array | None, mask: Array) -> Array:
    """The score of each response under a policy, without the scale ``beta``.

        sum of (logp[t] - ref_logp[t])           against a reference
        mean of logp[t]                          without one

    Args:
      logp: ``[..., T]``, floating point, log-probabilities (nats) of tokens under the policy.
      ref_logp: ``[..., T]``, like ``logp`` under the reference; None for none.
      mask: bool ``[..., T]``, True = keep.

    Returns:
      ``[...]`` float32; 0 if everything is masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.array([[-1.0, -2.0]]), jnp.ones((1, 2), bool)
      >>> jr.diagnostics.response_scores(logp, None, mask).tolist()
      [-1.5]

    References:
      Rafailov et al., DPO (arXiv:2305.18290); Meng et al., SimPO (arXiv:2405.14734).
    """
    function = "response_scores"
    masking.check_tokens(function, mask, logp=logp, ref_logp=ref_logp)
    if ref_logp is None:
        return masking.masked_mean(jnp.asarray(logp, jnp.float32), mask, axis=-1)
    return jnp.sum(masking.safe_log_ratio(logp, ref_logp, mask), axis=-1)


def pair_order(
    scores: Array, rewards: Array, *, where: Array | None = None, sides: Array | None = None
) -> PairOrder:
    """How often, and by what margin, scores rank the responses of a group as rewards do.

        pairs    = all i, j of a group with r_i > r_j;   with sides:  and side_i != side_j
        accuracy = share of them with s_i > s_j; a tie counts one half
        margin   = mean of s_i - s_j;   chosen, rejected = means of s_i and of s_j

    Args:
      scores: ``[..., G]``, floating point, such as :func:`response_scores`.
      rewards: ``[..., G]``, floating point; a group lies along the last axis.
      where: bool ``[..., G]``, True for responses that take part; None for all.
      sides: bool or integers ``[..., G]``, for pairs of responses of different sides only, such as
        one of the policy and one of the reference; None for all pairs.

    Returns:
      :class:`PairOrder`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> order = jr.diagnostics.pair_order(jnp.array([0.5, -0.5]), jnp.array([1.0, 0.0]))
      >>> float(order.accuracy), float(order.margin)
      (1.0, 1.0)

    References:
      TRL logs them as rewards/accuracies and rewards/margins, with a tie as wrong.
    """
    function = "pair_order"
    checks.check_float(function, scores=scores, rewards=rewards)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, scores=scores, rewards=rewards, where=where, sides=sides)
    checks.check_min_rank(function, 1, scores=scores)
    valid = jnp.ones(jnp.shape(scores), bool) if where is None else where
    scores, rewards = (masking.zero_masked(x, valid) for x in (scores, rewards))
    s, t = scores[..., :, None], scores[..., None, :]
    pairs = (rewards[..., :, None] > rewards[..., None, :]) & valid[..., :, None]
    pairs &= valid[..., None, :]
    if sides is not None:
        sides = jnp.asarray(sides)
        pairs &= sides[..., :, None] != sides[..., None, :]
    right = jnp.where(s == t, 0.5, (s > t).astype(jnp.float32))

    def mean(x: Array) -> Array:
        return masking.masked_mean(jnp.broadcast_to(x, pairs.shape), pairs)

    count = jnp.sum(pairs, dtype=jnp.float32)
    return PairOrder(mean(right), mean(s - t), mean(s), mean(t), count)
