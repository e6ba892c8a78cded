"""Which rollouts and tokens of a batch train: by rank (D3S), or all but mastered ones (UloRL).

- ``mask``: bool, with the token axis ``T`` last, True = keep; masked entries are not read.
- ``tau``: the probability from which a token counts as mastered, in (0, 1].
- ``sigma``: the entropy below which the rule applies to a response, in nats, not negative.
- A wrong dtype raises TypeError; shapes that do not match and a bad option raise ValueError.
"""

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats, traits
from jaxrl_llm.curation.schedules import linear_schedule

__all__ = [
    "d3s_selection",
    "max_variance_subset",
    "mpt_advantages",
    "mpt_mask",
    "top_fraction_token_mask",
]

# Variances that differ by less are one: float32 cannot tell rounding from a difference.
_TIE = 1e-6


def _ranks(x: Array, valid: Array) -> tuple[Array, Array]:
    """Descending order and rank along the last axis; stable, the invalid entries last.

    A valid NaN comes first, so that it is selected and seen; jax would sort it to the end.
    """
    falling = jnp.where(jnp.isnan(x), -jnp.inf, -x)
    return stats.order_and_ranks(jnp.where(valid, falling, jnp.inf))


def max_variance_subset(x: Array, n: int | Array, *, where: Array | None = None) -> Array:
    """The ``n`` entries with the largest variance among all subsets of that size.

        keep = argmax over subsets S of size n of  mean_S x^2 - (mean_S x)^2

    The best subset is always the k largest and the n - k smallest entries for some k, so sorting
    and prefix sums find it exactly in O(B log B). The order is descending and stable (among equal
    values the earlier comes first). Among equal variances the smallest k is used.

    Args:
      x: ``[..., B]``, floating point.
      n: Number of entries to keep: an int, or an integer array ``[]`` or ``[..., 1]``, which may be
        traced. If fewer take part, all of them are selected.
      where: bool ``[..., B]``, True for entries that take part; the rest are not read.

    Returns:
      bool ``[..., B]``, at most n True in each row. A row with a NaN that takes part keeps its n
      largest entries, where NaN ranks above all numbers.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> x = jnp.array([1.5, 0.2, -0.1, -1.2, 0.9, 0.0])
      >>> jr.curation.max_variance_subset(x, 3).tolist()
      [True, False, False, True, True, False]

    References:
      D3S (arXiv:2509.22115). PAPER reading, from a note; ties are ours. Inside one group this is
      the subset of largest reward variance (PODS), since an advantage is an affine map of the
      reward. Variances that agree to 1e-6 of the largest count as equal.
    """
    function = "max_variance_subset"
    checks.check_min_rank(function, 1, x=x)
    checks.check_float(function, x=x)
    checks.check_integer(function, n=n)
    checks.check_non_negative(function, finite=True, n=n)
    each = (*jnp.shape(x)[:-1], 1)
    if jnp.shape(n) not in ((), each):
        raise ValueError(
            f"{function}: n must be one number or have shape {each}, one a row of x "
            f"{jnp.shape(x)}; got {jnp.shape(n)}."
        )
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, x=x, where=where)
    valid = jnp.ones(jnp.shape(x), bool) if where is None else where
    if jnp.shape(x)[-1] == 0:
        return valid
    x = masking.zero_masked(x, where)
    order, rank = _ranks(x, valid)
    count = jnp.sum(valid, axis=-1, keepdims=True, dtype=jnp.int32)
    size = jnp.clip(jnp.asarray(n, jnp.int32), 0, count)
    ordered = jnp.take_along_axis(x, order, axis=-1)
    # Around a value of the row, not around its mean: a variance does not see the shift, prefix sums
    # lose less, and values that were exact in float32 stay so.
    middle = jnp.take_along_axis(ordered, jnp.maximum(count - 1, 0) // 2, axis=-1)
    ordered = jnp.where(jnp.arange(jnp.shape(x)[-1]) < count, ordered - middle, 0.0)
    k = jnp.arange(jnp.shape(x)[-1] + 1)
    low = jnp.clip(count - size + k, 0, count)  # where the n - k least begin

    def sums(values):
        prefix = jnp.cumsum(values, axis=-1)
        prefix = jnp.concatenate([jnp.zeros_like(prefix[..., :1]), prefix], axis=-1)
        total = jnp.take_along_axis(prefix, count, axis=-1)
        return prefix + total - jnp.take_along_axis(prefix, low, axis=-1)

    first, second = sums(ordered), sums(ordered**2)
    spread = jnp.where(k <= size, size * second - first**2, -jnp.inf)  # size^2 times the variance
    best = jnp.max(spread, axis=-1, keepdims=True)
    top = jnp.argmax(spread >= best - _TIE * jnp.abs(best), axis=-1, keepdims=True)
    top = jnp.where(jnp.isnan(best), size, top)
    return valid & ((rank < top) | ((rank >= count - (size - top)) & (rank < count)))


def top_fraction_token_mask(scores: Array, mask: Array, fraction: float | Array) -> Array:
    """The tokens with the highest scores: a share of all unmasked ones.

        keep[t] = mask[t] and rank(scores[t]) among unmasked tokens < round(fraction * their count)

    The rank is over the full array, not over a sequence; among equal scores the earlier comes
    first.

    Args:
      mask: See the module.
      scores: ``[..., T]``, floating point.
      fraction: In [0, 1]; may be traced.

    Returns:
      bool ``[..., T]``. An unmasked NaN ranks above all numbers.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> scores = jnp.array([[0.1, 0.9, 0.5], [0.7, 0.0, 9.0]])
      >>> mask = jnp.array([[True, True, True], [True, True, False]])
      >>> jr.curation.top_fraction_token_mask(scores, mask, 0.4).tolist()
      [[False, True, False], [True, False, False]]

    References:
      D3S (arXiv:2509.22115). PAPER reading; ties are ours.
    """
    function = "top_fraction_token_mask"
    checks.check_mask(function, mask)
    checks.check_float(function, scores=scores)
    checks.check_same_shape(function, scores=scores, mask=mask)
    checks.check_share(function, fraction=fraction)
    flat = mask.reshape(-1)
    _, rank = _ranks(masking.zero_masked(scores, mask).reshape(-1), flat)
    count = jnp.sum(flat, dtype=jnp.float32)
    target = jnp.round(jnp.asarray(fraction, jnp.float32) * count).astype(jnp.int32)
    return mask & (rank < target).reshape(jnp.shape(mask))


def d3s_selection(
    advantages: Array,
    mask: Array,
    *,
    old_entropy: Array,
    where: Array | None = None,
    progress: float | Array = 0.0,
    scope: Literal["batch", "group"] = "batch",
    rollouts: tuple[float, float] = (0.25, 0.75),
    tokens: tuple[float, float] = (0.2, 1.0),
) -> Array:
    """Trains on the rollouts with the largest advantage variance and on their informative tokens.

        N, K      = linear in progress between the pairs ``rollouts`` and ``tokens``
        rollouts: max_variance_subset(A, round(N * number of rollouts))
        tokens:   the share K of the tokens of those rollouts with the greatest |A| H

    The advantages are those of the full batch and are not normalized again.

    Args:
      mask: See the module.
      advantages: ``[..., G]``, or ``[..., G, T]``, which are averaged over the tokens of a rollout.
      old_entropy: ``[..., G, T]``, floating point, nats: entropy of the policy that sampled.
      where: bool ``[..., G]``, True for rollouts that take part.
      progress: Share of the training that is done, in [0, 1]: a number, or an array of one
        repeated value, as a controller returns it.
      scope: Where the variance is computed: over the "batch", or over each "group" with its N.
      rollouts: Shares of the rollouts that train, at the start and at the end.
      tokens: Shares of their tokens that train, at the start and at the end.

    Returns:
      bool ``[..., G, T]``, for the slot ``selection``; pair it with ``aggregate.token_mean``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> advantages = jnp.array([[1.0, -1.0], [0.0, 0.0]])
      >>> mask = jnp.ones((2, 2, 4), bool)
      >>> keep = jr.curation.d3s_selection(
      ...     advantages, mask, old_entropy=jnp.ones((2, 2, 4)), rollouts=(0.5, 1.0),
      ...     tokens=(0.5, 1.0))
      >>> keep.sum(-1).tolist()
      [[4, 0], [0, 0]]

    References:
      D3S (arXiv:2509.22115). PAPER reading, from a note without the schedule: the shares here are
      ours (the paper has under 20% of the tokens).
    """
    function = "d3s_selection"
    checks.check_mask(function, mask)
    checks.check_min_rank(function, 1, old_entropy=old_entropy)
    checks.check_float(function, advantages=advantages, old_entropy=old_entropy)
    checks.check_same_shape(function, old_entropy=old_entropy, mask=mask)
    checks.check_bool(function, where=where)
    checks.check_option(function, "scope", scope, ("batch", "group"))
    for i in (0, 1):
        checks.check_share(function, rollouts=rollouts[i], tokens=tokens[i])
    values = masking.spread(function, "advantages", advantages, mask)
    shape = jnp.shape(mask)[:-1]
    present = jnp.any(mask, axis=-1)
    if where is not None:
        checks.check_shape(function, "where", where, shape)
        present &= where
    # A controller's value comes as an array that repeats it.
    progress = jnp.max(jnp.asarray(progress, jnp.float32))
    share = linear_schedule(progress, start=rollouts[0], end=rollouts[1])
    level = masking.masked_mean(values, mask, axis=-1)
    if jnp.ndim(advantages) < jnp.ndim(mask):
        level = masking.zero_masked(advantages, present)  # as it is: a mean of equals may round
    rows = (-1,) if scope == "batch" else shape
    level, taking = level.reshape(rows), present.reshape(rows)
    size = jnp.round(share * jnp.sum(taking, axis=-1, keepdims=True)).astype(jnp.int32)
    chosen = max_variance_subset(level, size, where=taking).reshape(shape)
    mask = mask & chosen[..., None]
    scores = jnp.abs(values) * masking.zero_masked(old_entropy, mask)
    fraction = linear_schedule(progress, start=tokens[0], end=tokens[1])
    return top_fraction_token_mask(scores, mask, fraction)


def mpt_mask(
    logp: Array,
    entropy: Array,
    mask: Array,
    rewards: Array,
    *,
    tau: float | Array = 0.99,
    sigma: float | Array = 0.2,
) -> Array:
    """Drops mastered tokens of correct responses whose entropy is too low.

        drop[i, t] = rewards[i] > 0  and  exp(logp[i, t]) >= tau  and  H_i < sigma
        H_i        = mean entropy of the unmasked tokens of response i

    ``sigma=0`` drops no token; an infinite ``sigma`` drops mastered tokens at any entropy.

    Args:
      mask, tau, sigma: See the module.
      logp: ``[..., T]`` log-probabilities (nats) under the policy.
      entropy: ``[..., T]`` entropy (nats) of the policy at each token.
      rewards: ``[...]``, floating point, above 0 for a correct response.

    Returns:
      Keep: bool ``[..., T]``, False where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.log(jnp.array([0.995, 0.5, 0.999])), jnp.ones(3, bool)
      >>> jr.curation.mpt_mask(logp, jnp.full(3, 0.1), mask, jnp.array(1.0)).tolist()
      [False, True, False]

    References:
      UloRL (arXiv:2507.19766), PAPER reading; rewards are 0 and 1 there. Its equation of the
      entropy has no minus sign, which we take for a typo.
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
    """:func:`mpt_mask` as the last step of a chain of advantages; no denominator changes.

        A'[i, t] = A[i] where mpt_mask keeps the token, else 0

    A token with advantage 0 still counts in the mean; a ``selection`` would also remove it from
    the mean, which is another method.

    Args:
      mask, tau, sigma: See the module.
      advantages: ``[..., G]`` spread over the tokens, or ``[..., G, T]``; floating point.
      rewards: ``[..., G]``, floating point, above 0 for a right response.
      old_logp: ``[..., G, T]`` log-probabilities (nats) under the policy the step starts from.
      old_entropy: ``[..., G, T]``, nats: its entropy.

    Returns:
      Advantages ``[..., G, T]``, float32, 0 where masked.

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
