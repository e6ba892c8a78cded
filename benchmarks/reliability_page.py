"""Writes the measured part of docs/reliability.md from benchmarks/results.

python -m benchmarks.reliability_page            # write
python -m benchmarks.reliability_page --check    # exit 1 if it would change anything
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT

PAGE = ROOT / "docs" / "reliability.md"
TRIALS = ("tried", "cases", "refused in one sentence", "accepted, as they make sense", "commit")
KILLS = (
    "run",
    "mesh",
    "kills",
    "left a checkpoint unfinished",
    "resumed",
    "runs compared",
    "commit",
)


def measured(folder: Path = RESULTS) -> str:
    """What wrong words, damaged files and kills came to."""
    found = [_faults(each) for each in pages.results(folder) if each["name"] == "faults"]
    return "\n\n".join(found) or "Nothing yet."


def _faults(result: Mapping[str, Any]) -> str:
    title = f"{result['device']} (`python -m tests.faults`):"
    tried = [
        (what, *(f"{each[n]:,}" for n in ("cases", "refused", "accepted")), each["commit"])
        for what, each in result["trials"].items()
    ]
    tables = [pages.table(title, TRIALS, tried)] if tried else []
    if runs := result["runs"]:
        names = ("kills", "writing", "resumed", "runs")
        rows = [
            (each["kind"], each["mesh"], *(f"{each[n]}" for n in names), each["commit"])
            for each in runs
        ]
        totals = (f"{sum(each[n] for each in runs)}" for n in names)
        title = "Kills:" if tried else title
        tables.append(pages.table(title, KILLS, [*rows, ("all", "", *totals, "")]))
    return "\n\n".join(tables)


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    return pages.write(PAGE, measured, "benchmarks.reliability_page", argv)


if __name__ == "__main__":
    sys.exit(main())
