"""The benchmark for accelerators runs at a tiny size, and counts bytes right."""

import json

import jax
import jax.numpy as jnp
import pytest
from rows import for_each

import jaxrl_llm as jr
from benchmarks import gpu, harness


@pytest.mark.slow
def test_runs_at_a_tiny_size(capfd):
    gpu.main(["--tiny", "--part", "sample"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (result["name"], result["peers"], list(result["ours"])) == ("gpu", {}, ["8"])
    assert "train" not in result
    case = result["ours"]["8"]
    for way in ("sampler", "engine"):
        assert case[way]["tokens_per_s"]["min"] > 0
    step = case["step"]
    parts = [step["seconds"], *step["parts_seconds"].values()]
    rounding = 0.005 * sum(map(abs, parts))  # of three digits each; a busy machine has large parts
    assert sum(parts[1:]) == pytest.approx(parts[0], abs=rounding)
    share = sum(step["bytes"].values()) / step["seconds"] / result["copy_bytes_per_s"]["median"]
    assert step["bandwidth_share"] == pytest.approx(share, rel=0.02)


@pytest.mark.slow
def test_populations_run_at_a_tiny_size(capfd):
    gpu.main(["--tiny", "--part", "evolution"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["ours"] == {} and "train" not in result
    found = result["evolution"]
    assert found["workload"]["members"] == [4] and list(found["ours"]) == ["layer", "4"]
    assert set(found["ours"]["layer"]["share_of_plain"]) >= {"premade", "redrawn", "dense"}
    case = found["ours"]["4"]
    assert set(case["share_of_plain"]) == {"premade", "redrawn"}
    assert case["update_of_evaluation"] > 0 and case["peak_memory_bytes"] > 0


@for_each("tied", [False, True])
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slots", "6"], "--slots 6 is not a multiple of 4 rollouts"),
        (["--gguf", "x"], "there are no peers"),
        (["--part", "all", "--microbatches", "3"], "--microbatches 3 does not divide 2 prompts"),
        (["--peak-flops", "0"], "--peak-flops 0.0 is not above 0"),
        (["--remat", "some"], "invalid choice: 'some'"),
        (["--part", "train", "--slots", "8"], "--slots has no effect with --part train"),
        (["--members", "3"], "--members 3 is not a number of pairs"),
        (["--part", "sample", "--microbatches", "1"], "--microbatches has no effect with --part"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--tiny", *arguments])
    assert message in capsys.readouterr().err


def test_a_part_is_saved_beside_the_others(tmp_path):
    common = {"name": "gpu", "device": "D"}
    trained, new = {**common, "ours": {}, "train": 2}, {**common, "ours": {"64": 3}}
    assert gpu.with_saved(trained, "train", tmp_path) == trained  # nothing was saved before
    harness.save({**trained, "ours": {"64": 1}}, tmp_path)
    assert gpu.with_saved(new, "sample", tmp_path) == {**new, "train": 2}
    evolved = {**common, "ours": {}, "evolution": 4}
    found = gpu.with_saved(evolved, "evolution", tmp_path)
    assert found == {**evolved, "ours": {"64": 1}, "train": 2}
    # Of another device nothing is taken, and all parts together need nothing.
    assert gpu.with_saved({**new, "device": "E"}, "sample", tmp_path) == {**new, "device": "E"}
    assert gpu.with_saved(new, "all", tmp_path) == new
