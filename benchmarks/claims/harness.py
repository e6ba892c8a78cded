"""What a claim file gives back, the intervals it needs, and how it is run and kept.

Each claim is kept as benchmarks/results/claims/NAME.json, and NAME.png beside it:

    {"name", "paper", "statement", "seed", "verdict",
     "measures": [{"what", "value", "low", "high", "holds", "threshold", "interval", "verdict"}],
     "facts": {text: number}, "plot": {...}, "seconds", "device", "versions", "commit"}
"""

import dataclasses
import importlib
import inspect
import json
import math
import pkgutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

import benchmarks.claims
from benchmarks import harness
from benchmarks.worker import jax_device_name, package_versions
from jaxrl_llm.train.evaluation.intervals import t_quantile, wilson

RESULTS = harness.RESULTS / "claims"
PACKAGES = ("jax", "jaxlib", "numpy")
# Modules of the package that are no claim.
_FRAMEWORK = ("__main__", "harness", "table")

HOLDS, FAILS, PARTLY, UNDECIDED = "holds", "does not hold", "holds in part", "undecided"


class Estimate(NamedTuple):
    """A number with its 95% interval, and in words where the interval comes from."""

    value: float
    low: float
    high: float
    interval: str


def exact(value: float, how: str = "exact, by enumeration") -> Estimate:
    """A number without sampling error."""
    return Estimate(float(value), float(value), float(value), how)


def mean(values: Any, what: str) -> Estimate:
    """The mean of independent values, with the interval of Student's t.

    Args:
        values: ``[n]``.
        what: What they are, in plural: "seeds", "prompts".
    """
    values = np.asarray(values, np.float64)
    center, error = values.mean(), values.std(ddof=1) / math.sqrt(values.size)
    half = error * t_quantile(values.size)
    how = f"Student's t, {values.size} {what}"
    return Estimate(float(center), float(center - half), float(center + half), how)


def share(successes: float, trials: int, what: str) -> Estimate:
    """A share of independent trials, with Wilson's interval; it is not empty at 0 or at 1."""
    p = float(successes) / trials
    return Estimate(p, *wilson(p, trials), f"binomial (Wilson), {trials} {what}")


def share_difference(successes: float, others: float, trials: int, what: str) -> Estimate:
    """A share less another one, with Newcombe's interval, which is not empty at 0 or at 1.

    It takes the shares as independent; of the same trials, if the two agree more often than by
    chance, it is wider than needed.
    """
    (p, low, high, _), (q, q_low, q_high, _) = (
        share(count, trials, what) for count in (successes, others)
    )
    return Estimate(
        p - q,
        p - q - math.hypot(p - low, q_high - q),
        p - q + math.hypot(high - p, q - q_low),
        f"Newcombe, {trials} {what}",
    )


def bootstrap(
    statistic: Callable[..., float],
    *samples: Any,
    what: str,
    seed: int = 0,
    resamples: int = 2000,
) -> Estimate:
    """A statistic of independent units, with the percentile interval of its bootstrap.

    Args:
        statistic: ``statistic(*samples) -> float``.
        *samples: Arrays ``[n, ...]`` whose first axis is the units, drawn together.
        what: What the units are, in plural.
        seed: Of the draws.
        resamples: How many draws.
    """
    arrays = [np.asarray(x, np.float64) for x in samples]
    generator, n = np.random.default_rng(seed), len(arrays[0])
    draws = []
    for _ in range(resamples):
        rows = generator.integers(0, n, n)
        draws.append(statistic(*(x[rows] for x in arrays)))
    low, high = np.percentile(draws, [2.5, 97.5])
    value = float(statistic(*arrays))
    return Estimate(
        value, float(min(low, value)), float(max(high, value)), f"bootstrap, {n} {what}"
    )


def ratio_of_means(numerator: Any, denominator: Any) -> float:
    """For `bootstrap` of many units, where the numerator may be below 0; else see `ratio`."""
    return float(np.mean(numerator) / np.mean(denominator))


