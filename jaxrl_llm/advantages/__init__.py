"""Rewards to advantages.

Estimators return float32 advantages, and are of four kinds by their first argument:

- groups: ``rewards[..., G]``, the rollouts of one prompt along the last axis. They return
  ``[..., G]``, one value per rollout, or ``[..., G, T]``, one per token.
- tokens: ``token_rewards[..., T]``, as for :func:`gae`; they return ``[..., T]``.
- turns: ``rewards[..., G, K]`` or ``turn_rewards[..., K]``, one per turn, as for :func:`trloo`;
  they return one value per turn.
- modulators, "then" in the table: ``advantages``, which they change.

States, trackers and helpers say what they take. ``where`` (bool, True = takes part) marks rollouts;
the others get 0 and their rewards are never read. Estimators are differentiable; the surrogate
stops the gradient.

===========================  =======================================================================
grpo                         minus the group mean, over a standard deviation
grpo_from_baseline           minus another baseline, over the deviation from it
dr_grpo                      minus the group mean
asymre                       minus a baseline a constant below the group mean
grpo_split                   minus the mean of the rollouts without a guide
rloo                         minus the mean of the other rollouts
reinforce_pp_baseline        minus the group mean, then normalized over the batch
mc_grpo                      minus the group median, over the median deviation from it
remax                        minus the reward of the greedy response
opo                          minus the group mean weighted by length
vcpo_advantage               minus the off-policy optimal baseline (opob), over a deviation
gpg                          minus the group mean, rescaled for groups that carry no signal
otb                          minus a baseline per position, weighted by the gradient before it
reinforce_pp                 returns of tokens, whitened over the batch
gae                          from a critic's values
length_adaptive_gae          the same, with a lambda that grows with the response
turn_gae, poad, pdppo        from a critic's values at turns, or with a discount between turns
hae, hiper                   from three critics: of subgoals, actions, and switches of subgoal
egae                         GAE for responses that were cut off
vtrace, n_step_returns       GAE for another policy's samples; retrace_returns, corrected_td_errors
segment_advantages, pav      from rollouts that continue from each segment of a response
gdpo                         several rewards, each normalized in its group, then over the batch
gdpo_token                   the same, but the last step is over the tokens of the batch
grpo_passk                   the lead of the best rollout over the second
passk_training               pass@k as the reward of every group of k
pkpo                         right answers, by the chance that all others are wrong
maxrl                        minus the group mean, over the group mean
maclaurin                    a series of the log-probability of a right answer
spo, spo_tracker             minus a tracked success rate, over the deviation of the batch
mssr_tracker                 the same with one factor of forgetting for the batch
smooth_standardization       standardized over this visit and over all visits to the prompt
trloo                        leave one out at each turn
mc_turns                     returns of turns minus those of the other rollouts
turn_grpo                    over all turns of the group
ui_s1                        returns of turns up to where they leave an expert's path
gigpo, hgpo                  among the turns from the same state, or history of states
salt                         then: averaged where rollouts share a turn
verpo                        the outcome, and unit tests by their difficulty, for each attempt
hbpo                         over the group, and against the ideal reward of the token budget
ospo                         the agents of one time step as the group
novelty_sharpening, ace      then: more for unlikely right answers; for overconfident wrong ones
entropy_shaping              then: a bonus for tokens of high entropy
dcpo_distribution            then: a pull of good rollouts toward another temperature
v05_baseline                 minus a value prior fused with the group mean
jspo                         minus the mean of the others, shrunk to the other groups' mean
token_grpo                   minus the group's mean over tokens, over their deviation
adhint                       over a group with and without hints, by how much the hint helped
depth_advantages             nodes of a tree among those of their depth; after node_rewards
branch_advantages            both of them for the tokens of responses that fork
sibling_advantages           nodes of a tree among those of their parent
spo_tree                     the same for the tokens of responses that fork; whiten_segments after
portool                      the outcome, and turns that fork among their siblings
polychromic                  sets of rollouts, by their reward and diversity
oprl, two_level              the outcome, and turns by an implicit process reward
prime                        ... and tokens
m_grpo, of_calls             calls of all rollouts of a query as one group
shared_prefix_advantages     then: the mean of the responses that share a token
hint_consistency, ...        then: hint tokens by the policy's certainty; hint_preservation
entropy_reshaping            then: more for certain answers, less for uncertain ones
bounded_bonus                then: a bonus for hidden states of growing rank
teacher_advantages, ...      then: the log-ratio of a teacher to the policy; prefix_weighted
rlsd                         then: more for tokens that speak for the reward, by a teacher
===========================  =======================================================================
"""

