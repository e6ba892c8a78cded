"""The engine's benchmark runs on the tiny model, and prints one JSON line last."""

import json

import pytest

from benchmarks import engine


@pytest.mark.of_many
@pytest.mark.slow
def test_runs_tiny(capfd):
    engine.main(["--tiny"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["name"] == "engine"
    assert result["products"]["share_of_products"] > 0
    assert result["skewed"]["ratio"] > 0
    assert result["long_prompt"]["prompt_cache_ratio"] == 1
    assert min(result["startup"][f"{part}_seconds"] for part in ("warm_start", "compile")) > 0


def test_peers_are_refused():
    with pytest.raises(SystemExit, match="no peers"):
        engine.main(["--tiny", "--peer-python", "python"])
