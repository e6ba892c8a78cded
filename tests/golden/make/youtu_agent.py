"""Writes estimators/youtu_agent.*: operations on experiences in youtu-agent."""

import copy

import numpy as np
from paper_code import passage, peer

PATH = "utu/practice/experience_updater.py"
KINDS = ("ADD", "UPDATE", "DELETE")
SIZE, STEPS = 5, 8


def revised(path):
    """Texts are numbers, 0 an empty one; an id of -1 is none, and 9 is of no experience."""

    def library(case, a):
        rows = []
        for kinds, ids, texts in zip(a["kinds"], a["ids"], a["texts"], strict=True):
            plan = [
                {
                    "operation": KINDS[kind],
                    "content": str(text) if text else "",
                    "id": None if i < 0 else f"G{i}",
                }
                for kind, i, text in zip(kinds, ids, texts, strict=True)
            ]
            made = passage(
                path,
                "max_ID = len(experiences)",
                'print("- Num of candidate',
                after="# apply revision plan",
                experiences={f"G{i}": str(100 + i) for i in range(SIZE)},
                revision_plan=plan,
                copy=copy,
            )
            values = [int(x) for x in made["new_experiences"].values()]
            rows.append(values + [-1] * (SIZE + STEPS - len(values)))
        return {"library": np.array(rows)}

    return library


@peer("youtu_agent", "youtu-agent", "TencentCloudADP/youtu-agent")
def main(root, writer):
    rng = np.random.default_rng(63)
    shape = (16, STEPS)
    plans = {
        "kinds": rng.integers(0, 3, shape),
        "ids": rng.choice([-1, 0, 1, 2, 3, 4, 9], shape),
        "texts": rng.integers(1, 90, shape) * (rng.random(shape) < 0.8),
    }
    plans = {name: x.astype(np.int32) for name, x in plans.items()}
    # Without an id an experience cannot be deleted, and a new one needs none.
    plans["ids"][plans["kinds"] == 0] = -1
    writer.inputs("plans", {"random": plans})
    writer.add("library", revised(root / PATH))
