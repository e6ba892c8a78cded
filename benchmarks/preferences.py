"""Six losses of preferences on one file of pairs: accuracy on held-out pairs and of answers.

    python -m benchmarks.preferences --folder runs/preferences_benchmark --save
    python -m benchmarks.preferences --folder runs/preferences_benchmark --methods simpo

Makes pairs with `jaxrl-llm pairs configs/quickstart.py`, trains each method of
configs/preferences.py on them, and grades greedy answers before and after to the questions that the
quickstart holds out, which neither the pairs nor a run have seen. What is in the folder is not done
again, so a benchmark that was stopped goes on, and methods may be run one at a time. With --save
and all of the methods it writes benchmarks/results/preferences-DEVICE.json.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.worker import jax_device_name, package_versions

TASK, CONFIG = "configs/quickstart.py", "configs/preferences.py"
METHODS = ("rpo", "dpo", "simpo", "kto", "sppo", "ipo")
PAIRS = ("--samples", "32", "--pairs", "8", "--temperature", "0.7")


def run_command(*words: str) -> float:
    """Runs `jaxrl-llm` in another process; returns its seconds."""
    # Its progress goes to stderr, since the last line of stdout is the result.
    start = time.perf_counter()
    command = [sys.executable, "-m", "jaxrl_llm", *words]
    subprocess.run(command, cwd=harness.ROOT, stdout=sys.stderr, check=True)
    return time.perf_counter() - start


def make_pairs(folder: Path, task: str) -> dict[str, Any]:
    """The figures of the file of pairs, which is made where there is none."""
    file, record = folder / "pairs.jsonl", folder / "pairs.json"
    if not record.is_file():
        file.unlink(missing_ok=True)
        seconds = run_command("pairs", task, "--out", str(file), *PAIRS)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        figures = {"rows": len(rows), "prompts": len({row["prompt"] for row in rows})}
        record.write_text(json.dumps(figures | {"minutes": round(seconds / 60, 2)}))
    return json.loads(record.read_text())


def measure(method: str, folder: Path, config: str, task: str) -> dict[str, Any]:
    """The figures of a method, which is trained where they are not in the folder yet."""
    record, run_dir = folder / f"{method}.json", folder / method
    if not record.is_file():
        pairs = str(folder / "pairs.jsonl")
        words = ("--data.prompts", pairs, "--run-dir", str(run_dir), "--resume")
        seconds = run_command("train", f"{config}:{method}", *words)
        figures = {
            "method": method,
            **trained(run_dir / "metrics.jsonl"),
            "command_minutes": round(seconds / 60, 2),
            **unseen(run_dir, task),
        }
        record.write_text(json.dumps(figures))
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    return json.loads(record.read_text())


def trained(metrics: Path) -> dict[str, Any]:
    """What a run measured: its steps, and what it held out of the pairs."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    seconds = sum(row[f"seconds_{phase}"] for row in steps for phase in ("wait", "score", "train"))
    held_out = [row["held_out"] for row in rows if "held_out" in row]
    figures: dict[str, Any] = {"steps": len(steps), "minutes": round(seconds / 60, 2)}
    for when, each in (("before", held_out[0]), ("after", held_out[-1])):
        figures |= interval(f"pairs_{when}", each["pairs"])
    return figures | {"held_out_prompts": held_out[-1]["pairs"]["questions"]}


def unseen(run_dir: Path, task: str) -> dict[str, Any]:
    """Accuracy of answers to the held-out questions of the task, before and after a run."""
    import jax

    from jaxrl_llm.cli import options
    from jaxrl_llm.train.experiment.setup import load_experiment

    options.use_compilation_cache()
    config, _ = options.load_target(task)
    experiment, params = load_experiment(config)
    key, figures = jax.random.key(config.seed), {}
    choice = options.CheckpointChoice(str(run_dir), None, False)
    for when in ("before", "after"):
        params = params if when == "before" else options.load_policy(choice).params
        for way, result in experiment.evaluate(params, key)[0].items():
            figures |= interval(f"{way}_{when}", result.record())
    return figures | {"questions": len(experiment.held_out)}


def interval(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """A mean and its 95% interval, rounded, by the name of what it is."""
    ends = [round(result[end], 4) for end in ("low", "high")]
    return {name: round(result["mean"], 4), f"{name}_interval": ends}


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is left to do and print one JSON line last."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--folder", type=Path, default=Path("runs/preferences_benchmark"))
    options.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    options.add_argument("--task", default=TASK, help="the config whose model is sampled")
    options.add_argument("--config", default=CONFIG, help="the config that has the methods")
    options.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = options.parse_args(argv)
    if options.save and (options.task, options.config) != (TASK, CONFIG):
        raise SystemExit("benchmarks.preferences: other configs would not be this benchmark")
    if options.save and set(options.methods) != set(METHODS):
        raise SystemExit("benchmarks.preferences: --save needs all methods; leave --methods out")
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    pairs, runs = make_pairs(folder, options.task), []
    for method in options.methods:
        runs.append(measure(method, folder, options.config, options.task))
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    result = {
        "name": "preferences",
        "workload": {"task": options.task, "config": options.config, "pairs": " ".join(PAIRS)},
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "flax", "optax"))},
        "commit": harness.commit(),
        "pairs": pairs,
        "runs": runs,
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
