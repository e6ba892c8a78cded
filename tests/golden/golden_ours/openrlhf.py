"""Our functions against the numbers of OpenRLHF's own code."""

import numpy as np
from golden_data import Difference, Ours

from golden_ours import advantage, far_from_reference, gae, kl, loss, twenty
from golden_ours.preferences import of_pairs
from jaxrl_llm import advantages, aggregate, corrections, preferences, surrogates
from jaxrl_llm.core import bind

token_mean, sequence_mean = aggregate.token_mean, aggregate.sequence_mean
clip = {"eps_low": 0.2, "eps_high": 0.2}
narrow = {"eps_low": 0.03, "eps_high": 0.04}


def policy(surrogate=surrogates.ppo_clip, weights=token_mean, **options):
    """The loss and its gradient, without the losses of tokens."""
    return loss(surrogate, weights, token_loss=False, **options)


def corrected(function, **options):
    def run(a):
        weight = function(a["old_logp"], a["behavior_logp"], a["mask"], **options)
        return policy(weighted=True, **clip)(a | {"weight": weight})

    return run


def value_loss(a):
    def each(values, old_values, returns, mask):
        return surrogates.value_loss(values, old_values, returns, mask, eps=0.2)

    return policy(each, by="token_advantages")(a)


def shaped(a):
    logps = {"old_logp": a["old_logp"], "ref_logp": a["ref_logp"]}
    return advantages.kl_shaped_rewards(a["rewards"], a["mask"], kl_coef=0.1, **logps)


def reinforce(a):
    logps = {"old_logp": a["old_logp"], "ref_logp": a["ref_logp"]}
    return {"advantages": advantages.reinforce_pp(a["rewards"], a["mask"], kl_coef=0.1, **logps)}


def whitened(inputs, theirs):
    """By the variance over n - 1 tokens, as verl's, where OpenRLHF's is over n."""
    count = inputs["mask"].sum()
    return {"advantages": theirs["advantages"] * np.sqrt((count - 1) / count)}


WHITENED = Difference("OpenRLHF's variance is over n, ours over n - 1", whitened)
ALL = {case: WHITENED for case in ("full", "binary", "length_one")}
HOLES = {"holes": WHITENED}


def bounded(**values):
    """Where the difference is 30: OpenRLHF bounds the estimate by 10, we the difference by 20."""
    reason = "OpenRLHF bounds every estimate by 10, ours the difference by 20"
    return far_from_reference(reason, **values)


TABLE = {
    "ppo": Ours(policy(**clip)),
    "ppo_sequence_mean": Ours(policy(weights=sequence_mean, **clip)),
    "dapo": Ours(policy(surrogates.dapo_clip, dual_clip=None)),
    "dual": Ours(policy(dual_clip=1.5, **clip)),
    "gspo": Ours(policy(surrogates.gspo, sequence_mean, **narrow)),
    "tis": Ours(corrected(corrections.importance_weights, cap=1.25, floor=0.8)),
    "icepop": Ours(corrected(corrections.masked_importance_weights, lower=0.8, upper=1.25)),
    "value_loss": Ours(value_loss),
    "kl_k1": Ours(kl("k1"), bounded(kl=twenty, gradient=0.0)),
    "kl_k1_unbiased": Ours(kl("k1+"), bounded(kl=twenty, gradient=0.0)),
    "kl_k2": Ours(kl("k2"), bounded(kl=200.0)),
    "kl_k2_unbiased": Ours(kl("k2"), bounded(kl=200.0, gradient=0.0)),
    "kl_k3": Ours(kl("k3", cap=10.0)),
    "kl_k3_unbiased": Ours(kl("k3+", cap=10.0), bounded(gradient=0.0)),
    "rloo": Ours(advantage(advantages.rloo)),
    "group_norm": Ours(advantage(advantages.grpo, eps=1e-9)),
    "dr_grpo": Ours(advantage(advantages.dr_grpo)),
    "flash_reinforce": Ours(advantage(advantages.center)),
    "reinforce_baseline": Ours(advantage(advantages.reinforce_pp_baseline, "mask"), ALL | HOLES),
    "reinforce": Ours(reinforce, ALL | HOLES),
    "gae": Ours(lambda a: gae(a, shaped(a)), ALL),
    "dpo": of_pairs(bind(preferences.dpo, beta=0.3)),
    "dpo_smoothed": of_pairs(bind(preferences.dpo, beta=0.3, label_smoothing=0.1)),
    "ipo": of_pairs(bind(preferences.ipo, beta=0.3)),
}
TABLES = {"openrlhf_trainer": TABLE}
