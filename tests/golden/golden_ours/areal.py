"""Our functions against the numbers of AReaL's own code."""

import jax.numpy as jnp
import numpy as np
from golden_data import Difference, Ours

from golden_ours import far_from_old, far_from_reference, graded, kl, loss, twenty
from jaxrl_llm import advantages, aggregate, corrections, rewards, surrogates
from jaxrl_llm.core import bind

token_mean = aggregate.token_mean
clip = {"eps_low": 0.2, "eps_high": 0.2}
ppo = bind(surrogates.ppo_clip, **clip)


def plain(surrogate, weights=token_mean, by="token_advantages", **options):
    return loss(surrogate, weights, by=by, token_loss=False, **options)


def decoupled(**options):
    def run(a):
        surrogate = bind(surrogates.decoupled_ppo, **clip, **options)
        given = {"behavior_logp": a["behavior_logp"]}
        return plain(surrogate, **given)(a)

    return run


def corrected(weights, rule):
    """The clipped loss with a correction's weights, without the tokens that its rule rejects."""

    def run(a):
        behavior = (a["old_logp"], a["behavior_logp"], a["mask"])
        weight, keep = corrections.rollout_correction(
            *behavior, weights=weights, reject=(rule,), keep_denominator=True
        )

        def surrogate(logp, old_logp, advantages, mask):
            each = ppo(logp, old_logp, advantages, mask, weight=weight)
            return jnp.where(keep, each, 0.0)

        return plain(surrogate)(a)

    return run


def rule(statistic, level, upper, **options):
    options |= {"statistic": statistic, "level": level, "upper": upper}
    return bind(corrections.rejection_mask, **options)


def value_loss(a):
    def total(values):
        each = surrogates.value_loss(values, a["old_logp"], a["token_advantages"], a["mask"])
        return aggregate.weighted_sum(each, token_mean(a["mask"]))

    return graded(total, a["logp"])


def of_group(function, **options):
    return lambda a: {"advantages": function(a["rewards"], **options)}


def prox(a):
    logps = (a["logp"], a["behavior_logp"], a["versions"], a["mask"])
    return {"prox": corrections.loglinear_prox(*logps, current_version=5)}


def m2(a):
    return {
        "keep": corrections.m2_mask(a["old_logp"], a["behavior_logp"], a["mask"], threshold=0.01)
    }


def capacity(a):
    room = corrections.staleness_capacity(
        a["version"],
        a["accepted"],
        a["running"],
        batch_size=4,
        max_staleness=3,
        max_concurrent=16,
    )
    return {"capacity": room}


def overlong(a):
    lengths = a["mask"].sum(-1)
    return {"penalty": rewards.overlong_penalty(lengths, max_length=6, buffer=3, factor=0.5)}


FAR = far_from_old("AReaL")


def of_raw(inputs, theirs):
    """The deviation of the raw rewards of the batch in place of that of the centered ones."""
    rewards = np.float64(inputs["rewards"])
    centered = rewards - rewards.mean(-1, keepdims=True)
    factor = np.sqrt((centered**2).sum() / (rewards.size - 1)) / rewards.std(ddof=1)
    return {"advantages": theirs["advantages"] * factor}


OF_CENTERED = {
    case: Difference(
        "AReaL's batch deviation is of centered rewards, TRL's and ours of raw", of_raw
    )
    for case in ("full", "binary", "masked_row", "holes", "length_one", "bfloat16")
}


def far(**values):
    reason = "AReaL clamps the estimates to +-10, we the difference to +-20"
    return far_from_reference(reason, **values)


def exchanged(statistic, level, upper):
    """AReaL's k3 is that of behavior against old; verl's, and so ours, of old against behavior."""
    test = rule(statistic, level, upper)
    return lambda old_logp, behavior_logp, mask: test(behavior_logp, old_logp, mask)


untouched = bind(corrections.importance_weights, cap=None)
TABLE = {
    "ppo": Ours(plain(ppo), FAR),
    "ppo_dual": Ours(plain(surrogates.ppo_clip, dual_clip=1.5, **clip)),
    "dapo": Ours(plain(surrogates.dapo_clip)),
    "gspo": Ours(plain(surrogates.gspo, by="advantages", eps_low=0.03, eps_high=0.04)),
    "decoupled": Ours(decoupled(), FAR),
    "decoupled_clamp": Ours(decoupled(cap=1.1, beyond_cap="clamp"), FAR),
    "decoupled_mask": Ours(decoupled(cap=1.1, beyond_cap="mask"), FAR),
    "sequence_ratio": Ours(
        corrected(
            bind(corrections.importance_weights, level="geometric", cap=None),
            rule("k1", "sequence_mean", 1.1, lower=0.9),
        ),
        FAR,
    ),
    "sequence_k3": Ours(corrected(untouched, exchanged("k3", "sequence_mean", 0.02)), FAR),
    "token_k2": Ours(corrected(untouched, rule("k2", "token", 0.02)), FAR),
    "sapo": Ours(plain(surrogates.sapo, tau_pos=0.5, tau_neg=4.0)),
    "value_loss": Ours(value_loss),
    "kl_k1": Ours(kl("k1"), far(kl=twenty)),
    "kl_k2": Ours(kl("k2"), far(kl=200.0)),
    "kl_k3": Ours(kl("k3", cap=10.0)),
    "group_norm": Ours(of_group(advantages.grpo, eps=1e-5)),
    "group_norm_biased": Ours(of_group(advantages.grpo, eps=1e-5, ddof=0)),
    "group_mean_batch_std": Ours(of_group(advantages.grpo, scale="batch", eps=1e-5), OF_CENTERED),
    "group_mean": Ours(of_group(advantages.dr_grpo)),
    "leave_one_out": Ours(of_group(advantages.rloo)),
    "overlong": Ours(overlong),
    "loglinear_prox": Ours(prox),
    "m2_mask": Ours(m2),
    "capacity": Ours(capacity),
}
TABLES = {"areal_trainer": TABLE}
