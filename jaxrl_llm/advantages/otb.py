"""The optimal token baseline: one baseline for every position of a group.

- ``rewards``: floating point ``[..., G]``, one per rollout; a group lies along the last axis.
- ``where``: bool ``[..., G]``, True for rollouts that take part; None for all. The others count in
  no statistic, get 0 and may hold anything.
- ``mask``: bool ``[..., G, T]``, True for the response tokens that are trained.
- ``old_logp``: ``[..., G, T]`` log-probabilities (nats) under the policy that sampled.
- ``sum_pi_sq``: ``[..., G, T]``, :func:`sum_pi_squared` of that policy at the token.
- ``weights``: ``[..., G, T]``, importance weights of the tokens in the loss; None for none.
- ``zero_tail``: whether the longest rollout has no baseline beyond the second longest one's length.
- ``compact``: whether a position is the index among the unmasked tokens of a rollout (for several
  turns with tool outputs in between) instead of the column; rollouts without an unmasked token
  then do not count as members of the group.
- ``eps``: above 0; added to the sum of ``W``.
- Advantages are float32 ``[..., G, T]``, in units of reward, 0 where masked.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import _inputs, returns
from jaxrl_llm.core import Array, checks, masking, traits

__all__ = ["otb", "otb_token", "sum_pi_squared"]


@traits(token_values=True)
def otb(
    rewards: Array,
    mask: Array,
    *,
    old_logp: Array,
    sum_pi_sq: Array,
    where: Array | None = None,
    weights: Array | None = None,
    zero_tail: bool = False,
    compact: bool = False,
    eps: float = 1e-8,
) -> Array:
    """Rewards minus a baseline per position, weighted by the gradient norm of the tokens so far.

        w[i, t] = 1 - 2 exp(old_logp[i, t]) + sum_pi_sq[i, t]       (times weights[i, t]^2, if any)
        W[i, t] = sum over s <= t of w[i, s]
        A[i, t] = r_i - sum_j r_j W[j, t] / (sum_j W[j, t] + eps)   over rollouts j with a token t

    ``w`` is the squared norm of the gradient of the log-probability with respect to the logits, so
    ``W`` approximates the squared norm of the score up to the token. With the same ``w`` everywhere
    and equal lengths it is :func:`dr_grpo`. A group of one rollout has no baseline: ``A = r_i``.
    At positions that only one rollout of a group reaches, its advantage is 0, or its reward with
    ``zero_tail``.

    Args:
      rewards, mask, old_logp, sum_pi_sq, where, weights, zero_tail, compact, eps: See the module.

    Returns:
      Advantages ``[..., G, T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.ones((2, 2), bool)
      >>> jr.advantages.otb(jnp.array([1.0, 0.0]), mask, old_logp=jnp.log(jnp.full((2, 2), 0.5)),
      ...     sum_pi_sq=jnp.full((2, 2), 0.5)).round(4).tolist()
      [[0.5, 0.5], [-0.5, -0.5]]

    References:
      Li et al., The Optimal Token Baseline (arXiv:2602.07078). As in verl, except that we raise
      ``w`` to 0 where rounding makes it negative. verl's single-turn form has ``zero_tail`` on from
      0.9 and off before; ``compact`` is its ``tir_optimal_token_baseline``, with ``zero_tail`` on.
    """
    tokens = _inputs.check_tokens(
        "otb", rewards, mask, where, old_logp=old_logp, sum_pi_sq=sum_pi_sq, weights=weights
    )
    energy = _energy("otb", tokens, old_logp, sum_pi_sq, weights)
    token_rewards = returns.terminal_rewards(rewards, tokens)
    return _advantages("otb", token_rewards, energy, tokens, where, zero_tail, compact, eps)


@traits(token_values=True)
def otb_token(
    token_rewards: Array,
    mask: Array,
    *,
    old_logp: Array,
    sum_pi_sq: Array,
    where: Array | None = None,
    weights: Array | None = None,
    zero_tail: bool = False,
    compact: bool = False,
    eps: float = 1e-8,
) -> Array:
    """:func:`otb` for token rewards.

        G[i, t] = sum over s >= t of R[i, s]
        A[i, t] = G[i, t] - sum_j G[j, t] W[j, t] / (sum_j W[j, t] + eps)

    :func:`otb` is this with the reward on the last token. In a chain it follows
    :func:`kl_shaped_rewards`.

    Args:
      mask, old_logp, sum_pi_sq, where, weights, zero_tail, compact, eps: See the module.
      token_rewards: ``[..., G, T]``, floating point; a group lies along the axis before the last.

    Returns:
      Advantages ``[..., G, T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> token_rewards, mask = jnp.array([[1.0, 1.0], [0.0, 0.0]]), jnp.ones((2, 2), bool)
      >>> half = jnp.full((2, 2), 0.5)
      >>> jr.advantages.otb_token(token_rewards, mask, old_logp=jnp.log(half),
      ...     sum_pi_sq=half).round(4).tolist()
      [[1.0, 0.5], [-1.0, -0.5]]

    References:
      Li et al., The Optimal Token Baseline (arXiv:2602.07078). As in verl.
    """
    checks.check_min_rank("otb_token", 2, token_rewards=token_rewards)
    tokens = _inputs.check_token_rewards(
        "otb_token",
        token_rewards,
        mask,
        where,
        old_logp=old_logp,
        sum_pi_sq=sum_pi_sq,
        weights=weights,
    )
    energy = _energy("otb_token", tokens, old_logp, sum_pi_sq, weights)
    return _advantages("otb_token", token_rewards, energy, tokens, where, zero_tail, compact, eps)


def sum_pi_squared(logits: Array, targets: Array | None = None) -> Array:
    """The probability that two samples from a distribution are equal.

        sum over v of pi(v)^2 = exp(logsumexp(2 z) - 2 logsumexp(z)),  z = logits - max(logits)

    Args:
      logits: ``[..., V]``, floating point.
      targets: ``[...]``, the sampled tokens; not read. A Recipe passes them.

    Returns:
      ``[...]`` float32, between 1 / V (uniform) and 1 (a single token).

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> round(float(jr.advantages.sum_pi_squared(jnp.zeros(4))), 4)
      0.25

    References:
      Li et al., The Optimal Token Baseline (arXiv:2602.07078). As in verl.
    """
    del targets
    checks.check_min_rank("sum_pi_squared", 1, logits=logits)
    checks.check_float("sum_pi_squared", logits=logits)
    logits = jnp.asarray(logits, jnp.float32)
    # A common shift of the logits cancels; without it the two terms round at the logits' size.
    z = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    return jnp.exp(jax.nn.logsumexp(2.0 * z, axis=-1) - 2.0 * jax.nn.logsumexp(z, axis=-1))


def _energy(function: str, tokens, old_logp, sum_pi_sq, weights) -> Array:
    """``W``, the weight of each position of a rollout."""
    for name, value in (("old_logp", old_logp), ("sum_pi_sq", sum_pi_sq)):
        if value is None:
            raise ValueError(f"{function}: {name} is None; the baseline requires it.")
    probs = jnp.exp(masking.zero_masked(old_logp, tokens))
    norms = jnp.maximum(1.0 - 2.0 * probs + masking.zero_masked(sum_pi_sq, tokens), 0.0)
    if weights is not None:
        norms = norms * masking.zero_masked(weights, tokens) ** 2
    return jnp.cumsum(masking.zero_masked(norms, tokens), axis=-1)


def _advantages(function, token_rewards, energy, tokens, where, zero_tail, compact, eps) -> Array:
    checks.check_positive(function, finite=True, eps=eps)
    to_go = returns.reward_to_go(token_rewards, tokens)
    if not compact:
        members = jnp.ones(jnp.shape(tokens)[:-1], bool) if where is None else where
        baseline = _baseline(to_go, energy, tokens, members, zero_tail, eps)
        return masking.zero_masked(to_go - baseline, tokens)
    # Unmasked tokens to the front, in their order; their rank leads back.
    order = jnp.argsort(~tokens, axis=-1, stable=True)
    front = jnp.arange(tokens.shape[-1]) < jnp.sum(tokens, axis=-1, keepdims=True)
    to_go_front, energy_front = (jnp.take_along_axis(x, order, axis=-1) for x in (to_go, energy))
    members = jnp.any(tokens, axis=-1)
    baseline = _baseline(to_go_front, energy_front, front, members, zero_tail, eps)
    rank = jnp.maximum(jnp.cumsum(tokens, axis=-1) - 1, 0)
    return masking.zero_masked(to_go - jnp.take_along_axis(baseline, rank, axis=-1), tokens)


def _baseline(to_go, energy, tokens, members, zero_tail: bool, eps) -> Array:
    """The baseline of each rollout and position, ``[..., G, T]``; 0 where there is none."""
    energy = masking.zero_masked(energy, tokens)
    total = jnp.sum(energy, axis=-2, keepdims=True) + eps
    baseline = jnp.sum(energy * to_go, axis=-2, keepdims=True) / total
    company = jnp.sum(members, axis=-1)[..., None, None] > 1
    if zero_tail:
        lengths = jnp.where(members, jnp.sum(tokens, axis=-1), -1)
        longest = jnp.max(lengths, axis=-1, keepdims=True, initial=-1)
        first = lengths == longest
        second = jnp.max(jnp.where(first, -1, lengths), axis=-1, keepdims=True, initial=-1)
        alone = first & (jnp.sum(first, axis=-1, keepdims=True) == 1)
        past = jnp.arange(tokens.shape[-1]) >= second[..., None]
        company = company & ~(alone[..., None] & past)
    return jnp.where(company, baseline, 0.0)
