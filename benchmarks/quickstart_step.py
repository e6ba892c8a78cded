"""Seconds of a step of the quickstart: at an earlier commit, now, and with a tuned glibc, in turns.

    python -m benchmarks.quickstart_step --before COMMIT --save

Each turn trains a few steps with each version in a process of its own, without evaluation and
checkpoints between steps. The first two steps, which compile, do not count. Options that follow go
to all commands, such as --model FILE. `kept` is the present version in an environment in which
glibc leaves freed memory with the process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.worker import jax_device_name, package_versions

CONFIG = "configs/quickstart.py"
# What belongs to sampling and to the update, under its present and its earlier names.
PARTS = {
    "sample": ("seconds_sample", "seconds_rollout"),
    "train": ("seconds_train", "seconds_step"),
}
COMPILES = 2
# No block is unmapped when it is freed, whatever thread it belongs to.
KEEPS_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}


class Run(NamedTuple):
    """What one process measured.

    Attributes:
      rows: Seconds of each step that counts, by part.
      peak_memory_bytes: Of the process.
    """

    rows: list[dict[str, float]]
    peak_memory_bytes: int


def run(checkout: Path, folder: Path, count: int, extra: Sequence[str], settings) -> Run:
    """A few steps of the quickstart of ``checkout``, in an environment with these settings."""
    command = [sys.executable, "-m", "jaxrl_llm", "train", CONFIG, "--steps", str(count)]
    command += ["--run-dir", str(folder), "--evaluation.no-enabled", "--checkpoint.every", "0"]
    environment = os.environ | {"PYTHONPATH": str(checkout)} | settings
    process = subprocess.Popen([*command, *extra], cwd=checkout, env=environment, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"quickstart_step.py: a run of {checkout} ended with status {status}.")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [seconds(row) for row in map(json.loads, lines) if "loss" in row]
    return Run(rows[COMPILES:], usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def seconds(row: dict[str, Any]) -> dict[str, float]:
    """What a step took in all and by part, from its line of metrics."""
    found = {part: next(row[k] for k in names if k in row) for part, names in PARTS.items()}
    waited = row.get("seconds_wait", found["sample"] + row.get("seconds_reward", 0.0))
    return found | {"whole": waited + row.get("seconds_score", 0.0) + found["train"]}


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--before", required=True, help="a commit")
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options, extra = parser.parse_known_args(argv)
    found: dict[str, list[Run]] = {"before": [], "after": [], "kept": []}
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "before"
        tree = ["git", "-C", str(harness.ROOT), "worktree"]
        subprocess.run([*tree, "add", "--detach", str(old), options.before], check=True)
        try:
            for turn in range(options.turns):
                for name, runs in found.items():
                    checkout = old if name == "before" else harness.ROOT
                    settings = KEEPS_MEMORY if name == "kept" else {}
                    given = (Path(folder) / f"{name}{turn}", options.steps, extra, settings)
                    runs.append(run(checkout, *given))
        finally:
            subprocess.run([*tree, "remove", "--force", str(old)], check=True)
    sides = {name: summarize_runs(runs) for name, runs in found.items()}
    middle = {name: {k: v["median"] for k, v in s["seconds"].items()} for name, s in sides.items()}
    factor = {k: float(f"{middle['before'][k] / x:.3g}") for k, x in middle["after"].items()}
    result = {
        "name": "quickstart_step",
        "workload": {"config": CONFIG, "steps": options.steps, "turns": options.turns},
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "jaxrl_llm"))},
        "commit": harness.commit(),
        "before": {"commit": options.before} | sides["before"],
        "ours": sides["after"],
        "kept": {"environment": KEEPS_MEMORY} | sides["kept"],
        "factor": factor,
    }
    harness.finish(result, to_file=options.save)


def summarize_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """Seconds by part over all turns, and the largest process."""
    rows = [row for one in runs for row in one.rows]
    return {
        "seconds": {part: harness.summary([row[part] for row in rows]) for part in rows[0]},
        "peak_memory_bytes": max(one.peak_memory_bytes for one in runs),
    }


if __name__ == "__main__":
    main()