from jaxrl_llm.advantages.agents import m_grpo, of_calls
from jaxrl_llm.advantages.baselines import (
    jspo,
    mc_grpo,
    mc_grpo_keep,
    mc_grpo_pivot,
    opo,
    opob,
    remax,
    remax_token,
    vcpo_advantage,
)
from jaxrl_llm.advantages.batch import (
    RunningMoments,
    batch_normalize,
    center,
    clip,
    reinforce_pp,
    reinforce_pp_baseline,
    scale_scores,
    score_deviation,
    score_scaler,
    update_moments,
    whiten,
)
from jaxrl_llm.advantages.distillation import (
    prefix_weighted,
    rlsd,
    span_advantages,
    teacher_advantages,
)
from jaxrl_llm.advantages.entropy import (
    EntropySignal,
    EntropyStats,
    entropy_reshaping,
    entropy_signal,
    signal_temperature,
    token_grpo,
)
from jaxrl_llm.advantages.group import (
    asymre,
    dr_grpo,
    gpg,
    grpo,
    grpo_from_baseline,
    grpo_split,
    hbpo,
    informative_share,
    rloo,
)
from jaxrl_llm.advantages.hidden_rank import (
    RankBaseline,
    RankGrowth,
    bounded_bonus,
    effective_rank,
    rank_baseline_init,
    rank_baseline_update,
    rank_bonus,
    rank_growth,
    rank_shaping,
)
from jaxrl_llm.advantages.hierarchy import (
    ACTION,
    SUBGOAL,
    SWITCH,
    Hierarchy,
    TokenCredit,
    hae,
    hae_tokens,
    hiper,
    hiper_places,
    hiper_returns,
    hiper_rewards,
    hiper_tokens,
)
from jaxrl_llm.advantages.hinted import (
    adhint,
    grpo_imitating,
    hint_consistency,
    hint_preservation,
)
from jaxrl_llm.advantages.implicit import implicit_turn_rewards, oprl, prime, two_level
from jaxrl_llm.advantages.modulators import (
    SampledEntropy,
    ace,
    dcpo_distribution,
    entropy_shaping,
    novelty_sharpening,
    sampled_entropy,
    sampled_entropy_shaping,
    temperature_logp,
)
from jaxrl_llm.advantages.off_policy_returns import (
    corrected_td_errors,
    n_step_returns,
    retrace_returns,
    vtrace,
    vtrace_returns,
)
from jaxrl_llm.advantages.ospo import fleet_fairness, fleet_grpo, ospo
from jaxrl_llm.advantages.otb import otb, otb_token, sum_pi_squared
from jaxrl_llm.advantages.passk import (
    grpo_passk,
    log_comb,
    maclaurin,
    maclaurin_weights,
    maxrl,
    passk_training,
    pkpo,
)
from jaxrl_llm.advantages.prompt_stats import (
    PromptStats,
    prompt_stats_init,
    prompt_stats_update,
    smooth_advantage,
    smooth_standardization,
)
from jaxrl_llm.advantages.returns import (
    gae,
    gae_returns,
    kl_shaped_rewards,
    length_adaptive_gae,
    reward_to_go,
    terminal_rewards,
)
from jaxrl_llm.advantages.reward_components import (
    density_weights,
    gate_rewards,
    gdpo,
    gdpo_token,
    sum_components,
    verpo,
)
from jaxrl_llm.advantages.segments import (
    best_of_value,
    pav,
    segment_advantages,
    whiten_uncertain,
)
from jaxrl_llm.advantages.sets import polychromic, set_advantages, set_scores
from jaxrl_llm.advantages.shrinkage import (
    osla_continue,
    positive_part,
    shrinkage_baseline,
    v05_baseline,
)
from jaxrl_llm.advantages.single_rollout import MssrTracker, mssr_tracker, spo, spo_tracker
from jaxrl_llm.advantages.states import gigpo, hgpo, salt, similar_states
from jaxrl_llm.advantages.tool_trees import fork_advantages, portool, step_rewards, turn_nodes
from jaxrl_llm.advantages.tracker import (
    BetaTracker,
    beta_tracker_init,
    beta_tracker_update,
    beta_tracker_value,
    kl_forgetting,
    uncertainty_sampling_weights,
    window_kl_discount,
)
from jaxrl_llm.advantages.trees import (
    branch_advantages,
    depth_advantages,
    node_rewards,
    shared_prefix_advantages,
    sibling_advantages,
    spo_tree,
    whiten_segments,
)
from jaxrl_llm.advantages.turn_critics import (
    egae,
    pdppo,
    pdppo_returns,
    poad,
    poad_returns,
    turn_borders,
    turn_end_rewards,
    turn_ends,
    turn_gae,
    turn_gae_returns,
    turn_starts,
    turn_sums,
)
from jaxrl_llm.advantages.turn_rewards import (
    gate_turn_rewards,
    gated_rewards,
    geometric_rewards,
    info_gain_rewards,
    place_turn_rewards,
    token_totals,
)
from jaxrl_llm.advantages.turns import (
    equal_turns,
    mc_turns,
    trloo,
    turn_grpo,
    turn_returns,
    turns_to_tokens,
    ui_s1,
)
from jaxrl_llm.advantages.visits import Recalled, Visits, last_visit

