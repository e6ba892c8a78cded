"""Seconds from the command to the end of a run's first step, beside another checkout of this code.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.start --before /tmp/before --save
    python -m benchmarks.start --config configs/tiny.py    # a look, on any machine

Each run is a process of its own, the checkouts in turns: first without any compiled program, then
again with the programs that the first run left. The time counts imports, the data, the weights, the
first batch, the evaluation before training, and the step itself. The processes end there. "model"
is the time until the run names its model: imports, data, weights and the state of the optimizer.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks import harness

CONFIG = "configs/quickstart.py"
SEED = "3"  # of no reported run
WAYS, UNTIL = ("cold", "warm"), ("model", "step")


def seconds(checkout: Path, config: str, programs: Path) -> dict[str, float]:
    """Seconds until a run names its model, and until its first step is in its metrics."""
    environment = os.environ | {
        "PYTHONPATH": str(checkout.resolve()),
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "PYTHONUNBUFFERED": "1",
    }
    found: dict[str, float] = {}

    def listen(lines: Iterable[str]) -> None:
        for line in lines:
            if " parameters, " in line:
                found.setdefault("model", time.perf_counter() - start)
            sys.stderr.write(line)

    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        command = [sys.executable, "-m", "jaxrl_llm", "train", config, "--checkpoint.every", "0"]
        command += ["--seed", SEED, "--data.seed", SEED, "--run-dir", str(metrics.parent)]
        start = time.perf_counter()
        with subprocess.Popen(
            command,
            cwd=checkout,
            env=environment,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        ) as run:
            threading.Thread(target=listen, args=(run.stdout,)).start()
            try:
                while not metrics.is_file() or '"loss"' not in metrics.read_text():
                    if run.poll() is not None:
                        raise SystemExit(f"benchmarks.start: the run ended with {run.returncode}.")
                    time.sleep(0.05)
                return found | {"step": time.perf_counter() - start}
            finally:
                run.kill()


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args(argv)
    checkouts = harness.checkouts(options.before)
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {way: [] for way in WAYS} for name in checkouts
    }
    for _ in range(options.turns):
        for name, checkout in checkouts.items():
            with tempfile.TemporaryDirectory() as programs:
                for way in WAYS:
                    found[name][way].append(seconds(checkout, options.config, Path(programs)))
    ours = {
        name: {
            way: {until: harness.summary([x[until] for x in taken]) for until in UNTIL}
            for way, taken in ways.items()
        }
        for name, ways in found.items()
    }
    workload = {"config": options.config, "seed": SEED, "turns": options.turns}
    harness.finish(harness.of_ours("start", workload, ours), to_file=options.save)


if __name__ == "__main__":
    main()
