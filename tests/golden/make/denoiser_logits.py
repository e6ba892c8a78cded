"""Writes tests/golden/denoisers: the golden Qwen3 of tests/golden/logits without a causal mask.

Run from the repository root with a Python that has torch and transformers:

    python tests/golden/make/denoiser_logits.py

What the released denoisers of the Qwen3 family change is the mask of attention alone: all tokens
(the a2d models of dLLM), or all of a block and those before it (SDAR). So the logits are those of
transformers' Qwen3 with that mask as an array of four axes.
"""

import json
import platform
from pathlib import Path

import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

GOLDEN = Path(__file__).parents[1]
FOLDER = GOLDEN / "denoisers"


def main():
    FOLDER.mkdir(exist_ok=True)
    model = Qwen3ForCausalLM.from_pretrained(GOLDEN / "logits" / "qwen3", dtype=torch.float32)
    model.eval().set_attn_implementation("eager")
    tokens = load_file(GOLDEN / "logits" / "qwen3" / "expected.safetensors")["tokens"].long()
    (rows, length), place = tokens.shape, torch.arange(tokens.shape[1])
    exists = torch.ones(rows, length, dtype=torch.bool)
    exists[1, 40:] = False  # the second row is shorter
    seen = {"bidirectional": torch.ones(length, length, dtype=torch.bool)}
    for block in (4, 5):
        seen[f"block_{block}"] = place[None] // block <= place[:, None] // block
    expected = {"tokens": tokens.to(torch.int32), "mask": exists}
    for name, mask in seen.items():
        visible = (mask & exists[:, None, :])[:, None]
        added = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
        with torch.no_grad():
            expected[name] = model(input_ids=tokens, attention_mask=added).logits.float()
    save_file(expected, FOLDER / "expected.safetensors")
    provenance = {
        "what": "float32 logits of transformers' Qwen3 with masks that are not causal, CPU",
        "script": "tests/golden/make/denoiser_logits.py",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
        },
    }
    text = json.dumps(provenance, indent=2) + "\n"
    (FOLDER / "provenance.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
