"""A machine that is taken away: SIGTERM to a run of the command line, in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
import dataclasses, time
from jaxrl_llm.train import AsyncConfig
from tiny_run import CONFIG, low_bytes, without_plot

calls = []
without_plot()

def reward(prompt, completion, metadata):
    calls.append(prompt)
    if len(calls) == 9:  # of the second batch
        print("begun", flush=True)
    time.sleep(0.02)
    return low_bytes(prompt, completion, metadata)

config = dataclasses.replace(
    CONFIG, steps=12, reward=reward, asynchrony=AsyncConfig(max_staleness=STALENESS)
)
"""
COMMAND = "import sys; from jaxrl_llm.cli import main; sys.exit(main())"


def start(folder, *options):
    places = [str(ROOT), str(ROOT / "tests" / "train")]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(places), JAX_PLATFORMS="cpu")
    command = [sys.executable, "-c", COMMAND, "train", str(folder / "config_of_run.py")]
    command += ["--run-dir", str(folder / "run"), *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "staleness"),
    [(signal.SIGTERM, 0, 0), (signal.SIGTERM, 0, 1), (signal.SIGINT, 130, 0)],
)
def test_a_signal_saves_and_the_run_goes_on(tmp_path, number, code, staleness):
    (tmp_path / "config_of_run.py").write_text(CONFIG.replace("STALENESS", str(staleness)))
    process = start(tmp_path)
    with process, process.stdout as lines:
        assert any(line.startswith("begun") for line in lines)
        process.send_signal(number)
        if number == signal.SIGTERM:  # who ends a job often sends it to the group as well
            time.sleep(0.05)
            process.send_signal(number)
        told = "".join(lines)
        assert process.wait(timeout=300) == code, told
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(folder.name.removeprefix("step_"))
    assert 0 < step < 12
    assert f"Interrupted after step {step}; go on with the same command and --resume." in told
    if number == signal.SIGINT:
        return
    process = start(tmp_path, "--resume")
    with process:
        said = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and "The checkpoint of step 12" in said
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [row["step"] for row in map(json.loads, rows) if "loss" in row] == list(range(1, 13))
