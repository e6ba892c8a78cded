"""Methods of flow policies: the densities of the steps of denoising stand where tokens stand.

They train a model with a velocity, such as ``models.make_flow_model``; a run sets the steps of a
trajectory as ``sampling.max_new_tokens``.
"""

from jaxrl_llm import advantages, curation, diffusion, surrogates
from jaxrl_llm.core import bind, chain, stateless
from jaxrl_llm.recipes.presets.base import from_base
from jaxrl_llm.recipes.recipe import Recipe


def flow_grpo(
    *,
    noise: float = 0.7,
    window: tuple[int, int] | None = None,
    eps: float = 1e-4,
    kl_coef: float = 0.04,
    bound: float = 5.0,
) -> Recipe:
    """GRPO on the steps of a stochastic sampler that has the marginals of the flow.

        A = clip((r - mean_group r) / (std_batch r + 1e-4), -bound, bound)
        KL = mean over D of (mean - ref mean)^2 / (2 std^2)   of a step

    Args:
      noise: Of the sampler.
      window: Steps that are random and train, ``(first, end)``; None for all.
      eps: Clip of a step's ratio.
      kl_coef: Weight of the KL to the reference.
      bound: Of the advantages.

    References:
      Liu et al., Flow-GRPO (arXiv:2505.05470), the released code, which leaves out trajectories
      whose advantage is 0; here they count in the mean.
    """
    credit = stateless(advantages.grpo, scale="batch", ddof=0, eps=1e-4)
    return from_base(
        name="flow_grpo",
        advantage=chain(credit, stateless(advantages.clip, bound=bound)),
        surrogate=bind(surrogates.ppo_clip, eps_low=eps, eps_high=eps),
        regularizers=(bind(diffusion.flow_kl, coef=kl_coef),) if kl_coef else (),
        likelihood=diffusion.flow_likelihood(noise=noise, window=window),
        paper="arXiv:2505.05470",
    )


def branch_grpo_flow(
    *,
    splits: tuple[int, ...] = (0, 3, 6, 9),
    eta: float = 0.3,
    split_noise: float = 4.0,
    ratio: float | None = 0.5,
    eps: float = 1e-3,
    bound: float = 5.0,
) -> Recipe:
    """Trajectories that share their first steps; advantages by depth; pruned leaves rest.

        R(node) = mean reward of its leaves;   A = R standardized among the nodes of its depth
        each step of the tree trains once, with the A of the node it leads to, less what is pruned

    Args:
      splits: Steps at which each latent goes on as two; a group has ``2 ** len(splits)`` members,
        or several such trees.
      eta: Noise of the sampler.
      split_noise: Factor of the noise of the steps that split.
      ratio: Share of the leaves that train, half of them the best; None for all.
      eps: Clip of a step's ratio.
      bound: Of the advantages.

    References:
      Li et al., BranchGRPO (arXiv:2509.06040), the released code: 20 steps. Its sliding window of
      depths is ``selection=bind(curation.branch_tokens, window=...)``, over the stretches between
      splits.
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


def sol_rl_flow(
    *,
    oversample: int = 4,
    draft_steps: int = 6,
    noise: float = 0.7,
    eps: float = 1e-4,
    kl_coef: float = 0.04,
    bound: float = 5.0,
) -> Recipe:
    """Drafts of many seeds in few steps; the best and the worst are made again, and train.

        seeds -> drafts -> the best and the worst half of G -> :func:`flow_grpo` from their noise

    Args:
      oversample: Drafts of a prompt, over G.
      draft_steps: Steps of a draft, none of them random.
      noise, eps, kl_coef, bound: As of :func:`flow_grpo`.

    References:
      Sol-RL (arXiv:2604.06916), NOTES, whose objective is DiffusionNFT's, on samples without noise;
      here the steps are random, so that a trajectory may leave the mode of its draft. Advantages
      are of the rewards of what trains. Drafts in 4 bits are not part of this.
    """
    recipe = flow_grpo(noise=noise, eps=eps, kl_coef=kl_coef, bound=bound)
    return recipe.replace(
        name="sol_rl_flow",
        collector=curation.drafted(curation.contrasts, oversample=oversample, steps=draft_steps),
        paper="arXiv:2604.06916",
    )


def unigrpo(
    *,
    noise: float = 0.7,
    window: tuple[int, int] | None = (0, 5),
    eps: float = 1e-4,
    mse_coef: float = 1.5e-5,
) -> Recipe:
    """The image half of one loss for text and image: normed ratios in a window of random steps.

        log Rn = scale (log R + |mean - old mean|^2 / (2 scale^2))
        penalty = mse_coef |velocity - ref velocity|^2   in place of a KL

    Args:
      noise: Of the sampler.
      window: Steps that are random and train, ``(first, end)``; None for all.
      eps: Clip of a step's normed ratio.
      mse_coef: Weight of the penalty; 0 leaves out it and the reference.

    References:
      UniGRPO (arXiv:2603.23500); confidence PAPER, from notes on it. The tokens that its model
      writes before an image train by :func:`grpo` with the same advantages, see
      :func:`jaxrl_llm.diffusion.joint_loss`; a model that does both is not part of this.
    """
    penalty = bind(diffusion.flow_mse, coef=mse_coef)
    return from_base(
        name="unigrpo",
        surrogate=bind(diffusion.flow_clip, eps=eps),
        regularizers=(penalty,) if mse_coef else (),
        likelihood=diffusion.flow_likelihood(noise=noise, window=window),
        paper="arXiv:2603.23500",
    )
