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


@pytest.fixture
def held_out():
    """A line of metrics that an evaluation leaves: accuracies of 40 questions, answered once."""

    def line(step, greedy, sampled):
        ways = {"greedy": greedy, "sampled": sampled}
        figure = {"questions": 40, "samples": 1}
        found = {k: figure | {"mean": x, "low": x - 0.1, "high": x + 0.1} for k, x in ways.items()}
        return {"step": step, "held_out": found}

    return line
