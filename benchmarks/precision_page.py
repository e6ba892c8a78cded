"""Writes the measured part of docs/precision.md from benchmarks/results.

python -m benchmarks.precision_page            # write
python -m benchmarks.precision_page --check    # exit 1 if it would change anything
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT

PAGE = ROOT / "docs" / "precision.md"


def measured(folder: Path = RESULTS) -> str:
    """What the benchmark of precisions found on each device."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("mismatch-*.json"))]
    return "\n\n".join(map(_device, found)) or "Nothing yet."


def _device(result: Mapping[str, Any]) -> str:
    work = result["workload"]
    title = (
        f"{work['model']}, {work['prompts']} prompts of up to {work['prompt_tokens']} tokens, "
        f"{work['rollouts']} rollouts of up to {work['new_tokens']}, {result['device']} "
        "(`python -m benchmarks.mismatch`):"
    )
    columns = ("samples", "trains", "mean gap", "greatest gap", "KL")
    rows = [
        (row["sampler"], row["trainer"], *(f"{row[n]:.2g}" for n in ("mean_abs", "max_abs", "kl")))
        for row in result["flows"]
    ]
    lines = [columns, ("---",) * len(columns), *rows]
    table = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([title, "", *table, "", _summary(result["flows"])])


def _summary(flows) -> str:
    """How much smaller the gap is where both sides have one precision."""
    one = {f["sampler"]: f["mean_abs"] for f in flows if f["sampler"] == f["trainer"]}
    parts = [
        f"{f['sampler']} beside a {f['trainer']} trainer: "
        f"{f['mean_abs'] / one[f['sampler']]:.2g} times"
        for f in flows
        if f["sampler"] != f["trainer"]
    ]
    return f"The mean gap of a split flow over that of one flow: {'; '.join(parts)}."


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    return pages.write(PAGE, measured, "benchmarks.precision_page", argv)


if __name__ == "__main__":
    sys.exit(main())
