"""The dtype that a machine multiplies fastest, from what its operating system says."""

import jax
import pytest

import jaxrl_llm as jr
from jaxrl_llm.core.runtime import precision
from jaxrl_llm.core.runtime.precision import fastest_dtype
from jaxrl_llm.train import DataConfig, TrainConfig
from jaxrl_llm.train.logging.settings import settings


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu avx2 avx512f avx512_bf16", "bfloat16"),
        ("fpu avx512f amx_bf16 amx_tile", "bfloat16"),
        ("fpu avx2 avx512f", "float32"),
    ],
)
def test_of_a_processor_by_its_flags(tmp_path, flags, dtype):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(f"model name\t: X\nflags\t\t: {flags}\n\n")
    assert fastest_dtype("cpu", root=str(tmp_path)) == dtype


def test_of_a_processor_that_tells_nothing(tmp_path):
    assert fastest_dtype("cpu", root=str(tmp_path)) == "float32"


@pytest.mark.parametrize(
    ("capability", "dtype"), [("7.5", "float32"), ("8.0", "bfloat16"), ("10.0", "bfloat16")]
)
def test_of_a_gpu_by_its_capability(monkeypatch, capability, dtype):
    class Device:
        compute_capability = capability

    fastest_dtype.cache_clear()
    monkeypatch.setattr(jax, "local_devices", lambda *, backend: [Device()])
    assert fastest_dtype("gpu") == dtype
    fastest_dtype.cache_clear()


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
    assert settings(config)["dtype"] == "bfloat16"
