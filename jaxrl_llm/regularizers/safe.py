"""SAFE: a KL penalty beyond a threshold that follows the rewards, scaled by the entropy.

The method is of Maity, SAFE (arXiv:2602.04651), whose constants are the defaults. There a penalty
is a plain number added to the loss, without a gradient; here it is differentiable in the KL, and
``coef``, its derivative, is the coefficient of a KL term with the same gradient. All numbers are
float32 ``[]`` unless stated otherwise; another shape, or an option out of its documented range,
raises ValueError.

- ``state``: The state from the last call, or from the ``*_init`` function.
- ``kl``: ``[]``, KL of the policy from its reference, in nats per token.
- ``base``: Threshold before any adjustment; ``low``, ``high``: Its bounds, in order, in nats.
- ``scale``: Penalty per squared nat beyond the threshold, not negative.
- ``entropy_floor``: The further the entropy is below about this value, the larger the penalty.
- ``threshold``: In nats; ``momentum_scale``: Penalty per squared nat per step, not negative.
- ``window``: Steps over which the momentum is measured, above 0.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, Transform, checks, masking, prints_as_call
from jaxrl_llm.regularizers.controllers import mean_of_sequence_means
from jaxrl_llm.regularizers.kl import k1

_WINDOW = 50
# Warmup, climbing, plateau, converged.
PHASES = ("warmup", "climbing", "plateau", "converged")
_MULTIPLIERS = (1.5, 1.2, 0.8, 1.0)


class PidState(NamedTuple):
    """State of :func:`pid_step`.

    Attributes:
      average: Moving average of the observations.
      integral: Sum of the errors, within [-1, 1].
      error: The last error.
      started: bool ``[]``, True after the first observation.
    """

    average: Array
    integral: Array
    error: Array
    started: Array


def pid_init() -> PidState:
    """The state of a PID controller before the first observation.

    Returns:
      A PidState.

    Example:
      >>> import jaxrl_llm as jr
      >>> bool(jr.regularizers.pid_init().started)
      False

    References:
      Maity, SAFE (arXiv:2602.04651).
    """
    # Three arrays, not one: a train step gives each away, which it can do once.
    a, b, c = (jnp.zeros((), jnp.float32) for _ in range(3))
    return PidState(a, b, c, jnp.zeros((), bool))


def pid_step(
    state: PidState,
    x: float | Array,
    *,
    kp: float = 0.3,
    ki: float = 0.01,
    kd: float = 0.05,
    target: float = 0.001,
    decay: float = 0.95,
) -> tuple[PidState, Array]:
    """A PID controller on the velocity of a moving average.

        e' = decay e + (1 - decay) x,   error = (e' - e) - target
        integral' = clip(integral + error, -1, 1)
        output = kp error + ki integral' + kd (error - last error)

    The first observation sets the average and gives 0.

    Args:
      state: See the module.
      x: ``[]``, the observation, such as the mean reward of a step.
      kp, ki, kd: Gains of the error, of its sum and of its change.
      target: Target velocity.
      decay: Weight of the past in the average, between 0 and 1.

    Returns:
      The next state and the output.

    Example:
      >>> import jaxrl_llm as jr
      >>> state, first = jr.regularizers.pid_step(jr.regularizers.pid_init(), 0.5)
      >>> state, second = jr.regularizers.pid_step(state, 1.5)
      >>> float(first), round(float(second), 5)
      (0.0, 0.01764)

    References:
      Maity, SAFE (arXiv:2602.04651).
    """
    checks.check_rank("pid_step", 0, x=x)
    x = jnp.asarray(x, jnp.float32)
    average = decay * state.average + (1.0 - decay) * x
    error = average - state.average - target
    integral = jnp.clip(state.integral + error, -1.0, 1.0)
    output = kp * error + ki * integral + kd * (error - state.error)
    zero = jnp.zeros_like(x)
    first = PidState(x, zero, zero, jnp.ones_like(state.started))
    later = PidState(average, integral, error, state.started)
    pick = lambda a, b: jnp.where(state.started, a, b)  # noqa: E731
    return PidState(*map(pick, later, first)), pick(output, zero)


class SafeState(NamedTuple):
    """State of :func:`safe_step`.

    Attributes:
      kl_short: Fast moving average of the KL.
      kl_long: Slow moving average of the KL, only reported.
      pid: State of the threshold's PID controller.
      history: float32 ``[100]``, the last rewards, the newest last.
      count: int32 ``[]``, number of rewards so far.
    """

    kl_short: Array
    kl_long: Array
    pid: PidState
    history: Array
    count: Array


class SafeControl(NamedTuple):
    """Result of :func:`safe_step`.

    Attributes:
      penalty: Penalty to add to the loss.
      coef: Its derivative with respect to the KL of this step.
      threshold: In nats.
      phase: int32 ``[]``, an index of ``PHASES``.
    """

    penalty: Array
    coef: Array
    threshold: Array
    phase: Array


def safe_init() -> SafeState:
    """The first state of :func:`safe_step`.

    Returns:
      A SafeState.

    Example:
      >>> import jaxrl_llm as jr
      >>> state = jr.regularizers.safe_init()
      >>> int(state.count), float(state.kl_short), state.history.shape
      (0, 0.0, (100,))

    References:
      Maity, SAFE (arXiv:2602.04651).
    """
    short, long = (jnp.zeros((), jnp.float32) for _ in range(2))
    history = jnp.zeros(2 * _WINDOW, jnp.float32)
    return SafeState(short, long, pid_init(), history, jnp.zeros((), jnp.int32))


def safe_step(
    state: SafeState,
    kl: float | Array,
    entropy: float | Array,
    reward: float | Array,
    *,
    base: float = 0.3,
    low: float = 0.1,
    high: float = 0.6,
    scale: float = 0.1,
    entropy_floor: float = 2.0,
) -> tuple[SafeState, SafeControl]:
    """One step of SAFE's controller: a threshold for the KL, and a penalty beyond it.

        kl_short' = 0.9 kl_short + 0.1 kl
        threshold = clip((base + pid(reward)) * multiplier(phase), low, high)
        penalty = scale max(0, kl_short' - threshold)^2 max(0.5, entropy_floor / (entropy + 0.1))

    The phase is warmup (multiplier 1.5) for 49 rewards; then climbing (1.2) if the mean of the last
    50 exceeds that of the 50 before by 0.01, converged (1.0) if their deviation is below 0.02 and
    their mean above 0.7, else plateau (0.8).

    Args:
      state, kl, base, low, high, scale, entropy_floor: See the module.
      entropy: ``[]``, mean entropy of the policy, in nats per token.
      reward: ``[]``, mean reward of the step.

    Returns:
      The next state and a SafeControl.

    Example:
      >>> import jaxrl_llm as jr
      >>> state, control = jr.regularizers.safe_step(jr.regularizers.safe_init(), 5.0, 0.4, 0.0)
      >>> [round(float(x), 5) for x in control]  # penalty, coef, threshold, phase
      [0.001, 0.004, 0.45, 0.0]

    References:
      Maity, SAFE (arXiv:2602.04651).
    """
    checks.check_rank("safe_step", 0, kl=kl, entropy=entropy, reward=reward)
    checks.check_non_negative("safe_step", finite=True, scale=scale)
    if not low <= high:
        raise ValueError(f"safe_step: low must not be above high; got {low:g} and {high:g}.")
    kl, reward = jnp.asarray(kl, jnp.float32), jnp.asarray(reward, jnp.float32)
    short = 0.9 * state.kl_short + 0.1 * kl
    pid, adjustment = pid_step(state.pid, reward)
    history = jnp.concatenate([state.history[1:], reward[None]])
    count = jnp.minimum(state.count + 1, 2 * _WINDOW)
    recent = history[_WINDOW:]
    mean = jnp.mean(recent)
    before = jnp.where(count >= 2 * _WINDOW, jnp.mean(history[:_WINDOW]), mean)
    settled = (jnp.std(recent) < 0.02) & (mean > 0.7)
    phase = jnp.where(mean > before + 0.01, 1, jnp.where(settled, 3, 2))
    phase = jnp.where(count < _WINDOW, 0, phase).astype(jnp.int32)
    threshold = jnp.clip((base + adjustment) * jnp.array(_MULTIPLIERS)[phase], low, high)
    excess = jnp.maximum(short - threshold, 0.0)
    gate = jnp.maximum(0.5, entropy_floor / (jnp.asarray(entropy, jnp.float32) + 0.1))
    control = SafeControl(scale * excess**2 * gate, 0.2 * scale * excess * gate, threshold, phase)
    return SafeState(short, 0.99 * state.kl_long + 0.01 * kl, pid, history, count), control


def _if_measured(valid: Array, after, before):
    """The state after a batch, or the one before if no token took part: it measured nothing."""
    some = jnp.any(valid)
    return jax.tree.map(lambda new, old: jnp.where(some, new, old), after, before)


@dataclasses.dataclass(frozen=True)
class _Safe:
    """The update half of :func:`safe_controller`; a value, so that equal ones compare equal."""

    base: float
    low: float
    high: float
    scale: float
    entropy_floor: float

    def step(self, state: SafeState, kl, entropy, reward) -> tuple[SafeState, SafeControl]:
        return safe_step(
            state,
            kl,
            entropy,
            reward,
            base=self.base,
            low=self.low,
            high=self.high,
            scale=self.scale,
            entropy_floor=self.entropy_floor,
        )

    def __call__(
        self,
        rewards: Array,
        state: SafeState,
        *,
        old_logp: Array,
        ref_logp: Array,
        old_entropy: Array,
        mask: Array,
        where: Array,
    ) -> tuple[Array, SafeState]:
        valid = mask & where[..., None]
        kl = mean_of_sequence_means(k1(old_logp, ref_logp, valid), valid)
        entropy = mean_of_sequence_means(old_entropy, valid)
        reward = masking.masked_mean(rewards, where)
        after, control = self.step(state, kl, entropy, reward)
        # Without a token there is no entropy to scale by, and nothing to penalize.
        return jnp.where(jnp.any(valid), control.coef, 0.0), _if_measured(valid, after, state)


@prints_as_call
def safe_controller(
    *,
    base: float = 0.3,
    low: float = 0.1,
    high: float = 0.6,
    scale: float = 0.1,
    entropy_floor: float = 2.0,
) -> Transform:
    """:func:`safe_step` at every step, as the coefficient of a KL term.

    The KL term is ``connect(kl_to_reference, coef=...)``. KL (k1), entropy and reward are measured
    on the batch, before the update. A batch without a token that takes part does not change the
    state, and its coefficient is 0.

    Args:
      base, low, high, scale, entropy_floor: See the module.

    Returns:
      A Transform whose update names ``old_logp``, ``ref_logp``, ``old_entropy``, ``mask`` and
      ``where`` and returns the coefficient.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> controller = jr.regularizers.safe_controller()
      >>> logp, mask = jnp.zeros((1, 2, 3)), jnp.ones((1, 2, 3), bool)
      >>> coef, state = controller.update(
      ...     jnp.zeros((1, 2)), controller.init(), old_logp=logp, ref_logp=logp - 5.0,
      ...     old_entropy=logp + 0.4, mask=mask, where=jnp.ones((1, 2), bool))
      >>> round(float(coef), 4)
      0.004

    References:
      Maity, SAFE (arXiv:2602.04651).
    """
    checks.check_real("safe_controller", finite=True, base=base, entropy_floor=entropy_floor)
    update = _Safe(base, low, high, scale, entropy_floor)
    update.step(safe_init(), 0.0, 1.0, 0.0)  # raises if an option is out of its range
    return Transform(safe_init, update)


class AsymmetricState(NamedTuple):
    """State of :func:`asymmetric_step`.

    Attributes:
      history: float32 ``[window]``, the last measured divergences, the newest last.
      count: int32 ``[]``, number of divergences so far.
    """

    history: Array
    count: Array


class AsymmetricControl(NamedTuple):
    """Result of :func:`asymmetric_step`.

    Attributes:
      penalty: Penalty to add to the loss.
      coef: Its derivative with respect to the KL of this step.
      momentum: Change of the KL per step over the window, in nats; 0 until the window is full.
    """

    penalty: Array
    coef: Array
    momentum: Array


def asymmetric_init(*, window: int = 50) -> AsymmetricState:
    """The first state of :func:`asymmetric_step`.

    Args:
      window: See the module.

    Returns:
      An AsymmetricState.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.regularizers.asymmetric_init(window=3).history.tolist()
      [0.0, 0.0, 0.0]

    References:
      Maity, SAFE (arXiv:2602.04651).
    """
    checks.check_positive("asymmetric_init", finite=True, window=window)
    return AsymmetricState(jnp.zeros(window, jnp.float32), jnp.int32(0))


def asymmetric_step(
    state: AsymmetricState,
    kl: float | Array,
    *,
    threshold: float = 0.3,
    scale: float = 0.1,
    momentum_scale: float = 5.0,
) -> tuple[AsymmetricState, AsymmetricControl]:
    """A penalty for a KL above a threshold, and for a rising KL.

        momentum = (kl - kl of window - 1 steps ago) / window
        penalty = scale max(0, kl - threshold)^2 + momentum_scale max(0, momentum)^2

    A KL below the threshold, or a falling one, costs nothing.

    Args:
      state, kl, threshold, scale, momentum_scale: See the module.

    Returns:
      The next state and an AsymmetricControl.

    Example:
      >>> import jaxrl_llm as jr
      >>> init = jr.regularizers.asymmetric_init(window=2)
      >>> state, control = jr.regularizers.asymmetric_step(init, 0.5)
      >>> round(float(control.penalty), 4), float(control.momentum)
      (0.004, 0.0)

    References:
      Maity, SAFE (arXiv:2602.04651), the controller that its code calls asymmetric.
    """
    checks.check_rank("asymmetric_step", 0, kl=kl)
    checks.check_non_negative(
        "asymmetric_step", finite=True, scale=scale, momentum_scale=momentum_scale
    )
    history = jnp.concatenate([state.history[1:], jnp.asarray(kl, jnp.float32)[None]])
    count = jnp.minimum(state.count + 1, state.history.shape[0])
    state = AsymmetricState(history, count)
    return state, _asymmetric_control(state, threshold, scale, momentum_scale)


def _asymmetric_control(
    state: AsymmetricState, threshold, scale, momentum_scale
) -> AsymmetricControl:
    """The penalty for the last divergence of a history."""
    kl, window = state.history[-1], state.history.shape[0]
    momentum = jnp.where(state.count == window, (kl - state.history[0]) / window, 0.0)
    excess, rise = jnp.maximum(kl - threshold, 0.0), jnp.maximum(momentum, 0.0)
    penalty = scale * excess**2 + momentum_scale * rise**2
    # In a window of one step the KL is compared with itself.
    slope = (1.0 / window) if window > 1 else 0.0
    coef = 2.0 * scale * excess + 2.0 * momentum_scale * rise * slope
    return AsymmetricControl(penalty, coef, momentum)


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
        valid = mask & where[..., None]
        kl = mean_of_sequence_means(k1(old_logp, ref_logp, valid), valid)
        options = dataclasses.asdict(self)
        state = _if_measured(valid, asymmetric_step(state, kl, **options)[0], state)
        return _asymmetric_control(state, **options).coef, state


@prints_as_call
def asymmetric_kl(
    *, threshold: float = 0.3, scale: float = 0.1, momentum_scale: float = 5.0, window: int = 50
) -> Transform:
    """:func:`asymmetric_step` at every step, as the coefficient of a KL term.

    A batch without a token that takes part changes neither the state nor the coefficient.

    Args:
      threshold, scale, momentum_scale, window: See the module.

    Returns:
      A Transform whose update names ``old_logp``, ``ref_logp``, ``mask`` and ``where`` and returns
      the coefficient.

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
    checks.check_non_negative(
        "asymmetric_kl", finite=True, scale=scale, momentum_scale=momentum_scale
    )
    checks.check_positive("asymmetric_kl", finite=True, window=window)
    return Transform(_First(window), _Asymmetric(threshold, scale, momentum_scale))


def step_scale(kl: float | Array, *, max_kl: float = 0.5) -> Array:
    """The factor that limits the divergence of a step.

        scale = min(1, max_kl / kl)

    Args:
      kl: ``[]``, the divergence that the full step causes, or that the last step caused.
      max_kl: The largest allowed divergence, above 0.

    Returns:
      float32 ``[]``, between 0 and 1.

    Example:
      >>> import jaxrl_llm as jr
      >>> float(jr.regularizers.step_scale(2.0)), float(jr.regularizers.step_scale(0.1))
      (0.25, 1.0)

    References:
      Maity, SAFE (arXiv:2602.04651), uses the divergence of a preview of the step; its released
      trainer never calls it, so the preset does not use it. ``Computed("update_scale",
      connect(step_scale, kl="last_kl"), "batch")`` uses the divergence of the last step.
    """
    checks.check_rank("step_scale", 0, kl=kl)
    checks.check_positive("step_scale", finite=True, max_kl=max_kl)
    return max_kl / jnp.maximum(jnp.asarray(kl, jnp.float32), max_kl)
