"""The benchmark for accelerators runs at a tiny size, and counts bytes right."""

import json

import jax
import jax.numpy as jnp
import pytest

import jaxrl_llm as jr
from benchmarks import gpu


def test_runs_at_a_tiny_size(capfd):
    gpu.main(["--tiny"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (result["name"], result["peers"], list(result["ours"])) == ("gpu", {}, ["8"])
    case = result["ours"]["8"]
    for way in ("sampler", "engine"):
        assert case[way]["tokens_per_s"]["min"] > 0
    step = case["step"]
    assert sum(step["parts_seconds"].values()) == pytest.approx(step["seconds"], rel=0.05)
    share = sum(step["bytes"].values()) / step["seconds"] / result["copy_bytes_per_s"]["median"]
    assert step["bandwidth_share"] == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_a_step(tied):
    model, params = jr.testing.tiny_model(dtype="bfloat16", tied=tied)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    size = {"prompts": 3, "slots": 6, "prompt_tokens": 10, "new_tokens": 7}
    read = gpu.step_bytes(model, params, size)
    # Two layers, keys and values of two heads of eight numbers of two bytes.
    assert read["prompts"] == 3 * 10 * 2 * 2 * 2 * 8 * 2
    assert read["responses"] == 6 * 4 * 2 * 2 * 2 * 8 * 2
    # An embedding of its own is not read, only a row of it a slot.
    unread = 0 if tied else model.config.vocab_size * model.config.width
    assert read["weights"] == 2 * (jr.models.count_params(model) - unread)


@pytest.mark.parametrize("arguments", [["--slots", "6"], ["--slots", "0"], ["--gguf", "x"]])
def test_bad_options_are_refused(arguments):
    with pytest.raises(SystemExit):
        gpu.main(["--tiny", *arguments])
