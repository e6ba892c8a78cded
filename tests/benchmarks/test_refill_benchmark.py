"""The benchmark of refill collects the same batches in each of its ways."""

import json

from benchmarks import refill


def test_three_ways_collect_the_same(capsys):
    refill.main(["--tiny", "--batches", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["name"] == "refill" and set(result["ratios"]) == {
        "rounds/barrier",
        "slots/barrier",
    }
    assert all(way["tokens"] == 1.0 for way in result["ours"].values())  # no group is dropped here
