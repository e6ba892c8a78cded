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

import inspect

from jaxrl_llm.advantages.agents import *
from jaxrl_llm.advantages.baselines import *
from jaxrl_llm.advantages.batch import *
from jaxrl_llm.advantages.distillation import *
from jaxrl_llm.advantages.entropy import *
from jaxrl_llm.advantages.group import *
from jaxrl_llm.advantages.hidden_rank import *
from jaxrl_llm.advantages.hierarchy import *
from jaxrl_llm.advantages.hinted import *
from jaxrl_llm.advantages.implicit import *
from jaxrl_llm.advantages.modulators import *
from jaxrl_llm.advantages.off_policy_returns import *
from jaxrl_llm.advantages.ospo import *
from jaxrl_llm.advantages.otb import *
from jaxrl_llm.advantages.passk import *
from jaxrl_llm.advantages.prompt_stats import *
from jaxrl_llm.advantages.returns import *
from jaxrl_llm.advantages.reward_components import *
from jaxrl_llm.advantages.segments import *
from jaxrl_llm.advantages.sets import *
from jaxrl_llm.advantages.shrinkage import *
from jaxrl_llm.advantages.single_rollout import *
from jaxrl_llm.advantages.states import *
from jaxrl_llm.advantages.tool_trees import *
from jaxrl_llm.advantages.tracker import *
from jaxrl_llm.advantages.trees import *
from jaxrl_llm.advantages.turn_critics import *
from jaxrl_llm.advantages.turn_rewards import *
from jaxrl_llm.advantages.turns import *
from jaxrl_llm.advantages.visits import *

__all__ = sorted(
    name for name, value in globals().items() if name[0] != "_" and not inspect.ismodule(value)
)
