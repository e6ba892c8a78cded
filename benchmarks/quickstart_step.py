"""Seconds of a step of the quickstart, now and at an earlier commit, in turns.

    python -m benchmarks.quickstart_step --before COMMIT --save

Each turn trains a few steps with each version in a process of its own, without evaluation and
checkpoints between steps. The first two steps, which compile, do not count. Options that follow go
to both commands, such as --model FILE.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.worker import jax_device_name, package_versions

CONFIG = "configs/quickstart.py"
# What belongs to sampling and to the update, under its present and its earlier names.
PARTS = {
    "sample": ("seconds_sample", "seconds_rollout"),
    "train": ("seconds_train", "seconds_step"),
}
COMPILES = 2


def steps(checkout: Path, folder: Path, count: int, extra: Sequence[str]) -> list[dict[str, float]]:
    """Seconds of each step that counts of a run of ``checkout``, by part."""
    command = [sys.executable, "-m", "jaxrl_llm", "train", CONFIG, "--steps", str(count)]
    command += ["--run-dir", str(folder), "--evaluation.no-enabled", "--checkpoint.every", "0"]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    subprocess.run([*command, *extra], cwd=checkout, env=environment, stdout=sys.stderr, check=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [seconds(row) for row in rows if "loss" in row][COMPILES:]


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
    found: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "before"
        tree = ["git", "-C", str(harness.ROOT), "worktree"]
        subprocess.run([*tree, "add", "--detach", str(old), options.before], check=True)
        try:
            for turn in range(options.turns):
                for name, checkout in (("before", old), ("after", harness.ROOT)):
                    run_dir = Path(folder) / f"{name}{turn}"
                    found[name] += steps(checkout, run_dir, options.steps, extra)
        finally:
            subprocess.run([*tree, "remove", "--force", str(old)], check=True)
    figures = {
        name: {part: harness.summary([row[part] for row in rows]) for part in rows[0]}
        for name, rows in found.items()
    }
    factor = {
        part: float(f"{_median(found['before'], part) / _median(found['after'], part):.3g}")
        for part in found["after"][0]
    }
    result = {
        "name": "quickstart_step",
        "workload": {"config": CONFIG, "steps": options.steps, "turns": options.turns},
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "jaxrl_llm"))},
        "commit": harness.commit(),
        "before": {"commit": options.before, "seconds": figures["before"]},
        "ours": {"seconds": figures["after"]},
        "factor": factor,
    }
    harness.finish(result, to_file=options.save)


def _median(rows: Sequence[dict[str, float]], part: str) -> float:
    return statistics.median(row[part] for row in rows)


if __name__ == "__main__":
    main()
