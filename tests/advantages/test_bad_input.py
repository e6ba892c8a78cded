"""Bad options and arrays raise one sentence that names function and argument."""

import jax.numpy as jnp
import numpy as np
from bad_calls import bad_calls, raises
from rows import for_each

import jaxrl_llm.advantages as adv
from jaxrl_llm import curation, preferences, surrogates

# Rewards, tokens, and masks of both; a mask of another width, and integers.
R, T = np.ones((2, 3), np.float32), np.ones((2, 3, 4), np.float32)
W, M, WIDE = R > 0, T > 0, np.ones((2, 4), bool)
INTS, J, NODES = np.int32(R), np.int32(T), np.zeros(3, np.int32)
TWO, THREE, IDS = np.ones(2, np.float32), np.ones(3, np.float32), np.array([0, 1])
A, AB = {"a": R}, {"a": R, "b": R}
TRACKER = adv.BetaTracker(THREE, THREE)
SPO, SMOOTH = adv.spo_tracker(num_prompts=2), adv.smooth_standardization(num_prompts=2)
ADAPTIVE = adv.spo_tracker(num_prompts=2, rho=None)
TEMPERED = {"old_logp": T, "hot_logp": T, "cold_logp": T}
DCPO = {"rewards": R, "policy_entropy": jnp.float32(0.5)} | TEMPERED
ONE_GROUP = {"rewards": THREE} | {name: T[0] for name in TEMPERED}
PASSES = np.ones((2, 3, 4, 5), bool)
STATES = {"turn_rewards": T, "state_ids": J}
EDGES = {"state_ids": J, "action_ids": J, "next_state_ids": J}
FORKS = {"node_ids": J, "mask": M, "turn_ids": J, "turn_where": M}
PRM = {"prm_logp": T, "old_logp": T, "mask": M, "turn_ids": J, "turn_where": M}
TOKEN_PRM = {"prm_logp": T, "ref_logp": T, "mask": M}
PENALTY = {"old_logp": T, "ref_logp": T, "kl_coef": 0.1}
OTB = {"old_logp": T, "sum_pi_sq": T}
VCPO = {"old_logp": T, "behavior_logp": T, "mask": M, "grad_sq_norms": R}
TEACHER = {"old_logp": T, "teacher_token_logp": T}
HIGH = jnp.float32(2.0)
BOTH = {"old_logp": R, "behavior_logp": R}
NUMPY = {name: getattr(np, name) for name in ("arange", "asarray", "inf", "nan", "ones", "zeros")}
LAYER = [preferences, curation, surrogates, adv]
NAMES = {k: v for module in LAYER for k, v in vars(module).items()}
NAMES |= NUMPY | globals() | {"f32": jnp.float32}

