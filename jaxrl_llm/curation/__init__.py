"""What trains: which groups, rollouts and tokens, and how many rollouts a prompt gets.

Before there is a batch, beliefs and scores say which prompts are rolled out, and budgets how often.
A curation of a recipe goes from rewards to ``where`` before the advantages, so that what it drops
leaves the baselines as well; a selection goes from advantages to ``keep`` after them.

=====================  =============================================================================
belief_update          belief: the success rate of every prompt, as a Beta that forgets
thompson_rates         belief: a rate drawn for each prompt
learnability, ...      scores: p (1 - p), VADE's gain, InSight's information, a target rate
attention_rates        rates of prompts that were not rolled out, from those near them
select_top             prompts: the greatest scores
draw_prompts           prompts: by weight, without replacement
prompt_gdro            advantage: weighed by an adversary over bins of difficulty
choose_arms            budget: rollouts of each bin, within a total
replay_add, ...        a buffer of past rollouts; replay_sample draws from it
informative_groups     curation: groups whose rewards differ (dynamic sampling)
prs_where, icpo_merge  curation: by coverage; steered rollouts that are good enough
truncation_mask        selection: no response that was cut off (overlong filtering)
d3s_selection          selection: the most varied rollouts, their most telling tokens
capo_selection         selection: no token whose step would be too large
mpt_mask               advantage: 0 for tokens that a policy of low entropy has mastered
needs_hint, ...        hints: which prompts get one, how much of it, which rollouts change
select_extremes, ...   curation: parts of a large group; resample_on_correct, mixed_subset
judge_items, ...       rollouts used again: by a judge, a swarm, a pool of successes
branch_candidates      trees: where rollouts fork; lookahead_prune, depth_prune give up branches
dars_extra_rollouts    budget: more rollouts for hard prompts
rollout_priority       budget: the prompt whose mean reward would become better known
greedy_allocate        budget: one by one, to the greatest gain
=====================  =============================================================================
"""

from jaxrl_llm.curation.beliefs import (
    PromptBelief,
    belief_init,
    belief_mean,
    belief_update,
    beta_bernoulli_information,
    thompson_rates,
    variance_reduction,
)
from jaxrl_llm.curation.budgets import (
    cumulative_advantage,
    dars_extra_rollouts,
    greedy_allocate,
    grpo_signal_utility,
    rollout_priority,
)
from jaxrl_llm.curation.collectors import (
    Collection,
    Collector,
    Decision,
    Outcome,
    Request,
    Row,
    in_order,
    refill,
)
from jaxrl_llm.curation.curvature import (
    CapoMoments,
    CapoScores,
    capo_mask,
    capo_scores,
    capo_selection,
    sum_pi_cubed,
)
from jaxrl_llm.curation.downsampling import (
    Pairs,
    constrained_pairs,
    filtration_weights,
    first_rollouts,
    r_squared,
    resample_on_correct,
    resample_rollouts,
    select_extremes,
    trace_penalty,
)
from jaxrl_llm.curation.forks import (
    Candidates,
    branch_candidates,
    branch_capacity,
    depth_prune,
    edit_distance,
    lookahead_prune,
    split_points,
    top_entropy_forks,
    tree_rollouts,
    width_prune,
)
from jaxrl_llm.curation.groups import (
    Compacted,
    compact_groups,
    informative_groups,
    prs_keep_prob,
    prs_where,
    truncation_mask,
)
from jaxrl_llm.curation.hints import (
    Spliced,
    adhint_ratio,
    continuation_mask,
    distilled_where,
    first_bad_step,
    guidance_stage,
    hint_level,
    hint_slots,
    minimal_hint,
    needs_hint,
    prefix_cuts,
    prefix_length,
    scaffold_slots,
    splice,
)
from jaxrl_llm.curation.mixing import (
    Replacement,
    ampo_select,
    comprehension_score,
    icpo_merge,
    mix_source_mask,
)
from jaxrl_llm.curation.recycling import (
    JudgeItems,
    PooledGroups,
    SharedGroups,
    adaptive_rollouts,
    cap_items,
    judge_items,
    mixed_subset,
    pooled_groups,
    swarm_groups,
    top_entropy_steps,
)
from jaxrl_llm.curation.replay import (
    ReplayBuffer,
    ReplaySample,
    SelectiveSample,
    Window,
    fading_probs,
    recency_weights,
    replacements,
    replay_add,
    replay_fresh,
    replay_importance,
    replay_init,
    replay_priorities,
    replay_sample,
    replay_scores,
    ssb_sample,
    window_push,
)
from jaxrl_llm.curation.robust import (
    BinScores,
    PassHistory,
    PromptGdroState,
    arm_scores_update,
    bin_advantage_weights,
    bin_means,
    bin_scores_update,
    choose_arms,
    difficulty_bins,
    exponential_weights,
    pass_history_init,
    pass_history_rate,
    pass_history_update,
    prompt_gdro,
    shadow_price,
)
from jaxrl_llm.curation.schedules import (
    icpo_bonus,
    linear_schedule,
    scheduled,
    sqrt_lr,
    training_progress,
)
from jaxrl_llm.curation.selection import (
    candidate_pool,
    draw_prompts,
    gumbel_top,
    insight_scores,
    learnability,
    nearest_target,
    select_top,
    target_logits,
    vade_information_gain,
    within_band,
)
from jaxrl_llm.curation.similarity import (
    RateCalibration,
    attention_rates,
    calibrate_rates,
    linear_recalibration,
    nearest_solved,
)
from jaxrl_llm.curation.subsets import (
    d3s_selection,
    max_variance_subset,
    mpt_advantages,
    mpt_mask,
    top_fraction_token_mask,
)

