"""Plants one-line faults in a copy of the library, and tells which tests see each.

    python -m tests.mutants --jobs 2 --save
    python -m tests.mutants --only 17 --only 42

Each row of table.json is one mutant: a line of the library before and after. It meets at most 12
files of tests: those of the mirrored folder that bear the name of the file or mention the function,
then others that mention it or bear the name of a file that imports it; without any, all of the
mirrored folder. It is caught by README's command (the tests that are not slow), by the slow tests
of these files, or by none of both, which another file may still see. A test process that crashes
counts as a catch; one that reaches its limit of time is "no answer". With ``--save``
the results are written to benchmarks/results/mutants.json after each mutant; ``--missing`` plants
only those without a result, so a table may be made in pieces.
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

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
_MOST = 12  # files of tests that a mutant meets
_SECONDS = 1800.0
_CAUGHT = "README's command"
_write = threading.Lock()


def table() -> list[dict[str, str]]:
    """The mutants; their place in the list is their number."""
    return json.loads((HERE / "table.json").read_text(encoding="utf-8"))


def planted(source: str, row: dict[str, str]) -> str:
    """The source of a file with a mutant in it.

    Raises:
      ValueError: If the line is not in the function, so that the row is out of date.
    """
    lines = source.splitlines(keepends=True)
    starts = [n for n, line in enumerate(lines) if re.match(rf"\s*def {row['function']}\(", line)]
    for start in starts:
        for n in range(start, len(lines)):
            if lines[n].strip() == row["before"]:
                lines[n] = lines[n].replace(row["before"], row["after"])
                return "".join(lines)
    raise ValueError(f"{row['path']}: {row['function']} has no line {row['before']!r}")


def tests_near(row: dict[str, str], root: Path = ROOT) -> list[str]:
    """The files of tests that a mutant meets, the likeliest first."""
    parts = Path(row["path"]).with_suffix("").parts
    stem, mirror = parts[-1].strip("_"), f"tests/{parts[1]}/"
    name = re.compile(rf"\b{re.escape(row['function'])}\b")
    imported = re.compile(rf"from {re.escape('.'.join(parts))} import")
    callers = {
        f"test_{path.stem.strip('_')}"
        for path in (root / "jaxrl_llm").rglob("*.py")
        if imported.search(path.read_text(encoding="utf-8"))
    }
    ranked = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        text, place = path.read_text(encoding="utf-8"), str(path.relative_to(root))
        named = not row["function"].startswith("__") and name.search(text) is not None
        titled, here = path.stem == f"test_{stem}", place.startswith(mirror)
        about = re.search(rf"\b{stem}\b", text) is not None
        if titled or named or (here and about) or path.stem in callers:
            ranked.append((-4 * titled - 2 * here - named, place))
    return [place for _, place in sorted(ranked)[:_MOST]]


def _passes(folder: Path, tests: list[str], marker: str) -> bool | None:
    """Whether the tests pass with the mutant; none that run is a pass, and no answer None."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    try:
        run = subprocess.run(
            [*command, "-m", marker, *tests],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None
    return run.returncode in (0, 5)  # 5: none was selected


def caught_by(row: dict[str, str], folder: Path) -> str:
    """The share of the tests that sees a mutant: README's command, the slow tests, or none."""
    path = folder / row["path"]
    source = path.read_text(encoding="utf-8")
    path.write_text(planted(source, row), encoding="utf-8")
    mirror = f"tests/{Path(row['path']).with_suffix('').parts[1]}"
    mirrored = [mirror] if (folder / mirror).is_dir() else []
    try:
        tests = tests_near(row, folder) or mirrored
        for marker, share in (("not slow", _CAUGHT), ("slow", "slow tests")):
            passes = _passes(folder, tests, marker) if tests else True
            if not passes:
                return "no answer" if passes is None else share
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
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows = table()
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
        share = caught_by(rows[number], local.folder)
        seconds = round(time.monotonic() - began, 1)
        print(f"{number:4} {share:17} {seconds:6} s  {rows[number]['path']}", flush=True)
        with _write:
            result = {**rows[number], "caught_by": share, "seconds": seconds, "commit": commit}
            results[key(rows[number])] = result
            if options.save:
                known = [results[key(row)] for row in rows if key(row) in results]
                RESULTS.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")

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
