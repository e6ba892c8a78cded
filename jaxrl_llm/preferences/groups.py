"""Preference losses as surrogates: over the pairs of a group, over its list, or per response.

A surrogate sums the log-probabilities over the tokens of each response, passes the arrays that a
loss names to that loss, and repeats the result over the tokens. With ``aggregate.group_mean`` the
loss of a batch is the mean over groups; with ``aggregate.sequence_mean`` it is the mean over
responses.

Several rollouts may tie for the best or the worst of their group: with rewards 0 and 1, all correct
ones and all incorrect ones. A group whose rollouts are all equal has no pair. All raise TypeError
for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import (
    Array,
    Transform,
    accepted,
    call_with,
    checks,
    masking,
    prints_as_call,
    traits,
)
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.preferences.anchored import mpo
from jaxrl_llm.preferences.iterated import nash_md
from jaxrl_llm.preferences.token_weights import desensitized_logp


@traits(
    takes_correction=False,
    policy_gradient=False,
    level="sequence",
    orders_responses=True,
    compares_extremes=True,
)
def paired(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    ref_logp: Array | None,
    behavior_logp: Array | None = None,
    win_rates: Array | None = None,
    center: float | Array | None = None,
    margins: Array | None = None,
    alignment: Array | None = None,
    from_reference: Array | None = None,
    gold: bool = False,
    excess: float = 1.0,
    max_alignment: float | None = None,
    reference: Literal["fixed", "behavior"] = "fixed",
    loss: Callable = mpo,
) -> Array:
    """A loss of pairs as a surrogate: the best rollouts of each group against the worst.

        loss[i, t] = mean over w and l of loss(w, l)        at every token of the group
        w, l = the rollouts of the greatest and of the least advantage
        from_reference:  w, l = each of the policy with each of the reference, the better one first
        gold:            the best is a third response, and w, l are of the others

    The log-probabilities are summed over the tokens of a rollout. A group without a pair has loss 0
    but still counts in a mean; :func:`jaxrl_llm.curation.informative_groups` leaves it out.
    ``aggregate.group_mean`` makes the loss the mean over the groups.

    Args:
      logp: ``[..., G, T]``, floating point, log-probabilities (nats) of tokens under the policy.
      old_logp: Not used; the loss compares with the reference instead.
      mask: bool ``[..., G, T]``, True for tokens that count.
      ref_logp: ``[..., G, T]``, like ``logp``, under the reference; None for a loss without one.
      advantages: ``[..., G]``, one value per rollout; only their order matters.
      behavior_logp: ``[..., G, T]``, under the policy that sampled: the ``previous`` policy of a
        loss that names it, such as :func:`inpo`.
      win_rates: ``[..., G]``, one per rollout, for a loss that names them, such as :func:`sppo`.
      center: ``[]`` or an array of one value, for a loss that names it; None for its default. A
        :func:`running_center` has the same ``excess``.
      margins: ``[...]``, one per group, the ``margin`` of a loss that names it; those of
        ``recipes.aot`` have the same ``excess``.
      alignment: ``[..., G]``, not negative, such as :func:`alignment_weights`; the weight of a pair
        is the product of its two values.
      from_reference: bool ``[..., G]``, True for responses that the reference sampled; a loss that
        names ``policy_chosen`` receives whether the policy sampled the chosen response.
      gold: Whether the best response of a group is the ``target`` of a loss that names it, such as
        :func:`tpo`; the first of several.
      excess: In [0, 1], the weight of a token past the length of the other response of its pair,
        as in :func:`desensitized_logp`.
      max_alignment: Largest weight of a pair by its alignment, above 0; None for no limit.
      reference: "behavior" makes the policy that sampled the reference; ``ref_logp`` is then None.
      loss: A loss of pairs, such as ``bind(preferences.dpo, beta=0.5)``; it receives the arrays
        that it names.

    Returns:
      Token loss ``[..., G, T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.full((2, 3), -1.0)
      >>> loss = jr.preferences.paired(
      ...     logp, None, jnp.array([1.0, -1.0]), jnp.ones((2, 3), bool),
      ...     ref_logp=logp, loss=jr.preferences.dpo)
      >>> loss[:, 0].round(4).tolist()
      [0.693..., 0.693...]

    References:
      Wang et al., MPO (arXiv:2411.10442), pairs of right and wrong samples of the policy; Skywork
      R1V2 (arXiv:2504.16656). Weighting every group equally is ours.
    """
    function = "paired"
    del old_logp
    checks.check_min_rank(function, 2, logp=logp)
    checks.check_float(function, advantages=advantages)
    checks.check_shape(function, "advantages", advantages, jnp.shape(logp)[:-1])
    masking.check_tokens(function, mask, logp=logp, ref_logp=ref_logp, behavior_logp=behavior_logp)
    checks.check_option(function, "reference", reference, ("fixed", "behavior"))
    if reference == "behavior":
        if ref_logp is not None or behavior_logp is None:
            raise ValueError(
                f"{function}: reference='behavior' takes behavior_logp, and ref_logp must be None."
            )
        ref_logp = behavior_logp
    checks.check_positive(function, finite=True, max_alignment=max_alignment)
    if max_alignment is not None and alignment is None:
        raise ValueError(
            f"{function}: max_alignment={max_alignment!r} has no effect without alignment."
        )
    extra: dict[str, Array] = {}
    if center is not None:
        extra["center"] = _scalar(function, "center", center, loss)
    there, lengths = jnp.any(mask, axis=-1), jnp.maximum(masking.lengths(mask), 1.0)
    size = jnp.shape(lengths)[-1]

    def spread(x: Array) -> Array:
        """Of the first response of each pair ``[..., G, G]``."""
        return jnp.repeat(x[..., None], size, -1)

    checks.check_share(function, excess=excess)
    others = there
    if gold:
        _check_named(function, "gold", "target_logp", loss)
        values = jax.lax.stop_gradient(jnp.where(there, advantages, -jnp.inf))
        first = jnp.arange(size) == jnp.argmax(values, axis=-1)[..., None]
        others = there & ~first
        for name, x in (("target_logp", _sums(logp, mask)), ("target_lengths", lengths)):
            target = jnp.sum(jnp.where(first, x, 0.0), axis=-1)
            extra[name] = jnp.broadcast_to(target[..., None, None], (*jnp.shape(x), size))
    shares = _pairs(function, advantages, others, from_reference)
    of_tokens = {"logp": logp, "ref_logp": ref_logp, "previous_logp": behavior_logp}
    named = {k: pair_sums(x, mask, excess=excess) for k, x in of_tokens.items() if x is not None}
    named["lengths"] = spread(lengths)
    for name, x in (("win_rates", win_rates), ("alignment", alignment)):
        if x is not None:
            checks.check_alike(function, {name: x, "advantages": advantages})
    if win_rates is not None:
        named["win_rate"] = spread(win_rates)
    if margins is not None:
        _check_named(function, "margins", "margin", loss)
        checks.check_shape(function, "margins", margins, jnp.shape(shares)[:-2])
        extra["margin"] = jnp.broadcast_to(margins[..., None, None], jnp.shape(shares))
    if from_reference is not None:
        extra["policy_chosen"] = spread(~jnp.asarray(from_reference))
    weights, compared = jnp.float32(1.0), shares > 0
    if alignment is not None:
        each = jax.lax.stop_gradient(masking.zero_masked(alignment, there))
        weights = each[..., :, None] * each[..., None, :]
        if max_alignment is not None:
            weights = jnp.minimum(weights, max_alignment)
        compared &= ~(weights == 0)  # its gradient may be infinite; a NaN must reach the loss
    for name, x in named.items():  # pairs that are not compared may have an infinite loss
        none = 1.0 if name == "lengths" else 0.0
        extra[f"chosen_{name}"] = jnp.where(compared, x, none)
        extra[f"rejected_{name}"] = jnp.where(compared, jnp.swapaxes(x, -1, -2), none)
    losses = _call(function, loss, extra | {"where": compared})
    losses = masking.product(weights, masking.zero_masked(losses, compared))
    value = jnp.sum(shares * losses, axis=(-1, -2))
    # A NaN advantage has no order and must reach the loss.
    unknown = jnp.any(jnp.isnan(masking.zero_masked(advantages, there)), axis=-1)
    value = jnp.where(unknown, jnp.nan, value)
    return masking.zero_masked(jnp.broadcast_to(value[..., None, None], jnp.shape(mask)), mask)


@traits(takes_correction=False, policy_gradient=False, level="sequence", orders_responses=True)
def listed(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    rewards: Array,
    ref_logp: Array | None,
    behavior_logp: Array | None,
    beta: float = 0.1,
    loss: Callable,
) -> Array:
    """A listwise loss as a surrogate, over all responses of a group at once.

        loss[i, t] = loss(scores, labels)        at every token of the group
        scores = beta (logp - ref_logp), summed over each response;   labels = rewards

    Args:
      logp: ``[..., G, T]``, floating point, log-probabilities (nats) of tokens under the policy.
      old_logp: ``[..., G, T]``, under the policy before the step, for a loss that names it; None
        means the policy itself.
      advantages: Not used; the loss reads the rewards instead.
      mask: bool ``[..., G, T]``, True for tokens that count.
      rewards: ``[..., G]``; the loss uses their order or their values.
      ref_logp: ``[..., G, T]``, under the reference; None for a loss without one.
      behavior_logp: ``[..., G, T]``, under the policy that sampled; None if the loss needs none.
      beta: Scale of the scores, above 0.
      loss: A listwise loss, such as :func:`lipo_lambda`, :func:`p3o` or :func:`brain`. It receives
        the arrays that it names among ``scores``, ``labels``, ``logp``, ``old_logp``, ``ref_logp``,
        ``behavior_logp``, ``rewards`` and ``where``, all ``[..., G]``.

    Returns:
      Token loss ``[..., G, T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.full((2, 3), -1.0)
      >>> loss = jr.preferences.listed(
      ...     logp, None, jnp.zeros(2), jnp.ones((2, 3), bool), rewards=jnp.array([1.0, 0.0]),
      ...     ref_logp=logp, behavior_logp=None, loss=jr.preferences.plackett_luce)
      >>> loss[:, 0].round(4).tolist()
      [0.693..., 0.693...]

    References:
      Liu et al., LiPO (arXiv:2402.01878).
    """
    function = "listed"
    del advantages
    checks.check_min_rank(function, 2, logp=logp)
    old_logp = jax.lax.stop_gradient(logp) if old_logp is None else old_logp
    tokens = {"logp": logp, "old_logp": old_logp}
    tokens |= {"ref_logp": ref_logp, "behavior_logp": behavior_logp}
    checks.check_mask(function, mask)
    checks.check_arrays(function, tokens, mask=mask)
    checks.check_float(function, rewards=rewards)
    checks.check_shape(function, "rewards", rewards, jnp.shape(logp)[:-1])
    checks.check_positive(function, finite=True, beta=beta)
    where = jnp.any(mask, axis=-1)
    context = {name: _sums(x, mask) for name, x in tokens.items() if x is not None}
    rewards = masking.zero_masked(rewards, where)
    context |= {"rewards": rewards, "labels": rewards, "where": where}
    if ref_logp is not None:
        ratio = masking.safe_log_ratio(logp, jax.lax.stop_gradient(ref_logp), mask)
        context["scores"] = beta * jnp.sum(ratio, axis=-1)
    value = _call(function, loss, context)
    return masking.zero_masked(jnp.broadcast_to(value[..., None, None], jnp.shape(mask)), mask)


@traits(
    takes_correction=False,
    policy_gradient=False,
    level="sequence",
    orders_responses=True,
    supervised=True,
)
def single(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    rewards: Array,
    ref_logp: Array | None,
    kl: float | Array | None = None,
    center: float | Array | None = None,
    density: Array | None = None,
    loss: Callable,
) -> Array:
    """A loss of single responses as a surrogate: each response is either desirable or not.

        loss[i, t] = loss(response i, desirable[i])        at every token of the response
        desirable = rewards > 0

    Args:
      logp: ``[..., G, T]``, floating point, log-probabilities (nats) of tokens under the policy.
      old_logp, advantages: Not used; the loss reads the reference and the rewards instead.
      mask: bool ``[..., G, T]``, True for tokens that count.
      rewards: ``[..., G]``; only their sign matters.
      ref_logp: ``[..., G, T]``, under the reference; None for a loss without one.
      kl: ``[]`` or an array of one value, for a loss that names it, such as :func:`kto`.
      center: The same, for a loss such as :func:`bco_unpaired`.
      density: ``[...]``, not negative, the weight of an undesirable response of each group, such as
        ``curation.density_ratios``; None for 1.
      loss: A loss of responses. It receives the arrays that it names among ``logp``, ``ref_logp``,
        ``chosen_logp`` (the same as ``logp``), ``chosen_lengths``, ``desirable`` and ``where``, all
        ``[..., G]``.

    Returns:
      Token loss ``[..., G, T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp = jnp.full((2, 3), -1.0)
      >>> loss = jr.preferences.single(
      ...     logp, None, jnp.zeros(2), jnp.ones((2, 3), bool), rewards=jnp.array([1.0, 0.0]),
      ...     ref_logp=logp, kl=0.0, loss=jr.preferences.kto)
      >>> loss[:, 0].tolist()
      [0.5, 0.5]

    References:
      Ethayarajh et al., KTO (arXiv:2402.01306).
    """
    function = "single"
    del old_logp, advantages
    checks.check_min_rank(function, 2, logp=logp)
    masking.check_tokens(function, mask, logp=logp, ref_logp=ref_logp)
    checks.check_float(function, rewards=rewards)
    checks.check_shape(function, "rewards", rewards, jnp.shape(logp)[:-1])
    where = jnp.any(mask, axis=-1)
    policy = _sums(logp, mask)
    context = {"logp": policy, "chosen_logp": policy, "where": where}
    context["desirable"] = masking.zero_masked(rewards, where) > 0
    context["chosen_lengths"] = jnp.maximum(masking.lengths(mask), 1.0)
    for name, x in (("kl", kl), ("center", center)):
        if x is not None:
            context[name] = _scalar(function, name, x, loss)
    if ref_logp is not None:
        context["ref_logp"] = _sums(ref_logp, mask)
    weights = jnp.float32(1.0)
    if density is not None:
        checks.check_float(function, density=density)
        checks.check_shape(function, "density", density, jnp.shape(rewards)[:-1])
        weights = jnp.where(context["desirable"], 1.0, jnp.asarray(density)[..., None])
        context["where"] &= ~(weights == 0)
    value = masking.product(weights, _call(function, loss, context))
    return masking.zero_masked(jnp.broadcast_to(value[..., None], jnp.shape(mask)), mask)


@traits(takes_correction=False, policy_gradient=False, level="sequence", has_ratio=False)
def played(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    win_rates: Array,
    ref_logp: Array,
    beta: float = 0.1,
) -> Array:
    """Nash mirror descent as a surrogate: each response is weighted by how often it wins.

        loss[i, t] = nash_md(response i, win_rates[i])        at every token of the response

    Args:
      logp: ``[..., G, T]``, floating point, log-probabilities (nats) of tokens under the policy.
      old_logp, advantages: Not used; the loss reads the win rates instead.
      mask: bool ``[..., G, T]``, True for tokens that count.
      win_rates: ``[..., G]``, such as :func:`mixture_win_rates`.
      ref_logp: ``[..., G, T]``, under the reference.
      beta: As in :func:`nash_md`.

    Returns:
      Token loss ``[..., G, T]``, float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.full((1, 2), -1.0), jnp.ones((1, 2), bool)
      >>> jr.preferences.played(
      ...     logp, None, jnp.zeros(1), mask, win_rates=jnp.array([1.0]), ref_logp=logp).tolist()
      [[1.0, 1.0]]

    References:
      Munos et al., Nash-MD (arXiv:2312.00886).
    """
    del old_logp, advantages
    value = nash_md(logp, ref_logp, mask, win_rates, beta=beta)
    return masking.zero_masked(jnp.broadcast_to(value[..., None], jnp.shape(mask)), mask)


def _pairs(function: str, values: Array, where: Array, from_reference: Array | None) -> Array:
    """Shares ``[..., G, G]`` of the pairs of a group, the better response first."""
    if from_reference is None:
        best, worst = best_and_worst(values, where)
        return best[..., :, None] * worst[..., None, :]
    checks.check_bool(function, from_reference=from_reference)
    checks.check_same_shape(function, advantages=values, from_reference=from_reference)
    values, other = masking.zero_masked(values, where), jnp.asarray(from_reference)
    taken = values[..., :, None] > values[..., None, :]
    taken &= (
        where[..., :, None] & where[..., None, :] & (other[..., :, None] != other[..., None, :])
    )
    number = jnp.sum(taken, axis=(-1, -2), keepdims=True, dtype=jnp.float32)
    return taken / jnp.maximum(number, 1.0)


def _sums(logp: Array, mask: Array) -> Array:
    """Of responses, from those of tokens."""
    return jnp.sum(masking.zero_masked(logp, mask), axis=-1)


def pair_sums(logp: Array, mask: Array, *, excess: float) -> Array:
    """Sums ``[..., G, G]`` of the first response of each pair, from tokens ``[..., G, T]``.

    Tokens past the length of the second response have the weight ``excess``.
    """
    size = jnp.shape(mask)[-2]
    if excess == 1.0:
        return jnp.repeat(_sums(logp, mask)[..., None], size, -1)
    tokens, taken = (jnp.repeat(x[..., None, :], size, -2) for x in (logp, mask))
    lengths = jnp.maximum(masking.lengths(mask), 1.0)
    others = jnp.repeat(lengths[..., None, :], size, -2)
    return desensitized_logp(tokens, taken, others, alpha=excess)


def _scalar(function: str, name: str, x: float | Array, loss: Callable) -> Array:
    """A number that a loss names, without a gradient."""
    _check_named(function, name, name, loss)
    return jax.lax.stop_gradient(jnp.asarray(x, jnp.float32).reshape(-1)[0])


def _check_named(function: str, option: str, name: str, loss: Callable) -> None:
    """Raises ValueError for an option that makes what a loss does not name."""
    if name not in accepted(loss):
        raise ValueError(f"{function}: {option} has no effect on {stable_repr(loss)}.")


def _call(function: str, loss: Callable, context: dict[str, Array]) -> Array:
    """The loss, with what it names; ValueError for what it cannot do without and is not there."""
    needed = [name for name, p in accepted(loss).items() if p.default is p.empty]
    if absent := [name for name in needed if name not in context]:
        raise ValueError(f"{function}: {stable_repr(loss)} needs {', '.join(absent)}.")
    return call_with(loss, context=context)


def best_and_worst(values: Array, where: Array) -> tuple[Array, Array]:
    """Weights ``[..., G]`` of the rollouts with the greatest value of a group, and with the least.

    The weights of a group add up to 1, or are 0 where all valid values are equal.

    Example:
      >>> import jax.numpy as jnp
      >>> best, worst = best_and_worst(jnp.array([0.0, 1.0, 1.0, 9.0]), jnp.arange(4) < 3)
      >>> best.tolist(), worst.tolist()
      ([0.0, 0.5, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0])
    """
    values = jax.lax.stop_gradient(masking.zero_masked(values, where))
    greatest = jnp.max(jnp.where(where, values, -jnp.inf), axis=-1, keepdims=True)
    least = jnp.min(jnp.where(where, values, jnp.inf), axis=-1, keepdims=True)
    best, worst = (where & (values == x) & (greatest > least) for x in (greatest, least))

    def share(x: Array) -> Array:
        return x / jnp.maximum(jnp.sum(x, axis=-1, keepdims=True, dtype=jnp.float32), 1.0)

    return share(best), share(worst)


def trajectory_dpo(
    logp: Array,
    ref_logp: Array,
    mask: Array,
    rewards: Array,
    *,
    where: Array | None = None,
    beta: float = 0.05,
    turn_ids: Array | None = None,
    pairs: Array | None = None,
) -> Array:
    """DPO of all pairs of rollouts of one prompt, the loss of an implicit process reward model.

        q_i = sum over tokens of (logp - ref_logp);   with turn_ids:  / number of turns
        loss = mean over pairs with r_i > r_j of the batch of -log sigmoid(beta (q_i - q_j))

    The gradient stops at ``ref_logp``.

    Args:
      logp: ``[..., G, T]``, floating point, log-probabilities (nats) of the model being trained.
      ref_logp: ``[..., G, T]``, under the policy that sampled.
      mask: bool ``[..., G, T]``, True for sampled tokens.
      rewards: ``[..., G]``, floating point.
      where: bool ``[..., G]``, True for rollouts that take part; None for all.
      beta: Above 0.
      turn_ids: integers ``[..., G, T]``, the turn of each token, below 0 for none, for a mean over
        the turns of a rollout; None for the sum.
      pairs: ``[]``, how many pairs the mean is over. When these groups are part of a larger batch,
        pass :func:`count_pairs` of that batch; None counts the pairs of these groups.

    Returns:
      ``[]`` float32; 0 without a pair.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)
      >>> float(jr.preferences.trajectory_dpo(logp, logp, mask, jnp.array([1.0, 0.0])))
      0.693...

    References:
      OPRL or iStar (arXiv:2509.19199); the released code takes the mean over turns.
    """
    function = "trajectory_dpo"
    masking.check_tokens(function, mask, logp=logp, ref_logp=ref_logp)
    checks.check_min_rank(function, 2, logp=logp)
    checks.check_float(function, rewards=rewards)
    checks.check_bool(function, where=where)
    checks.check_shape(function, "rewards", rewards, jnp.shape(logp)[:-1])
    checks.check_same_shape(function, rewards=rewards, where=where)
    checks.check_integer(function, turn_ids=turn_ids)
    checks.check_same_shape(function, mask=mask, turn_ids=turn_ids)
    checks.check_positive(function, finite=True, beta=beta)
    valid = jnp.ones(jnp.shape(rewards), bool) if where is None else jnp.asarray(where)
    valid &= jnp.any(mask, axis=-1)
    taken = mask & valid[..., None]
    ratio = masking.safe_log_ratio(logp, jax.lax.stop_gradient(ref_logp), taken)
    q = jnp.sum(ratio, axis=-1)
    if turn_ids is not None:
        # Each turn is counted at its first token.
        ids = jnp.where(taken & (jnp.asarray(turn_ids) >= 0), turn_ids, -1)
        before = jax.lax.cummax(ids, axis=ids.ndim - 1)
        before = jnp.concatenate([jnp.full_like(ids[..., :1], -1), before[..., :-1]], axis=-1)
        q = q / jnp.maximum(jnp.sum(ids > before, axis=-1), 1)
    ordered = _ordered(rewards, valid)
    losses = jax.nn.softplus(beta * (q[..., None, :] - q[..., :, None]))
    if pairs is None:
        return masking.masked_mean(losses, ordered)
    return masking.masked_sum(losses, ordered) / jnp.maximum(pairs, 1)


def outcome_cross_entropy(
    logp: Array,
    old_logp: Array,
    mask: Array,
    rewards: Array,
    *,
    ref_logp: Array | None = None,
    where: Array | None = None,
    beta: float = 0.05,
    rollouts: Array | None = None,
) -> Array:
    """The cross entropy of outcomes, the loss of an implicit process reward model.

        q_i = sum over tokens of (logp - ref_logp)
        loss = mean over rollouts of -(r_i log sigmoid(beta q_i) + (1 - r_i) log sigmoid(-beta q_i))

    The gradient stops at the reference.

    Args:
      logp: ``[..., G, T]``, floating point, log-probabilities (nats) of the model being trained.
      old_logp: ``[..., G, T]``, under the policy that sampled.
      mask: bool ``[..., G, T]``, True for sampled tokens.
      rewards: ``[..., G]``, floating point, outcomes from 0 to 1.
      ref_logp: ``[..., G, T]``, under a reference in place of the policy; None for ``old_logp``.
      where: bool ``[..., G]``, True for rollouts that take part; None for all.
      beta: Above 0.
      rollouts: ``[]``, how many rollouts the mean is over, of a larger batch of which these groups
        are a part; None counts those of these groups. One without a token does not count.

    Returns:
      ``[]`` float32; 0 without a rollout.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old, mask = jnp.full((1, 2), -1.0), jnp.ones((1, 2), bool)
      >>> rewards, loss = jnp.array([1.0]), jr.preferences.outcome_cross_entropy
      >>> [round(float(loss(old + x, old, mask, rewards, beta=1.0)), 3) for x in (0, 1)]
      [0.693, 0.127]

    References:
      Cui et al., PRIME (arXiv:2502.01456); beta is that of the authors' recipe for verl.
    """
    function = "outcome_cross_entropy"
    masking.check_tokens(function, mask, logp=logp, old_logp=old_logp, ref_logp=ref_logp)
    checks.check_float(function, rewards=rewards)
    checks.check_bool(function, where=where)
    checks.check_shape(function, "rewards", rewards, jnp.shape(logp)[:-1])
    checks.check_same_shape(function, rewards=rewards, where=where)
    checks.check_positive(function, finite=True, beta=beta)
    valid = jnp.any(mask, axis=-1)
    valid = valid if where is None else valid & where
    taken = mask & valid[..., None]
    reference = jax.lax.stop_gradient(old_logp if ref_logp is None else ref_logp)
    q = beta * jnp.sum(masking.safe_log_ratio(logp, reference, taken), axis=-1)
    losses = jax.nn.softplus(q) - masking.zero_masked(rewards, valid) * q
    if rollouts is None:
        return masking.masked_mean(losses, valid)
    return masking.masked_sum(losses, valid) / jnp.maximum(rollouts, 1)


def count_pairs(rewards: Array, mask: Array, *, where: Array | None = None) -> Array:
    """How many pairs of rollouts of one prompt differ in their rewards.

    Args:
      rewards: ``[..., G]``, floating point.
      mask: bool ``[..., G, T]``; a rollout without a token makes no pair.
      where: bool ``[..., G]``, True for rollouts that take part; None for all.

    Returns:
      int32 ``[]``, over all groups.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> rewards = jnp.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
      >>> int(jr.preferences.count_pairs(rewards, jnp.ones((2, 3, 4), bool)))
      2

    References:
      The denominator of :func:`trajectory_dpo`.
    """
    function = "count_pairs"
    checks.check_float(function, rewards=rewards)
    checks.check_bool(function, mask=mask, where=where)
    checks.check_min_rank(function, 2, mask=mask)
    checks.check_shape(function, "rewards", rewards, jnp.shape(mask)[:-1])
    checks.check_same_shape(function, rewards=rewards, where=where)
    there = jnp.any(mask, axis=-1)
    return jnp.sum(_ordered(rewards, there if where is None else there & where), dtype=jnp.int32)


def _ordered(rewards: Array, valid: Array) -> Array:
    """Bool ``[..., G, G]``, whether the first of a pair has the higher reward."""
    rewards = masking.zero_masked(rewards, valid)
    higher = rewards[..., :, None] > rewards[..., None, :]
    return higher & valid[..., :, None] & valid[..., None, :]


class RunningCenter(NamedTuple):
    """State of :func:`running_center`.

    Attributes:
      mean: float32 ``[]``.
      count: float32 ``[]``, how many groups with pairs the mean is over.
    """

    mean: Array
    count: Array

    @classmethod
    def empty(cls) -> "RunningCenter":
        """The state before the first pair."""
        return cls(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

    def including(self, rewards: Array, where: Array) -> "RunningCenter":
        """The state after more rewards, of which those with False in ``where`` do not count."""
        count = self.count + jnp.sum(where, dtype=jnp.float32)
        error = jnp.sum(jnp.where(where, rewards - self.mean, 0.0))
        return RunningCenter(self.mean + error / jnp.maximum(count, 1.0), count)


@dataclasses.dataclass(frozen=True)
class _Center:
    """The update half of :func:`running_center`."""

    beta: float
    excess: float

    def __call__(self, rewards, state, *, where, old_logp, ref_logp, mask):
        best, worst = best_and_worst(rewards, where & jnp.any(mask, axis=-1))
        kept = mask & where[..., None]
        ratios = masking.safe_log_ratio(old_logp, ref_logp, kept)
        implicit = self.beta * pair_sums(ratios, kept, excess=self.excess)
        pairs = best[..., :, None] * worst[..., None, :]
        both = (implicit, jnp.swapaxes(implicit, -1, -2))
        middle = sum(jnp.sum(masking.product(pairs, x), axis=(-1, -2)) for x in both) / 2
        state = state.including(middle, jnp.any(best > 0, axis=-1))
        return state.mean, state


@prints_as_call
def running_center(*, beta: float = 0.1, excess: float = 1.0) -> Transform:
    """The mean implicit reward of all pairs so far, the ``center`` of :func:`paired`.

        d = mean over groups of (mean x_w + mean x_l) / 2,   x = beta (old_logp - ref_logp)

    The mean includes the current batch. It is 0 before the first pair.

    Args:
      beta: The ``beta`` of the loss, above 0.
      excess: That of :func:`paired`, in [0, 1].

    Returns:
      A Transform ``rewards [..., G] -> []`` for ``Computed("center", ..., "controller")``; it takes
      ``where``, and ``old_logp``, ``ref_logp`` and ``mask`` ``[..., G, T]``. Its state is a
      :class:`RunningCenter`.

    Raises:
      ValueError: If ``beta`` is not above 0, or ``excess`` not in [0, 1].

    Example:
      >>> import jaxrl_llm as jr
      >>> float(jr.preferences.running_center().init().mean)
      0.0

    References:
      Jung et al. (arXiv:2404.04656), the shift of the binary classifier; MPO (arXiv:2411.10442)
      uses a moving average of it.
    """
    checks.check_positive("running_center", finite=True, beta=beta)
    checks.check_share("running_center", excess=excess)

    return Transform(RunningCenter.empty, _Center(beta, excess))
