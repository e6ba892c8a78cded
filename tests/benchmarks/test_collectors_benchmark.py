"""The benchmark of collectors runs, and its page is current."""

import json

import pytest

from benchmarks import collectors, collectors_page, harness


@pytest.mark.slow
def test_a_batch_is_timed(capsys):
    collectors.main(["--tiny"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["name"] == "collectors" and set(result["share"]) == {"grpo", "dapo"}
    assert all(0 < t["min"] <= t["median"] <= t["max"] for t in result["milliseconds"].values())


def test_the_stored_result_holds_what_is_promised():
    """At most 2% of a step of the quickstart."""
    (path,) = harness.RESULTS.glob("collectors-cpu-2core*.json")
    result = json.loads(path.read_text())
    assert result["workload"]["prompts"] == 8 and set(result["share"]) == set(collectors.PRESETS)
    assert max(result["share"].values()) < 0.02


def test_the_page_is_current():
    assert collectors_page.main(["--check"]) == 0, "run python -m benchmarks.collectors_page"
    assert "| `grpo` |" in collectors_page.PAGE.read_text()


def test_it_has_no_peer():
    with pytest.raises(SystemExit, match="measures ours alone"):
        collectors.main(["--tiny", "--peer-python", "python"])


def test_targets_of_the_quickstart_are_a_row_a_seed():
    run = {"seed": 0, "steps": 8, "minutes": 1.25}
    run |= {f"{way}_{when}": 0.5 for way in ("greedy", "sampled") for when in ("before", "after")}
    result = {
        "workload": {"config": "FILE"},
        "device": "D",
        "runs": [run],
        "beside": {"dapo": [run]},
    }
    lines = collectors_page._curves(result).splitlines()
    figures = "0 | 8 | 1.2 | 0.500 to 0.500 | 0.500 to 0.500 |"
    assert [line for line in lines if line.startswith("| `")] == [
        f"| `quickstart` | {figures}",
        f"| `dapo` | {figures}",
    ]
    slow = run | {"minutes": 2.5, "greedy_after": 0.25}
    result["beside"] = {"dapo": [slow, slow]}
    assert (
        "takes 0.50 of the minutes of `dapo` and ends at 0.500 (`dapo`: 0.250) greedy and 0.500 "
        "(`dapo`: 0.500) sampled." in collectors_page._curves(result)
    )
    result["before"] = {"commit": "0123456789ab", "runs": [slow]}
    text = collectors_page._curves(result)
    assert "takes 0.50 of the minutes of `quickstart of 0123456` and ends at" in text
    assert "| `quickstart of 0123456` | 0 | 8 | 2.5 |" in text
    assert "--beside dapo --before CHECKOUT" in text


def test_votes_are_a_row_a_run():
    run = {"questions": "others", "seed": 1, "minutes": 2.5}
    for way in ("greedy", "sampled", "majority"):
        run |= {f"{way}_before": 0.25, f"{way}_after": 0.5}
    work = {"config": "FILE", "half": 10, "steps": 20, "votes": 16}
    lines = collectors_page._votes({"workload": work, "device": "D", "runs": [run]}).splitlines()
    change = "0.250 to 0.500"
    assert lines[-1] == f"| others | 1 | 2.5 | {change} | {change} | {change} |"
