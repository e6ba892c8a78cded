"""The main job, once a seed: held-out accuracy before and after, and minutes of training.

    python -m benchmarks.quickstart --beside dapo --save

Runs `jaxrl-llm train configs/quickstart.py` for seeds 0, 1 and 2, each with a split of the
questions of its own, and writes benchmarks/results/quickstart-DEVICE.json and the reward curve of
the first seed. `--beside` trains other targets of that file in turn with it, and `--before` the
quickstart of another checkout: these are in quickstart_beside-DEVICE.json, and held-out accuracy is
drawn by minutes of training; every run is then evaluated at each eighth step. Minutes are those of
sampling and training, with the programs that they compile, each run from an empty cache, and
without evaluations. A run that is in `--folder` already is not made again, so a benchmark that was
stopped goes on.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.worker import jax_device_name, package_versions

CONFIG = "configs/quickstart.py"
WAYS = ("greedy", "sampled")
CURVES = harness.RESULTS / "quickstart_curves.png"


class CommandFailed(SystemExit):
    """A command of a benchmark ended with an error."""


def run(
    seed: int,
    folder: Path,
    extra: Sequence[str] = (),
    *,
    target: str = CONFIG,
    checkout: Path = harness.ROOT,
) -> dict[str, Any]:
    """Trains one seed in a process of its own and returns what it measured."""
    commit = harness.commit(checkout)  # of the code that runs, whatever is edited meanwhile
    command = [sys.executable, "-m", "jaxrl_llm", "train", target]
    command += ["--seed", str(seed), "--data.seed", str(seed), "--run-dir", str(folder), *extra]
    # Each run compiles for itself, and its progress goes to stderr, since the last line of stdout
    # is the result.
    with tempfile.TemporaryDirectory() as programs:
        own = {"JAX_COMPILATION_CACHE_DIR": programs, "PYTHONPATH": str(checkout.resolve())}
        ends: list[Used] = []
        usage, seconds = timed(
            command,
            {**os.environ, **own},
            checkout,
            beside=lambda pid: note_steps(pid, folder / "metrics.jsonl", ends),
        )
    took = {**resources(usage, seconds), **resources_of_steps(ends)}
    return {**measured(seed, folder), **took, "commit": commit}


def timed(
    command: Sequence[str],
    environment: Mapping[str, str],
    checkout: Path = harness.ROOT,
    *,
    beside: Callable[[int], None] | None = None,
) -> tuple[Any, float]:
    """What a command used, as ``os.wait4`` counts it, and its seconds; it must succeed.

    ``beside`` is called with the id of its process, in a thread of its own.
    """
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=checkout, stdout=sys.stderr, env=environment)
    if beside is not None:
        threading.Thread(target=beside, args=(process.pid,), daemon=True).start()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        text = f"{' '.join(command)} ended with code {process.returncode}."
        raise CommandFailed(f"benchmarks.quickstart: {text}")
    return usage, time.perf_counter() - start


def resources(usage: Any, seconds: float) -> dict[str, float]:
    """What a command took of the machine, from its first to its last line.

    Args:
      usage: ``ru_utime``, ``ru_stime`` and ``ru_maxrss`` of the process.
      seconds: From its start to its end.
    """
    busy = usage.ru_utime + usage.ru_stime
    return {
        "command_minutes": round(seconds / 60, 2),
        "cores_busy": round(busy / (seconds * (os.cpu_count() or 1)), 3),
        "kernel_share": round(usage.ru_stime / busy, 4),
        "peak_memory_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }


class Used(NamedTuple):
    """A moment, and the seconds that a process had taken until then, its own and the kernel's."""

    moment: float
    own: float
    kernel: float


def note_steps(pid: int, metrics: Path, ends: list[Used]) -> None:
    """Adds what a process has used at the end of each step, until it ends.

    Returns at once where there is no /proc.
    """
    tick, seen = os.sysconf("SC_CLK_TCK"), 0
    while True:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return
        count = metrics.read_text().count('"loss"') if metrics.is_file() else 0
        if count > seen:
            seen = count
            ends.append(Used(time.perf_counter(), int(fields[11]) / tick, int(fields[12]) / tick))
        time.sleep(0.02)


def resources_of_steps(ends: Sequence[Used]) -> dict[str, float]:
    """Medians over the steps but the first, which the few that compile or save hardly move."""
    steps = [Used(*(b - a for a, b in zip(*pair, strict=True))) for pair in pairwise(ends)]
    if not steps:
        return {}
    cores = os.cpu_count() or 1
    busy = statistics.median((s.own + s.kernel) / (s.moment * cores) for s in steps)
    kernel = statistics.median(s.kernel / (s.own + s.kernel) for s in steps)
    return {"cores_busy_in_steps": round(busy, 3), "kernel_share_in_steps": round(kernel, 4)}


