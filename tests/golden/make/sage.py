"""Writes estimators/sage.*: BaohaoLiao/SAGE's levels of hints between epochs."""

import numpy as np
from paper_code import passage, peer

PATH = "recipe/hint/hint_trainer.py"
LEVELS = ("no_hint", "level_1", "level_2", "level_3")


@peer("sage", "SAGE", "BaohaoLiao/SAGE")
def main(root, writer):
    accuracy = np.array([np.nan, 0.0, 0.05, 0.1, 0.2, 0.35, 0.36, 1.0], np.float32)
    level, accuracy = (x.ravel() for x in np.meshgrid(np.arange(4), accuracy, indexing="ij"))
    writer.inputs("visits", {"all": {"level": level, "accuracy": accuracy}})

    def run(case, a):
        found = []
        for level, accuracy in zip(a["level"], a["accuracy"], strict=True):
            made = passage(
                root / PATH,
                "if prev_acc is None:",
                "current_level_by_batch_idx[idx] = level",
                prev_level=LEVELS[level],
                prev_acc=None if np.isnan(accuracy) else float(np.float64(f"{accuracy:.6g}")),
                min_threshold=0.1,
                max_threshold=0.35,
            )
            found.append(LEVELS.index(made["level"]))
        return {"level": np.array(found)}

    writer.add("levels", run)
