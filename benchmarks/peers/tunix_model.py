"""tunix's own Llama with the weights of a folder in Hugging Face's layout."""

import functools
import json
from pathlib import Path

import jax.numpy as jnp
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params

PACKAGES = ("jax", "jaxlib", "flax", "google-tunix")


def load(folder: str, *, remat: bool = False):
    """Load the model in float32.

    Args:
        folder: Has config.json and the safetensors.
        remat: Recompute each decoder layer in the backward pass.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    # The attention of 0.1.7 does not pass its rope_theta on, so the default is set here instead.
    rope = getattr(llama.apply_rope, "func", llama.apply_rope)
    llama.apply_rope = functools.partial(rope, rope_theta=theta)
    model_config = llama.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=theta,
        norm_eps=config["rms_norm_eps"],
        weight_tying=config["tie_word_embeddings"],
        remat_config=llama.RematConfig.DECODER if remat else llama.RematConfig.NONE,
    )
    return llama_params.create_model_from_safe_tensors(folder, model_config, dtype=jnp.float32)
