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
    for form in ("always", "flat"):
        assert skewed["cells"][form] < skewed["cells"]["never"]
        assert skewed["padding"][form] < skewed["padding"]["never"]
        assert skewed["ratio"][form] > 0 and even["ratio"][form] > 0
    assert even["cells"]["always"] == even["cells"]["never"] and even["padding"]["never"] == 0


def test_peers_and_files_are_refused():
    with pytest.raises(SystemExit, match="compares packing with itself"):
        packing.main(["--tiny", "--peer-python", "python"])
