"""A Python program in a process of its own, whose memory and time have bounds."""

import json
import os
import subprocess
import sys
from pathlib import Path

MEMORY = 6 * 2**30  # of addresses, most of which jax reserves and does not use
SECONDS = 300  # of a processor
_PROGRAM = f"""
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_capped(program: Path, *words: str) -> list:
    """What a program prints, a JSON value a line; fails with its last line if it does not end well.

    A program that prints each case before it runs it names the one that it died of.
    """
    root = str(Path(__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(program), *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (done.returncode, lines[-1:], done.stderr[-2000:])
    return [json.loads(line) for line in lines]