def once(
    seed: int, folder: Path, extra: Sequence[str], *, target: str, checkout: Path = harness.ROOT
) -> dict[str, Any]:
    """The figures of a run, which is made unless they are there.

    Raises:
      SystemExit: If the run that is there is one of other options.
    """
    record, options = folder.with_suffix(".json"), [target, *extra]
    if not record.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        figures = run(seed, folder, extra, target=target, checkout=checkout)
        record.write_text(json.dumps({"options": options, "figures": figures}))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    stored = json.loads(record.read_text())
    if stored["options"] != options:
        raise SystemExit(
            f"benchmarks: {record} is of {' '.join(stored['options'])}, not of "
            f"{' '.join(options)}; use another folder."
        )
    return stored["figures"]


def measured(seed: int, folder: Path) -> dict[str, Any]:
    """One seed's figures, from the metrics of its run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve, seconds, steps, tokens = [], 0.0, 0, 0
    for row in rows:
        if "loss" in row:
            steps += 1
            tokens += int(row.get("tokens_sampled", row["tokens"]))  # evolution: all of them
            seconds += sum(row[f"seconds_{phase}"] for phase in ("wait", "score", "train"))
        elif "held_out" in row:
            means = {way: round(row["held_out"][way]["mean"], 4) for way in WAYS}
            spent = {"step": steps, "minutes": round(seconds / 60, 3), "tokens": tokens}
            curve.append({**spent, **means})
    before, after = (row["held_out"] for row in (rows[0], rows[-1]))
    result: dict[str, Any] = {"seed": seed, "steps": steps, "minutes": round(seconds / 60, 2)}
    result["tokens"] = tokens
    for way in WAYS:
        for when, found in (("before", before[way]), ("after", after[way])):
            result[f"{way}_{when}"] = round(found["mean"], 4)
            result[f"{way}_{when}_interval"] = [round(found[end], 4) for end in ("low", "high")]
    return {**result, "questions": before["greedy"]["questions"], "curve": curve}


def plot(runs: Mapping[str, Sequence[dict[str, Any]]], path: Path) -> None:
    """Held-out accuracy by minutes of training: a color a target, a line a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, way in zip(figure.subplots(1, 2, sharey=True), WAYS, strict=True):
        for color, (name, seeds) in enumerate(runs.items()):
            for i, each in enumerate(seeds):
                points = [(point["minutes"], point[way]) for point in each["curve"]]
                label = name if i == 0 else None
                axes.plot(*zip(*points, strict=True), color=f"C{color}", marker=".", label=label)
        axes.set(xlabel="minutes of training", ylabel=f"held-out accuracy, {way}")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    """Run the seeds and print one JSON line last."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--beside", nargs="*", default=[], help="other targets of the config")
    options.add_argument("--before", type=Path, help="a checkout whose quickstart runs too")
    options.add_argument("--folder", type=Path, help="of the runs; a temporary one by default")
    options.add_argument("--save", action="store_true", help="write benchmarks/results")
    options, extra = options.parse_known_args(argv)
    if extra and options.save:
        raise SystemExit(f"benchmarks.quickstart: {' '.join(extra)} would not be the main job")
    jobs = {"quickstart": (CONFIG, harness.ROOT)}
    jobs |= {name: (f"{CONFIG}:{name}", harness.ROOT) for name in options.beside}
    before = harness.commit(options.before) if options.before else ""
    if before:
        jobs[f"before_{before}"] = (CONFIG, options.before)
    if len(jobs) > 1:
        extra = [*extra, "--evaluation.every", "8"]
    with tempfile.TemporaryDirectory() as scratch:
        root = (options.folder or Path(scratch)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        runs: dict[str, list[dict[str, Any]]] = {}
        for seed in options.seeds:
            for name, (target, checkout) in jobs.items():
                folder = root / f"{name}{seed}"
                figures = once(seed, folder, extra, target=target, checkout=checkout)
                runs.setdefault(name, []).append(figures)
                print(name, json.dumps(figures), file=sys.stderr, flush=True)
        result: dict[str, Any] = {
            "name": "quickstart_beside" if len(jobs) > 1 else "quickstart",
            "workload": {"config": CONFIG},
            "device": jax_device_name(),
            "versions": {"ours": package_versions(("jax", "jaxlib", "flax", "optax"))},
            "commit": harness.commit(),
            "runs": runs["quickstart"],
        }
        if options.beside:
            result["beside"] = {name: runs[name] for name in options.beside}
        if before:
            result["before"] = {"commit": before, "runs": runs[f"before_{before}"]}
        if options.save:
            harness.RESULTS.mkdir(parents=True, exist_ok=True)
            if len(runs) > 1:
                plot(runs, CURVES)
            else:
                first = root / f"quickstart{options.seeds[0]}"
                shutil.copy(first / "reward.png", harness.RESULTS / "quickstart.png")
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