# Each call beside the message that it raises, as a pattern. The message begins with the name of the
# function, or with what follows a "!".
BAD = r"""
ValueError:
remax(R, greedy_rewards=THREE)  # greedy_rewards must have shape \(2,\); got \(3,
remax_token(T, M, greedy_rewards=R)  # greedy_rewards must have shape \(2,\)
remax_token(T, M, greedy_rewards=TWO, where=WIDE)  # where must have shape \(2, 3\); got \(2,
remax_token(T[0, 0], M[0, 0], greedy_rewards=f32(0.0))  # token_rewards must have at least 2 axes
opo(TWO, M)  # mask .* rewards \(2,\) and mask \(2, 3, 4\)
opo(R, M, singleton="keep")  # singleton must be one of 'zero', 'raw'
opob(THREE, TWO, THREE)  # rewards \(3,\), log_weights \(2,\)
vcpo_advantage(R, **VCPO, scale="batch")  # scale must be one of 'group', 'none'
vcpo_advantage(R, **VCPO | {"behavior_logp": T[0]})  # behavior_logp \(3, 4\)
vcpo_advantage(R, **VCPO | {"grad_sq_norms": T})  # grad_sq_norms must have shape \(2, 3\); got \(
mc_grpo(R, scale="mean")  # scale must be one of .* got 'mean'
mc_grpo(R, scale="none", eps=0.1)  # eps=0.1 has no effect with scale='none'
mc_grpo(R, eps=0.0)  # eps must be above 0; got 0
mc_grpo_pivot(R, where=WIDE)  # rewards \(2, 3\), where \(2, 4\)
mc_grpo_keep(R, WIDE, rewards=R)  # mask must .* \(2, 3\) and mask \(2, 4\)
jspo(R, where=WIDE)  # rewards \(2, 3\), where \(2, 4\)
jspo(R, eps=0.0)  # eps must be above 0; got 0
clip(R, bound=0.0)  # bound must be above 0; got 0
whiten(TWO, W, eps=0.0)  # eps must be above 0; got 0
whiten(ones(4), W)  # x must have .*\(2, 3\).*got \(4,\)
batch_normalize(TWO, where=W)  # x \(2,\), where \(2, 3\)
scale_scores(R, score_std=TWO)  # score_std must .*\(2, 1, 1\); got \(2,\)
scale_scores(R, score_std=0.0)  # score_std must be above 0; got 0
score_scaler(clip=0.0)  # clip must be above 0; got 0
update_moments(score_scaler().init(), THREE, where=TWO > 0)  # x \(3,\), where \(2,\)
reinforce_pp_baseline(R, WIDE)  # mask .* rewards \(2, 3\) and mask \(2, 4\)
reinforce_pp_baseline(R, asarray(True))  # mask must have the shape of rewards
reinforce_pp_baseline(R, M, norm="tokens")  # norm must be one of .* Did you mean 'token'
reinforce_pp_baseline(R, M, eps=0.0)  # eps must be above 0; got 0
reinforce_pp(TWO, M)  # mask .* rewards \(2,\) and mask \(2, 3, 4\)
reinforce_pp(R, M, gamma=2.0)  # gamma must be in \[0, 1\]; got 2
reinforce_pp(R, M, eps=0.0)  # eps must be above 0; got 0
reinforce_pp(R, M, kl_coef=-0.1)  # kl_coef must not be negative
reinforce_pp(R, M, old_logp=T[0])  # old_logp \(3, 4\), mask \(2, 3, 4\)
reinforce_pp(R, M, **PENALTY | {"kl_coef": ones(5)})  # kl_coef must be .*\(2, 3, 4\); got \(5,\)
reinforce_pp(R, M, old_logp=T, kl_coef=0.1)  # ref_logp is None; the KL penalty
reinforce_pp(R, M, ref_logp=T, kl_coef=f32(0.1))  # old_logp is None
grpo(R, scale="groups")  # scale must be one of .* Did you mean 'group'\?
grpo(R, ddof=2)  # ddof must be one of 0, 1; got 2
grpo(R, eps=0.0)  # eps must be above 0; got 0
grpo(R, eps=-1e-06)  # eps must be above 0; got -1e-06
grpo(R, eps=nan)  # eps must be above 0; got nan
grpo(R, scale="none", ddof=1)  # ddof=1 has no effect with scale='none'
grpo(R, scale="none", eps=1e-06)  # eps=1e-06 has no effect with scale='none'
grpo(R, scale="none", ddof=0, eps=0.0001)  # ddof=0 has no effect with scale='none'
grpo_from_baseline(THREE, baseline="zero", scale="none")  # scale must be one of 'group', 'batch'
grpo_from_baseline(THREE, baseline="bach")  # baseline must be one of 'batch'
grpo_from_baseline(THREE, baseline="zero", ddof=2)  # ddof must be one of 0, 1; got 2
grpo_from_baseline(THREE, baseline="zero", eps=0.0)  # eps must be above 0; got 0
gpg(R, mode="informatve")  # mode must be one of .* Did you mean 'informative'
gpg(R, scale="batch")  # scale must be one of 'none', 'group'; got 'batch'
gpg(R, eps=1e-06)  # eps=1e-06 has no effect with scale='none'
gpg(R, singleton="raw")  # singleton='raw' needs mode='nonzero_reward'
gpg(R, scale="group", eps=0.0)  # eps must be above 0
grpo_split(R, steered=THREE > 0)  # steered \(3,\)
hbpo(R, budgets=THREE)  # rewards \(2, 3\), budgets \(3,\)
hbpo(R, budgets=R, intra_weight=-1.0)  # intra_weight must not be negative
hbpo(R, budgets=R, max_length=0)  # max_length must be above 0
hbpo(R, budgets=R, singleton="keep")  # singleton must be one of
novelty_sharpening(T, M, old_logp=T)  # advantages must have shape \(2, 3
novelty_sharpening(R, M, old_logp=None)  # old_logp is None
novelty_sharpening(R, M, old_logp=T, cap=-1.0)  # cap must not be negative
ace(THREE, M, old_logp=T, ref_logp=T)  # advantages must have the shape of mask
ace(R, M, old_logp=T, ref_logp=None)  # ref_logp is None
ace(R, M, old_logp=T, ref_logp=T, where=THREE > 0)  # where must have shape \(2, 3\)
entropy_shaping(R, M, old_entropy=T, cap=0.0)  # cap must be above 0
sampled_entropy_shaping(R, M, old_logp=T[0])
    # these must have the same shape: old_logp \(3, 4\), mask \(2, 3, 4\)
dcpo_distribution(R, M, **DCPO | {"hot_logp": None})  # hot_logp is None
dcpo_distribution(R, M, **DCPO | {"rewards": THREE})  # rewards must have shape \(2, 3\)
dcpo_distribution(R, M, **DCPO | {"policy_entropy": TWO})
    # policy_entropy must be a scalar or of shape \(2, 1, 1
dcpo_distribution(THREE, M[0], **ONE_GROUP, policy_entropy=ones((3, 1, 1)))
    # policy_entropy must be a scalar or of shape \(1, 1\)
dcpo_distribution(R, M, **DCPO, max_gap=-0.1)  # max_gap must not be negative
temperature_logp(R, IDS, temperature=0.0)  # temperature must be above 0
temperature_logp(R, ones(1, int), temperature=1.0)  # targets must have shape \(2,\)
sampled_entropy(start=-1.0)  # start must not be negative
ospo(THREE)  # rewards must have at least 2 axes
ospo(R, fairness=-1.0)  # fairness must not be negative
fleet_fairness(R, where=ones(4, bool))  # rewards \(2, 3\), where \(4,\)
fleet_grpo(R, punishment="both")  # punishment must be one of
fleet_grpo(R, norm="batch")  # norm must be one of
fleet_grpo(R, gamma=2.0)  # gamma must be in \[0, 1\]
otb(R, M, **OTB | {"sum_pi_sq": T[0]})  # sum_pi_sq \(3, 4\), .*mask \(2, 3, 4\)
otb(R, M, **OTB | {"sum_pi_sq": None})  # sum_pi_sq is None
otb(R, M, **OTB, eps=0.0)  # eps must be above 0; got 0
otb_token(T[0, 0], M[0, 0], old_logp=T[0, 0], sum_pi_sq=T[0, 0])
    # token_rewards must have at least 2 axes
passk_training(R, where=WIDE)  # rewards \(2, 3\), where \(2, 4\)
passk_training(R, k=0)  # k must be at least 1; got 0
passk_training(R, threshold=nan)  # threshold must be finite; got nan
passk_training(R, eps=0.0)  # eps must be above 0
pkpo(R, where=WIDE)  # rewards \(2, 3\), where \(2, 4\)
pkpo(R, k=0)  # k must be at least 1; got 0
pkpo(R, threshold=nan)  # threshold must be finite; got nan
pkpo(R, loo="yes")  # loo must be one of False, True
grpo_passk(R, scale="batch")  # scale must be one of 'group', 'none'
grpo_passk(R, scale="none", ddof=1)  # ddof=1 has no effect with scale='none'
maxrl(R, where=WIDE)  # rewards \(2, 3\), where \(2, 4\)
maxrl(R, scale="std")  # scale must be one of 'mean', 'root'; got 'std'
maxrl(R, eps=-1.0)  # eps must be above 0
maclaurin_weights(TWO, TWO, order=0)  # order must be at least 1; got 0
maclaurin_weights(TWO, THREE, order=1)  # right \(2,\), total \(3,\)
prompt_stats_init(0)  # num_prompts must be an integer
smooth_standardization(num_prompts=2.5)  # num_prompts must be an int
prompt_stats_update(prompt_stats_init(2), arange(3), R)  # prompt_ids must have shape \(2,\)
smooth_advantage(TWO, THREE, 1)  # these must have the same shape
terminal_rewards(THREE, W)  # mask .* rewards \(3,\) and mask \(2
reward_to_go(R, WIDE)  # token_rewards \(2, 3\), mask \(2, 4\)
reward_to_go(T, M, gamma=1.5)  # gamma must be in .*; got 1.5
reward_to_go(T, M, gamma=-0.1)  # gamma must be in .*; got -0.1
reward_to_go(T, M, gamma=HIGH)  # gamma must be in \[0, 1\]; got 2
reward_to_go(R, W, gamma=ones((4, 2, 3)))  # gamma must be .* mask \(2, 3\); got \(4, 2, 3\)
kl_shaped_rewards(R, M, **PENALTY, estimator="k33")  #  Did you mean 'k3'
kl_shaped_rewards(R, M, **PENALTY | {"ref_logp": None})  # ref_logp is None
kl_shaped_rewards(R, M, **PENALTY | {"kl_coef": -1.0})  # kl_coef must not be negative
kl_shaped_rewards(R, M, **PENALTY | {"kl_coef": TWO})
    # kl_coef must be .* mask \(2, 3, 4\); got \(2,\)
kl_shaped_rewards(R, M, **PENALTY | {"kl_coef": ones(4)})
    # kl_coef must be .* mask \(2, 3, 4\); got \(4,\)
kl_shaped_rewards(R, M, **PENALTY | {"ref_logp": T[0]})  # ref_logp \(3, 4\)
gdpo({})  # rewards has no component
gdpo(A | {"b": TWO})  # rewards\['a'\] \(2, 3\), rewards\['b'\] \(2,\)
gdpo({"a": f32(1.0)})  # rewards\['a'\] must have at least 1 axis
gdpo(A, where=WIDE)  # where \(2, 4\)
gdpo(AB, weights={"a": 1.0, "b": 1.0, "c": 2.0})  # weights names 'c', which is no reward.* 'a', 'b'
gdpo(A, batch_norm="token")  # batch_norm must be one of 'sequence', 'none'
gdpo(A, eps=0.0)  # eps must be above 0
gdpo(AB, gate=("d", 0.5))  # gate\[0\] must be one of 'a', 'b'; got 'd'
gdpo(A, gate=("a", 1.0))  # gate=\('a', 1.0\) has no effect without another
sum_components(AB, weights={"a": 1.0})  # weights has none for 'b'
gdpo_token(A, WIDE[..., None])  # mask must .*\(2, 3\) and mask \(2, 4, 1\)
gate_rewards(AB, by="c", threshold=1.0)  # by must be one of 'a', 'b'; got 'c'
gate_rewards(AB, by="a", threshold=1.0, components=("a",))  # components must not hold 'a'
gate_rewards(A, by="a", threshold=1.0)  # by='a' has no effect without a reward
verpo(R[:, :2], test_passes=PASSES)  # rewards must have shape \(2, 3\); got \(2, 2\)
verpo(R, test_passes=PASSES, test_where=W)  # test_where must have shape \(2, 5\)
verpo(R, test_passes=PASSES, turn_weight=-1.0)  # turn_weight must not be negative
verpo(R, test_passes=PASSES, gamma=1.5)  # gamma must be in \[0, 1\]
density_weights(THREE, sigma=0.0)  # sigma must be above 0
density_weights(THREE, test_where=TWO > 0)  # pass_rates \(3,\), test_where \(2,\)
shrinkage_baseline(R, prior=R)  # prior must .*\(2,\); got \(2, 3\)
shrinkage_baseline(R, prior=TWO, where=WIDE)  # rewards \(2, 3\), where \(2, 4\)
shrinkage_baseline(R, prior=TWO, var="mean")  # var must be one of 'prior', 'sample'
v05_baseline(R, prior=R)  # prior must .*\(2,\); got \(2, 3\)
v05_baseline(R, prior=TWO, where=WIDE)  # rewards \(2, 3\), where \(2, 4\)
v05_baseline(R, prior=TWO, var="mean")  # var must be one of 'prior', 'sample'
v05_baseline(R, prior=TWO, eps=0.1)  # eps=0.1 has no effect with scale='none'
v05_baseline(R, prior=TWO, scale="batch")  # scale must be one of 'none', 'group'
v05_baseline(R, prior=TWO, scale="group", ddof=2)  # ddof must be one of 0, 1; got 2
osla_continue(TWO, IDS, prior=TWO, most=2)  # most must not be below least; got 2 and 4
osla_continue(TWO, IDS, prior=TWO, cost=-1.0)  # cost must not be negative
osla_continue(THREE, IDS, prior=THREE)  # mean \(3,\), count \(2,\)
spo_tracker(num_prompts=2, low=0.8)  # low=0.8 has no effect with rho=0.875
spo_tracker(num_prompts=2, rho=1.0)  # rho must be in \[0, 1\)
spo_tracker(num_prompts=0)  # num_prompts must be an integer of 1 or mo
spo_tracker(num_prompts=2, prior=0.5)  # prior must be a pair
SPO.update(R, SPO.init(), prompt_ids=arange(3))  # !spo_tracker: prompt_ids must have shape \(2,\)
mssr_tracker(num_prompts=2, prior=(1.0, 0.0))  # prior\[1\] must be above 0
mssr_tracker(num_prompts=2, window=0)  # window must be an integer of 1 or more
mssr_tracker(num_prompts=2, rule="both")  # rule must be one of
spo(R, TWO, ddof=2)  # ddof must be one of 0, 1
spo(R, R)  # values must have shape \(2,\); got \(2, 3\)
beta_tracker_update(TRACKER, ones(1, int), R, 0.9)  # prompt_ids must have shape \(2,\)
beta_tracker_update(TRACKER, IDS, R, THREE)  # rho must have shape \(2,\)
beta_tracker_update(TRACKER, IDS, THREE, 0.9)  # rewards must have 2 axes
beta_tracker_init(TWO, 8, rho_min=1.0)  # rho_min must be in \[0, 1\); got 1
beta_tracker_init(TWO, arange(3))  # successes \(2,\), samples \(3,\)
beta_tracker_init(TWO, 8, smoothing=-1.0)  # smoothing must not be negative
kl_forgetting(TWO, low=0.9, high=0.8)  # low must not be above high
kl_forgetting(TWO, half_shift=0.0)  # half_shift must be above 0
window_kl_discount(TWO, rule="linear")  # rule must be one of
window_kl_discount(f32(0.1))  # kl_window must have 1 axis
uncertainty_sampling_weights(TWO, explore=-0.1)  # explore must not be neg
trloo(THREE)  # rewards must have at least 2 axes
trloo(T, where=WIDE)  # where must have shape \(2, 3\)
trloo(T, turn_where=W)  # rewards \(2, 3, 4\), turn_where \(2, 3\)
trloo(T, singleton="keep")  # singleton must be one of 'zero', 'raw'
trloo(T, gamma=1.5)  # gamma must be in \[0, 1\]
turn_returns(T, gamma=1.5)  # gamma must be in \[0, 1\]
mc_turns(T, gamma=1.5)  # gamma must be in \[0, 1\]
mc_turns(T, baseline="leave")  # baseline must be one of
turn_grpo(T, gamma=1.5)  # gamma must be in \[0, 1\]
turn_grpo(T, scale="none", eps=0.1)  # eps=0.1 has no effect
turn_grpo(THREE)  # rewards must have at least 2 axes
ui_s1(T, matches=M, gamma=1.5)  # gamma must be in \[0, 1\]
ui_s1(T, matches=M, singleton="keep")  # singleton must be one of
ui_s1(T, matches=M, step_weight=-1.0)  # step_weight must not
ui_s1(T, matches=W)  # these must have the same shape
gigpo(R, **STATES, gamma=1.5)  # gamma must be in \[0, 1\]
gigpo(R, **STATES, scale="none", eps=0.1)  # eps=0.1 has no effect
gigpo(R, **STATES, turn_where=W)  # turn_rewards \(2, 3, 4\), turn_where \(2, 3\)
gigpo(THREE, **STATES)  # rewards must have shape \(2,
gigpo(R, eps=0.1, **STATES)  # eps=0.1 has no effect
gigpo(R, omega=-1.0, **STATES)  # omega must not be neg
hgpo(R, **STATES, gamma=1.5)  # gamma must be in \[0, 1\]
hgpo(R, history=1.5, **STATES)  # history must be an int
hgpo(R, scale="std", **STATES)  # scale must be one of
hgpo(R, singleton="raw", **STATES)  # singleton='raw' has no effect without an episode; leave it out
two_level(R, turn_rewards=THREE)  # turn_rewards must have at least 2 axes
two_level(TWO, turn_rewards=ones((3, 2)))  # rewards must have shape \(3,\)
two_level(TWO, turn_rewards=ones((2, 2)), base="mean")  # base must be one of
oprl(R, **PRM, beta=0.0)  # beta must be above 0
oprl(R, **PRM, alpha=-1.0)  # alpha must not be negative
prime(R, **TOKEN_PRM, beta=0.0)  # beta must be above 0
prime(R, **TOKEN_PRM, alpha=-1.0)  # alpha must not be negative
prime(TWO, **TOKEN_PRM)  # rewards must have shape \(2, 3\)
turn_gae(T, T, M, turn_ids=J, lam=1.5)  # lam must be in \[0, 1\]
turn_gae(T[0], T, M, turn_ids=J)  # turn_rewards must hold at least one turn
sibling_advantages(TWO, R)  # parents must have 1 axis
sibling_advantages(THREE, NODES, eps=0.1)  # eps=0.1 has no effect without scale
portool(R, **FORKS, gamma=1.5)  # gamma must be in \[0, 1\]
portool(R, **FORKS, scale="none")  # scale must be one of 'std', None; got 'none'. Did you mean None
spo_tree(R, J, M, scale="mean")  # scale must be one of
branch_advantages(R, J, M, bound=0.0)  # bound must be above 0
step_rewards(R, J, turn_where=M, turn_formats=R)  # turn_formats \(2, 3\)
step_rewards(THREE, J, turn_where=M)  # rewards must have shape \(2, 3\)
set_advantages(R, J, group_size=4, set_where=WIDE)  #  scores \(2, 3\), set_where \(2, 4\)
set_advantages(THREE, zeros((2, 2), int), group_size=4)  # sets must have one set for each of scores
turns_to_tokens(T[0], M, turn_ids=J)  #  at least one turn .*\(2, 3, 4\); got \(3, 4\)
turns_to_tokens(T[..., :0], M, turn_ids=J)  #  at least one turn .*\(2, 3, 4\); got \(2, 3, 0\)
entropy_signal(ones(5), ones(5, bool), quantile=1.2)  # quantile must be in \[0, 1\]; got 1.2
signal_temperature(ones(5), EntropyStats(*zeros(4)), tau=1.0)  # tau must be in \[0, 1\); got 1
token_grpo(TWO, ones((3, 4), bool))  # mask must have shape
entropy_reshaping(R, W, old_entropy=R)  # advantages must have shape
hapo(TWO, TWO, TWO, TWO > 0, signal=THREE)  # signal must have shape \(2,\)
effective_rank(zeros((3, 2)), ones(4, bool))  # hidden must have shape \(4, 2\)
rank_growth(zeros((3, 2)), THREE > 0, max_tokens=1)  # max_tokens must be at least 2; got 1
bounded_bonus(TWO, ones((2, 1), bool), bonus=TWO, cap=0.5)  # cap must be at least 1; got 0.5
adhint(TWO, hinted=THREE > 0)  # these must have the same shape
adhint(TWO, hinted=TWO > 0, kappa=-1.0)  # kappa must not be negative; got -1
hint_preservation(TWO, W, hint_mask=ones((2, 2), bool))  # these must have the same shape
outcome_cross_entropy(*[R] * 2, W, TWO, beta=0.0)  # beta must be above 0
trajectory_dpo(*[R] * 2, W, THREE)  # rewards must have shape \(2,\)
vtrace(R, R, W, old_logp=None, behavior_logp=R)  # old_logp is None
vtrace(R, R, W, **BOTH, clip_advantage=-1.0)  # clip_advantage must be above 0
vtrace_returns(R, R, W, **BOTH, clip_rho=0.0)  # clip_rho must be above 0
retrace_returns(R, R, W, action_values=R[:1], **BOTH)  # action_values
n_step_returns(R, R, W, n=0)  # n must be an integer above 0
corrected_td_errors(R, R, W, **BOTH, lam=2.0)  # lam must be in \[0, 1\]
best_of_value(R, k=0)  # k must be an integer above 0
pav(R[:, 0], R, W, alpha=-1.0)  # alpha must not be negative
whiten_uncertain(R, W, old_logp=R, rho=0.0)  # rho must be above 0
segment_advantages(R, R, W)  # !terminal_rewards: mask must have the shape
polychromic(ones(4), answer_ids=arange(4), size=1)  # size must be at least 2; got 1
polychromic(ones(4), answer_ids=arange(4), sets="some")  # sets must be one of 'all', 'disjoint'
salt(R, count="edge", **EDGES)  # count must be one of
salt(TWO, **EDGES)  # advantages must have shape
similar_states(["a"], threshold=1.0)  # threshold must be in \(0, 1\)
fork_advantages(T, J, turn_where=M, eps=0.1)  # eps=0.1 has no effect without scale
node_rewards(NODES, NODES, TWO, max_depth=2)  # these must have the same shape
node_rewards(NODES, NODES, THREE, max_depth=2, alpha=1.0)
    # alpha=1.0 has no effect without edge_logp
node_rewards(NODES, NODES, THREE, max_depth=2, over="leaves", edge_logp=THREE)
    # over='leaves' has no effect with edge_logp
segment_tokens(R, W, ones((2, 3), int))  # max_prob needs old_logp
depth_advantages(THREE, NODES, NODES, trees=0, max_depth=2)  # trees must be above 0; got 0
turn_ends(M, turn_ids=J[:, 1:])  # same shape
poad(T, T, M, turn_ids=J, gamma=1.5)  # gamma must be in \[0, 1\]
pdppo(T, T, M, turn_ids=J, combine="maxi")  # combine must be one of .*Did you mean 'max'
egae(T, T, M, unfinished=M)  # unfinished must have shape
turn_sums(T, M, turn_ids=J, turns=0)  # turns must be an integer above 0
geometric_rewards(TWO, turn_where=THREE > 0)  # there must be turns for each of the rewards
info_gain_rewards(TWO, answer_logp=zeros((3, 4)))  # answer_logp must have shape
gated_rewards({"a": TWO}, order=("a",), thresholds=(0.0,))
    # 1 rewards take 0 thresholds and 1 weights; got 1 and 1
gated_rewards({"a": TWO}, order=("b",), thresholds=())  # order must be one of 'a'
gate_turn_rewards(TWO, step_rewards=R, weight=-1.0)  # weight must not be negative
place_turn_rewards(TWO, W, turn_ids=INTS)  # turn_rewards is None; mode='dense' requires it
place_turn_rewards(TWO, W, turn_ids=INTS, mode="single", max_total=2.0)
    # max_total=2.0 has no effect with mode='single'
place_turn_rewards(TWO, W, turn_ids=INTS, turn_rewards=R, max_total=ones((2, 1)))
    # max_total must have shape \(2,\); got \(2, 1\)
asymre(R, where=WIDE)  # rewards \(2, 3\), where \(2, 4\)
asymre(R, shift=nan)  # shift must be
asymre(R, shift=inf)  # shift must be
teacher_advantages(R, M, discount=2.0, **TEACHER)  # discount must be in \[0, 1\]; got 2
teacher_advantages(R, M, normalize=True, **TEACHER)  # normalize has no effect with discount 0
rlsd(R, M, has_teacher=None, lam=2.0, **TEACHER)  # lam must be in \[0, 1\]; got 2
rlsd(R, M, has_teacher=None, eps=-0.1, **TEACHER)  # eps must not be negative
rlsd(R, M, has_teacher=TWO > 0, **TEACHER)  # has_teacher must have shape \(2, 3\)
prefix_weighted(T, M, gamma=-1.0)  # gamma
hae(R, TWO, R, R, W)  # the same shape
hae(R, R, R, R, W, subgoal_lam=2.0)  # subgoal_lam must be in \[0, 1\]
hae(R, R, R, R, W, truncated=W)  # truncated must have shape
hiper_rewards(R, switches=W, subgoal_ids=INTS, per="batch")  # per must be one of
hiper_rewards(R, switches=W, subgoal_ids=INTS, change_penalty=-1.0)
    # change_penalty must not be negative
gae(R, R[:, :2], W)  # (mask \(2, 3\).*values|values \(2, 2\))
gae(R, None, W)  # values is None
gae(R, R, W, lam=1.01)  # lam must be in \[0, 1\]
gae(R, R, W, bootstrap_value=R)  # bootstrap_value must have shape \(2,\); got \(2, 3\)
gae_returns(R, R[:, :2], W)  # (mask \(2, 3\).*values|values \(2, 2\))
gae_returns(R, None, W)  # values is None
gae_returns(R, R, W, lam=1.01)  # lam must be in \[0, 1\]
gae_returns(R, R, W, bootstrap_value=R)  # bootstrap_value must have shape \(2,\); got \(2, 3\)
length_adaptive_gae(R, R[:, :2], W)  # (mask \(2, 3\).*values|values \(2, 2\))
length_adaptive_gae(R, None, W)  # values is None
length_adaptive_gae(R, R, W, alpha=0.0)  # alpha must be above 0
length_adaptive_gae(R, R, W, bootstrap_value=R)  # must have shape \(2,\); got \(2, 3\)
TypeError:
gae(R, INTS, W)  # values must be floating point
gae_returns(R, INTS, W)  # values must be floating point
length_adaptive_gae(R, INTS, W)  # values must be floating point
center(INTS)  # x must be floating point
shared_prefix_advantages(INTS, J, M)  # advantages must be flo
set_advantages(INTS, J, group_size=4)  # scores must be floating
node_rewards(THREE, NODES, THREE, max_depth=1)  # parents must hold integers
depth_advantages(THREE, NODES, THREE, trees=1, max_depth=1)  # tree_ids must hold integers
depth_advantages(THREE, THREE, NODES, trees=1, max_depth=2)  # depth must hold integers
remax(R, greedy_rewards=IDS)  # greedy_rewards must be floating point
remax(R, greedy_rewards=TWO, where=R)  # where must be bool
opo(R, T)  # mask must be bool
opob(R, R, INTS)  # grad_sq_norms must be floating point
opob(R, R, None)  # grad_sq_norms must be an array; got NoneType
vcpo_advantage(R, **VCPO | {"old_logp": None})  # old_logp must be an array; got NoneType
mc_grpo(INTS)  # rewards must be floating point; got int32
scale_scores(R, score_std=None)  # score_std must be an array; got NoneType
update_moments(score_scaler().init(), INTS)  # x must be floating point
reinforce_pp_baseline(R, T)  # mask must be bool
reinforce_pp(R, T)  # mask must be bool
informative_share(R, where=R)  # where must be bool
grpo_split(R, steered=R)  # steered must be bool
grpo_split(R, steered=None)  # steered must be an array; got NoneType
grpo_split(INTS, steered=W)  # rewards must be floating
hbpo(R, budgets=INTS)  # budgets must be floating point
hbpo(R, budgets=None)  # budgets must be an array; got NoneType
ace(R, M, old_logp=T, ref_logp=T, wrong=R)  # wrong must be bool
entropy_shaping(R, T, old_entropy=T)  # mask must be bool
dcpo_distribution(R, M, **DCPO | {"policy_entropy": None})  # policy_entropy must be an array
otb_token(T, T, **OTB)  # mask must be bool
sum_pi_squared(INTS)  # logits must be floating point
passk_training(INTS)  # rewards must be floating point
passk_training(R, k=2.0)  # k must be an integer; got 2.0
pkpo(INTS)  # rewards must be floating point
pkpo(R, k=2.0)  # k must be an integer; got 2.0
log_comb("4", 2)  # n must be an array; got str
maxrl(INTS)  # rewards must be floating point
maclaurin(R, order=2.5)  # order must be an integer; got 2.5
SMOOTH.update(R, SMOOTH.init(), prompt_ids=IDS, where=TWO)
    # !smooth_standardization: where must be bool
SMOOTH.update(R, SMOOTH.init())  # !_VisitsUpdate.* 'prompt_ids'
terminal_rewards(TWO, R)  # mask must be bool
gdpo(R)  # rewards must map the name of each.*ndarray
gdpo(A | {"b": INTS})  # rewards\['b'\] must be floating point; got int32
gdpo(A, weights={"a": TWO})  # the weight of 'a' must be a number; got array
gdpo(A, weights={"a": "half"})  # the weight of 'a' must be a number; got 'half'
verpo(R, test_passes=T)  # test_passes must be bool
positive_part(TWO, asarray(1))  # error_sq must be floating
shrinkage_baseline(INTS, prior=TWO)  # rewards must be floating point
shrinkage_baseline(R, prior=IDS)  # prior must be floating point
v05_baseline(INTS, prior=TWO)  # rewards must be floating point
v05_baseline(R, prior=IDS)  # prior must be floating point
SPO.update(R, SPO.init())  # !_SpoUpdate.* 'prompt_ids'
SPO.update(R, SPO.init(), prompt_ids=TWO)  # !spo_tracker: prompt_ids must hold integers
ADAPTIVE.update(R, ADAPTIVE.init(), prompt_ids=IDS)  # !.*policy_shift
spo(INTS, TWO)  # rewards must be floating point
beta_tracker_value(TRACKER, TWO)  # prompt_ids must hold integers
beta_tracker_update(TRACKER, IDS, R, 0.9, where=R)  # where must be bool
turn_returns(T, turn_where=T)  # turn_where must be bool
turn_returns(T, matches=T)  # matches must be bool
turns_to_tokens(T, M, turn_ids=T)  # turn_ids must hold integers
adhint(TWO, hinted=TWO)  # hinted must be bool
polychromic(ones(4), answer_ids=ones(4))  # answer_ids must hold integers
gigpo(R, turn_rewards=T, state_ids=T)  # state_ids must hold integers
spo_tree(TWO, R, W)  # node_ids must hold integers
turn_starts(M, turn_ids=T)  # turn_ids must hold integers
turn_end_rewards(T, M, turn_ids=J, turn_where=T)  # turn_where must be bool
asymre(INTS)  # rewards must be floating point; got int32
rlsd(R, M, has_teacher=R, **TEACHER)  # has_teacher must be
hae(R, R, R, R, R)  # switches must be bool
hae_tokens(hae(R, R, R, R, W), W, turn_ids=INTS, roles=R)  # roles must hold integers
ui_s1(T, matches=T)  # matches must be bool
"""


@for_each("error, call, message", bad_calls(BAD))
def test_bad_input(error, call, message):
    raises(error, call, message, NAMES)
