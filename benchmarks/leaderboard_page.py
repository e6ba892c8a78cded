"""Writes the measured part of docs/leaderboard.md, and its pictures, from benchmarks/results.

python -m benchmarks.leaderboard_page            # write
python -m benchmarks.leaderboard_page --check    # exit 1 if it would change anything
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT
from benchmarks.quickstart import WAYS
from jaxrl_llm.train.evaluation.intervals import t_quantile

PAGE = ROOT / "docs" / "leaderboard.md"
COLUMNS = ("recipe", "seeds", "steps", "tokens", "minutes", *(f"{way}, gain" for way in WAYS))
PREFIX = "leaderboard_"
BASE = "grpo"


def measured(folder: Path = RESULTS) -> str:
    """The table of all tasks, and a table and a picture for each."""
    found = tasks(folder)
    parts = [*_overview(found), *(part for each in found for part in _task(each))]
    return "\n\n".join(parts) or "Nothing yet."


def tasks(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The results of each task from all devices as one, whose runs name their device."""
    found: dict[str, dict[str, Any]] = {}
    for each in pages.results(folder):
        if each["name"].startswith(PREFIX):
            runs = [run | {"device": each["device"]} for run in each["runs"]]
            task = found.setdefault(each["name"], {**each, "devices": [], "runs": []})
            if task["workload"] != each["workload"]:
                raise ValueError(f"{each['name']}: the devices' results are of different tasks.")
            task["devices"].append(each["device"])
            task["runs"] += runs
            names = [(run["recipe"], run["seed"]) for run in task["runs"]]
            if len(set(names)) < len(names):
                raise ValueError(f"{each['name']}: two devices ran one recipe on one seed.")
    return list(found.values())


def picture(result: Mapping[str, Any]) -> Path:
    """Where the picture of a task is."""
    return RESULTS / f"{result['name']}.png"


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Held-out accuracy by tokens and by minutes, and the training rewards; a color a recipe.

    Minutes are those of the first device.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    by_tokens, by_minutes, by_step = figure.subplots(1, 3)
    for color, (recipe, runs) in enumerate(_by_recipe(result).items()):
        for i, run in enumerate(runs):
            style = {"color": f"C{color}", "label": recipe if i == 0 else None, "linewidth": 1}
            sampled = [point["sampled"] for point in run["curve"]]
            thousands = [point["tokens"] / 1000 for point in run["curve"]]
            by_tokens.plot(thousands, sampled, marker=".", **style)
            if run["device"] == result["devices"][0]:
                minutes = [point["minutes"] for point in run["curve"]]
                by_minutes.plot(minutes, sampled, marker=".", **style)
            by_step.plot(range(1, len(run["rewards"]) + 1), run["rewards"], **style)
    by_tokens.set(xlabel="thousand tokens sampled", ylabel="held-out reward, sampled")
    by_minutes.set(xlabel="minutes of training", ylabel="held-out reward, sampled")
    by_step.set(xlabel="step", ylabel="reward in training")
    for axes in (by_tokens, by_minutes, by_step):
        axes.grid(alpha=0.3)
    by_step.legend()
    figure.savefig(path, dpi=110)


