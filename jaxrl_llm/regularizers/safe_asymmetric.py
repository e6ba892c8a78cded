"""The simpler variant of SAFE's controller, and its bound on the size of a step."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import Array, Transform, checks
from jaxrl_llm.regularizers.controllers import sequence_mean
from jaxrl_llm.regularizers.kl import k1


class AsymmetricState(NamedTuple):
    """State of :func:`asymmetric_step`.

    Attributes:
      history: float32 ``[window]``, the last measured divergences, the newest last.
      count: int32 ``[]``, how many there were.
    """

    history: Array
    count: Array


class AsymmetricControl(NamedTuple):
    """What :func:`asymmetric_step` decides, float32 ``[]``.

    Attributes:
      penalty: To be added to the loss.
      coef: Its derivative by the KL of this step.
      momentum: Change of the KL a step over the window, in nats; 0 until the window is full.
    """

    penalty: Array
    coef: Array
    momentum: Array


def asymmetric_init(*, window: int = 50) -> AsymmetricState:
    """The first state of :func:`asymmetric_step`.

    Args:
      window: Steps over which the momentum is measured, above 0.

    Returns:
      An AsymmetricState.

    Raises:
      ValueError: If ``window`` is not above 0.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.regularizers.asymmetric_init(window=3).history.tolist()
      [0.0, 0.0, 0.0]

    References:
      Maity, SAFE (arXiv:2602.04651).
    """
    checks.check_positive("asymmetric_init", window=window)
    return AsymmetricState(jnp.zeros(window, jnp.float32), jnp.int32(0))


def asymmetric_step(
    state: AsymmetricState,
    kl: float | Array,
    *,
    threshold: float = 0.3,
    scale: float = 0.1,
    momentum_scale: float = 5.0,
) -> tuple[AsymmetricState, AsymmetricControl]:
    """A penalty for a KL above a threshold, and for one that rises.

        momentum = (kl - kl of window - 1 steps ago) / window
        penalty = scale max(0, kl - threshold)^2 + momentum_scale max(0, momentum)^2

    A KL below the threshold, or a falling one, costs nothing. Differentiable in ``kl``.

    Args:
      state: Of the last call, or from :func:`asymmetric_init`.
      kl: ``[]``, KL of the policy from its reference, in nats a token.
      threshold: In nats.
      scale: Penalty for a squared nat beyond the threshold, not negative.
      momentum_scale: Penalty for a squared nat a step of momentum, not negative.

    Returns:
      The next state and an AsymmetricControl.

    Raises:
      ValueError: If ``kl`` is no scalar or a scale is negative.

    Example:
      >>> import jaxrl_llm as jr
      >>> init = jr.regularizers.asymmetric_init(window=2)
      >>> state, control = jr.regularizers.asymmetric_step(init, 0.5)
      >>> round(float(control.penalty), 4), float(control.momentum)
      (0.004, 0.0)

    References:
      Maity, SAFE (arXiv:2602.04651), the controller that its code calls asymmetric. There the
      penalty is a plain number added to the loss, without a gradient.
    """
    checks.check_rank("asymmetric_step", 0, kl=kl)
    checks.check_non_negative("asymmetric_step", scale=scale, momentum_scale=momentum_scale)
    kl = jnp.asarray(kl, jnp.float32)
    window = state.history.shape[0]
    history = jnp.concatenate([state.history[1:], kl[None]])
    count = jnp.minimum(state.count + 1, window)
    momentum = jnp.where(count == window, (kl - history[0]) / window, 0.0)
    excess, rise = jnp.maximum(kl - threshold, 0.0), jnp.maximum(momentum, 0.0)
    penalty = scale * excess**2 + momentum_scale * rise**2
    # In a window of one step the KL is compared with itself.
    slope = (1.0 / window) if window > 1 else 0.0
    coef = 2.0 * scale * excess + 2.0 * momentum_scale * rise * slope
    return AsymmetricState(history, count), AsymmetricControl(penalty, coef, momentum)


@dataclasses.dataclass(frozen=True)
class _First:
    window: int

    def __call__(self) -> AsymmetricState:
        return asymmetric_init(window=self.window)


@dataclasses.dataclass(frozen=True)
class _Asymmetric:
    """The update half of :func:`asymmetric_kl`; a value, so that equal ones compare equal."""

    threshold: float
    scale: float
    momentum_scale: float

    def __call__(
        self,
        rewards: Array,
        state: AsymmetricState,
        *,
        old_logp: Array,
        ref_logp: Array,
        mask: Array,
        where: Array,
    ) -> tuple[Array, AsymmetricState]:
        kept = mask & where[..., None]
        kl = sequence_mean(k1(old_logp, ref_logp, kept), kept)
        state, control = asymmetric_step(state, kl, **dataclasses.asdict(self))
        return control.coef, state


def asymmetric_kl(
    *,
    threshold: float = 0.3,
    scale: float = 0.1,
    momentum_scale: float = 5.0,
    window: int = 50,
) -> Transform:
    """:func:`asymmetric_step` at every step, as the coefficient of a KL term.

    Args:
      threshold: As in :func:`asymmetric_step`.
      scale: As in :func:`asymmetric_step`.
      momentum_scale: As in :func:`asymmetric_step`.
      window: As in :func:`asymmetric_init`.

    Returns:
      A Transform whose update names ``old_logp``, ``ref_logp``, ``mask`` and ``where`` and returns
      the coefficient, float32 ``[]``.

    Raises:
      ValueError: If a scale is negative or ``window`` is not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> controller = jr.regularizers.asymmetric_kl()
      >>> logp, mask = jnp.zeros((1, 2, 3)), jnp.ones((1, 2, 3), bool)
      >>> coef, state = controller.update(
      ...     jnp.zeros((1, 2)), controller.init(), old_logp=logp, ref_logp=logp - 0.5,
      ...     mask=mask, where=jnp.ones((1, 2), bool))
      >>> round(float(coef), 4)
      0.04

    References:
      Maity, SAFE (arXiv:2602.04651).
    """
    checks.check_non_negative("asymmetric_kl", scale=scale, momentum_scale=momentum_scale)
    checks.check_positive("asymmetric_kl", window=window)
    return Transform(_First(window), _Asymmetric(threshold, scale, momentum_scale))


def step_scale(kl: float | Array, *, max_kl: float = 0.5) -> Array:
    """By how much to shorten a step that would go too far.

        scale = min(1, max_kl / kl)

    Args:
      kl: ``[]``, the divergence that the whole step causes, or the last one did.
      max_kl: The divergence that is admitted, above 0.

    Returns:
      float32 ``[]``, between 0 and 1.

    Raises:
      ValueError: If ``kl`` is no scalar or ``max_kl`` is not above 0.

    Example:
      >>> import jaxrl_llm as jr
      >>> float(jr.regularizers.step_scale(2.0)), float(jr.regularizers.step_scale(0.1))
      (0.25, 1.0)

    References:
      Maity, SAFE (arXiv:2602.04651) takes the divergence of a preview of the step. As
      ``Computed("update_scale", given(step_scale, kl="last_kl"), "batch")`` it takes the last one.
    """
    checks.check_rank("step_scale", 0, kl=kl)
    checks.check_positive("step_scale", max_kl=max_kl)
    return max_kl / jnp.maximum(jnp.asarray(kl, jnp.float32), max_kl)
