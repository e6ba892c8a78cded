"""Which checks pass on which versions of Python and jax.

    python -m benchmarks.versions --python py312/bin/python py313/bin/python --save

Runs `CHECKS` in the environment of each interpreter, which has what `pip install ".[test]"` gives,
and writes benchmarks/results/versions.json. `.ci/run` runs everything on one version; this tells
what else was tried, and with what.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.worker import cpu_name

RESULT = harness.RESULTS / "versions.json"
PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint")
# By title: what pytest is asked for.
CHECKS = {
    "doctests": ("--doctest-modules", "jaxrl_llm"),
    "estimators": (
        "tests/advantages",
        "tests/corrections",
        "tests/preferences",
        "tests/surrogates",
        "tests/test_aggregate.py",
        "tests/test_logprobs.py",
    ),
    "model and sampler": (
        "tests/models/test_parity.py",
        "tests/rollout/test_engine.py",
        "tests/rollout/test_sampler.py",
    ),
    "training": (
        "tests/train/test_checkpoint.py",
        "tests/train/test_loop.py",
        "tests/train/test_policy_gradient.py",
    ),
}
OUTCOMES = ("passed", "failed", "error", "skipped")
_VERSIONS = """
import json, platform
from importlib import metadata
versions = {name: metadata.version(name) for name in %r}
print(json.dumps({"python": platform.python_version()} | versions))
"""


def outcomes(summary: str) -> dict[str, int]:
    """The counts in pytest's last line.

    Raises:
      ValueError: If it has none.
    """
    found = re.findall(rf"(\d+) ({'|'.join(OUTCOMES)})s?\b", summary)
    if not found:
        raise ValueError(f"pytest ended with {summary!r}, which has no outcome.")
    return {name: int(count) for count, name in found}


def checked(python: str, checks: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The versions of an environment and what each check came to there."""
    line = subprocess.check_output([python, "-c", _VERSIONS % (PACKAGES,)], text=True)
    result = {"versions": json.loads(line), "checks": {}}
    for title, arguments in checks.items():
        command = [python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=harness.ROOT, stdout=subprocess.PIPE, text=True)
        print(done.stdout, file=sys.stderr)
        last = done.stdout.rstrip().rpartition("\n")[2]
        result["checks"][title] = outcomes(last)
    return result


def trains(python: str) -> dict[str, int]:
    """The outcome of a run from its start to a checkpoint, in a folder of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [python, "-m", "jaxrl_llm", "train", "tiny", "--steps", "2", "--run-dir", scratch]
        done = subprocess.run(command, cwd=harness.ROOT, stdout=sys.stderr)
    return {"failed" if done.returncode else "passed": 1}


def tried(python: str) -> dict[str, Any]:
    """All checks of an environment."""
    result = checked(python, CHECKS)
    result["checks"]["`jaxrl-llm train tiny`"] = trains(python)
    return result


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions")
    parser.add_argument("--python", nargs="+", required=True, help="interpreters to try")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args(argv)
    result = {
        "name": "versions",
        "device": cpu_name(),
        "commit": harness.commit(),
        "environments": [tried(python) for python in options.python],
    }
    if options.save:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
