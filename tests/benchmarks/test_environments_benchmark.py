"""The benchmark of episodes samples as many tokens in each of its ways."""

import json

import pytest

from benchmarks import environments, harness


@pytest.mark.slow
def test_three_ways_sample_as_much(capsys):
    sizes = ["--episodes", "8", "--group-size", "2", "--slots", "4", "--turn-tokens", "4"]
    environments.main(["--tiny", *sizes])
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result["workload"]["episodes"] == 8
    assert result["workload"]["runs"] == harness.MIN_ROUNDS
    order = [line.split(":")[0] for line in printed.err.splitlines() if line.endswith(" s")]
    ways = ["single", "fast", "slow"]
    assert order == ways + 2 * (ways[::-1] + ways)
    assert result["ratios"].keys() == {"fast/single", "slow/fast"}


def test_a_median_of_fewer_runs_is_refused(capsys):
    with pytest.raises(SystemExit):
        environments.main(["--tiny", "--runs", "4"])
    assert "a median needs at least 5 runs, not 4" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the package warns of itself
def test_games_of_textworld_sample_as_much_as_single_turns(capsys):
    pytest.importorskip("textworld")
    sizes = ["--episodes", "4", "--group-size", "2", "--slots", "4", "--turn-tokens", "4"]
    environments.main(["--tiny", "--textworld", *sizes])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["name"] == "environments_textworld"
    assert result["ratios"].keys() == {"textworld/single"}
