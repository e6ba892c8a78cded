"""docs/evolution.md tells the truth: its example runs, its numbers are those of the results."""

import json
import re

import pytest

import jaxrl_llm as jr
from benchmarks import evolution_page, harness

TEXT = evolution_page.PAGE.read_text()


@pytest.mark.slow
def test_the_example_runs_as_pasted(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    exec(compile(code, "evolution.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.split("\n")[0] == "(2, 8, 4) 0"


def test_names_of_the_page_exist():
    for module, name in re.findall(r"`(evolution|recipes)\.(\w+)`", TEXT):
        assert hasattr(getattr(jr, module), name)
    for config in re.findall(r"`jaxrl-llm train (\S+?)(?::\w+)?`", TEXT):
        assert (harness.ROOT / config).is_file()


def test_measured_numbers_are_current():
    assert evolution_page.main(["--check"]) == 0, "run python -m benchmarks.evolution_page"


def test_results_become_tables(tmp_path):
    assert evolution_page.measured(tmp_path) == evolution_page.task(tmp_path) == "Nothing yet."
    figure = {"median": 800.0, "min": 790.0, "max": 812.3}
    sizes = {"members": 64, "prompt_tokens": 16, "new_tokens": 32}
    work = {"model": "M", "dtype": "float32", **sizes}
    layer = {
        "share_of_plain": {
            "premade": 0.931,
            "redrawn": 0.457,
            "dense_premade": 0.0123,
            "dense": 0.00034,
        }
    }
    decoding = {
        "tokens_per_s": dict.fromkeys(("plain", "premade", "redrawn"), figure),
        "share_of_plain": {"premade": 0.96, "redrawn": 0.87},
        "seconds": {"update": figure},
        "update_of_evaluation": 0.061,
    }
    memory = {
        "members": 256,
        "bytes": {"model": 5e8, "cache": 1e9},
        "peak_memory_bytes": {"plain": 1.6e9, "population": 2e9},
        "times_model_and_cache": 1.33,
        "times_plain": 1.25,
    }
    size = {"width": 2048, "rows": 1024, "dense_rows": 8}
    ours = {
        "layer": layer,
        "decoding": decoding,
        "dense": {"members": 2, "share_of_plain": 0.0123},
        "memory": memory,
    }
    result = {"name": "evolution", "device": "D", "workload": {**work, "layer": size}, "ours": ours}
    gpu = {"workload": {**work, "layer": size}, "ours": {"layer": layer, "512": decoding}}
    for each in (result, {"name": "gpu", "device": "H", "evolution": gpu}):
        (tmp_path / f"{each['name']}.json").write_text(json.dumps(each))
    text = evolution_page.measured(tmp_path)
    assert "| low-rank noise, drawn with every batch | 46% | 69% |" in text
    assert "| a perturbed copy a member, made before | 1.2% | 0.41% |" in text
    assert "| low-rank noise, drawn with every batch | 800 (790 to 812) | 87% |" in text
    assert "| a perturbed copy a member, drawn with every batch |  | 1.2% |" in text
    assert "6.1% of the evaluation" in text and "takes 1.33 times weights" in text
    assert "| peak, the population | 2.00 |" in text
    assert "| 512 | 800 (790 to 812) | 96% | 87% | 6.1% |" in text


@pytest.mark.parametrize("curve", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_runs_become_tables(tmp_path, curve):
    ways = {"greedy": 0.4, "sampled": 0.05}
    run = {
        "method": "evolution",
        "seed": 1,
        "steps": 75,
        "minutes": 21.3,
        "tokens": 311_000,
        "questions": 40,
        "greedy_before": 0.45,
        "greedy_after": 0.7,
        "sampled_before": 0.1,
        "sampled_after": 0.15,
        "gain_per_10k_tokens": ways,
        "gain_per_minute": ways,
        "reached": {"tokens": 200_000, "seconds": 801.2},
    }
    result = {
        "name": "es_quickstart",
        "device": "D",
        "workload": {"config": "C", "rise": 0.2},
        "commit": "0123456789ab",
        "runs": [run, {**run, "method": "policy gradient", "seed": 0, "reached": None}],
        "trials": [
            {
                "seed": 2,
                "sigma": 3e-3,
                "learning_rate": 0.5,
                "decay_steps": 9,
                "step": 8,
                "greedy": [0.4, 0.5],
                "sampled": [0.1, 0.2],
            }
        ],
    }
    (tmp_path / "es.json").write_text(json.dumps(result))
    if curve:
        (tmp_path / evolution_page.CURVE).touch()
    text = evolution_page.task(tmp_path)
    assert "| evolution, seed 1 | 75 | 21.3 | 311,000 | 0.450 to 0.700 |" in text
    assert "| 2 | 0.003 | 0.5 | 9 | 8 | 0.400 to 0.500 | 0.100 to 0.200 |" in text
    assert "| 200,000 | 801 |" in text and "| not reached | not reached |" in text
    assert "| policy gradient, seed 0 | 0.4 | 0.05 | 0.4 | 0.05 |" in text
    assert (evolution_page.CURVE in text) == curve
