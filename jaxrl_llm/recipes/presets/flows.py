"""Methods for flow policies: steps of denoising, or levels of noise, are the tokens.

They train a model with a velocity, such as ``models.make_flow_model``; a run sets the steps of a
trajectory as ``sampling.max_new_tokens``, for ``unigrpo`` including the text before them.
"""

from typing import Literal

import jax.numpy as jnp

from jaxrl_llm import advantages, aggregate, curation, diffusion, regularizers, surrogates
from jaxrl_llm.core import Array, bind, chain, checks, stateless, traits
from jaxrl_llm.recipes.presets.base import from_base, nonzero_term
from jaxrl_llm.recipes.recipe import Recipe

__all__ = ["branch_grpo_flow", "diffusion_nft", "flow_grpo", "sol_rl_flow", "unigrpo"]


def flow_grpo(
    *,
    noise: float = 0.7,
    window: tuple[int, int] | None = None,
    eps: float = 1e-4,
    kl_coef: float = 0.04,
    bound: float = 5.0,
) -> Recipe:
    """GRPO on the steps of a stochastic sampler with the same marginals as the flow.

        A = clip((r - mean_group r) / (std_batch r + 1e-4), -bound, bound)
        KL = mean over D of (mean - ref mean)^2 / (2 std^2)   of a step

    Args:
      noise: Noise level of the sampler.
      window: Steps that are random and train, ``(first, end)``; None for all.
      eps: Clip range of a step's ratio.
      kl_coef: Weight of the KL to the reference.
      bound: Bound of the advantages.

    References:
      Liu et al., Flow-GRPO (arXiv:2505.05470), the released code with its two updates on a batch.
      It drops trajectories whose advantage is 0, which count in the mean here, and samples its last
      step with noise without training it. It samples and trains with classifier-free guidance of
      4.5, and evaluates and saves a moving average of the weights; neither is included here.
    """
    credit = stateless(advantages.grpo, scale="batch", ddof=0, eps=1e-4)
    return from_base(
        name="flow_grpo",
        advantage=chain(credit, stateless(advantages.clip, bound=bound)),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps, eps_high=eps),
        regularizers=nonzero_term(diffusion.flow_kl, coef=kl_coef),
        likelihood=diffusion.flow_likelihood(noise=noise, window=window),
        minibatches=2,
        paper="arXiv:2505.05470",
    )


def branch_grpo_flow(
    *,
    splits: tuple[int, ...] = (0, 3, 6, 9),
    eta: float = 0.3,
    split_noise: float = 4.0,
    ratio: float | None = None,
    eps: float = 1e-3,
    bound: float = 5.0,
) -> Recipe:
    """Trajectories that share their first steps, and advantages by depth.

        R(node) = mean reward of its leaves;   A = R standardized among the nodes of its depth
        each step of the tree trains once, with the A of the node it leads to

    Args:
      splits: Steps at which each latent continues as two; a group has ``2 ** len(splits)`` members,
        or several such trees.
      eta: Noise level of the sampler.
      split_noise: Factor of the noise at the steps that split.
      ratio: Share of the last nodes that train, half of them the best, each with all its steps
        behind the last split; None for all.
      eps: Clip range of a step's ratio.
      bound: Bound of the advantages.

    References:
      Li et al., BranchGRPO (arXiv:2509.06040), the released code: 20 steps. It makes an update
      every 12 steps of the trees, in random order, here one a batch, so that the ratio is 1 unless
      the run sets ``minibatches``. Its scripts prune no leaf. Where it prunes, the step of
      the last split always trains; with ``ratio`` it is pruned too. Its sliding window of depths is
      ``selection=bind(curation.branch_tokens, window=...)``, over the segments between splits.
    """
    selection = bind(curation.branch_tokens, current_version=None)
    return from_base(
        name="branch_grpo_flow",
        advantage=stateless(advantages.branch_advantages, bound=bound, old_logp=None),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps, eps_high=eps),
        selection=selection if ratio is None else bind(selection, ratio=ratio),
        likelihood=diffusion.branch_likelihood(eta=eta, splits=splits, split_noise=split_noise),
        paper="arXiv:2509.06040",
    )


