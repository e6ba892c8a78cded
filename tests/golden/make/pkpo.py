"""Writes estimators/pkpo.*: the listing of the PKPO paper, as reproduced by others."""

import importlib.util

import numpy as np
from estimator_cases import RAGGED
from paper_code import peer


def cases():
    """Rewards of any size, some of them equal, in groups of four."""
    rng = np.random.default_rng(21)
    return {
        name: {
            "rewards": np.float32(rng.normal(size=(3, 4)).round(digits)),
            "where": np.ones((3, 4), bool),
            "mask": RAGGED,
        }
        for name, digits in (("apart", 3), ("equal", 0))
    }


@peer("pkpo", "pkpo", "kpahwa16/pass-k-policy-optimization")
def main(root, writer):
    path = next(root.rglob("pkpo_core.py"))
    spec = importlib.util.spec_from_file_location("pkpo_core", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    writer.inputs("best_of", cases())

    def run(k):
        def compute(case, a):
            rows = [module.sloo_minus_one(row.astype(np.float64), k) for row in a["rewards"]]
            return {"weights": np.array(rows)}

        return compute

    for k in (2, 3, 4):
        writer.add(f"k{k}", run(k))
