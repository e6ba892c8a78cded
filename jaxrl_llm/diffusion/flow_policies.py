"""``FlowLikelihood``: how a flow policy samples, and the densities of its steps in a recipe.

It fills the slot of :class:`~jaxrl_llm.diffusion.Likelihood` for a model that predicts a velocity:
the log-densities of the K steps of a trajectory, ``[P, G, K]``, take the place of those of tokens.
A run sets K as ``sampling.max_new_tokens``; the levels of its steps are :func:`flow_levels`.

Raises: see :mod:`jaxrl_llm.diffusion`, TypeError and ValueError.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, bind, call_with, checks, masking, traits
from jaxrl_llm.diffusion import _inputs
from jaxrl_llm.diffusion.flow_trees import flow_tree
from jaxrl_llm.diffusion.flows import (
    FlowStep,
    branch_sde_step,
    flow_sde_step,
    latent_kl,
    ratio_norm,
    velocity_mse,
)


class FlowLikelihood(NamedTuple):
    """The steps of a flow policy, see the module; equal options make equal policies.

    Attributes:
      step: ``(x, v, sigma, sigma_next, *, eps, x_next) -> FlowStep``, and ``sigma_1`` if it names
        that: a bound :func:`flow_sde_step` or :func:`branch_sde_step`. None if no step is random:
        the last latent is then trained at all levels of its forward process, see
        :func:`forward_likelihood`.
      window: ``(first, end)``: steps from ``first`` to ``end - 1`` are random and train; the other
        steps follow the flow itself. None for all.
      splits: Steps at which each latent splits in two; see :func:`flow_tree`.
      split_noise: Factor of the noise at these steps.
      steps: K, if text precedes the steps: the last K of the T positions of a response are steps.
        None if all positions are steps.
    """

    step: Callable | None
    window: tuple[int, int] | None = None
    splits: tuple[int, ...] = ()
    split_noise: float = 1.0
    steps: int | None = None

    reads_advantages = False
    passes = 1

    @property
    def draws(self) -> bool:
        """Whether it is scored on noise that is drawn for a batch, not at the sampled latents."""
        return self.step is None

    @property
    def statistics(self) -> tuple[tuple[str, int], ...]:
        """What its scorer returns of each step besides, as of a Likelihood.

        Each with the number of axes behind ``[P, G, T]``.
        """
        if self.draws:
            return ("velocity", 1), ("target_velocity", 1), ("level", 0)
        return ("step_mean", 1), ("step_scale", 0), ("step_std", 0), ("velocity", 1)

    @property
    def fields(self) -> tuple[str, ...]:
        """What a batch holds for it.

        The latents, the noise of a forward process, and which cells of a text are its tokens.
        """
        noise = ("forward_noise",) if self.draws else ()
        return ("latents", *noise) if self.steps is None else ("latents", *noise, "written")

    def at(self, x: Array, v: Array, steps: Array, levels: np.ndarray, **drawn) -> FlowStep:
        """Steps by their numbers, int ``[...]``, from latents ``[..., D]``.

        ``drawn`` is either ``eps``, to sample, or ``x_next``, to score, ``[..., D]``.
        """
        if self.step is None:
            raise ValueError("FlowLikelihood: without a step it has no densities.")
        levels = jnp.asarray(levels, jnp.float32)
        context = {"sigma_1": levels[1], **drawn}
        return call_with(self.step, x, v, levels[steps], levels[steps + 1], context=context)

    def text_length(self, cells: int) -> int:
        """How many positions of a response are text tokens that precede the steps."""
        return 0 if self.steps is None else max(cells - self.steps, 0)

    def trains(self, steps: int) -> np.ndarray:
        """The steps that train, bool ``[K]``; they are random, unless ``step`` is None."""
        first, end = self.window or (0, steps)
        return (first <= np.arange(steps)) & (np.arange(steps) < end)

    def node_ids(
        self, steps: int, group_size: int, *, members: np.ndarray | None = None
    ) -> np.ndarray:
        """int32 ``[G, K]``, one id for each stretch of a tree between two splits.

        Members that share a latent have the same id.

        Args:
          steps: K.
          group_size: G, members of a group that the sampler makes.
          members: int ``[..., 2]``, the members of a batch, if they are not one group as sampled:
            the number of the first rollout of a member's request, and its place in that request.
            The result is then ``[..., K]``.

        Raises:
          ValueError: If a split is out of range, no step trains, the leaves of a tree do not divide
            a group, or there is no ``step`` whose noise tells them apart.

        Example:
          >>> import jaxrl_llm as jr
          >>> jr.diffusion.branch_likelihood(splits=(0, 1)).node_ids(3, 4).tolist()
          [[4, 8, 8], [4, 9, 9], [6, 10, 10], [6, 11, 11]]
        """
        function = "FlowLikelihood"
        flow_tree(steps, self.splits)
        if self.splits and self.draws:
            raise ValueError(
                f"{function}: without a step there is no noise, so the members that share a latent "
                f"would be equal to the end; leave out splits {self.splits}."
            )
        leaves = 2 ** len(self.splits)
        if group_size % leaves:
            raise ValueError(
                f"{function}: a tree with splits {self.splits} has {leaves} leaves, which do not "
                f"divide a group of {group_size}."
            )
        if not self.trains(steps).any():
            raise ValueError(
                f"{function}: window {self.window} begins behind the {steps} steps of a trajectory."
            )
        if members is None:
            members = np.stack([np.zeros(group_size, int), np.arange(group_size)], axis=-1)
        first, place = np.moveaxis(members, -1, 0)
        most, ids = np.max(first + place) + 1, []
        for step in range(steps):
            split = sum(s <= step for s in self.splits)
            shared = leaves // 2**split
            ids.append(split * most + first + place // shared * shared)
        return np.stack(ids, axis=-1).astype(np.int32)


def flow_levels(steps: int) -> np.ndarray:
    """Noise levels of a trajectory, from 1 to 0 in equal steps.

        sigma_k = 1 - k / K

    Args:
      steps: K, at least 1.

    Returns:
      float32 ``[K + 1]``, NumPy, since it is static.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.diffusion.flow_levels(4).tolist()
      [1.0, 0.75, 0.5, 0.25, 0.0]

    References:
      Liu et al., Flow-GRPO (arXiv:2505.05470), which uses the shifted schedule of its model.
    """
    checks.check_count("flow_levels", steps=steps)
    return np.linspace(1.0, 0.0, steps + 1, dtype=np.float32)


def flow_likelihood(
    *,
    noise: float = 0.7,
    window: tuple[int, int] | None = None,
    reduce: str = "mean",
    steps: int | None = None,
) -> FlowLikelihood:
    """The steps of :func:`flow_sde_step`, which preserves the marginals of the flow.

    Args:
      noise: Above 0.
      window: Steps that are random and train, from the first to one past the last; None for all.
      reduce: Reduction over the dimensions of a latent, "mean" or "sum".
      steps: Steps per trajectory, for a model that writes text first; None for no text.

    Returns:
      A :class:`FlowLikelihood`.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.diffusion.flow_likelihood(window=(0, 2)).trains(4).tolist()
      [True, True, False, False]

    References:
      Liu et al., Flow-GRPO (arXiv:2505.05470); a window as in MixGRPO (arXiv:2507.21802).
    """
    name = "flow_likelihood"
    checks.check_positive(name, finite=True, noise=noise)
    checks.check_option(name, "reduce", reduce, ("mean", "sum"))
    if window is not None:
        window = tuple(window)
        if len(window) != 2 or not 0 <= window[0] < window[1]:
            raise ValueError(
                f"{name}: window must be a first step from 0 and an end above it; got {window}."
            )
    if steps is not None:
        checks.check_count(name, steps=steps)
    return FlowLikelihood(bind(flow_sde_step, noise=noise, reduce=reduce), window, steps=steps)


def branch_likelihood(
    *, eta: float = 0.3, splits: Sequence[int] = (0, 3, 6, 9), split_noise: float = 4.0
) -> FlowLikelihood:
    """The steps of :func:`branch_sde_step`, on a tree that splits in two at some steps.

    Args:
      eta: Noise per unit of time, above 0.
      splits: Steps at which the tree splits, ascending, from 0.
      split_noise: Factor of the noise at these steps, above 0; log-densities leave it out.

    Returns:
      A :class:`FlowLikelihood`.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.diffusion.branch_likelihood(splits=(0,)).node_ids(2, 2).tolist()
      [[2, 2], [3, 3]]

    References:
      Li et al., BranchGRPO (arXiv:2509.06040), the released code: 20 steps, 16 leaves.
    """
    name = "branch_likelihood"
    checks.check_positive(name, finite=True, eta=eta, split_noise=split_noise)
    if not splits:
        raise ValueError(f"{name}: there are no splits; take flow_likelihood.")
    flow_tree(max(splits) + 1, splits)
    return FlowLikelihood(bind(branch_sde_step, eta=eta), None, tuple(splits), split_noise)


def forward_likelihood() -> FlowLikelihood:
    """A flow policy that samples without randomness and trains on its forward process.

        x = last latent of a trajectory of K steps;   noise_k ~ N(0, 1), drawn for each batch
        x_k = (1 - sigma_k) x + sigma_k noise_k,   target_k = noise_k - x
        logp_k = -mean over D of (velocity(x_k) - target_k)^2

    A trajectory without noise has no densities, and only its last latent is used. All K levels of
    the sampler train, those of :func:`flow_levels` above 0. ``logp`` is minus the loss of flow
    matching: up to a weight of the level it bounds the log-likelihood of the latent from below. The
    policy being trained, the old policy and a reference share the noise.

    Returns:
      A :class:`FlowLikelihood`. Its scorer returns ``velocity`` and ``target_velocity`` ``[..., K,
      D]`` and ``level`` ``[..., K]`` besides; see :func:`diffusion_nft`.

    Example:
      >>> import jaxrl_llm as jr
      >>> likelihood = jr.diffusion.forward_likelihood()
      >>> likelihood.fields, likelihood.trains(3).tolist()
      (('latents', 'forward_noise'), [True, True, True])

    References:
      Zheng et al., DiffusionNFT (arXiv:2509.16117), the released code, which leaves out one of the
      K levels of each sample, at random; the expected loss is the same. Its levels are the shifted
      ones of its model, here those of :func:`flow_levels`.
    """
    return FlowLikelihood(None)


def flow_kl(
    step_mean: Array,
    ref_step_mean: Array,
    step_std: Array,
    mask: Array,
    *,
    coef: float | Array = 0.04,
) -> Array:
    """:func:`latent_kl` of each step as a regularizer, in the form of the released code.

        loss[t] = coef mean over D of (mean - ref mean)^2 / (2 std^2)

    Args:
      step_mean, ref_step_mean: ``[..., T, D]``, floating point; ``ref_step_mean`` is a constant.
      step_std: ``[..., T]``, noise per unit of time, :attr:`FlowStep.std`; 0 for the tokens of a
        text before the steps, which have no divergence.
      mask: bool ``[..., T]``, True for steps that train.
      coef: Not negative.

    Returns:
      ``[..., T]`` float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.diffusion.flow_kl(jnp.full((1, 2), 0.1), jnp.zeros((1, 2)), jnp.full(1, 0.5),
      ...     jnp.ones(1, bool), coef=1.0).round(4).tolist()
      [0.0199...]

    References:
      Liu et al., Flow-GRPO (arXiv:2505.05470). The divergence itself is larger by 1 / |dt|.
    """
    _inputs.check_token_mask("flow_kl", "mask", mask)
    checks.check_non_negative("flow_kl", coef=coef)
    where = mask & (step_std > 0)
    step_mean, ref_step_mean = (_read(x, where) for x in (step_mean, ref_step_mean))
    std = jnp.where(where, step_std, 1.0)
    return masking.zero_masked(coef * latent_kl(step_mean, ref_step_mean, std), where)


def flow_mse(
    velocity: Array,
    ref_velocity: Array,
    mask: Array,
    *,
    coef: float | Array = 1.5e-5,
    reduce: str = "sum",
) -> Array:
    """:func:`velocity_mse` of each step, times ``coef``, as a regularizer.

    Args:
      velocity, ref_velocity: ``[..., T, D]``, floating point; ``ref_velocity`` is a constant.
      mask: bool ``[..., T]``, True for steps that train.
      coef: Not negative. For a sum, sources use 1.5e-5 and 0.1; it depends on the number of
        dimensions. For a mean, DiffusionNFT uses 1e-4.
      reduce: "sum" over the D dimensions, or their "mean".

    Returns:
      ``[..., T]`` float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> v, mask = jnp.array([[0.5, 0.0]]), jnp.ones(1, bool)
      >>> jr.diffusion.flow_mse(v, jnp.zeros((1, 2)), mask, coef=2.0).tolist()
      [0.5]

    References:
      UniGRPO (arXiv:2603.23500), the sum; confidence PAPER, from notes on it. Zheng et al.,
      DiffusionNFT (arXiv:2509.16117), the mean, in the released code.
    """
    _inputs.check_token_mask("flow_mse", "mask", mask)
    checks.check_non_negative("flow_mse", coef=coef)
    checks.check_option("flow_mse", "reduce", reduce, ("sum", "mean"))
    squares = velocity_mse(velocity, ref_velocity, where=mask)
    return coef * (squares / jnp.shape(velocity)[-1] if reduce == "mean" else squares)


@traits(policy_gradient=False)
def flow_clip(
    logp: Array,
    old_logp: Array,
    advantages: Array,
    mask: Array,
    *,
    step_mean: Array,
    old_step_mean: Array,
    step_scale: Array,
    eps: float = 1e-4,
    reduce: str = "mean",
) -> Array:
    """The clipped ratio of each step, normalized so that its spread is equal at all noise levels.

        R = exp(ratio_norm(logp - old_logp));   loss[t] = -min(R A, clip(R, 1 - eps, 1 + eps) A)

    Args:
      logp: ``[..., T]``, floating point, log-densities of the steps.
      old_logp: ``[..., T]``, under the policy that sampled; a constant.
      advantages: ``[..., T]``, or ``[...]``, one per trajectory; a constant.
      mask: bool ``[..., T]``, True for steps that train.
      step_mean, old_step_mean: ``[..., T, D]``, means of the Gaussians; the old mean is a constant.
      step_scale: ``[..., T]``, their standard deviation, :attr:`FlowStep.scale`; 0 for the tokens
        of a text before the steps, which do not train here.
      eps: Clip of the ratio, above 0.
      reduce: "mean" or "sum", as the likelihood reduces over dimensions, ``reduce`` of
        :func:`flow_likelihood`: the two must agree, which the densities do not tell.

    Returns:
      ``[..., T]`` float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mean, mask = jnp.zeros(2), jnp.zeros((2, 3)), jnp.ones(2, bool)
      >>> jr.diffusion.flow_clip(logp, logp, jnp.array(0.5), mask,
      ...     step_mean=mean, old_step_mean=mean, step_scale=jnp.ones(2)).tolist()
      [-0.5, -0.5]

    References:
      UniGRPO (arXiv:2603.23500), after GRPO-Guard; confidence PAPER, from notes on it.
    """
    function = "flow_clip"
    checks.check_float(function, logp=logp, old_logp=old_logp, advantages=advantages)
    _inputs.check_token_mask(function, "mask", mask)
    checks.check_same_shape(function, logp=logp, old_logp=old_logp, mask=mask)
    checks.check_positive(function, finite=True, eps=eps)
    checks.check_option(function, "reduce", reduce, ("mean", "sum"))
    if jnp.ndim(advantages) == jnp.ndim(mask) - 1:
        advantages = advantages[..., None]
    where = mask & (step_scale > 0)
    advantages = masking.zero_masked(jnp.broadcast_to(advantages, jnp.shape(mask)), where)
    advantages, old_logp = map(jax.lax.stop_gradient, (advantages, old_logp))
    mean, old_mean = (_read(x, where) for x in (step_mean, old_step_mean))
    log_ratio = masking.zero_masked(logp, where) - masking.zero_masked(old_logp, where)
    scale = jnp.where(where, step_scale, 1.0)
    ratio = jnp.exp(ratio_norm(log_ratio, mean, old_mean, scale, reduce=reduce))
    clipped = jnp.clip(ratio, 1.0 - eps, 1.0 + eps)
    return masking.zero_masked(-jnp.minimum(ratio * advantages, clipped * advantages), where)


@traits(policy_gradient=False)
def diffusion_nft(
    logp: Array,
    old_logp: Array,
    advantages: Array,
    mask: Array,
    *,
    velocity: Array,
    ref_velocity: Array,
    target_velocity: Array,
    level: Array,
    beta: float = 1.0,
    bound: float = 5.0,
    normalized: bool = True,
) -> Array:
    """Flow matching toward good samples, and away from bad ones by an implicit negative policy.

        r = 1/2 + clip(A / bound, -1, 1) / 2
        v+ = (1 - beta) ref_v + beta v,     v- = (1 + beta) ref_v - beta v
        loss[t] = bound / beta (r E(v+) + (1 - r) E(v-))
        E(u) = mean over D of e^2 / max(mean over D of |e|, 1e-5),    e = level (u - target_v)

    ``e`` is the error of the clean sample that ``u`` predicts, and the denominator of ``E`` is a
    constant. Where the policy is the reference, the gradient is that of ``E(v)`` times the
    advantage, clipped to ``[-bound, bound]``: toward the sample, away from it, or none. Without
    the denominators a sample's term is least at ``ref_v + (2 r - 1) / beta (target_v - ref_v)``, so
    ``beta`` bounds how far the policy leaves the reference. With ``r = 1`` everywhere it is flow
    matching of ``v+``, which is the policy itself for ``beta = 1``.

    It needs no density, so any sampler may make the samples. It compares the policy with the
    reference in place of ``old_logp``, so a batch may have several optimizer steps.

    Args:
      logp, old_logp: Not read.
      advantages: ``[..., T]``, or ``[...]``, one per sample; a constant.
      mask: bool ``[..., T]``, True for levels that train.
      velocity: ``[..., T, D]``, floating point, of the policy at latents of the forward process.
      ref_velocity: ``[..., T, D]``, of the policy that sampled, at the same; a constant.
      target_velocity: ``[..., T, D]``, noise minus clean sample.
      level: ``[..., T]``, noise levels in (0, 1].
      beta: Strength of the implicit policies, above 0.
      bound: Bound of the advantages, above 0.
      normalized: Whether the errors are those of the clean sample, over their own size, as in the
        released code; else ``E(u)`` is the mean over D of ``(u - target_v)^2``, as in the paper.

    Returns:
      ``[..., T]`` float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logp, mask, zeros = jnp.zeros(1), jnp.ones(1, bool), jnp.zeros((1, 2))
      >>> jr.diffusion.diffusion_nft(logp, logp, jnp.array(5.0), mask, velocity=zeros + 0.5,
      ...     ref_velocity=zeros, target_velocity=zeros + 1.0, level=jnp.array([0.5])).tolist()
      [1.25]

    References:
      Zheng et al., DiffusionNFT (arXiv:2509.16117), and the released code, which adds the
      factor ``bound / beta``.
    """
    del logp, old_logp
    function = "diffusion_nft"
    _inputs.check_token_mask(function, "mask", mask)
    velocities = {"velocity": velocity, "ref_velocity": ref_velocity}
    velocities["target_velocity"] = target_velocity
    checks.check_float(function, advantages=advantages, level=level, **velocities)
    checks.check_same_shape(function, **velocities)
    checks.check_min_rank(function, 2, velocity=velocity)
    checks.check_shape(function, "velocity", velocity, (*jnp.shape(mask), jnp.shape(velocity)[-1]))
    checks.check_same_shape(function, level=level, mask=mask)
    checks.check_positive(function, finite=True, beta=beta, bound=bound)
    advantages = masking.spread(function, "advantages", advantages, mask)
    r = 0.5 + 0.5 * jnp.clip(advantages / bound, -1.0, 1.0)
    v, old, target = (_read(x, mask) for x in (velocity, ref_velocity, target_velocity))
    r, old, target = map(jax.lax.stop_gradient, (r, old, target))
    level = masking.zero_masked(level, mask)[..., None] if normalized else 1.0

    def error(u: Array) -> Array:
        e = level * (u - target)
        size = jnp.mean(jnp.abs(e), axis=-1, keepdims=True) if normalized else 1.0
        return jnp.mean(e**2 / jax.lax.stop_gradient(jnp.maximum(size, 1e-5)), axis=-1)

    positive = error((1.0 - beta) * old + beta * v)
    negative = error((1.0 + beta) * old - beta * v)
    return masking.zero_masked(bound / beta * (r * positive + (1.0 - r) * negative), mask)


def _read(x: Array, mask: Array) -> Array:
    """Vectors ``[..., T, D]`` with 0 where masked."""
    return masking.zero_masked(x, jnp.asarray(mask)[..., None])
