"""Training metrics, as functions separate from the losses.

They take the arrays of a surrogate, repeat its cheap arithmetic (the compiler merges the two) and
return float32 scalars. Pass the global batch: shares and maxima of microbatches do not average.
The rules for batch sizes (``gradient_noise`` to ``scale_rollouts``) take norms and counts.

- ``mask`` is bool ``[..., T]``, True = keep; masked cells are never read.
- Log ratios of tokens are clamped to +-20, as in the surrogates.
- All raise TypeError if ``mask`` is not bool or another array is not floating point, and ValueError
  if shapes differ.
"""

from jaxrl_llm.diagnostics.batch import GroupSpread, group_spread, mean_entropy
from jaxrl_llm.diagnostics.batch_size import (
    BatchCost,
    GradientNoise,
    OuterStep,
    batch_cost,
    fastest_batch,
    gradient_noise,
    outer_plateau,
    scale_rollouts,
)
from jaxrl_llm.diagnostics.calibration import PairCalibration, pair_calibration
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
from jaxrl_llm.diagnostics.preferences import PairOrder, pair_order, response_scores
from jaxrl_llm.diagnostics.ratio import (
    RatioRange,
    approx_kl,
    clip_fraction,
    dual_clip_fraction,
    ratio_range,
)

__all__ = [
    "BatchCost",
    "GradientNoise",
    "GroupSpread",
    "MassBalance",
    "Mismatch",
    "MismatchMetrics",
    "OuterStep",
    "PairCalibration",
    "PairOrder",
    "RatioRange",
    "RejectionMetrics",
    "WeightMetrics",
    "approx_kl",
    "batch_cost",
    "clip_fraction",
    "dual_clip_fraction",
    "effective_sample_size",
    "fastest_batch",
    "gradient_noise",
    "group_spread",
    "mass_balance",
    "mean_entropy",
    "mismatch",
    "mismatch_metrics",
    "outer_plateau",
    "pair_calibration",
    "pair_order",
    "ratio_range",
    "rejection_metrics",
    "response_scores",
    "scale_rollouts",
    "unsampled_second_moment",
    "weight_metrics",
]
