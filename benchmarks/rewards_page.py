"""Writes the measured part of docs/rewards.md from benchmarks/results.

python -m benchmarks.rewards_page            # write
python -m benchmarks.rewards_page --check    # exit 1 if it would change anything
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT

PAGE = ROOT / "docs" / "rewards.md"
COLUMNS = ("grader", "false positives", "false negatives", "asymmetric pairs", "ms a call")


def measured(folder: Path = RESULTS) -> str:
    """How many pairs of answers each grader gets wrong."""
    found = [_graders(x) for x in pages.results(folder) if x["name"] == "mathematics"]
    return "\n\n".join(found) or "Nothing yet."


def _graders(result: Mapping[str, Any]) -> str:
    work = result["workload"]
    title = (
        f"{work['pairs']} pairs of {work['kinds']} kinds, each in both directions "
        f"({result['device']}, math-verify {result['versions']['ours']['math-verify']}, "
        f"commit {result['commit']}):"
    )
    rows = [
        (
            name,
            *(f"{len(each[x])}" for x in ("false_positives", "false_negatives", "asymmetric")),
            f"{each['milliseconds_per_call']:.1f}",
        )
        for name, each in result["graders"].items()
    ]
    missed = result["graders"]["boxed_math"]
    wrong = [*missed["false_positives"], *missed["false_negatives"]]
    named = ", ".join(f"`{answer}` and `{reply}`" for _, answer, reply in wrong)
    listed = [f"`boxed_math` grades these wrongly: {named}."] if wrong else []
    return "\n\n".join([pages.table(title, COLUMNS, rows), *listed])


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    return pages.write(PAGE, measured, "benchmarks.rewards_page", argv)


if __name__ == "__main__":
    sys.exit(main())
