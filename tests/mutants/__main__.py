"""Plants one-line faults in a copy of the library, and tells which tests see each.

    python -m tests.mutants --reach reach.json --jobs 2
    python -m tests.mutants --reach reach.json --jobs 2 --save
    python -m tests.mutants --reach reach.json --only 17 --only 42

Each row of table.json is one mutant: a line of the library before and after. The first command runs
the whole suite once and writes which tests reach which line (`reach.py`); the others find the file
and plant the mutants. A mutant meets the tests that reach it, quickest first, of README's command
and then of the slow ones; of each, as many as take `--seconds` in all, and those of the mirrored
folder before others. It is caught by README's command, by the slow tests, or by none; a process
that crashes or hangs counts as a catch. With `--save` the results are written to
results.json beside this file after each mutant; `--missing` plants only those without a result,
so a table may be made in pieces.
"""

import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.mutants import reach

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
_FIRST = 30  # tests that a mutant meets before the others, in a process of their own
_EACH = 0.05  # seconds that a test costs beside its own
_CAUGHT = "README's command"
_write = threading.Lock()


def table() -> list[dict[str, str]]:
    """The mutants; their place in the list is their number."""
    return json.loads((HERE / "table.json").read_text(encoding="utf-8"))


def line_of(source: str, row: dict[str, str]) -> int:
    """The line of a mutant, counted from 1.

    Raises:
      ValueError: If the line is not in the function, so that the row is out of date.
    """
    lines = source.splitlines()
    starts = [n for n, line in enumerate(lines) if re.match(rf"\s*def {row['function']}\(", line)]
    for start in starts:
        for n in range(start, len(lines)):
            if lines[n].strip() == row["before"]:
                return n + 1
    raise ValueError(f"{row['path']}: {row['function']} has no line {row['before']!r}")


def planted(source: str, row: dict[str, str]) -> str:
    """The source of a file with a mutant in it."""
    lines, n = source.splitlines(keepends=True), line_of(source, row) - 1
    lines[n] = lines[n].replace(row["before"], row["after"])
    return "".join(lines)


def batches(row: dict[str, str], number: int, known: dict, limit: float) -> list[list[str]]:
    """The tests that a mutant meets, README's command's and then the slow ones, quickest first."""
    slow, seconds = set(known["slow"]), known["seconds"]
    mirror = f"tests/{Path(row['path']).with_suffix('').parts[1]}"
    found = []
    for wanted in (False, True):
        names = [x for x in known["reach"].get(str(number), []) if (x in slow) is wanted]
        names.sort(key=lambda x: (seconds[x] > 1, not x.startswith(mirror), seconds[x]))
        total, kept = 0.0, []
        for name in names:
            total += seconds[name] + _EACH
            if kept and total > limit:
                break
            kept.append(name)
        found.append(kept)
    return found


def _passes(folder: Path, tests: list[str], slow: bool, limit: float) -> bool:
    """Whether the tests pass with the mutant, the quickest in a process of their own."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    for names in (tests[:_FIRST], tests[_FIRST:]):
        if not names:
            continue
        list_of_tests = folder / "tests_of_mutant.txt"
        list_of_tests.write_text("\n".join(names))
        try:
            run = subprocess.run(
                [*command, "-m", "slow" if slow else "not slow", f"@{list_of_tests}"],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=10 * limit + 300,
            )
        except subprocess.TimeoutExpired:
            return False
        if run.returncode not in (0, 5):  # 5: none was selected
            return False
    return True


def caught_by(
    row: dict[str, str], folder: Path, tests: tuple[list[str], list[str]], limit: float
) -> str:
    """The share of the tests that sees a mutant: README's command, the slow tests, or none."""
    path = folder / row["path"]
    source = path.read_text(encoding="utf-8")
    path.write_text(planted(source, row), encoding="utf-8")
    try:
        for slow, share in ((False, _CAUGHT), (True, "slow tests")):
            if tests[slow] and not _passes(folder, tests[slow], slow, limit):
                return share
        return "none"
    finally:
        path.write_text(source, encoding="utf-8")


def copy_of_checkout(folder: Path) -> None:
    """Copies what git knows of the checkout, changes that are not committed included."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    archive = subprocess.run(
        ["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=names.stdout, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def main() -> None:
    """Plants the mutants and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, action="append", help="the number of a mutant")
    parser.add_argument("--missing", action="store_true", help="those without a saved result")
    parser.add_argument("--reach", type=Path, required=True, help="written if it does not exist")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the tests of a mutant")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = table()
    if not options.reach.exists():
        lines = [(x["path"], line_of((ROOT / x["path"]).read_text(), x)) for x in rows]
        with tempfile.TemporaryDirectory(prefix="jaxrl_llm-mutants-") as top:
            copy_of_checkout(Path(top))
            found = reach.run(Path(top), lines, options.jobs)
        options.reach.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        return
    known = reach.load(options.reach)
    saved = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    results = {(r["path"], r["before"], r["after"]): r for r in saved}
    numbers = range(len(rows)) if options.only is None else options.only

    def key(row):
        return row["path"], row["before"], row["after"]

    todo = [n for n in numbers if not (options.missing and key(rows[n]) in results)]
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    local = threading.local()

    def run(number: int, top: Path) -> None:
        if not hasattr(local, "folder"):
            local.folder = Path(tempfile.mkdtemp(dir=top))
            copy_of_checkout(local.folder)
        began = time.monotonic()
        tests = batches(rows[number], number, known, options.seconds)
        share = caught_by(rows[number], local.folder, tests, options.seconds)
        seconds = round(time.monotonic() - began, 1)
        print(f"{number:4} {share:17} {seconds:6} s  {rows[number]['path']}", flush=True)
        with _write:
            result = {**rows[number], "caught_by": share, "seconds": seconds, "commit": commit}
            results[key(rows[number])] = result
            if options.save:
                told = [results[key(row)] for row in rows if key(row) in results]
                RESULTS.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")

    with (
        tempfile.TemporaryDirectory(prefix="jaxrl_llm-mutants-") as top,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as threads,
    ):
        for future in [threads.submit(run, n, Path(top)) for n in todo]:
            future.result()
    shares = [results[key(rows[n])]["caught_by"] for n in numbers if key(rows[n]) in results]
    for share in dict.fromkeys((_CAUGHT, "slow tests", "none", *shares)):
        print(f"{share}: {shares.count(share)}")


if __name__ == "__main__":
    main()
