"""Prompts whose success rates rise while they are sampled: which choice meets those that teach.

The logits of 1,024 success rates are normal with mean -1 and deviation 3, and rise by up to four in
the course of 96 batches, each at a speed of its own; so most groups of eight agree, and which do
not changes. The rates do not depend on what is asked for, and all choices meet the same.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.claims import _simulated, harness

PROMPTS, GROUPS, SIZE, STEPS = 1024, 32, 8, 96
LAST = STEPS - STEPS // 3
RISE = 4.0


def rates(seed: int) -> np.ndarray:
    """Success rates ``[STEPS, N]``."""
    generator = np.random.default_rng((seed, 0))
    logits = generator.normal(-1.0, 3.0, PROMPTS)
    speed = generator.uniform(0.0, RISE, PROMPTS)
    return 1.0 / (1.0 + np.exp(-(logits + speed * np.linspace(0.0, 1.0, STEPS)[:, None])))


def play(collector, seed: int, size: int = SIZE) -> dict[str, Any]:
    """One run: of each batch the share of informative groups and the mean of p (1 - p)."""
    run = _simulated.Run(collector, prompts=PROMPTS, groups=GROUPS, size=size, seed=seed)
    shares, variances = [], []
    for now in rates(seed):
        batch = run.batch(_simulated.by_rates(now))
        shares.append(batch.informative.mean())
        p = now[batch.prompts]
        variances.append((p * (1 - p)).mean())
    return {"share": np.array(shares), "variance": np.array(variances), "state": run.state}


def runs(collectors: Mapping[str, Any], *, seed: int, quick: bool, size: int = SIZE):
    """`play` of each collector over the same seeds."""
    seeds = [1000 * seed + i for i in range(2 if quick else 8)]
    return {name: [play(x, each, size) for each in seeds] for name, x in collectors.items()}


def column(found, name: str, what: str = "share", first: int = 0) -> np.ndarray:
    """The mean over the batches from ``first``, of each seed."""
    return np.array([each[what][first:].mean() for each in found[name]])


def more(found, name: str, other: str = "uniform", what: str = "share", first: int = 0):
    """That of one choice less that of another, paired by seed."""
    return harness.mean(
        column(found, name, what, first) - column(found, other, what, first), "seeds"
    )


def share_measures(found, name: str, other: str = "uniform") -> list[harness.Measure]:
    """More informative groups in all batches, and in the last third."""
    words = f"share of informative groups, {name} less {other}"
    return [
        harness.Measure(f"{words}, {when}", more(found, name, other, first=first), "above", 0.0)
        for when, first in (("all batches", 0), ("last third", LAST))
    ]


def facts(found, what: str = "share", words: str = "share of informative groups"):
    return {f"{words}, {name}": column(found, name, what).mean() for name in found}


def plot(found, what: str = "share", label: str = "share of informative groups") -> harness.Plot:
    """Means over seeds, in blocks of eight batches."""
    series = []
    for name in found:
        blocks = np.stack([each[what].reshape(-1, 8).mean(-1) for each in found[name]])
        centers = [harness.mean(values, "seeds") for values in blocks.T]
        value, low, high, _ = zip(*centers, strict=True)
        series.append(harness.Series(name, 8 * np.arange(len(value)) + 4.5, value, low, high))
    return harness.Plot("batch", label, series)
