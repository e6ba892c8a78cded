"""Writes docs/claims.md from benchmarks/results/claims and the docstrings of the claim files.

python -m benchmarks.claims.table            # write
python -m benchmarks.claims.table --check    # exit 1 if it would change anything
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import harness
from benchmarks.harness import ROOT
from benchmarks.worker import jax_device_name, package_versions

PAGE = ROOT / "docs" / "claims.md"

_HEAD = """# Claims

This page tests the central claim of each paper on bandits and tabular policies, with the functions
of this library. A claim holds if the whole 95% interval of its number is on the right side of the
threshold, and does not hold if the whole interval is on the other side. A claim that does not hold
in the small setting is listed with its number, which says nothing about larger settings.

Means of seeds have intervals by Student's t, and so have ratios of two means, by the logarithm; a
bootstrap has many units. Of some two hundred intervals, a few miss the truth by chance.

`python -m benchmarks.claims` runs everything and writes this page from the files in
`benchmarks/results/claims`. {whole}
"""
# The run of all claims: how many there were, how many at a time, seconds, device and commit.
_WHOLE = "claims_whole.json"


def number(value: float) -> str:
    """Three significant digits, without an exponent where it can be avoided."""
    return f"{float(f'{value:.3g}'):,g}"


def interval(measure: Mapping[str, Any]) -> str:
    """The interval of a measure, or "exact" where there is no sampling error."""
    if measure["interval"].startswith(("exact", "deterministic")):
        return "exact"
    return f"{number(measure['low'])} to {number(measure['high'])}"


def condition(measure: Mapping[str, Any]) -> str:
    return f"{measure['holds']} {number(measure['threshold'])}"


def paper(result: Mapping[str, Any]) -> str:
    return f"[{result['paper']}](https://arxiv.org/abs/{result['paper']})"


def row(result: Mapping[str, Any]) -> list[str]:
    """A claim's line in the table: its first measure."""
    measure = result["measures"][0]
    holding = sum(other["verdict"] == harness.HOLDS for other in result["measures"])
    return [
        f"[{result['name']}](#{result['name']})",
        paper(result),
        result["statement"],
        measure["what"],
        number(measure["value"]),
        interval(measure),
        condition(measure),
        f"{result['verdict']} ({holding} of {len(result['measures'])})",
    ]


def section(result: Mapping[str, Any]) -> str:
    """All about one claim, from the JSON and the docstring of its file."""
    _, rest = harness.text(harness.load(result["name"]))
    rows = [
        [
            measure["what"],
            number(measure["value"]),
            interval(measure),
            measure["interval"],
            condition(measure),
            measure["verdict"],
        ]
        for measure in result["measures"]
    ]
    header = ("measured", "value", "95% interval", "from", "holds if", "verdict")
    parts = [
        f"## {result['name']}",
        f"{result['statement']} (arXiv:{paper(result)}): **{result['verdict']}**.",
        rest,
        _table(header, rows),
    ]
    if result["facts"]:
        facts = (f"- {what}: {number(value)}" for what, value in result["facts"].items())
        parts.append("\n".join(("Beside it:", "", *facts)))
    plot = Path(os.path.relpath(harness.RESULTS / f"{result['name']}.png", PAGE.parent))
    parts.append(f"![{result['name']}]({plot.as_posix()})")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts.append(
        f"Seed {result['seed']}, {result['seconds']:g} s on {result['device']}; {versions}; "
        f"commit {result['commit']}."
    )
    return "\n\n".join(part for part in parts if part)


def generate(folder: Path = harness.RESULTS) -> str:
    """The page of everything in the folder."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    header = ("claim", "paper", "what it says", "measured", "value", "95% interval", "holds if")
    table = _table((*header, "verdict"), map(row, results))
    counts = Counter(result["verdict"] for result in results)
    summary = ", ".join(f"{verdict} {counts[verdict]}" for verdict in sorted(counts))
    summary = (
        f"Of {len(results)} claims: {summary}. The table has the first number of each, and says of "
        "how many numbers the claim holds."
    )
    minutes = round(sum(result["seconds"] for result in results) / 60)
    whole = f"The times below add up to {minutes} minutes."
    if (path := folder.parent / _WHOLE).is_file():
        run = json.loads(path.read_text())
        whole = (
            f"All {run['claims']}, {run['jobs']} at a time, took {run['seconds'] / 60:.0f} minutes "
            f"on {run['device']}; their own times below add up to {minutes}."
        )
    head = _HEAD.format(whole=whole)
    return "\n".join((head, summary, "", table, "", "\n\n".join(map(section, results)), ""))


def save_whole(claims: int, *, jobs: int, seconds: float, commit: str) -> None:
    """Writes how long a run of all claims took."""
    run = {"name": "claims_whole", "claims": claims, "jobs": jobs, "seconds": round(seconds, 1)}
    versions = package_versions(harness.PACKAGES)
    run |= {"device": jax_device_name(), "versions": versions, "commit": commit}
    (harness.RESULTS.parent / _WHOLE).write_text(json.dumps(run, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    new = generate()
    if PAGE.is_file() and PAGE.read_text() == new:
        return 0
    if options.check:
        print(
            "docs/claims.md is out of date: run python -m benchmarks.claims.table", file=sys.stderr
        )
        return 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(new)
    return 0


def _table(header, rows) -> str:
    lines = [f"| {' | '.join(header)} |", f"| {' | '.join('---' for _ in header)} |"]
    # A bar in a cell, as of an absolute value, would end it.
    for cells in rows:
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
