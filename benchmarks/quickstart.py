"""The main job, once a seed: held-out accuracy before and after, and minutes of training.

    python -m benchmarks.quickstart --save

Runs `jaxrl-llm train configs/quickstart.py` for seeds 0, 1 and 2, each with a split of the
questions of its own, and writes benchmarks/results/quickstart-DEVICE.json and the reward curve of
the first seed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.worker import jax_device_name, package_versions

CONFIG = "configs/quickstart.py"
WAYS = ("greedy", "sampled")


def run(seed: int, folder: Path, extra: Sequence[str] = ()) -> dict[str, Any]:
    """Trains one seed in a process of its own and returns what it measured."""
    command = [sys.executable, "-m", "jaxrl_llm", "train", CONFIG]
    command += ["--seed", str(seed), "--data.seed", str(seed), "--run-dir", str(folder), *extra]
    # Its progress goes to stderr, since the last line of stdout is the result.
    start = time.perf_counter()
    subprocess.run(command, cwd=harness.ROOT, stdout=sys.stderr, check=True)
    return {
        **measured(seed, folder),
        "command_minutes": round((time.perf_counter() - start) / 60, 2),
    }


def measured(seed: int, folder: Path) -> dict[str, Any]:
    """One seed's figures, from the metrics of its run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before, after = (row["held_out"] for row in (rows[0], rows[-1]))
    steps = [row for row in rows if "loss" in row]
    seconds = sum(row[f"seconds_{phase}"] for row in steps for phase in ("wait", "score", "train"))
    result: dict[str, Any] = {"seed": seed, "steps": len(steps), "minutes": round(seconds / 60, 2)}
    for way in WAYS:
        for when, found in (("before", before[way]), ("after", after[way])):
            result[f"{way}_{when}"] = round(found["mean"], 4)
            result[f"{way}_{when}_interval"] = [round(found[end], 4) for end in ("low", "high")]
    return {**result, "questions": before["greedy"]["questions"]}


def main(argv: list[str] | None = None) -> None:
    """Run the seeds and print one JSON line last."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--save", action="store_true", help="write benchmarks/results")
    options, extra = options.parse_known_args(argv)
    if extra and options.save:
        raise SystemExit(f"benchmarks.quickstart: {' '.join(extra)} would not be the main job")
    commit = harness.commit()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {seed: Path(scratch) / f"seed{seed}" for seed in options.seeds}
        runs = []
        for seed, folder in folders.items():
            runs.append(run(seed, folder, extra))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        result = {
            "name": "quickstart",
            "workload": {"config": CONFIG},
            "device": jax_device_name(),
            "versions": {"ours": package_versions(("jax", "jaxlib", "flax", "optax"))},
            "commit": commit,
            "runs": runs,
        }
        if options.save:
            harness.RESULTS.mkdir(parents=True, exist_ok=True)
            shutil.copy(
                folders[options.seeds[0]] / "reward.png", harness.RESULTS / "quickstart.png"
            )
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
