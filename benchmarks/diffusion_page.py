"""Writes the measured part of docs/diffusion.md, and its picture, from benchmarks/results.

python -m benchmarks.diffusion_page            # write, and draw benchmarks/results/diffusion-*.png
python -m benchmarks.diffusion_page --check    # exit 1 if it would change anything
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT

PAGE = ROOT / "docs" / "diffusion.md"
COLUMNS = ("bias", "elbo_bias", "std", "error", "ratio_error", "ratio_apart")
TITLES = {
    "consistent": "A consistent denoiser",
    "random": "A random denoiser",
}
# The rows of the picture: a column of the tables, and what stands at its axis.
DRAWN = {
    "bias": "bias, nats",
    "std": "standard deviation, nats",
    "ratio_error": "error of the log ratio, nats",
}


def measured(folder: Path = RESULTS) -> str:
    """The pictures and tables of benchmarks/diffusion.py."""
    return (
        "\n\n".join(part for each in _results(folder) for part in _tables(each)) or "Nothing yet."
    )


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Bias, standard deviation and error of the log ratio against forwards, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(DRAWN), len(result["worlds"]), sharex=True, sharey="row")
    for column, (name, world) in zip(grid.T, result["worlds"].items(), strict=True):
        for axes, (key, label) in zip(column, DRAWN.items(), strict=True):
            for number, (estimator, budgets) in enumerate(world["estimators"].items()):
                points = [(int(forwards), row[key]) for forwards, row in budgets.items()]
                if key == "std" and not any(y for _, y in points):
                    continue  # what has no noise has no place on a logarithmic axis
                style = "o--" if estimator.startswith("EUBO") else "o-"
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    color=f"C{number}" if number < 10 else "black",
                    markersize=4,
                    label=estimator,
                )
            axes.set(xscale="log", ylabel=label, yscale="linear" if key == "bias" else "log")
            axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        exact = world["exact"]
        column[0].set_title(TITLES[name])
        column[0].axhline(0.0, color="black", linewidth=1)
        column[0].axhline(
            exact["elbo"] - exact["log_likelihood"], color="black", linestyle=":", linewidth=1
        )
        column[2].axhline(exact["log_ratio_rms"], color="black", linestyle=":", linewidth=1)
        column[2].set_xlabel("forwards")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=100)


def picture(result: Mapping[str, Any]) -> str:
    """The file name of the picture of a result."""
    return f"diffusion-{result['device']}.png"


def _results(folder: Path) -> list[dict[str, Any]]:
    return [each for each in pages.results(folder) if each["name"] == "diffusion"]


def _tables(result: Mapping[str, Any]) -> list[str]:
    work = result["workload"]
    blocks = [
        f"{work['responses']} responses of {work['length']} tokens out of {work['vocabulary']}, "
        f"{work['repeats']} estimates of each (`python -m benchmarks.diffusion`, "
        f"{result['core_seconds']:.0f} s of one core, {result['device']}). Dotted: the lower "
        "bound, and the size of the log ratios.",
        f"![bias and noise by forwards](../benchmarks/results/{picture(result)})",
    ]
    for name, world in result["worlds"].items():
        exact = world["exact"]
        title = (
            f"{TITLES[name]}: mean log-likelihood {exact['log_likelihood']:.2f}, lower bound "
            f"{exact['elbo']:.2f}, log ratios of size {exact['log_ratio_rms']:.2f}:"
        )
        rows = [
            (estimator, forwards, *(f"{row[column]:.2f}" for column in COLUMNS))
            for estimator, budgets in world["estimators"].items()
            for forwards, row in budgets.items()
        ]
        blocks.append(pages.table(title, ("estimator", "forwards", *COLUMNS), rows))
    return blocks


def main(argv: list[str] | None = None) -> int:
    """Write and draw, or check; the exit code is 1 where a check fails."""
    code = pages.write(PAGE, measured, "benchmarks.diffusion_page", argv)
    if "--check" not in (sys.argv[1:] if argv is None else argv):
        for result in _results(RESULTS):
            draw(result, RESULTS / picture(result))
    return code


if __name__ == "__main__":
    sys.exit(main())
