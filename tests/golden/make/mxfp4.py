"""Writes tests/golden/mxfp4.json: packed matrices of experts, unpacked by transformers.

    python tests/golden/make/mxfp4.py

Needs torch and transformers. The bytes are drawn evenly, so that every number of four bits occurs;
the scales are 2^-9 to 2^3.
"""

import json
import platform
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

EXPERTS, OUTPUTS, GROUPS = 2, 3, 2


def main() -> None:
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (EXPERTS, OUTPUTS, GROUPS, 16), np.uint8)
    scales = generator.integers(118, 131, (EXPERTS, OUTPUTS, GROUPS), np.uint8)
    values = convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
    )
    record = {
        "made_by": "mxfp4.py",
        "function": "transformers.integrations.mxfp4.convert_moe_packed_tensors",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "blocks": blocks.tolist(),
        "scales": scales.tolist(),
        "values": values.tolist(),
    }
    path = Path(__file__).parents[1] / "mxfp4.json"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
