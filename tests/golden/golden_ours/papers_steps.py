"""Advantages of turns, fleets and trackers, and FAPO's rewards, against the authors' own code."""

import numpy as np
from golden_data import Difference, Ours

from jaxrl_llm import advantages, curation, rewards
from jaxrl_llm.core import masking


def trloo(gamma):
    def run(a):
        values = advantages.trloo(a["rewards"], turn_where=a["turn_where"], gamma=gamma)
        return {"advantages": values}

    return Ours(run)


def keep_probability(a):
    return {"probability": curation.prs_keep_prob(a["coverage"], a["correct"])}


def fleet(norm, punishment, differences=None):
    def run(a):
        options = {"norm": norm, "punishment": punishment, "gamma": 0.9}
        return {"advantages": advantages.fleet_grpo(a["rewards"], where=a["where"], **options)}

    return Ours(run, differences or {})


def other_sign(inputs, theirs):
    """Twice the fairness of the moment more, where there was a task."""
    earned = np.cumsum(np.where(inputs["where"], np.float64(inputs["rewards"]), 0.0), axis=0)
    fair = -np.diff(earned.std(-1), prepend=0.0)[:, None]
    return {"advantages": theirs["advantages"] + np.where(inputs["where"], 2 * fair, 0.0)}


SIGN = Difference("the authors' GRPO subtracts what their OSPO adds; we add in both", other_sign)


def spo(a):
    before = advantages.beta_tracker_init(a["successes"], 8, rho_min=0.875)
    ids = np.arange(12)
    values = advantages.beta_tracker_value(before, ids)
    gained = a["rewards"][:, None]
    shift = masking.masked_mean(abs(a["old_logp"] - a["logp"]), a["mask"], axis=-1)
    rho = advantages.kl_forgetting(shift)
    after = advantages.beta_tracker_update(before, ids, gained, rho)
    return {
        "values": values,
        "draw": advantages.uncertainty_sampling_weights(values),
        "advantages": advantages.spo(gained, values)[:, 0],
        "rho": rho,
        "alpha": after.alpha,
        "beta": after.beta,
    }


def informative(a):
    kept = curation.informative_groups(a["rewards"], where=a["where"], keep_singletons=True)
    return {"keep": kept.any(-1)}


TABLES = {
    "kernelgym": {
        "trloo_1": trloo(1.0),
        "trloo_0.9": trloo(0.9),
        "keep_probability": Ours(keep_probability),
    },
    "ospo": {
        "ospo": Ours(lambda a: {"advantages": advantages.ospo(a["rewards"], where=a["where"])}),
        "grpo_norm2_punishment0": fleet("all", "none"),
        "grpo_norm2_punishment1": fleet("all", "history", {"full": SIGN, "idle": SIGN}),
        "grpo_norm2_punishment2": fleet("all", "to_go"),
        "grpo_norm1_punishment0": fleet("time", "none"),
        "grpo_norm1_punishment2": fleet("time", "to_go"),
    },
    "verl_recipe": {
        "judge": Ours(
            lambda a: {"rewards": rewards.genrm_step_reward(a["predicted"], a["truth"], a["steps"])}
        ),
        "reward": Ours(
            lambda a: {"rewards": rewards.fapo_reward(a["rewards"], flawed=a["flawed"])}
        ),
        "spo": Ours(spo),
        "informative": Ours(informative),
    },
}
