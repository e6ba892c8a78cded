"""Selection of prompts, groups, rollouts and tokens, and budgets of rollouts.

Before a batch is sampled, beliefs and scores select the prompts, and budgets set their numbers of
rollouts. A curation of a recipe maps rewards to ``where`` before the advantages, so dropped
rollouts do not count in the baselines; a selection maps advantages to ``keep`` after them.

=====================  =============================================================================
belief_update          belief: the success rate of every prompt, as a Beta with forgetting
thompson_rates         belief: a rate drawn for each prompt
learnability, ...      scores: p (1 - p), VADE's gain, InSight's information, a target rate
attention_rates        rates of prompts that were not rolled out, from similar prompts
rate_adapter_fit       an adapter for such rates, fitted to rates of other prompts
select_top             prompts: the largest scores
draw_prompts           prompts: by weight, without replacement
prompt_gdro            advantage: weighted by an adversary over bins of difficulty
choose_arms            budget: rollouts of each bin, within a total
replay_add, ...        a buffer of past rollouts; replay_sample draws from it
informative_groups     curation: groups whose rewards differ (dynamic sampling)
prs_where, icpo_merge  curation: by coverage; steered rollouts that are good enough
truncation_mask        selection: no response that was cut off (overlong filtering)
d3s_selection          selection: rollouts of varied advantages, their most informative tokens
capo_selection         selection: no token whose step would be too large
mpt_mask               advantage: 0 for mastered tokens of responses of low entropy
hinted, ...            collectors: help where a group fails, by a policy (ladder, scaffold, ...)
from_generator         collectors: one of your own, as a generator that asks, waits and returns rows
demonstrations         collectors: responses of the data and of the policy; mixed by share
offline_pairs, ...     collectors: pairs, triples, lists and labels of the data; nothing is sampled
degraded_pairs         collectors: pairs of the data and increasingly degraded copies
few_shot_pairs         collectors: pairs of the data after other pairs of the same user
needs_hint, ...        hints: which prompts get one, how much of it, which rollouts change
select_pairs           pairs of a group for preference losses; mean_win_rate, win_rate_matrix
right_over_wrong       pairs of a right and a wrong response, by a verifier
sample_few_shot        rows of the same user as examples; structured_score, stage_mask of plans
select_extremes, ...   curation: parts of a large group; resample_on_correct, mixed_subset
survival_rates, ...    pruning: which partial rollouts continue; predictive_gate, length_cutoff
solution_messages      messages for a teacher that sees a right response, or feedback
ReferenceMessages      messages for a teacher that sees the solution of the data
answer_texts           reference answers, and the texts before them
pooled                 collectors: fewer rollouts of easy prompts, stored successes for failed ones
targeted               collectors: prompts near a target rate, predicted from a few references
experienced            collectors: a library of experiences in the prompt, which the policy edits
judge_items, ...       rollouts used again: by a judge, a swarm, a pool of successes
valued                 collectors: values of prefixes, by rollouts from them; line_starts
branch_candidates      trees: where rollouts fork; lookahead_prune, depth_prune drop branches
entropy_branches       trees: which agents branch after a tool's answer
role_loss_mask         turns: whose tokens train; downsample_turns, patch_decision
dars_extra_rollouts    budget: more rollouts for hard prompts
rollout_priority       budget: the prompt whose mean reward is most uncertain
greedy_allocate        budget: one by one, to the largest gain; best_allocate: exactly
=====================  =============================================================================
"""

