"""Bad options and arrays raise one sentence that names function and argument.

What every surrogate says about the four arrays that all take is in `test_surrogates.py` and
`test_other_objectives.py`.
"""

import jax
import numpy as np
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm import surrogates

# Groups of responses of tokens, their mask, one advantage a response and one a token.
SHAPE = (2, 3, 4)
X, OLD, A, T = (np.ones(s, np.float32) for s in (SHAPE, SHAPE, SHAPE[:2], SHAPE))
M, CUT, INTS = np.ones(SHAPE, bool), OLD[..., :3], np.ones(SHAPE, int)
ROW, ONE = np.zeros(3), np.float32(1.0)
KEEP = np.ones(3, bool)
ALL, TOKENS, SCORES = (X, OLD, A, M), (X, OLD, T, M), (X, OLD, T)
BEHAVIOR, SEEN = {"behavior_logp": OLD}, {"mean_log_probs": OLD, "old_mean_log_probs": OLD}
KEY, LOGITS, IDS = jax.random.key(0), np.zeros((2, 5)), np.zeros(2, int)
TWO, S = np.ones(2, bool), np.log([0.7, 0.2, 0.1])
DISTILL = {"student_logp": S[None, :1], "teacher_logp": S[None, :1]}
WIDE = {"student_logp": X[..., None], "teacher_logp": X[..., None]}
ROUTE = {"rewards": A, "has_teacher": A > 0, "distillation_weights": X} | WIDE
TAUGHT = {"has_teacher": KEEP, "teacher_entropy": LOGITS, "mask": LOGITS > 0}
NAMES = vars(surrogates) | globals() | {"inf": np.inf, "nan": np.nan, "ones": np.ones}
BAD = r"""
ValueError:
ppo_clip(*ALL, eps_low=-0.1)  # eps_low must not be negative
ppo_clip(*ALL, eps_high=nan)  # eps_high must not be negative
ppo_clip(*ALL, dual_clip=1.0)  # dual_clip must be above 1
ppo_clip(*ALL, dual_clip=nan)  # dual_clip must not be negative; got nan
dapo_clip(*ALL, eps_high=-0.1)  # eps_high must not be negative
dapo_clip(*ALL, dual_clip=0.5)  # dual_clip must be above 1
gspo(*ALL, eps_low=-1e-4)  # eps_low must not be negative
gspo(*ALL, dual_clip=0.5)  # dual_clip must be above 1
gspo(*TOKENS)  # advantages .*\(2, 3\); got \(2, 3, 4\).*gspo_token
gspo_token(*ALL, eps_high=-1e-4)  # eps_high must not be negative
gspo_token(*ALL, dual_clip=0.5)  # dual_clip must be above 1
gmpo(*TOKENS)  # advantages .*\(2, 3\); got \(2, 3, 4\)\.
gmpo(*ALL, eps_high=-0.1)  # eps_high must not be negative
luspo(*TOKENS)  # advantages .*\(2, 3\); got \(2, 3, 4\)\.
luspo(*ALL, eps_low=-0.1)  # eps_low must not be negative
vespo(*ALL, lambda_pos=0.0)  # !vespo_weights: lambda_pos must be above 0
vespo(*ALL, lambda_neg=0.0)  # !vespo_weights: lambda_neg must be above 0
vespo(*ALL, k_pos=-1.0)  # !vespo_weights: k_pos must not be negative
vespo(*ALL, k_neg=-1.0)  # !vespo_weights: k_neg must not be negative
vespo(*ALL, behavior_logp=CUT)  # behavior_logp
sapo(*ALL, tau_pos=0.0)  # tau_pos must be above 0
sapo(*ALL, tau_neg=inf)  # tau_neg must be finite
sapo_sequence(*TOKENS)  # advantages .*\(2, 3\); got \(2, 3, 4\). Use sapo
sapo_sequence(*ALL, tau_pos=0.0)  # tau_pos must be above 0
sapo_sequence(*ALL, tau_neg=inf)  # tau_neg must be finite
cispo(*ALL, w_min=-0.1)  # w_min must not be negative
cispo(*ALL, w_max=0.0)  # w_max must be above 0
cispo(*ALL, w_min=2.0, w_max=1.0)  # w_min must not be above w_max; got 2 and 1
cispo_bounds(eps_low=-0.1, eps_high=0.2)  # eps_low must not be negative
topr(*ALL, level="batch")  # level must be one of 'sequence', 'token'
dispo(*ALL, eps_pos=0.2)  # eps_pos must be a pair \(eps_low, eps_high\); got 0.2
dispo(*ALL, eps_neg=(0.1, 0.2, 0.3))  # eps_neg must be a pair
dispo(*ALL, eps_pos=(-0.1, 1.0))  # eps_pos\[0\] must not be negative; got -0.1
dispo(*ALL, eps_neg=(0.1, nan))  # eps_neg\[1\] must not be negative
minpro(*ALL, w_min=-0.1)  # w_min must not be negative
minpro(*ALL, w_max=0.0)  # w_max must be above 0
minpro(*ALL, w_min=2.0, w_max=1.0)  # w_min must not be above w_max
min_prefix_ratio(X, CUT, M)  # logp \(2, 3, 4\), old_logp \(2, 3, 3\)
dppo_tv(*ALL, delta_low=-1.0)  # delta_low must
dppo_tv(*ALL, delta_high=-1.0)  # delta_high must
dppo_tv(*ALL, w_max=-1.0)  # w_max must
dppo_kl(*ALL, delta_low=-1.0)  # delta_low must
dppo_kl(*ALL, delta_high=-1.0)  # delta_high must
dppo_kl(*ALL, w_max=-1.0)  # w_max must
fipo(*ALL, half_life=0.0)  # half_life must be above 0
fipo(*ALL, w_min=-0.1)  # w_min must not be negative
fipo(*ALL, w_max=inf)  # w_max must be
fipo(*ALL, w_min=1.1)  # w_min and w_max must have 1 between them
fipo(*ALL, w_max=0.9)  # w_min and w_max must have 1 between them
fipo(*ALL, dual_clip=1.0)  # dual_clip must be above 1
fipo(*ALL, safe_ratio=1.0)  # safe_ratio must be above 1
fipo(*ALL, dual_clip=None)  # max_clipped has no effect without dual_clip
fipo(*ALL, max_clipped=-1)  # max_clipped must
fipo_weights(*ALL, half_life=0.0)  # half_life must be above 0
fipo_weights(*ALL, w_max=0.9)  # w_min and w_max must have 1 between them
fipo_weights(*ALL, dual_clip=1.0)  # dual_clip must be above 1
fipo_weights(*ALL, safe_ratio=1.0)  # safe_ratio must be above 1
dcpo_bounds(X, eps_low=-0.1)  # eps_low must not be negative
dcpo_bounds(X, eps_high=-0.1)  # eps_high must not be negative
dcpo_bounds(X, r_max=0.5)  # r_max must be at least 1; got 0.5
dcpo_bounds(X, M[..., :3])  # old_logp \(2, 3, 4\), mask \(2, 3, 3\)
dcpo_dynamic_clip(*ALL, eps_low=-0.1)  # eps_low must not be negative
dcpo_dynamic_clip(*ALL, eps_high=-0.1)  # eps_high must not be negative
dcpo_dynamic_clip(*ALL, r_max=0.5)  # r_max must be at least 1; got 0.5
dcpo_dynamic_clip(*ALL, dual_clip=1.0)  # dual_clip must be above 1
decoupled_ppo(*ALL, **BEHAVIOR, eps_low=-0.1)  # eps_low must not be negative
decoupled_ppo(*ALL, **BEHAVIOR, eps_high=-0.1)  # eps_high must not be negative
decoupled_ppo(*ALL, **BEHAVIOR, dual_clip=0.5)  # dual_clip must be above 1
decoupled_ppo(*ALL, **BEHAVIOR, cap=0.0)  # cap must be above 0
decoupled_ppo(*ALL, **BEHAVIOR, cap=2.0, beyond_cap="masks")  # one of .* Did you mean 'mask'
decoupled_ppo(*ALL, **BEHAVIOR, beyond_cap="mask")  # beyond_cap='mask' has no effect without a cap
decoupled_ppo(*ALL, behavior_logp=CUT)  # behavior_logp \(2, 3, 3\)
decoupled_ppo(*ALL, behavior_logp=None)  # behavior_logp is None
mix_ppg(*ALL, behavior_logp=None)  # behavior_logp is None
mix_ppg(*ALL, **BEHAVIOR, eps_high=-0.1)  # eps_high must not be negative
token_covariance(A[0], X, M)  # advantages must have the shape
kl_cov_selection(T, X, M, ratio=0.0)  # ratio must be above 0
kl_cov_selection(T, old_logp=X[0], mask=M)  # old_logp \(3, 4\), mask
clip_cov_selection(T, X, M, KEY, exclude=M[0])  # exclude \(3, 4\)
clip_cov(*TOKENS, key=KEY, ratio=0.0, selected=None)  # ratio must be above 0
clip_cov(*TOKENS, key=KEY, lower=6.0, selected=None)  # lower must not be above upper
clip_cov(*TOKENS, selected=M, key=KEY)  # key has no effect with selected
clip_cov(*TOKENS, selected=M, upper=2.0)  # upper has no effect
clip_cov(*TOKENS, selected=M[0])  # mask \(2, 3, 4\), selected \(3, 4\)
clip_cov(*TOKENS, selected=M, eps_low=-1.0)  # eps_low must not be negative
kl_cov(*TOKENS, selected=None, ratio=-1.0)  # ratio must be above 0
kl_cov(*TOKENS, selected=M, coef=-1.0)  # coef must not be negative
kl_cov(*TOKENS, selected=M, ratio=0.1)  # ratio has no effect
kl_cov(*TOKENS, selected=M[..., :1])  # selected \(2, 3, 1\)
gbpo(*TOKENS, median_advantages=T, eps_low=-0.1)  # eps_low must not be negative
gbpo(*TOKENS, median_advantages=ROW)  # median_advantages must have .*\(2, 3, 4\).*got \(3,\)
median_advantage(A, where=M[0])  # rewards \(2, 3\), where \(3, 4\)
bpo_soft_target(ROW, 0.0, eps=-1.0)  # eps must
bpo_soft_target(ROW, 0.0, temperature=0.0)  # temperature must be above 0
bpo_mu_loss(ROW, ROW)  # center must have shape \(1,\); got \(3,\)
drpo_len(*TOKENS, length=4)  # advantages must have one value a sequence \(2, 3\)
drpo_len(X[0, 0], None, ONE, M[0, 0], length=4)  # logp must have at least 2 axes; got shape \(4,\)
drpo_len(X, None, ROW, M, length=4)  # advantages .*\(3,\)
drpo_len(X, CUT, A, M, length=4)  # old_logp \(2, 3, 3\)
drpo_len(*ALL, length=0)  # length must be above 0
drpo_len(*ALL, length=4, lam=0.0)  # lam must be above 0
drpo_len(*ALL, length=4, tau=-1.0)  # tau must be above 0
length_softmax_weights(ROW, TWO, length=4)  # lengths \(3,\), where \(2,\)
kl_from_old(X, OLD, M, estimator="k2")  # estimator must be one of 'k1', 'k3'
kl_from_old(X, OLD, M, coef=-1.0)  # coef must not be negative
kl_barrier(ONE, beta=-1.0)  # beta must not be negative
real(*ALL, tau=0.0)  # tau must be above 0
real(*TOKENS)  # advantages must have one value a sequence
real(X, CUT, A, M)  # old_logp \(2, 3, 3\)
real(X[0, 0], None, ONE, M[0, 0])  # logp must have at least 2 axes
gvpo(*TOKENS)  # advantages must have one value a sequence \(2, 3\)
gvpo(X[0, 0], None, ONE, M[0, 0])  # logp must have at least 2 axes; got shape \(4,\)
gvpo(*ALL, beta=0.0)  # beta must be above 0
gvpo(*ALL, beta=inf)  # beta must be .*finite
gvpo(X, CUT, A, M)  # old_logp \(2, 3, 3\)
rover(*ALL, **SEEN, rho=0.0)  # rho must be above 0
rover(*ALL, **SEEN, beta=-1.0)  # beta must not be negative
rover(*ALL, **SEEN | {"old_mean_log_probs": None})  # old_logp needs old_mean_log_probs
mean_log_probs(ONE)  # logits must have at least 1 axis
otr_exact(LOGITS, IDS, tau=0.0)  # tau must be above 0
otr_exact(LOGITS, np.zeros(3, int))  # targets must have shape \(2,\)
otr_sampled(LOGITS, IDS, token_seeds=np.uint32(IDS), samples=0)  # samples must be above 0
otr_sampled(LOGITS, IDS, token_seeds=np.zeros(3, np.uint32))  # token_seeds
otr(*ALL, one_token_loss=CUT)  # one_token_loss
distillation_divergence(S, S, alpha=2.0)  # alpha must be between 0 and 1
distillation_divergence(S, S[:2])  # teacher_logp
support_log_probs(LOGITS, support=np.zeros((3, 2), int))  # support must have shape \(2, 2\)
top_tokens(LOGITS, count=0)  # count must be above 0
keep_taught(None, M[0], has_teacher=TWO)  # has_teacher must have shape \(3,\)
entropy_weights(ROW, KEEP, beta=inf)  # beta must be finite
entropy_weights(ROW, KEEP, beta=-1.0)  # beta must not be negative
sdpo(ROW[:1], None, ONE, KEEP[:1], **DISTILL, rest="renormalize")  # gives the one token
sdpo(*ALL, student_logp=X, teacher_logp=X, alpha=1.5)  # alpha must be between 0 and 1; got 1.5
sdpo(*ALL, student_logp=X, teacher_logp=X, alpha=nan)  # alpha must be between 0 and 1
sdpo(*ALL, student_logp=X, teacher_logp=X, rest="tails")  # one of .* Did you mean 'tail'
sdpo(*ALL, **WIDE, cap=0.0)  # cap must be above 0
sdpo_sampled(*ALL, teacher_token_logp=X, cap=-1.0)  # cap must be above 0
srpo_route(ROW, TWO)  # has_teacher
srpo_weights(None, rewards=ROW, **TAUGHT)  # rewards must have shape
srpo(*ALL, **ROUTE, eps_high=-0.1)  # eps_high must not be negative
srpo(*ALL, **ROUTE, alpha=-0.1)  # alpha must be between
luffy_shaping(*ALL, steered=M[..., 0], gamma=0.0)  # gamma must be above 0
ampo(*ALL, steered=M[..., 0], eps_low=-0.1)  # eps_low must not be negative
chord(*ALL, steered=M[..., 0], eps_high=-0.1)  # eps_high must not be negative
icpo(*ALL, steered=M[..., 0], dual_clip=1.0)  # dual_clip must be above 1
icpo(*ALL, steered=TWO)  # steered .*\(2, 3, 4\).*\(2, 3\).*got \(2,\)
value_loss(*SCORES, M, eps=0.0)  # eps must be above 0
value_loss(*SCORES, M, huber=-1.0)  # huber must be above 0
value_loss(*SCORES, M, combine="min")  # combine must be one of 'max', 'mean'
value_loss(X, None, T, M, combine="mean")  # combine='mean' has no effect without
value_loss(X, None, T, M, eps=0.5)  # eps=0.5 has no effect without
value_loss(X, CUT, T, M)  # old_values
value_loss(X, OLD, CUT, M)  # returns must
soft_min(X, alpha=0.0)  # alpha must be above 0
soft_min(X, alpha=inf)  # alpha must be finite
soft_min(ONE)  # values must have at least 1 axis
TypeError:
ppo_clip(*ALL, dual_clip="x")  # dual_clip must be a number; got 'x'
dapo_clip(*ALL, eps_low="x")  # eps_low must be a number; got 'x'
dcpo_dynamic_clip(*ALL, r_max="x")  # r_max must be a number; got 'x'
gspo_turns(*ALL, turn_ids=X)  # turn_ids must hold integers
min_prefix_ratio(X, OLD, X)  # mask must be bool
dcpo_bounds(INTS)  # old_logp must be floating
decoupled_ppo(*ALL, behavior_logp=INTS)  # behavior_logp must be floating
mix_ppg(*ALL, behavior_logp=INTS)  # behavior_logp must be floating
clip_cov_selection(T, X, M, KEY, exclude=T)  # exclude must be bool
clip_cov(*TOKENS, selected=None)  # without selected it takes a key
clip_cov(*TOKENS, selected=None, key=np.zeros(2, np.uint32))  # key must be a typed PRNG key
clip_cov(*TOKENS, selected=T)  # selected must be bool
gbpo(*TOKENS, median_advantages=M)  # median_advantages must be floating
bpo_center(INTS)  # values must be floating
drpo_len(X, None, A, X, length=4)  # mask must be bool
kl_barrier(IDS[0])  # kl must be floating point
gvpo(X, OLD, A, X)  # mask must be (a )?bool
mean_log_probs(INTS)  # logits must be floating
otr_exact(LOGITS, LOGITS[:, 0])  # targets must hold integers
token_seeds(None, key=KEY, mask=X)  # mask must be bool
support_log_probs(LOGITS, support=LOGITS)  # support must hold integers
keep_taught(None, M, has_teacher=A)  # has_teacher must be bool
shaped_likelihood(INTS)  # logp must be floating
value_loss(*SCORES, INTS)  # mask must be bool
"""


@for_each("error, call, message", bad_calls(BAD))
def test_bad_input(error, call, message):
    raises(error, call, message, NAMES)
