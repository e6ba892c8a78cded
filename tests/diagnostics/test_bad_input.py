"""Bad options and arrays raise one sentence that names function and argument."""

import numpy as np
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm import diagnostics

X, MASK, TWO = np.ones((2, 3)), np.ones((2, 3), bool), np.zeros(2)
EIGHT = {"small_batch": 1, "large_batch": 8}
NAMES = vars(diagnostics) | {"np": np} | globals()
BAD = r"""
ValueError:
gradient_noise(1.0, 1.0, small_batch=8, large_batch=8)  # above
gradient_noise(-1.0, 1.0, **EIGHT)  # small_n
gradient_noise(1.0, 1.0, **EIGHT | {"small_batch": 0})  # small_b
batch_cost(0.0, critical_batch=1.0)  # batch
fastest_batch(1.0, fixed=0.0, per_sample=1.0)  # fixed
outer_plateau(0.1, 0)  # samples
outer_plateau(0.1, 1, noise=np.nan)  # noise
scale_rollouts(2, samples=10, minibatches=3)  # must divide
scale_rollouts(0, samples=10, minibatches=5)  # factor
mismatch_metrics(X, X[0], MASK)  # behavior_logp
weight_metrics(X[0], MASK)  # these must have the same shape
rejection_metrics(X, X, MASK, rules=())  # rules is empty
rejection_metrics(X, X, MASK, rules=(lambda old, behavior, mask: mask[0],))  # keep must have shape
pair_calibration(TWO, TWO, bins=0)  # bins must be an integer above 0
pair_calibration(TWO, X[0])  # these must have the same shape
pair_order(X[0], TWO)  # these must have the same shape
pair_order(TWO, TWO, sides=np.zeros(3, int))  # these must have the same shape
TypeError:
mismatch_metrics(X, X, X)  # mask must be bool
weight_metrics(MASK, MASK)  # weights must be floating point
rejection_metrics(X, X, MASK, rules=[lambda *_: None])  # tuple of functions
rejection_metrics(X, X, MASK, rules=(lambda old, behavior, mask: old,))  # keep must be bool
"""


@for_each("error, call, message", bad_calls(BAD))
def test_bad_input(error, call, message):
    raises(error, call, message, NAMES)
