"""Policy-gradient surrogates: ``(logp, old_logp, advantages, mask) -> token loss [..., T]``.

Each returns a loss to minimize, one value per token, not reduced: the weights of
``jaxrl_llm.aggregate`` decide how tokens and sequences count. They share these arguments:

- ``logp``: ``[..., T]`` log-probabilities (nats) of the sampled tokens under the trained policy.
- ``old_logp``: ``[..., T]`` under the proximal policy, a constant; None for the policy being
  trained. Then the ratio ``r = exp(logp - old_logp)`` is 1, and the gradient still flows.
- ``advantages``: ``[..., T]``, or ``[...]`` for one value per sequence; constants.
- ``mask``: bool ``[..., T]``, True = keep. Masked entries are never read, neither in the value nor
  in the gradient, and return 0.
- ``eps_low``, ``eps_high``: A ratio is clipped to ``[1 - eps_low, 1 + eps_high]``; not negative.
- ``dual_clip``: Upper bound of the ratio where A is negative, above 1; None for none.
- ``weight``: ``[..., T]`` or ``[...]``, an importance weight of the behavior policy, a constant.
- ``logits``: ``[..., V]``, floating point; ``[N, V]`` as a statistic of a Recipe, over chunks of
  tokens. A token with a logit of -inf cannot be sampled and is ignored.
- ``targets``: Integers ``[...]``, the tokens. Statistics that do not use them also accept them.

All raise TypeError if a mask is not bool, an array of ids is not of integers or another array is
not floating point; and ValueError if shapes disagree, or an option is out of its documented range
or has no effect in the combination.

At r = 1, if the bounds allow it, every token-level surrogate has the gradient of :func:`reinforce`
at each token, and so under every weighting. Where the behavior policy is not the old policy,
:func:`decoupled_ppo`, :func:`mix_ppg` and :func:`vespo` multiply it by their importance weight.
:func:`gspo_token` has it too. :func:`gspo` and :func:`gmpo`, whose values depend on all tokens of a
sequence, have it under ``aggregate.sequence_mean``, the weighting that they are defined for.
Surrogates with another gradient at r = 1 are marked with ``core.traits(policy_gradient=False)`` and
document that gradient.
"""

from jaxrl_llm.surrogates.bounded import (
    bpo_center,
    bpo_mu_loss,
    bpo_soft_target,
    gbpo,
    median_advantage,
)
from jaxrl_llm.surrogates.clipped import (
    dapo_clip,
    dcpo_bounds,
    dcpo_dynamic_clip,
    hapo,
    ppo_clip,
    sapo,
)
from jaxrl_llm.surrogates.covariance import (
    clip_cov,
    clip_cov_selection,
    kl_cov,
    kl_cov_selection,
    token_covariance,
)
from jaxrl_llm.surrogates.decoupled import decoupled_ppo, mix_ppg
from jaxrl_llm.surrogates.decoupled_length import (
    drpo_kl_coef,
    drpo_len,
    kl_barrier,
    kl_from_old,
    length_softmax_weights,
)
from jaxrl_llm.surrogates.distillation import (
    entropy_weights,
    gkd,
    minillm,
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
    target_log_probs,
    teacher_divergence,
    top_log_probs,
    top_tokens,
    topk_with_tail,
)
from jaxrl_llm.surrogates.group_variance import gvpo
from jaxrl_llm.surrogates.guided import ampo, chord, icpo, luffy_shaping, shaped_likelihood
from jaxrl_llm.surrogates.influence import fipo, fipo_weights
from jaxrl_llm.surrogates.labels import real
from jaxrl_llm.surrogates.likelihood import (
    cispo,
    cispo_bounds,
    dft,
    dispo,
    dppo_kl,
    dppo_tv,
    min_prefix_ratio,
    minpro,
    reinforce,
    topr,
)
from jaxrl_llm.surrogates.one_token import otr, otr_exact, otr_sampled, token_seeds
from jaxrl_llm.surrogates.sequence import (
    gmpo,
    gspo,
    gspo_token,
    gspo_turns,
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
    "chord",
    "cispo",
    "cispo_bounds",
    "clip_cov",
    "clip_cov_selection",
    "dapo_clip",
    "dcpo_bounds",
    "dcpo_dynamic_clip",
    "decoupled_ppo",
    "dft",
    "dispo",
    "distillation_divergence",
    "dppo_kl",
    "dppo_tv",
    "drpo_kl_coef",
    "drpo_len",
    "entropy_weights",
    "fipo",
    "fipo_weights",
    "gbpo",
    "gkd",
    "minillm",
    "gmpo",
    "gspo",
    "gspo_token",
    "gspo_turns",
    "gvpo",
    "hapo",
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
    "real",
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
    "target_log_probs",
    "teacher_divergence",
    "token_covariance",
    "token_seeds",
    "top_log_probs",
    "top_tokens",
    "topk_with_tail",
    "topr",
    "value_loss",
    "vespo",
    "vespo_weights",
]
