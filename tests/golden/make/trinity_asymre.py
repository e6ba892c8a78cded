"""Writes estimators/trinity_asymre.*: the advantages of AsymRE in Trinity-RFT."""

from types import SimpleNamespace

import numpy as np
from estimator_cases import load_inputs
from paper_code import array, peer, take, tensor

PATH = "trinity/algorithm/advantage_fn/asymre_advantage.py"


@peer("trinity_asymre", "Trinity-RFT", "modelscope/Trinity-RFT")
def main(root, writer):
    (function,) = take(root / PATH, "calculate_group_advantage")
    shared = load_inputs("rewards")
    names = ("rewards", "where", "mask")
    writer.inputs("groups", {c: {n: a[n] for n in names} for c, a in shared.items()})
    for shift in (-0.1, 0.25):

        def compute(case, a, shift=shift):
            out = np.zeros(a["mask"].shape, np.float32)
            rewards = tensor(case, a["rewards"][..., None]).reshape(a["rewards"].shape)
            for p, members in enumerate(a["where"]):
                group = [
                    SimpleNamespace(
                        reward=float(rewards[p, g]),
                        action_mask=tensor(case, a["mask"][p, g][None, None])[0],
                    )
                    for g in np.flatnonzero(members)
                ]
                if group:
                    function(SimpleNamespace(baseline_shift=shift), str(p), group)
                for g, each in zip(np.flatnonzero(members), group, strict=True):
                    out[p, g] = array(each.advantages)
            return {"advantages": out}

        writer.add(f"shift_{shift:g}", compute)
