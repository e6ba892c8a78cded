"""The weights of a benchmark as one folder in Hugging Face's layout, which all workers load."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import ROOT

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_tiny(folder: Path, seed: int = 0) -> None:
    """Write a random Llama of one layer."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    width, inner, head = TINY["hidden_size"], TINY["intermediate_size"], TINY["head_dim"]
    queries, keys = head * TINY["num_attention_heads"], head * TINY["num_key_value_heads"]
    shapes = {"model.embed_tokens": (TINY["vocab_size"], width), "model.norm": (width,)}
    for layer in range(TINY["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj": (queries, width),
            f"{prefix}.self_attn.k_proj": (keys, width),
            f"{prefix}.self_attn.v_proj": (keys, width),
            f"{prefix}.self_attn.o_proj": (width, queries),
            f"{prefix}.mlp.gate_proj": (inner, width),
            f"{prefix}.mlp.up_proj": (inner, width),
            f"{prefix}.mlp.down_proj": (width, inner),
            f"{prefix}.input_layernorm": (width,),
            f"{prefix}.post_attention_layernorm": (width,),
        }
    tensors = {
        f"{name}.weight": np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.normal(0.0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(TINY, indent=2))


@contextlib.contextmanager
def model_folder(*, tiny: bool, gguf: str | None, peer_python: str | None) -> Iterator[dict]:
    """Yield {"model": name or path, "vocab_size": n}, and remove what was written afterwards.

    transformers writes SmolLM2 out, so that the peers' weights do not pass through our loader.
    Without peers nothing is written: ours loads by name, or the file itself.
    """
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm-benchmark-") as name:
        folder = Path(name)
        if tiny:
            write_tiny(folder)
        elif peer_python is None:
            yield {"model": gguf or "smollm2-135m-instruct", "vocab_size": 49152}
            return
        else:
            subprocess.run(
                [peer_python, "-m", "benchmarks.peers.export", _gguf_path(gguf), name],
                cwd=ROOT,
                env=dict(os.environ, PYTHONPATH=str(ROOT)),
                check=True,
                stdout=sys.stderr,
            )
        config = json.loads((folder / "config.json").read_text())
        yield {"model": name, "vocab_size": config["vocab_size"]}


def _gguf_path(gguf: str | None) -> str:
    if gguf is not None:
        return str(Path(gguf).resolve())
    from jaxrl_llm.models import resolve

    return str(resolve("smollm2-135m-instruct").weights)
