"""An adapter in PEFT's format: names, orientation and settings, by hand.

PEFT 0.21.2 loads such folders of models without experts and computes what this package does; it is
no dependency of tests.
"""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest
from rows import for_each
from safetensors.numpy import load_file

from jaxrl_llm.models import ExpertsConfig, LayerKind, save_safetensors
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import LoRAConfig, init_lora, save_adapter


def saved(tmp_path, **options):
    model, params = tiny_model()
    lora = LoRAConfig(rank=2, **options)
    adapter = init_lora(params, lora)
    adapter = jax.tree.map(lambda x: x + np.arange(x.size).reshape(x.shape), adapter)
    save_adapter(adapter, tmp_path, lora=lora, config=model.config, base="owner/name")
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    return adapter, load_file(tmp_path / "adapter_model.safetensors"), settings


def test_names_and_orientation(tmp_path):
    adapter, tensors, settings = saved(tmp_path, alpha=6.0)
    name = "base_model.model.model.layers.1.self_attn.k_proj.lora_{}.weight"
    pair = adapter["layers"]["1"]["attention"]["k"]
    np.testing.assert_array_equal(tensors[name.format("A")], pair["a"].T)
    np.testing.assert_array_equal(tensors[name.format("B")], pair["b"].T)
    assert tensors[name.format("A")].shape == (2, 32) and len(tensors) == 2 * 7 * 2
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (2, 6.0, "LORA")
    assert settings["base_model_name_or_path"] == "owner/name"
    short = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
    assert settings["target_modules"] == short.split()


EXPERTS = ExpertsConfig(count=4, active=2, width=16, shared=16)


def test_a_shared_expert_is_named_in_full_and_its_gate_has_no_adapter(tmp_path):
    """Short names would also be those of the experts; a gate of one output has no rank 2."""
    model, params = tiny_model(num_layers=1, architecture="qwen3_5_moe_text", experts=EXPERTS)
    lora = LoRAConfig(rank=2, targets=("shared",))
    adapter = init_lora(params, lora)
    assert "shared_gate" not in adapter["layers"]["0"]["mlp"]
    save_adapter(adapter, tmp_path, lora=lora, config=model.config)
    names = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert len(names) == 3 and all("shared_expert." in name for name in names)


def lora(*targets):
    return LoRAConfig(rank=2, targets=targets)


ONE, TWO = {"num_layers": 1}, LoRAConfig(rank=2)
SHARED = {"architecture": "qwen3_next", "experts": EXPERTS}
DENSE_FIRST = {"layers": (LayerKind(dense=True), LayerKind()), "architecture": "qwen3_moe"}
DENSE_FIRST |= {"experts": dataclasses.replace(EXPERTS, shared=None)}
GATED, Q, K = {"output_gate": True}, "'layers/0/attention/q'", "'layers/0/attention/k'"


@for_each(
    ("options", "changes", "adapted", "told", "message"),
    [
        # PEFT moves these names to parameters of the experts, and then ignores the tensors.
        (SHARED, {}, lora("shared"), {}, "no adapter for '.*mlp/shared/down'.*; save the merged"),
        (DENSE_FIRST, {}, lora("layers/0"), {}, "no adapter for 'layers/0/mlp/down'.*; save the"),
        # Two parts of one layer in transformers.
        (GATED, {}, TWO, {}, "'layers/0/attention/gate' alone, .* of '.*q_proj.weight"),
        # An adapter of another model.
        (ONE, {"num_layers": 2}, TWO, {}, "no linear layer 'layers/1/attention/k'"),
        (ONE, {"num_heads": 8}, lora("q$"), {}, rf"b of {Q} has shape \(2, 64\), .* \(2, 32\)"),
        # PEFT would not load another rank, or would multiply it by another factor.
        (ONE, {}, TWO, {"rank": None}, "the configuration has no rank"),
        (ONE, {}, TWO, {"rank": 4}, rf"a of {K} has shape \(32, 2\), but rank 4 .* \(32, 4\)"),
    ],
)
def test_what_peft_would_not_apply_is_refused(tmp_path, options, changes, adapted, told, message):
    """A model, what is another in that of the adapter, its configuration, and the one told."""
    model, _ = tiny_model(**options)
    adapter = init_lora(tiny_model(**options | changes)[1], adapted)
    told = dataclasses.replace(adapted, **told)
    with pytest.raises(ValueError, match=f"save_adapter: .*{message}"):
        save_adapter(adapter, tmp_path / "new", lora=told, config=model.config)
    assert not (tmp_path / "new").exists()


@for_each(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_exported_files_have_one_mode(new_folder, umask, mode):
    tmp_path = new_folder()
    before = os.umask(umask)
    try:
        model, params = tiny_model(num_layers=1)
        for _ in range(2):  # the second time over the files of the first
            saved(tmp_path / "adapter")
            save_safetensors(params, tmp_path / "one", config=model.config)
            save_safetensors(params, tmp_path / "several", config=model.config, file_bytes=20_000)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 6
    assert {path.stat().st_mode & 0o777 for path in files} == {mode}


def test_layers_without_an_adapter_are_left_out(tmp_path):
    _, tensors, settings = saved(tmp_path, targets=("layers/1/attention/q$",))
    assert settings["target_modules"] == ["model.layers.1.self_attn.q_proj"]
    assert len(tensors) == 2
