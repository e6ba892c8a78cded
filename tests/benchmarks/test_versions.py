"""The page of versions tells what pytest said."""

import json
import sys

import pytest
from rows import for_each

from benchmarks import versions, versions_page


def test_the_page_is_that_of_the_result():
    assert versions_page.main(["--check"]) == 0


def test_the_page_says_when_all_tests_last_ran(tmp_path):
    assert "no result yet" in versions_page.whole(tmp_path)
    result = {"date": "2026-11-30", "commit": "abc", "device": "cpu-2core", "minutes": 41}
    result["tests"] = {"passed": 12345, "skipped": 7}
    (tmp_path / "whole.json").write_text(json.dumps(result))
    told = "on 2026-11-30 at commit abc: 12,345 passed, 7 skipped in 41 minutes on cpu-2core."
    assert versions_page.whole(tmp_path).endswith(told)


@for_each(
    ("line", "expected"),
    [
        ("984 passed in 201.30s (0:03:21)", {"passed": 984}),
        ("== 2 failed, 7 passed, 1 error in 3.10s ==", {"failed": 2, "passed": 7, "error": 1}),
        ("3 skipped, 2 errors in 1s", {"skipped": 3, "error": 2}),
    ],
)
def test_outcomes_are_those_of_the_last_line(line, expected):
    assert versions.outcomes(line) == expected


def test_a_pytest_without_outcome_is_an_error():
    with pytest.raises(ValueError, match="no outcome"):
        versions.outcomes("ImportError: No module named 'jax'")


@pytest.mark.slow
def test_an_environment_has_its_versions_and_a_test_that_fails_shows(monkeypatch, tmp_path):
    (tmp_path / "test_two.py").write_text(
        "def test_a():\n    assert 0\n\ndef test_b():\n    pass\n"
    )
    result = versions.checked(sys.executable, {"two": (str(tmp_path),)})
    assert result["checks"]["two"] == {"failed": 1, "passed": 1}
    assert result["versions"]["python"] == sys.version.split()[0]
