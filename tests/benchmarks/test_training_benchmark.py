"""The benchmarks of the training engine run at a tiny size and report what their page needs."""

import pytest
from rows import for_each

from benchmarks import harness, quickstart_step, training


def test_logprobs_are_compared_with_whole_logits(ran):
    found = ran(training, "--part", "logprobs")["ours"]["logprobs"]
    ratio = found["seconds"]["ours"]["median"] / found["seconds"]["plain"]["median"]
    assert found["time_of_plain"] == pytest.approx(ratio, rel=0.01)
    assert found["temporary"]["plain"] >= 1  # whole logits are in memory at least once


@pytest.mark.of_many
@pytest.mark.slow
def test_steps_by_group_policy_and_devices(ran, few_rounds, monkeypatch):
    measured, layouts = training._in_a_process, []

    def fsdp_alone(layout, **request):
        layouts.append(layout)
        return measured(layout, **request) if "fsdp" in layout else harness.summary([1.0])

    monkeypatch.setattr(training, "_in_a_process", fsdp_alone)
    parts = ("--part", "growth", "--part", "remat", "--part", "devices")
    found = ran(training, *parts, "--rounds", 1)["ours"]
    assert len(found["growth"]["doubling"]) == 3
    assert set(found["remat"]) >= {"none", "dots", "full"}
    assert found["remat"]["full"]["product_share"] > 0
    (case,) = found["devices"]["tokens_of_a_device"].values()
    assert case["time_of_one"]["data"] == 1.0 and case["time_of_one"]["fsdp"] > 0
    assert layouts == [{}, {"data": training.DEVICES}, {"fsdp": training.DEVICES}]


def test_a_part_is_saved_beside_the_others(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(training.harness, "RESULTS", tmp_path)
    monkeypatch.setattr(training.harness, "finish", lambda result, to_file: print(result["ours"]))
    (tmp_path / f"training-{harness.jax_device_name()}.json").write_text('{"ours": {"growth": 1}}')
    monkeypatch.setitem(training.PARTS, "logprobs", lambda tiny, rounds: 2)
    training.main(["--tiny", "--part", "logprobs", "--save"])
    assert capfd.readouterr().out.splitlines()[-1] == "{'growth': 1, 'logprobs': 2}"


@for_each("arguments", [["--gguf", "x"], ["--part", "nothing"]])
def test_bad_options_are_refused(arguments):
    with pytest.raises(SystemExit):
        training.main(["--tiny", *arguments])


def test_a_step_of_either_version_has_the_same_parts():
    old = {"seconds_rollout": 2.0, "seconds_step": 5.0, "seconds_reward": 0.5}
    new = {"seconds_sample": 2.0, "seconds_train": 3.0, "seconds_wait": 2.5, "seconds_score": 1.0}
    assert quickstart_step.seconds(old) == {"sample": 2.0, "train": 5.0, "whole": 7.5}
    assert quickstart_step.seconds(new) == {"sample": 2.0, "train": 3.0, "whole": 6.5}


def test_runs_of_a_version_are_summed_up():
    one, two = ([{"whole": 1.0}, {"whole": 3.0}], 10), ([{"whole": 2.5}], 30)
    side = quickstart_step.summarize_runs([quickstart_step.Run(*one), quickstart_step.Run(*two)])
    assert side["seconds"]["whole"] == {"median": 2.5, "min": 1.0, "max": 3.0}
    assert side["peak_memory_bytes"] == 30