def _by_recipe(result: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The complete runs of each recipe; first the recipe with the largest mean gain."""
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for run in result["runs"]:
        if "failed" not in run:
            runs.setdefault(run["recipe"], []).append(run)
    order = sorted(runs, key=lambda name: -sum(fmean(_gains(runs[name], way)) for way in WAYS))
    return {name: runs[name] for name in order}


def _overview(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """How far each recipe is from BASE on each task, where they share at least two seeds."""
    names, differences = [], {}
    for result in results:
        of_task = _differences(result)
        names += [result["name"].removeprefix(PREFIX)] if of_task else []
        for recipe, values in of_task.items():
            differences.setdefault(recipe, {})[names[-1]] = values
    if not differences:
        return []

    def cell(values: Sequence[float] | None) -> str:
        if values is None:
            return "-"
        mark = "**" if abs(fmean(values)) > _half(values) else ""
        return f"{mark}{_spread(values)}{mark}"

    order = sorted(differences, key=lambda name: -fmean(map(fmean, differences[name].values())))
    rows = [(f"`{x}`", *(cell(differences[x].get(name)) for name in names)) for x in order]
    count = sum(map(len, differences.values()))
    text = (
        f"The sampled gain less that of `{BASE}` on the same seed, so on the same questions: the "
        "mean over the seeds and half of its 95% interval. Bold: the interval excludes zero. Of "
        f"{count} such intervals, about {round(0.05 * count)} would exclude zero by chance alone."
    )
    return [pages.table(f"## All tasks, compared with {BASE}\n\n{text}", ("recipe", *names), rows)]


def _differences(result: Mapping[str, Any]) -> dict[str, list[float]]:
    """The sampled gain of each recipe less that of BASE, for each seed that both have."""
    gains = {
        name: {run["seed"]: _gains([run], "sampled")[0] for run in runs}
        for name, runs in _by_recipe(result).items()
    }
    base = gains.pop(BASE, {})
    found = {
        name: [value - base[seed] for seed, value in sorted(each.items()) if seed in base]
        for name, each in gains.items()
    }
    return {name: values for name, values in found.items() if len(values) > 1}


def _gains(runs: Sequence[Mapping[str, Any]], way: str) -> list[float]:
    return [run[f"{way}_after"] - run[f"{way}_before"] for run in runs]


def _task(result: Mapping[str, Any]) -> list[str]:
    task = result["name"].removeprefix(PREFIX)
    recipes, workload = _by_recipe(result), result["workload"]
    questions = next(run["questions"] for runs in recipes.values() for run in runs)
    options = f" with `{workload['options']}`" if workload.get("options") else ""
    title = (
        f"## {task}\n\n`{workload['config']}`{options}, {questions} held-out questions, "
        f"{' / '.join(result['devices'])} "
        f"(`python -m benchmarks.leaderboard {task} --recipes NAMES`):"
    )
    rows = [_row(name, runs, result["devices"]) for name, runs in recipes.items()]
    failed = [f"`{x['recipe']}` on seed {x['seed']}" for x in result["runs"] if "failed" in x]
    image = picture(result).relative_to(RESULTS.parents[1]).as_posix()
    parts = [pages.table(title, COLUMNS, rows), f"![Curves of the task {task}](../{image})"]
    return parts + ([f"Ended with an error: {', '.join(failed)}."] if failed else [])


def _row(recipe: str, runs: Sequence[Mapping[str, Any]], devices: Sequence[str]) -> tuple[str, ...]:
    def mean(column: str) -> float:
        return fmean(run[column] for run in runs)

    def minutes(device: str) -> str:
        found = [run["minutes"] for run in runs if run["device"] == device]
        return f"{fmean(found):.1f}" if found else "-"

    return (
        f"`{recipe}`",
        ", ".join(str(seed) for seed in sorted(run["seed"] for run in runs)),
        f"{mean('steps'):.0f}",
        f"{mean('tokens'):,.0f}",
        " / ".join(map(minutes, devices)),
        *(
            f"{mean(f'{way}_before'):.3f} to {mean(f'{way}_after'):.3f}, "
            f"{_spread(_gains(runs, way))}"
            for way in WAYS
        ),
    )


def _spread(gains: Sequence[float]) -> str:
    """The mean and, of several, half of its 95% interval."""
    mean = f"{fmean(gains):+.3f}"
    return mean if len(gains) == 1 else f"{mean} ± {_half(gains):.3f}"


def _half(gains: Sequence[float]) -> float:
    """Half of the 95% interval of the mean, by Student's t over the seeds."""
    n = len(gains)
    return t_quantile(n) * stdev(gains) / math.sqrt(n)


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    if not argv and "--check" not in sys.argv:
        for each in tasks():
            plot(each, picture(each))
    return pages.write(PAGE, measured, "benchmarks.leaderboard_page", argv)


if __name__ == "__main__":
    sys.exit(main())
