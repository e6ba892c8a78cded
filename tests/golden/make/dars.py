"""Writes estimators/dars.*: yangzhch6/DARS's numbers of extra rollouts."""

import numpy as np
from paper_code import peer, take

PATH = "verl/verl/trainer/ppo/ray_dars_trainer.py"


def schedule(function, **options):
    def compute(case, a):
        counts = [function(float(x), **options) for x in a["accuracy"]]
        return {"extra": np.array(counts)}

    return compute


@peer("dars", "DARS", "yangzhch6/DARS")
def main(root, writer):
    accuracies = {"of_eight": {"accuracy": np.arange(9, dtype=np.float32) / 8}}
    writer.inputs("accuracies", accuracies)
    for name in ("schedule_ET", "schedule_HW"):
        (function,) = take(root / PATH, name)
        for most in (32, 64):
            for std in (False, True):
                options = {"N": 8, "N_max": most, "std": std}
                writer.add(f"{name}_{most}" + "_std" * std, schedule(function, **options))
