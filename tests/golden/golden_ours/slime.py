"""Our functions against the numbers of slime's own code."""

import jax
import jax.numpy as jnp
import numpy as np
from golden_data import Difference, Ours

from golden_ours import far_from_old, far_from_reference, k3_of_twenty, kl, loss, plain_gae, twenty
from jaxrl_llm import advantages, corrections, curation, regularizers, surrogates

clip = {"eps_low": 0.2, "eps_high": 0.2}
narrow = {"eps_low": 0.03, "eps_high": 0.04}
by_token = {"by": "token_advantages"}


def total(mask):
    """slime's functions leave the weighting to its loop."""
    return mask.astype(jnp.float32)


def opsm(a):
    kept = corrections.off_policy_sequence_mask(
        a["advantages"],
        a["mask"],
        old_logp=a["logp"],
        behavior_logp=a["behavior_logp"],
        threshold=0.1,
    )
    return {"keep": kept}


def importance(function, **options):
    return lambda a: {"weights": function(a["old_logp"], a["behavior_logp"], a["mask"], **options)}


def kl_corrected(estimator):
    def run(a):
        def each(logp):
            logps = (logp, a["old_logp"], a["ref_logp"], a["mask"])
            value = regularizers.kl_unbiased(*logps, estimator=estimator, coef=1.0)
            return value.sum(), value

        (_, value), gradient = jax.value_and_grad(each, has_aux=True)(a["logp"])
        return {"kl": value, "gradient": gradient}

    return run


def reinforce_pp(gamma):
    def run(a):
        logps = {"old_logp": a["old_logp"], "ref_logp": a["ref_logp"]}
        token_rewards = advantages.kl_shaped_rewards(a["rewards"], a["mask"], kl_coef=0.1, **logps)
        return {"returns": advantages.reward_to_go(token_rewards, a["mask"], gamma=gamma)}

    return run


def informative(a):
    return {"keep": curation.informative_groups(a["rewards"], where=a["where"]).any(-1)}


def discounted(inputs, theirs):
    """The returns with a discount for each kept token, masked ones stepped over."""
    found = np.zeros(inputs["mask"].shape)
    kl = np.float64(inputs["old_logp"]) - inputs["ref_logp"]
    for index in np.ndindex(found.shape[:2]):
        kept = np.flatnonzero(inputs["mask"][index])[::-1]
        to_go = inputs["rewards"][index] / 0.9
        for t in kept:
            to_go = -0.1 * kl[index][t] + 0.9 * to_go
            found[(*index, t)] = to_go
    return {"returns": found}


def corrected(estimate):
    return lambda a, theirs: (
        np.exp(np.clip(a["logp"] - a["old_logp"], -20, 20)) * estimate(a, theirs)
    )


def far(**values):
    reason = "slime does not clamp the log ratios, we clamp them to +-20"
    return far_from_reference(reason, gradient=0.0, **values)


FAR = far_from_old("slime")
TABLE = {
    "ppo": Ours(loss(surrogates.ppo_clip, total, **by_token, **clip), FAR),
    "dapo": Ours(loss(surrogates.dapo_clip, total)),
    "ppo_dual": Ours(loss(surrogates.ppo_clip, total, **by_token, dual_clip=1.5, **clip)),
    "cispo": Ours(loss(surrogates.cispo, total, **by_token, w_min=0.8, w_max=1.2)),
    "gspo": Ours(loss(surrogates.gspo, total, **narrow)),
    "opsm": Ours(opsm),
    "tis": Ours(importance(corrections.importance_weights, cap=1.25)),
    "icepop": Ours(importance(corrections.masked_importance_weights, lower=0.8, upper=1.25)),
    "kl_k1": Ours(kl("k1"), far(kl=twenty)),
    "kl_k1_corrected": Ours(kl_corrected("k1"), far(kl=corrected(twenty))),
    "kl_k2": Ours(kl("k2"), far(kl=200.0)),
    "kl_k3": Ours(kl("k3"), far(kl=k3_of_twenty)),
    "kl_k3_corrected": Ours(kl_corrected("k3"), far(kl=corrected(k3_of_twenty))),
    "kl_low_var_kl": Ours(kl("k3", cap=10.0)),
    "gae": Ours(plain_gae),
    "gae_chunked": Ours(plain_gae),
    "reinforce_pp": Ours(reinforce_pp(1.0)),
    "reinforce_pp_discounted": Ours(
        reinforce_pp(0.9),
        {
            "holes": Difference(
                "slime discounts masked positions too, we and verl do not", discounted
            )
        },
    ),
    "informative": Ours(informative),
}
TABLES = {"slime_trainer": TABLE}
