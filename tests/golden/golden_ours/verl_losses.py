"""Our losses and terms against the numbers of verl's own code."""

import jax
import jax.numpy as jnp
import numpy as np
from golden_data import Difference, Ours

from golden_ours import (
    aggregation,
    clamped_ratio,
    empty_rows_count,
    entropy,
    far_from_reference,
    graded,
    kl,
    loss,
    replaced,
    twenty,
)
from jaxrl_llm import aggregate, regularizers, surrogates

token_mean, sequence_mean = aggregate.token_mean, aggregate.sequence_mean
clip = {"eps_low": 0.2, "eps_high": 0.2}
narrow = {"eps_low": 0.03, "eps_high": 0.04}
ppo = surrogates.ppo_clip


def clip_cov(logp, old_logp, advantages, mask):
    chosen = {"selected": None, "key": jax.random.key(0), "ratio": 1.0, "lower": 0.2, "upper": 1.0}
    return surrogates.clip_cov(logp, old_logp, advantages, mask, **clip, **chosen)


def unclamped(cells=()):
    """In `cells` the penalty of kl_cov, which neither clamps, leaves a gradient of these sizes."""

    def expected(inputs, theirs):
        changed = clamped_ratio(inputs, theirs)
        for cell, size in dict(cells).items():
            changed["gradient"][cell] = size / inputs["mask"].sum()
        return changed

    return {"log_ratio_30": Difference("verl does not clamp the log ratio here", expected)}


def tied(coef):
    """All covariances are 0 in one sequence of one advantage: another token is picked."""

    def expected(inputs, theirs):
        d = inputs["logp"] - inputs["old_logp"]
        gradient, token_loss = theirs["gradient"].copy(), theirs["token_loss"].copy()
        for cell, step in (((1, 2, 2), -coef / 4), ((1, 2, 0), coef / 4)):
            gradient[cell] += step * np.sign(d[cell])
            token_loss[cell] += step * np.abs(d[cell])
        return {"loss": token_loss.sum(), "token_loss": token_loss, "gradient": gradient}

    reason = "of equal covariances we take the first, torch.topk any"
    return {"one_sequence": Difference(reason, expected)}


def near(bound):
    return {"delta_low": bound, "delta_high": 1.5 * bound, "w_max": 1.2}


ALL_ROWS = empty_rows_count("verl's geo_mean divides by all rows, we by those with a token")
LOSSES = {
    "vanilla": Ours(loss(ppo, token_mean, **clip)),
    "vanilla_dual": Ours(loss(ppo, token_mean, dual_clip=1.2, **clip)),
    "vanilla_token": Ours(loss(ppo, sequence_mean, by="token_advantages", dual_clip=3.0, **clip)),
    "vanilla_weighted": Ours(loss(ppo, token_mean, weighted=True, dual_clip=3.0, **clip)),
    "dapo": Ours(loss(surrogates.dapo_clip, token_mean)),
    "gspo": Ours(loss(surrogates.gspo, sequence_mean, **narrow)),
    "gspo_token": Ours(
        loss(surrogates.gspo_token, sequence_mean, by="token_advantages", **narrow),
        {
            "bfloat16": replaced(
                "verl's ratio, rounded to bfloat16, falls on the other side of a bound",
                gradient={(2, 2, 0): 0.0},
            )
        },
    ),
    "sapo": Ours(loss(surrogates.sapo, sequence_mean)),
    "sapo_sharp": Ours(
        loss(surrogates.sapo, sequence_mean, by="token_advantages", tau_pos=0.5, tau_neg=4.0)
    ),
    "dppo_tv": Ours(loss(surrogates.dppo_tv, token_mean, **near(0.05))),
    "dppo_tv_token": Ours(
        loss(surrogates.dppo_tv, sequence_mean, by="token_advantages", **near(0.05))
    ),
    "dppo_kl": Ours(loss(surrogates.dppo_kl, token_mean, **near(0.02))),
    "dppo_kl_token": Ours(
        loss(surrogates.dppo_kl, sequence_mean, by="token_advantages", **near(0.02))
    ),
    "gpg_loss": Ours(loss(surrogates.reinforce, token_mean)),
    "reinforce_sum": Ours(loss(surrogates.reinforce, aggregate.sequence_sum, weighted=True)),
    "cispo": Ours(
        loss(surrogates.cispo, token_mean, **surrogates.cispo_bounds(eps_low=0.2, eps_high=0.2))
    ),
    "geo_mean": Ours(loss(surrogates.gmpo, sequence_mean), ALL_ROWS),
    "geo_mean_narrow": Ours(
        loss(surrogates.gmpo, sequence_mean, eps_low=0.1, eps_high=0.2), ALL_ROWS
    ),
    "clip_cov": Ours(loss(clip_cov, token_mean), unclamped()),
    "kl_cov_0.2": Ours(
        loss(surrogates.kl_cov, token_mean, selected=None, ratio=0.2, coef=1.0),
        unclamped({(0, 0, 1): 1.0, (2, 0, 1): -1.0}) | tied(1.0),
    ),
    "kl_cov_0.01": Ours(
        loss(surrogates.kl_cov, token_mean, selected=None, ratio=0.01, coef=0.1),
        unclamped({(2, 0, 1): -0.1}) | tied(0.1),
    ),
}


def far(**values):
    reason = "verl clamps the difference to +-20 inside k3 alone, we in every estimator"
    return far_from_reference(reason, gradient=0.0, **values)


def value_loss(a):
    weight = token_mean(a["mask"])

    def total(values):
        each = surrogates.value_loss(values, a["old_logp"], a["token_advantages"], a["mask"])
        return aggregate.weighted_sum(each, weight)

    return graded(total, a["logp"])


def adaptive_kl(a):
    coefficients = [jnp.float32(0.1)]
    for size in jnp.abs(a["advantages"]).reshape(-1):
        step = {"target": 0.8, "samples": 64, "horizon": 1000.0}
        coefficients.append(regularizers.adaptive_kl_update(coefficients[-1], size, **step))
    return {"coef": jnp.stack(coefficients[1:])}


TERMS = {
    "agg_token-mean": Ours(aggregation(token_mean)),
    "agg_seq-mean-token-mean": Ours(aggregation(sequence_mean)),
    "agg_seq-mean-token-sum": Ours(aggregation(aggregate.sequence_sum)),
    "agg_seq-mean-token-sum-norm": Ours(aggregation(aggregate.sequence_sum_norm, length=6)),
    "agg_seq-mean-token-sum-norm_10": Ours(aggregation(aggregate.sequence_sum_norm, length=10)),
    "kl_k1": Ours(kl("k1"), far(kl=twenty)),
    "kl_abs": Ours(kl("abs"), far(kl=20.0)),
    "kl_k2": Ours(kl("k2"), far(kl=200.0)),
    "kl_k3": Ours(kl("k3", cap=10.0)),
    "kl_k1+": Ours(kl("k1+"), far(kl=twenty)),
    "kl_k3+": Ours(kl("k3+", cap=10.0), far()),
    "entropy": Ours(entropy),
    "value_loss": Ours(
        value_loss,
        {
            "bfloat16": replaced(
                "where both errors are equal torch.max and torch.min halve the gradient",
                gradient={(0, 0, 1): lambda x: x / 0.75},
            )
        },
    ),
    "adaptive_kl": Ours(adaptive_kl),
}
TABLE = LOSSES | TERMS
TABLES = {"verl_losses": TABLE}