def ratio(numerator: Any, denominator: Any, *, what: str) -> Estimate:
    """The ratio of two positive means, with the interval of Student's t for its logarithm.

    The spread is that of jackknife values. The percentiles of a bootstrap cover in 86 of 100 cases
    with six units, in 88 with eight and in 91 with sixteen.

    Args:
        numerator: ``[n, ...]``, of independent units.
        denominator: ``[n, ...]``, of the same units.
        what: What they are, in plural.
    """
    rows = [np.asarray(x, np.float64) for x in (numerator, denominator)]
    rows = [x.reshape(len(x), -1).mean(-1) for x in rows]
    rest = [x.sum() - x for x in rows]
    if min(map(np.min, rest)) <= 0:
        raise ValueError("a ratio needs means above 0, also without any one of its units.")
    n, value = len(rows[0]), ratio_of_means(*rows)
    spread = np.std(np.log(rest[0]) - np.log(rest[1]), ddof=1) * (n - 1)
    factor = math.exp(spread / math.sqrt(n) * t_quantile(n))
    how = f"Student's t, {n} {what}, jackknife of the logarithm"
    return Estimate(value, value / factor, value * factor, how)


@dataclasses.dataclass(frozen=True)
class Measure:
    """One number of a claim against the threshold that would refute it.

    Attributes:
        what: What was measured, in words, with units.
        estimate: The number and its interval.
        holds: The side of the threshold on which the claim holds.
        threshold: As above; the whole interval must lie on that side.
    """

    what: str
    estimate: Estimate
    holds: Literal["above", "below"]
    threshold: float

    def __post_init__(self):
        if not all(map(math.isfinite, (*self.estimate[:3], self.threshold))):
            raise ValueError(f"{self.what}: a measure must be finite, not {self.estimate}")

    @property
    def verdict(self) -> str:
        _, low, high, _ = self.estimate
        if self.holds == "above":
            return HOLDS if low > self.threshold else FAILS if high <= self.threshold else UNDECIDED
        return HOLDS if high < self.threshold else FAILS if low >= self.threshold else UNDECIDED


@dataclasses.dataclass(frozen=True)
class Series:
    """One line (or set of bars) of a plot; x of bars are words."""

    label: str
    x: Sequence[float | str]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclasses.dataclass(frozen=True)
class Plot:
    """The data of the one plot of a claim.

    Attributes:
        x_label: Of the horizontal axis.
        y_label: Of the vertical axis.
        series: What is drawn; ``low`` and ``high`` become a band or error bars.
        kind: "line" or "bars".
        log: Which axes are logarithmic: "", "x", "y" or "xy".
        line: Height of a dotted horizontal line, such as a threshold.
    """

    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: Literal["line", "bars"] = "line"
    log: str = ""
    line: float | None = None


@dataclasses.dataclass(frozen=True)
class Claim:
    """What `run` of a claim file gives back.

    Attributes:
        measures: The first is the one in the table.
        plot: Its data.
        facts: Other numbers worth keeping, by what they are; no verdict depends on them.
    """

    measures: Sequence[Measure]
    plot: Plot
    facts: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """What all measures say; "holds in part" where some hold and some do not."""
        found = {measure.verdict for measure in self.measures}
        if FAILS in found:
            return PARTLY if HOLDS in found else FAILS
        return UNDECIDED if UNDECIDED in found else HOLDS


def names() -> list[str]:
    """The claim files of the package."""
    found = (module.name for module in pkgutil.iter_modules(benchmarks.claims.__path__))
    return sorted(name for name in found if name not in _FRAMEWORK and not name.startswith("_"))


def load(name: str) -> ModuleType:
    """A claim file, once it is seen to be one."""
    module = importlib.import_module(f"benchmarks.claims.{name}")
    for part in ("__doc__", "PAPER", "run"):
        if not getattr(module, part, None):
            raise AttributeError(f"benchmarks/claims/{name}.py has no {part}")
    return module


