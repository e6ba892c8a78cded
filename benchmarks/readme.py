"""Writes the generated parts of README.md and docs/catalog.md: families, results and methods.

python -m benchmarks.readme            # write
python -m benchmarks.readme --check    # exit 1 if it would change anything
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT, short

README = ROOT / "README.md"
CATALOG = ROOT / "docs" / "catalog.md"
CURVE = RESULTS / "quickstart.png"

# By kind of the catalog: what such a method computes, and the page that explains it.
FAMILIES = {
    "reward": ("rewards from texts, lengths and votes", "rewards.md"),
    "curation": ("which prompts, groups, rollouts and tokens train", "collectors.md"),
    "advantage": ("credit of responses, turns and tokens", "credit.md"),
    "surrogate": ("policy losses per token or sequence", "same_name_different_number.md"),
    "correction": ("weights and masks for off-policy tokens", "own_method.md#the-slots"),
    "preference": ("losses of pairs and lists, reward models", "preferences.md"),
    "regularizer": ("KL penalties and entropy bonuses", "own_method.md#the-slots"),
    "aggregate": (
        "denominators of the loss",
        "same_name_different_number.md#the-mean-over-sequences",
    ),
    "reference": ("moving references and merged models", "training.md#merging-models"),
    "diagnostic": ("quantities to monitor", "glossary.md"),
    "rollout": ("sampling, partial rollouts, branching", "engine.md"),
    "evolution": ("training by forward passes alone", "evolution.md"),
    "diffusion": ("masked-diffusion and flow policies", "diffusion.md"),
}


def fill(text: str, part: str, content: str) -> str:
    """The text with what stands between the markers of a part replaced.

    Args:
        text: Of the README.
        part: Its name in `<!-- part:begin -->` and `<!-- part:end -->`.
        content: Lines to put there, without a final newline.
    """
    begin, end = f"<!-- {part}:begin -->\n", f"<!-- {part}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"README.md must have the markers of {part!r} exactly once")
    head, rest = text.split(begin)
    tail = rest.split(end)[1]
    return f"{head}{begin}{content}\n{end}{tail}"


def spread(figure: Mapping[str, float], digits: int = 3) -> str:
    """A figure as "median (min to max)"."""
    values = (figure[name] for name in ("median", "min", "max"))
    median, low, high = (f"{float(f'{value:.{digits}g}'):,g}" for value in values)
    return f"{median} ({low} to {high})"


def benchmark_row(result: Mapping[str, Any]) -> str:
    """One line of the table of benchmarks."""
    work, sides = result["workload"], {"ours": result["ours"], **result["peers"]}
    rows = f"{work['prompts']} x {work['rollouts']} rollouts"
    dtype = "" if work["dtype"] == "float32" else f", {work['dtype']}"
    if "new_tokens" in work:
        what = f"Sampling, {rows}, {work['prompt_tokens']} + {work['new_tokens']} tokens{dtype}"
        figure, unit = "tokens_per_s", "tokens/s"
    else:
        length = f"{work['prompt_tokens']} + {work['response_tokens']} tokens"
        how = ", rematerialized" if work["remat"] else ""
        what, figure, unit = f"GRPO step, {rows}, {length}{how}{dtype}", "seconds", "s"
    cells = [what, work["model"], result["device"], unit]
    for side in ("ours", "transformers", "tunix"):
        cells.append(spread(sides[side][figure]) if side in sides else "")
    return f"| {' | '.join(cells)} |"


def quickstart_row(run: Mapping[str, Any]) -> str:
    """One line of the table of the main job's seeds."""
    cells = [str(run["seed"]), f"{run['minutes']:.1f}"]
    for way in ("greedy", "sampled"):
        cells.append(f"{run[f'{way}_before']:.3f} to {run[f'{way}_after']:.3f}")
    return f"| {' | '.join(cells)} |"


def results(folder: Path = RESULTS) -> str:
    """The tables of everything in benchmarks/results, and the curve where there is one."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    parts = []
    for quickstart in (result for result in found if result["name"] == "quickstart"):
        header = ("seed", "minutes of training", "greedy accuracy", "sampled accuracy")
        parts.append(
            f"`configs/quickstart.py` of commit {short(quickstart['commit'])} on "
            f"{quickstart['device']}, accuracy on held-out questions before and after training:"
        )
        parts.append(_table(header, map(quickstart_row, quickstart["runs"])))
    for step in (result for result in found if result["name"] == "quickstart_step"):
        seconds, factor = step["ours"]["seconds"]["whole"], step["factor"]["whole"]
        parts.append(
            f"At commit {short(step['commit'])}, a step of the quickstart took "
            f"{spread(seconds)} s on {step['device']}, {factor:.2f} times faster than at commit "
            f"{short(step['before']['commit'])}, though it now replaces groups of equal rewards "
            "([breakdown](docs/training.md#measured))."
        )
    if (folder / CURVE.name).is_file():
        parts.append(f"![Reward of a run]({CURVE.relative_to(RESULTS.parents[1]).as_posix()})")
    measured = [r for r in found if r["name"].startswith(("sampler", "train_step"))]
    if measured:
        header = ("workload", "model", "device", "unit", "ours", "transformers", "tunix")
        parts.append(_table(header, map(benchmark_row, measured)))
    return "\n\n".join(parts) if parts else "Nothing has been measured yet."


def families() -> str:
    """The table of the families: how many methods and presets each has, and its pages."""
    from jaxrl_llm.recipes import catalog

    rows = []
    for kind, (about, page) in FAMILIES.items():
        members = catalog.select(kind=kind)
        presets = {method.preset for method in members if method.preset}
        title = page.partition(".md")[0].replace("_", " ")
        link, guide = f"[{kind}](docs/catalog.md#{kind})", f"[{title}](docs/{page})"
        counts = f"{len(members)} | {len(presets)} | {_whole(members)}"
        rows.append(f"| {link} | {about} | {counts} | {guide} |")
    presets = {method.preset for method in catalog.CATALOG if method.preset}
    counts = f"{len(catalog.CATALOG)} | {len(presets)} | {_whole(catalog.CATALOG)}"
    rows.append(f"| all |  | {counts} | [papers](docs/papers.md) |")
    return _table(("family", "computes", "methods", "presets", "whole", "guide"), rows)


def _whole(methods) -> int:
    """Number of presets that are complete methods."""
    return sum(method.preset is not None and method.whole for method in methods)


def methods() -> str:
    """The tables of the catalog, one for each family."""
    from jaxrl_llm.recipes import catalog

    parts = []
    for kind in FAMILIES:
        table = catalog.as_table(catalog.select(kind=kind), style="markdown")
        parts.append(f"## {kind.capitalize()}\n\n{table}")
    return "\n\n".join(parts)


def generate(text: str) -> str:
    """The README with its generated parts as they should be."""
    return fill(fill(text, "families", families()), "results", results())


def generate_catalog(text: str) -> str:
    """The page of the catalog with its tables as they should be."""
    return fill(text, "methods", methods())


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    code = 0
    for page, make in ((README, generate), (CATALOG, generate_catalog)):
        old = page.read_text()
        new = make(old)
        if new == old:
            continue
        if options.check:
            print(f"{page.name} is out of date: run python -m benchmarks.readme", file=sys.stderr)
            code = 1
        else:
            page.write_text(new)
    return code


def _table(header, rows) -> str:
    lines = [f"| {' | '.join(header)} |", f"| {' | '.join('---' for _ in header)} |", *rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
