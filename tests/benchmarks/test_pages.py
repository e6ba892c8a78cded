"""Every page of docs/ that a benchmark writes is what the stored results give.

A page is written by ``python -m benchmarks.NAME``; with ``--check`` that compares and writes
nothing. The stored results reach the tables, so a table that changes is seen here. Examples of a
page run as pasted, names that it shows exist, and figures that it promises are in the results.
"""

import importlib
import json
import re

import pytest
from rows import for_each

import jaxrl_llm as jr
from benchmarks import (
    asynchrony,
    collectors,
    compiled,
    credit_page,
    diffusion_page,
    engine_page,
    es_quickstart,
    estimators_page,
    evolution_page,
    harness,
    leaderboard_page,
    pods_page,
    precision_page,
    preferences_page,
    quickstart,
    quickstart_step,
    reliability_page,
    rewards_page,
    training_page,
    versions,
    versions_page,
)
from jaxrl_llm.core.runtime import heap
from jaxrl_llm.train.config import TrainConfig

_TEXT = """claims.table collectors_page credit_page diffusion_page engine_page estimators_page
evolution_page leaderboard_page papers_page pods_page precision_page preferences_page
reliability_page rewards_page scaling_page training_page versions_page"""
PAGES = _TEXT.split()


@for_each("name", PAGES)
def test_a_page_is_current(name):
    page = importlib.import_module(f"benchmarks.{name}")
    assert page.main(["--check"]) == 0, f"run python -m benchmarks.{name}"


def test_an_old_page_is_told_and_written(tmp_path, monkeypatch):
    page = tmp_path / "precision.md"
    page.write_text("<!-- measured:begin -->\nold\n<!-- measured:end -->\n")
    monkeypatch.setattr(precision_page, "PAGE", page)
    monkeypatch.setattr(precision_page, "measured", lambda: "12 times")
    assert precision_page.main(["--check"]) == 1 and "old" in page.read_text()
    assert precision_page.main([]) == 0 and "12 times" in page.read_text()
    assert precision_page.main(["--check"]) == 0


@for_each(
    "part",
    [
        *(page.measured for page in (credit_page, diffusion_page, engine_page, evolution_page)),
        *(page.measured for page in (pods_page, precision_page, preferences_page)),
        *(page.measured for page in (reliability_page, rewards_page, training_page)),
        *(diffusion_page.trained, diffusion_page.speed, diffusion_page.flows, evolution_page.task),
    ],
)
def test_nothing_was_measured_yet(tmp_path, part):
    assert part(tmp_path) == "Nothing yet."


