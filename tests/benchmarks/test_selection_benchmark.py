"""The benchmark of selection runs and says how long each rule takes."""

import json

import pytest

from benchmarks import harness, selection


def test_every_rule_is_timed(capsys):
    selection.main(["--tiny"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["name"] == "selection" and result["workload"]["prompts"] == 1000
    rules = {"learnability", "dots", "vade", "vade_without_candidates", "mopps", "insight"}
    assert set(result["milliseconds"]) == rules | {"step", "update"}
    assert all(0 < t["min"] <= t["median"] <= t["max"] for t in result["milliseconds"].values())


def test_the_stored_result_holds_what_is_promised():
    """512 of a million prompts in under 20 ms on two cores."""
    (path,) = harness.RESULTS.glob("selection-cpu-2core*.json")
    result = json.loads(path.read_text())
    assert (result["workload"]["prompts"], result["workload"]["selected"]) == (1_000_000, 512)
    for rule in ("learnability", "dots", "vade", "mopps", "insight", "step"):
        assert result["milliseconds"][rule]["median"] < 20, rule


def test_it_has_no_peer():
    with pytest.raises(SystemExit, match="measures ours alone"):
        selection.main(["--tiny", "--peer-python", "python"])
