"""docs/pods.md tells the truth: its numbers are those of the results."""

import json

from benchmarks import compiled, harness, pods_page


def test_measured_part_is_current():
    assert pods_page.main(["--check"]) == 0, "run python -m benchmarks.pods_page"


def test_every_program_was_compiled_and_fits():
    found = json.loads((harness.RESULTS / "compiled.json").read_text())["programs"]
    assert list(found) == list(compiled.programs())
    for program in found.values():
        taken = program["arguments_bytes"] + program["temporary_bytes"]
        assert taken == program["taken_bytes"] < 0.9 * program["memory_bytes"]
        # The state is written over.
        assert program["aliased_bytes"] > 0.999 * program["arguments_bytes"]


def test_nothing_was_compiled_yet(tmp_path):
    assert pods_page.measured(tmp_path) == "Nothing yet."
