"""Several processes on this machine, each with fake devices, that train one model together."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from pod_config import config
from rows import for_each
from test_checkpoint import truncate

from jaxrl_llm.train import Checkpoints, MeshConfig, train
from jaxrl_llm.train.checkpoint.checkpoints import steps_in
from jaxrl_llm.train.logging.results import read_jsonl
from jaxrl_llm.train.mesh import AsyncConfig, load_meshes

HERE = Path(__file__).parent
# Seconds for what takes a few on a machine with nothing else to do. They are counted while this
# process runs, since a machine that others share may stand still for long.
PATIENCE = 300.0
TICK = 0.05


class Pod:
    """Processes of one run, started as a user starts them."""

    def __init__(self, folder, count, devices, *words, mpi=False, **environment):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "jaxrl_llm", "train", str(HERE / "pod_config.py")]
        command += ["--run-dir", str(folder), *words]
        command += ["--distributed.silence", "200"]
        if mpi:  # as Open MPI starts processes; jax makes its port from the number of the job
            command += ["--distributed.detect"]
            environment["OMPI_MCA_orte_hnp_uri"] = f"{port * 2**12}.0;tcp://127.0.0.1:1"
            environment["OMPI_COMM_WORLD_SIZE"] = str(count)
        else:
            command += ["--distributed.coordinator", f"localhost:{port}"]
            command += ["--distributed.processes", str(count)]
        settings = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), **environment}
        settings |= {"PYTHONPATH": str(HERE.parents[1]), "POD": "1"}
        self.folder, self.logs = folder, []
        self.processes = []
        for index in range(count):
            self.logs.append(folder.with_name(f"{folder.name}.{port}.{index}.log"))
            with self.logs[-1].open("w") as log:
                words = [*command, *([] if mpi else ["--distributed.process", str(index)])]
                for name in ("RANK", "LOCAL_RANK"):
                    settings[f"OMPI_COMM_WORLD_{name}"] = str(index)
                options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                self.processes.append(subprocess.Popen(words, env=settings, **options))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.wait()

    def wait(self, ready, timeout=PATIENCE):
        for _ in range(int(timeout / TICK)):
            if ready():
                return
            time.sleep(TICK)
        raise AssertionError(f"not ready after {timeout} s: {self.text()}")

    def codes(self, timeout=PATIENCE):
        """The exit codes, once all have ended."""
        self.wait(lambda: None not in [p.poll() for p in self.processes], timeout)
        return [p.returncode for p in self.processes]

    def until_step(self, step):
        """Waits for the checkpoint of a step."""

        def there():
            assert all(p.poll() is None for p in self.processes), self.text()
            return any(n >= step for n in steps_in(self.folder / "checkpoints"))

        self.wait(there)

    def text(self):
        return "\n".join(log.read_text()[-3000:] for log in self.logs)


def assert_same_run(folder, alone):
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for name in ("reward", "loss", "grad_norm", "entropy"):
        theirs = [row[name] for row in alone.history if "reward" in row]
        np.testing.assert_allclose([row[name] for row in rows], theirs, atol=1e-4, err_msg=name)
    model, params, _ = config.model()
    assert steps_in(folder / "checkpoints")[-1] == 4
    found = Checkpoints(folder / "checkpoints", model=model).restore_params(params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(alone.state.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.slow
def test_two_processes_survive_what_befalls_one_and_train_as_one(tmp_path):
    folder = tmp_path / "run"
    # One that is told to end takes the other along, after the same step.
    with Pod(folder, 2, 2, "--resume", SLOW="0.3") as pod:
        pod.until_step(1)
        pod.processes[1].send_signal(signal.SIGTERM)
        codes = pod.codes()
        assert codes[0] == codes[1] and codes[0] >= 0, pod.text()
        assert "nothing is resumed; the run starts from step 0" in pod.logs[0].read_text()
    first = steps_in(folder / "checkpoints")[-1]
    assert first < 4, pod.text()

    # The first, which chooses and writes, is lost; without it the other ends.
    with Pod(folder, 2, 2, "--resume", SLOW="0.3") as pod:
        pod.until_step(first + 1)
        pod.processes[0].kill()
        codes = pod.codes()  # at once, or after the silence: by what the other was doing
        assert codes[0] == -signal.SIGKILL and codes[1] != 0, pod.text()

    # Both go on from the checkpoint before a damaged one.
    left = steps_in(folder / "checkpoints")[-1]
    truncate(folder / "checkpoints" / f"step_{left:08d}")
    with Pod(folder, 2, 2, "--resume") as pod:
        assert pod.codes() == [0, 0], pod.text()
        logs = [log.read_text() for log in pod.logs]
        assert all(f"the one of step {left - 1} is used" in log for log in logs), pod.text()
        assert "The checkpoint of step 4" in logs[0] and "The checkpoint of step 4" not in logs[1]
    whole = dataclasses.replace(config, mesh=MeshConfig(), run_dir=str(tmp_path / "alone"))
    assert_same_run(folder, train(whole))


@pytest.mark.slow
def test_four_processes_with_slots_refill_and_train_as_one(tmp_path):
    """What a group's rewards decide is decided alike in all processes."""
    words = ["--mesh.data", "2", "--mesh.fsdp", "1", "--sampling.slots", "8", "--recipe", "dapo"]
    sampling = dataclasses.replace(config.sampling, slots=8)
    alone = dataclasses.replace(config, mesh=MeshConfig(), recipe="dapo", sampling=sampling)
    one = train(dataclasses.replace(alone, run_dir=str(tmp_path / "alone")))
    asked = [row["groups_sampled"] for row in one.history]
    assert max(asked) > config.prompts_per_step
    with Pod(tmp_path / "run", 4, 1, *words) as pod:
        assert pod.codes() == [0] * 4, pod.text()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["groups_sampled"] for row in rows if "reward" in row] == asked
    assert_same_run(tmp_path / "run", one)


