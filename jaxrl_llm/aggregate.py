"""Mask to weights: how token losses are reduced to one number.

A weighting is called once, on the mask of the global batch; the loss is then a weighted sum, so
microbatches and devices only add. ``mask`` is bool ``[..., T]``, True = keep, and its leading axes
are free: a *sequence* is one row along the last axis. ``length`` is a constant in tokens, above 0;
usually the maximum number of tokens of a response. All raise TypeError for a wrong dtype, and
ValueError for a ``mask`` without an axis or an option out of its range.

===================  ==========================================  ================================
function             sum(loss * weights) is                      names elsewhere
===================  ==========================================  ================================
token_mean           mean over all unmasked tokens               token-mean (DAPO)
guided_token_mean    (1 - mu) mean over the policy's tokens      CHORD
                     + mu mean over those of a guide
token_sum            sum over all unmasked tokens                token-sum, sum
sequence_mean        mean over sequences of their token mean     seq-mean-token-mean (GRPO)
group_mean           mean over groups of their sequence mean     DRPO
sequence_sum         mean over sequences of their token sum      seq-mean-token-sum
sequence_sum_norm    the same over a constant length             seq-mean-token-sum-norm
fixed_length         sum over rows times a constant length       Dr. GRPO
===================  ==========================================  ================================

All but ``fixed_length`` exclude sequences without an unmasked token from the mean. Only
``sequence_mean`` and ``group_mean`` are correct for a sequence-level loss, whose value is repeated
over the tokens: they count that value once per sequence.
"""

import math

import jax.numpy as jnp

from jaxrl_llm.core import checks, masking, traits
from jaxrl_llm.core.axes import Array


def _check(function: str, mask: Array) -> None:
    checks.check_bool(function, mask=mask)
    checks.check_min_rank(function, 1, mask=mask)


def _non_empty(mask: Array) -> Array:
    """How many sequences have an unmasked token, at least 1, so that an empty batch weighs 0."""
    return jnp.maximum(jnp.sum(jnp.any(mask, axis=-1), dtype=jnp.float32), 1.0)


def token_mean(mask: Array) -> Array:
    """Every unmasked token of the batch counts the same; a long sequence counts more.

        w[b, t] = m[b, t] / max(sum(m), 1)

    Args:
      mask: See the module.

    Returns:
      Weights ``[..., T]``, float32; they add up to 1, or to 0 if everything is masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.aggregate.token_mean(jnp.array([[True, True, True], [True, False, False]])).tolist()
      [[0.25, 0.25, 0.25], [0.25, 0.0, 0.0]]

    References:
      Yu et al., DAPO (arXiv:2503.14476). verl's ``token-mean``.
    """
    _check("token_mean", mask)
    return mask / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)


def guided_token_mean(mask: Array, *, steered: Array, mu: Array | float) -> Array:
    """The policy's tokens and those of a guide, each with a mean of its own.

        w[b, t] = (1 - mu) m[b, t] / max(sum of m over the policy's tokens, 1)    where not steered
        w[b, t] = mu m[b, t] / max(sum of m over the guide's tokens, 1)           where steered

    The share of the guide in the loss thus depends neither on how many responses it has nor on
    their lengths.

    Args:
      mask: See the module.
      steered: bool, ``[...]`` of the sequences, True for those of the guide.
      mu: Share of the guide, between 0 and 1: a number, or an array of one value for all sequences
        that broadcasts against ``mask``.

    Returns:
      Weights ``[..., T]``, float32; they add up to 1 if both have a token.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask, steered = jnp.array([[True, True], [True, False]]), jnp.array([False, True])
      >>> jr.aggregate.guided_token_mean(mask, steered=steered, mu=0.25).tolist()
      [[0.375, 0.375], [0.25, 0.0]]

    References:
      Zhang et al., CHORD (arXiv:2508.11408): the SFT loss has the weight mu beside that of GRPO.
    """
    function = "guided_token_mean"
    _check(function, mask)
    checks.check_bool(function, steered=steered)
    checks.check_shape(function, "steered", steered, jnp.shape(mask)[:-1])
    if isinstance(mu, int | float):
        checks.check_share(function, mu=mu)
    guide = steered[..., None]
    share = jnp.asarray(mu, jnp.float32)
    return (1.0 - share) * token_mean(mask & ~guide) + share * token_mean(mask & guide)


def token_sum(mask: Array) -> Array:
    """Every unmasked token has weight 1: the loss grows with the number of tokens.

        w[b, t] = m[b, t]

    The step size then depends on the number of tokens in a batch. Adam normalizes its steps and is
    not affected; plain SGD is.

    Args:
      mask: See the module.

    Returns:
      Weights ``[..., T]``, float32; they add up to the number of unmasked tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.aggregate.token_sum(jnp.array([[True, True], [True, False]])).tolist()
      [[1.0, 1.0], [1.0, 0.0]]

    References:
      Williams, REINFORCE (Machine Learning 8, 1992), whose updates add up over the steps.
    """
    _check("token_sum", mask)
    return jnp.asarray(mask, jnp.float32)


@traits(level="sequence")
def sequence_mean(mask: Array) -> Array:
    """Every non-empty sequence counts the same, and so does every unmasked token within one.

        w[b, t] = m[b, t] / (N[b] * S)    N[b] unmasked tokens of b, S sequences with N > 0

    Args:
      mask: See the module.

    Returns:
      Weights ``[..., T]``, float32; they add up to 1 / S over a sequence.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.aggregate.sequence_mean(jnp.array([[True, True], [True, False]])).tolist()
      [[0.25, 0.25], [0.5, 0.0]]

    References:
      Shao et al., DeepSeekMath (arXiv:2402.03300). verl's ``seq-mean-token-mean``.
    """
    _check("sequence_mean", mask)
    return mask / jnp.maximum(masking.lengths(mask), 1.0)[..., None] / _non_empty(mask)


