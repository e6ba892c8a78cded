"""Parameters written as a Hugging Face folder, and read back by our own loader."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from rows import for_each
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models import (
    AttentionContext,
    LayerKind,
    LinearScaling,
    ModelConfig,
    RopeScaling,
    YarnScaling,
    export,
    load_model,
    load_reward_model,
    save_safetensors,
    with_adapter,
    with_head,
)
from jaxrl_llm.models.export import hf_config
from jaxrl_llm.models.heads import head_of
from jaxrl_llm.models.lora import LoRAConfig
from jaxrl_llm.models.peft import save_adapter
from jaxrl_llm.models.safetensors import SafetensorsFolder
from jaxrl_llm.models.sharding import param_shardings, shard
from jaxrl_llm.testing import tiny_config, tiny_model
from jaxrl_llm.train import make_mesh

GOLDEN = Path(__file__).parents[1] / "golden" / "logits"
NAMES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
SHAPES = {
    "tied": {},
    "untied": {"tied": False},
    "qwen2": {"architecture": "qwen2", "attention_bias": True},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "head_dim": 16, "tied": False},
    "mlp_bias": {"mlp_bias": True},
    "llama3": {
        "rope_theta": 5e5,
        "norm_eps": 1e-5,
        "rope_scaling": RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=64
        ),
    },
    "linear": {"rope_scaling": LinearScaling(factor=4.0)},
    "one_cap": {
        "architecture": "gemma2",
        "layers": (LayerKind(), LayerKind(window=9)),
        "norm_placement": "both",
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "embedding_scale": 32**0.5,
        "query_scale": 24**-0.5,
        "attention_cap": 20.0,
    },
    "yarn": {
        "rope_scaling": YarnScaling(
            factor=4.0, original_max_length=64, attention_factor=1.1, truncate=False
        )
    },
}


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@for_each("name", SHAPES)
def test_what_is_written_is_read_back(new_folder, name):
    tmp_path = new_folder()
    model, params = tiny_model(num_layers=2, **SHAPES[name])
    save_safetensors(params, tmp_path, config=model.config)
    again, found = load_model(tmp_path)
    assert again.config == model.config
    assert_same(found, params)


@pytest.mark.of_many
@pytest.mark.parametrize("name", NAMES)
def test_the_tensors_are_those_that_transformers_wrote(tmp_path, name):
    model, params = load_model(GOLDEN / name)
    save_safetensors(params, tmp_path, config=model.config)
    wrote, given = SafetensorsFolder(tmp_path), SafetensorsFolder(GOLDEN / name)
    extra = given.names() - wrote.names()
    assert wrote.names() <= given.names() and extra <= {"lm_head.weight"}
    for tensor in wrote.names():
        index = [slice(None)] * len(given.shape(tensor))
        a, b = wrote.read(tensor, index), given.read(tensor, index)
        np.testing.assert_array_equal(a, b.astype(np.float32))
    theirs = json.loads((GOLDEN / name / "config.json").read_text())
    ours = json.loads((tmp_path / "config.json").read_text())
    same = ("architectures", "model_type", "hidden_size", "num_key_value_heads", "vocab_size")
    assert {k: ours[k] for k in same} == {k: theirs[k] for k in same}


def test_another_file_begins_where_one_is_full(tmp_path):
    model, params = tiny_model(num_layers=2)
    save_safetensors(params, tmp_path, config=model.config, file_bytes=20_000)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    sizes = [sum(x.nbytes for x in load_file(tmp_path / name).values()) for name in names]
    assert index["metadata"]["total_size"] == sum(sizes)
    largest = max(x.nbytes for x in jax.tree.leaves(params))
    assert max(sizes) <= max(20_000, largest)
    assert_same(load_model(tmp_path)[1], params)


def changed(params):
    return jax.tree.map(lambda x: x + 1, params)


@for_each(("before", "after"), [(20_000, None), (20_000, 40_000), (None, 20_000)])
def test_a_folder_holds_one_model(new_folder, before, after):
    """Of the one that was there before nothing is left to be read instead."""
    tmp_path = new_folder()
    model, params = tiny_model(num_layers=2)
    for weights, size in ((params, before), (changed(params), after)):
        options = {} if size is None else {"file_bytes": size}
        save_safetensors(weights, tmp_path, config=model.config, **options)
    (tmp_path / "tokenizer.json").touch()  # not ours
    assert_same(load_model(tmp_path)[1], changed(params))
    save_safetensors(params, tmp_path / "alone", config=model.config, **options)
    expected = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == expected | {"alone", "tokenizer.json"}


class Killed(BaseException):
    pass


@for_each("sizes", [(20_000, 10**9), (10**9, 20_000)])
def test_a_save_that_ends_early_leaves_no_mix(new_folder, monkeypatch, sizes):
    tmp_path = new_folder()
    model, params = tiny_model(num_layers=1)
    other = tiny_config(num_layers=1, norm_eps=1e-3)  # of the same shapes
    done, last = [], [0]

    def stop_after(function):
        def stopped(*args, **kwargs):
            if len(done) == last[0]:
                raise Killed
            done.append(function)
            return function(*args, **kwargs)

        return stopped

    seen = set()
    for last[0] in range(100):
        folder = tmp_path / str(last[0])
        save_safetensors(params, folder, config=model.config, file_bytes=sizes[0])
        done.clear()
        with monkeypatch.context() as patch:
            patch.setattr(export, "save_tensors", stop_after(export.save_tensors))
            for name in ("write_text", "unlink", "replace"):
                patch.setattr(Path, name, stop_after(getattr(Path, name)))
            try:
                save_safetensors(changed(params), folder, config=other, file_bytes=sizes[1])
                killed = False
            except Killed:
                killed = True
        try:
            loaded, found = load_model(folder)
        except FileNotFoundError:
            seen.add("nothing")
            continue
        new = loaded.config == other
        assert_same(found, changed(params) if new else params)
        seen.add("new" if new else "old")
        if not killed:
            break
    assert new and seen == {"old", "nothing", "new"}


def test_bfloat16_is_rounded_once(tmp_path):
    model, params = tiny_model(num_layers=1)
    save_safetensors(params, tmp_path, config=model.config, dtype="bfloat16")
    stored = load_file(tmp_path / "model.safetensors")
    assert {x.dtype for x in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert_same(load_model(tmp_path)[1], rounded)


def test_parameters_of_a_mesh_are_whole(tmp_path):
    model, params = tiny_model(num_layers=1)
    spread = shard(params, param_shardings(params, make_mesh(fsdp=2, tensor=2, data=2)))
    save_safetensors(spread, tmp_path, config=model.config)
    assert_same(load_model(tmp_path)[1], params)


def test_what_is_not_the_model_is_refused(tmp_path):
    model, params = tiny_model(num_layers=1)
    without = {k: v for k, v in params.items() if k != "norm"}
    for changed, dtype, message in [
        (without, "float32", "norm/scale is missing, but the configuration asks for"),
        (params | {"norm": {"scale": jnp.ones(3)}}, "float32", "norm/scale has shape"),
        (
            params | {"delta": {"a": jnp.ones(3)}},
            "float32",
            "no parameter delta/a .* merge an adapter first",
        ),
        (params, "int8", "save_safetensors: dtype must be one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            save_safetensors(changed, tmp_path / "new", config=model.config, dtype=dtype)
    assert not (tmp_path / "new").exists()


def test_an_adapter_is_merged_before_a_save(tmp_path):
    lora, (model, params) = LoRAConfig(rank=2), tiny_model(num_layers=1)
    policy, adapted = with_adapter(model, params, lora)
    _, scorer = with_head(policy, adapted, key=jax.random.key(0))
    told = "save_safetensors: the parameters have an adapter; merge it first, with "
    for changed, head, how in (
        (adapted, None, "train.merge_lora"),
        (scorer, "response", "models.heads.merge_headed"),
    ):
        with pytest.raises(ValueError, match=told + how):
            save_safetensors(changed, tmp_path / "new", config=model.config, head=head)
    assert not (tmp_path / "new").exists()


@for_each(
    ("kinds", "acting"),
    [
        ((LayerKind(), LayerKind()), None),
        ((LayerKind(window=256), LayerKind()), None),
        ((LayerKind(window=9), LayerKind(window=300)), (LayerKind(window=9), LayerKind())),
    ],
)
def test_layers_are_stored_as_what_they_compute(new_folder, kinds, acting):
    tmp_path = new_folder()
    shape = {"architecture": "qwen3", "qk_norm": True, "layers": kinds}
    model, params = tiny_model(num_layers=2, max_length=256, **shape)
    save_safetensors(params, tmp_path, config=model.config)
    again, read = load_model(tmp_path)
    assert again.config == dataclasses.replace(model.config, layers=acting)
    assert_same(read, params)
    if acting is None:
        return
    tokens = jnp.arange(12)[None, None]
    context = AttentionContext(jnp.ones(tokens.shape, bool))
    ours, theirs = (jax.jit(x.apply)(params, tokens, tokens, context)[0] for x in (model, again))
    np.testing.assert_array_equal(ours, theirs)


def test_a_model_of_ones_own_has_no_form_of_hugging_face(tmp_path):
    config, folder = SimpleNamespace(vocab_size=1), tmp_path / "new"
    message = "only models of the built-in decoder have a Hugging Face form; got a model with a Si"
    with pytest.raises(ValueError, match=f"save_safetensors: {message}mpleNamespace config"):
        save_safetensors({}, folder, config=config)
    with pytest.raises(ValueError, match=f"save_adapter: {message}"):
        save_adapter({}, folder, lora=LoRAConfig(rank=1), config=config)
    assert not folder.exists()


@for_each(
    ("changes", "message"),
    [
        ({"qk_norm": True}, "no llama model with qk_norm True, only with False"),
        ({"architecture": "qwen3", "qk_norm": False}, "no qwen3 model with qk_norm False"),
        ({"attention_bias": True}, "transformers has no such model: .*attention_bias"),
        ({"attention_cap": 50.0}, "no llama model with attention_cap 50.0, only with None"),
        ({"logit_cap": 30.0}, "no llama model with logit_cap 30.0, only with None"),
    ],
)
def test_a_shape_that_transformers_cannot_compute_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        hf_config(tiny_config(**changes))


@for_each("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_all_dimensions_are_rotated_where_a_class_rotates_a_quarter(name):
    settings = json.loads((GOLDEN / name / "config.json").read_text())
    config = dataclasses.replace(ModelConfig.from_hf(settings), rotary_dim=None)
    written, share = hf_config(config), "partial_rotary_factor"
    assert written[share] == written["rope_parameters"][share] == 1.0
    again = ModelConfig.from_hf(written)
    assert again.rotary_dim is None
    assert hf_config(again) == written


@for_each("tied", [True, False])
def test_a_language_model_is_saved_as_a_reward_model_only_with_a_head(new_folder, tied):
    tmp_path = new_folder()
    model, params = tiny_model(num_layers=1, tied=tied)
    message = "head 'response' needs the parameters of models.with_head, .*; got embed, .*norm"
    with pytest.raises(ValueError, match=f"save_safetensors: {message}"):
        save_safetensors(params, tmp_path / "new", config=model.config, head="response")
    assert not (tmp_path / "new").exists()


def scorer(name):
    model, params = load_model(GOLDEN / name)
    return model.config, with_head(model, params, key=jax.random.key(0))[1]


@for_each(
    ("name", "head", "expected"),
    [
        ("gemma2", "step", "Gemma2ForTokenClassification"),
        ("gemma3", "response", "Gemma3TextForSequenceClassification"),
        ("olmo3", "response", "Olmo3ForSequenceClassification"),
        ("qwen3_5", "response", "Qwen3_5TextForSequenceClassification"),
        ("qwen3_next", "step", "Qwen3NextForTokenClassification"),
    ],
)
def test_a_reward_model_has_the_class_of_transformers(new_folder, name, head, expected):
    tmp_path = new_folder()
    config, params = scorer(name)
    save_safetensors(params, tmp_path, config=config, head=head)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["architectures"] == [expected]
    _, again = load_reward_model(tmp_path)
    assert_same(again["head"]["kernel"], params["head"]["kernel"])
    body = {k: x for k, x in params["model"].items() if k != "head"}
    assert_same(again["model"], body)


@for_each(
    ("name", "head"),
    [
        ("gemma3", "step"),
        ("olmo2", "step"),
        ("olmo3", "step"),
        ("qwen3_5", "step"),
        ("qwen3_5_moe", "response"),
        ("qwen3_5_moe", "step"),
    ],
)
def test_a_head_that_transformers_has_no_class_for_loads_here(new_folder, name, head):
    """A run that trained it for hours is not lost."""
    tmp_path = new_folder()
    config, params = scorer(name)
    with pytest.warns(UserWarning, match="transformers has no class '.*Classification', so it"):
        save_safetensors(params, tmp_path, config=config, head=head)
    assert head_of(tmp_path) == head
    model, again = load_reward_model(tmp_path)
    assert model.config == dataclasses.replace(config, tied=True)
    assert_same(again["head"]["kernel"], params["head"]["kernel"])
    assert_same(again["model"], {k: x for k, x in params["model"].items() if k != "head"})


def test_a_denoiser_has_no_head(tmp_path):
    changes = {"architecture": "qwen3", "qk_norm": True, "causal": False}
    model, params = tiny_model(num_layers=1, **changes)
    _, params = with_head(model, params, key=jax.random.key(0))
    with pytest.raises(ValueError, match="no class of 'a2d-qwen3' with head 'response'"):
        save_safetensors(params, tmp_path, config=model.config, head="response")


@for_each("kind", ["Sequence", "Token"])
def test_a_reward_model_on_a_model_of_images_and_text(new_folder, kind):
    """Its decoder is the one of texts, as of the language model that it was trained from."""
    tmp_path = new_folder()
    config, params = scorer("qwen3_5")
    settings = json.loads((GOLDEN / "qwen3_5" / "config.json").read_text())
    settings = {"architectures": [f"Qwen3_5For{kind}Classification"], "text_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": "qwen3_5"}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): x
        for name, x in load_file(GOLDEN / "qwen3_5" / "model.safetensors").items()
        if name != "lm_head.weight"
    }
    tensors["model.visual.patch.weight"] = np.zeros((2, 2), np.float32)
    tensors["score.weight"] = np.asarray(params["head"]["kernel"]).T.copy()
    if kind == "Token":
        tensors["score.bias"] = np.ones(1, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    model, again = load_reward_model(tmp_path)
    assert model.config.architecture == "qwen3_5_text" and model.config.tied
    assert_same(again["model"], params["model"])
    assert_same(again["head"]["kernel"], params["head"]["kernel"])


@for_each(
    ("name", "head", "before"),
    [
        ("gemma3", "response", "Gemma3ForSequenceClassification"),
        ("qwen3_5", "response", "Qwen3_5ForSequenceClassification"),
    ],
)
def test_reward_models_of_earlier_exports_load(new_folder, name, head, before):
    """They name the class of a model of images and text, but hold the settings of a decoder."""
    tmp_path = new_folder()
    config, params = scorer(name)
    save_safetensors(params, tmp_path, config=config, head=head)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [before]}))
    assert load_reward_model(tmp_path)[0].config.architecture == config.architecture
