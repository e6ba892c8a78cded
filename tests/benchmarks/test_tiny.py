"""Every benchmark runs on a tiny model, and prints one JSON line last."""

import json

import pytest

from benchmarks import (
    context_axis,
    decoding,
    dpo_step,
    engine_page,
    few_samples,
    first_step,
    harness,
    long_context,
    sampler,
    start,
    train_step,
    training_page,
)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, benchmark, options",
    [
        ("sampler", sampler, []),
        ("sampler_bfloat16", sampler, ["--case", "bfloat16"]),
        ("dpo_step_precomputed", dpo_step, ["--case", "precomputed"]),
        ("train_step_bfloat16", train_step, ["--case", "bfloat16"]),
    ],
)
def test_runs_without_peers(name, benchmark, options, capfd):
    benchmark.main(["--tiny", *options])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["name"] == name
    assert result["peers"] == {}
    assert result["ours"]["seconds"]["min"] > 0
    assert {"jax", "jaxrl_llm"} <= result["versions"]["ours"].keys()


@pytest.mark.slow
def test_long_context_runs_beside_a_checkout(capfd):
    long_context.main(["--tiny", "--before", str(harness.ROOT)])
    found = json.loads(capfd.readouterr().out.splitlines()[-1])["ours"]
    assert found["now"]["bytes"] == found["before"]["bytes"] and found["times_faster"] > 0
    assert found["now"]["bytes"]["16"] > found["now"]["bytes"]["8"] > 0


@pytest.mark.slow
def test_decoding_beside_a_checkout(capfd):
    decoding.main(["--tiny", "--before", str(harness.ROOT), "--turns", "1"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert len(result["ours"]) == len(result["ratios"]) == 3
    for of in result["ours"].values():
        assert 0 < of["now"]["share_of_products"]["median"] < 1
    assert "\n| bfloat16, 64 + 8 tokens | " in engine_page._decoding(result)


@pytest.mark.slow
def test_few_samples_beside_a_checkout(capfd):
    few_samples.main(["--tiny", "--before", str(harness.ROOT), "--turns", "1"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert set(result["ours"]) == set(result["ratios"]) and len(result["ours"]) == 3
    assert all(of["now"]["min"] > 0 < of["before"]["min"] for of in result["ours"].values())
    assert "| 1 to each of 24 prompts | " in engine_page._few_samples(result)


@pytest.mark.slow
def test_devices_of_context_hold_less(capfd):
    context_axis.main(["--tiny"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    one, two = result["ours"]["1"], result["ours"]["2"]
    assert all(two[name] < one[name] for name in ("arguments", "others"))
    assert "| 2 | 0.00 | 0.00 |" in training_page._context_axis(result)


@pytest.mark.slow
def test_the_seconds_of_a_start_beside_a_checkout(capfd):
    start.main(["--config", "configs/tiny.py", "--before", str(harness.ROOT), "--turns", "1"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    for name in ("now", "before"):
        for found in (result["ours"][name][way] for way in start.WAYS):
            assert 1 < found["model"]["min"] < found["step"]["min"]
        assert all(
            f"\n| {until}, {name} | " in training_page._start(result) for until in start.UNTIL
        )


@pytest.mark.of_many
@pytest.mark.slow
def test_the_parts_of_a_first_step_beside_a_checkout(capfd, monkeypatch):
    monkeypatch.setattr(harness, "MIN_ROUNDS", 1)
    first_step.main(["--tiny", "--before", str(harness.ROOT), "--rounds", "1"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    found = result["ours"]
    assert list(found) == [f"{n} layers, {x}" for n in (1, 2) for x in first_step.DTYPES]
    table = training_page._first_step(result)
    assert all(f"| {case}, {name} |" in table for case in found for name in ("now", "before"))
    for parts in found.values():
        for name in ("now", "before"):
            assert all(parts[name][part]["min"] > 0 for part in first_step.PARTS)
