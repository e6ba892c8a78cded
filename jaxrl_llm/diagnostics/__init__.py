"""What to watch during training: functions of their own, so that a loss returns one array.

They take the same arrays as a surrogate, repeat its cheap arithmetic (a compiler folds it into one)
and return float32 scalars. Give them the global batch: a share or a maximum over parts is not the
mean over the parts. ``mask`` is bool ``[..., T]``, True = keep; masked cells are never read. A
ratio is that of the surrogates: the log ratio of a token counts up to +-20.
"""

from jaxrl_llm.diagnostics.batch import GroupSpread, group_spread, mean_entropy
from jaxrl_llm.diagnostics.exploration import (
    MassBalance,
    mass_balance,
    unsampled_second_moment,
)
from jaxrl_llm.diagnostics.mismatch import (
    Mismatch,
    MismatchMetrics,
    RejectionMetrics,
    WeightMetrics,
    effective_sample_size,
    mismatch,
    mismatch_metrics,
    rejection_metrics,
    weight_metrics,
)
from jaxrl_llm.diagnostics.ratio import (
    RatioRange,
    approx_kl,
    clip_fraction,
    dual_clip_fraction,
    ratio_range,
)

__all__ = [
    "GroupSpread",
    "MassBalance",
    "Mismatch",
    "MismatchMetrics",
    "RatioRange",
    "RejectionMetrics",
    "WeightMetrics",
    "approx_kl",
    "clip_fraction",
    "dual_clip_fraction",
    "effective_sample_size",
    "group_spread",
    "mass_balance",
    "mean_entropy",
    "mismatch",
    "mismatch_metrics",
    "ratio_range",
    "rejection_metrics",
    "unsampled_second_moment",
    "weight_metrics",
]