def diffusion_nft(
    *,
    beta: float = 1.0,
    bound: float = 5.0,
    kl_coef: float = 1e-4,
    slope: float = 0.001,
    most: float = 0.5,
    flat: float = 0,
) -> Recipe:
    """Flow matching toward good samples of a past policy and away from bad ones.

        A = (r - mean_group r) / (std_batch r + 1e-4);   p = 1/2 + clip(A / bound, -1, 1) / 2
        loss = bound / beta (p E(v+) + (1 - p) E(v-)) + kl_coef mean over D of (v - first v)^2
        v+ = (1 - beta) old_v + beta v,   v- = (1 + beta) old_v - beta v
        old = decay old + (1 - decay) policy,   decay = min(slope max(step - flat, 0), most)

    ``old`` samples, without noise. A sample trains at the K noise levels of the sampler, each with
    fresh noise, which all models share; see ``diffusion.diffusion_nft`` for ``E``.

    Args:
      beta: Strength of the implicit policies, above 0.
      bound: Bound of the advantages.
      kl_coef: Weight of the distance to the policy before the run; 0 disables it and that policy.
      slope, most, flat: Decay of the policy that samples, see ``regularizers.ramped_reference``.

    References:
      Zheng et al., DiffusionNFT (arXiv:2509.16117), the released code: 10 steps and one update on a
      batch. Its other settings are ``beta=0.1`` and 25 steps for several rewards; for text in
      images ``beta=0.1``, two updates on a batch (``minibatches=2`` of a run) and decays that
      count both, which are ``slope=0.015, most=0.999, flat=37.5`` here, where they count batches.
      Its sampler is DPM-Solver++ of second order, but for its first and last step, here Euler's
      method. The levels of its model are denser near 1, here they are in equal steps; of the K a
      sample trains at K - 1, chosen at random, here at all. It evaluates and saves a moving average
      of the weights, with a decay of ``min((1 + n) / (10 + n), 0.9)`` after n updates, which is not
      included here.
    """
    rule = bind(regularizers.ramped_reference, slope=slope, most=most, flat=flat)
    return from_base(
        name="diffusion_nft",
        advantage=stateless(advantages.grpo, scale="batch", ddof=0, eps=1e-4),
        surrogate=bind(diffusion.diffusion_nft, beta=beta, bound=bound),
        regularizers=nonzero_term(anchor_mse, coef=kl_coef),
        likelihood=diffusion.forward_likelihood(),
        reference=regularizers.anchored(rule) if kl_coef else rule,
        sampled_by="reference",
        paper="arXiv:2509.16117",
    )


def anchor_mse(velocity: Array, anchor_velocity: Array, mask: Array, *, coef: float) -> Array:
    """``diffusion.flow_mse`` to the policy before the run, a mean over the dimensions."""
    return diffusion.flow_mse(velocity, anchor_velocity, mask, coef=coef, reduce="mean")


def sol_rl_flow(
    *,
    oversample: int = 4,
    draft_steps: int = 6,
    quantization: Literal["int8", "fp8"] | None = "int8",
    beta: float = 1.0,
    bound: float = 5.0,
    kl_coef: float = 1e-4,
    slope: float = 0.001,
    most: float = 0.5,
    flat: float = 0,
) -> Recipe:
    """Drafts of many seeds in few steps; the best and the worst are generated again, and train.

        seeds -> drafts -> the best and worst half of G -> :func:`diffusion_nft` from their noise

    Nothing but that noise is random, so a sample is what its draft promised, in more steps and
    full precision.

    Args:
      oversample: Drafts per prompt as a multiple of G.
      draft_steps: Steps of a draft.
      quantization: How linear layers are rounded in drafts; None for full precision.
      beta, bound, kl_coef, slope, most, flat: As of :func:`diffusion_nft`.

    References:
      Sol-RL (arXiv:2604.06916), the released code: 24 of 96 seeds, drafts of 6 steps and samples
      of 10. Advantages use only the rewards of the samples that train. Drafts have 8 bits, not 4
      (NVFP4).
    """
    recipe = diffusion_nft(
        beta=beta, bound=bound, kl_coef=kl_coef, slope=slope, most=most, flat=flat
    )
    return recipe.replace(
        name="sol_rl_flow",
        collector=curation.drafted(curation.contrasts, oversample=oversample, steps=draft_steps),
        sampler_quantization=quantization,
        paper="arXiv:2604.06916",
    )


