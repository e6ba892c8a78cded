"""docs/rewards.md has the counts of benchmarks/results."""

import json

from benchmarks import rewards_page


def test_the_page_is_current():
    assert rewards_page.main(["--check"]) == 0, "run python -m benchmarks.rewards_page"


def test_counts_become_a_table(tmp_path):
    assert rewards_page.measured(tmp_path) == "Nothing yet."
    wrong = {"false_positives": [["words", "a", "b"]], "false_negatives": [], "asymmetric": []}
    result = {
        "name": "mathematics",
        "workload": {"pairs": 400, "kinds": 40},
        "device": "D",
        "versions": {"ours": {"math-verify": "0.9.0"}},
        "commit": "c",
        "graders": {"boxed_math": {**wrong, "milliseconds_per_call": 1.25}},
    }
    (tmp_path / "mathematics-D.json").write_text(json.dumps(result))
    text = rewards_page.measured(tmp_path)
    assert "| boxed_math | 1 | 0 | 0 | 1.2 |" in text and "wrongly: `a` and `b`" in text