__all__ = [
    "BinScores",
    "Candidates",
    "CapoMoments",
    "CapoScores",
    "Collection",
    "Collector",
    "Compacted",
    "Decision",
    "JudgeItems",
    "Outcome",
    "Pairs",
    "PassHistory",
    "PooledGroups",
    "PromptBelief",
    "PromptGdroState",
    "RateCalibration",
    "Replacement",
    "ReplayBuffer",
    "ReplaySample",
    "Request",
    "Row",
    "SelectiveSample",
    "SharedGroups",
    "Spliced",
    "Window",
    "adaptive_rollouts",
    "adhint_ratio",
    "ampo_select",
    "arm_scores_update",
    "attention_rates",
    "belief_init",
    "belief_mean",
    "belief_update",
    "beta_bernoulli_information",
    "bin_advantage_weights",
    "bin_means",
    "bin_scores_update",
    "branch_candidates",
    "branch_capacity",
    "calibrate_rates",
    "candidate_pool",
    "cap_items",
    "capo_mask",
    "capo_scores",
    "capo_selection",
    "choose_arms",
    "compact_groups",
    "comprehension_score",
    "constrained_pairs",
    "continuation_mask",
    "cumulative_advantage",
    "d3s_selection",
    "dars_extra_rollouts",
    "depth_prune",
    "difficulty_bins",
    "distilled_where",
    "draw_prompts",
    "edit_distance",
    "exponential_weights",
    "fading_probs",
    "filtration_weights",
    "first_bad_step",
    "first_rollouts",
    "greedy_allocate",
    "grpo_signal_utility",
    "guidance_stage",
    "gumbel_top",
    "hint_level",
    "hint_slots",
    "icpo_bonus",
    "icpo_merge",
    "in_order",
    "informative_groups",
    "insight_scores",
    "judge_items",
    "learnability",
    "linear_recalibration",
    "linear_schedule",
    "lookahead_prune",
    "max_variance_subset",
    "minimal_hint",
    "mix_source_mask",
    "mixed_subset",
    "mpt_advantages",
    "mpt_mask",
    "nearest_solved",
    "nearest_target",
    "needs_hint",
    "pass_history_init",
    "pass_history_rate",
    "pass_history_update",
    "pooled_groups",
    "prefix_cuts",
    "prefix_length",
    "prompt_gdro",
    "prs_keep_prob",
    "prs_where",
    "r_squared",
    "recency_weights",
    "refill",
    "replacements",
    "replay_add",
    "replay_fresh",
    "replay_importance",
    "replay_init",
    "replay_priorities",
    "replay_sample",
    "replay_scores",
    "resample_on_correct",
    "resample_rollouts",
    "rollout_priority",
    "scaffold_slots",
    "scheduled",
    "select_extremes",
    "select_top",
    "shadow_price",
    "splice",
    "split_points",
    "sqrt_lr",
    "ssb_sample",
    "sum_pi_cubed",
    "swarm_groups",
    "target_logits",
    "thompson_rates",
    "top_entropy_forks",
    "top_entropy_steps",
    "top_fraction_token_mask",
    "trace_penalty",
    "training_progress",
    "tree_rollouts",
    "truncation_mask",
    "vade_information_gain",
    "variance_reduction",
    "width_prune",
    "window_push",
    "within_band",
]
