"""Losses of lists: several responses to one prompt, in the order of their labels.

Shared arguments:
  ``scores``: ``[..., K]``, floating point, one per response: an implicit reward
    (:func:`implicit_rewards`), or the output of a reward model.
  ``labels``: ``[..., K]``, numbers, the greater the better, such as a reward in [0, 1] or
    ``curation.mean_win_rate``. Pass ranks negated, because rank 1 is the best.
  ``where``: bool ``[..., K]``, True for valid responses; the others are ignored. None for
    all.
  ``reduce``: "sum" adds the losses of all pairs of a list; "mean" divides by the number of pairs,
    so that a long list counts as much as a short one.

Each loss returns one float32 value per list, to be averaged over the lists. A pair is two responses
whose labels differ; a list without a pair has loss 0. A NaN label makes the loss NaN. All raise
TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats

# Stands for the score of a response that is not there; finite, so that no gradient is NaN.
_LEAST = -1e30


def implicit_rewards(
    logp: Array, ref_logp: Array, *, beta: float = 0.1, where: Array | None = None
) -> Array:
    """The implicit rewards of a policy relative to a reference: the scores of DPO and LiPO.

        s = beta (logp - ref_logp)

    No gradient flows into the reference.

    Args:
      logp: ``[...]``, floating point, log-probability (nats) of the response under the policy,
        summed over its tokens.
      ref_logp: ``[...]``, the same under the reference.
      beta: Above 0.
      where: As in the module; masked entries are 0.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.preferences.implicit_rewards(jnp.array([-2.0]), jnp.array([-6.0]), beta=0.5).tolist()
      [2.0]

    References:
      Rafailov et al., DPO (arXiv:2305.18290).
    """
    function = "implicit_rewards"
    checks.check_float(function, logp=logp, ref_logp=ref_logp)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, logp=logp, ref_logp=ref_logp, where=where)
    checks.check_positive(function, finite=True, beta=beta)
    return beta * masking.safe_log_ratio(logp, jax.lax.stop_gradient(ref_logp), where)


def lipo_lambda(
    scores: Array,
    labels: Array,
    *,
    where: Array | None = None,
    reduce: Literal["sum", "mean"] = "sum",
) -> Array:
    """LiPO-lambda: the weight of a pair is how much swapping it would change the discounted gain.

        loss = sum over pairs with y_i > y_j of w_ij log(1 + exp(-(s_i - s_j)))
        w_ij = |2^y_i - 2^y_j| |1 / log(1 + rank_i) - 1 / log(1 + rank_j)|

    The rank is 1 for the greatest score; ties go to the earlier response. No gradient flows into
    the weights. Logarithms of base 2 would multiply the loss by log 2.

    Args:
      scores, labels, where, reduce: See the module; the paper's labels are in [0, 1].

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> scores, labels = jnp.array([0.2, 0.4, -0.1]), jnp.array([1.0, 0.5, 0.0])
      >>> round(float(jr.preferences.lipo_lambda(scores, labels)), 4)
      0.4953

    References:
      Liu et al., LiPO (arXiv:2402.01878), PAPER, from a note on it: 8 responses a prompt, beta
      0.05. The note prints the gain as 2 y - 1; that of LambdaLoss is 2^y - 1.
    """
    x = _prepare("lipo_lambda", scores, labels, where, reduce)
    fixed = jax.lax.stop_gradient(x.scores)
    _, place = stats.order_and_ranks(jnp.where(x.valid, -fixed, jnp.inf))
    discount = 1.0 / jnp.log(2.0 + place)
    gain = jnp.abs(_differences(jnp.exp2(x.labels)))
    gain = jnp.where(_differences(x.labels) > 0, gain, 0.0)  # of pairs only, if it overflows
    weights = gain * jnp.abs(_differences(discount))
    return _over_pairs(weights * jax.nn.softplus(-_differences(x.scores)), x, reduce)


def pair_logistic(
    scores: Array,
    labels: Array,
    *,
    where: Array | None = None,
    reduce: Literal["sum", "mean"] = "sum",
) -> Array:
    """The logistic loss of all pairs of a list: DPO, or a reward model, on a ranking.

        loss = sum over pairs with y_i > y_j of log(1 + exp(-(s_i - s_j)))

    For two responses it is :func:`dpo`, or :func:`bradley_terry`. With ``reduce="mean"`` it is the
    loss of InstructGPT's reward model on a ranked group. Equal labels form no pair.

    Args:
      scores, labels, where, reduce: See the module.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.preferences.pair_logistic(jnp.zeros(3), jnp.array([2, 1, 0]), reduce="mean").round(4)
      Array(0.6931, dtype=float32)

    References:
      Liu et al., LiPO (arXiv:2402.01878), DPO on all pairs; Ouyang et al., InstructGPT
      (arXiv:2203.02155). PAPER.
    """
    x = _prepare("pair_logistic", scores, labels, where, reduce)
    return _over_pairs(jax.nn.softplus(-_differences(x.scores)), x, reduce)


def pair_hinge(
    scores: Array,
    labels: Array,
    *,
    margin: float = 1.0,
    where: Array | None = None,
    reduce: Literal["sum", "mean"] = "sum",
) -> Array:
    """The hinge loss of all pairs of a list: SLiC on a ranking.

        loss = sum over pairs with y_i > y_j of max(0, margin - (s_i - s_j))

    Args:
      scores, labels, where, reduce: See the module.
      margin: Not negative.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> float(jr.preferences.pair_hinge(jnp.array([2.0, 0.5, 0.0]), jnp.array([2, 1, 0])))
      0.5

    References:
      Liu et al., LiPO (arXiv:2402.01878), SLiC on all pairs. PAPER, from a note on it.
    """
    x = _prepare("pair_hinge", scores, labels, where, reduce)
    checks.check_non_negative("pair_hinge", finite=True, margin=margin)
    return _over_pairs(jax.nn.relu(margin - _differences(x.scores)), x, reduce)


def list_softmax(scores: Array, labels: Array, *, where: Array | None = None) -> Array:
    """The cross-entropy between the softmax of the labels and the softmax of the scores.

        loss = -sum_i softmax(y)_i log softmax(s)_i

    The minimum, which is not 0, is where the scores equal the labels up to a constant. A list with
    fewer than two responses has loss 0.

    Args:
      scores, labels, where: See the module.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> scores, labels = jnp.array([0.2, 0.4, -0.1]), jnp.array([1.0, 0.5, 0.0])
      >>> round(float(jr.preferences.list_softmax(scores, labels)), 4)
      1.0804

    References:
      Cao et al., ListNet (ICML 2007), with the labels as scores; a member of LiPO's framework
      (arXiv:2402.01878).
    """
    x = _prepare("list_softmax", scores, labels, where)
    weights = snis_weights(x.labels, where=x.valid)
    terms = masking.zero_masked(weights * _log_softmax(x.scores, x.valid), x.valid)
    several = jnp.sum(x.valid, axis=-1) > 1
    return jnp.where(several, -jnp.sum(terms, axis=-1), 0.0)


def plackett_luce(
    scores: Array, labels: Array, *, top_m: int | None = None, where: Array | None = None
) -> Array:
    """The likelihood of a ranking drawn by softmax from the best response to the worst: ListMLE.

        loss = sum over i of [log(exp(s_i) + sum over j with y_j < y_i of exp(s_j)) - s_i]

    Responses with equal labels are not compared with each other. For two responses it is the
    logistic loss. With ``top_m`` only the terms of responses with fewer than m better responses
    count.

    Args:
      scores, labels, where: See the module.
      top_m: How many of the top places count, at least 1; None for all.

    Returns:
      ``[...]`` float32; 0 for a list whose labels are all equal.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> scores, labels = jnp.array([0.2, 0.4, -0.1]), jnp.array([2, 1, 0])
      >>> jr.preferences.plackett_luce(scores, labels).round(4)
      Array(1.56, dtype=float32)

    References:
      Rafailov et al., DPO (arXiv:2305.18290), its appendix on rankings; Xia et al., ListMLE
      (ICML 2008).
    """
    x = _prepare("plackett_luce", scores, labels, where)
    if top_m is not None:
        checks.check_count("plackett_luce", top_m=top_m)
    lower = (x.labels[..., :, None] > x.labels[..., None, :]) & x.valid[..., None, :]
    rivals = lower | jnp.eye(jnp.shape(x.scores)[-1], dtype=bool)
    others = jnp.where(rivals, x.scores[..., None, :], _LEAST)
    losses = jax.nn.logsumexp(others, axis=-1) - x.scores
    counts = x.valid
    if top_m is not None:
        higher = (x.labels[..., :, None] < x.labels[..., None, :]) & x.valid[..., None, :]
        counts = counts & (jnp.sum(higher, axis=-1) < top_m)
    return jnp.sum(jnp.where(counts, losses, 0.0), axis=-1) + x.unknown


def brain(
    logp: Array,
    ref_logp: Array,
    behavior_logp: Array,
    rewards: Array,
    *,
    temperature: float = 1.0,
    baseline: bool = True,
    where: Array | None = None,
) -> Array:
    """BRAIn: distills the posterior over good responses from weighted samples.

        a = softmax(ref_logp + rewards / temperature - behavior_logp)     over the samples
        b = softmax(logp - behavior_logp)
        loss = sum_i a_i (log a_i - log b_i),   gradient -sum_i (a_i - b_i) grad logp_i
        baseline=False:  loss = -sum_i a_i logp_i

    The weights a follow the posterior and the weights b follow the policy; b is a baseline that
    removes most of the variance. No gradient flows into a. The log-probabilities of long responses
    make a nearly one-hot; a higher temperature smooths it. For two samples with rewards far apart
    it is :func:`dpo` with ``beta=1`` and the policy that sampled as the reference.

    Args:
      logp: ``[..., K]``, floating point, log-probability (nats) of each response under the policy
        being trained, summed over its tokens.
      ref_logp: ``[..., K]``, under the prior: the model before any training on rewards.
      behavior_logp: ``[..., K]``, under the policy that sampled.
      rewards: ``[..., K]``, floating point.
      temperature: Temperature of the reward, above 0.
      baseline: Whether b is subtracted.
      where: See the module.

    Returns:
      ``[...]`` float32; 0 for fewer than two samples with the baseline.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> prior = jnp.array([-5.0, -6.0])
      >>> loss = jr.preferences.brain(
      ...     jnp.array([-4.5, -6.2]), prior, prior, jnp.array([1.0, 0.0]))
      >>> round(float(loss), 6)
      0.009242

    References:
      Pandey et al., BRAIn (arXiv:2402.02479), and the estimators of its released code; the
      posterior is an ABSTRACT reading.
    """
    function = "brain"
    arrays = {"logp": logp, "ref_logp": ref_logp, "behavior_logp": behavior_logp}
    checks.check_arrays(function, {**arrays, "rewards": rewards}, where=where)
    checks.check_bool(function, where=where)
    checks.check_positive(function, finite=True, temperature=temperature)
    valid = jnp.ones(jnp.shape(logp), bool) if where is None else jnp.asarray(where)
    policy, ref, behavior, rewards = (
        masking.zero_masked(x, valid) for x in (logp, ref_logp, behavior_logp, rewards)
    )
    ref, behavior, rewards = jax.lax.stop_gradient((ref, behavior, rewards))
    log_a = _log_softmax(ref + rewards / temperature - behavior, valid)
    a = masking.zero_masked(jnp.exp(log_a), valid)
    if not baseline:
        return -jnp.sum(a * policy, axis=-1)
    log_b = _log_softmax(policy - behavior, valid)
    # A weight that is 0 in float32 adds nothing, though its logarithm may be -inf.
    return jnp.sum(jnp.where(a == 0, 0.0, a * (log_a - log_b)), axis=-1)


def snis_weights(log_weights: Array, *, where: Array | None = None) -> Array:
    """Self-normalized importance weights: the softmax of log weights over a group.

        w_i = exp(l_i) / sum_j exp(l_j)

    Args:
      log_weights: ``[..., K]``, floating point.
      where: See the module; masked entries get 0.

    Returns:
      ``[..., K]`` float32, adding up to 1, or all 0 for an empty group.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.preferences.snis_weights(jnp.log(jnp.array([1.0, 3.0]))).round(4).tolist()
      [0.25, 0.75]

    References:
      The weights of BRAIn (arXiv:2402.02479) and of its released code.
    """
    checks.check_min_rank("snis_weights", 1, log_weights=log_weights)
    checks.check_float("snis_weights", log_weights=log_weights)
    checks.check_bool("snis_weights", where=where)
    checks.check_same_shape("snis_weights", log_weights=log_weights, where=where)
    valid = jnp.ones(jnp.shape(log_weights), bool) if where is None else jnp.asarray(where)
    return masking.zero_masked(jnp.exp(_log_softmax(log_weights, valid)), valid)


class _List(NamedTuple):
    scores: Array  # float32, 0 where masked
    labels: Array
    valid: Array
    unknown: Array  # [...], 0, or NaN for a list with a NaN label


def _prepare(function, scores, labels, where, reduce="sum") -> _List:
    """The shared arguments, checked, in float32."""
    checks.check_min_rank(function, 1, scores=scores, labels=labels)
    checks.check_float(function, scores=scores)
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, scores=scores, labels=labels, where=where)
    checks.check_option(function, "reduce", reduce, ("sum", "mean"))
    valid = jnp.ones(jnp.shape(scores), bool) if where is None else jnp.asarray(where)
    labels = jax.lax.stop_gradient(masking.zero_masked(labels, valid))
    unknown = jnp.where(jnp.any(jnp.isnan(labels), axis=-1), jnp.nan, 0.0)
    return _List(masking.zero_masked(scores, valid), labels, valid, unknown)


def _differences(x: Array) -> Array:
    """``x_i - x_j`` of all pairs: ``[..., K] -> [..., K, K]``."""
    return x[..., :, None] - x[..., None, :]


def _over_pairs(losses: Array, x: _List, reduce: str) -> Array:
    """The sum or the mean of ``[..., K, K]`` over the pairs of each list."""
    pairs = (_differences(x.labels) > 0) & x.valid[..., :, None] & x.valid[..., None, :]
    total = jnp.sum(jnp.where(pairs, losses, 0.0), axis=(-1, -2))
    if reduce == "mean":
        total = total / jnp.maximum(jnp.sum(pairs, axis=(-1, -2)), 1)
    return total + x.unknown


def _log_softmax(x: Array, valid: Array) -> Array:
    """Over the valid entries of the last axis; what the others get is not to be read."""
    return jax.nn.log_softmax(jnp.where(valid, jnp.asarray(x, jnp.float32), _LEAST), axis=-1)
