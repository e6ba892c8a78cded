"""The number of samples per step: gradient noise, the benefit of larger batches, plateaus.

A sample is an independent draw: a rollout, or a group if the variance between prompts dominates.

- Results are float32 in the shape that the arguments broadcast to.
- A number out of its range raises ValueError.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core import Array, checks


class GradientNoise(NamedTuple):
    """Signal and noise of a gradient, float32."""

    signal: Array  # |G|^2, squared norm of the exact gradient
    noise: Array  # tr(Sigma), summed variance of the gradient of one sample
    critical_batch: Array  # noise / signal, in samples; infinite where signal is not above 0


class BatchCost(NamedTuple):
    """The cost of a batch size relative to the minimum, float32."""

    steps: Array  # of the optimizer, over those of an infinite batch
    samples: Array  # over those of the smallest batches


class OuterStep(NamedTuple):
    """The samples drawn from one policy, and the updates made from them."""

    samples: int
    minibatches: int
    minibatch_size: int


def gradient_noise(
    small_norm: Array, large_norm: Array, *, small_batch: int, large_batch: int
) -> GradientNoise:
    """Signal and noise of a gradient, from its squared norm at two batch sizes.

        E |G_B|^2 = |G|^2 + tr(Sigma) / B
        signal = (B_l n_l - B_s n_s) / (B_l - B_s)
        noise  = (n_s - n_l) / (1 / B_s - 1 / B_l)

    Both are unbiased, but their quotient is not: average the squared norms over many steps first. A
    microbatch and its batch are two such sizes.

    Args:
      small_norm: n_s, squared norm of a gradient that is the mean over ``small_batch`` samples.
      large_norm: n_l, the same over ``large_batch`` samples.
      small_batch: B_s, at least 1.
      large_batch: B_l, above ``small_batch``.

    Example:
      >>> import jaxrl_llm as jr
      >>> seen = jr.diagnostics.gradient_noise(5.0, 2.0, small_batch=2, large_batch=8)
      >>> float(seen.signal), float(seen.noise), float(seen.critical_batch)
      (1.0, 8.0, 8.0)

    References:
      McCandlish et al., An Empirical Model of Large-Batch Training (arXiv:1812.06162), appendix A.
    """
    function = "gradient_noise"
    checks.check_count(function, small_batch=small_batch, large_batch=large_batch)
    checks.check_non_negative(function, finite=True, small_norm=small_norm, large_norm=large_norm)
    if not large_batch > small_batch:
        raise ValueError(
            f"{function}: large_batch must be above small_batch; got {large_batch} and "
            f"{small_batch}."
        )
    small, large = (jnp.asarray(x, jnp.float32) for x in (small_norm, large_norm))
    signal = (large_batch * large - small_batch * small) / (large_batch - small_batch)
    noise = (small - large) / (1.0 / small_batch - 1.0 / large_batch)
    safe = jnp.where(signal > 0, signal, 1.0)
    critical = jnp.where(signal > 0, jnp.maximum(noise, 0.0) / safe, jnp.inf)
    return GradientNoise(signal, noise, critical)


def batch_cost(batch: Array, *, critical_batch: float) -> BatchCost:
    """Steps and samples to a goal, relative to the fewest possible of each.

        steps   = 1 + B_crit / B
        samples = 1 + B / B_crit          (steps - 1) (samples - 1) = 1

    Below the critical batch size, more rollouts per step reduce the number of steps almost in
    proportion. Above it they are mostly wasted, and it is better to split them into minibatches.
    The formula assumes the optimal step size at each batch size.

    Args:
      batch: B, samples of one update.
      critical_batch: B_crit, from :func:`gradient_noise`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> cost = jr.diagnostics.batch_cost(jnp.array([64.0, 256.0, 1024.0]), critical_batch=256)
      >>> cost.steps.tolist(), cost.samples.tolist()
      ([5.0, 2.0, 1.25], [1.25, 2.0, 5.0])

    References:
      McCandlish et al. (arXiv:1812.06162), equations 2.11 and 2.12.
    """
    checks.check_positive("batch_cost", finite=True, batch=batch, critical_batch=critical_batch)
    share = jnp.asarray(batch, jnp.float32) / critical_batch
    return BatchCost(1.0 + 1.0 / share, 1.0 + share)


def fastest_batch(critical_batch: Array, *, fixed: float, per_sample: float) -> Array:
    """The batch size that reaches a goal in the shortest time.

        time = (1 + B_crit / B) (fixed + per_sample B)
        B    = sqrt(B_crit fixed / per_sample)

    ``fixed`` is the part of a step's time that does not depend on the number of rollouts: the
    decoding steps of the longest response, each of which reads the weights, and the update. Where
    decoding is bound by memory bandwidth, most of the time is fixed, and the best batch is far
    above the critical one.

    Args:
      critical_batch: B_crit, from :func:`gradient_noise`.
      fixed: Seconds of a step without samples.
      per_sample: Seconds that each sample adds.

    Example:
      >>> import jaxrl_llm as jr
      >>> float(jr.diagnostics.fastest_batch(256.0, fixed=8.0, per_sample=0.125))
      128.0

    References:
      Ours: the minimum of the steps of McCandlish et al. (arXiv:1812.06162) times the step time.
    """
    function = "fastest_batch"
    checks.check_positive(
        function, finite=True, critical_batch=critical_batch, per_sample=per_sample
    )
    checks.check_positive(function, finite=True, fixed=fixed)
    return jnp.sqrt(jnp.asarray(critical_batch, jnp.float32) * (fixed / per_sample))


def outer_plateau(
    step_size: Array, samples: Array, *, curvature: float = 1.0, noise: float = 1.0
) -> Array:
    """Excess loss at which policy updates of constant step size stop improving.

        x' = x - alpha (h x + e),   e of variance noise / N
        E[h x^2 / 2] -> alpha noise / (2 N (2 - alpha h));   infinite where alpha h >= 2

    A policy update is one step of stochastic optimization: its size alpha grows with the allowed
    distance from the sampling policy, and its noise decreases with the N samples per update. A
    smaller step or more samples lower the plateau; more passes over the same samples do not reduce
    the noise.

    Args:
      step_size: alpha, the step size of a policy update.
      samples: N, the samples drawn between two policy updates.
      curvature: h, the curvature of the loss.
      noise: Variance of the gradient of one sample.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> step, count = jnp.array([0.5, 0.5, 0.25]), jnp.array([4, 8, 4])
      >>> jr.diagnostics.outer_plateau(step, count, curvature=2.0, noise=12.0).tolist()
      [0.75, 0.375, 0.25]

    References:
      Beukman et al. (arXiv:2603.06009) for the model; confidence ABSTRACT. The formula is that of
      stochastic gradient descent on a quadratic, as in Mandt et al. (arXiv:1704.04289).
    """
    function = "outer_plateau"
    checks.check_positive(function, finite=True, step_size=step_size, samples=samples)
    checks.check_positive(function, finite=True, curvature=curvature)
    checks.check_non_negative(function, finite=True, noise=noise)
    alpha, count = (jnp.asarray(x, jnp.float32) for x in (step_size, samples))
    room = 2.0 - alpha * curvature
    stays = alpha * noise / (2.0 * count * jnp.where(room > 0, room, 1.0))
    return jnp.where(room > 0, stays, jnp.inf)


def scale_rollouts(factor: int, *, samples: int, minibatches: int) -> OuterStep:
    """The samples and minibatches of a step with ``factor`` times the rollouts.

        samples' = factor samples,   minibatches' = factor minibatches

    The minibatch size and the learning rate do not change: a larger minibatch at a larger learning
    rate performed worse. In a run these are ``prompts_per_step`` and ``minibatches``.

    Args:
      factor: At least 1.
      samples: Current samples per step.
      minibatches: Current minibatches per pass over the samples; they divide ``samples``.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.diagnostics.scale_rollouts(4, samples=1024, minibatches=2)
      OuterStep(samples=4096, minibatches=8, minibatch_size=512)

    References:
      Beukman et al. (arXiv:2603.06009); confidence NOTES.
    """
    function = "scale_rollouts"
    checks.check_count(function, factor=factor, samples=samples, minibatches=minibatches)
    if samples % minibatches:
        raise ValueError(
            f"{function}: minibatches must divide samples; got {minibatches} and {samples}."
        )
    return OuterStep(factor * samples, factor * minibatches, samples // minibatches)
