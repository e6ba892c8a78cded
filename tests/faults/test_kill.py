"""kill -9 at a random moment; more of them with ``python tests/faults/killing.py --kills 20``."""

import pytest
from killing import torture


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_one_that_is_not(tmp_path):
    said = []
    # This seed's moment lies behind the first checkpoints.
    found = torture(tmp_path, kills=1, seed=5, say=said.append)
    assert found.kills == len(said) == found.runs == 1 and found.resumed >= 1
