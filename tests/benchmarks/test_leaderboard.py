"""The benchmark of methods on real tasks: its runs, what is stored, and its page."""

import json

import pytest
from rows import for_each

from benchmarks import harness, leaderboard, leaderboard_page, quickstart
from jaxrl_llm.cli.options import load_config


def _run(recipe="grpo", seed=0, after=0.5, **changes):
    point = {"minutes": 0.0, "tokens": 0, "greedy": 0.25, "sampled": 0.25}
    curve = [point, point | {"minutes": 2.0, "tokens": 4000, "greedy": after, "sampled": after}]
    run = {"recipe": recipe, "seed": seed, "steps": 2, "minutes": 2.0, "tokens": 4000}
    run |= {f"{way}_before": 0.25 for way in quickstart.WAYS}
    run |= {f"{way}_after": after for way in quickstart.WAYS}
    run |= {"questions": 24, "curve": curve, "rewards": [0.2, 0.4], "device": "D"}
    return run | changes


def _result(runs, devices=("D",)):
    return {
        "name": "leaderboard_textworld",
        "workload": {"config": "configs/textworld.py"},
        "devices": list(devices),
        "runs": runs,
    }


def test_the_quickstart_makes_two_updates_on_a_batch():
    path, _, name = leaderboard.TASKS["quickstart"].config.partition(":")
    config = load_config(harness.ROOT / path, name=name)
    assert (config.minibatches or 1) * (config.epochs or 1) == 2


@for_each(("recipe", "added"), [("gspo", []), ("rloo", ["--minibatches", "1"])])
def test_a_recipe_without_a_ratio_makes_one_update_on_a_batch(recipe, added):
    options = leaderboard.options_of("quickstart", recipe)
    assert options == [*leaderboard.TASKS["quickstart"].options, "--recipe", recipe, *added]


def test_a_run_a_recipe_and_a_seed(tmp_path, monkeypatch, capsys):
    made = []

    def run(seed, folder, extra, *, target, checkout):
        assert checkout == harness.ROOT
        made.append((target, seed, *extra))
        folder.mkdir()
        rows = [{"held_out": {}}, {"loss": 0.0, "sampled_reward": 0.12345}]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return {"seed": seed}

    def timed(command, environment):
        assert environment["PYTHONPATH"] == str(harness.ROOT)
        made.append(command[-2])

    monkeypatch.setattr(quickstart, "run", run)
    monkeypatch.setattr(quickstart, "timed", timed)
    command = ["textworld", "--recipes", "grpo", "gigpo", "--folder", str(tmp_path)]
    for seeds in (["0"], ["0", "1"], ["0"]):  # the second time one seed is there, then all
        leaderboard.main([*command, "--seeds", *seeds])
    config, warmup = leaderboard.TASKS["textworld"].config, "configs/textworld.py:warmup"
    order = [(name, seed) for seed in (0, 1) for name in ("grpo", "gigpo")]
    one = ("--epochs", "1", "--minibatches", "1")  # whatever a recipe's paper has
    runs = [(config, seed, "--recipe", name, *one) for name, seed in order]
    assert made == [warmup, *runs]
    result = json.loads(capsys.readouterr().out.splitlines()[-2])
    assert [(run["recipe"], run["seed"]) for run in result["runs"]] == order
    assert result["runs"][0]["rewards"] == [0.1235]


def test_a_changed_task_is_not_saved():
    with pytest.raises(SystemExit, match="--steps 2 would not be the task"):
        leaderboard.main(["textworld", "--recipes", "grpo", "--save", "--steps", "2"])


def test_runs_of_another_task_are_not_joined(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(quickstart, "once", lambda *args, **options: made.append(args))
    stored = {"workload": {"config": "configs/reasoning.py:gcd", "options": "--steps 2"}}
    (tmp_path / "leaderboard_gcd-D.json").write_text(json.dumps(stored | {"runs": []}))
    told = r"D\.json is of configs/reasoning.py:gcd --steps 2, and gcd is now configs/reasoning"
    with pytest.raises(SystemExit, match=told):
        leaderboard.main(["gcd", "--recipes", "grpo", "--save", "--folder", str(tmp_path / "runs")])
    assert not made
    leaderboard.check_saved("quickstart")  # of which nothing is stored


@for_each("task", leaderboard.TASKS)
def test_stored_runs_are_of_the_task(task):
    leaderboard.check_saved(task)


def test_runs_of_earlier_commands_stay_unless_they_are_made_again():
    old = [_run(seed=0), _run(seed=1, after=0.5), _run("gigpo", seed=1)]
    again = leaderboard.joined(old, [_run(seed=1, after=0.75)])
    named = [(run["recipe"], run["seed"], run["greedy_after"]) for run in again]
    assert named == [("gigpo", 1, 0.5), ("grpo", 0, 0.5), ("grpo", 1, 0.75)]


def test_recipes_are_compared_on_the_same_seeds():
    runs = [_run(seed=seed, after=after) for seed, after in enumerate((0.5, 0.6, 0.7))]
    runs += [_run("gigpo", seed, after=after) for seed, after in enumerate((0.6, 0.7, 0.81))]
    runs += [_run("rloo", seed, after=after) for seed, after in ((0, 0.9), (2, 0.4), (3, 0.0))]
    runs += [_run("gspo", 0, after=0.9)]
    other = _result([_run(), _run(seed=1)]) | {"name": "leaderboard_gcd"}
    (table,) = leaderboard_page._overview([other, _result(runs)])
    # Student's t with two degrees of freedom: 4.303 x 0.00577 / sqrt(3).
    rows = ["| recipe | textworld |", "| --- | --- |", "| `gigpo` | **+0.103 ± 0.014** |"]
    rows += ["| `rloo` | +0.050 ± 4.447 |"]
    assert table.split("\n\n")[-1].splitlines() == rows
    assert leaderboard_page._overview([other]) == []


def test_a_run_that_fails_is_shown(tmp_path, monkeypatch, capsys):
    def run(seed, folder, extra, *, target, checkout):
        raise quickstart.CommandFailed("ended with code 1")

    monkeypatch.setattr(quickstart, "run", run)
    monkeypatch.setattr(leaderboard, "warm_up", lambda task, root: None)
    result = leaderboard.main(["textworld", "--recipes", "grpo", "--seeds", "4"])
    failed = {"recipe": "grpo", "seed": 4, "failed": "ended with code 1"}
    assert result["runs"] == [failed] and "ended with code 1" in capsys.readouterr().out
    parts = leaderboard_page._task(_result([_run(), failed]))
    assert parts[-1] == "Ended with an error: `grpo` on seed 4."
    assert "24 held-out questions" in parts[0]


@for_each("task", leaderboard.TASKS)
def test_tasks_are_configs(task):
    target, warmup, _ = leaderboard.TASKS[task]
    path, _, name = target.partition(":")
    assert load_config(harness.ROOT / path, name=name or "config").steps
    if warmup:
        assert load_config(harness.ROOT / path, name="warmup").recipe == "sft"
