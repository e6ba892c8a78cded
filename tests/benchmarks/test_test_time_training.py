"""The benchmark of training by votes runs, and hands out no answers."""

import json

import pytest

from benchmarks import test_time_training as benchmark


def test_questions_have_no_answers():
    others, held_out = benchmark.split(benchmark.tiny())
    assert len(others) == 9 and len(held_out) == 3
    for prompt in benchmark.without_answers(held_out):
        assert prompt.answer is None and prompt.metadata["answer"] is None
        assert prompt.text in {x.text for x in held_out} and prompt.id


@pytest.mark.slow
def test_a_small_run(capsys):
    result = benchmark.main(
        ["--tiny", "--seeds", "0", "--half", "1", "--steps", "1", "--votes", "2", "--prompts", "2"]
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert [run["questions"] for run in result["runs"]] == ["held out", "others"]
    for run, trained_on in zip(result["runs"], (3, 9), strict=True):
        assert (run["steps"], run["trained_on"]) == (1, trained_on)
        gain = run["greedy_after"] - run["greedy_before"]
        assert run["greedy_gain"] == pytest.approx(gain, abs=1e-4)
        assert 0 <= run["majority_before"] <= 1
    assert result["runs"][0]["greedy_before"] == result["runs"][1]["greedy_before"]


def test_the_tiny_model_is_not_saved():
    with pytest.raises(SystemExit, match="--tiny is not saved"):
        benchmark.main(["--tiny", "--save"])