def text(module: ModuleType) -> tuple[str, str]:
    """The claim of a file in one sentence, and the rest of its docstring."""
    first, _, rest = inspect.cleandoc(module.__doc__ or "").partition("\n")
    return first.rstrip("."), rest.strip()


def record(name: str, claim: Claim, *, seed: int, seconds: float, commit: str) -> dict[str, Any]:
    """The JSON form of a claim."""
    module = load(name)
    return {
        "name": name,
        "paper": module.PAPER,
        "statement": text(module)[0],
        "seed": seed,
        "verdict": claim.verdict,
        "measures": [
            {
                "what": measure.what,
                **{k: _short(v) for k, v in measure.estimate._asdict().items()},
                "holds": measure.holds,
                "threshold": measure.threshold,
                "verdict": measure.verdict,
            }
            for measure in claim.measures
        ],
        "facts": _short(dict(claim.facts)),
        "plot": _short(dataclasses.asdict(claim.plot)),
        "seconds": round(seconds, 1),
        "device": jax_device_name(),
        "versions": package_versions(PACKAGES),
        "commit": commit,
    }


def run(name: str, *, seed: int = 0, quick: bool = False) -> tuple[Claim, float]:
    """Runs one claim; returns it and its seconds."""
    start = time.perf_counter()
    claim = load(name).run(seed=seed, quick=quick)
    return claim, time.perf_counter() - start


def result(name: str, *, commit: str, quick: bool = False) -> dict[str, Any]:
    """The JSON form of a claim that is run now."""
    claim, seconds = run(name, quick=quick)
    return record(name, claim, seed=0, seconds=seconds, commit=commit)


def result_or_error(name: str, *, commit: str, quick: bool = False) -> dict[str, Any] | str:
    """Like :func:`result`; an error comes as text, since jax has some that no process can send."""
    try:
        return result(name, commit=commit, quick=quick)
    except Exception:
        return traceback.format_exc()


def seconds_before(name: str, folder: Path = RESULTS) -> float:
    """How long a claim took when its result was stored; 0 if it has none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["seconds"] if path.is_file() else 0.0


def save(result: Mapping[str, Any], folder: Path = RESULTS) -> None:
    """Writes NAME.json and NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result['name']}.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, folder / f"{result['name']}.png")


def draw(result: Mapping[str, Any], path: Path) -> None:
    """The plot of a result, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plot = result["plot"]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    axes = figure.add_subplot()
    for number, series in enumerate(plot["series"]):
        _draw_series(axes, plot, series, number)
    if plot["line"] is not None:
        axes.axhline(plot["line"], color="gray", linestyle=":", linewidth=1)
    for axis in plot["log"]:
        axes.set(**{f"{axis}scale": "log"})
    axes.set(xlabel=plot["x_label"], ylabel=plot["y_label"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=90)


def _draw_series(axes, plot, series, number: int) -> None:
    y, banded = np.asarray(series["y"]), series["low"] is not None
    if plot["kind"] == "bars":
        places = np.arange(len(y))
        width = 0.8 / len(plot["series"])
        errors = None
        if banded:
            errors = np.maximum((y - np.asarray(series["low"]), np.asarray(series["high"]) - y), 0)
        shifted = places + (number + 0.5) * width - 0.4
        axes.bar(shifted, y, width, yerr=errors, capsize=3, label=series["label"])
        axes.set_xticks(places, [str(x) for x in series["x"]])
        return
    (line,) = axes.plot(series["x"], y, marker=".", label=series["label"])
    if banded:
        axes.fill_between(
            series["x"], series["low"], series["high"], color=line.get_color(), alpha=0.2
        )


def _short(value: Any) -> Any:
    """Numbers to five significant digits, through lists and dictionaries."""
    if isinstance(value, Mapping):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_short(item) for item in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    return float(f"{float(value):.5g}")
