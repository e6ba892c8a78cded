"""Evolution and policy gradient on one task: what finished runs learned, by tokens and by seconds.

    jaxrl-llm train configs/es_quickstart.py --seed 0 --run-dir EVOLUTION_0
    jaxrl-llm train configs/es_quickstart.py --seed 1 --data.seed 1 --run-dir EVOLUTION_1
    jaxrl-llm train configs/es_quickstart.py:policy_gradient --run-dir POLICY_GRADIENT
    python -m benchmarks.es_quickstart --save EVOLUTION_0 EVOLUTION_1 POLICY_GRADIENT --trials ...

Reads metrics.jsonl of each run and writes benchmarks/results/es_quickstart-DEVICE.json and .png.
Seconds are those of sampling, scoring and updates; evaluation and saving are left out, and so is
compiling of what no step waits for. Tokens are those that were generated for training.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, quickstart
from benchmarks.worker import jax_device_name, package_versions

CURVE = harness.RESULTS / "es_quickstart.png"
# A rise of held-out greedy accuracy, to which tokens and seconds are counted.
RISE = 0.2
PHASES = ("wait", "score", "train")


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluations(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Held-out accuracy at each evaluation, with what had been spent until then."""
    seconds, tokens, found = 0.0, 0, []
    for row in rows:
        if "loss" in row:
            seconds += sum(row[f"seconds_{phase}"] for phase in PHASES)
            tokens += int(row.get("tokens_sampled", row["tokens"]))
        if "held_out" in row:
            means = {way: round(row["held_out"][way]["mean"], 4) for way in quickstart.WAYS}
            spent = {"step": row["step"], "seconds": round(seconds, 1), "tokens": tokens}
            found.append({**spent, **means})
    return found


def reached(found: Sequence[dict[str, Any]], rise: float = RISE) -> dict[str, Any] | None:
    """The first evaluation at which greedy accuracy has risen by so much, or None."""
    goal = found[0]["greedy"] + rise - 1e-9
    return next((each for each in found if each["greedy"] >= goal), None)


def measured(folder: Path) -> dict[str, Any]:
    """The figures of one run."""
    rows, seed = read(folder), seed_of(folder)
    # An evolution strategy alone has the spread of its members.
    evolves = any("member_std" in row for row in rows)
    figures, found = quickstart.measured(seed, folder), evaluations(rows)
    tokens = found[-1]["tokens"]
    gain = {way: round(found[-1][way] - found[0][way], 4) for way in quickstart.WAYS}
    return {
        "method": "evolution" if evolves else "policy gradient",
        **figures,
        "tokens": tokens,
        "gain": gain,
        "gain_per_10k_tokens": {way: float(f"{g / tokens * 1e4:.3g}") for way, g in gain.items()},
        "gain_per_minute": {
            way: float(f"{g / found[-1]['seconds'] * 60:.3g}") for way, g in gain.items()
        },
        "reached": reached(found),
        "evaluations": found,
    }


def trial(folder: Path) -> dict[str, Any]:
    """A run with other settings, as far as it was evaluated: what they were and where it came."""
    first, *_, last = [row for row in read(folder) if "held_out" in row]
    settings = json.loads((folder / "sessions.jsonl").read_text().splitlines()[0])["settings"]
    sigma = re.search(r"sigma=([0-9.e-]+)", settings["recipe"])
    if sigma is None:
        raise ValueError(f"{folder} is no run of evolution: its recipe has no sigma.")
    return {
        "seed": seed_of(folder),
        "sigma": float(sigma[1]),
        "learning_rate": settings["optimizer.learning_rate"],
        "decay_steps": settings["optimizer.decay_steps"],
        "step": last["step"],
        **{
            way: [round(row["held_out"][way]["mean"], 4) for row in (first, last)]
            for way in quickstart.WAYS
        },
    }


def seed_of(folder: Path) -> int:
    """That of the command line of a run, 0 where it names none."""
    overrides = json.loads((folder / "run.json").read_text())["overrides"]
    return int(overrides[overrides.index("--seed") + 1]) if "--seed" in overrides else 0


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Held-out accuracy against generated tokens and against seconds, greedy and sampled."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 2, sharey="row")
    spent = (("tokens", "generated tokens"), ("seconds", "seconds of training"))
    for row, way in zip(grid, quickstart.WAYS, strict=True):
        for axes, (unit, label) in zip(row, spent, strict=True):
            for run in runs:
                points = [(each[unit], each[way]) for each in run["evaluations"]]
                style = "--" if run["method"] == "policy gradient" else "-"
                name = f"{run['method']}, seed {run['seed']}"
                axes.plot(*zip(*points, strict=True), style, marker=".", label=name)
            axes.set(xlabel=label, ylabel=f"held-out accuracy, {way}")
            axes.grid(alpha=0.3)
    grid[0][0].legend()
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    """Read the runs and print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument(
        "--trials", type=Path, nargs="*", default=[], help="folders of runs with other settings"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args(argv)
    for folder in (*options.runs, *options.trials):
        if not (folder / "metrics.jsonl").is_file():
            parser.error(f"{folder} has no metrics.jsonl: it is no folder of a run")
    runs = [measured(folder) for folder in options.runs]
    result = {
        "name": "es_quickstart",
        "workload": {"config": "configs/es_quickstart.py", "rise": RISE},
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "flax", "optax"))},
        "commit": harness.commit(),
        "runs": runs,
        "trials": [trial(folder) for folder in options.trials],
    }
    if options.save:
        harness.RESULTS.mkdir(parents=True, exist_ok=True)
        plot(runs, CURVE)
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
