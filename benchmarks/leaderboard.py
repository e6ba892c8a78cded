"""Methods on a task that a model learns: held-out accuracy by sampled tokens and by minutes.

    python -m benchmarks.leaderboard textworld --recipes grpo gigpo --folder runs/board --save

Runs `jaxrl-llm train CONFIG --recipe NAME` for each recipe and seed in turn, with a split of the
task's questions for each seed. Everything but the recipe is the config's: the methods get the same
model, questions, learning rate and number of steps, and none is tuned. Tokens are all that the
policy sampled, also for groups that a recipe then dropped; minutes are those of sampling and
training, with the programs that they compile. Where a task makes several updates on a batch, a
recipe without a ratio to the policy that sampled makes one, as its paper does. Where a task sets
no number of updates, each recipe makes one, whatever its paper has.

A task that has a warm-up begins with it, `jaxrl-llm train CONFIG:warmup`, which is made once for a
folder, at the place that the config says, and is in none of the figures. A run that is in
`--folder` already is not made again, so a benchmark that was stopped goes on. A run whose command
fails, such as one that stops learning anything, is stored as failed. `--save` writes
benchmarks/results/leaderboard_TASK-DEVICE.json. Runs that are in it already stay, unless they were
made again. Nothing is run if stored runs of the task, of any device, were made with another config
or other options. Each run names the commit that made it.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness, quickstart
from benchmarks.worker import jax_device_name, package_versions
from jaxrl_llm.cli.options import load_config
from jaxrl_llm.train.config import find_recipe


class Task(NamedTuple):
    """A config, whether it has a warm-up, and what the runs change in it."""

    config: str
    warmup: bool = False
    options: tuple[str, ...] = ()


# With one update a batch, every ratio is 1, and the clipped surrogates of most recipes are the same
# function: the quickstart's own config has one, its `dapo` two.
TASKS = {
    "quickstart": Task(
        "configs/quickstart.py:dapo",
        options=("--steps", "24", "--dtype", "auto", "--evaluation.every", "12"),
    ),
    "products": Task("configs/reasoning.py", options=("--steps", "12", "--evaluation.every", "6")),
    "gcd": Task("configs/reasoning.py:gcd", options=("--evaluation.every", "12")),
    # A quarter of the config's steps, after which methods still differ.
    "calculator": Task(
        "configs/calculator.py",
        warmup=True,
        options=("--steps", "4", "--minibatches", "2", "--dtype", "auto"),
    ),
    "textworld": Task("configs/textworld.py", warmup=True),
    # After the twelve steps of the config every game is won; after these, methods still differ.
    "textworld_early": Task(
        "configs/textworld.py",
        warmup=True,
        options=(
            *("--steps", "4", "--minibatches", "2"),
            *("--dtype", "auto", "--evaluation.every", "2"),
        ),
    ),
}


def warm_up(task: str, root: Path) -> None:
    """Makes the weights that the runs of a task begin with, once for a folder of runs."""
    done = root / f"{task}_warmup.json"
    if TASKS[task].warmup and not done.is_file():
        command = [sys.executable, "-m", "jaxrl_llm", "train", f"{TASKS[task].config}:warmup"]
        quickstart.timed([*command, "--overwrite"], {**os.environ, "PYTHONPATH": str(harness.ROOT)})
        done.write_text(json.dumps({"commit": harness.commit()}))


def options_of(task: str, recipe: str) -> list[str]:
    """What the run of a recipe changes in the config of a task."""
    path, _, name = TASKS[task].config.partition(":")
    config = load_config(harness.ROOT / path, name=name or "config")
    changed = TASKS[task].options
    options = [*changed, "--recipe", recipe]
    found = find_recipe(recipe, config.sampling)
    given = dict(zip(changed[::2], changed[1::2], strict=True))
    updates = int(given.get("--minibatches", config.minibatches or 1))
    if updates > 1 and found.needs.sums_gradients and not found.uses_ratio:
        options += ["--minibatches", "1"]
    if config.minibatches is None and "--minibatches" not in given and found.needs.sums_gradients:
        options += ["--epochs", "1", "--minibatches", "1"]  # whatever the recipe's paper has
    return options


def folder_of(task: str, recipe: str, seed: int, root: Path) -> Path:
    """Where a run is."""
    return root / re.sub(r"\W+", "_", f"{task}_{recipe}_{seed}")


def once(task: str, recipe: str, seed: int, root: Path, extra: Sequence[str]) -> dict[str, Any]:
    """The figures of a run, which is made unless it is in the folder."""
    folder = folder_of(task, recipe, seed, root)
    options = [*options_of(task, recipe), *extra]
    try:
        figures = quickstart.once(seed, folder, options, target=TASKS[task].config)
    except quickstart.CommandFailed as error:
        return {"recipe": recipe, "seed": seed, "failed": str(error)}
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steps = [row for row in rows if "loss" in row]
    rewards = [round(row.get("sampled_reward", row.get("reward", 0.0)), 4) for row in steps]
    return {"recipe": recipe, **figures, "rewards": rewards}


def joined(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All runs, sorted; of two with the same recipe and seed, the new one."""
    runs = {(run["recipe"], run["seed"]): run for run in (*old, *new)}
    return [runs[key] for key in sorted(runs)]


def workload_of(task: str) -> dict[str, str]:
    """What a task runs, as the result names it."""
    options = " ".join(TASKS[task].options)
    return {"config": TASKS[task].config} | ({"options": options} if options else {})


def check_saved(task: str) -> None:
    """Raises SystemExit if stored runs of a task were made with another config or other options.

    Those of all devices count: the page shows them as one task, and to ask jax for the device of
    this machine would take it from the runs.
    """
    for path in sorted(harness.RESULTS.glob(f"leaderboard_{task}-*.json")):
        stored = json.loads(path.read_text())["workload"]
        if stored != workload_of(task):
            was, now = (" ".join(each.values()) for each in (stored, workload_of(task)))
            raise SystemExit(
                f"benchmarks.leaderboard: {path} is of {was}, and {task} is now {now}; "
                "remove the file, or run without --save."
            )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Make the runs and print one JSON line last."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("task", choices=sorted(TASKS))
    options.add_argument("--recipes", nargs="+", required=True, help="names of the catalog")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--folder", type=Path, help="of the runs; a temporary one by default")
    options.add_argument("--save", action="store_true", help="write benchmarks/results")
    options, extra = options.parse_known_args(argv)
    if extra and options.save:
        raise SystemExit(f"benchmarks.leaderboard: {' '.join(extra)} would not be the task")
    if options.save:
        check_saved(options.task)
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        root = (options.folder or Path(scratch)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        wanted = [(recipe, seed) for seed in options.seeds for recipe in options.recipes]
        folders = (folder_of(options.task, *run, root) for run in wanted)
        if not all(folder.with_suffix(".json").is_file() for folder in folders):
            warm_up(options.task, root)
        for recipe, seed in wanted:
            runs.append(once(options.task, recipe, seed, root, extra))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    result: dict[str, Any] = {
        "name": f"leaderboard_{options.task}",
        "workload": workload_of(options.task),
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "flax", "optax"))},
        "commit": harness.commit(),
        "runs": runs,
    }
    path = harness.RESULTS / f"{result['name']}-{result['device']}.json"
    if options.save and path.exists():
        result["runs"] = joined(json.loads(path.read_text())["runs"], runs)
    harness.finish(result, to_file=options.save)
    return result


if __name__ == "__main__":
    main()
