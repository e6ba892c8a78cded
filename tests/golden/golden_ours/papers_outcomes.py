"""Our advantages of single answers against the numbers of the papers' own released code."""

import functools

import numpy as np
from golden_data import Difference, Ours

from golden_ours import advantage, spread
from jaxrl_llm import advantages, curation, rewards


def mc_grpo(**options):
    return Ours(lambda a: {"advantages": advantages.mc_grpo(a["rewards"], **options)})


def passk(function, **options):
    return Ours(advantage(function, **options))


def best_of(k):
    """The paper's estimate is for a sum over the group, ours for a mean and over k."""

    def run(a):
        values = advantages.pkpo(a["rewards"], k=k, threshold=None)
        return {"weights": values * k / a["rewards"].shape[-1]}

    return Ours(run)


def maclaurin(order):
    """The authors' weights are for a sum over the group, ours for a mean."""

    def run(a):
        values = advantages.maclaurin(a["rewards"], where=a["where"], order=order)
        return {"advantages": spread(values / a["rewards"].shape[-1], a)}

    return Ours(run)


def dars(**options):
    def run(a):
        return {"extra": curation.dars_extra_rollouts(a["accuracy"], rollouts=8, **options)}

    return Ours(run)


def hbpo(a):
    options = {"budgets": a["budgets"], "where": a["where"], "intra_weight": 2.0}
    return {"advantages": spread(advantages.hbpo(a["rewards"], **options), a)}


def hbpo_reward(a):
    right = a["lengths"] >= 0
    return {"rewards": rewards.hbpo_reward(right, a["lengths"], a["budgets"])}


def alone(inputs, theirs):
    """Zeros for groups of one."""
    several = inputs["where"].sum(-1)[:, None, None] > 1
    return {"advantages": np.where(several, theirs["advantages"], 0.0)}


def asymre(shift):
    reason = "a group of one: its reward there, minus the shift with us"
    return Ours(
        advantage(advantages.asymre, shift=shift),
        {"singleton": Difference(reason, functools.partial(shifted, shift=shift))},
    )


def shifted(inputs, theirs, *, shift):
    """Minus the shift in groups of one."""
    several = inputs["where"].sum(-1)[:, None, None] > 1
    taken = inputs["mask"] & inputs["where"][..., None]
    return {"advantages": np.where(several, theirs["advantages"], -shift * taken)}


TABLES = {
    "trinity_asymre": {f"shift_{shift:g}": asymre(shift) for shift in (-0.1, 0.25)},
    "mc_grpo": {
        "math": mc_grpo(),
        "gsm": mc_grpo(rescale_nonzero=True),
        "pivot": Ours(lambda a: {"median_mask": advantages.mc_grpo_pivot(a["rewards"])}),
    },
    "passk_training": {f"k{k}": passk(advantages.passk_training, k=k) for k in (1, 2, 3)},
    "maxrl": {
        "maxrl": passk(advantages.maxrl),
        "maxrl_rows": Ours(
            advantage(advantages.maxrl),
            {"singleton": Difference("a group of one: reward over eps there, 0 with us", alone)},
        ),
        "one_sided": passk(advantages.maxrl, scale="root"),
    }
    | {f"pkpo_k{k}": passk(advantages.pkpo, k=k, loo=True) for k in (1, 2, 3)}
    | {f"maclaurin_{order}": maclaurin(order) for order in (1, 2, 4)},
    "pkpo": {f"k{k}": best_of(k) for k in (2, 3, 4)},
    "dars": {
        f"schedule_{name}_{most}" + "_std" * scaled: dars(
            max_rollouts=most, schedule=schedule, scaled=scaled
        )
        for name, schedule in (("ET", "equal"), ("HW", "hardness"))
        for most in (32, 64)
        for scaled in (False, True)
    },
    "hbpo": {"advantage": Ours(hbpo), "reward": Ours(hbpo_reward)},
}
