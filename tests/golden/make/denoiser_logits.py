"""Writes tests/golden/denoisers: logits of released denoisers with the weights of a golden Qwen3.
    python tests/golden/make/denoiser_logits.py sdar CHECKOUT COMMIT   # of JetAstra/SDAR

The models are those of the released files, with the weights of tests/golden/logits. In the a2d
models of dLLM all tokens attend to all; in SDAR, those of a block attend to it and to the blocks
before it, by the masks of its `generate.py`. SDAR's file is of transformers 4.52; its norms come
from flash-attn, which needs a GPU, and are computed here by their formula.
"""

import importlib.machinery
import importlib.util
import json
import platform
import sys
import types
from pathlib import Path

import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parents[1]
FOLDER, WEIGHTS = GOLDEN / "denoisers", GOLDEN / "logits" / "qwen3"
A2D, SDAR = "dllm/pipelines/a2d/models/qwen3", "training/model/SDAR-4B-Chat"
BLOCKS = (4, 5)


def module(name, **names):
    """A module of these names that can be imported."""
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(names)
    sys.modules[name] = made
    return made


def from_file(path, name):
    """The module of a file, by a name that its own imports are relative to."""
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def rms_norm(x, weight, bias, eps):
    assert bias is None
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def a2d(root):
    released = from_file(root / A2D / "modeling_qwen3.py", "modeling_a2d")
    config = released.A2DQwen3Config.from_pretrained(WEIGHTS)
    config._attn_implementation = "eager"
    return released.A2DQwen3LMHeadModel(config)


def sdar(root):
    for name in ("flash_attn", "flash_attn.ops", "flash_attn.ops.triton"):
        module(name)
    module("flash_attn.ops.triton.layer_norm", rms_norm_fn=rms_norm)
    module("released").__path__ = []
    # A loss of its training, which is not called.
    loss = "fused_linear_diffusion_cross_entropy"
    module(f"released.{loss}", FusedLinearDiffusionCrossEntropyLoss=None)
    torch.compile = lambda *args, **options: lambda function: function
    settings = from_file(root / SDAR / "configuration_sdar.py", "released.configuration_sdar")
    released = from_file(root / SDAR / "modeling_sdar.py", "released.modeling_sdar")
    config = settings.SDARConfig.from_pretrained(WEIGHTS)
    config.fuse_cross_entropy = False
    return released.SDARForCausalLM(config)


def load(model):
    values = load_file(WEIGHTS / "model.safetensors")
    absent, unknown = model.load_state_dict(values, strict=False)
    assert not unknown and set(absent) <= {"lm_head.weight"}, (absent, unknown)
    if absent:  # tied
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.float().eval()


def main():
    name, root, commit = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    FOLDER.mkdir(exist_ok=True)
    tokens = load_file(WEIGHTS / "expected.safetensors")["tokens"].long()
    (rows, length), place = tokens.shape, torch.arange(tokens.shape[1])
    exists = torch.ones(rows, length, dtype=torch.bool)
    exists[1, 40:] = False  # the second row is shorter
    if name == "a2d":
        model, masks = a2d(root), {"bidirectional": exists.long()}
    else:
        model, masks = sdar(root), {}
        for block in BLOCKS:
            seen = place[None] // block <= place[:, None] // block
            masks[f"block_{block}"] = (seen & exists[:, None, :])[:, None]
    model, expected = load(model), {"tokens": tokens.to(torch.int32), "mask": exists}
    for key, mask in masks.items():
        with torch.no_grad():
            expected[key] = model(input_ids=tokens, attention_mask=mask).logits.float()
    save_file(expected, FOLDER / f"{name}.safetensors")
    provenance = {
        "what": f"float32 logits of {type(model).__name__}, CPU",
        "repository": {"a2d": "ZHZisZZ/dllm", "sdar": "JetAstra/SDAR"}[name],
        "commit": commit,
        "script": "tests/golden/make/denoiser_logits.py",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
        },
    }
    text = json.dumps(provenance, indent=2) + "\n"
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
