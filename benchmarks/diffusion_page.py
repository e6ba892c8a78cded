"""Writes the measured parts of docs/diffusion.md, and its pictures, from benchmarks/results.

python -m benchmarks.diffusion_page            # write, and draw benchmarks/results/diffusion-*.png
python -m benchmarks.diffusion_page --check    # exit 1 if it would change anything
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT
from benchmarks.readme import spread

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


def trained(folder: Path = RESULTS) -> str:
    """Accuracy before and after each run of benchmarks/diffusion_training.py, and its curves."""
    blocks = []
    for result in _results(folder, "diffusion_training"):
        title = (
            f"`{result['workload']['config']}` on {result['device']}: share of letters in their "
            f"places, of {result['runs'][0]['questions']} held-out questions; in brackets 95% "
            "intervals (`python -m benchmarks.diffusion_training`):"
        )
        columns = ("run", "steps", "minutes", "greedy", "sampled")
        rows = [
            (
                "right answers" if run["name"] == "supervised" else f"then `{run['name']}`",
                str(run["steps"]),
                f"{run['minutes']:.1f}",
                *(
                    "{:.3f} [{:.3f}, {:.3f}]".format(
                        run[f"{way}_after"], *run[f"{way}_after_interval"]
                    )
                    for way in ("greedy", "sampled")
                ),
            )
            for run in result["runs"]
        ]
        blocks.append(pages.table(title, columns, rows))
        blocks.append(f"![accuracy by step](../benchmarks/results/{curves(result)})")
    return "\n\n".join(blocks) or "Nothing yet."


def flows(folder: Path = RESULTS) -> str:
    """Held-out rewards before and after the runs of benchmarks/flow_training.py."""
    blocks = []
    for result in _results(folder, "flow_training"):
        methods: dict[str, list[dict[str, Any]]] = {}
        for run in result["runs"]:
            methods.setdefault(run["method"], []).append(run)
        first = result["runs"][0]
        seeds = len(methods[first["method"]])
        title = (
            f"`{result['workload']['config']}` on {result['device']}: mean reward of "
            f"{first['questions']} held-out prompts, of samples without noise; the mean of "
            f"{seeds} seeds, in brackets the least and the greatest "
            "(`python -m benchmarks.flow_training`):"
        )

        def over_seeds(runs: list[dict[str, Any]], key: str) -> str:
            values = [run[key] for run in runs]
            mean = sum(values) / len(values)
            return f"{mean:.3f} [{min(values):.3f}, {max(values):.3f}]"

        rows = [
            (
                f"`{method}`",
                str(runs[0]["steps"]),
                over_seeds(runs, "sampled_before"),
                over_seeds(runs, "sampled_after"),
            )
            for method, runs in methods.items()
        ]
        blocks.append(pages.table(title, ("recipe", "steps", "before", "after"), rows))
    return "\n\n".join(blocks) or "Nothing yet."


def speed(folder: Path = RESULTS) -> str:
    """The sampler beside its matrix products, of benchmarks/denoise_speed.py."""
    blocks = []
    for result in _results(folder, "denoise_speed"):
        work = result["workload"]
        title = (
            f"{work['model']}, {work['dtype']}, {work['prompts']} x {work['responses']} responses "
            f"of {work['new_tokens']} tokens behind {work['prompt_tokens']}, {work['steps']} "
            f"steps, {result['device']}; tokens are those of forward passes "
            "(`python -m benchmarks.denoise_speed`):"
        )
        columns = ("tokens of a block", "tokens/s", "of the matrix products alone", "Gflop/s")
        rows = [
            (
                str(case["block"]),
                spread(case["sampler_tokens_per_s"]),
                f"{case['share_of_products']:.0%}",
                spread(case["products_gflop_per_s"]),
            )
            for case in result["cases"]
        ]
        blocks.append(pages.table(title, columns, rows))
    return "\n\n".join(blocks) or "Nothing yet."


def draw_curves(result: Mapping[str, Any], path: Path) -> None:
    """Held-out accuracy by step of each run, those by rewards behind the first, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for run in result["runs"]:
        axes = left if run["name"] == "supervised" else right
        axes.plot(*zip(*run["curve"], strict=True), label=run["name"])
    left.set(xlabel="step", ylabel="share of letters in their places", title="on right answers")
    right.set(xlabel="step", title="then by rewards")
    right.legend()
    figure.savefig(path, dpi=100)


def curves(result: Mapping[str, Any]) -> str:
    """The file name of the curves of a result."""
    return f"diffusion_training-{result['device']}.png"


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


def _results(folder: Path, name: str = "diffusion") -> list[dict[str, Any]]:
    return [each for each in pages.results(folder) if each["name"] == name]


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
    parts = {"measured": measured, "trained": trained, "speed": speed, "flows": flows}
    codes = [
        pages.write(PAGE, content, "benchmarks.diffusion_page", argv, part=part)
        for part, content in parts.items()
    ]
    if "--check" not in (sys.argv[1:] if argv is None else argv):
        for result in _results(RESULTS):
            draw(result, RESULTS / picture(result))
        for result in _results(RESULTS, "diffusion_training"):
            draw_curves(result, RESULTS / curves(result))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
