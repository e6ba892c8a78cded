"""Which tests reach the line of which mutant, and how long each test takes.

The suite runs once in a copy of the library that notes the test at each line of the table. A
program that a process has traced before is not traced again, so a test may depend on a line that it
does not reach; an earlier test of that process did.
"""

import ast
import collections
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_HITS = '''"""Notes which test reaches which mutant."""

import os

_seen = set()


def hit(number):
    """Writes a line, once for a test."""
    key = number, os.environ.get("PYTEST_CURRENT_TEST", "")
    if key not in _seen:
        _seen.add(key)
        try:
            with open(os.path.join(os.environ["MUTANTS_REACH"], str(os.getpid())), "a") as file:
                file.write(f"{number}\\t{key[1]}\\n")
        except (KeyError, OSError):  # in a sandbox
            pass
'''
_PLUGIN = '''"""Notes how long each test takes."""

import os


def pytest_runtest_logreport(report):
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        with open(os.path.join(os.environ["MUTANTS_REACH"], "durations"), "a") as file:
            file.write(f"{report.nodeid}\\t{report.duration:.4f}\\t{'slow' in report.keywords}\\n")
'''


def instrumented(source: str, lines: Mapping[int, int]) -> str:
    """The source with a note before each statement that holds a mutant.

    Args:
      source: Text of a module.
      lines: The line of each mutant by its number; lines count from 1.
    """
    tree, text = ast.parse(source), source.splitlines()
    # A note cannot stand before `elif`, so it stands before the `if`.
    chained = {
        id(node.orelse[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and len(node.orelse) == 1
        and isinstance(node.orelse[0], ast.If)
        and text[node.orelse[0].lineno - 1].lstrip().startswith("elif")
    }
    statements = [x for x in ast.walk(tree) if isinstance(x, ast.stmt) and id(x) not in chained]
    notes = collections.defaultdict(list)
    for number, line in lines.items():
        around = [x for x in statements if x.lineno <= line <= x.end_lineno]
        inner = min(around, key=lambda x: (x.end_lineno - x.lineno, -x.col_offset))
        notes[inner.lineno, inner.col_offset].append(number)
    for (line, column), numbers in sorted(notes.items(), reverse=True):
        note = '__import__("jaxrl_llm._hits", fromlist=["hit"]).hit'
        text[line - 1 : line - 1] = [f"{' ' * column}{note}({number})" for number in numbers]
    return "\n".join(text) + "\n"


def run(folder: Path, lines: Sequence[tuple[str, int]], workers: int) -> dict[str, Any]:
    """Runs the suite in a copy of the checkout, once as README says and once the slow tests.

    Args:
      folder: The copy, which is changed.
      lines: File and line of each mutant.
      workers: Processes that run tests.

    Returns:
      ``reach``, the tests by the number of a mutant; ``seconds`` of each test; ``slow``, the tests
      that README's command leaves out.
    """
    for path in {path for path, _ in lines}:
        here = {n: line for n, (name, line) in enumerate(lines) if name == path}
        source = (folder / path).read_text(encoding="utf-8")
        (folder / path).write_text(instrumented(source, here), encoding="utf-8")
    (folder / "jaxrl_llm" / "_hits.py").write_text(_HITS)
    (folder / "notes_durations.py").write_text(_PLUGIN)
    notes = folder / ".notes"
    notes.mkdir()
    environment = os.environ | {"PYTHONPATH": str(folder), "MUTANTS_REACH": str(notes)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "-p", "no:cacheprovider"]
    for marker in ("not slow", "slow"):
        words = [*command, "-p", "notes_durations", "-m", marker]
        subprocess.run(words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, check=False)
    return read(notes)


def read(notes: Path) -> dict[str, Any]:
    """What a run of the suite noted."""
    seconds, slow, reach = collections.Counter(), set(), collections.defaultdict(set)
    for line in (notes / "durations").read_text().splitlines():
        name, duration, is_slow = line.rsplit("\t", 2)
        seconds[name] += float(duration)
        if is_slow == "True":
            slow.add(name)
    for path in notes.iterdir():
        if path.name.isdigit():
            for line in path.read_text().splitlines():
                number, name = line.split("\t", 1)
                name = name.rpartition(" (")[0]  # "(setup)", "(call)" or "(teardown)"
                if name in seconds:
                    reach[number].add(name)
    return {
        "reach": {number: sorted(names) for number, names in reach.items()},
        "seconds": {name: round(x, 3) for name, x in seconds.items()},
        "slow": sorted(slow),
    }


def load(path: Path) -> dict[str, Any]:
    """Reads what ``run`` returned from a file."""
    return json.loads(path.read_text(encoding="utf-8"))
