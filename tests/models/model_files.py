"""Files of models and tokenizers, written for tests that read them."""

import gguf
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

NAMES = {  # of transformers and of llama.cpp
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name):
    name = name.replace("model.layers.", "blk.")
    for theirs, short in NAMES.items():
        name = name.replace(theirs, short)
    return name


def interleave(rows, heads):
    """What llama.cpp's converter does to q and k of a llama model."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def write(path, config, tensors, *, kinds=None, extra=None, metadata=True):
    """Writes tensors named as in transformers as a GGUF file named as in llama.cpp."""
    kinds = kinds or {}
    writer = gguf.GGUFWriter(path, config.architecture)
    if metadata:
        writer.add_block_count(config.num_layers)
        writer.add_context_length(config.max_length)
        writer.add_embedding_length(config.width)
        writer.add_feed_forward_length(config.mlp_width)
        writer.add_head_count(config.num_heads)
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        if config.head_dim * config.num_heads != config.width:
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
    for key, value in (extra or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, value in tensors.items():
        if config.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_heads if "q_proj" in name else config.num_kv_heads
            value = interleave(value, heads)
        kind = gguf.GGMLQuantizationType[kinds.get(name, "F32")]
        stored = gguf.quants.quantize(value, kind)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer_of_bytes(*special):
    """A backend of all bytes and the merge of "a" and "b", with special tokens behind them."""
    vocabulary = {x: n for n, x in enumerate([*LETTERS, "ab"])}
    backend = Backend(models.BPE(vocabulary, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend
