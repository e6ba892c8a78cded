"""Runs of the command line in processes of their own, which must end by themselves."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "import sys; from jaxrl_llm.cli import main; sys.exit(main())"
FAR = 280  # seconds: far above what any of these takes, and below what they took

HEAD = """
import contextlib, dataclasses, os, re, shutil, sys, threading, time
from pathlib import Path
from jaxrl_llm.core.runtime import watchdog
from jaxrl_llm.train import AsyncConfig, CheckpointConfig, SamplingConfig
from tiny_run import CONFIG, low_bytes, without_plot

RUN = Path(__file__).with_name("run")
calls = []
without_plot()
"""


def start(folder, text, *options, command=COMMAND):
    """A process that trains; what it says goes to the files out and err."""
    (folder / "config_of_run.py").write_text(HEAD + text)
    places = [str(ROOT), str(ROOT / "tests" / "train")]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(places), JAX_PLATFORMS="cpu")
    # Of the tests' cache of programs, which other processes write as well.
    environment["PYTHONWARNINGS"] = "ignore:Error writing persistent compilation cache entry"
    command = [sys.executable, "-c", command, "train", str(folder / "config_of_run.py")]
    command += ["--run-dir", str(folder / "run"), *options]
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=err)


def finish(process, folder):
    """Its exit code and the lines that it said but for the bar; it must end by itself."""
    try:
        code = process.wait(FAR)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        pytest.fail(f"the process did not end: {(folder / 'err').read_text()[-2000:]}")
    err = re.sub(r" *\d+%\|[^]]*]", "", (folder / "err").read_text())
    return (
        code,
        (folder / "out").read_text(),
        [x for line in err.splitlines() if (x := line.strip())],
    )


def wait_for(process, path, text):
    """Waits until a file holds a text."""
    end = time.monotonic() + FAR
    while text not in path.read_text():
        assert process.poll() is None and time.monotonic() < end, path.read_text()
        time.sleep(0.05)
