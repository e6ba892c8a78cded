"""``jaxrl-llm report``."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from jaxrl_llm.cli import UsageError, options, shown
from jaxrl_llm.core.runtime.files import replaceable
from jaxrl_llm.train.logging.report import write_report
from jaxrl_llm.train.logging.results import damage_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Writes a page about a run: curves, time by phase, completions, settings.

    The run may still be in progress. The page is one self-contained HTML file.

    Attributes:
      run: The folder of a run.
      out: The file of the page, or /dev/stdout; by default report.html in the folder.
    """

    run: tyro.conf.Positional[str]
    out: Path | None = None


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    args = options.parse(Report, arguments, command="report")
    folder = Path(args.run)
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "sessions.jsonl")):
        raise UsageError(f"{args.run!r} is not the folder of a run: no metrics.jsonl in it.")
    for name in ("metrics", "samples", "sessions"):
        if told := damage_of(folder / f"{name}.jsonl"):
            print(shown(told), file=sys.stderr)
    page = write_report(folder, args.out)
    if replaceable(page) is not None:  # else the page is all that a pipe gets
        print(page)
    return 0
