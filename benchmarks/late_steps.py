"""Seconds of the quickstart's late steps, when most responses are short, beside another checkout.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.late_steps --before /tmp/before --save

Each checkout trains the quickstart with its own config, in a separate process, from an empty cache
of programs, without checkpoints, in turns. The last steps count: of each its sampling, in seconds
and in sampled tokens per second, and its update; and of each run the minutes of all steps, with the
programs that they compile, and the seconds from the begin of the loop to the end of its first step,
the first evaluation included.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import harness

CONFIG = "configs/quickstart.py"
SEED = "3"  # of no reported run


def run(checkout: Path, steps: int, folder: Path) -> list[dict[str, float]]:
    """The steps of one run of ``checkout``, by their metrics."""
    command = [sys.executable, "-m", "jaxrl_llm", "train", CONFIG, "--steps", str(steps)]
    command += ["--run-dir", str(folder / "run"), "--checkpoint.every", "0"]
    command += ["--seed", SEED, "--data.seed", SEED]
    environment = os.environ | {
        "PYTHONPATH": str(checkout.resolve()),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
    }
    subprocess.run(command, cwd=checkout, env=environment, stdout=sys.stderr, check=True)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def measured(runs: list[list[dict[str, float]]], last: int) -> dict[str, Any]:
    """The figures of a checkout's runs."""
    late = [row for rows in runs for row in rows[-last:]]
    sampling = [row["seconds_sample"] for row in late]
    rates = [row.get("tokens_sampled", row["tokens"]) / row["seconds_sample"] for row in late]
    phases = ("wait", "score", "train")
    minutes = [sum(row[f"seconds_{p}"] for row in rows for p in phases) / 60 for rows in runs]
    return {
        "sample_seconds": harness.summary(sampling),
        "sampled_tokens_per_s": harness.summary(rates),
        "train_seconds": harness.summary([row["seconds_train"] for row in late]),
        "minutes": harness.summary(minutes),
        "first_step_seconds": harness.summary([rows[0]["seconds_total"] for rows in runs]),
        "tokens_of_response": harness.summary([row["length"] for row in late]),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="a checkout to compare with")
    parser.add_argument("--steps", type=int, default=32, help="of each run")
    parser.add_argument("--last", type=int, default=12, help="steps of each run that count")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args(argv)
    checkouts = harness.checkouts(options.before)
    found: dict[str, list] = {name: [] for name in checkouts}
    for _ in range(options.turns):
        for name, checkout in checkouts.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(run(checkout, options.steps, Path(folder)))
    ours = {name: measured(runs, options.last) for name, runs in found.items()}
    workload = {"config": CONFIG, "seed": SEED, "steps": options.steps, "last": options.last}
    workload |= {"turns": options.turns, "before": harness.commit(options.before)}
    result = harness.of_ours("late_steps", workload, ours)
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
