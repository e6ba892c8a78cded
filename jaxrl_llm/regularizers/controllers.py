"""Coefficients that change from step to step: controllers for a Recipe's ``computed`` slot.

A controller is a Transform: ``update(rewards, state, **context) -> (coefficient, state)``. The
coefficient, float32 ``[]``, is in the context under the controller's name, and ``core.connect``
connects it to a term: ``connect(kl_to_reference, coef="kl_coef")``. A step uses the coefficient of
the previous step; its batch updates the next one. An option out of its documented range raises
ValueError.
"""

import dataclasses
import math

import jax.numpy as jnp

from jaxrl_llm.core import Array, Transform, checks, kl, masking, prints_as_call
from jaxrl_llm.regularizers.entropy import entropy_controller
from jaxrl_llm.regularizers.kl import kl_token


@dataclasses.dataclass(frozen=True)
class First:
    """A float32 scalar as the first state; compares by value."""

    value: float

    def __call__(self) -> Array:
        """The state."""
        return jnp.float32(self.value)


def mean_of_sequence_means(x: Array, mask: Array) -> Array:
    """Mean over non-empty sequences of the mean over their tokens: ``[]`` float32."""
    return masking.masked_mean(masking.masked_mean(x, mask, axis=-1), jnp.any(mask, axis=-1))


@dataclasses.dataclass(frozen=True)
class _Fixed:
    def __call__(self, rewards: Array, state: Array) -> tuple[Array, Array]:
        return state, state


@prints_as_call
def fixed(coef: float) -> Transform:
    """A constant coefficient: the baseline controller.

    Args:
      coef: Its value, not negative.

    Returns:
      A Transform whose update returns the coefficient, float32 ``[]``.

    Example:
      >>> import jaxrl_llm as jr
      >>> controller = jr.regularizers.fixed(0.5)
      >>> controller.update(None, controller.init())[0]
      Array(0.5, dtype=float32)

    References:
      The fixed controller of verl and of Ziegler et al. (arXiv:1909.08593).
    """
    checks.check_non_negative("fixed", finite=True, coef=coef)
    return Transform(First(coef), _Fixed())


def adaptive_kl_update(
    coef: float | Array,
    kl: float | Array,
    *,
    target: float,
    samples: int | Array,
    horizon: float = 10_000.0,
) -> Array:
    """The coefficient of a KL penalty, changed in proportion to the error of the KL.

        coef' = coef (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)

    Args:
      coef: ``[]``, in units of reward per nat.
      kl: ``[]``, the measured divergence, in the same units as ``target``.
      target: The target divergence, above 0.
      samples: Number of sequences in this step.
      horizon: Number of sequences after which the largest possible error, held constant, has
        changed the coefficient by about a fifth; above 0.

    Returns:
      float32 ``[]``.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.regularizers.adaptive_kl_update(0.1, 0.02, target=0.01, samples=64).item()
      0.10012...

    References:
      Ziegler et al. (arXiv:1909.08593), as in verl; the target is 6, summed over a response, in the
      paper, and 0.1 per token in verl.
    """
    name = "adaptive_kl_update"
    checks.check_rank(name, 0, coef=coef, kl=kl, samples=samples)
    checks.check_positive(name, finite=True, target=target, horizon=horizon)
    error = jnp.clip(jnp.asarray(kl, jnp.float32) / target - 1.0, -0.2, 0.2)
    return jnp.asarray(coef, jnp.float32) * (1.0 + error * samples / horizon)


# Batches of a horizon, where batches are counted: the gain of Ziegler et al. is 0.1.
_BATCHES = 10.0


@dataclasses.dataclass(frozen=True)
class _AdaptiveKL:
    """The update half of :func:`adaptive_kl`; a value, so that equal controllers compare equal."""

    target: float
    horizon: float | None
    estimator: str

    def __call__(
        self,
        rewards: Array,
        state: Array,
        *,
        old_logp: Array,
        ref_logp: Array,
        mask: Array,
        where: Array | None = None,
    ) -> tuple[Array, Array]:
        valid = mask if where is None else mask & where[..., None]
        of_tokens = kl_token(old_logp, ref_logp, valid, estimator=self.estimator)
        kl = mean_of_sequence_means(of_tokens, valid)
        samples = jnp.sum(jnp.any(valid, axis=-1), dtype=jnp.float32)
        horizon = self.horizon
        if horizon is None:  # batches are counted, and an empty one does not count
            samples, horizon = jnp.minimum(samples, 1.0), _BATCHES
        return state, adaptive_kl_update(
            state, kl, target=self.target, horizon=horizon, samples=samples
        )


