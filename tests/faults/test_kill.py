"""kill -9 at random moments; more of them with ``python tests/faults/killing.py --kills 20``."""

import pytest
from killing import torture


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "kind", "mesh"),
    [
        (2, "one batch at a time", "one device"),
        (1, "rollouts ahead of the weights", "one device"),
    ],
)
def test_a_run_that_is_killed_ends_as_one_that_is_not(tmp_path, kills, kind, mesh):
    said = []
    found = torture(tmp_path, kills=kills, seed=kills, kind=kind, mesh=mesh, say=said.append)
    assert found.kills == kills == len(said) and found.runs >= 1
