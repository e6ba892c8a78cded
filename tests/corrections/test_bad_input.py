"""Bad options and arrays raise one sentence that names function and argument."""

import jax
import numpy as np
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm import corrections

# The policy's and the sampler's log-probabilities with their mask.
ARRAYS = (np.zeros((2, 3)), np.zeros((2, 3)), np.ones((2, 3), bool))
X, _, MASK = ARRAYS
TWO, VERSIONS = np.ones(2), np.full((2, 3), 6)
K1, K2, K3 = ({"statistic": name, "level": "token", "upper": 2.0} for name in ("k1", "k2", "k3"))
AT, POLICIES = {"versions": VERSIONS, "current_version": 7}, {"old_logp": X, "behavior_logp": X}
CAPACITY = {"batch_size": 1, "max_staleness": 0, "max_concurrent": 1}
NAMES = vars(corrections) | {"np": np, "KEY": jax.random.key(0)} | globals()
BAD = r"""
ValueError:
importance_weights(*ARRAYS, level="sequences")  # level must be one of .*'sequence'\?
importance_weights(*ARRAYS, cap=0.5, floor=0.6)  # floor must not be above cap; got 0.6 and 0.5
importance_weights(*ARRAYS, cap=-1.0)  # cap must be above 0
importance_weights(*ARRAYS, floor=1.5)  # floor must be in \[0, 1\]; got 1.5
masked_importance_weights(*ARRAYS, lower=1.5)  # lower and upper must have 1 between .*got 1.5 and 2
masked_importance_weights(*ARRAYS, upper=0.5)  # upper must have 1 between .*got 0.5 and 0.5
masked_importance_weights(*ARRAYS, lower=-0.1)  # lower must not be negative
rejection_mask(*ARRAYS, **K2, lower=0.5)  # lower has no effect with .*'k2'
rejection_mask(*ARRAYS, **K3, invert=True)  # invert has no effect with .*'k3'
rejection_mask(*ARRAYS, **K1 | {"upper": 0.5})  # upper must have 1 between .*got 2 and 0.5
rejection_mask(*ARRAYS, **K1, lower=1.1)  # lower and upper must have 1 between .*got 1.1 and 2
rejection_mask(*ARRAYS, **K1 | {"upper": 0})  # upper must be above 0; got 0
rejection_mask(*ARRAYS, **K1 | {"upper": -1})  # upper must be above 0; got -1
rejection_mask(*ARRAYS, **K1 | {"level": "seq_max"})  # one of .* Did you mean 'sequence_max'
rejection_mask(*ARRAYS, **K1 | {"statistic": "k4"})  # must be one of 'k1', 'k2', 'k3'; got 'k4'
veto_mask(*ARRAYS, threshold=2.0)  # threshold must not be above 1
veto_mask(*ARRAYS, threshold=0.0)  # threshold must be above 0
m2_mask(*ARRAYS, threshold=0.0)  # threshold must be above 0
off_policy_sequence_mask(TWO, MASK, **POLICIES, threshold=-1.0)  # threshold must not be negative
off_policy_sequence_mask(np.ones(3), MASK, **POLICIES)  # advantages must have the shape
rollout_correction(*ARRAYS, keep_denominator=True)  # keep_denominator has no effect without a rule
rollout_correction(*ARRAYS, reject=(lambda old, behavior, mask: mask[0],))  # keep must have shape
rollout_correction(*ARRAYS, weights=lambda old, behavior, mask: old[0])  # weights must have shape
ess_lr_scale(TWO, **POLICIES, mask=MASK, rho_base=0.0)  # rho_base must be above 0
ess_lr_scale(TWO, **POLICIES, mask=MASK, rho_base=1.0, power=-1.0)  # power must not be negative
ess(TWO, where=np.ones(3, bool))  # these must have the same shape
turn_order(3, order="random")  # order='random' takes a key
turn_order(3, key=KEY)  # order='backward' takes no key
sequential_factor(np.ones(3), X, X, MASK)  # factor must have shape \(2,\)
staleness_mask(TWO, MASK, versions=VERSIONS, current_version=np.zeros(3, int), max_staleness=1)
    # current_version must be one integer .*got \(3,\)
staleness_mask(TWO, MASK, **AT, max_staleness=-1)  # max_staleness must not be negative
staleness_mask(TWO, MASK, **AT, max_staleness=1, level="group")  # one of 'token', 'sequence'
staleness_mask(TWO, MASK, **AT | {"versions": VERSIONS[0]}, max_staleness=1)
    # must have the same shape: versions
staleness_capacity(0, 0, 0, **CAPACITY | {"batch_size": 0})  # batch_size must be above 0
TypeError:
rollout_correction(*ARRAYS, reject=veto_mask)  # reject must be a tuple of functions
rollout_correction(*ARRAYS, weights="token")  # weights must be a function or None; got 'token'
rollout_correction(*ARRAYS, reject=(importance_weights,))  # rule .* keep must be bool
rollout_correction(*ARRAYS, weights=veto_mask)  # weights .* weights must be floating point
ess(np.ones(2, int))  # weights must be floating point
staleness_mask(TWO, MASK, **AT | {"versions": X}, max_staleness=1)  # versions must hold integers
version_lags(X, MASK, current_version=7)  # versions must hold integers
staleness_capacity(0, 0.5, 0, **CAPACITY)  # accepted must hold integers
"""


@for_each("error, call, message", bad_calls(BAD))
def test_bad_input(error, call, message):
    raises(error, call, message, NAMES)
