"""Bad options and arrays raise one sentence that names function and argument."""

import jax
import jax.numpy as jnp
import numpy as np
from bad_calls import bad_calls, raises
from rows import for_each

from jaxrl_llm import advantages, curation, rewards
from jaxrl_llm.curation import PromptBelief, RateCalibration

KEY, INTS = jax.random.key(0), jnp.ones(3, int)
TWO, THREE, S, R, WIDE, T = map(jnp.ones, (2, 3, (2, 2), (2, 3), (2, 4), (2, 3, 4)))
SMALL = curation.rate_adapter_init(KEY, size=3, hidden=4)


def fit(**options):
    x, y = options.pop("embeddings", np.ones((6, 3))), options.pop("rates", np.full((2, 6), 0.5))
    options = {"references": 3, "batch": 3, "dropout": 0.1, "steps": 1, "key": KEY} | options
    return curation.rate_adapter_fit(SMALL, options.pop("key"), x, y, **options)


NAMES = {
    **{name: getattr(curation, name) for name in curation.__all__},
    **{name: value for name, value in globals().items() if not name.startswith("_")},
    "W": R > 0,
    "M": T > 0,
    "EIGHT": np.ones(8, bool),
    "KEYS": jnp.ones((3, 2)),
    "BELIEF": PromptBelief(TWO, TWO),
    "BUFFER": curation.replay_init(TWO, capacity=3),
    "CALIBRATION": RateCalibration(TWO, jnp.zeros(1), jnp.zeros((1, 2)), TWO),
    "CAPO": (T, jnp.ones((2, 3, 5)), jnp.zeros((2, 3), int), R, R > 0),
    "DARS": {"rollouts": 8, "max_rollouts": 8},
    "SUMS": {"old_logp": T, "sum_pi_sq": T, "sum_pi_cubed": T, "hidden_sq": 1.0},
    "call_rewards": rewards.call_rewards,
    "m_grpo": advantages.m_grpo,
}
BAD = r"""
ValueError:
adapted_rates(THREE, WIDE, TWO, SMALL)  # the adapter takes embeddings of length 3; references
adaptive_rollouts(TWO, low=4, high=3)  # high must not be below low; got 3 and 4
adhint_ratio(TWO, low=0.5, high=0.2)  # low must not be above high
adhint_ratio(TWO, noise=0.1)  # noise=0.1 has no effect without a key
ampo_select(R, WIDE, k_max=0)  # k_max must be from 1 to 3; got 0
ampo_select(R, WIDE, k_max=4)  # k_max must be from 1 to 3; got 4
ampo_select(R, WIDE, key=KEY)  # has no use for a key, mode='adaptive'
ampo_select(R, WIDE, mode="adapt")  # mode must be one of 'adaptive', 'hybrid', 'always'
ampo_select(R, WIDE, mode="always", probability=0.3)  # probability has no effect with mode='always'
ampo_select(R, WIDE, mode="hybrid")  # hybrid' alone draws; this call needs a key
ampo_select(R, WIDE, mode="hybrid", key=KEY, probability=3.0)  # probability must be in \[0, 1\]
ampo_select(R, WIDE[:1])  # scores must have shape \(2, 4\)
apply_operations({}, [Operation("ad", "x")])  # kind must be one of .*Did you mean 'add'
arm_scores_update(S, INTS, THREE, arms=(1, 2), price=0.0, mean_rollouts=1.0)
    # chosen must have shape \(2,\)
attention_rates(THREE, KEYS, THREE)  # queries and references must have vectors of one length; got
attention_rates(TWO, KEYS, THREE, temperature=0.0)  # temperature must be above 0
attention_rates(TWO, KEYS, THREE, top=4)  # top must be an integer from 1 to 3; got 4
attention_rates(TWO, KEYS, THREE[:2])  # reference_rates must have shape \(3,\)
belief_init(0)  # num_prompts must be an integer above 0
belief_init(2, prior=(0.0, 1.0))  # prior\[0\] must be above 0
belief_init(2, successes=INTS[:1])  # successes and samples are required together
belief_update(BELIEF, INTS[:1], TWO[None], prior=(-1.0, 0.0))  # prior\[0\] must not be negative
belief_update(BELIEF, INTS[:1], TWO[None], retain=1.5)  # retain must be in \[0, 1\]; got 1\.5
belief_update(BELIEF, INTS[:1], TWO[None][0])  # rewards must have 2 axes
best_allocate(np.ones((2, 3)) * np.nan, total=4)  # no allocation of total=4
best_allocate(np.ones((2, 3)), total=3, low=2)  # low=2 .* and total=3
best_allocate(np.ones((2, 3)), total=9, low=3)  # low=3 for each of 2 prompts must be within
beta_bernoulli_information(*BELIEF, rollouts=0)  # rollouts must be an integer above 0; got 0
bin_advantage_weights(THREE, INTS, most=0.0)  # most must be above 0
bin_means(THREE, INTS[:2], num_bins=2)  # these must have the same shape
bin_scores_update(BinScores(THREE, THREE > 0), THREE, THREE > 0, rate=0.0)  # rate must be in \(0
branch_candidates(THREE, candidates=4)  # candidates must be from 1 to 3; got 4
branch_capacity(jnp.ones((2, 2), bool), INTS, capacity=1)  # roots must have shape \(2,\)
calibrate_rates(THREE, THREE, CALIBRATION)  # params\.hidden must have 2 axes
call_rewards(S, TWO, quality=S)  # quality goes with a third weight above 0
candidate_pool(KEY, num_prompts=3, size=0)  # size must be an integer from 1 to 3; got 0
candidate_pool(KEY, num_prompts=3, size=4)  # size must be an integer from 1 to 3; got 4
capo_mask(CapoScores(R, R), W, tau_h=1.0, tau_f=0.0)  # tau_f must be above 0
capo_scores(*CAPO, learning_rate=0.1, betas=(0.8, 0.9))  # betas has no effect without moments
capo_scores(*CAPO, learning_rate=0.1, eps=1e-06)  # eps has no effect without moments
capo_scores(*CAPO, learning_rate=0.1, fisher="exact")  # fisher must be one of 'sample', 'full'
capo_scores(*CAPO, learning_rate=0.1, support=jnp.zeros((2, 3, 5), int))  # support has no effect
capo_scores(T[:1], *CAPO[1:], learning_rate=0.1)  # hidden must have shape \(2, 3, 4\)
capo_selection(R, M, **SUMS | {"hidden_sq": -1.0}, learning_rate=0.1)
    # hidden_sq must not be negative
capo_selection(R, M, **SUMS | {"old_logp": T[0]}, learning_rate=0.1)  # these must have the same
capo_selection(R, M, **SUMS, learning_rate=-1.0)  # learning_rate must not be negative
choose_arms(np.zeros((1, 2)), -np.ones(1, int), arms=(1, 2), total=3)  # counts must not be negative
choose_arms(np.zeros((1, 2)), np.zeros(3, int)[:1], arms=(4, 2), total=3)
    # arms must be 2 integers above 0 in ascending order; got \(4, 2\)
compact_groups(THREE, THREE > 0, n_target=0)  # n_target must be from 1 to 3; got 0
compact_groups(THREE, THREE > 0, n_target=4)  # n_target must be from 1 to 3; got 4
compact_groups({"x": TWO}, THREE > 0, n_target=1)  # the 3 rows of keep; got shape \(2,\)
comprehension_score(R, W[:1])  # these must have the same shape
cumulative_advantage(TWO, rollouts=0)  # rollouts must be above 0
d3s_selection(R, M, old_entropy=T, rollouts=(0.5, 2))  # rollouts must be in \[0, 1\]; got 2
d3s_selection(R, M, old_entropy=T, scope="prompt")  # scope must be one of 'batch', 'group'
d3s_selection(R, M, old_entropy=T[:1])  # these must have the same shape: old_entropy
dars_extra_rollouts(TWO, **DARS, schedule="hw")  # schedule must be one of 'equal', 'hardness'
dars_extra_rollouts(TWO, rollouts=8, max_rollouts=4)  # max_rollouts must be at least rollouts; got
dars_keep(R, upper=0.0)  # upper must be in
depth_prune(jnp.arange(3), window=())  # window must name at least one depth
differing_values(THREE, jnp.ones((2, 1), bool))  # advantages must have shape
difficulty_bins(THREE, edges=(0.4, 0.75), hysteresis=0.1)  # hysteresis=0\.1 has no effect without
difficulty_bins(THREE, edges=(0.5, 0.2))  # edges must be a tuple of numbers within \(0, 1\)
distilled_where(S, INTS)  # stage must have shape
downsample_mask(KEY, THREE > 0, multiple=0)  # multiple
draw_prompts(KEY, TWO, count=1, uniform=-0.1)  # uniform must be in \[0, 1\]; got -0\.1
draw_prompts(KEY, TWO, count=1, where=THREE > 0)  # where must have shape \(2,\)
entropy_branches(*[TWO] * 2, jnp.ones((3, 1)), slots=1)  # draws must have shape \(2, 1\)
exponential_weights(THREE, explore=1.5)  # explore must be in \[0, 1\]
exponential_weights(THREE, seen=THREE > 0)  # seen=
fading_probs(INTS[:2], form="linear")  # form must be one of 'smooth', 'sharp'
filtration_weights(THREE, power=2.0)  # power=2.0 has no effect with rule='best_worst'
filtration_weights(THREE, rule="best_wrst")  # rule must be one of .*Did you mean 'best_worst'
fit(batch=4)  # !rate_adapter_fit: batch must be an integer from 1 to 3; got 4
fit(dropout=1.0)  # !rate_adapter_fit: dropout must be
fit(embeddings=jnp.ones((6, 4)))  # !rate_adapter_fit: embeddings must have vectors of the adapter's
fit(rates=jnp.ones((2, 5)))  # !rate_adapter_fit: rates must have shape \(2, 6\); got \(2, 5\)
fit(references=6)  # !rate_adapter_fit: references must be an integer from 1 to 5; got 6
greedy_allocate(R, total=1, start=1)  # start=1 .* must be within
greedy_allocate(R, total=3, start=INTS)  # start must have shape \(2,\)
greedy_allocate(R, total=9, start=-1)  # start=-1 .* must be within
greedy_allocate(R, total=99, start=4)  # start=4 .* must be within
greedy_allocate(THREE, total=1)  # gains must have 2 axes
hint_level(INTS[:1], jnp.array([0.0]), low=0.5, high=0.1)  # low must not be above high; got 0.5
hint_slots(jnp.array([True]), group_size=2, plain=3)  # plain must be from 0 to 2; got 3
icpo_bonus(0, anneal=0)  # anneal must be above 0
icpo_bonus(0, beta=-1.0)  # beta must not be negative
icpo_merge(R, steered=THREE > 0, key=KEY)  # these must have the same shape
informative_groups(R, metric=R, name="a")  # name='a' has no effect
informative_groups(R, metric=THREE)  # rewards \(2, 3\), metric \(3,\)
informative_groups(R, metric={"b": R, "a": R})  # name must be one of 'a', 'b'; got None
insight_scores(PromptBelief(TWO, TWO), rollouts=4, information="mi")
    # information must be one of 'mutual', 'variance'
judge_items(KEY, TWO, point=1.5)  # point must be in \[0, 1\]; got 1.5
latent_policy(num_prompts=1).update(R, None, embeddings=T[:1], prompt_ids=INTS[:1], key=KEY)
    # embeddings must have shape \(2, 3, 4\)
latent_policy(num_prompts=1, clusters=0)  # clusters must be
learnability(TWO, power=0.0)  # power must be above 0
line_starts(EIGHT, EIGHT, count=0)  # count must be an integer above 0
lookahead_prune(INTS[None], jnp.array([-1]), INTS[:1], 3, ages=(2,), max_distance=None, eos_id=0)
    # one of the three rules must be on
lookahead_prune(INTS[None], jnp.array([-1]), INTS[:1], 3, eos_id=0)  # each of ages must be from 1
m_grpo(S, jnp.ones((3, 2), int), call_where=jnp.ones((3, 2), bool))  # calls must have the leading
max_variance_subset(R, INTS)  # n must be one number or have shape \(2, 1\).* got \(3,\)
max_variance_subset(R, INTS[:1])  # n must be one number or have shape \(2, 1\).* got \(1,\)
max_variance_subset(THREE, -1)  # n must not be negative
max_variance_subset(THREE, 1, where=TWO > 0)  # .*x \(3,\), where \(2,\)
mean_win_rate(R)  # probabilities must have shape
missing_eos_penalty(THREE, truncated=THREE[:2] > 0, penalty=1.0)  # these must have the same shape
mix_source_mask(KEY, prompts=5, probability=-0.5)  # probability must be in \[0, 1\]; got -0.5
mix_source_mask(KEY, prompts=5, probability=1.5)  # probability must be in \[0, 1\]; got 1.5
mixed_subset(KEY, THREE, count=1)  # count must be at least 2; got 1
mpt_advantages(TWO, M, rewards=R, old_logp=T, old_entropy=T)  # advantages must have the shape
mpt_mask(THREE, THREE, THREE > 0, THREE)  # rewards must have shape \(\); got \(3,\)
mpt_mask(THREE, THREE, THREE > 0, TWO[0], sigma=-0.1)  # sigma must not be negative
mpt_mask(THREE, THREE, THREE > 0, TWO[0], tau=0.0)  # tau must be in \(0, 1\]; got 0
mpt_mask(THREE, THREE, THREE > 0, TWO[0], tau=1.5)  # tau must be in \(0, 1\]; got 1.5
mpt_mask(THREE, TWO, THREE > 0, TWO[0])  # must have the same shape: logp
nearest_centroid(R, jnp.zeros((4, 2)))  # embeddings must have shape \(2, 2\)
nearest_solved(TWO, KEYS, count=0)  # count must be an integer from 1 to 3; got 0
nearest_solved(TWO, KEYS, count=1, threshold=2.0)  # threshold must be in \[-1, 1\]; got 2\.0
nearest_target(TWO, target=2.0)  # target must be in \[0, 1\]
pass_history_init(3, 0)  # window must be an integer above 0; got 0
patch_decision(THREE > 0, INTS, limit=-1)  # limit must not be negative
patch_decision(THREE > 0, INTS[:2])  # these must have the same shape
pooled_groups(S, age=S, stored=THREE > 0, count=1)  # stored must have shape \(2,\)
predictive_gate(THREE, max_std=-0.1)  # max_std must not be negative
prefix_cuts(KEY, jnp.array(3), low=0.9)  # low must not be above high; got 0.9 and 0.8
prompt_gdro(num_prompts=2).update(R, None, prompt_ids=INTS, rewards=R)  # prompt_ids must have shape
prompt_gdro(num_prompts=2, explore=2.0)  # explore must be in \[0, 1\]
prompt_gdro(num_prompts=2, signal="failure", eps_low=0.1)  # eps_low has no effect with signal
prompt_gdro(num_prompts=2, signal="rate")  # signal must be one of 'loss', 'failure'
prs_keep_prob(R, W, width=0.0)  # width must be above 0
quality_loss(THREE, TWO)  # these must have the same shape
rate_adapter_init(KEY, size=2, hidden=0)  # hidden must be an integer above 0; got 0
recency_weights(INTS[:2], version=1, scale=0.0)  # scale must be above 0
regret_update(TWO, THREE, TWO)  # these must have the same shape
replay_add(BUFFER, S, prompt_ids=INTS[:2], version=0, evict="lowest")  # evict='lowest' needs scores
replay_add(BUFFER, S, prompt_ids=INTS[:2], version=0, evict="worst")
    # evict must be one of 'oldest', 'lowest'
replay_add(BUFFER, TWO, prompt_ids=INTS[:2], version=0)  # items must have shape \(2, 2\); got
replay_add(BUFFER, {"x": S}, prompt_ids=INTS[:2], version=0)  # items must have the structure
replay_fresh(BUFFER, version=3, max_lag=-1)  # max_lag must not be negative; got -1
replay_importance(TWO, power=2.0)  # power must be in \[0, 1\]
replay_init(TWO, capacity=0)  # capacity must be an integer above 0; got 0
replay_priorities(TWO, power=-1.0)  # power must not be negative
replay_sample(KEY, BUFFER, count=1, weights=TWO)  # weights must have shape \(3,\)
replay_sample(KEY, BUFFER, count=4)  # count must be an integer from 1 to 3; got 4
replay_scores(TWO, THREE)  # these must have the same shape
resample_on_correct(WIDE[0], penalty=WIDE[0], count=3)  # min_wrong \+ min_right must be at most
resample_rollouts(KEY, THREE, count=0)  # count must be above 0; got 0
right_over_wrong(THREE, lengths=THREE[:2])  # these must have the same
right_over_wrong(THREE, pairs=0)  # pairs must be an integer
role_loss_mask(INTS, trainable=("agent",))  # trainable must be one of
rollout_priority(THREE, INTS, 3, level=0.0)  # level must be in \(0, 1\); got 0
round_to_budget(np.ones(3) * np.inf, total=9, low=1, high=5)  # .* rollouts must be finite
round_to_budget(np.ones(3), total=9, low=4, high=5)  # low=4 for each of 3 prompts exceeds total=9
round_to_budget(np.ones(3), total=9, low=5, high=2)  # low must be from 0 to high; got 5 and 2
sample_few_shot(KEY, INTS, count=9)  # count must be an integer from 1 to 2
scaffold_slots(INTS[:1], group_size=2, count=3)  # count must be from 1 to 2; got 3
score_bins_init(bins=0)  # bins must be above 0; got 0
select_extremes(THREE, best=-1, worst=1)  # best must not be negative; got -1
select_pairs(THREE, key=KEY)  # key=Array
select_pairs(THREE, min_gap=-1)  # min_gap must not be negative
select_pairs(THREE, mode="best")  # mode must be one of
select_pairs(THREE, mode="random")  # mode='random' needs a key
select_top(TWO, count=3)  # count must be an integer from 1 to 2; got 3
select_top(TWO[None], count=1)  # scores must have 1 axis
shadow_price(0, 1, mean_rollouts=1, rate=0.0)  # rate must be above 0
splice(INTS, jnp.int32(1), jnp.ones(0, int), jnp.int32(0))  # continuation must have at least
split_points(4)  # give rounds or points; got rounds=None and points=None
spo_cutpoints(np.zeros(8, np.float32), EIGHT, count=1, rho=0.0)  # rho must be above 0
spread_groups(R, threshold=-1.0)  # threshold must not be
sqrt_allocation(TWO, THREE, mean_rollouts=4.0)  # these must have the same shape
sqrt_lr(1e-06, old_size=0, new_size=1)  # old_size must be above 0
ssb_sample(KEY, TWO, TWO, count=0)  # count must be an integer above 0; got 0
stage_mask(INTS, 0, boundaries=(20, 10))  # boundaries must be increasing
stretch_starts(EIGHT, count=1, length=0)  # length must be an integer above 0
suffix_match(INTS, INTS[:2])  # a and b must have one length of at least 1
survival_rates(THREE, keep=0.0)  # keep must be in \(0, 1\]; got 0
swarm_groups(KEY, TWO > 0, local=THREE > 0, count=1, foreign=1)  # these must have the same shape
systematic_survivors(KEY, THREE, count=0)  # count must be above 0; got 0
target_logits(TWO, temperature=0.0)  # temperature must be above 0
top_entropy_steps(None, M, old_entropy=T, turn_ids=M.astype(int), turns=1, keep=0.0)
    # keep must be in \(0, 1\]; got 0
top_fraction_token_mask(R, W, 1.5)  # fraction must be in \[0, 1\]; got 1.5
top_k_entropy(S, vocab_size=1)  # at least 2; got 1
training_progress(1, steps=0)  # steps must be above 0
tree_rollouts(0, group_size=4, starts=(0, 10), shares=(1.0,))  # starts must rise and match shares
truncation_mask(R, M, truncated=THREE > 0)  # truncated must have shape \(2, 3\); got \(3,\)
variance_reduction(BELIEF.alpha, BELIEF.beta[:1], rollouts=1)  # these must have the same shape
warmup_cosine(0, peak=0.5, valley=-0.1, warmup=0, decay=4)  # valley must be in \[0, 1\]
warmup_cosine(0, peak=0.5, valley=0.1, warmup=-1, decay=4)  # warmup must not be negative
warmup_cosine(0, peak=0.5, valley=0.1, warmup=0, decay=0)  # peak 0.5 has no effect without warmup
warmup_cosine(0, peak=0.5, valley=0.1, warmup=0, decay=float("inf"))  # decay must
warmup_cosine(0, peak=1.5, valley=0.1, warmup=0, decay=4)  # peak must be in \[0, 1\]
width_prune(THREE, keep="wrst")  # keep must be one of 'best', 'extremes'
window_tokens(W, unfinished=TWO > 0, versions=W * 1, current_version=0, drop_tail=-1)
    # drop_tail must not be negative
within_band(KEY, TWO, low=0.8, high=0.2)  # low must not be above high; got 0\.8 and 0\.2
xrpo_extra_rollouts(R, budget=3, max_rollouts=0)  # max_rollouts must be an integer above 0
TypeError:
align_calls(None, KEY, count=2)  # where must be a bool array
align_calls(S, KEY, count=1)  # be bool
belief_update(BELIEF, INTS[:1], TWO[None], where=TWO[None])  # where must be bool
belief_update(BELIEF, jnp.array([0.0]), TWO[None])  # prompt_ids must hold integers
cap_items(KEY, TWO, count=1)  # flags must be bool
capo_scores(*CAPO[:2], R, *CAPO[3:], learning_rate=0.1)  # actions must hold integers
capo_selection(R, M, **SUMS | {"old_logp": None}, learning_rate=0.1)  # old_logp must be an array
compact_groups(THREE, THREE, n_target=1)  # keep must be bool
comprehension_score(TWO, TWO)  # answer_mask must be bool
constrained_pairs(WIDE[0], satisfied=WIDE[0])  # satisfied must be bool
d3s_selection(R, M, old_entropy=None)  # old_entropy must be an array
dars_extra_rollouts(INTS, **DARS)  # accuracy must be floating point
fading_probs(TWO)  # order must hold integers
first_bad_step(INTS)  # scores must be floating point
first_rollouts(THREE, count=1)  # where must be bool
fit(key=jnp.zeros(2, jnp.uint32))  # !rate_adapter_fit: key must be one typed key
guidance_stage(jnp.array([0.0]), jnp.array([True]))  # stage must hold integers
gumbel_top(KEY, TWO, count=1, where=TWO)  # where must be bool
icpo_merge(R, steered=None, key=KEY)  # steered must be an array; got NoneType
icpo_merge(R, steered=R, key=KEY)  # steered must be bool
informative_groups(INTS)  # rewards must be floating point
learnability(jnp.ones(2, int))  # rates must be floating point
line_starts(np.ones(8), EIGHT, count=1)  # breaks must be bool
linear_recalibration(THREE, THREE, THREE)  # reference_ids must hold integers
linear_recalibration(THREE, jnp.arange(3), THREE, where=THREE)  # where must be bool
max_variance_subset(THREE, 1.5)  # n must hold integers
mpt_mask(INTS, THREE, THREE > 0, TWO[0])  # logp must be floating point
mpt_mask(THREE, THREE, None, TWO[0])  # mask must be a bool array
mpt_mask(THREE, THREE, THREE > 0, INTS[0])  # rewards must be floating point
mpt_mask(THREE, THREE, THREE, TWO[0])  # mask must be bool
needs_hint(jnp.array([0, 1]))  # rewards must be
pass_history_update(pass_history_init(3, 2), INTS, THREE)  # hit must be bool
prs_keep_prob(R, R)  # correct must be bool
prs_where(R, coverage=None, key=KEY)  # coverage must be an array; got NoneType
replacements(INTS[:2], 1)  # keep must be bool
replay_add(BUFFER, S, prompt_ids=INTS[:2], version=0, where=TWO)  # where must be bool
role_loss_mask(THREE)  # role_ids must hold integers
rollout_priority(THREE, THREE, 3)  # count must hold integers
sample_few_shot(KEY, THREE, count=1)  # user_ids must hold integers
scheduled(icpo_bonus, anneall=3)  # !.*icpo_bonus has no option 'anneall'
thompson_rates(KEY, BELIEF, jnp.ones(1))  # prompt_ids must hold integers
top_fraction_token_mask(R, R, 0.5)  # mask must be bool
truncation_mask(R, M, truncated=R)  # truncated must be bool
"""


@for_each("error, call, message", bad_calls(BAD))
def test_bad_input(error, call, message):
    raises(error, call, message, NAMES)
