"""Writes tests/golden/logits: tiny random decoders of each family and their transformers logits.

Run from the repository root with a Python that has torch and transformers:

    python tests/golden/make/logits.py

The weights are random but not small, and norms and biases are not left at one and zero, so that
every parameter and every rotary frequency shows in the logits.

`greedy` are the tokens that follow the first 24 of each row, and `grad_norm` the norm of the
gradient of the mean negative log-probability of the tokens from the 18th on.
"""

import json
import platform
import shutil
from pathlib import Path

import safetensors
import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FOLDER = Path(__file__).parents[1] / "logits"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "llama3": LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters=LLAMA3, rms_norm_eps=1e-5, tie_word_embeddings=False)
    ),
    "smollm2": LlamaForCausalLM(
        LlamaConfig(
            **{**SIZES, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1},
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    ),
    "llama_mlp_bias": LlamaForCausalLM(
        LlamaConfig(**SIZES, mlp_bias=True, tie_word_embeddings=False)
    ),
    "qwen2": Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)),
    "llama_linear": LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
            tie_word_embeddings=False,
        )
    ),
    "qwen3_yarn": Qwen3ForCausalLM(
        Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN, tie_word_embeddings=False)
    ),
}


def randomize(model, generator):
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.data = 1.0 + 0.3 * noise
        elif name.endswith(".bias"):
            parameter.data = 0.3 * noise
        else:
            parameter.data = noise / parameter.shape[-1] ** 0.5 * 1.5
    model.tie_weights()


def greedy_tokens(model, prompts, count):
    """The most probable tokens, each of them from a pass over all before it."""
    rows, margin = prompts, float("inf")
    for _ in range(count):
        with torch.no_grad():
            best = model(input_ids=rows, use_cache=False).logits[:, -1].float().topk(2)
        margin = min(margin, float((best.values[:, 0] - best.values[:, 1]).min()))
        rows = torch.cat([rows, best.indices[:, :1]], dim=1)
    return rows[:, prompts.shape[1] :], margin


def gradient_norm(model, tokens):
    loss = torch.nn.functional.cross_entropy(
        model(input_ids=tokens).logits[:, 16:-1].flatten(0, 1), tokens[:, 17:].flatten()
    )
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()


def main():
    torch.set_num_threads(1)
    shutil.rmtree(FOLDER, ignore_errors=True)
    for seed, (name, model) in enumerate(MODELS.items()):
        generator = torch.Generator().manual_seed(seed)
        randomize(model, generator)
        model.eval().float().set_attn_implementation("eager")
        tokens = torch.randint(0, SIZES["vocab_size"], (2, 48), generator=generator)
        with torch.no_grad():
            logits = model(input_ids=tokens).logits.float()
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
        greedy, margin = greedy_tokens(model, tokens[:, :24], 16)
        expected = {
            "tokens": tokens.to(torch.int32),
            "logits": logits,
            "greedy": greedy.to(torch.int32).contiguous(),
            "grad_norm": gradient_norm(model, tokens).float(),
        }
        save_file(expected, FOLDER / name / "expected.safetensors")
        print(name, float(logits.std()), float(logits.abs().max()), margin)
    provenance = {
        "what": "float32 logits, greedy tokens and gradient norms of transformers on a CPU, eager "
        "attention, random weights",
        "script": "tests/golden/make/logits.py",
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
