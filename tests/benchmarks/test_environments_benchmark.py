"""The benchmark of episodes samples as many tokens in each of its ways."""

import json

import pytest

from benchmarks import environments


@pytest.mark.slow
def test_three_ways_sample_as_much(capsys):
    sizes = ["--episodes", "8", "--group-size", "2", "--slots", "4", "--turn-tokens", "4"]
    environments.main(["--tiny", *sizes])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["workload"]["episodes"] == 8
    assert result["ratios"].keys() == {"fast/single", "slow/fast"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the package warns of itself
def test_games_of_textworld_sample_as_much_as_single_turns(capsys):
    pytest.importorskip("textworld")
    sizes = ["--episodes", "4", "--group-size", "2", "--slots", "4", "--turn-tokens", "4"]
    environments.main(["--tiny", "--textworld", *sizes])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["name"] == "environments_textworld"
    assert result["ratios"].keys() == {"textworld/single"}
