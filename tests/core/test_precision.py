"""The dtype that a machine multiplies fastest, from what its operating system says."""

import dataclasses
import types

import jax
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.core.runtime import precision
from jaxrl_llm.core.runtime.precision import fastest_dtype
from jaxrl_llm.train import DataConfig, TrainConfig
from jaxrl_llm.train.logging.settings import changed_settings, settings


@for_each(
    ("flags", "dtype"),
    [
        ("fpu avx2 avx512f avx512_bf16", "bfloat16"),
        ("fpu avx512f amx_bf16 amx_tile", "bfloat16"),
        ("fpu avx2 avx512f", "float32"),
    ],
)
def test_of_a_processor_by_its_flags(tmp_path, flags, dtype):
    (tmp_path / "proc").mkdir(exist_ok=True)
    (tmp_path / "proc" / "cpuinfo").write_text(f"model name\t: X\nflags\t\t: {flags}\n\n")
    fastest_dtype.cache_clear()
    assert fastest_dtype("cpu", root=str(tmp_path)) == dtype


def test_of_a_processor_that_tells_nothing(tmp_path):
    assert fastest_dtype("cpu", root=str(tmp_path)) == "float32"


@pytest.fixture
def forgotten():
    """No choice from before, and none for later tests."""
    fastest_dtype.cache_clear()
    yield
    fastest_dtype.cache_clear()


@for_each(
    ("capability", "dtype"),
    [
        ("7.5", "float32"),
        ("8.0", "bfloat16"),
        ("10.0", "bfloat16"),
        ("gfx942", "float32"),
        (None, "float32"),
    ],
)
def test_of_a_gpu_by_its_capability(monkeypatch, forgotten, capability, dtype):
    device = types.SimpleNamespace()
    if capability:
        device.compute_capability = capability
    monkeypatch.setattr(jax, "local_devices", lambda *, backend: [device])
    fastest_dtype.cache_clear()
    assert fastest_dtype("gpu") == dtype


def test_a_run_stores_what_it_chose(monkeypatch):
    """So that a run which resumes where another dtype is faster is refused."""
    monkeypatch.setattr(precision, "fastest_dtype", lambda platform: "bfloat16")
    config = TrainConfig(
        model="smollm2-135m-instruct",
        data=DataConfig(prompts="questions.jsonl"),
        reward=jr.rewards.last_integer,
        dtype="auto",
    )
    assert (config.dtype, config.product_dtype) == ("auto", "bfloat16")
    there = settings(config)
    assert there["dtype"] == "bfloat16"
    monkeypatch.setattr(precision, "fastest_dtype", lambda platform: "float32")
    assert changed_settings(there, settings(config)) == {"dtype": ("bfloat16", "float32")}
    assert changed_settings(there, settings(dataclasses.replace(config, dtype="bfloat16"))) == {}
