"""Expert matrices that are stored as MXFP4 are read as the numbers that they stand for."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from rows import for_each
from safetensors.numpy import load_file, save_file

import jaxrl_llm as jr
from jaxrl_llm.models import ExpertsConfig, LayerKind, load_model, save_safetensors
from jaxrl_llm.models.mxfp4 import FP4, Mxfp4Folder, dequantize, open_folder
from jaxrl_llm.models.safetensors import SafetensorsFolder
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train.mesh import make_mesh

GOLDEN = Path(__file__).parents[1] / "golden" / "mxfp4.json"


def test_every_code_and_the_order_of_the_halves():
    codes = np.arange(16, dtype=np.uint8)
    blocks = np.stack([codes | codes[::-1] << 4] * 2)
    one, eighth = dequantize(blocks, np.array([127, 124], np.uint8)).reshape(2, 32)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    np.testing.assert_array_equal(one[0::2], values)
    np.testing.assert_array_equal(one[1::2], values[::-1])
    np.testing.assert_array_equal(eighth, one / 8)


def test_equals_transformers():
    golden = json.loads(GOLDEN.read_text())
    blocks, scales = (np.array(golden[name], np.uint8) for name in ("blocks", "scales"))
    assert len(np.unique(np.stack([blocks & 15, blocks >> 4]))) == 16
    got = dequantize(blocks, scales).swapaxes(1, 2)
    np.testing.assert_array_equal(got, np.array(golden["values"], np.float32))


def pack(values):
    """Packed form of matrices ``[E, in, out]``, rounded to the nearest number that there is."""
    # Contiguous, as files are written from memory.
    values = np.ascontiguousarray(values.swapaxes(1, 2))
    groups = values.reshape(*values.shape[:2], -1, 32)
    largest = np.abs(groups).max(axis=-1)
    exponents = np.ceil(np.log2(largest / 6.0)).astype(int)
    codes = np.abs((groups / 2.0 ** exponents[..., None])[..., None] - FP4).argmin(-1)
    codes = codes.astype(np.uint8).reshape(*codes.shape[:-1], 16, 2)
    return codes[..., 0] | codes[..., 1] << 4, (exponents + 127).astype(np.uint8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of gpt-oss with packed experts, the same with their numbers, and the config."""
    root = tmp_path_factory.mktemp("mxfp4")
    experts = ExpertsConfig(count=4, active=2, width=64, bias=True, limit=7.0)
    model, params = tiny_model(
        architecture="gpt_oss",
        experts=experts,
        layers=(LayerKind(window=8), LayerKind()),
        num_layers=2,
        sinks=True,
        attention_bias=True,
        output_bias=True,
        tied=False,
    )
    plain, packed = root / "plain", root / "packed"
    save_safetensors(params, plain, config=model.config)
    shutil.copytree(plain, packed)
    tensors = load_file(plain / "model.safetensors")
    numbers, stored = dict(tensors), dict(tensors)
    for name in [x for x in tensors if x.endswith(("gate_up_proj", "down_proj"))]:
        stored.pop(name)
        blocks, scales = pack(np.asarray(tensors[name], np.float32))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = np.ascontiguousarray(dequantize(blocks, scales).swapaxes(1, 2))
    assert len(stored) == len(tensors) + 4  # two matrices of each of two layers
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    return plain, packed


def test_a_model_is_that_of_the_numbers(folders):
    (_, plain), (model, packed) = (load_model(folder) for folder in folders)
    assert jax.tree.structure(plain) == jax.tree.structure(packed)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(packed), strict=True):
        np.testing.assert_array_equal(a, b)
    kernel = packed["layers"]["0"]["mlp"]["experts"]["gate"]["kernel"]
    assert kernel.shape == (4, 32, 64) and len(np.unique(np.abs(kernel))) >= 10
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    _, spread = load_model(folders[1], mesh=mesh)
    for a, b in zip(jax.tree.leaves(packed), jax.tree.leaves(spread), strict=True):
        np.testing.assert_array_equal(a, b)
    _, half = load_model(folders[1], dtype="bfloat16")
    half = half["layers"]["0"]["mlp"]["experts"]["gate"]["kernel"]
    np.testing.assert_array_equal(np.asarray(half, np.float32), kernel)  # exact there too
    assert model.config.experts.count == 4


def test_any_slice_is_that_of_the_whole(folders):
    source = open_folder(folders[1])
    (name,) = [x for x in source.names() if x.endswith("0.mlp.experts.down_proj")]
    assert source.shape(name) == (4, 64, 32) and source.label(name) == f"{name}_blocks"
    whole = source.read(name, (slice(None),) * 3)
    for inputs in (slice(0, 0), slice(3, 9), slice(30, 34), slice(32, None), slice(63, 64)):
        index = slice(1, 3), inputs, slice(5, 20)
        np.testing.assert_array_equal(source.read(name, index), whole[index])
    assert isinstance(open_folder(folders[0]), SafetensorsFolder)


@for_each(
    ("change", "message"),
    [
        (lambda x: x.pop("scales"), "has model.*_blocks but not model.*_scales"),
        (lambda x: x.update(scales=x["scales"][:, :1]), r"one for each group; got \(4, 128, 1, 16"),
        (lambda x: x.update(blocks=x["blocks"][..., :8]), "groups, 16]"),
        (lambda x: x.update(scales=np.full_like(x["scales"], 255)), "a scale of 255, NaN"),
        (lambda x: x.update(scales=x["scales"].astype(np.float32)), "is F32, not U8"),
    ],
)
def test_damaged_matrices_are_named(folders, new_folder, change, message):
    tmp_path = new_folder()
    folder = tmp_path / "model"
    shutil.copytree(folders[1], folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    parts = {end: tensors.pop(f"{name}_{end}") for end in ("blocks", "scales")}
    change(parts)
    tensors |= {f"{name}_{end}": np.ascontiguousarray(x) for end, x in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_a_packed_model_runs_and_is_saved_as_numbers(folders, tmp_path):
    model, params = load_model(folders[1])
    save_safetensors(params, tmp_path, config=model.config)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert not isinstance(open_folder(tmp_path), Mxfp4Folder)
    _, again = load_model(tmp_path)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    tokens = np.ones((1, 1, 4), np.int32)
    context = jr.models.AttentionContext(mask=tokens > 0)
    hidden, _ = jax.jit(model.apply)(params, tokens, tokens, context)
    assert np.isfinite(hidden).all()
