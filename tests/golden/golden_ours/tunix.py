"""Our functions against the numbers of tunix' own code."""

import jax
import numpy as np
from golden_data import Difference, Ours

from golden_ours import (
    aggregation,
    entropy,
    far_from_reference,
    gae,
    graded,
    k3_of_twenty,
    kl,
    loss,
    replaced,
    twenty,
)
from jaxrl_llm import advantages, aggregate, regularizers, rewards, surrogates

token_mean, sequence_mean = aggregate.token_mean, aggregate.sequence_mean
clip = {"eps_low": 0.2, "eps_high": 0.2}
narrow = {"eps_low": 0.03, "eps_high": 0.04}
ppo = surrogates.ppo_clip


def of_group(function):
    return lambda a: {"advantages": function(a["rewards"])}


def length_scaled(mask, length=6):
    return aggregate.sequence_sum_norm(mask, length=length)


def value_loss(a):
    def total(values):
        each = surrogates.value_loss(values, a["old_logp"], a["token_advantages"], a["mask"])
        return aggregate.weighted_sum(each, token_mean(a["mask"]))

    return graded(total, a["logp"])


def with_kl(a):
    weight = token_mean(a["mask"])

    def total(logp):
        each = ppo(logp, a["old_logp"], a["advantages"], a["mask"], **clip)
        term = regularizers.kl_to_reference(logp, a["ref_logp"], a["mask"], coef=0.3, cap=10.0)
        return aggregate.weighted_sum(each + term, weight), each * weight

    (value, each), gradient = jax.value_and_grad(total, has_aux=True)(a["logp"])
    return {"loss": value, "gradient": gradient, "token_loss": each}


def summed(a):
    """A sum over all tokens over a constant, whatever the number of sequences."""
    weight = a["mask"] / 10.0
    return {"loss": aggregate.weighted_sum(a["token_advantages"], weight), "gradient": weight}


def overlong(a):
    lengths = a["mask"].sum(-1)
    return {"penalty": rewards.overlong_penalty(lengths, max_length=6, buffer=3, factor=0.5)}


def per_token(inputs, theirs):
    """The ratio of the sequence is greater or less by what the clamp of its tokens took away."""
    d = np.where(inputs["mask"], inputs["logp"] - inputs["old_logp"], 0.0)
    lost = (d - np.clip(d, -20, 20)).sum(-1, keepdims=True)
    factor = np.exp(lost / np.maximum(inputs["mask"].sum(-1, keepdims=True), 1))
    free = theirs["gradient"] != 0
    changed = {
        name: np.where(free, theirs[name] * factor, theirs[name])
        for name in ("gradient", "token_loss")
    }
    return changed | {"loss": changed["token_loss"].sum()}


PER_TOKEN = {
    "log_ratio_30": Difference(
        "tunix clamps the log ratio of each token before GSPO's mean, we and verl only the mean",
        per_token,
    )
}


def far(**values):
    reason = "we clamp the difference to the reference to +-20, tunix at most the estimate"
    return far_from_reference(reason, **values)


TABLE = {
    "grpo": Ours(of_group(advantages.grpo)),
    "dr_grpo": Ours(of_group(advantages.dr_grpo)),
    "rloo": Ours(of_group(advantages.rloo)),
    "gae": Ours(gae),
    "grpo_loss": Ours(loss(ppo, sequence_mean, **clip)),
    "grpo_loss_token": Ours(loss(ppo, token_mean, **clip)),
    "grpo_loss_scaled": Ours(loss(ppo, length_scaled, **clip)),
    "grpo_loss_dual": Ours(loss(ppo, token_mean, dual_clip=1.5, **clip)),
    "dapo_loss": Ours(loss(surrogates.dapo_clip, token_mean)),
    "gspo_loss": Ours(loss(surrogates.gspo, sequence_mean, **narrow), PER_TOKEN),
    "gspo_token_loss": Ours(
        loss(surrogates.gspo_token, sequence_mean, by="token_advantages", **narrow), PER_TOKEN
    ),
    "grpo_loss_kl": Ours(with_kl),
    "ppo_loss": Ours(
        loss(ppo, token_mean, by="token_advantages", token_loss=False, dual_clip=1.5, **clip)
    ),
    "value_loss": Ours(
        value_loss,
        {
            "bfloat16": replaced(
                "where both errors are equal jnp.maximum and jnp.clip halve the gradient",
                gradient={(0, 0, 1): lambda x: x / 0.75},
            )
        },
    ),
    "kl_kl": Ours(kl("k1"), far(kl=twenty, gradient=0.0)),
    "kl_kl_clamped": Ours(kl("k1"), far(kl=twenty)),
    "kl_mse_kl": Ours(kl("k2"), far(kl=200.0, gradient=0.0)),
    "kl_mse_kl_clamped": Ours(kl("k2"), far(kl=200.0)),
    "kl_low_var_kl": Ours(kl("k3"), far(kl=k3_of_twenty, gradient=0.0)),
    "kl_low_var_kl_clamped": Ours(kl("k3", cap=10.0)),
    "agg_token-mean": Ours(aggregation(token_mean)),
    "agg_sequence-mean-token-mean": Ours(aggregation(sequence_mean)),
    "agg_sequence-mean-token-scale": Ours(aggregation(length_scaled, length=10)),
    "agg_seq-mean-token-sum": Ours(aggregation(aggregate.sequence_sum)),
    "agg_sequence-mean-token-sum-norm": Ours(summed),
    "entropy": Ours(entropy),
    "overlong": Ours(overlong),
}
TABLES = {"tunix_algorithms": TABLE}