@pytest.mark.parametrize(
    ("page", "begins"),
    [
        (engine_page, "one"),
        pytest.param(evolution_page, "(2, 8, 4) 0\n", marks=pytest.mark.slow),
        pytest.param(precision_page, "Mismatch(mean_abs=", marks=pytest.mark.slow),
    ],
)
def test_the_example_of_a_page_runs_as_pasted(page, begins, capsys):
    text = page.PAGE.read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(code, page.PAGE.name, "exec"), {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines(keepends=True)
    # The engine hands out what is done first.
    assert (min(lines) if page is engine_page else lines[0]).startswith(begins)
    if page is engine_page:
        assert sorted(line.split()[0] for line in lines) == ["one", "three", "two"]


def test_names_of_the_pages_exist():
    engine, evolution = engine_page.PAGE.read_text(), evolution_page.PAGE.read_text()
    for module, name in re.findall(r"`(rollout|corrections)\.(\w+)`", engine):
        assert hasattr(getattr(jr, module), name)
    for name in ("pick_next", "sample_round", "to_rollout", "off_policy_fraction", "spec_accept"):
        assert f"`{name}" in engine and hasattr(jr.rollout, name)
    for name in ("stop", "cancel", "fork", "update"):
        assert f"`generation.{name}(" in engine and hasattr(jr.rollout.Generation, name)
    for module, name in re.findall(r"`(evolution|recipes)\.(\w+)`", evolution):
        assert hasattr(getattr(jr, module), name)
    for config in re.findall(r"`jaxrl-llm train (\S+?)(?::\w+)?`", evolution):
        assert (harness.ROOT / config).is_file()
    metrics = jr.train.metrics.batch_metrics.__doc__
    for name in ("sampler_gap", "sampler_gap_max", "sampler_kl", "sampler_ess"):
        assert f"`{name}`" in precision_page.PAGE.read_text() and f"``{name}``" in metrics
    fields, training = TrainConfig.__dataclass_fields__, training_page.PAGE.read_text()
    for name in ("max_skipped", "reward_deadline", "microbatches", "packing", "remat"):
        assert f"`{name}`" in reliability_page.PAGE.read_text() and name in fields
    for name in ("packing", "remat", "microbatches", "dtype"):
        assert f"`{name}" in training and name in fields
    for section, option in re.findall(r"`(optimizer|lora|mesh|report)\.(\w+)", training):
        kind = {"lora": "LoRAConfig"}.get(section, f"{section.title()}Config")
        assert option in getattr(jr.train, kind).__dataclass_fields__
    for command in ("train_step", "packing", "checkpoint", "start", "gpu --part train"):
        assert f"`python -m benchmarks.{command}`" in training


def test_pictures_of_stored_results_are_drawn(tmp_path):
    """Of runs and of simulations; the pages show what was saved."""

    def stored(pattern):
        return json.loads(next(harness.RESULTS.glob(pattern)).read_text())

    beside, rows = stored("quickstart_beside-*.json"), json.loads(asynchrony.RESULT.read_text())
    curves = {"quickstart": beside["runs"]} | beside["beside"]
    for draw, result in (
        (diffusion_page.draw, stored("diffusion-*.json")),
        (diffusion_page.draw_curves, stored("diffusion_training-*.json")),
        (leaderboard_page.plot, leaderboard_page.tasks()[0]),
        (quickstart.plot, curves),
        (es_quickstart.plot, stored("es_quickstart-*.json")["runs"]),
        (asynchrony.draw, rows["rows"]),
    ):
        path = tmp_path / f"{draw.__module__}.{draw.__name__}.png"
        draw(result, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_results_of_devices_are_of_one_task_and_of_other_runs(tmp_path):
    stored = json.loads(next(harness.RESULTS.glob("leaderboard_gcd-*.json")).read_text())
    told = {"two devices ran one recipe on one seed": {}, "of different tasks": {"workload": {}}}
    for n, (message, change) in enumerate(told.items()):
        folder = tmp_path / str(n)
        folder.mkdir()
        for device, result in (("a", stored), ("b", stored | change)):
            (folder / f"{device}.json").write_text(json.dumps(result | {"device": device}))
        with pytest.raises(ValueError, match=message):
            leaderboard_page.tasks(folder)


def test_settings_of_glibc_are_those_that_were_measured():
    """The variables that the benchmark sets and the options that `jaxrl-llm train` sets."""
    names = {"MALLOC_ARENA_MAX": -8, "MALLOC_MMAP_MAX_": -4, "MALLOC_TRIM_THRESHOLD_": -1}
    measured = {names[k]: int(x) for k, x in quickstart_step.KEEPS_MEMORY.items()}
    assert measured[-1] > 2**32 and measured | {-1: -1} == heap._KEEP  # -1 is the largest number


def test_the_page_names_what_is_above_a_bar():
    path = next(harness.RESULTS.glob("estimators-*.json"))
    result = json.loads(path.read_text())
    slow = {"floor_ms": 1, "forward_ms": 4, "forward_ratio": 4}
    slow |= {"gradient_ratio": 9, "gradient_own_ratio": 5}
    result["token_terms"] = {"slow": slow}
    assert estimators_page.over(result) == "Above a limit: `slow` (forward)."


def test_programs_of_pods_were_compiled_and_fit():
    found = json.loads((harness.RESULTS / "compiled.json").read_text())["programs"]
    assert list(found) == list(compiled.programs())
    for program in found.values():
        taken = program["arguments_bytes"] + program["temporary_bytes"]
        assert taken == program["taken_bytes"] < 0.9 * program["memory_bytes"]
        # The state is written over.
        assert program["aliased_bytes"] > 0.999 * program["arguments_bytes"]


def test_stored_speeds_are_those_that_are_promised():
    """512 of a million prompts in 20 ms, and collectors in 2% of a step of the quickstart."""
    (path,) = harness.RESULTS.glob("selection-cpu-2core*.json")
    result = json.loads(path.read_text())
    assert (result["workload"]["prompts"], result["workload"]["selected"]) == (1_000_000, 512)
    for rule in ("learnability", "dots", "vade", "mopps", "insight", "step"):
        assert result["milliseconds"][rule]["median"] < 20, rule
    (path,) = harness.RESULTS.glob("collectors-cpu-2core*.json")
    result = json.loads(path.read_text())
    assert result["workload"]["prompts"] == 8 and set(result["share"]) == set(collectors.PRESETS)
    assert max(result["share"].values()) < 0.02


def test_the_page_says_when_all_tests_last_ran(tmp_path):
    assert "no result yet" in versions_page.whole(tmp_path)
    result = {"date": "2026-11-30", "commit": "abc", "device": "cpu-2core", "minutes": 41}
    result["tests"] = {"passed": 12345, "skipped": 7}
    (tmp_path / "whole.json").write_text(json.dumps(result))
    told = "on 2026-11-30 at commit abc: 12,345 passed, 7 skipped in 41 minutes on cpu-2core."
    assert versions_page.whole(tmp_path).endswith(told)


def test_outcomes_are_those_of_the_last_line_of_pytest():
    for line, expected in (
        ("984 passed in 201.30s (0:03:21)", {"passed": 984}),
        ("== 2 failed, 7 passed, 1 error in 3.10s ==", {"failed": 2, "passed": 7, "error": 1}),
        ("3 skipped, 2 errors in 1s", {"skipped": 3, "error": 2}),
    ):
        assert versions.outcomes(line) == expected
    with pytest.raises(ValueError, match="no outcome"):
        versions.outcomes("ImportError: No module named 'jax'")
