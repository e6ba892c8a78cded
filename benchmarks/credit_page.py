"""Writes the measured part of docs/credit.md from benchmarks/results.

python -m benchmarks.credit_page            # write
python -m benchmarks.credit_page --check    # exit 1 if it would change anything
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT

PAGE = ROOT / "docs" / "credit.md"
COLUMNS = ("cosine", "scale", "bias", "variance", "correlation", "gain")
TASKS = {
    "outcome": "Task `outcome`, 1 for the goal",
    "turns": "Task `turns`, 1 for the goal and {cost:g} less for each turn",
}


def measured(folder: Path = RESULTS) -> str:
    """The tables of benchmarks/credit.py."""
    results = [each for each in pages.results(folder) if each["name"] == "credit"]
    return "\n\n".join(part for each in results for part in _tables(each)) or "Nothing yet."


def _tables(result: Mapping[str, Any]) -> list[str]:
    work = result["workload"]
    blocks = [
        f"{work['groups']:,} groups of {work['group_size']} rollouts of up to {work['turns']} "
        f"turns for each task (`python -m benchmarks.credit`, {result['core_seconds']:.0f} s "
        f"of one core, {result['device']}). After ± half the length of a 95% interval."
    ]
    for name, task in result["tasks"].items():
        value = task["return"]
        title = (
            f"{TASKS[name].format(cost=task['cost'])}; the policy's return is "
            f"{value['policy']:.3f}, that of the older one {value['older_policy']:.3f}:"
        )
        rows = [
            (rule, *(_figure(numbers[column]) for column in COLUMNS))
            for rule, numbers in task["rules"].items()
        ]
        blocks.append(pages.table(title, ("rule", *COLUMNS), rows))
    return blocks


def _figure(numbers: Sequence[float]) -> str:
    value, low, high = numbers
    digits = 3 if abs(value) < 2 else 2
    return f"{value:.{digits}f} ± {(high - low) / 2:.{digits}f}"


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    return pages.write(PAGE, measured, "benchmarks.credit_page", argv)


if __name__ == "__main__":
    sys.exit(main())
