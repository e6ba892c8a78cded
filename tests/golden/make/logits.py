"""Writes tests/golden/logits: tiny random decoders of each family and their transformers logits.

The weights are random but not small, and norms and biases are not left at one and zero, so that
every parameter and every rotary frequency shows in the logits.

`greedy` are the tokens that follow the first 24 of each row, and `grad_norm` the norm of the
gradient of the mean negative log-probability of the tokens from the 18th on.
"""

import json
import platform
import shutil
import sys
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
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
# torch has no gradient for the embedding of a padding token.
NO_PAD = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
PARTIAL = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25}
LINEAR = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    # Of a text, the positions of its three sections are the same.
    "rope_parameters": PARTIAL | {"mrope_section": [1, 1, 0], "mrope_interleaved": True},
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
    "mistral": MistralForCausalLM(MistralConfig(**SIZES, head_dim=16, sliding_window=None)),
    "olmo2": Olmo2ForCausalLM(Olmo2Config(**SIZES, **NO_PAD)),
    # Of four layers the last has no rotary embedding.
    "smollm3": SmolLM3ForCausalLM(SmolLM3Config(**SIZES | {"num_hidden_layers": 4}, **NO_PAD)),
    "mistral_windows": MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9)),
    "qwen2_windows": Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    ),
    # Of four layers the last has no window, and a rope of its own.
    "olmo3": Olmo3ForCausalLM(
        Olmo3Config(
            **SIZES | {"num_hidden_layers": 4},
            **NO_PAD,
            sliding_window=9,
            rope_parameters={
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        )
    ),
    "gemma3": Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 3},
            **NO_PAD,
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        )
    ),
    # Of three layers the second has no window. The caps are small, so that they act.
    "gemma2": Gemma2ForCausalLM(
        Gemma2Config(
            **SIZES | {"num_hidden_layers": 3},
            **NO_PAD,
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=9,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        )
    ),
    # Of three layers the second has no experts.
    "qwen3_moe": Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES | {"num_hidden_layers": 3},
            head_dim=16,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            mlp_only_layers=[1],
            norm_topk_prob=True,
        )
    ),
    # The first layer has no experts. The probabilities of the chosen ones do not sum to one.
    "qwen3_moe_steps": Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES,
            head_dim=16,
            num_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            decoder_sparse_step=2,
            norm_topk_prob=False,
            use_sliding_window=True,
            sliding_window=9,
        )
    ),
    # The first layer has a window. The limit is small, so that it acts.
    "gpt_oss": GptOssForCausalLM(
        GptOssConfig(
            **SIZES,
            **NO_PAD,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=9,
            swiglu_limit=1.0,
            rope_parameters=YARN | {"truncate": False},
        )
    ),
    # Of four layers the last attends to all tokens, the others have a state.
    "qwen3_5": Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(**SIZES | {"num_hidden_layers": 4}, **LINEAR, tie_word_embeddings=True)
    ),
    "qwen3_5_moe": Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(
            **{k: x for k, x in SIZES.items() if k != "intermediate_size"},
            **LINEAR,
            layer_types=["linear_attention", "full_attention"],
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=20,
        )
    ),
    # The second layer has no experts.
    "qwen3_next": Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SIZES | {"num_hidden_layers": 3},
            **LINEAR | {"rope_parameters": PARTIAL},
            layer_types=["linear_attention", "linear_attention", "full_attention"],
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=20,
            mlp_only_layers=[1],
            norm_topk_prob=True,
        )
    ),
}
# Most seeds give weights whose rounding errors in float32 grow beyond the tolerance of the tests.
SEEDS = {"qwen3_5": 107}
# Of a layer with a state, as released models have it: norms of outputs around 1, slow decays.
OFFSETS = {"linear_attn.norm.weight": 1.0, "A_log": -2.0}


def randomize(model, generator):
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        kind = model.config.model_type
        own = next((x for end, x in OFFSETS.items() if name.endswith(end)), None)
        if own is not None:
            parameter.data = own + 0.3 * noise
        elif name.endswith("norm.weight"):
            # These families add 1 to what they store.
            centered = kind.startswith(("gemma", "qwen3_5", "qwen3_next"))
            parameter.data = float(not centered) + 0.3 * noise
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
    chosen = sys.argv[1:] or list(MODELS)
    for seed, (name, model) in enumerate(MODELS.items()):
        if name not in chosen:
            continue
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        generator = torch.Generator().manual_seed(SEEDS.get(name, seed))
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
    files = (folder / "config.json" for folder in sorted(FOLDER.iterdir()) if folder.is_dir())
    versions = {json.loads(file.read_text())["transformers_version"] for file in files}
    provenance = {
        "what": "float32 logits, greedy tokens and gradient norms of transformers on a CPU, eager "
        "attention, random weights",
        "script": "tests/golden/make/logits.py",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            # Each config.json tells its own.
            "transformers": ", ".join(sorted(versions)),
            "safetensors": safetensors.__version__,
        },
    }
    text = json.dumps(provenance, indent=2) + "\n"
    (FOLDER / "provenance.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
