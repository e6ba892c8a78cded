"""Writes estimators/dart.*: Computer-use-agents/dart-gui's filter of tasks."""

from typing import Any, Optional

import numpy as np
import pandas as pd
from paper_code import peer, take

PATH = "verl/utils/dataset/trainable_filter.py"
NAMES = ("sort_by_time", "sort_by_time_desc", "to_records", "sample_df", "filter_fn")


def tasks():
    rng = np.random.default_rng(16)
    rewards = (rng.random((10, 4)) < 0.3).astype(np.float32)
    rewards[:3], rewards[3] = 0.0, 1.0
    time = np.stack([rng.permutation(4) for _ in range(10)])
    return {"random": {"rewards": rewards, "time": time, "stored": rng.random(10) < 0.6}}


@peer("dart", "DART", "Computer-use-agents/dart-gui")
def main(root, writer):
    writer.inputs("tasks", tasks())
    typing = {"Any": Any, "Dict": dict, "List": list, "Optional": Optional}
    (function,) = take(root / PATH, *NAMES, pd=pd, **typing)[-1:]

    def run(case, a):
        rows = []
        for task, (rewards, time, stored) in enumerate(
            zip(a["rewards"], a["time"], a["stored"], strict=True)
        ):
            common = {"task_id": f"{task:02d}", "used": 0, "model_version": "new"}
            for i, (r, t) in enumerate(zip(rewards, time, strict=True)):
                at = pd.Timestamp("2025-02-01") + pd.Timedelta(days=int(t))
                rows.append(
                    common | {"trajectory_id": f"{task}-{i}", "reward": float(r), "create_at": at}
                )
            if stored:
                old = {"trajectory_id": f"{task}-stored", "reward": 1.0, "used": 1}
                at = pd.Timestamp("2025-01-01")
                rows.append(common | old | {"model_version": "old", "create_at": at})
        kept = function(rows, per_task_limit=4, top_mvs=["new"])
        names = {row["trajectory_id"] for row in kept}
        replace, keep = [], []
        for task in range(len(a["rewards"])):
            gone = [i for i in range(4) if f"{task}-{i}" not in names]
            keep.append(len(gone) < 4)
            replace.append(gone[0] if f"{task}-stored" in names else -1)
        return {"replace": np.array(replace), "keep": np.array(keep)}

    writer.add("pool", run)
