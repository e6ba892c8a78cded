"""Writes the measured part of docs/versions.md from benchmarks/results.

python -m benchmarks.versions_page            # write
python -m benchmarks.versions_page --check    # exit 1 if it would change anything
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT
from benchmarks.versions import OUTCOMES, RESULT

PAGE = ROOT / "docs" / "versions.md"


def measured(folder: Path = RESULTS) -> str:
    """A column an environment: its versions, then what each check came to."""
    result = json.loads((folder / RESULT.name).read_text())
    environments = result["environments"]
    packages = [name for name in environments[0]["versions"] if name != "python"]
    rows = [(name, *(each["versions"][name] for each in environments)) for name in packages]
    rows += [
        (title, *(_outcome(each["checks"][title]) for each in environments))
        for title in environments[0]["checks"]
    ]
    title = (
        f"{result['device']}, commit {result['commit']} "
        "(`python -m benchmarks.versions --python PATH`):"
    )
    columns = ("", *(f"Python {each['versions']['python']}" for each in environments))
    return pages.table(title, columns, rows)


def _outcome(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[name]:,} {name}" for name in OUTCOMES if name in counts)


def whole(folder: Path = RESULTS) -> str:
    """When all tests last ran, no share left out, and what they came to."""
    path = folder / "whole.json"
    if not path.exists():
        return "`python -m tests.whole` has no result yet."
    result = json.loads(path.read_text())
    return (
        f"They last ran on {result['date']} at commit {result['commit']}: "
        f"{_outcome(result['tests'])} in {result['minutes']} minutes on {result['device']}."
    )


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    script = "benchmarks.versions_page"
    tables = pages.write(PAGE, measured, script, argv)
    return tables or pages.write(PAGE, whole, script, argv, part="whole")


if __name__ == "__main__":
    sys.exit(main())
