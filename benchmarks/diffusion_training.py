"""A tiny denoiser learns a task from nothing, then by rewards: configs/diffusion.py.

    python -m benchmarks.diffusion_training --folder runs/diffusion_training --save
    python -m benchmarks.diffusion_page

Trains it on right answers, then from that checkpoint by each method on the task's reward, and
records accuracy on held-out questions as it goes. A run that is in the folder is not done again, so
a benchmark that was stopped goes on. With --save it writes
benchmarks/results/diffusion_training-DEVICE.json, of which the page makes a table and curves.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.preferences import interval
from benchmarks.worker import jax_device_name, package_versions

CONFIG = harness.ROOT / "configs" / "diffusion.py"
METHODS = {"diffu_grpo": "improved", "coupled_grpo": "coupled", "espo": "espo"}  # and their configs
# How often it is evaluated.
EVERY = {"supervised": 50, "improved": 25}


def train(folder: Path, target: str, run_dir: str, *words: str) -> None:
    """Runs `jaxrl-llm train` in the folder, or what is left of a run."""
    command = [sys.executable, "-m", "jaxrl_llm", "train", target, "--run-dir", run_dir]
    command += ["--resume", *words]
    environment = os.environ | {"PYTHONPATH": str(harness.ROOT)}
    # Its progress goes to stderr, since the last line of stdout is the result.
    subprocess.run(command, cwd=folder, env=environment, stdout=sys.stderr, check=True)


def measure(folder: Path, name: str, target: str, run_dir: str, *words: str) -> dict[str, Any]:
    """The figures of a run, which is trained where they are not in the folder yet."""
    record = folder / f"{name}.json"
    if not record.is_file():
        train(folder, target, run_dir, *words)
        lines = (folder / run_dir / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        steps = [row for row in rows if "loss" in row]
        seconds = sum(row[f"seconds_{x}"] for row in steps for x in ("wait", "score", "train"))
        held_out = [(row["step"], row["held_out"]) for row in rows if "held_out" in row]
        figures: dict[str, Any] = {
            "name": name,
            "steps": len(steps),
            "minutes": round(seconds / 60, 2),
            "questions": held_out[-1][1]["greedy"]["questions"],
        }
        for when, (_, each) in (("before", held_out[0]), ("after", held_out[-1])):
            for way in ("greedy", "sampled"):
                figures |= interval(f"{way}_{when}", each[way])
        figures["curve"] = [[step, round(each["sampled"]["mean"], 4)] for step, each in held_out]
        record.write_text(json.dumps(figures))
    return json.loads(record.read_text())


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is left to do and print one JSON line last."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--folder", type=Path, default=Path("runs/diffusion_training"))
    options.add_argument("--tiny", action="store_true", help="two steps of each, for tests")
    options.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = options.parse_args(argv)
    if options.save and options.tiny:
        raise SystemExit("benchmarks.diffusion_training: --tiny is not this benchmark")
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    few = ("--steps", "2") if options.tiny else ()

    def every(kind: str) -> tuple[str, ...]:
        return ("--evaluation.every", "1" if options.tiny else str(EVERY[kind]), *few)

    # The second reads the checkpoint that the first leaves under this name.
    runs = [measure(folder, "supervised", str(CONFIG), "runs/diffusion", *every("supervised"))]
    for method, config in METHODS.items():
        target = f"{CONFIG}:{config}"
        runs.append(measure(folder, method, target, f"runs/{method}", *every("improved")))
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    result = {
        "name": "diffusion_training",
        "workload": {"config": "configs/diffusion.py"},
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "flax", "optax"))},
        "commit": harness.commit(),
        "runs": runs,
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
