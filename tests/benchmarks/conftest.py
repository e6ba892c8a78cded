"""A tiny run of a benchmark, and what it printed."""

import json

import pytest

from benchmarks import harness


@pytest.fixture
def ran(capfd):
    """Runs a benchmark with ``--tiny`` and returns the JSON of its last line."""

    def run(benchmark, *arguments):
        benchmark.main(["--tiny", *map(str, arguments)])
        return json.loads(capfd.readouterr().out.splitlines()[-1])

    return run


@pytest.fixture
def few_rounds(monkeypatch):
    """One run instead of five, of which the figures are medians."""
    monkeypatch.setattr(harness, "MIN_ROUNDS", 1)
