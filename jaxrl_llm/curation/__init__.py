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

import inspect

from jaxrl_llm.curation.agents import *
from jaxrl_llm.curation.budgets import *
from jaxrl_llm.curation.collectors.degraded import *
from jaxrl_llm.curation.collectors.demonstrations import *
from jaxrl_llm.curation.collectors.downsampled import *
from jaxrl_llm.curation.collectors.drafted import *
from jaxrl_llm.curation.collectors.experiences import *
from jaxrl_llm.curation.collectors.from_generator import *
from jaxrl_llm.curation.collectors.gdro_memory import *
from jaxrl_llm.curation.collectors.hints.hinted import *
from jaxrl_llm.curation.collectors.hints.inpainted import *
from jaxrl_llm.curation.collectors.hints.ladders import *
from jaxrl_llm.curation.collectors.hints.repair import *
from jaxrl_llm.curation.collectors.hints.scaffold import *
from jaxrl_llm.curation.collectors.hints.steered import *
from jaxrl_llm.curation.collectors.judged import *
from jaxrl_llm.curation.collectors.messages import *
from jaxrl_llm.curation.collectors.mixed import *
from jaxrl_llm.curation.collectors.needs import *
from jaxrl_llm.curation.collectors.offline import *
from jaxrl_llm.curation.collectors.partial import *
from jaxrl_llm.curation.collectors.pooled import *
from jaxrl_llm.curation.collectors.predicted import *
from jaxrl_llm.curation.collectors.prioritized import *
from jaxrl_llm.curation.collectors.protocol import *
from jaxrl_llm.curation.collectors.refill import *
from jaxrl_llm.curation.collectors.replayed import *
from jaxrl_llm.curation.collectors.seeding import *
from jaxrl_llm.curation.collectors.swarm import *
from jaxrl_llm.curation.collectors.targeted import *
from jaxrl_llm.curation.collectors.tempered import *
from jaxrl_llm.curation.collectors.texts import *
from jaxrl_llm.curation.collectors.trees.branched import *
from jaxrl_llm.curation.collectors.trees.forked import *
from jaxrl_llm.curation.collectors.trees.lookahead import *
from jaxrl_llm.curation.collectors.trees.pruned import *
from jaxrl_llm.curation.collectors.trees.turns import *
from jaxrl_llm.curation.collectors.trees.uncertain import *
from jaxrl_llm.curation.collectors.trees.valued import *
from jaxrl_llm.curation.collectors.two_phase import *
from jaxrl_llm.curation.collectors.visits import *
from jaxrl_llm.curation.curvature import *
from jaxrl_llm.curation.downsampling import *
from jaxrl_llm.curation.few_shot import *
from jaxrl_llm.curation.groups import *
from jaxrl_llm.curation.hints import *
from jaxrl_llm.curation.latent_game import *
from jaxrl_llm.curation.mixing import *
from jaxrl_llm.curation.pairs import *
from jaxrl_llm.curation.plans import *
from jaxrl_llm.curation.priorities import *
from jaxrl_llm.curation.prompts.adapters import *
from jaxrl_llm.curation.prompts.arms import *
from jaxrl_llm.curation.prompts.beliefs import *
from jaxrl_llm.curation.prompts.bins import *
from jaxrl_llm.curation.prompts.density import *
from jaxrl_llm.curation.prompts.embeddings import *
from jaxrl_llm.curation.prompts.robust import *
from jaxrl_llm.curation.prompts.selection import *
from jaxrl_llm.curation.prompts.similarity import *
from jaxrl_llm.curation.recycling import *
from jaxrl_llm.curation.replay import *
from jaxrl_llm.curation.schedules import *
from jaxrl_llm.curation.strategies import *
from jaxrl_llm.curation.subsets import *
from jaxrl_llm.curation.teachers import *
from jaxrl_llm.curation.trees.edges import *
from jaxrl_llm.curation.trees.forks import *
from jaxrl_llm.curation.trees.prefixes import *
from jaxrl_llm.curation.trees.pruning import *
from jaxrl_llm.curation.turns import *
from jaxrl_llm.curation.windows import *

__all__ = sorted(
    name for name, value in globals().items() if name[0] != "_" and not inspect.ismodule(value)
)
