"""Losses of preferences: pairs and lists of better and worse responses, and single responses.

=====================  =============================================================================
dpo                    the chosen response is likelier than the rejected one, against a reference
ipo, hinge             ... by a margin; exo_pair, discopop other shapes of the same difference
aot, aot_unpaired      ... of rank k: one distribution of rewards dominates the other; aot_margins
desensitized_logp      the sums of a pair, in which the excess of the longer response counts less
alignment_weights      how likely the policy is to write a response, as a weight of its pairs
bco, nca_pair          the chosen response is good and the rejected one bad, one by one
apo_zero, apo_down     ... with both likelihoods moved apart, or both down
mpo                    dpo, bco and the likelihood of the chosen response
simpo, cpo, orpo       no reference; slic, and tpo with a third response; sft the likelihood alone
kto                    single responses, good or bad; bco_unpaired, apo_zero_unpaired
sppo, inpo, mnpo       self-play: log-ratios regressed to win rates, against an earlier policy
nash_md, xpo           self-play: against a mixture, and with exploration; mixture_win_rates
seppo                  self-play: a sample of an earlier policy as the rejected response
degree_loss            how much a response lost, by degrade_mask; compact_left
lipo_lambda            lists: pairs by how much they change the discounted gain; list_softmax
pair_logistic          lists: all pairs, for policies and reward models; pair_hinge
plackett_luce          lists: the likelihood of the ranking
brain                  the posterior of good responses, distilled from weighted samples
p3o                    a clipped policy gradient on differences of rewards
bradley_terry          reward models: pairs, with margins and centering; soft_bradley_terry
process_reward         reward models: the steps of a response; step_marks, last_token_value
paired_rewards         as a surrogate of a head's values: pairs; listed_rewards, step_rewards
paired                 as a surrogate: the best rollouts of each group, and the worst
listed, single         as a surrogate: the list of each group; each response; played
trajectory_dpo         all pairs of a group at once, for a process reward model; count_pairs
outcome_cross_entropy  outcomes one by one, for a process reward model
running_center         the mean implicit reward of all pairs so far; running_reward of responses
=====================  =============================================================================

Shared arguments of the losses of pairs:
  ``chosen_logp``, ``rejected_logp``: ``[...]``, floating point, log-probability (nats) of the
    complete response under the policy being trained, summed over its tokens.
  ``chosen_ref_logp``, ``rejected_ref_logp``: ``[...]``, likewise under the reference.
  ``chosen_lengths``, ``rejected_lengths``: ``[...]``, numbers, tokens of a response, at least 1.
  ``per_token``: Divides each score by the length of its response; without it, lengths are ignored.
  ``where``: bool ``[...]``, True for valid pairs; the others are ignored and get a loss of 0.
    None keeps all.
  ``beta``: Above 0; the implicit reward of a response is ``beta (logp - ref_logp)``.
  ``label_smoothing``: Share of the labels assumed to be wrong, in [0, 0.5).
"""

from jaxrl_llm.preferences.anchored import apo_down, apo_zero, bco, mpo, nca_pair
from jaxrl_llm.preferences.degrees import (
    compact_left,
    degrade_mask,
    degree_logits,
    degree_loss,
    degree_term,
)
from jaxrl_llm.preferences.groups import (
    RunningCenter,
    count_pairs,
    listed,
    outcome_cross_entropy,
    paired,
    played,
    running_center,
    single,
    trajectory_dpo,
)
from jaxrl_llm.preferences.iterated import (
    inpo,
    mixture_win_rates,
    mnpo,
    nash_md,
    sample_reference,
    seppo,
    seppo_sign,
    sppo,
    xpo,
)
from jaxrl_llm.preferences.listwise import (
    brain,
    implicit_rewards,
    lipo_lambda,
    list_softmax,
    pair_hinge,
    pair_logistic,
    plackett_luce,
    snis_weights,
)
from jaxrl_llm.preferences.p3o import p3o
from jaxrl_llm.preferences.pairwise import discopop, dpo, exo_pair, hinge, ipo
from jaxrl_llm.preferences.reference_free import cpo, orpo, sft, simpo, slic, tpo
from jaxrl_llm.preferences.reward_models import (
    bradley_terry,
    last_token_value,
    listed_rewards,
    paired_rewards,
    process_reward,
    soft_bradley_terry,
    step_marks,
    step_rewards,
    step_values,
)
from jaxrl_llm.preferences.token_weights import alignment_weights, desensitized_logp
from jaxrl_llm.preferences.transport import aot, aot_margins, aot_unpaired
from jaxrl_llm.preferences.unpaired import (
    apo_zero_unpaired,
    bco_unpaired,
    kto,
    kto_kl,
    running_reward,
)

__all__ = [
    "RunningCenter",
    "alignment_weights",
    "aot",
    "aot_margins",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "apo_zero_unpaired",
    "bco",
    "bco_unpaired",
    "bradley_terry",
    "brain",
    "compact_left",
    "count_pairs",
    "cpo",
    "degrade_mask",
    "degree_logits",
    "degree_loss",
    "degree_term",
    "desensitized_logp",
    "discopop",
    "dpo",
    "exo_pair",
    "hinge",
    "implicit_rewards",
    "inpo",
    "ipo",
    "kto",
    "kto_kl",
    "last_token_value",
    "lipo_lambda",
    "list_softmax",
    "listed",
    "listed_rewards",
    "mixture_win_rates",
    "mnpo",
    "mpo",
    "nash_md",
    "nca_pair",
    "orpo",
    "outcome_cross_entropy",
    "p3o",
    "pair_hinge",
    "pair_logistic",
    "paired",
    "paired_rewards",
    "plackett_luce",
    "played",
    "process_reward",
    "running_center",
    "running_reward",
    "sample_reference",
    "seppo",
    "seppo_sign",
    "sft",
    "simpo",
    "single",
    "slic",
    "snis_weights",
    "soft_bradley_terry",
    "sppo",
    "step_marks",
    "step_rewards",
    "step_values",
    "tpo",
    "trajectory_dpo",
    "xpo",
]
