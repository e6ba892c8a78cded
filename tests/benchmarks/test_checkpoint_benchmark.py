"""The benchmark of checkpoints on a tiny model, and what its result says."""

import json
from pathlib import Path

import pytest
from rows import for_each

from benchmarks import checkpoint

RESULTS = Path(checkpoint.__file__).parent / "results"
FIGURES = {"blocked", "whole", "share", "update", "first_update", "first_update_more", "copy"}


def test_a_tiny_one_prints_one_line_of_json_last(capfd, tmp_path):
    checkpoint.main(["--tiny", "--rounds", "1", "--folder", str(tmp_path)])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["name"] == "checkpoint" and result["bars"] == {"share": checkpoint.BAR}
    ours = result["ours"]
    assert {*FIGURES, "restore", "bytes", "gb_per_s"} <= ours.keys()
    assert 0 < ours["blocked"]["min"] < ours["whole"]["min"]
    assert ours["share"]["median"] == pytest.approx(
        ours["blocked"]["median"] / ours["whole"]["median"], rel=1e-2
    )
    assert list(tmp_path.iterdir()) == []


@for_each("path", sorted(RESULTS.glob("checkpoint-*.json")), ids=lambda p: p.stem)
def test_a_saved_result_is_of_the_model_it_names(path):
    result = json.loads(path.read_text())
    assert result["workload"]["model"] == "SmolLM2-135M"
    assert result["ours"]["bytes"] == 3 * 4 * 134_515_008 + 4  # parameters, moments and their count
    assert result["bars"] == {"share": checkpoint.BAR}
    assert 0 < result["ours"]["share"]["median"] < 1
