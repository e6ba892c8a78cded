"""The safetensors path, what is checked before a tensor is read, and loading onto a mesh."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from rows import for_each
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models import loading
from jaxrl_llm.models.loading import (
    load_model,
    load_params,
    read_config,
)
from jaxrl_llm.models.names import resolve
from jaxrl_llm.models.protocol import cast_params
from jaxrl_llm.models.safetensors import SafetensorsFolder, read_json
from jaxrl_llm.models.sharding import param_shardings
from jaxrl_llm.models.transformer import param_shapes

GOLDEN = Path(__file__).parents[1] / "golden" / "logits"
NAMES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())


@pytest.fixture
def folder(tmp_path):
    """A copy of the golden llama that a test may break."""
    target = tmp_path / "model"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "llama" / name, target / name)
    return target


def change(folder, **changes):
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def shard(folder):
    """Splits the weights into two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {name: files[number % 2] for number, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({n: v for n, v in tensors.items() if where[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return files


def equal(a, b):
    same = jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(jax.tree.leaves(same))


@for_each("name", NAMES)
def test_the_table_is_the_decoder_s_own_tree(name):
    model, params = load_model(GOLDEN / name)
    shapes = param_shapes(model)
    assert jax.tree.structure(params) == jax.tree.structure(shapes)
    assert jax.tree.map(lambda x: x.shape, params) == jax.tree.map(lambda x: x.shape, shapes)


def test_a_configuration_without_weights(folder):
    config = load_model(folder, dtype="bfloat16")[0].config
    (folder / "model.safetensors").unlink()
    files = resolve(folder, weights=False)
    assert read_config(files.config, dtype="bfloat16") == config
    files.config.write_text("{}")
    with pytest.raises(ValueError, match=r"\(in .*config\.json\)"):
        read_config(files.config)


def test_matrices_come_in_their_own_dtype(folder):
    model, params = load_model(folder, dtype="float32", matrices="bfloat16")
    whole = load_model(folder)[1]
    half = model._replace(config=dataclasses.replace(model.config, dtype="bfloat16"))
    assert equal(params, cast_params(half, whole))
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.dtype == b.dtype, params, cast_params(half, whole))
    )
    again = cast_params(half, params)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (again, params)), strict=True))


def test_one_file_is_read_and_not_the_shards_beside_it(folder):
    """As transformers does: shards and index may be left from an earlier save."""
    new, content = load_model(folder)[1], (folder / "model.safetensors").read_bytes()
    change(folder, model__norm__weight=np.zeros(32, np.float32))
    files = shard(folder)
    assert not equal(load_model(folder)[1], new)
    (folder / "model.safetensors").write_bytes(content)
    assert equal(load_model(folder)[1], new)
    for file in files:
        (folder / file).unlink()
    assert equal(load_model(folder)[1], new)


def test_dtype_of_parameters_and_products(folder):
    model, params = load_model(folder, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert model.config.dtype == "bfloat16"
    with pytest.raises(ValueError, match="int8"):
        load_model(folder, dtype="int8")


class Recorder:
    """A source that notes what is read of it."""

    def __init__(self, source):
        self.source, self.path, self.reads = source, source.path, []

    def names(self):
        return self.source.names()

    def label(self, name):
        return self.source.label(name)

    def shape(self, name):
        return self.source.shape(name)

    def read(self, name, index):
        array = self.source.read(name, index)
        self.reads.append((name, array.size))
        return array


def test_a_mesh_reads_every_slice_once_and_equals_one_device(folder):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    model, params = load_model(folder)
    source = Recorder(SafetensorsFolder(folder))
    shardings = param_shardings(param_shapes(model), mesh)
    spread = load_params(source, model.config, shardings=shardings)
    assert equal(params, spread)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert sorted(size for read, size in source.reads if read == name) == [256] * 4
    total = sum(size for _, size in source.reads)
    assert total == sum(leaf.size for leaf in jax.tree.leaves(params))
    kernel = spread["layers"]["0"]["attention"]["q"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (16, 16)


@for_each(
    ("tensor", "value", "words"),
    [
        (
            "model__layers__1__self_attn__k_proj__weight",
            None,
            r"model lacks the tensor model\.layers\.1\.self_attn\.k_proj\.weight",
        ),
        (
            "model__norm__weight",
            np.ones(31, np.float32),
            r"model\.norm\.weight .*\(31,\), .* \(32,\)",
        ),
        ("model__norm__weight", np.ones(32, np.int8), r"model\.norm\.weight of .* is I8"),
        (
            "model__layers__0__self_attn__sinks",
            np.ones(4, np.float32),
            r"self_attn\.sinks, .*no place for \(1 such\)",
        ),
    ],
)
def test_a_tensor_that_is_not_the_model_s_is_named(folder, new_folder, tensor, value, words):
    folder = shutil.copytree(folder, new_folder() / "model")
    change(folder, **{tensor: value})
    with pytest.raises(ValueError, match=words):
        load_model(folder)


def test_old_files_may_hold_rotary_frequencies(folder):
    change(folder, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(4, np.float32))
    assert load_model(folder)


def test_a_tied_head_may_be_stored_too(tmp_path, monkeypatch):
    """As a copy of the embedding; transformers does not tie another matrix, whatever it is told."""
    monkeypatch.setattr(loading, "_COMPARED_BYTES", 24 * 4 * 10)  # ten rows of 64
    shutil.copytree(GOLDEN / "smollm2", tmp_path / "m")
    copy = load_file(tmp_path / "m" / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path / "m", lm_head__weight=copy)
    _, params = load_model(tmp_path / "m")
    assert "head" not in params
    other = copy.copy()
    other[-1, -1] += 1
    for head in (other, copy[:-1]):
        change(tmp_path / "m", lm_head__weight=head)
        told = r"m holds a lm_head\.weight that differs from .*set `tie_word_embeddings: false` in"
        with pytest.raises(ValueError, match=told):
            load_model(tmp_path / "m")


@for_each("keep", [0, 5, 100, -9])
def test_truncated_file(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors file"):
        load_model(folder)


def test_missing_and_wrong_shards(folder):
    files = shard(folder)
    (folder / files[1]).rename(folder / "away")
    with pytest.raises(FileNotFoundError, match=files[1]):
        load_model(folder)
    (folder / "away").rename(folder / files[1])
    index = folder / "model.safetensors.index.json"
    entries = json.loads(index.read_text(encoding="utf-8"))
    moved = next(name for name, file in entries["weight_map"].items() if file == files[0])
    for weight_map, words in [
        (entries["weight_map"] | {moved: files[1]}, f"{files[1]} lacks the tensor {moved}"),
        (entries["weight_map"] | {moved: "../other.safetensors"}, "outside its folder"),
        (None, "lacks its `weight_map`"),
    ]:
        index.write_text(json.dumps(entries | {"weight_map": weight_map}), encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            load_model(folder)


def test_broken_config(folder):
    falcon = read_json(folder / "config.json") | {"architectures": ["FalconForCausalLM"]}
    for text, words in [
        ("{", r"config\.json is not valid JSON"),
        ("[]", r"config\.json must hold a JSON object, got list"),
        (json.dumps(falcon), r"FalconForCausalLM.*LlamaForCausalLM.*config\.json"),
    ]:
        (folder / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            load_model(folder)
    with pytest.raises(FileNotFoundError, match="none"):
        read_json(folder / "none")
