"""Policy-gradient surrogates: ``(logp, old_logp, advantages, mask) -> token loss [..., T]``.

Each returns a loss to minimize, one value a token, not reduced: the weights of
``jaxrl_llm.aggregate`` decide how tokens and sequences count. They share these rules:

- ``r = exp(logp - old_logp)`` is the ratio of the policy being trained to the proximal one.
  ``old_logp=None`` means that the two are the same policy: r = 1, and the gradient still flows.
- ``old_logp``, ``advantages`` and ``weight`` are constants: the gradient stops at them.
- ``advantages`` has one value a token ``[..., T]`` or one a sequence ``[...]``.
- What ``mask`` leaves out is never read, in the value or in the gradient, and comes back as 0.
- At r = 1, if the bounds admit it, every token-level surrogate has the gradient of
  :func:`reinforce`, token by token and so under every weighting. :func:`gspo_token` has it too;
  :func:`gspo` and :func:`gmpo`, whose every value depends on all tokens of its sequence, have it
  under ``aggregate.sequence_mean``, the weighting they belong to. Those that start elsewhere are
  marked with ``core.traits(policy_gradient=False)`` and document their starting gradient.
- All raise TypeError if ``mask`` is not bool or another array is not floating point, and ValueError
  if shapes differ.
"""

from jaxrl_llm.surrogates.bounded import (
    bpo_center,
    bpo_mu_loss,
    bpo_soft_target,
    gbpo,
    median_advantage,
)
from jaxrl_llm.surrogates.clipped import dapo_clip, dcpo_bounds, dcpo_dynamic_clip, ppo_clip, sapo
from jaxrl_llm.surrogates.covariance import (
    clip_cov,
    clip_cov_selection,
    kl_cov,
    kl_cov_selection,
    token_covariance,
)
from jaxrl_llm.surrogates.decoupled import decoupled_ppo, mix_ppg
from jaxrl_llm.surrogates.decoupled_length import (
    drpo_len,
    kl_barrier,
    kl_from_old,
    length_softmax_weights,
)
from jaxrl_llm.surrogates.distillation import (
    entropy_weights,
    sdpo,
    sdpo_sampled,
    srpo,
    srpo_route,
    srpo_weights,
)
from jaxrl_llm.surrogates.divergence import (
    add_tail,
    distillation_divergence,
    keep_taught,
    support_log_probs,
    top_tokens,
    topk_with_tail,
)
from jaxrl_llm.surrogates.guided import ampo, icpo, luffy_shaping, shaped_likelihood
from jaxrl_llm.surrogates.likelihood import (
    cispo,
    cispo_bounds,
    dispo,
    dppo_kl,
    dppo_tv,
    min_prefix_ratio,
    minpro,
    reinforce,
)
from jaxrl_llm.surrogates.one_token import otr, otr_exact, otr_sampled, token_seeds
from jaxrl_llm.surrogates.sequence import (
    gmpo,
    gspo,
    gspo_token,
    luspo,
    sapo_sequence,
    sequence_ratio,
    vespo,
    vespo_weights,
)
from jaxrl_llm.surrogates.valuation import mean_log_probs, rover
from jaxrl_llm.surrogates.value import soft_min, value_loss

__all__ = [
    "add_tail",
    "ampo",
    "bpo_center",
    "bpo_mu_loss",
    "bpo_soft_target",
    "cispo",
    "cispo_bounds",
    "clip_cov",
    "clip_cov_selection",
    "dapo_clip",
    "dcpo_bounds",
    "dcpo_dynamic_clip",
    "decoupled_ppo",
    "dispo",
    "distillation_divergence",
    "dppo_kl",
    "dppo_tv",
    "drpo_len",
    "entropy_weights",
    "gbpo",
    "gmpo",
    "gspo",
    "gspo_token",
    "icpo",
    "keep_taught",
    "kl_barrier",
    "kl_cov",
    "kl_cov_selection",
    "kl_from_old",
    "length_softmax_weights",
    "luffy_shaping",
    "luspo",
    "mean_log_probs",
    "median_advantage",
    "min_prefix_ratio",
    "minpro",
    "mix_ppg",
    "otr",
    "otr_exact",
    "otr_sampled",
    "ppo_clip",
    "reinforce",
    "rover",
    "sapo",
    "sapo_sequence",
    "sdpo",
    "sdpo_sampled",
    "sequence_ratio",
    "shaped_likelihood",
    "soft_min",
    "srpo",
    "srpo_route",
    "srpo_weights",
    "support_log_probs",
    "token_covariance",
    "token_seeds",
    "top_tokens",
    "topk_with_tail",
    "value_loss",
    "vespo",
    "vespo_weights",
]
