"""The benchmark of packed rows runs on a tiny model, and prints one JSON line last."""

import json

import pytest

from benchmarks import packing


@pytest.mark.slow
def test_runs_tiny(capfd):
    packing.main(["--tiny"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["name"] == "packing"
    skewed, even = result["skewed"], result["even"]
    assert skewed["cells"]["packed"] < skewed["cells"]["padded"]
    assert skewed["padding"]["packed"] < skewed["padding"]["padded"]
    assert even["cells"]["packed"] == even["cells"]["padded"] and even["padding"]["padded"] == 0
    assert skewed["ratio"] > 0 and even["ratio"] > 0


def test_peers_and_files_are_refused():
    with pytest.raises(SystemExit, match="compares packing with itself"):
        packing.main(["--tiny", "--peer-python", "python"])