def unigrpo(
    *,
    steps: int | None = 10,
    noise: float = 0.7,
    window: tuple[int, int] | None = (0, 5),
    eps: float = 1e-4,
    text_eps: float = 0.2,
    flow_coef: float = 1.0,
    mse_coef: float = 1.5e-5,
) -> Recipe:
    """One advantage trains both the text that a model writes and its denoising steps.

        loss = text + flow_coef flow + mse_coef penalty
        text: the clip of :func:`grpo`, a mean over the tokens of each text, then over texts
        flow: log Rn = scale (log R + |mean - old mean|^2 / (2 scale^2)), clipped, in a window
        penalty: |velocity - ref velocity|^2 in the window, in place of a KL

    It trains a model of ``models.make_text_flow_model``; ``sampling.max_new_tokens`` are those of
    the longest text and the steps together.

    Args:
      steps: Steps of a trajectory; None for a flow model without text, where all cells are steps.
      noise: Noise level of the sampler.
      window: Steps that are random and train, ``(first, end)``; None for all.
      eps: Clip range of a step's normalized ratio.
      text_eps: Clip range of a token's ratio.
      flow_coef: Weight of the flow term, above 0.
      mse_coef: Weight of the penalty; 0 disables it and the reference.

    References:
      UniGRPO (arXiv:2603.23500); confidence PAPER, read through notes, which have 1.5e-5 and 0.1
      for the penalty. Two passes over a batch. Its two learning rates are one here.
    """
    checks.check_positive("unigrpo", finite=True, flow_coef=flow_coef)
    surrogate, weights = bind(diffusion.flow_clip, eps=eps), aggregate.token_mean
    if steps is None:
        if (text_eps, flow_coef) != (0.2, 1.0):
            raise ValueError("unigrpo: text_eps and flow_coef have no effect without steps.")
    else:
        surrogate = bind(text_and_flow_clip, steps=steps, eps=eps, text_eps=text_eps)
        weights = bind(text_and_flow_means, steps=steps, flow_coef=flow_coef)
    return from_base(
        name="unigrpo",
        surrogate=surrogate,
        weights=weights,
        regularizers=nonzero_term(
            diffusion.flow_mse, coef=mse_coef / (flow_coef if steps else 1.0)
        ),
        likelihood=diffusion.flow_likelihood(noise=noise, window=window, steps=steps),
        epochs=2,
        paper="arXiv:2603.23500",
    )


@traits(policy_gradient=False)
def text_and_flow_clip(
    logp: Array,
    old_logp: Array,
    advantages: Array,
    mask: Array,
    *,
    step_mean: Array,
    old_step_mean: Array,
    step_scale: Array,
    steps: int,
    eps: float,
    text_eps: float,
) -> Array:
    """``surrogates.ppo_clip`` for the cells of a text, ``diffusion.flow_clip`` for the steps."""
    text, flow = (slice(None, -steps), slice(-steps, None))
    tokens = surrogates.ppo_clip(
        logp[..., text],
        old_logp[..., text],
        advantages,
        mask[..., text],
        eps_low=text_eps,
        eps_high=text_eps,
    )
    latents = diffusion.flow_clip(
        logp[..., flow],
        old_logp[..., flow],
        advantages,
        mask[..., flow],
        step_mean=step_mean[..., flow, :],
        old_step_mean=old_step_mean[..., flow, :],
        step_scale=step_scale[..., flow],
        eps=eps,
    )
    return jnp.concatenate([tokens, latents], axis=-1)


def text_and_flow_means(mask: Array, *, steps: int, flow_coef: float) -> Array:
    """Weights of two means for each chain: over the tokens of its text and over its steps."""
    tokens = aggregate.sequence_mean(mask[..., :-steps])
    latents = aggregate.sequence_mean(mask[..., -steps:])
    return jnp.concatenate([tokens, flow_coef * latents], axis=-1)
