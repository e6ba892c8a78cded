"""Runs all tests, no share left out, and notes what came of it.

    python -m tests.whole           # two hours of a processor with cold caches
    python -m tests.whole --save    # also writes benchmarks/results/whole.json

README's command runs an eighth of the tests that are one of many alike, and `.ci/run` a quarter.
docs/versions.md tells when all of them last ran (`python -m benchmarks.versions_page`).
"""

import argparse
import datetime
import json
import subprocess
import sys
import time

from benchmarks import harness
from benchmarks.versions import outcomes
from benchmarks.worker import cpu_name

RESULT = harness.RESULTS / "whole.json"


def main() -> int:
    """Runs the tests; the exit code is pytest's."""
    parser = argparse.ArgumentParser(prog="python -m tests.whole", description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    words = ["-n", str(options.workers), "-m", "slow or not slow", "--share", "1"]
    commit = harness.commit()
    began = time.monotonic()
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        cwd=harness.ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    last = ""
    for line in run.stdout:
        print(line, end="", flush=True)
        last = line if line.strip() else last
    code = run.wait()
    result = {
        "name": "whole",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "device": cpu_name(),
        "minutes": round((time.monotonic() - began) / 60),
        "tests": outcomes(last),
    }
    if options.save:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
