"""Corrections for data that another policy sampled: the ``correction`` slot of a Recipe and more.

A correction compares the proximal policy with the policy that sampled the tokens, which may have
another precision or older weights, and sets the weight of each token and which tokens to drop::

    def correction(old_logp, behavior_logp, mask, *, option=...) -> (weights, keep)

- ``old_logp``, ``behavior_logp``: ``[..., T]`` log-probabilities (nats) under the proximal policy
  and under the policy that sampled the tokens; ``logp`` is under the policy being trained.
- ``mask``: bool ``[..., T]``, True = keep. Cells where it is False are never read.
- ``weights``: float32 ``[..., T]`` without a gradient, 0 where masked; it multiplies the token
  loss.
- ``keep``: bool ``[..., T]``, False where masked; it narrows the mask.

With ``old_logp`` equal to ``behavior_logp`` every weight is 1 and ``keep`` equals ``mask``. Options
are keyword-only and fixed with :func:`jaxrl_llm.bind`. All raise TypeError if ``mask`` is not bool,
versions or counts are not integers or another array is not floating point; and ValueError if shapes
differ, or an option is out of its documented range or has no effect in the combination.

:func:`rollout_correction` composes the other functions: the weights (:func:`importance_weights`,
:func:`masked_importance_weights`) and the rules (:func:`rejection_mask`, :func:`veto_mask`,
:func:`m2_mask`). Rules that need advantages or versions belong in the ``selection`` slot
(:func:`off_policy_sequence_mask`, :func:`staleness_mask`), and :func:`ess_lr_scale` in the
``computed`` entries. :func:`sequential_factor` is for updates of one turn after another.
"""

from jaxrl_llm.corrections.rejection import (
    m2_mask,
    off_policy_sequence_mask,
    rejection_mask,
    veto_mask,
)
from jaxrl_llm.corrections.rollout import rollout_correction, sequence_rollout_correction
from jaxrl_llm.corrections.sample_size import ess, ess_lr_scale
from jaxrl_llm.corrections.sequential import sequential_factor, turn_order
from jaxrl_llm.corrections.staleness import (
    loglinear_prox,
    staleness_capacity,
    staleness_mask,
    version_lags,
)
from jaxrl_llm.corrections.weights import importance_weights, masked_importance_weights

__all__ = [
    "ess",
    "ess_lr_scale",
    "importance_weights",
    "loglinear_prox",
    "m2_mask",
    "masked_importance_weights",
    "off_policy_sequence_mask",
    "rejection_mask",
    "rollout_correction",
    "sequence_rollout_correction",
    "sequential_factor",
    "staleness_capacity",
    "staleness_mask",
    "turn_order",
    "version_lags",
    "veto_mask",
]
