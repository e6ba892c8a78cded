"""Pairs of a group for preference losses, and the win rate of each response.

Shared arguments:
  ``rewards``: ``[..., G]``, floating point, of the responses of a group.
  ``where``: bool ``[..., G]``, True for the responses that take part; the others are not read and
    never chosen. None for all.

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats

__all__ = [
    "SelectedPairs",
    "mean_win_rate",
    "missing_eos_penalty",
    "right_over_wrong",
    "select_pairs",
    "win_rate_matrix",
]


class SelectedPairs(NamedTuple):
    """Result of :func:`select_pairs`.

    Attributes:
      indices: int32 ``[..., M, 2]``, the better and the worse response; -1 where there is no pair.
      where: bool ``[..., M]``, True where there is a pair.
    """

    indices: Array
    where: Array


def select_pairs(
    rewards: Array,
    *,
    mode: Literal["max_min", "first_two", "all_pairs", "random"] = "max_min",
    min_gap: float = 0.0,
    where: Array | None = None,
    key: Array | None = None,
) -> SelectedPairs:
    """Selects the chosen and the rejected responses of each group.

        "max_min"    the greatest reward against the least            M = 1
        "first_two"  the first two that take part                     M = 1
        "random"     two that take part, at random                    M = 1
        "all_pairs"  every two                                        M = G (G - 1) / 2

    The response with the larger reward is the chosen one. Two equal rewards, or two that differ by
    less than ``min_gap``, give no pair. Of several largest or smallest rewards the first is taken.

    Args:
      rewards, where: See the module.
      mode: As above.
      min_gap: Smallest difference of the rewards of a pair, not negative.
      key: A typed key; only with "random".

    Returns:
      :class:`SelectedPairs`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> pairs = jr.curation.select_pairs(jnp.array([3.0, 1.0, 2.0]))
      >>> pairs.indices.tolist(), pairs.where.tolist()
      ([[0, 1]], [True])

    References:
      The pairs of online DPO (arXiv:2402.04792; TRL samples two), of RLHFlow (arXiv:2405.07863) and
      SPPO (arXiv:2405.00675; the released script takes the best and the worst of five).
    """
    function = "select_pairs"
    stats.check_group(function, rewards, where)
    checks.check_option(function, "mode", mode, ("max_min", "first_two", "all_pairs", "random"))
    checks.check_non_negative(function, finite=True, min_gap=min_gap)
    if mode == "random" and key is None:
        raise ValueError(f"{function}: mode='random' needs a key.")
    if mode != "random":
        checks.check_no_effect(function, f"with mode={mode!r}", key=key)
    rewards = jnp.asarray(rewards, jnp.float32)
    shape = rewards.shape
    size = shape[-1]
    valid = jnp.ones(shape, bool) if where is None else jnp.asarray(where)
    rewards = masking.zero_masked(rewards, valid)
    if size < 2:
        count = 0 if mode == "all_pairs" else 1
        none = jnp.full((*shape[:-1], count, 2), -1, jnp.int32)
        return SelectedPairs(none, jnp.zeros((*shape[:-1], count), bool))
    if mode == "max_min":
        best = jnp.argmax(jnp.where(valid, rewards, -jnp.inf), axis=-1)
        worst = jnp.argmin(jnp.where(valid, rewards, jnp.inf), axis=-1)
        indices = jnp.stack([best, worst], axis=-1)[..., None, :]
    elif mode == "all_pairs":
        every = jnp.stack(jnp.triu_indices(size, 1), axis=-1)
        indices = jnp.broadcast_to(every, (*shape[:-1], *every.shape))
    else:
        place = jnp.arange(size) if mode == "first_two" else jax.random.uniform(key, shape)
        order, _ = stats.order_and_ranks(jnp.where(valid, place, jnp.inf))
        indices = order[..., None, :2]

    def of_pairs(x: Array) -> Array:
        flat = jnp.take_along_axis(x, indices.reshape((*shape[:-1], -1)), axis=-1)
        return flat.reshape(indices.shape)

    two = of_pairs(rewards)
    indices = jnp.where((two[..., 0] >= two[..., 1])[..., None], indices, indices[..., ::-1])
    gap = jnp.abs(two[..., 0] - two[..., 1])
    there = jnp.all(of_pairs(valid), axis=-1) & (gap > 0) & (gap >= min_gap)
    return SelectedPairs(jnp.where(there[..., None], indices, -1).astype(jnp.int32), there)


def right_over_wrong(
    rewards: Array,
    *,
    pairs: int = 1,
    success: float = 1.0,
    lengths: Array | None = None,
    where: Array | None = None,
) -> SelectedPairs:
    """Pairs correct responses as chosen with wrong ones as rejected, by a verifier's rewards.

        right where reward >= success, R of them; the other W are wrong
        pair m = (right response m mod R, wrong response m mod W),   m < min(pairs, max(R, W))
        with lengths: (shortest right response, wrong response m),   m < min(pairs, W)

    A group without a correct or without a wrong response has no pair. No pair occurs twice.

    Args:
      rewards, where: See the module.
      pairs: M, the maximum number of pairs of a group, at least 1.
      success: The smallest reward of a correct response.
      lengths: ``[..., G]``, not negative, such as numbers of tokens; among equal lengths the
        first counts as the shortest. None takes the responses in their order.

    Returns:
      :class:`SelectedPairs`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> selected = jr.curation.right_over_wrong(
      ...     jnp.array([1.0, 0.0, 1.0, 0.0]), pairs=3, lengths=jnp.array([9, 5, 2, 2]))
      >>> selected.indices.tolist(), selected.where.tolist()
      ([[2, 1], [2, 3], [-1, -1]], [True, True, False])

    References:
      Pang et al., iterative reasoning preference optimization (arXiv:2404.19733), whose pairs are
      of right and wrong answers. The shortest right response is the positive sample of Kimi k1.5
      (arXiv:2501.12599), which also rejects right ones that are long. Confidence: PAPER.
    """
    function = "right_over_wrong"
    stats.check_group(function, rewards, where)
    checks.check_count(function, pairs=pairs)
    if lengths is not None:
        checks.check_same_shape(function, rewards=rewards, lengths=lengths)
    shape = jnp.shape(rewards)
    valid = jnp.ones(shape, bool) if where is None else jnp.asarray(where)
    above = masking.zero_masked(rewards, valid) >= success
    right, wrong = above & valid, ~above & valid
    place = jnp.broadcast_to(jnp.arange(shape[-1]), shape)
    first = place if lengths is None else masking.zero_masked(lengths, valid)
    chosen, _ = stats.order_and_ranks(jnp.where(right, first, jnp.inf))
    rejected, _ = stats.order_and_ranks(jnp.where(wrong, place, jnp.inf))
    num_right, num_wrong = (jnp.sum(x, axis=-1, keepdims=True) for x in (right, wrong))
    number = jnp.arange(pairs)
    usable = num_right if lengths is None else jnp.minimum(num_right, 1)
    both = [
        jnp.take_along_axis(order, number % jnp.maximum(count, 1), axis=-1)
        for order, count in ((chosen, usable), (rejected, num_wrong))
    ]
    indices, most = jnp.stack(both, axis=-1), jnp.maximum(usable, num_wrong)
    there = (number < most) & (num_right > 0) & (num_wrong > 0)
    return SelectedPairs(jnp.where(there[..., None], indices, -1).astype(jnp.int32), there)


def win_rate_matrix(scores: Array) -> Array:
    """The probability that one response beats another, from Bradley-Terry scores.

        P_ij = sigmoid(s_i - s_j)

    Args:
      scores: ``[..., K]``, floating point.

    Returns:
      ``[..., K, K]`` float32; ``P_ij + P_ji = 1``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.curation.win_rate_matrix(jnp.array([1.0, 0.0]))[0].round(4).tolist()
      [0.5, 0.731...]

    References:
      SPPO (arXiv:2405.00675), the released script ``compute_prob.py``, on scores of PairRM.
    """
    checks.check_min_rank("win_rate_matrix", 1, scores=scores)
    checks.check_float("win_rate_matrix", scores=scores)
    scores = jnp.asarray(scores, jnp.float32)
    return jax.nn.sigmoid(scores[..., :, None] - scores[..., None, :])


def mean_win_rate(
    probabilities: Array, *, where: Array | None = None, include_self: bool = True
) -> Array:
    """Mean probability that each response of a group beats the others.

        p_i = mean over j of P_ij

    Args:
      probabilities: ``[..., K, K]``, floating point, in [0, 1]: that i beats j, of
        :func:`win_rate_matrix` or of a judge.
      where: bool ``[..., K]``, True for the responses that take part; None for all.
      include_self: Whether the mean includes j = i, with probability 1/2.

    Returns:
      ``[..., K]`` float32, 0 where masked; 0 for a group of one if ``include_self`` is False.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rates = jr.curation.win_rate_matrix(jnp.array([1.0, 0.0, -1.0]))
      >>> jr.curation.mean_win_rate(rates).round(4).tolist()
      [0.7039..., 0.5, 0.296...]

    References:
      SPPO (arXiv:2405.00675), the released script, which counts the response itself.
    """
    function = "mean_win_rate"
    checks.check_min_rank(function, 2, probabilities=probabilities)
    checks.check_float(function, probabilities=probabilities)
    checks.check_bool(function, where=where)
    shape = jnp.shape(probabilities)
    checks.check_shape(function, "probabilities", probabilities, (*shape[:-1], shape[-2]))
    valid = jnp.ones(shape[:-1], bool) if where is None else jnp.asarray(where)
    checks.check_shape(function, "where", valid, shape[:-1])
    others = jnp.broadcast_to(valid[..., None, :], shape)
    itself = jnp.eye(shape[-1], dtype=bool)
    others = others if include_self else others & ~itself
    # What a judge says of a response and itself is not read.
    rates = jnp.where(itself, 0.5, jnp.asarray(probabilities, jnp.float32))
    return masking.zero_masked(masking.masked_mean(rates, others, axis=-1), valid)


def missing_eos_penalty(
    rewards: Array, *, truncated: Array, penalty: float, where: Array | None = None
) -> Array:
    """Lowers the reward of truncated responses, so that they are not chosen.

        r_i - penalty where truncated_i, else r_i

    Args:
      rewards, where: See the module; masked responses get 0.
      truncated: bool ``[..., G]``, True where the response ended by its length, not by a stop.
      penalty: In units of reward, above 0. If it exceeds the range of the rewards, no truncated
        response is chosen over a complete one.

    Returns:
      ``[..., G]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> truncated = jnp.array([True, False])
      >>> jr.curation.missing_eos_penalty(
      ...     jnp.array([0.75, 0.5]), truncated=truncated, penalty=1.0).tolist()
      [-0.25, 0.5]

    References:
      ``missing_eos_penalty`` of TRL's online DPO (arXiv:2402.04792), Nash-MD and XPO trainers.
    """
    function = "missing_eos_penalty"
    stats.check_group(function, rewards, where)
    checks.check_bool(function, truncated=truncated)
    checks.check_same_shape(function, rewards=rewards, truncated=truncated)
    checks.check_positive(function, finite=True, penalty=penalty)
    rewards = masking.zero_masked(rewards, where)
    return masking.zero_masked(rewards - penalty * jnp.asarray(truncated), where)
