"""What trains: which groups, rollouts and tokens, and how many rollouts a prompt gets.

A curation of a recipe goes from rewards to ``where`` before the advantages, so that what it drops
leaves the baselines as well; a selection goes from advantages to ``keep`` after them. Budgets are
counts, for the loop that samples.

=====================  =============================================================================
informative_groups     curation: groups whose rewards differ (dynamic sampling)
prs_where, icpo_merge  curation: by coverage; steered rollouts that are good enough
truncation_mask        selection: no response that was cut off (overlong filtering)
d3s_selection          selection: the most varied rollouts, their most telling tokens
capo_selection         selection: no token whose step would be too large
mpt_mask               advantage: 0 for tokens that a policy of low entropy has mastered
dars_extra_rollouts    budget: more rollouts for hard prompts
rollout_priority       budget: the prompt whose mean reward would become better known
greedy_allocate        budget: one by one, to the greatest gain
=====================  =============================================================================
"""

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
from jaxrl_llm.curation.schedules import (
    icpo_bonus,
    linear_schedule,
    scheduled,
    sqrt_lr,
    training_progress,
)
from jaxrl_llm.curation.subsets import (
    d3s_selection,
    max_variance_subset,
    mpt_advantages,
    mpt_mask,
    top_fraction_token_mask,
)

__all__ = [
    "CapoMoments",
    "CapoScores",
    "Collection",
    "Collector",
    "Compacted",
    "Decision",
    "JudgeItems",
    "Outcome",
    "Pairs",
    "PooledGroups",
    "Replacement",
    "Request",
    "Row",
    "SharedGroups",
    "Spliced",
    "adaptive_rollouts",
    "adhint_ratio",
    "ampo_select",
    "cap_items",
    "capo_mask",
    "capo_scores",
    "capo_selection",
    "compact_groups",
    "comprehension_score",
    "constrained_pairs",
    "continuation_mask",
    "cumulative_advantage",
    "d3s_selection",
    "dars_extra_rollouts",
    "distilled_where",
    "filtration_weights",
    "first_bad_step",
    "first_rollouts",
    "greedy_allocate",
    "grpo_signal_utility",
    "guidance_stage",
    "hint_level",
    "hint_slots",
    "icpo_bonus",
    "icpo_merge",
    "in_order",
    "informative_groups",
    "judge_items",
    "linear_schedule",
    "max_variance_subset",
    "minimal_hint",
    "mix_source_mask",
    "mixed_subset",
    "mpt_advantages",
    "mpt_mask",
    "needs_hint",
    "pooled_groups",
    "prefix_cuts",
    "prefix_length",
    "prs_keep_prob",
    "prs_where",
    "r_squared",
    "refill",
    "resample_on_correct",
    "resample_rollouts",
    "rollout_priority",
    "scaffold_slots",
    "scheduled",
    "select_extremes",
    "splice",
    "sqrt_lr",
    "sum_pi_cubed",
    "swarm_groups",
    "top_entropy_steps",
    "top_fraction_token_mask",
    "trace_penalty",
    "training_progress",
    "truncation_mask",
]
