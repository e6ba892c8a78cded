"""GGUF files written here from the golden models read back as the safetensors do."""

from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from models.model_files import gguf_name, write
from rows import for_each
from safetensors.numpy import load_file

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.gguf import GgufFile, hugging_face_name, open_gguf
from jaxrl_llm.models.loading import load_model, load_params
from jaxrl_llm.models.rope import LinearScaling, RopeScaling
from jaxrl_llm.models.safetensors import SafetensorsFolder

GOLDEN = Path(__file__).parents[1] / "golden" / "logits"


def golden(name):
    tensors = load_file(GOLDEN / name / "model.safetensors")
    model, params = load_model(GOLDEN / name)
    return model.config, tensors, params


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@for_each("name", ["llama", "smollm2", "qwen2", "qwen3"])
def test_equal_to_the_safetensors(new_folder, name):
    tmp_path = new_folder()
    config, tensors, params = golden(name)
    path = write(tmp_path / "m.gguf", config, tensors)
    model, read = load_model(path)
    assert model.config == config
    assert_equal_trees(read, params)


def random_model(seed=0):
    """Rows of 256, so that every block format fits."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=64,
        width=256,
        num_layers=1,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        mlp_width=256,
        max_length=64,
        norm_eps=1e-5,
        tied=True,
    )
    numbers = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens.weight": (64, 256),
        "model.norm.weight": (256,),
        "model.layers.0.input_layernorm.weight": (256,),
        "model.layers.0.post_attention_layernorm.weight": (256,),
        "model.layers.0.self_attn.q_proj.weight": (256, 256),
        "model.layers.0.self_attn.k_proj.weight": (128, 256),
        "model.layers.0.self_attn.v_proj.weight": (128, 256),
        "model.layers.0.self_attn.o_proj.weight": (256, 256),
        "model.layers.0.mlp.gate_proj.weight": (256, 256),
        "model.layers.0.mlp.up_proj.weight": (256, 256),
        "model.layers.0.mlp.down_proj.weight": (256, 256),
    }
    return config, {k: numbers.normal(size=s).astype(np.float32) for k, s in shapes.items()}


@for_each(
    ("kind", "error"),
    [("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 2e-2), ("Q4_1", 0.25), ("Q4_0", 0.4)],
)
def test_block_formats(new_folder, kind, error):
    tmp_path = new_folder()
    config, tensors = random_model()
    kinds = {name: kind for name, value in tensors.items() if value.ndim == 2}
    file = GgufFile(write(tmp_path / "m.gguf", config, tensors, kinds=kinds))
    assert file.config == config
    for name, value in tensors.items():
        whole = (slice(None),) * value.ndim
        read = file.read(name, whole)
        assert read.dtype == np.float32
        np.testing.assert_allclose(read, value, atol=error if value.ndim == 2 else 0)
        rows = file.read(name, (slice(8, 24), *whole[1:]))
        np.testing.assert_array_equal(rows, read[8:24])
        if value.ndim == 2:
            part = file.read(name, (slice(2, 5), slice(16, 40)))
            np.testing.assert_array_equal(part, read[2:5, 16:40])


def q6_k(values):
    """One scale of 1/32 a row block: quantizes to multiples of 1/32 within +-1."""
    levels = np.clip(np.round(values * 32), -32, 31).astype(np.int64) + 32
    blocks = []
    for level in levels.reshape(-1, 256):
        low, high = np.zeros((2, 64), np.uint8), np.zeros((2, 32), np.uint8)
        for half in range(2):
            quarter = level[half * 128 : (half + 1) * 128].reshape(4, 32)
            low[half, :32] = (quarter[0] & 15) | ((quarter[2] & 15) << 4)
            low[half, 32:] = (quarter[1] & 15) | ((quarter[3] & 15) << 4)
            for number in range(4):
                high[half] |= ((quarter[number] >> 4) << (2 * number)).astype(np.uint8)
        scales = np.ones(16, np.int8).view(np.uint8)
        step = np.array([1 / 32], np.float16).view(np.uint8)
        blocks.append(np.concatenate([low.ravel(), high.ravel(), scales, step]))
    return np.stack(blocks).reshape(*values.shape[:-1], -1)


def test_q6_k(tmp_path):
    values = np.random.default_rng(0).uniform(-1, 0.96, size=(4, 512)).astype(np.float32)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("output.weight", q6_k(values), raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GgufFile(path).read("lm_head.weight", (slice(None), slice(None)))
    np.testing.assert_allclose(read, values, atol=1 / 64)


def test_unsupported_block_format(tmp_path):
    config, tensors = random_model()
    name = "model.layers.0.mlp.up_proj.weight"
    path = write(tmp_path / "m.gguf", config, tensors, kinds={name: "TQ2_0"})
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight of .*m\.gguf .* TQ2_0"):
        load_model(path)


def test_llama3_rope_scaling_is_found_in_the_divisors(tmp_path):
    config, tensors, _ = golden("llama")
    scaling = RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=8192
    )
    frequencies = 500000.0 ** -(np.arange(0, 8, 2) / 8)
    divisors = []
    for wavelength in 2 * np.pi / frequencies:  # as the converter writes them
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / 32 + smooth))
    assert sorted(divisors) == divisors
    assert divisors[0] == 1.0
    assert divisors[-1] == 32.0
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    expected = ModelConfig(**{**values, "rope_theta": 500000.0, "rope_scaling": scaling})
    stored = {**tensors, "rope_freqs.weight": np.array(divisors, np.float32)}
    file = GgufFile(write(tmp_path / "m.gguf", expected, stored))
    assert file.config == expected
    assert load_params(file, file.config)
    stored["rope_freqs.weight"] = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    with pytest.raises(ValueError, match="rope_freqs"):
        assert GgufFile(write(tmp_path / "n.gguf", expected, stored)).config


@for_each(
    ("extra", "factor"),
    [
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.factor": 2.5}, 2.5),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, 2.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, 8.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 8.0}, None),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scale_linear": 1.0}, None),
        ({"rope.scaling.factor": 0.0}, None),
    ],
)
def test_linear_rope_scaling_as_llama_cpp_reads_it(new_folder, extra, factor):
    """An absent type is linear, and the older name of the factor counts where the other lacks."""
    tmp_path = new_folder()
    config, tensors, _ = golden("llama")
    extra = {f"llama.{key}": value for key, value in extra.items()}
    read = GgufFile(write(tmp_path / "m.gguf", config, tensors, extra=extra)).config
    assert read.rope_scaling == (None if factor is None else LinearScaling(factor=factor))


Q, EMBEDDING = "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"
BIAS = {"model.layers.0.mlp.gate_proj.bias": np.ones(48, np.float32)}
NARROW = {"model.layers.0.mlp.down_proj.weight": np.ones((32, 40), np.float32)}


DIVISORS = {"rope_freqs.weight": np.ones(4, np.float32)}


def extra(key, value):
    return {"extra": {f"llama.{key}": value}}


@for_each(
    ("tensors", "options", "words"),
    [
        ({Q: None}, {}, r"m\.gguf lacks the tensor blk\.1\.attn_q\.weight"),
        ({EMBEDDING: None}, {}, r"lacks the tensor token_embd\.weight"),
        (BIAS, {}, r"blk\.0\.ffn_gate\.bias.*no place"),
        (NARROW, {}, r"blk\.0\.ffn_down\.weight .*m\.gguf has shape \(32, 40\), .* \(32, 48\)"),
        ({}, extra("rope.scaling.type", "yarn"), "'yarn' rope scaling"),
        (DIVISORS, extra("rope.scaling.factor", 4.0), r"scaling by 4\.0 beside .* rope_freqs"),
        ({}, extra("attention.sliding_window", 16), "sliding-window attention over 16"),
        ({}, extra("rope.dimension_count", 4), r"rope\.dimension_count .* is 4, .* 8"),
        ({}, {"metadata": False}, r"m\.gguf lacks the metadata 'llama\."),
    ],
)
def test_what_is_not_the_decoder_s_is_named(new_folder, tensors, options, words):
    tmp_path = new_folder()
    config, whole, _ = golden("llama")
    tensors = {name: x for name, x in (whole | tensors).items() if x is not None}
    path = write(tmp_path / "m.gguf", config, tensors, **options)
    with pytest.raises(ValueError, match=words):
        load_model(path)


@for_each("name", ["mamba", "gemma2", "smollm3"])
def test_unknown_architecture(new_folder, name):
    tmp_path = new_folder()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=f"{name!r}, which is not read from GGUF; .*llama, qwen2"):
        load_model(tmp_path / "m.gguf")


@for_each("keep", [0, 3, 40, 300, 4000, -7, None])
def test_truncated_file_and_other_bytes(new_folder, keep):
    tmp_path = new_folder()
    config, tensors, _ = golden("llama")
    whole = write(tmp_path / "m.gguf", config, tensors).read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"not a model at all" * 100 if keep is None else whole[:keep])
    with pytest.raises(ValueError, match=r"cut\.gguf is not a readable GGUF file"):
        load_model(path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.gguf"):
        GgufFile(tmp_path / "no.gguf")


def test_a_changed_file_is_read_anew(tmp_path):
    config, tensors, _ = golden("llama")
    path = write(tmp_path / "m.gguf", config, tensors)
    first = open_gguf(path)
    assert open_gguf(path) is first
    del tensors["lm_head.weight"]
    write(path, config, tensors)
    assert open_gguf(path).config.tied


def test_names():
    assert hugging_face_name("blk.12.ffn_down.bias") == "model.layers.12.mlp.down_proj.bias"
    assert hugging_face_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"
    config, tensors, _ = golden("qwen3")
    assert all(hugging_face_name(gguf_name(name)) == name for name in tensors)
    assert config.qk_norm
    assert SafetensorsFolder(GOLDEN / "qwen3").names() == set(tensors)
