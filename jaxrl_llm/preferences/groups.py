"""Pairs of the best and the worst rollouts of each group, for the losses of pairs.

Several rollouts may be the best of their group, or the worst: with rewards 0 and 1 all right ones
and all wrong ones. A group whose rollouts are all equal has no pair. All raise TypeError for a
wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import (
    Array,
    Transform,
    accepted,
    call_with,
    checks,
    masking,
    traits,
)
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.preferences.pairwise import mpo


@traits(takes_correction=False, policy_gradient=False, level="sequence")
def paired(
    logp: Array,
    old_logp: Array | None,
    advantages: Array,
    mask: Array,
    *,
    ref_logp: Array,
    center: float | Array | None = None,
    loss: Callable = mpo,
) -> Array:
    """A loss of pairs as a surrogate: of each group, the best rollouts against the worst.

        loss[i, t] = mean over w and l of loss(w, l)        at every token of the group
        w, l = the rollouts of the greatest and of the least advantage

    The log-probabilities are summed over the tokens of a rollout. A group without a pair has loss 0
    and counts in a mean: :func:`jaxrl_llm.curation.informative_groups` leaves it out.
    ``aggregate.group_mean`` makes the loss the mean over the groups.

    Args:
      logp: ``[..., G, T]``, floating point, log-probabilities (nats) of tokens under the policy.
      old_logp: Not used; the reference takes its place.
      mask: bool ``[..., G, T]``, True for tokens that count.
      ref_logp: ``[..., G, T]``, like ``logp`` under the reference.
      advantages: ``[..., G]``, one value a rollout, of which the order counts.
      center: ``[]`` or an array of one value, for a loss that names it; None for the loss's own.
      loss: A loss of :mod:`jaxrl_llm.preferences`, such as ``bind(preferences.dpo, beta=0.5)``.

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
      R1V2 (arXiv:2504.16656). That every group counts the same is ours.
    """
    function = "paired"
    del old_logp
    checks.check_min_rank(function, 2, logp=logp)
    checks.check_float(function, advantages=advantages)
    checks.check_shape(function, "advantages", advantages, jnp.shape(logp)[:-1])
    masking.check_tokens(function, mask, logp=logp, ref_logp=ref_logp)
    extra: dict[str, Array] = {}
    if center is not None:
        if "center" not in accepted(loss):
            raise ValueError(f"{function}: center has no effect on {stable_repr(loss)}.")
        extra["center"] = jax.lax.stop_gradient(jnp.asarray(center, jnp.float32).reshape(-1)[0])
    best, worst = best_and_worst(advantages, jnp.any(mask, axis=-1))
    policy, ref = (jnp.sum(masking.zero_masked(x, mask), axis=-1) for x in (logp, ref_logp))
    lengths = jnp.maximum(masking.lengths(mask), 1.0)
    size = jnp.shape(lengths)[-1]

    def spread(x: Array, axis: int) -> Array:
        """Of each rollout ``[..., G]`` as of pairs ``[..., G, G]``."""
        return jnp.repeat(jnp.expand_dims(x, axis), size, axis)

    extra["lengths"] = spread(lengths, -1)
    shares = best[..., :, None] * worst[..., None, :]
    losses = call_with(
        loss,
        spread(policy, -1),
        spread(policy, -2),
        spread(ref, -1),
        spread(ref, -2),
        context=extra | {"where": shares > 0},
    )
    value = jnp.sum(shares * losses, axis=(-1, -2))
    # A NaN advantage has no order and must reach the loss.
    unknown = jnp.any(jnp.isnan(masking.zero_masked(advantages, jnp.any(mask, axis=-1))), axis=-1)
    value = jnp.where(unknown, jnp.nan, value)
    return masking.zero_masked(jnp.broadcast_to(value[..., None, None], jnp.shape(mask)), mask)


def best_and_worst(values: Array, where: Array) -> tuple[Array, Array]:
    """Shares ``[..., G]`` of the rollouts of the greatest value of a group, and of the least.

    Those of a group add up to 1, or are 0 where all that take part are equal.

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


class RunningCenter(NamedTuple):
    """State of :func:`running_center`.

    Attributes:
      mean: float32 ``[]``.
      count: float32 ``[]``, groups with pairs that it is the mean of.
    """

    mean: Array
    count: Array


def running_center(*, beta: float = 0.1) -> Transform:
    """The mean implicit reward of all pairs so far, the ``center`` of :func:`paired`.

        d = mean over groups of (mean x_w + mean x_l) / 2,   x = beta (old_logp - ref_logp)

    The groups of the batch count. It is 0 before the first pair.

    Args:
      beta: That of the loss, above 0.

    Returns:
      A Transform ``rewards [..., G] -> []`` for ``Computed("center", ..., "controller")``; it takes
      ``where``, and ``old_logp``, ``ref_logp`` and ``mask`` ``[..., G, T]``. Its state is a
      :class:`RunningCenter`.

    Raises:
      ValueError: If ``beta`` is not above 0.

    Example:
      >>> import jaxrl_llm as jr
      >>> float(jr.preferences.running_center().init().mean)
      0.0

    References:
      Jung et al. (arXiv:2404.04656), the shift of the binary classifier; MPO (arXiv:2411.10442)
      takes it over as a moving average.
    """
    checks.check_positive("running_center", finite=True, beta=beta)

    def init() -> RunningCenter:
        return RunningCenter(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

    def update(rewards, state, *, where, old_logp, ref_logp, mask):
        best, worst = best_and_worst(rewards, where & jnp.any(mask, axis=-1))
        kept = mask & where[..., None]
        implicit = beta * jnp.sum(masking.zero_masked(old_logp - ref_logp, kept), axis=-1)
        middle = jnp.sum((best + worst) * implicit, axis=-1) / 2
        there = jnp.any(best > 0, axis=-1)
        number = jnp.sum(there, dtype=jnp.float32)
        count = state.count + number
        error = jnp.sum(jnp.where(there, middle - state.mean, 0.0))
        mean = state.mean + error / jnp.maximum(count, 1.0)
        return mean, RunningCenter(mean, count)

    return Transform(init, update)
