"""Flow policies: each step of denoising a latent is a Gaussian action with a log-density.

The noise level falls from 1 to 0 over the steps, ``dt = sigma_next - sigma < 0``. A trajectory of K
steps has log-densities ``[..., K]``, which replace the log-probabilities of K tokens: Flow-GRPO is
``surrogates.ppo_clip`` on them with ``eps_low=eps_high=1e-4`` and advantages clipped to +-5.

- ``x``: ``[..., D]``, floating point, the latent at ``sigma``; flatten the axes of an image into D.
- ``v``: ``[..., D]``, floating point, the velocity that the model predicts at ``x``.
- ``sigma``, ``sigma_next``: ``[...]`` or numbers, noise levels in (0, 1] and in [0, 1).
- ``eps``: ``[..., D]``, floating point, standard normal, to sample the next latent. Pass either
  ``eps`` or ``x_next``.
- ``x_next``: ``[..., D]``, floating point, a latent that was sampled before, to score it.
- ``reduce``: "mean" over the D dimensions, as in released code, or "sum", the log-density.

Raises: see :mod:`jaxrl_llm.diffusion`, TypeError and ValueError.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks

REDUCE = ("mean", "sum")


class FlowStep(NamedTuple):
    """One step of a flow policy.

    Attributes:
      x: ``[..., D]``, the next latent.
      logp: ``[...]``, its log-density.
      mean: ``[..., D]``, the mean of the Gaussian.
      std: ``[...]``, its noise per unit of time.
      scale: ``[...]``, its standard deviation, ``std sqrt(-dt)``.
    """

    x: Array
    logp: Array
    mean: Array
    std: Array
    scale: Array


def gaussian_logprob(x: Array, mean: Array, scale: Array | float, *, reduce: str = "mean") -> Array:
    """The log-density of a Gaussian with one standard deviation for all dimensions.

        log p = reduce over D of  -(x - mean)^2 / (2 scale^2) - log scale - log(2 pi) / 2

    Args:
      x, mean: ``[..., D]``, floating point.
      scale: ``[...]`` or a number, above 0.
      reduce: See the module.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.diffusion.gaussian_logprob(jnp.zeros(3), jnp.zeros(3), 1.0).round(4).item()
      -0.918...

    References:
      Liu et al., Flow-GRPO (arXiv:2505.05470), the mean.
    """
    function = "gaussian_logprob"
    checks.check_float(function, x=x, mean=mean)
    checks.check_min_rank(function, 1, x=x)
    checks.check_same_shape(function, x=x, mean=mean)
    checks.check_option(function, "reduce", reduce, REDUCE)
    checks.check_positive(function, scale=scale)
    scale = _of_rows(function, "scale", scale, jnp.shape(x)[:-1])
    z = (jnp.asarray(x, jnp.float32) - jnp.asarray(mean, jnp.float32)) / scale[..., None]
    squares = _reduced(z**2, reduce)
    count = jnp.shape(x)[-1] if reduce == "sum" else 1
    return -squares / 2.0 - count * (jnp.log(scale) + 0.5 * math.log(2.0 * math.pi))


def flow_sde_step(
    x: Array,
    v: Array,
    sigma: Array | float,
    sigma_next: Array | float,
    *,
    sigma_1: Array | float,
    noise: float = 0.7,
    eps: Array | None = None,
    x_next: Array | None = None,
    reduce: str = "mean",
) -> FlowStep:
    """A step of the stochastic sampler that preserves the marginals of the flow.

        std   = noise sqrt(sigma / (1 - sigma))        at sigma = 1 with sigma_1 in the denominator
        mean  = x (1 + std^2 / (2 sigma) dt) + v (1 + std^2 (1 - sigma) / (2 sigma)) dt
        x'    = mean + std sqrt(-dt) eps

    As ``noise`` goes to 0 it becomes the step of the flow, ``x + v dt``, which has no density. The
    gradient of ``logp`` flows through ``mean``, not through the latent that is scored.

    Args:
      x, v, sigma, sigma_next, eps, x_next, reduce: See the module.
      sigma_1: ``[...]`` or a number, the noise level after the first step, below 1.
      noise: Above 0.

    Returns:
      A :class:`FlowStep`, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> step = jr.diffusion.flow_sde_step(
      ...     jnp.ones(1), jnp.full(1, 0.5), 0.8, 0.6, sigma_1=0.9, eps=jnp.full(1, 0.3))
      >>> step.mean.round(4).tolist(), step.logp.round(4).item()
      ([0.630...], -0.495...)

    References:
      Liu et al., Flow-GRPO (arXiv:2505.05470).
    """
    function = "flow_sde_step"
    x, v, sigma, sigma_next = _step_inputs(function, x, v, sigma, sigma_next)
    checks.check_positive(function, finite=True, noise=noise)
    checks.check_share(function, one=False, sigma_1=sigma_1)
    sigma_1 = _of_rows(function, "sigma_1", sigma_1, x.shape[:-1])
    dt = sigma_next - sigma
    std = noise * jnp.sqrt(sigma / (1.0 - jnp.where(sigma >= 1.0, sigma_1, sigma)))
    drift = (std**2 / (2.0 * sigma))[..., None]
    at, rest = dt[..., None], (1.0 - sigma)[..., None]
    mean = x * (1.0 + drift * at) + v * (1.0 + drift * rest) * at
    return _drawn(function, mean, std, dt, eps, x_next, 1.0, reduce)


def branch_sde_step(
    x: Array,
    v: Array,
    sigma: Array | float,
    sigma_next: Array | float,
    *,
    eta: float = 0.3,
    noise_scale: float = 1.0,
    eps: Array | None = None,
    x_next: Array | None = None,
    reduce: str = "mean",
) -> FlowStep:
    """A step of the stochastic sampler with constant noise, which may branch.

        x0   = x - sigma v,   score = -(x - (1 - sigma) x0) / sigma^2
        mean = x + v dt - eta^2 / 2 score dt
        x'   = mean + noise_scale eta sqrt(-dt) eps

    Where a tree splits, each child of a latent gets independent noise, scaled by ``noise_scale``;
    the log-density uses the standard deviation without that factor. :func:`flow_tree` builds the
    tree, ``advantages.node_rewards`` and ``depth_advantages`` assign its credit, and
    ``curation.depth_prune`` and ``width_prune`` select the nodes that train.

    Args:
      x, v, sigma, sigma_next, eps, x_next, reduce: See the module.
      eta: Noise per unit of time, above 0.
      noise_scale: Above 0; only with ``eps``.

    Returns:
      A :class:`FlowStep`, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> step = jr.diffusion.branch_sde_step(
      ...     jnp.ones(1), jnp.full(1, 0.5), 0.8, 0.6, eps=jnp.zeros(1))
      >>> step.mean.round(4).tolist(), step.scale.round(4).item()
      ([0.887...], 0.134...)

    References:
      Li et al., BranchGRPO (arXiv:2509.06040), the released code, with the step of DanceGRPO
      (arXiv:2505.07818).
    """
    function = "branch_sde_step"
    x, v, sigma, sigma_next = _step_inputs(function, x, v, sigma, sigma_next)
    checks.check_positive(function, finite=True, eta=eta, noise_scale=noise_scale)
    if eps is None and noise_scale != 1.0:
        checks.check_no_effect(function, "without eps", noise_scale=noise_scale)
    dt, level = (sigma_next - sigma)[..., None], sigma[..., None]
    start = x - level * v
    score = -(x - (1.0 - level) * start) / level**2
    mean = x + v * dt - 0.5 * eta**2 * score * dt
    std = jnp.full(sigma.shape, eta, jnp.float32)
    return _drawn(function, mean, std, dt[..., 0], eps, x_next, noise_scale, reduce)


def latent_kl(mean: Array, ref_mean: Array, std: Array | float, *, reduce: str = "mean") -> Array:
    """The divergence between two Gaussians with equal standard deviations.

        KL = reduce over D of (mean - ref_mean)^2 / (2 std^2)

    With ``step.scale`` and ``reduce="sum"`` it is the KL divergence of a step. Released code takes
    the mean and ``step.std``, which is smaller by ``|dt|``.

    Args:
      mean: ``[..., D]``, floating point, under the policy being trained.
      ref_mean: ``[..., D]``, under the reference at the same latent; a constant.
      std: ``[...]`` or a number, above 0.
      reduce: See the module.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.diffusion.latent_kl(jnp.full(2, 0.1), jnp.zeros(2), 0.5).round(4).item()
      0.0199...

    References:
      Liu et al., Flow-GRPO (arXiv:2505.05470), whose coefficient is 0.04.
    """
    function = "latent_kl"
    checks.check_float(function, mean=mean, ref_mean=ref_mean)
    checks.check_min_rank(function, 1, mean=mean)
    checks.check_same_shape(function, mean=mean, ref_mean=ref_mean)
    checks.check_option(function, "reduce", reduce, REDUCE)
    checks.check_positive(function, std=std)
    std = _of_rows(function, "std", std, jnp.shape(mean)[:-1])
    ref_mean = jax.lax.stop_gradient(jnp.asarray(ref_mean, jnp.float32))
    shift = jnp.asarray(mean, jnp.float32) - ref_mean
    return _reduced(shift**2, reduce) / (2.0 * std**2)


def ratio_norm(
    log_ratio: Array,
    mean: Array,
    old_mean: Array,
    scale: Array | float,
    *,
    reduce: str = "mean",
) -> Array:
    """The log ratio of a step without its bias, on the same scale for all steps.

        log Rn = scale (log R + |mean - old_mean|^2 / (2 scale^2)) = (mean - old_mean) . eps

    A ratio of Gaussians is biased below 1, and the bias grows as the noise of a step shrinks, so a
    single clip range affects only some steps. ``reduce`` must match the log-densities in
    ``log_ratio``.

    Args:
      log_ratio: ``[...]``, floating point, the difference of two :func:`gaussian_logprob` with
        ``scale``.
      mean, old_mean: ``[..., D]``, floating point; the old mean is a constant.
      scale: ``[...]`` or a number, above 0.
      reduce: See the module.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> x, mean, old = jnp.full(1, 0.3), jnp.full(1, 0.1), jnp.zeros(1)
      >>> log_ratio = jr.diffusion.gaussian_logprob(x, mean, 0.5) - jr.diffusion.gaussian_logprob(
      ...     x, old, 0.5)
      >>> jr.diffusion.ratio_norm(log_ratio, mean, old, 0.5).round(4).item()
      0.0599...

    References:
      UniGRPO (arXiv:2603.23500), after GRPO-Guard; confidence PAPER, from notes on it.
    """
    function = "ratio_norm"
    checks.check_float(function, log_ratio=log_ratio, mean=mean, old_mean=old_mean)
    checks.check_min_rank(function, 1, mean=mean)
    checks.check_same_shape(function, mean=mean, old_mean=old_mean)
    checks.check_shape(function, "log_ratio", log_ratio, jnp.shape(mean)[:-1])
    checks.check_positive(function, scale=scale)
    scale = _of_rows(function, "scale", scale, jnp.shape(log_ratio))
    log_ratio = jnp.asarray(log_ratio, jnp.float32)
    return scale * (log_ratio + latent_kl(mean, old_mean, scale, reduce=reduce))


def velocity_mse(v: Array, ref_v: Array, *, where: Array | None = None) -> Array:
    """The squared distance of two velocities, an alternative to the divergence of the latents.

        mse = sum over D of (v - ref_v)^2

    The KL divergence of a step is this distance times a weight that depends on the noise level,
    ``|dt| / 2 (std (1 - sigma) / (2 sigma) + 1 / std)^2``.

    Args:
      v: ``[..., D]``, floating point, under the policy being trained.
      ref_v: ``[..., D]``, under the reference at the same latents; a constant.
      where: bool ``[...]``, True for the steps that train; None for all.

    Returns:
      ``[...]`` float32; 0 where ``where`` is False.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.diffusion.velocity_mse(jnp.array([0.5, 0.0]), jnp.array([0.0, 1.0])).item()
      1.25

    References:
      UniGRPO (arXiv:2603.23500); confidence PAPER, from notes on it.
    """
    function = "velocity_mse"
    checks.check_float(function, v=v, ref_v=ref_v)
    checks.check_min_rank(function, 1, v=v)
    checks.check_same_shape(function, v=v, ref_v=ref_v)
    checks.check_bool(function, where=where)
    keep = None
    if where is not None:
        checks.check_shape(function, "where", where, jnp.shape(v)[:-1])
        keep = where[..., None]
    ref_v = jax.lax.stop_gradient(ref_v)
    shift = _difference(v, ref_v, keep)
    return jnp.sum(shift**2, axis=-1)


def joint_loss(
    text: Array, flow: Array, penalty: Array, *, gamma: float, lam: float = 1.0
) -> Array:
    """The joint loss of a model that writes its reasoning and then denoises an image.

        loss = text + lam flow + gamma penalty

    Both terms of a trajectory use one advantage, computed from the reward of the image.

    Args:
      text: ``[]``, floating point, the loss of the tokens.
      flow: ``[]``, floating point, the loss of the steps.
      penalty: ``[]``, floating point, the mean of :func:`velocity_mse` over the steps that train.
      gamma: Not negative. Sources use 1.5e-5 and 0.1; it depends on the number of dimensions.
      lam: Not negative.

    Returns:
      ``[]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.diffusion.joint_loss(
      ...     jnp.array(0.5), jnp.array(0.25), jnp.array(2.0), gamma=0.5).item()
      1.75

    References:
      UniGRPO (arXiv:2603.23500); confidence PAPER, from notes on it.
    """
    function = "joint_loss"
    checks.check_float(function, text=text, flow=flow, penalty=penalty)
    checks.check_rank(function, 0, text=text, flow=flow, penalty=penalty)
    checks.check_non_negative(function, finite=True, gamma=gamma, lam=lam)
    return jnp.asarray(text + lam * flow + gamma * penalty, jnp.float32)


def diffusion_mse(noise: Array, predicted: Array) -> Array:
    """The squared error of predicted noise, whose negative replaces a log-probability.

        mse = sum over D of (noise - predicted)^2

    Policy and reference share the noise of the latent and its level. The smaller the error, the
    likelier the latent: ``-mse`` bounds the log-likelihood up to a weight of the level.

    Args:
      noise: ``[..., D]``, floating point, the noise that was added.
      predicted: ``[..., D]``, floating point.

    Returns:
      ``[...]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.diffusion.diffusion_mse(jnp.array([1.0, 0.0]), jnp.array([0.0, 0.5])).item()
      1.25

    References:
      Wallace et al., Diffusion-DPO (arXiv:2311.12908); SePPO (arXiv:2410.05255).
    """
    function = "diffusion_mse"
    checks.check_float(function, noise=noise, predicted=predicted)
    checks.check_min_rank(function, 1, noise=noise)
    checks.check_same_shape(function, noise=noise, predicted=predicted)
    return jnp.sum(_difference(noise, predicted, None) ** 2, axis=-1)


def _difference(x: Array, y: Array, where: Array | None) -> Array:
    """``x - y`` in float32, 0 where masked; the masked values are never read."""
    x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    if where is None:
        return x - y
    return jnp.where(where, x, 0.0) - jnp.where(where, y, 0.0)


def _reduced(x: Array, reduce: str) -> Array:
    return jnp.mean(x, axis=-1) if reduce == "mean" else jnp.sum(x, axis=-1)


def _of_rows(function: str, name: str, x: Array | float, rows: tuple[int, ...]) -> Array:
    """A number or ``[...]`` as float32 ``[...]``."""
    if jnp.shape(x) not in ((), rows):
        checks.check_shape(function, name, x, rows)
    return jnp.broadcast_to(jnp.asarray(x, jnp.float32), rows)


def _step_inputs(function: str, x, v, sigma, sigma_next) -> tuple[Array, Array, Array, Array]:
    """The arrays of a step, checked, in float32."""
    checks.check_float(function, x=x, v=v)
    checks.check_min_rank(function, 1, x=x)
    checks.check_same_shape(function, x=x, v=v)
    checks.check_share(function, zero=False, sigma=sigma)
    checks.check_share(function, one=False, sigma_next=sigma_next)
    levels = [x for x in (sigma, sigma_next) if isinstance(x, (int, float))]
    if len(levels) == 2 and not sigma_next < sigma:
        raise ValueError(f"{function}: sigma_next {sigma_next} must be below sigma {sigma}.")
    rows = jnp.shape(x)[:-1]
    x, v = jnp.asarray(x, jnp.float32), jnp.asarray(v, jnp.float32)
    sigma = _of_rows(function, "sigma", sigma, rows)
    return x, v, sigma, _of_rows(function, "sigma_next", sigma_next, rows)


def _drawn(function: str, mean, std, dt, eps, x_next, noise_scale, reduce) -> FlowStep:
    """The step of a Gaussian, sampled with ``eps`` or scored at ``x_next``."""
    if (eps is None) == (x_next is None):
        raise ValueError(f"{function}: give either eps, to sample, or x_next, to score.")
    checks.check_float(function, eps=eps, x_next=x_next)
    scale = std * jnp.sqrt(-dt)
    if x_next is None:
        checks.check_shape(function, "eps", eps, mean.shape)
        x_next = mean + noise_scale * scale[..., None] * jnp.asarray(eps, jnp.float32)
    checks.check_shape(function, "x_next", x_next, mean.shape)
    x_next = jnp.asarray(x_next, jnp.float32)
    logp = gaussian_logprob(jax.lax.stop_gradient(x_next), mean, scale, reduce=reduce)
    return FlowStep(x_next, logp, mean, std, scale)
