"""Our advantages against the numbers of verl's own code."""

import numpy as np
from golden_data import Difference, Ours

from golden_ours import advantage, gae, spread, where
from jaxrl_llm import advantages
from jaxrl_llm.core import masking

raw = {"singleton": "raw"}


def remax(a):
    greedy = a["greedy_rewards"]
    values = advantages.remax(a["rewards"], greedy_rewards=greedy, where=a["where"])
    return {"advantages": spread(values, a)}


def otb(weights=False, **options):
    def run(a):
        given = {name: a[name] for name in ("old_logp", "sum_pi_sq", "where")}
        given |= {"weights": a["weight"]} if weights else {}
        return {"advantages": advantages.otb(a["rewards"], a["mask"], **given, **options)}

    return run


def gdpo(weights):
    def run(a):
        columns = {f"r{i}": x for i, x in enumerate(a["columns"])}
        given = None if weights is None else {f"r{i}": w for i, w in enumerate(weights)}
        values = advantages.gdpo_token(columns, a["mask"], where=a["where"], weights=given)
        return {"advantages": values}

    return run


def gdpo64(weights):
    """In float64: a column of a group of one is no difference to anything, 0 as in TRL."""

    def expected(inputs, theirs):
        total = np.zeros(inputs["rewards"].shape)
        for column, weight in zip(np.float64(inputs["columns"]), weights, strict=True):
            for group, keep, out in zip(column, inputs["where"], total, strict=True):
                x = group[keep]
                if x.size > 1:
                    out[keep] += weight * (x - x.mean()) / (x.std(ddof=1) + 1e-6)
        tokens = inputs["mask"] & inputs["where"][..., None]
        values = np.broadcast_to(total[..., None], tokens.shape)
        x = values[tokens]
        whitened = (values - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)
        return {"advantages": np.where(tokens, whitened, 0.0)}

    reason = "verl leaves the rewards of a group of one as they are, whatever their units"
    return {"singleton": Difference(reason, expected)}


def shaped(a):
    logps = {"old_logp": a["old_logp"], "ref_logp": a["ref_logp"]}
    shaped = advantages.kl_shaped_rewards(a["rewards"], a["mask"], kl_coef=0.1, **logps)
    return {"rewards": shaped}


def whiten(**options):
    return lambda a: {"whitened": advantages.whiten(a["values"], a["mask"], **options)}


def variance(a):
    return {
        "unbiased": masking.masked_var(a["values"], a["mask"], ddof=1),
        "biased": masking.masked_var(a["values"], a["mask"]),
        "mean": masking.masked_mean(a["values"], a["mask"]),
    }


TABLE = {
    "grpo": Ours(advantage(advantages.grpo, **raw)),
    "grpo_vectorized": Ours(advantage(advantages.grpo, **raw)),
    "dr_grpo": Ours(advantage(advantages.dr_grpo, **raw)),
    "dr_grpo_vectorized": Ours(advantage(advantages.dr_grpo, **raw)),
    "rloo": Ours(advantage(advantages.rloo, **raw)),
    "rloo_vectorized": Ours(advantage(advantages.rloo)),
    "reinforce_pp_baseline": Ours(advantage(advantages.reinforce_pp_baseline, "mask")),
    "reinforce_pp": Ours(advantage(advantages.reinforce_pp, "mask")),
    "reinforce_pp_discounted": Ours(advantage(advantages.reinforce_pp, "mask", gamma=0.9)),
    "opo": Ours(advantage(advantages.opo, "mask", **raw)),
    "gpg": Ours(advantage(advantages.gpg, mode="nonzero_reward", **raw)),
    "remax": Ours(
        remax,
        {
            "holes": where(
                "verl leaves the bare return on masked positions within a response",
                lambda a: ~a["mask"],
                advantages=0.0,
            )
        },
    ),
    "grpo_passk": Ours(advantage(advantages.grpo_passk)),
    "grpo_passk_no_std": Ours(advantage(advantages.grpo_passk, scale="none")),
    "otb": Ours(otb(zero_tail=True)),
    "otb_no_tail": Ours(otb()),
    "otb_weighted": Ours(otb(weights=True, zero_tail=True)),
    "otb_tir": Ours(otb(compact=True, zero_tail=True)),
    "otb_tir_no_tail": Ours(otb(compact=True)),
    "otb_tir_weighted": Ours(otb(weights=True, compact=True, zero_tail=True)),
    "gdpo": Ours(gdpo(None), gdpo64([1.0, 1.0, 1.0])),
    "gdpo_weighted": Ours(gdpo([1.0, 0.5, 2.0]), gdpo64([1.0, 0.5, 2.0])),
    "gae": Ours(lambda a: gae(a | {"mask": a["mask"] & a["where"][..., None]})),
    "rewards_with_kl": Ours(shaped),
    "whiten": Ours(whiten()),
    "whiten_keep_mean": Ours(whiten(shift_mean=False)),
    "variance": Ours(variance),
}
TABLES = {"verl_advantages": TABLE}