@prints_as_call
def adaptive_kl(
    *,
    initial: float = 1e-3,
    target: float = 0.1,
    horizon: float | None = 10_000.0,
    estimator: str = "k1",
) -> Transform:
    """:func:`adaptive_kl_update` at every step, on the divergence measured on the batch.

    The divergence is the mean over sequences of the mean over tokens of ``kl_token(old_logp,
    ref_logp)``.

    Args:
      initial: Coefficient of the first step, not negative.
      target: The target divergence, in nats per token, above 0.
      horizon: As in :func:`adaptive_kl_update`, above 0; None for ten batches of any size. With the
        default, the coefficient of a run of less than about 10,000 sequences hardly moves.
      estimator: As in :func:`kl_token`.

    Returns:
      A Transform whose update names ``old_logp``, ``ref_logp``, ``mask`` and ``where``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> controller = jr.regularizers.adaptive_kl(initial=0.1, target=0.01, horizon=100.0)
      >>> logp, mask = jnp.zeros((1, 4, 2)), jnp.ones((1, 4, 2), bool)
      >>> coef, state = controller.update(
      ...     jnp.zeros((1, 4)), controller.init(), old_logp=logp, ref_logp=logp - 1.0, mask=mask)
      >>> round(float(coef), 4), round(float(state), 4)
      (0.1, 0.1008)

    References:
      Ziegler et al. (arXiv:1909.08593), whose gain per batch is 0.1, ``horizon=None``; their code
      has a horizon of 10,000 sequences and batches of 512, verl the same horizon. verl puts the
      penalty into the reward; it also updates the coefficient after using it.
    """
    checks.check_non_negative("adaptive_kl", finite=True, initial=initial)
    checks.check_positive("adaptive_kl", finite=True, target=target, horizon=horizon)
    checks.check_option("adaptive_kl", "estimator", estimator, kl.ESTIMATORS)
    return Transform(First(initial), _AdaptiveKL(target, horizon, estimator))


@dataclasses.dataclass(frozen=True)
class _AdaptiveEntropy:
    """The update half of :func:`adaptive_entropy`."""

    target: float
    delta: float
    low: float
    high: float

    def __call__(
        self,
        rewards: Array,
        state: Array,
        *,
        old_entropy: Array,
        mask: Array,
        where: Array | None = None,
    ) -> tuple[Array, Array]:
        valid = mask if where is None else mask & where[..., None]
        entropy = masking.masked_mean(old_entropy, valid)
        control = entropy_controller(state, entropy, **dataclasses.asdict(self))
        # A batch without a token has measured nothing.
        empty = ~jnp.any(valid)
        return jnp.where(empty, 0.0, control.applied), jnp.where(empty, state, control.coef)


@prints_as_call
def adaptive_entropy(
    *,
    initial: float = 0.0,
    target: float = 0.2,
    delta: float = 0.005,
    low: float = 0.0,
    high: float = 1.0,
) -> Transform:
    """:func:`entropy_controller` at every step, on the mean entropy per token of the batch.

    Args:
      initial: Coefficient of the first step, between ``low`` and ``high``.
      target, delta, low, high: As in :func:`entropy_controller`; ``high`` is finite.

    Returns:
      A Transform whose update names ``old_entropy``, ``mask`` and ``where``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> controller = jr.regularizers.adaptive_entropy(initial=0.01)
      >>> mask = jnp.ones((1, 2, 3), bool)
      >>> coef, state = controller.update(
      ...     jnp.zeros((1, 2)), controller.init(), old_entropy=jnp.full((1, 2, 3), 0.1), mask=mask)
      >>> round(float(coef), 4), round(float(state), 4)
      (0.01, 0.015)

    References:
      He et al., Skywork-OR1 (arXiv:2505.22312), and TRL; see :func:`entropy_controller`.
    """
    name = "adaptive_entropy"
    checks.check_non_negative(name, finite=True, initial=initial, target=target, low=low)
    checks.check_positive(name, finite=True, delta=delta)
    if not (low <= initial <= high and math.isfinite(high)):
        raise ValueError(
            f"{name}: initial must be between low and a finite high; got low={low:g}, "
            f"initial={initial:g}, high={high:g}."
        )
    return Transform(First(initial), _AdaptiveEntropy(target, delta, low, high))
