"""Writes estimators/sppo_rates.*: win rates and pairs of uclaml/SPPO's script."""

import numpy as np
import pandas as pd
from paper_code import passage, peer

PATH = "scripts/compute_prob.py"


@peer("sppo_rates", "SPPO", "uclaml/SPPO")
def main(root, writer):
    rng = np.random.default_rng(82)
    writer.inputs("scores", {"random": {"scores": rng.normal(size=(6, 5)).astype(np.float32)}})

    def run(case, a):
        matrices = []
        for score in a["scores"]:
            made = passage(
                root / PATH,
                "prb = np.zeros((pairs, pairs))",
                "prb = prb.tolist()",
                pairs=5,
                score=np.float64(score),
            )
            matrices.append(made["prb"])
        columns = {f"generate_{i}": [f"{p}-{i}" for p in range(6)] for i in range(5)}
        scores = [list(x) for x in a["scores"]]
        train = pd.DataFrame(
            {**columns, "probability": [list(m) for m in matrices], "rm_scores": scores}
        )
        made = passage(
            root / PATH,
            "metrics = train['rm_scores']",
            "# Create a new DataFrame",
            after="def prepare_score",
            train=train,
        )
        pairs = [made["chosen"], made["rejected"]]
        return {
            "matrix": np.stack(matrices),
            "chosen_rate": np.array(made["chosen_probs_win"]),
            "rejected_rate": np.array(made["chosen_probs_lose"]),
            "pairs": np.array([[int(text.split("-")[1]) for text in side] for side in pairs]).T,
        }

    writer.add("rates", run)