__all__ = [
    "ACTION",
    "SUBGOAL",
    "SWITCH",
    "BetaTracker",
    "EntropySignal",
    "EntropyStats",
    "Hierarchy",
    "MssrTracker",
    "PromptStats",
    "RankBaseline",
    "RankGrowth",
    "Recalled",
    "RunningMoments",
    "SampledEntropy",
    "TokenCredit",
    "Visits",
    "ace",
    "adhint",
    "asymre",
    "batch_normalize",
    "best_of_value",
    "beta_tracker_init",
    "beta_tracker_update",
    "beta_tracker_value",
    "bounded_bonus",
    "branch_advantages",
    "center",
    "clip",
    "corrected_td_errors",
    "dcpo_distribution",
    "density_weights",
    "depth_advantages",
    "dr_grpo",
    "effective_rank",
    "egae",
    "entropy_reshaping",
    "entropy_shaping",
    "entropy_signal",
    "equal_turns",
    "fleet_fairness",
    "fleet_grpo",
    "fork_advantages",
    "gae",
    "gae_returns",
    "gate_rewards",
    "gate_turn_rewards",
    "gated_rewards",
    "gdpo",
    "gdpo_token",
    "geometric_rewards",
    "gigpo",
    "gpg",
    "grpo",
    "grpo_from_baseline",
    "grpo_imitating",
    "grpo_passk",
    "grpo_split",
    "hae",
    "hae_tokens",
    "hbpo",
    "hgpo",
    "hiper",
    "hiper_places",
    "hiper_returns",
    "hiper_rewards",
    "hiper_tokens",
    "hint_consistency",
    "hint_preservation",
    "implicit_turn_rewards",
    "info_gain_rewards",
    "informative_share",
    "jspo",
    "kl_forgetting",
    "kl_shaped_rewards",
    "last_visit",
    "length_adaptive_gae",
    "log_comb",
    "m_grpo",
    "of_calls",
    "maclaurin",
    "maclaurin_weights",
    "maxrl",
    "mc_grpo",
    "mc_grpo_keep",
    "mc_grpo_pivot",
    "mc_turns",
    "mssr_tracker",
    "n_step_returns",
    "node_rewards",
    "novelty_sharpening",
    "opo",
    "opob",
    "oprl",
    "osla_continue",
    "ospo",
    "otb",
    "otb_token",
    "passk_training",
    "pav",
    "pdppo",
    "pdppo_returns",
    "pkpo",
    "place_turn_rewards",
    "poad",
    "poad_returns",
    "polychromic",
    "portool",
    "positive_part",
    "prefix_weighted",
    "prime",
    "prompt_stats_init",
    "prompt_stats_update",
    "rank_baseline_init",
    "rank_baseline_update",
    "rank_bonus",
    "rank_growth",
    "rank_shaping",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "remax_token",
    "retrace_returns",
    "reward_to_go",
    "rloo",
    "rlsd",
    "salt",
    "sampled_entropy",
    "sampled_entropy_shaping",
    "scale_scores",
    "score_deviation",
    "score_scaler",
    "segment_advantages",
    "set_advantages",
    "set_scores",
    "shared_prefix_advantages",
    "shrinkage_baseline",
    "sibling_advantages",
    "signal_temperature",
    "similar_states",
    "smooth_advantage",
    "smooth_standardization",
    "span_advantages",
    "spo",
    "spo_tracker",
    "spo_tree",
    "step_rewards",
    "sum_components",
    "sum_pi_squared",
    "teacher_advantages",
    "temperature_logp",
    "terminal_rewards",
    "token_grpo",
    "token_totals",
    "trloo",
    "turn_borders",
    "turn_end_rewards",
    "turn_ends",
    "turn_gae",
    "turn_gae_returns",
    "turn_grpo",
    "turn_nodes",
    "turn_returns",
    "turn_starts",
    "turn_sums",
    "turns_to_tokens",
    "two_level",
    "ui_s1",
    "uncertainty_sampling_weights",
    "update_moments",
    "v05_baseline",
    "vcpo_advantage",
    "verpo",
    "vtrace",
    "vtrace_returns",
    "whiten",
    "whiten_segments",
    "whiten_uncertain",
    "window_kl_discount",
]
