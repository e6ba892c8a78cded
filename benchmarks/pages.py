"""What the scripts share that write the measured part of a page of docs/."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS
from benchmarks.readme import fill


def results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Everything in benchmarks/results, by file name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown under its title."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines)])


def write(
    page: Path,
    content: Callable[[], str],
    script: str,
    argv: list[str] | None,
    *,
    part: str = "measured",
) -> int:
    """Writes the measured part of a page or, with --check, compares it.

    Args:
      page: The file.
      content: What stands between its markers.
      script: Module of the caller, for the message.
      argv: Arguments of the command line.
      part: Name of the markers.

    Returns:
      The exit code: 1 where a check fails.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {script}")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    old = page.read_text()
    new = fill(old, part, content())
    if new == old:
        return 0
    if options.check:
        print(f"{page.name} is out of date: run python -m {script}", file=sys.stderr)
        return 1
    page.write_text(new)
    return 0
