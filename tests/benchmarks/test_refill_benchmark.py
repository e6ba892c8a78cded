"""The benchmark of refill collects the same batches in each of its ways."""

import json

import pytest

from benchmarks import refill


@pytest.mark.of_many
@pytest.mark.slow
def test_three_ways_collect_the_same(capsys):
    refill.main(["--tiny", "--batches", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["name"] == "refill" and set(result["ratios"]) == {
        "rounds/barrier",
        "slots/barrier",
    }
    # No group is dropped here; slots begin with half a batch more.
    assert [result["ours"][name]["tokens"] for name in ("barrier", "rounds")] == [1.0, 1.0]
    assert 1.0 <= result["ours"]["slots"]["tokens"] < 1.6