@pytest.mark.slow
def test_a_reward_that_fails_in_one_process_fails_in_all(tmp_path):
    with Pod(tmp_path / "run", 2, 1, "--mesh.tensor", "1", mpi=True, BROKEN="1") as pod:
        codes = pod.codes()
        assert codes[0] != 0 and codes[1] != 0, pod.text()
        assert "Process 1 failed: RewardError" in pod.logs[0].read_text(), pod.text()
        assert "no such verifier" in pod.logs[0].read_text()
        assert "raised ValueError on prompt" in pod.logs[1].read_text()


@pytest.mark.slow
def test_two_processes_meet_by_the_variables_of_slurm():
    code = "from jaxrl_llm.core.runtime import processes as p; p.start(); "
    code += "print(p.share(p.is_first())); p.finish()"
    settings = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "JAX_NUM_CPU_DEVICES": "1"}
    # jax makes its port from the number of the job.
    settings |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost,other"}
    settings |= {"SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    options, command = {"stdout": subprocess.PIPE, "text": True}, [sys.executable, "-c", code]
    each = [settings | {"SLURM_PROCID": str(index)} for index in range(2)]
    started = [subprocess.Popen(command, env=env, **options) for env in each]
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    lines = [[x for x in text.splitlines() if "[Gloo]" not in x] for text in said]
    assert lines == [["[True, False]"]] * 2


@pytest.mark.slow
def test_a_command_that_is_wrong_is_so_in_every_process(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.txt").touch()
    with Pod(folder, 2, 1, "--mesh.fsdp", "1") as pod:
        assert pod.codes() == [2, 2], pod.text()
    for log in pod.logs:
        lines = [line for line in log.read_text().splitlines() if "[Gloo]" not in line]
        assert len(lines) == 1 and "files that do not belong to a run ('thesis.txt')" in lines[0]


@for_each(
    "asynchrony, message",
    [
        (AsyncConfig(), "mesh: the 2 processes share one mesh of 8 devices"),
        (AsyncConfig(max_staleness=1), "max_staleness needs a single process"),
    ],
)
def test_what_several_processes_cannot_do_is_said(monkeypatch, asynchrony, message):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=message):
        load_meshes(MeshConfig(), asynchrony, 8, 1)
