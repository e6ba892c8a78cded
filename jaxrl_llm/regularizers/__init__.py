"""Terms added to the token loss: distance to a reference policy, entropy.

A term takes what it needs by name (``logp``, ``old_logp``, ``ref_logp``, ``entropy``, ``mask``) and
returns a token loss ``[..., T]``, float32, 0 where masked. What ``mask`` leaves out is never read,
in the value or in the gradient. ``ref_logp`` and ``old_logp`` are constants. All terms raise
TypeError if ``mask`` is not bool or another array is not floating point, and ValueError if shapes
differ.
"""

from jaxrl_llm.regularizers.controllers import (
    adaptive_entropy,
    adaptive_kl,
    adaptive_kl_update,
    fixed,
)
from jaxrl_llm.regularizers.displacement import chunk_ids_from_mask, llds
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
    kl_to_reference,
    kl_token,
    kl_unbiased,
    remix_lambda,
    remix_schedule,
)
from jaxrl_llm.regularizers.references import ema_reference, reset_reference, soup
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
    "AsymmetricControl",
    "AsymmetricState",
    "EntropyControl",
    "PidState",
    "RemixState",
    "SafeControl",
    "SafeState",
    "adaptive_entropy",
    "adaptive_kl",
    "adaptive_kl_update",
    "asymmetric_init",
    "asymmetric_kl",
    "asymmetric_step",
    "chunk_ids_from_mask",
    "ema_reference",
    "entropy_bonus",
    "entropy_controller",
    "entropy_from_logits",
    "fixed",
    "k1",
    "k2",
    "k3",
    "kl_convex",
    "kl_to_reference",
    "kl_token",
    "kl_unbiased",
    "llds",
    "pid_init",
    "pid_step",
    "remix_lambda",
    "remix_schedule",
    "reset_reference",
    "safe_controller",
    "safe_init",
    "safe_step",
    "soup",
    "step_scale",
]