@traits(level="sequence")
def group_mean(mask: Array) -> Array:
    """Every non-empty group counts the same, every non-empty sequence in it, and every token in it.

        w[p, b, t] = m[p, b, t] / (N[p, b] * S[p] * G)
        N[p, b] unmasked tokens of a sequence, S[p] sequences with N > 0, G groups with S > 0

    It equals :func:`sequence_mean` if all groups have equally many non-empty sequences. A loss that
    is one number per group, repeated over its sequences and tokens, is averaged over the groups.

    Args:
      mask: bool ``[..., G, T]``, with the group axis second to last; fewer axes raise ValueError.

    Returns:
      Weights ``[..., G, T]``, float32; they add up to the same over every non-empty group.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.array([[[True, True], [True, False]], [[True, False], [False, False]]])
      >>> jr.aggregate.group_mean(mask).tolist()
      [[[0.125, 0.125], [0.25, 0.0]], [[0.5, 0.0], [0.0, 0.0]]]

    References:
      DRPO (arXiv:2510.04474) divides by all groups of the batch, even those without an objective.
    """
    checks.check_bool("group_mean", mask=mask)
    checks.check_min_rank("group_mean", 2, mask=mask)
    sequences = jnp.any(mask, axis=-1, keepdims=True)
    members = jnp.sum(sequences, axis=-2, keepdims=True, dtype=jnp.float32)
    groups = jnp.maximum(jnp.sum(members > 0, dtype=jnp.float32), 1.0)
    tokens = jnp.maximum(masking.lengths(mask), 1.0)[..., None]
    return mask / tokens / jnp.maximum(members, 1.0) / groups


def sequence_sum(mask: Array) -> Array:
    """Token losses are added within a sequence and averaged over the non-empty sequences.

        w[b, t] = m[b, t] / S    S sequences with an unmasked token

    With the REINFORCE token loss this is the gradient of the expected reward.

    Args:
      mask: See the module.

    Returns:
      Weights ``[..., T]``, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.aggregate.sequence_sum(jnp.array([[True, True], [True, False]])).tolist()
      [[0.5, 0.5], [0.5, 0.0]]

    References:
      verl's ``seq-mean-token-sum``.
    """
    _check("sequence_sum", mask)
    return mask / _non_empty(mask)


def sequence_sum_norm(mask: Array, *, length: float) -> Array:
    """:func:`sequence_sum` divided by a constant length; the mean is over non-empty sequences.

        w[b, t] = m[b, t] / (S * length)    S sequences with an unmasked token

    It equals :func:`fixed_length` if no sequence is empty.

    Args:
      mask, length: See the module.

    Returns:
      Weights ``[..., T]``, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.array([[True, True], [True, False], [False, False]])
      >>> jr.aggregate.sequence_sum_norm(mask, length=2).tolist()
      [[0.25, 0.25], [0.25, 0.0], [0.0, 0.0]]

    References:
      verl's ``seq-mean-token-sum-norm`` from 0.7.1 on, as a function; the constant defaults to T,
      and verl's trainer passes the number of all rows, as :func:`fixed_length` counts them. Up to
      0.7.0 that mode does not divide by the number of sequences.
    """
    checks.check_positive("sequence_sum_norm", finite=True, length=length)
    _check("sequence_sum_norm", mask)
    return mask / (_non_empty(mask) * length)


def fixed_length(mask: Array, *, length: float) -> Array:
    """Every unmasked token of every batch of this shape counts the same: a constant denominator.

        w[b, t] = m[b, t] / (B * length)    B rows of the mask, the empty ones too

    This is the loss of Dr. GRPO: a sequence is weighted by its length, and the constant denominator
    favors neither short nor long sequences.

    Args:
      mask, length: See the module.

    Returns:
      Weights ``[..., T]``, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> mask = jnp.array([[True, True], [True, False]])
      >>> jr.aggregate.fixed_length(mask, length=2).tolist()
      [[0.25, 0.25], [0.25, 0.0]]

    References:
      Liu et al., Understanding R1-Zero-Like Training (arXiv:2503.20783). TRL's ``dr_grpo`` loss
      divides by the rows of a microbatch; we divide by those of the global batch.
    """
    checks.check_positive("fixed_length", finite=True, length=length)
    _check("fixed_length", mask)
    rows = max(math.prod(jnp.shape(mask)[:-1]), 1)
    return mask / (jnp.float32(rows) * length)


def weighted_sum(loss: Array, weights: Array) -> Array:
    """The weighted sum of the token losses.

        sum(loss * weights) over the cells where weights != 0

    A cell of weight 0 is never read, neither in the value nor in the gradient, so a NaN there is
    harmless. The sums over disjoint parts of a batch add up to the sum over the batch.

    Args:
      loss: Token losses ``[..., T]``, floating point.
      weights: ``[..., T]``, floating point (a mask is not a weight), from one of the weightings.

    Returns:
      The loss, a float32 scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> loss = jnp.array([[1.0, 2.0, 3.0, 4.0], [10.0, jnp.nan, jnp.nan, jnp.nan]])
      >>> float(jr.aggregate.weighted_sum(loss, jr.aggregate.token_mean(~jnp.isnan(loss))))
      4.0
    """
    checks.check_float("weighted_sum", loss=loss, weights=weights)
    checks.check_same_shape("weighted_sum", loss=loss, weights=weights)
    weights = jnp.asarray(weights, jnp.float32)
    return jnp.sum(masking.zero_masked(loss, weights != 0) * weights)
