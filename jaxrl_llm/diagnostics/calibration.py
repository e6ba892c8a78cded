"""Calibration of a reward model: whether its confidence matches its accuracy.

A wrong dtype raises TypeError; shapes that differ and a bad number raise ValueError.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking


class PairCalibration(NamedTuple):
    """Result of :func:`pair_calibration`, float32.

    Attributes:
      error: ``[]``, expected calibration error, in [0, 1].
      brier: ``[]``, mean squared error of the probabilities.
      confidence: ``[bins]``, mean probability of the response that the model prefers.
      accuracy: ``[bins]``, how often that response is the chosen one.
      pairs: ``[bins]``, number of pairs.
    """

    error: Array
    brier: Array
    confidence: Array
    accuracy: Array
    pairs: Array


def pair_calibration(
    chosen_rewards: Array,
    rejected_rewards: Array,
    *,
    bins: int = 10,
    where: Array | None = None,
) -> PairCalibration:
    """Compares the predicted probabilities of preferences with their frequencies.

        p = sigmoid(|r_w - r_l|),   hit = r_w > r_l, and one half for a tie
        error = sum over bins of p, from 1/2 to 1, of share |mean of hit - mean of p|
        brier = mean of (hit - p)^2

    Args:
      chosen_rewards: ``[...]``, floating point, rewards of the preferred responses.
      rejected_rewards: ``[...]``, rewards of the other responses.
      bins: Number of bins of equal width, at least 1.
      where: bool ``[...]``, True for the pairs that exist; None for all.

    Returns:
      :class:`PairCalibration`; 0 for a bin without a pair.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> margin = jnp.log(3.0) * jnp.array([1.0, 1.0, 1.0, -1.0])  # p = 3/4, right 3 times of 4
      >>> seen = jr.diagnostics.pair_calibration(margin, jnp.zeros(4), bins=5)
      >>> bool(seen.error < 1e-6), round(float(seen.brier), 4)
      (True, 0.1875)

    References:
      Guo et al. (arXiv:1706.04599) for the error; Brier (1950).
    """
    function = "pair_calibration"
    named = {"chosen_rewards": chosen_rewards, "rejected_rewards": rejected_rewards}
    checks.check_bool(function, where=where)
    checks.check_alike(function, named, where=where)
    checks.check_count(function, bins=bins)
    valid = jnp.ones(jnp.shape(chosen_rewards), bool) if where is None else jnp.asarray(where)
    chosen, rejected = (masking.zero_masked(x, valid) for x in named.values())
    gap = chosen - rejected
    p = jax.nn.sigmoid(jnp.abs(gap))
    hit = jnp.where(gap == 0, 0.5, (gap > 0).astype(jnp.float32))
    place = jnp.clip(jnp.floor((2.0 * p - 1.0) * bins), 0, bins - 1).astype(jnp.int32)
    member = (place[..., None] == jnp.arange(bins)) & valid[..., None]
    axes = tuple(range(gap.ndim))

    def mean(x: Array) -> Array:
        return masking.masked_mean(jnp.broadcast_to(x[..., None], member.shape), member, axis=axes)

    confidence, accuracy = mean(p), mean(hit)
    pairs = jnp.sum(member, axis=axes, dtype=jnp.float32)
    share = pairs / jnp.maximum(jnp.sum(pairs), 1.0)
    return PairCalibration(
        error=jnp.sum(share * jnp.abs(accuracy - confidence)),
        brier=masking.masked_mean((hit - p) ** 2, valid),
        confidence=confidence,
        accuracy=accuracy,
        pairs=pairs,
    )
