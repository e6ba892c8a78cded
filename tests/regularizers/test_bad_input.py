"""Bad options and arrays raise one sentence that names function and argument."""

import jax.numpy as jnp
import numpy as np
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm import regularizers

X, REF, OLD = (np.zeros((2, 3, 4), np.float32) for _ in range(3))
M, CUT, INTS = np.ones((2, 3, 4), bool), REF[..., :3], np.ones((2, 3, 4), int)
ZERO, TWO, WIDE = np.zeros((2, 3)), np.zeros(2), np.zeros((4, 3, 4))
ONE, TOKENS = jnp.float32(1.0), (X, REF, M)
TREE = {"layers": [np.zeros((2, 3))], "head": np.zeros(4)}
HEAD, TURNED = {"head": TREE["head"]}, TREE | {"layers": [np.zeros((3, 2))]}
BAND = {"turn_ids": INTS, "history": np.ones(2), "coef": 1.0}
COEFFICIENTS = "".join(
    f"{call}, {name}=np.ones({shape}))  # !{message} must .*\\(2, 3, 4\\); got \\(\n"
    for call, name, message in (
        ("kl_to_reference(*TOKENS", "coef", "regularizers: coef"),
        ("kl_convex(X, OLD, REF, M", "share", "kl_convex: share"),
        ("entropy_band(X, M, history=ONE", "weight", "entropy_band: weight"),
        ("entropy_band(X, M", "history", "entropy_band: history"),
    )
    # Of fewer axes it would be read along the last ones; of more it would enlarge the loss.
    for shape in ("1", "4", "(3, 1)", "(2, 1, 1, 1)", "(2, 2, 1)", "(4, 3, 4)")
)
NAMES = vars(regularizers) | globals() | {"inf": np.inf, "nan": np.nan}
BAD = rf"""
ValueError:
{COEFFICIENTS}kl_to_reference(X, CUT, M)  # logp \(2, 3, 4\).*ref_logp \(2, 3, 3\)
kl_to_reference(X, None, M)  # ref_logp is None
kl_to_reference(*TOKENS, estimator="K3")  # estimator must be one of .*'K3'
kl_to_reference(*TOKENS, coef=-1.0)  # coef must not be negative
k3(X, REF, M[0])  # mask \(3, 4\)
kl_unbiased(X, CUT, REF, M)  # old_logp \(2, 3, 3\)
kl_unbiased(X, None, REF, M, estimator="k2")  # estimator must be one of 'k1', 'k3'
kl_unbiased(X, None, REF, M, coef=-1.0)  # coef must not be negative
kl_unbiased(X, None, REF, M, cap=0.0)  # cap must be above 0
kl_token(*TOKENS, cap=0.0)  # cap must be above 0
kl_token(*TOKENS, estimator="k1", cap=10.0)  # cap .* no effect .*'k1'
kl_token(*TOKENS, estimator="k2", cap=10.0)  # cap .* no effect .*'k2'
kl_token(*TOKENS, estimator="abs", cap=10.0)  # cap .* no effect .*'abs'
kl_token(*TOKENS, estimator="k1+", cap=10.0)  # cap .* no effect .*'k1.'
kl_token(*TOKENS, estimator="abs+", cap=10.0)  # cap .* no effect .*'abs.'
kl_convex(X, OLD, None, M)  # ref_logp is None
kl_convex(X, OLD[0], REF, M)  # old_logp \(3, 4\)
kl_convex(X, OLD, REF, M, share=1.5)  # share must be in \[0, 1\]; got 1.5
kl_convex(X, OLD, REF, M, share=-0.5)  # share must be in \[0, 1\]; got -0\.5
kl_convex(X, OLD, REF, M, coef=-1.0)  # coef must not be negative
kl_convex(X, OLD, REF, M, estimator="k4")  # estimator must be one of
kl_gate(*TOKENS, max_kl=0.0)  # max_kl must
kl_gate(X, CUT, M, max_kl=0.1)  # old_logp \(2, 3, 3\)
ema_reference(TREE, HEAD)  # the same structure; 'layers.*' is only in the first
ema_reference(TREE, TURNED)  # layers/0 has \(2, 3\) and \(3, 2\)
ema_reference(TREE, TREE, rate=1.5)  # rate must be in \[0, 1\]; got 1.5
ema_reference(TREE, TREE, 1, every=0)  # every must be an integer above 0; got 0
ema_reference(TREE, TREE, every=3)  # every=3 needs step; got None
ramped_reference(TREE, TREE, 1, slope=-0.1)  # slope must not be negative
ramped_reference(TREE, TREE, 1, most=1.0)  # most must be in \[0, 1\); got 1
ramped_reference(TREE, TREE, 1, flat=-1)  # flat must not be negative
extrapolated(every=1, alpha=1)  # alpha must be in \[0, 1\); got 1
extrapolated(every=0)  # every must be above 0
random_reference(every=0)  # every
random_reference(every=1, stored=0)  # stored
reset_reference(TREE, TREE, 0, every=0)  # every must be above 0
safe_controller(scale=-1.0)  # !safe_step: scale must not be negative
safe_controller(low=1.0)  # !safe_step: low must not be above high; got 1 and 0.6
safe_step(safe_init(), TWO, 0.1, 0.1)  # kl must have 0 axes
pid_step(pid_init(), TWO)  # x must have 0 axes
asymmetric_init(window=0)  # window must be above 0
asymmetric_kl(window=0)  # window must be above 0
asymmetric_kl(scale=-1.0)  # scale must not be negative
step_scale(0.1, max_kl=0.0)  # max_kl must be above 0
entropy_band(X, M, **BAND, low=2.0, high=1.5)  # low must not be above high; got 2 and 1.5
entropy_band(X, M, **BAND, form="hnge")  # form must be one of .*Did you mean 'hinge'
entropy_band(X, M, history=ONE, from_turn=1)  # from_turn=1 has no effect without turn_ids
entropy_history_init(turns=0)  # turns must be above 0; got 0
entropy_history(turns=0)  # turns must be above 0; got 0
llds(*TOKENS, ZERO, chunk_ids=INTS, level="response")  # chunk_ids has no effect with level='respo
llds(*TOKENS, ZERO, level="turn")  # level must be one of 'action', 'response'
llds(*TOKENS, ZERO, coef=-0.1)  # coef must not be negative
llds(*TOKENS, ZERO, tolerance=-0.1)  # tolerance must not be negative
llds(*TOKENS, ZERO, chunk_ids=INTS[..., :3])  # chunk_ids \(2, 3, 3\)
llds(X, CUT, M, ZERO)  # old_logp \(2, 3, 3\)
entropy_bonus(X[0], M)  # entropy \(3, 4\).*mask \(2, 3, 4\)
entropy_bonus(None, M)  # entropy is None
entropy_bonus(X, M, coef=-0.1)  # coef must not be negative; got -0.1
entropy_bonus(X, M, cap=0.0)  # cap must be above 0; got 0
entropy_from_logits(ONE)  # logits must have at least 1
entropy_controller(0.01, 0.1, delta=0.0)  # delta must be above 0
entropy_controller(0.01, 0.1, target=-1.0)  # target must not be negative
entropy_controller(0.01, 0.1, low=0.5, high=0.1)  # low must not be above high; got 0.5 and 0.1
entropy_controller(TWO, 0.1)  # coef must have 0 axes; got shape \(2,\)
fixed(-0.1)  # coef must not be negative
adaptive_kl(target=0.0)  # target must be above 0
adaptive_kl(horizon=-1.0)  # horizon must be above 0
adaptive_kl(initial=-1.0)  # initial must not be negative
adaptive_kl(estimator="k4")  # estimator must be one of
adaptive_kl_update(0.1, TWO, target=1.0, samples=1)  # kl must have 0 axes
adaptive_entropy(delta=0.0)  # delta must be above 0
adaptive_entropy(initial=2.0)  # initial must be between low and a finite high; got low=0, initial=2
TypeError:
kl_to_reference(X, REF, None)  # mask must be a bool array.*None
kl_token(X, REF, INTS)  # mask must be bool
k1(X, INTS)  # ref_logp must be floating
remix_lambda(1.5)  # step must hold integers
entropy_band(X, M, **BAND | {{"turn_ids": X}})  # turn_ids must hold integers
llds(*TOKENS, ZERO, chunk_ids=X)  # chunk_ids must hold integers
llds(X, REF, None, ZERO)  # mask must be a bool array.*None
llds(*TOKENS, ZERO, answer_tokens=X)  # answer_tokens must be bool
chunk_ids_from_mask(X)  # mask must be bool
entropy_bonus(X, None)  # mask must be a bool array.*None
entropy_bonus(X, X)  # mask must be bool
entropy_from_logits(INTS)  # logits must be floating
anchored(0.5)  # rule must be a function of reference
anchored(extrapolated(every=2))  # rule must be a function of reference
anchored(random_reference(every=2))  # rule must be a function of reference
"""


@for_each("error, call, message", bad_calls(BAD))
def test_bad_input(error, call, message):
    raises(error, call, message, NAMES)
