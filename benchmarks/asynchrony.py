"""Staleness against utilization: a sampler and a trainer that work at the same time, simulated.

    python -m benchmarks.asynchrony --save                    # benchmarks/results, with the figure
    python -m benchmarks.asynchrony --sample 90 --train 40 --spread 0.6

Seconds are yours: the means of `seconds_sample` and `seconds_train` in metrics.jsonl, and the
standard deviation of the former over its mean. Nothing is trained.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import pages
from benchmarks.harness import RESULTS

RESULT, FIGURE = RESULTS / "asynchrony.json", RESULTS / "asynchrony.png"
SPREADS, STALENESS = (0.0, 0.25, 0.5, 1.0), (0, 1, 2, 3, 4, 6, 8)
BATCHES = 4000


class Timeline(NamedTuple):
    """When each batch was sampled and trained on, in seconds; float64 `[batches]`."""

    begin: np.ndarray  # of its sampling
    sampled: np.ndarray
    trained: np.ndarray
    version: np.ndarray  # int, updates behind the weights that sampled it


class Summary(NamedTuple):
    """A timeline in numbers."""

    trainer: float  # share of the time in which the trainer works
    sampler: float
    staleness: float  # mean updates between the weights that sampled a batch and those it trains
    step_seconds: float


def simulate(sample: np.ndarray, train: np.ndarray, *, max_staleness: int) -> Timeline:
    """One sampler and one trainer, batch after batch, by the rule of the training loop.

    Batch n trains version n of the weights, which update n - 1 makes. Its sampling begins once the
    batch before it is sampled and version n - max_staleness exists, from the newest version.

    Args:
      sample: Seconds that the sampling of each batch takes.
      train: Seconds that each update takes.
      max_staleness: As in `AsyncConfig`; 0 samples and trains in turns.
    """
    count = len(sample)
    begin, sampled, trained = np.zeros((3, count))
    version, newest = np.zeros(count, int), 0
    for n in range(count):
        needed = n - max_staleness  # the version that must exist; 0 always does
        exists = trained[needed - 1] if needed > 0 else 0.0
        begin[n] = max(sampled[n - 1] if n else 0.0, exists)
        while newest < n and trained[newest] <= begin[n]:
            newest += 1
        version[n] = newest
        sampled[n] = begin[n] + sample[n]
        trained[n] = max(sampled[n], trained[n - 1] if n else 0.0) + train[n]
    return Timeline(begin, sampled, trained, version)


def summary(timeline: Timeline, sample: np.ndarray, train: np.ndarray) -> Summary:
    """Shares of the time, and the mean staleness."""
    total, count = timeline.trained[-1], len(sample)
    stale = np.mean(np.arange(count) - timeline.version)
    return Summary(train.sum() / total, sample.sum() / total, float(stale), total / count)


def durations(mean: float, spread: float, count: int, *, seed: int) -> np.ndarray:
    """Log-normal seconds of this mean, whose standard deviation is ``spread`` times it."""
    sigma = np.sqrt(np.log1p(spread**2))
    drawn = np.random.default_rng(seed).standard_normal(count)
    return mean * np.exp(sigma * drawn - sigma**2 / 2)


def best_split(devices: int, *, sample: float, train: float, fixed: float) -> tuple[int, float]:
    """How many devices should sample while the others train, and the seconds of a step then.

        max(fixed s + (1 - fixed) s D / k,  t D / (D - k))      over k = 1 .. D - 1

    Args:
      devices: D.
      sample: s, seconds of sampling on all devices.
      train: t, seconds of an update on all devices.
      fixed: Share of s that more devices would not shorten: the tokens of the longest response come
        one after the other.
    """
    counts = np.arange(1, devices)
    sampling = fixed * sample + (1 - fixed) * sample * devices / counts
    both = np.maximum(sampling, train * devices / (devices - counts))
    best = int(np.argmin(both))
    return int(counts[best]), float(both[best])


def sweep(
    *, sample: float, train: float, spreads: Sequence[float], batches: int, seed: int
) -> list[dict[str, Any]]:
    """A row for each spread and limit on staleness."""
    updates = np.full(batches, train)
    rows = []
    for spread in spreads:
        drawn = durations(sample, spread, batches, seed=seed)
        for limit in STALENESS:
            found = summary(simulate(drawn, updates, max_staleness=limit), drawn, updates)
            numbers = {name: round(value, 4) for name, value in found._asdict().items()}
            rows.append({"spread": spread, "max_staleness": limit, **numbers})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Share of the trainer's time, and the staleness, by limit and spread."""
    spreads = sorted({row["spread"] for row in rows})
    columns = ("`max_staleness`", *(f"spread {spread:g}" for spread in spreads))
    lines = []
    for limit in STALENESS:
        cells = [row for row in rows if row["max_staleness"] == limit]
        cells = sorted(cells, key=lambda row: row["spread"])
        text = [f"{row['trainer']:.0%}, {row['staleness']:.1f}" for row in cells]
        lines.append((str(limit), *text))
    title = "Share of the time in which the trainer works, and mean staleness of a batch:"
    return pages.table(title, columns, lines)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Utilization by limit, and against the staleness that it costs, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for spread in sorted({row["spread"] for row in rows}):
        line = [row for row in rows if row["spread"] == spread]
        shares, label = [row["trainer"] for row in line], f"spread {spread:g}"
        left.plot([row["max_staleness"] for row in line], shares, marker=".", label=label)
        right.plot([row["staleness"] for row in line], shares, marker=".", label=label)
    left.set(xlabel="max_staleness", ylabel="share of the time the trainer works")
    right.set(xlabel="mean staleness of a batch, updates")
    left.set_ylim(0, 1.05)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=float, default=60.0, help="mean seconds of sampling")
    parser.add_argument("--train", type=float, default=60.0, help="seconds of an update")
    parser.add_argument("--spread", type=float, nargs="+", default=SPREADS)
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    given = parser.parse_args(argv)
    options: dict[str, Any] = {"sample": given.sample, "train": given.train}
    options |= {"spreads": list(given.spread), "batches": given.batches, "seed": given.seed}
    rows = sweep(**options)
    print(table(rows))
    if given.save:
        result = {"name": "asynchrony", "workload": options, "rows": rows}
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
        draw(rows, FIGURE)


if __name__ == "__main__":
    main()
