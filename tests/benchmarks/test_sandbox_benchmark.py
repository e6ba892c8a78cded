"""The benchmark of the sandbox runs a few programs, and prints one JSON line last."""

import json

import pytest

from benchmarks import sandbox
from jaxrl_llm.rewards import SandboxError, check_sandbox


@pytest.mark.slow
def test_runs_tiny(capfd):
    try:
        check_sandbox()
    except SandboxError as error:
        pytest.skip(str(error))
    sandbox.main(["--tiny"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["name"] == "sandbox" and result["together_per_second"]["median"] > 0
    assert set(result["milliseconds"]) == {"alone", "asserts", "python"}


def test_peers_and_files_are_refused():
    with pytest.raises(SystemExit, match="has no peers"):
        sandbox.main(["--tiny", "--peer-python", "python"])
