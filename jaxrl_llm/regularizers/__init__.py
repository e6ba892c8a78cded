"""Terms added to the token loss: divergence from a reference policy, entropy.

A term takes its inputs by name and returns a token loss ``[..., T]``, float32, 0 where masked:

- ``logp``: ``[..., T]`` log-probabilities (nats) of the sampled tokens under the policy being
  trained; an estimate of a divergence assumes that it sampled them.
- ``ref_logp``: ``[..., T]`` under the reference, a constant; None raises ValueError.
- ``mask``: bool ``[..., T]``, True = keep. Masked entries are never read, neither in the value nor
  in the gradient. Statistics accept None, which keeps all.
- ``estimator``: As in :func:`kl_token`.
- ``coef``: Penalty per nat, in units of the policy loss, not negative; 0 turns the term off.

All raise TypeError if a mask is not bool, an array of ids or steps is not of integers or another
array is not floating point; and ValueError if shapes differ, an argument is not a scalar where one
is required, or an option is out of its documented range or has no effect in the combination.
"""

from jaxrl_llm.regularizers.bands import (
    EntropyHistory,
    entropy_band,
    entropy_history,
    entropy_history_init,
    entropy_history_update,
    epo_phase_weight,
)
from jaxrl_llm.regularizers.controllers import (
    adaptive_entropy,
    adaptive_kl,
    adaptive_kl_update,
    fixed,
)
from jaxrl_llm.regularizers.displacement import chunk_ids_from_mask, imitation, llds
from jaxrl_llm.regularizers.entropy import (
    EntropyControl,
    entropy_bonus,
    entropy_controller,
    entropy_from_logits,
)
from jaxrl_llm.regularizers.kl import (
    RemixState,
    k1,
    k2,
    k3,
    kl_convex,
    kl_gate,
    kl_to_reference,
    kl_token,
    kl_unbiased,
    remix_lambda,
    remix_schedule,
)
from jaxrl_llm.regularizers.references import (
    Anchored,
    AnchoredReference,
    Earlier,
    EarlierPolicies,
    Iterates,
    StoredPolicies,
    anchored,
    earlier_policies,
    ema_reference,
    extrapolated,
    ramped_reference,
    random_reference,
    reset_reference,
)
from jaxrl_llm.regularizers.safe import (
    AsymmetricControl,
    AsymmetricState,
    PidState,
    SafeControl,
    SafeState,
    asymmetric_init,
    asymmetric_kl,
    asymmetric_step,
    pid_init,
    pid_step,
    safe_controller,
    safe_init,
    safe_step,
    step_scale,
)

__all__ = [
    "Iterates",
    "Anchored",
    "AnchoredReference",
    "AsymmetricControl",
    "AsymmetricState",
    "Earlier",
    "EarlierPolicies",
    "EntropyControl",
    "EntropyHistory",
    "PidState",
    "RemixState",
    "SafeControl",
    "SafeState",
    "StoredPolicies",
    "adaptive_entropy",
    "adaptive_kl",
    "adaptive_kl_update",
    "anchored",
    "asymmetric_init",
    "asymmetric_kl",
    "asymmetric_step",
    "chunk_ids_from_mask",
    "earlier_policies",
    "ema_reference",
    "extrapolated",
    "entropy_band",
    "entropy_bonus",
    "entropy_controller",
    "entropy_from_logits",
    "entropy_history",
    "entropy_history_init",
    "entropy_history_update",
    "epo_phase_weight",
    "fixed",
    "imitation",
    "k1",
    "k2",
    "k3",
    "kl_convex",
    "kl_gate",
    "kl_to_reference",
    "kl_token",
    "kl_unbiased",
    "llds",
    "pid_init",
    "pid_step",
    "remix_lambda",
    "remix_schedule",
    "ramped_reference",
    "random_reference",
    "reset_reference",
    "safe_controller",
    "safe_init",
    "safe_step",
    "step_scale",
]
