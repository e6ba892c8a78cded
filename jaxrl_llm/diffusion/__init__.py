"""Diffusion policies: language models that unmask tokens, and flows that denoise latents.

The log-likelihood of a masked-diffusion model has no closed form. Its estimates have one value per
token, ``[..., T]``, and replace ``logp``: every surrogate, regularizer, correction and weighting
takes them::

    t = jr.diffusion.noise_levels(key, (), samples=4, draws="antithetic")
    masked = jr.diffusion.mask_tokens(mask_key, valid, t)             # [4, ..., T], once a batch
    logp = denoise(params, tokens, masked)                            # 4 forwards
    tokens = jr.diffusion.elbo(logp, masked, t)                       # [..., T]
    loss = jr.surrogates.gspo(tokens, old_tokens, advantages, valid)

==================================  ================================================================
mask_tokens, mask_exact             which tokens are masked: independently, or so many
complementary, diffu_mask,          masks with their complements; the response and some of a prompt;
mask_blocks                         blocks in order
noise_levels, mask_counts,          how much is masked: at random, and by quadrature
quadrature_levels, count_levels
elbo, elbo_terms                    the lower bound of the log-likelihood
mean_field, coupled                 one step of denoising; with pairs of complementary masks
eubo, sandwiched                    the upper bound; the bound that the advantage's sign asks for
Likelihood, Draws,                  the slot of a recipe: masks of a batch, and their estimate
mean_field_likelihood,
coupled_likelihood,
elbo_likelihood,
sandwiched_likelihood
bgpo, bgpo_terms                    a ratio as a sum over draws
elbo_kl                             a penalty on the bounds of complete responses
wd1, wd1_weights                    weighted likelihood without a ratio
hint_chunks, hint_mask,             groups that are all wrong get chunks of a reference answer
draw_hints, igpo_replace,
entropy_top_mask
flow_sde_step, branch_sde_step      a step of denoising a latent as a Gaussian policy
gaussian_logprob, latent_kl         its log-density, and the divergence from a reference
ratio_norm, velocity_mse,           text and image in one loss
joint_loss
diffusion_mse                       the error of a prediction of noise
flow_tree                           latents that share their first steps
FlowLikelihood, flow_levels,        the slot of a recipe: how a flow policy samples, and its steps
flow_likelihood, branch_likelihood
flow_kl, flow_mse, flow_clip        its penalties, and a clip of normed ratios
forward_likelihood, diffusion_nft   training on the forward process of samples without noise
==================================  ================================================================

Arguments that the functions share, and what they raise:

============  ======================================================================================
``key``       one typed key, ``jax.random.key(seed)``
``valid``     bool ``[..., T]``, True for tokens of the response, up to its end; never masked
              otherwise
``masked``    bool ``[J, ..., T]``, True for tokens that draw j hides from the denoiser
``logp``      floating point ``[J, ..., T]``, log-probability (nats) of each token of the response
              by the denoiser that sees draw j; what is not masked is not read
``t``         floating point ``[J, ...]``, or ``[J]`` where all rows share them: noise levels in
              (0, 1], the chance that a token is masked; not read where nothing is masked
``weights``   floating point ``[J]`` or ``[J, ...]``, of the draws; None for ``1 / J``
============  ======================================================================================

All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of range.
"""

from jaxrl_llm.diffusion.bounds import eubo, sandwiched
from jaxrl_llm.diffusion.estimators import (
    Draws,
    Likelihood,
    coupled_likelihood,
    elbo_likelihood,
    mean_field_likelihood,
    sandwiched_likelihood,
)
from jaxrl_llm.diffusion.flow_policies import (
    FlowLikelihood,
    branch_likelihood,
    diffusion_nft,
    flow_clip,
    flow_kl,
    flow_levels,
    flow_likelihood,
    flow_mse,
    forward_likelihood,
)
from jaxrl_llm.diffusion.flow_trees import FlowTree, flow_tree
from jaxrl_llm.diffusion.flows import (
    FlowStep,
    branch_sde_step,
    diffusion_mse,
    flow_sde_step,
    gaussian_logprob,
    joint_loss,
    latent_kl,
    ratio_norm,
    velocity_mse,
)
from jaxrl_llm.diffusion.inpainting import (
    draw_hints,
    entropy_top_mask,
    hint_chunks,
    hint_mask,
    igpo_replace,
)
from jaxrl_llm.diffusion.levels import mask_counts, noise_levels, quadrature_levels
from jaxrl_llm.diffusion.likelihood import coupled, elbo, elbo_terms, mean_field
from jaxrl_llm.diffusion.masks import (
    complementary,
    count_levels,
    diffu_mask,
    mask_blocks,
    mask_exact,
    mask_tokens,
)
from jaxrl_llm.diffusion.objectives import bgpo, bgpo_terms, elbo_kl, wd1, wd1_weights

__all__ = [
    "Draws",
    "FlowLikelihood",
    "FlowStep",
    "FlowTree",
    "Likelihood",
    "bgpo",
    "bgpo_terms",
    "branch_likelihood",
    "branch_sde_step",
    "complementary",
    "count_levels",
    "coupled",
    "coupled_likelihood",
    "diffu_mask",
    "diffusion_mse",
    "diffusion_nft",
    "draw_hints",
    "elbo",
    "elbo_kl",
    "elbo_likelihood",
    "elbo_terms",
    "entropy_top_mask",
    "eubo",
    "flow_clip",
    "flow_kl",
    "flow_levels",
    "flow_likelihood",
    "flow_mse",
    "flow_sde_step",
    "flow_tree",
    "forward_likelihood",
    "gaussian_logprob",
    "hint_chunks",
    "hint_mask",
    "igpo_replace",
    "joint_loss",
    "latent_kl",
    "mask_blocks",
    "mask_counts",
    "mask_exact",
    "mask_tokens",
    "mean_field",
    "mean_field_likelihood",
    "noise_levels",
    "quadrature_levels",
    "ratio_norm",
    "sandwiched",
    "sandwiched_likelihood",
    "velocity_mse",
    "wd1",
    "wd1_weights",
]
