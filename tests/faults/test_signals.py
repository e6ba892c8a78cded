"""A machine that is taken away: SIGTERM to a run of the command line, in a process of its own."""

import json
import signal
import time

import pytest
from running import finish, start, wait_for

# Ctrl-C, which ends a run with another code, is a test of tests/cli.
CONFIG = """
def reward(prompt, completion, metadata):
    calls.append(prompt)
    if len(calls) == 9:  # of the second batch
        print("begun", flush=True)
    time.sleep(0.02)
    return low_bytes(prompt, completion, metadata)

config = dataclasses.replace(
    CONFIG, steps=12, reward=reward, asynchrony=AsyncConfig(max_staleness=1)
)
"""


@pytest.mark.slow
def test_a_signal_saves_and_the_run_goes_on(tmp_path):
    process = start(tmp_path, CONFIG)
    wait_for(process, tmp_path / "out", "begun")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.05)  # who ends a job often sends it to the group as well
    process.send_signal(signal.SIGTERM)
    code, told, lines = finish(process, tmp_path)
    assert code == 0, lines
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(folder.name.removeprefix("step_"))
    assert 0 < step < 12
    assert f"Interrupted after step {step}; go on with the same command and --resume." in told
    code, told, lines = finish(start(tmp_path, CONFIG, "--resume"), tmp_path)
    assert code == 0 and "The checkpoint of step 12" in told, lines
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [row["step"] for row in map(json.loads, rows) if "loss" in row] == list(range(1, 13))