from jaxrl_llm.curation.agents import Calls, align_calls, entropy_branches, top_k_entropy
from jaxrl_llm.curation.budgets import (
    best_allocate,
    cumulative_advantage,
    dars_extra_rollouts,
    dars_keep,
    greedy_allocate,
    grpo_signal_utility,
    rollout_priority,
    round_to_budget,
    sqrt_allocation,
    v0_extra_rollouts,
    xrpo_extra_rollouts,
)
from jaxrl_llm.curation.collectors.degraded import degraded_pairs
from jaxrl_llm.curation.collectors.demonstrations import demonstrations
from jaxrl_llm.curation.collectors.downsampled import DownsampledState, downsampled
from jaxrl_llm.curation.collectors.drafted import drafted
from jaxrl_llm.curation.collectors.experiences import (
    Experiences,
    experience_message,
    experience_texts,
    experienced,
    parse_operations,
    review_message,
)
from jaxrl_llm.curation.collectors.from_generator import GroupHandle, OpenBatch, from_generator
from jaxrl_llm.curation.collectors.gdro_memory import RolloutGdroState, rollout_gdro_memory
from jaxrl_llm.curation.collectors.hints.hinted import hinted, share_messages, tier_messages
from jaxrl_llm.curation.collectors.hints.inpainted import inpainted
from jaxrl_llm.curation.collectors.hints.ladders import ladder, parse_hints, rethink, self_hints
from jaxrl_llm.curation.collectors.hints.repair import repair
from jaxrl_llm.curation.collectors.hints.scaffold import scaffold
from jaxrl_llm.curation.collectors.hints.steered import examples_in_prompt, hint_share
from jaxrl_llm.curation.collectors.judged import judge_message, judged, refine_message
from jaxrl_llm.curation.collectors.messages import budgeted, paraphrased, told_budgets
from jaxrl_llm.curation.collectors.mixed import mixed
from jaxrl_llm.curation.collectors.needs import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.offline import (
    few_shot_pairs,
    offline_labels,
    offline_lists,
    offline_pairs,
    offline_steps,
    offline_triples,
    only_demonstrations,
)
from jaxrl_llm.curation.collectors.partial import PartialState, partial_rollouts, windowed
from jaxrl_llm.curation.collectors.pooled import PooledState, pooled
from jaxrl_llm.curation.collectors.predicted import predict_message, predicted
from jaxrl_llm.curation.collectors.prioritized import prioritized
from jaxrl_llm.curation.collectors.protocol import (
    DEMONSTRATION,
    HINTED,
    JUDGE,
    OWN,
    REPLAYED,
    TEXT,
    Collection,
    Collector,
    Decision,
    Outcome,
    Request,
    Response,
    Row,
    in_order,
)
from jaxrl_llm.curation.collectors.refill import refill
from jaxrl_llm.curation.collectors.replayed import (
    ReplayedState,
    StoredGroups,
    replayed,
    stored_request,
)
from jaxrl_llm.curation.collectors.seeding import SolvedExamples, seeded_message, solved_examples
from jaxrl_llm.curation.collectors.swarm import Swarm, SwarmGroup, shared, shared_folder
from jaxrl_llm.curation.collectors.targeted import TargetedState, targeted
from jaxrl_llm.curation.collectors.tempered import TemperedState, entropy_temperature
from jaxrl_llm.curation.collectors.texts import plain_texts
from jaxrl_llm.curation.collectors.trees.branched import branched
from jaxrl_llm.curation.collectors.trees.forked import forked
from jaxrl_llm.curation.collectors.trees.lookahead import lookahead
from jaxrl_llm.curation.collectors.trees.pruned import (
    QualityState,
    SurvivalRule,
    pruned,
    quality_survivors,
)
from jaxrl_llm.curation.collectors.trees.turns import turn_branched
from jaxrl_llm.curation.collectors.trees.uncertain import entropy_branched
from jaxrl_llm.curation.collectors.trees.valued import (
    valued,
)
from jaxrl_llm.curation.collectors.two_phase import (
    Memory,
    TwoPhaseState,
    remembered_rates,
    two_phase,
)
from jaxrl_llm.curation.collectors.visits import hint_levels, in_epochs, prefixed, staged
from jaxrl_llm.curation.curvature import (
    CapoMoments,
    CapoScores,
    CapoSums,
    capo_adam,
    capo_bounds,
    capo_mask,
    capo_scores,
    capo_selection,
    sum_pi_cubed,
)
from jaxrl_llm.curation.downsampling import (
    Pairs,
    best_constrained,
    constrained_pairs,
    contrasts,
    filtration_weights,
    first_rollouts,
    r_squared,
    resample_groups,
    resample_on_correct,
    resample_rollouts,
    select_extremes,
    trace_penalty,
)
from jaxrl_llm.curation.few_shot import FewShot, sample_few_shot
from jaxrl_llm.curation.groups import (
    Compacted,
    compact_groups,
    ended_tokens,
    informative_groups,
    prs_keep_prob,
    prs_where,
    spread_groups,
    truncation_mask,
    window_tokens,
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
from jaxrl_llm.curation.latent_game import LatentGame, differing_values, latent_policy
from jaxrl_llm.curation.mixing import (
    Replacement,
    ampo_select,
    best_teachers,
    comprehension_score,
    icpo_merge,
    mix_source_mask,
)
from jaxrl_llm.curation.pairs import (
    SelectedPairs,
    mean_win_rate,
    missing_eos_penalty,
    right_over_wrong,
    select_pairs,
    win_rate_matrix,
)
from jaxrl_llm.curation.plans import stage_mask, structured_score
from jaxrl_llm.curation.priorities import (
    SelectiveSample,
    advantage_sizes,
    fading_probs,
    recency_weights,
    replay_importance,
    replay_priorities,
    replay_scores,
    ssb_sample,
)
from jaxrl_llm.curation.prompts.adapters import (
    RateAdapter,
    RateProjection,
    adapted_rates,
    rate_adapter_fit,
    rate_adapter_init,
)
from jaxrl_llm.curation.prompts.arms import (
    arm_scores_update,
    choose_arms,
    gdro_extra_rollouts,
    shadow_price,
)
from jaxrl_llm.curation.prompts.beliefs import (
    PromptBelief,
    belief_init,
    belief_mean,
    belief_update,
    beta_bernoulli_information,
    thompson_rates,
    variance_reduction,
)
from jaxrl_llm.curation.prompts.bins import (
    BinScores,
    PassHistory,
    bin_means,
    bin_scores_update,
    difficulty_bins,
    exponential_weights,
    pass_history_init,
    pass_history_rate,
    pass_history_update,
)
from jaxrl_llm.curation.prompts.density import density_ratios
from jaxrl_llm.curation.prompts.embeddings import (
    hashed_magnitudes,
    hashed_responses,
    hashed_words,
)
from jaxrl_llm.curation.prompts.robust import (
    PromptGdroState,
    bin_advantage_weights,
    clipped_losses,
    prompt_gdro,
)
from jaxrl_llm.curation.prompts.selection import (
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
from jaxrl_llm.curation.prompts.similarity import (
    RateCalibration,
    attention_rates,
    calibrate_rates,
    linear_recalibration,
    nearest_solved,
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
    replacements,
    replay_add,
    replay_fresh,
    replay_init,
    replay_sample,
)
from jaxrl_llm.curation.schedules import (
    icpo_bonus,
    linear_schedule,
    no_update,
    scheduled,
    sqrt_lr,
    training_progress,
    warmup_cosine,
)
from jaxrl_llm.curation.strategies import (
    Operation,
    StrategyPair,
    apply_operations,
    k_means,
    nearest_centroid,
    regret_matching,
    regret_update,
    strategy_pair,
)
from jaxrl_llm.curation.subsets import (
    d3s_selection,
    max_variance_subset,
    mpt_advantages,
    mpt_mask,
    top_fraction_token_mask,
)
from jaxrl_llm.curation.teachers import ReferenceMessages, answer_texts, solution_messages
from jaxrl_llm.curation.trees.edges import branch_tokens, segment_tokens
from jaxrl_llm.curation.trees.forks import (
    Candidates,
    branch_candidates,
    branch_capacity,
    depth_prune,
    edit_distance,
    lookahead_prune,
    rouge_l,
    segment_forks,
    split_points,
    suffix_match,
    top_entropy_forks,
    tree_rollouts,
    width_prune,
)
from jaxrl_llm.curation.trees.prefixes import (
    line_starts,
    spo_cutpoints,
    stretch_starts,
    uncertain_tokens,
)
from jaxrl_llm.curation.trees.pruning import (
    ScoreBins,
    length_cutoff,
    predictive_gate,
    quality_loss,
    score_bins_init,
    score_bins_update,
    score_rates,
    survival_rates,
    systematic_survivors,
)
from jaxrl_llm.curation.turns import (
    ROLES,
    PatchDecision,
    downsample_mask,
    downsample_turns,
    patch_decision,
    role_loss_mask,
)
from jaxrl_llm.curation.windows import Window, window_push

__all__ = [
    "BinScores",
    "Calls",
    "Candidates",
    "CapoMoments",
    "CapoScores",
    "CapoSums",
    "Collection",
    "Collector",
    "Compacted",
    "DEMONSTRATION",
    "Decision",
    "DownsampledState",
    "Experiences",
    "FewShot",
    "GroupHandle",
    "HINTED",
    "JUDGE",
    "JudgeItems",
    "LatentGame",
    "Memory",
    "Needs",
    "OWN",
    "OpenBatch",
    "Operation",
    "Outcome",
    "Pairs",
    "PartialState",
    "PassHistory",
    "PatchDecision",
    "PooledGroups",
    "PooledState",
    "PromptBelief",
    "PromptGdroState",
    "QualityState",
    "REPLAYED",
    "ROLES",
    "RateAdapter",
    "RateCalibration",
    "RateProjection",
    "ReferenceMessages",
    "Replacement",
    "ReplayBuffer",
    "ReplaySample",
    "ReplayedState",
    "Request",
    "Response",
    "RolloutGdroState",
    "Row",
    "ScoreBins",
    "SelectedPairs",
    "SelectiveSample",
    "SharedGroups",
    "SolvedExamples",
    "Spliced",
    "StoredGroups",
    "StrategyPair",
    "SurvivalRule",
    "Swarm",
    "SwarmGroup",
    "TEXT",
    "TargetedState",
    "TemperedState",
    "TwoPhaseState",
    "Window",
    "adapted_rates",
    "adaptive_rollouts",
    "adhint_ratio",
    "advantage_sizes",
    "align_calls",
    "ampo_select",
    "answer_texts",
    "apply_operations",
    "arm_scores_update",
    "attention_rates",
    "belief_init",
    "belief_mean",
    "belief_update",
    "best_allocate",
    "best_constrained",
    "best_teachers",
    "beta_bernoulli_information",
    "bin_advantage_weights",
    "bin_means",
    "bin_scores_update",
    "branch_candidates",
    "branch_capacity",
    "branch_tokens",
    "branched",
    "budgeted",
    "calibrate_rates",
    "candidate_pool",
    "cap_items",
    "capo_adam",
    "capo_bounds",
    "capo_mask",
    "capo_scores",
    "capo_selection",
    "choose_arms",
    "clipped_losses",
    "compact_groups",
    "comprehension_score",
    "constrained_pairs",
    "continuation_mask",
    "contrasts",
    "cumulative_advantage",
    "d3s_selection",
    "dars_extra_rollouts",
    "dars_keep",
    "degraded_pairs",
    "demonstrations",
    "density_ratios",
    "depth_prune",
    "differing_values",
    "difficulty_bins",
    "distilled_where",
    "downsample_mask",
    "downsample_turns",
    "downsampled",
    "drafted",
    "draw_prompts",
    "edit_distance",
    "ended_tokens",
    "entropy_branched",
    "entropy_branches",
    "entropy_temperature",
    "examples_in_prompt",
    "experience_message",
    "experience_texts",
    "experienced",
    "exponential_weights",
    "fading_probs",
    "few_shot_pairs",
    "filtration_weights",
    "first_bad_step",
    "first_rollouts",
    "forked",
    "from_generator",
    "gdro_extra_rollouts",
    "greedy_allocate",
    "grpo_signal_utility",
    "guidance_stage",
    "gumbel_top",
    "hashed_magnitudes",
    "hashed_responses",
    "hashed_words",
    "hint_level",
    "hint_levels",
    "hint_share",
    "hint_slots",
    "hinted",
    "icpo_bonus",
    "icpo_merge",
    "in_epochs",
    "in_order",
    "informative_groups",
    "inpainted",
    "insight_scores",
    "judge_items",
    "judge_message",
    "judged",
    "k_means",
    "ladder",
    "latent_policy",
    "learnability",
    "length_cutoff",
    "line_starts",
    "linear_recalibration",
    "linear_schedule",
    "lookahead",
    "lookahead_prune",
    "max_variance_subset",
    "mean_win_rate",
    "minimal_hint",
    "missing_eos_penalty",
    "mix_source_mask",
    "mixed",
    "mixed_subset",
    "mpt_advantages",
    "mpt_mask",
    "nearest_centroid",
    "nearest_solved",
    "nearest_target",
    "needs_hint",
    "needs_of_sources",
    "no_update",
    "offline_labels",
    "offline_lists",
    "offline_pairs",
    "offline_steps",
    "offline_triples",
    "only_demonstrations",
    "paraphrased",
    "parse_hints",
    "parse_operations",
    "partial_rollouts",
    "pass_history_init",
    "pass_history_rate",
    "pass_history_update",
    "patch_decision",
    "plain_texts",
    "pooled",
    "pooled_groups",
    "predict_message",
    "predicted",
    "predictive_gate",
    "prefix_cuts",
    "prefix_length",
    "prefixed",
    "prioritized",
    "prompt_gdro",
    "prs_keep_prob",
    "prs_where",
    "pruned",
    "quality_loss",
    "quality_survivors",
    "r_squared",
    "rate_adapter_fit",
    "rate_adapter_init",
    "recency_weights",
    "refill",
    "refine_message",
    "regret_matching",
    "regret_update",
    "remembered_rates",
    "repair",
    "replacements",
    "replay_add",
    "replay_fresh",
    "replay_importance",
    "replay_init",
    "replay_priorities",
    "replay_sample",
    "replay_scores",
    "replayed",
    "resample_groups",
    "resample_on_correct",
    "resample_rollouts",
    "rethink",
    "review_message",
    "right_over_wrong",
    "role_loss_mask",
    "rollout_gdro_memory",
    "rollout_priority",
    "rouge_l",
    "round_to_budget",
    "sample_few_shot",
    "scaffold",
    "scaffold_slots",
    "scheduled",
    "score_bins_init",
    "score_bins_update",
    "score_rates",
    "seeded_message",
    "segment_forks",
    "segment_tokens",
    "select_extremes",
    "select_pairs",
    "select_top",
    "self_hints",
    "shadow_price",
    "share_messages",
    "shared",
    "shared_folder",
    "solution_messages",
    "solved_examples",
    "splice",
    "split_points",
    "spo_cutpoints",
    "spread_groups",
    "sqrt_allocation",
    "sqrt_lr",
    "ssb_sample",
    "stage_mask",
    "staged",
    "stored_request",
    "strategy_pair",
    "stretch_starts",
    "structured_score",
    "suffix_match",
    "sum_pi_cubed",
    "survival_rates",
    "swarm_groups",
    "systematic_survivors",
    "target_logits",
    "targeted",
    "thompson_rates",
    "tier_messages",
    "told_budgets",
    "top_entropy_forks",
    "top_entropy_steps",
    "top_fraction_token_mask",
    "top_k_entropy",
    "trace_penalty",
    "training_progress",
    "tree_rollouts",
    "truncation_mask",
    "turn_branched",
    "two_phase",
    "uncertain_tokens",
    "v0_extra_rollouts",
    "vade_information_gain",
    "valued",
    "variance_reduction",
    "warmup_cosine",
    "width_prune",
    "win_rate_matrix",
    "window_push",
    "window_tokens",
    "windowed",
    "within_band",
    "xrpo_extra_rollouts",
]
