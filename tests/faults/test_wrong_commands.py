"""Options out of sense are one sentence; a thousand of them with ``python -m tests.faults``."""

from pathlib import Path

import pytest
from capped import run_capped


@pytest.mark.slow
def test_wrong_commands_and_configs_are_refused():
    results = dict(run_capped(Path(__file__).parent / "wrong_commands.py", "120"))
    assert len(results) == 120 and set(results.values()) == {"refused", "planned"}
