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
COLUMNS = ("run", "mesh", "kills", "left a checkpoint unfinished", "resumed", "runs compared")


def measured(folder: Path = RESULTS) -> str:
    """What kills of runs came to."""
    found = [_kills(each) for each in pages.results(folder) if each["name"] == "kills"]
    return "\n\n".join(found) or "Nothing yet."


def _kills(result: Mapping[str, Any]) -> str:
    runs = result["runs"]
    names = ("kills", "writing", "resumed", "runs")
    rows = [(each["kind"], each["mesh"], *(f"{each[n]}" for n in names)) for each in runs]
    totals = (f"{sum(each[n] for each in runs)}" for n in names)
    title = f"{result['device']}, commit {result['commit']} (`python -m tests.faults`):"
    return pages.table(title, COLUMNS, [*rows, ("all", "", *totals)])


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    return pages.write(PAGE, measured, "benchmarks.reliability_page", argv)


if __name__ == "__main__":
    sys.exit(main())
