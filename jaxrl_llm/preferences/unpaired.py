"""Losses of single responses, each of which is good or bad.

Shared arguments:
  ``logp``, ``ref_logp``: ``[...]``, floating point, log-probability (nats) of the complete response
    under the policy being trained and under the reference, summed over its tokens.
  ``desirable``: bool ``[...]``, True for good responses. All responses may be of one class.
  ``desirable_weight``, ``undesirable_weight``: Factors of the losses of a class, not negative.
  ``where``: bool ``[...]``, True for valid responses; the others are ignored and get a loss of
    0. None keeps all.
  ``beta``: Above 0; the implicit reward of a response is ``x = beta (logp - ref_logp)``.

Each loss returns one value per response, to be averaged over the responses. No gradient flows into
the reference. All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option
out of range.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, Transform, checks, masking, prints_as_call
from jaxrl_llm.preferences import scores
from jaxrl_llm.preferences.groups import RunningCenter


def kto(
    logp: Array,
    ref_logp: Array,
    desirable: Array,
    *,
    kl: float | Array,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    where: Array | None = None,
) -> Array:
    """Kahneman-Tversky optimization: gains and losses relative to the policy's mean divergence.

        z = beta max(0, kl)
        loss = desirable_weight (1 - sigmoid(x - z))         of a good response
             = undesirable_weight (1 - sigmoid(z - x))       of a bad one

    Weight times count of the good responses should be 1 to 4/3 times that of the bad responses.

    Args:
      logp, ref_logp, desirable, where, beta: See the module.
      desirable_weight, undesirable_weight: See the module.
      kl: ``[]``, from :func:`kto_kl`, treated as a constant.

    Returns:
      ``[...]`` float32, in (0, weight).

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, good = jnp.array([1.0, -1.0]), jnp.array([True, False])
      >>> jr.preferences.kto(logp, jnp.zeros(2), good, kl=0.2).round(3).tolist()
      [0.48..., 0.47...]

    References:
      Ethayarajh et al., KTO (arXiv:2402.01306).
    """
    function = "kto"
    x = _implicit(function, logp, ref_logp, desirable, beta, where)
    checks.check_rank(function, 0, kl=kl)
    z = beta * jax.lax.stop_gradient(jnp.maximum(jnp.asarray(kl, jnp.float32), 0.0))
    loss = jax.nn.sigmoid(jnp.where(desirable, z - x, x - z))
    return _weighted(function, loss, desirable, desirable_weight, undesirable_weight, where)


def kto_kl(kl_logp: Array, kl_ref_logp: Array, *, where: Array | None = None) -> Array:
    """The divergence of a policy from its reference, estimated with mismatched responses.

        kl = mean(kl_logp - kl_ref_logp)

    It may be negative; :func:`kto` clamps it to 0. Each response follows the prompt of another row
    of the batch, such as the previous row.

    Args:
      kl_logp, kl_ref_logp: ``[...]``, floating point, log-probabilities (nats) of the mismatched
        responses under the policy and the reference, summed over their tokens.
      where: See the module.

    Returns:
      ``[]`` float32, without a gradient; 0 without a response.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> float(jr.preferences.kto_kl(jnp.array([-1.0, -2.0]), jnp.array([-2.0, -2.0])))
      0.5

    References:
      Ethayarajh et al., KTO (arXiv:2402.01306), as in TRL.
    """
    scores.check_rows("kto_kl", where, kl_logp=kl_logp, kl_ref_logp=kl_ref_logp)
    ratio = masking.safe_log_ratio(kl_logp, kl_ref_logp, where)
    return jax.lax.stop_gradient(masking.masked_mean(ratio, where))


def bco_unpaired(
    logp: Array,
    ref_logp: Array,
    desirable: Array,
    *,
    center: float | Array = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    where: Array | None = None,
) -> Array:
    """Binary classification of good and bad responses.

        loss = -desirable_weight log sigmoid(x - d)         of a good response
             = -undesirable_weight log sigmoid(d - x)       of a bad one

    :func:`bco` is the sum of both for a pair.

    Args:
      logp, ref_logp, desirable, where, beta: See the module.
      desirable_weight, undesirable_weight: See the module.
      center: ``[]``, d: a running mean of the implicit rewards, such as :func:`running_reward`,
        treated as a constant.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, good = jnp.zeros(2), jnp.array([True, False])
      >>> jr.preferences.bco_unpaired(logp, logp, good).round(4).tolist()
      [0.693..., 0.693...]

    References:
      Jung et al., BCO (arXiv:2404.04656); its weights of prompts are the ``density`` of
      :func:`single`.
    """
    function = "bco_unpaired"
    x = _implicit(function, logp, ref_logp, desirable, beta, where)
    checks.check_rank(function, 0, center=center)
    d = jax.lax.stop_gradient(jnp.asarray(center, jnp.float32))
    loss = jax.nn.softplus(jnp.where(desirable, d - x, x - d))
    return _weighted(function, loss, desirable, desirable_weight, undesirable_weight, where)


def apo_zero_unpaired(
    logp: Array,
    ref_logp: Array,
    desirable: Array,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    where: Array | None = None,
) -> Array:
    """Anchored preference optimization of good and bad responses.

        loss = desirable_weight (1 - sigmoid(x))       of a good response
             = undesirable_weight sigmoid(x)           of a bad one

    It is :func:`kto` with a divergence of 0; :func:`apo_zero` is the sum of both for a pair.

    Args:
      logp, ref_logp, desirable, where, beta: See the module.
      desirable_weight, undesirable_weight: See the module.

    Returns:
      ``[...]`` float32, in (0, weight).

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, good = jnp.zeros(2), jnp.array([True, False])
      >>> jr.preferences.apo_zero_unpaired(logp, logp, good).tolist()
      [0.5, 0.5]

    References:
      D'Oosterlinck et al., APO (arXiv:2408.06266), without pairs as in TRL.
    """
    function = "apo_zero_unpaired"
    x = _implicit(function, logp, ref_logp, desirable, beta, where)
    loss = jax.nn.sigmoid(jnp.where(desirable, -x, x))
    return _weighted(function, loss, desirable, desirable_weight, undesirable_weight, where)


@dataclasses.dataclass(frozen=True)
class _RunningReward:
    """The update half of :func:`running_reward`."""

    beta: float

    def __call__(self, rewards, state, *, where, old_logp, ref_logp, mask):
        del rewards
        taken = mask & where[..., None]
        ratios = masking.safe_log_ratio(old_logp, ref_logp, taken)
        reward = self.beta * jnp.sum(ratios, axis=-1)
        state = state.including(reward, jnp.any(taken, axis=-1))
        return state.mean, state


@prints_as_call
def running_reward(*, beta: float = 0.1) -> Transform:
    """The mean implicit reward of all responses so far, the ``center`` of :func:`bco_unpaired`.

        d = mean over responses of beta (old_logp - ref_logp)

    The mean includes the current batch. It is 0 before the first response. ``running_center`` is
    the same mean over pairs.

    Args:
      beta: The ``beta`` of the loss, above 0.

    Returns:
      A Transform ``rewards [..., G] -> []`` for ``Computed("center", ..., "controller")``; it takes
      ``where``, and ``old_logp``, ``ref_logp`` and ``mask`` ``[..., G, T]``. Its state is a
      :class:`RunningCenter`, whose ``count`` counts responses.

    Example:
      >>> import jaxrl_llm as jr
      >>> float(jr.preferences.running_reward().init().mean)
      0.0

    References:
      Jung et al., BCO (arXiv:2404.04656), the shift of the reward.
    """
    checks.check_positive("running_reward", finite=True, beta=beta)

    return Transform(RunningCenter.empty, _RunningReward(beta))


def _implicit(function, logp, ref_logp, desirable, beta, where) -> Array:
    """Checks the arrays of responses; returns the implicit rewards."""
    scores.check_rows(function, where, logp=logp, ref_logp=ref_logp)
    checks.check_bool(function, desirable=desirable)
    checks.check_same_shape(function, logp=logp, desirable=desirable)
    checks.check_positive(function, finite=True, beta=beta)
    return beta * scores.log_ratio(logp, ref_logp, where)


def _weighted(function, loss, desirable, desirable_weight, undesirable_weight, where) -> Array:
    """Losses times the weights of their classes, 0 where absent."""
    checks.check_non_negative(
        function,
        finite=True,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
    weight = jnp.where(desirable, desirable_weight, undesirable_weight)
    return masking.zero_masked(masking.product(weight, loss), where)
