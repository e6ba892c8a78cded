"""Writes estimators/iso_merging.*: danielm1405/iso-merging's Iso-C."""

from types import SimpleNamespace

import numpy as np
import torch
from paper_code import peer, take

PATH = "src/utils/iso.py"


@peer("iso_merging", "iso-merging", "danielm1405/iso-merging")
def main(root, writer):
    rng = np.random.default_rng(86)
    rows = {
        "random": {
            "matrices": rng.normal(size=(3, 4, 6)).astype(np.float32),
            "vectors": rng.normal(size=(3, 5)).astype(np.float32),
        }
    }
    writer.inputs("task_vectors", rows)
    (iso_c,) = take(root / PATH, "iso_c", print=lambda text: None)

    def run(case, a):
        tasks = [
            SimpleNamespace(vector={"w": torch.from_numpy(w), "b": torch.from_numpy(b)})
            for w, b in zip(a["matrices"], a["vectors"], strict=True)
        ]
        made = iso_c(tasks, SimpleNamespace(device="cpu"))
        return {"matrix": made["w"].numpy(), "vector": made["b"].numpy()}

    writer.add("iso_c", run)
