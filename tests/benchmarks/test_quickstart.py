"""The figures of the main job, read from the metrics that a run leaves."""

import json
import os
import subprocess
import sys
import threading
import types

import pytest

from benchmarks import harness, quickstart

USAGE = types.SimpleNamespace(ru_utime=98.0, ru_stime=2.0, ru_maxrss=1000)


@pytest.fixture
def rows(held_out):
    # Sampling and rewards are what the loop waits for, and count once.
    step = {"loss": 0.0, "seconds_sample": 10.0, "seconds_reward": 0.5}
    step |= {"seconds_wait": 10.5, "seconds_score": 0.5, "seconds_train": 19.0}
    step |= {"tokens_sampled": 50.0, "tokens": 40.0}
    return [
        held_out(0, 0.4, 0.2),
        {"step": 1, **step},
        {"step": 2, **step},
        held_out(2, 0.8, 0.7),
    ]


def test_figures_of_a_run(tmp_path, rows):
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    figures = quickstart.measured(3, tmp_path)
    assert (figures["seed"], figures["steps"], figures["questions"]) == (3, 2, 40)
    assert (figures["minutes"], figures["tokens"]) == (1.0, 100)
    assert (figures["greedy_before"], figures["greedy_after"]) == (0.4, 0.8)
    assert figures["sampled_after_interval"] == [0.6, 0.8]
    assert figures["curve"] == [
        {"step": 0, "minutes": 0.0, "tokens": 0, "greedy": 0.4, "sampled": 0.2},
        {"step": 2, "minutes": 1.0, "tokens": 100, "greedy": 0.8, "sampled": 0.7},
    ]


def test_the_command_names_seed_and_folder(tmp_path, rows, monkeypatch):
    commands = []

    def train(command, environment, checkout, *, beside):
        assert callable(beside)
        assert environment["PYTHONPATH"] == str(checkout)
        commands.append([*command, "in", str(checkout)])
        assert not os.listdir(environment["JAX_COMPILATION_CACHE_DIR"])
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return USAGE, 60.0

    monkeypatch.setattr(quickstart, "timed", train)
    quickstart.run(2, tmp_path, ["--steps", "2"])
    quickstart.run(2, tmp_path, target=f"{quickstart.CONFIG}:dapo")
    assert "train configs/quickstart.py:dapo --seed 2" in " ".join(commands[1])
    text = " ".join(commands[0])
    assert "train configs/quickstart.py --seed 2 --data.seed 2" in text
    assert text.endswith(f"--run-dir {tmp_path} --steps 2 in {harness.ROOT}")
    quickstart.run(2, tmp_path, checkout=tmp_path)
    assert commands[2][-1] == str(tmp_path)
    assert (harness.ROOT / quickstart.CONFIG).is_file()


def test_a_run_that_is_there_is_not_made_again(tmp_path, monkeypatch, capsys):
    made = []

    def run(seed, folder, extra, *, target, checkout):
        assert extra == ["--evaluation.every", "8"]
        made.append((seed, target, checkout))
        return {"seed": seed}

    monkeypatch.setattr(quickstart, "run", run)
    command = ["--beside", "dapo", "--before", str(tmp_path), "--folder", str(tmp_path / "runs")]
    for seeds in (["0"], ["0", "1"]):
        quickstart.main(["--seeds", *seeds, *command])
    config, other = quickstart.CONFIG, f"{quickstart.CONFIG}:dapo"
    jobs = [(config, harness.ROOT), (other, harness.ROOT), (config, tmp_path)]
    assert made == [(seed, *job) for seed in (0, 1) for job in jobs]
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["runs"] == result["beside"]["dapo"] == [{"seed": 0}, {"seed": 1}]
    assert result["before"] == {"commit": "unknown", "runs": result["runs"]}
    with pytest.raises(SystemExit, match=r"quickstart0.json is of .*--evaluation.every 8, not of"):
        quickstart.main(["--seeds", "0", "--folder", str(tmp_path / "runs"), "--steps", "2"])


def test_a_changed_job_is_not_saved_as_the_main_job():
    with pytest.raises(SystemExit, match="--steps 2 would not be the main job"):
        quickstart.main(["--save", "--steps", "2"])


def test_what_a_command_took_of_the_machine(monkeypatch):
    monkeypatch.setattr(quickstart.os, "cpu_count", lambda: 2)
    found = quickstart.resources(USAGE, 60.0)
    assert found["command_minutes"] == 1.0 and found["cores_busy"] == 0.833
    assert found["kernel_share"] == 0.02 and found["peak_memory_bytes"] in (1000, 1_024_000)


def test_what_its_steps_took(monkeypatch):
    """By their medians: a step that compiles takes longer, with more of the kernel."""
    monkeypatch.setattr(quickstart.os, "cpu_count", lambda: 2)
    ends = [(0.0, 5.0, 1.0), (10.0, 24.0, 1.2), (20.0, 43.0, 1.4), (50.0, 63.0, 11.4)]
    found = quickstart.resources_of_steps([quickstart.Used(*end) for end in ends])
    assert found == {"cores_busy_in_steps": 0.96, "kernel_share_in_steps": 0.0104}
    assert quickstart.resources_of_steps([]) == quickstart.resources_of_steps([ends[0]]) == {}


def test_measured_steps_leave_little_to_the_kernel():
    """Of every run that is published: no pages are given back and taken again between steps."""
    files = harness.RESULTS.glob("quickstart-*.json")
    runs = [run for file in files for run in json.loads(file.read_text())["runs"]]
    shares = [x for run in runs if (x := run.get("kernel_share_in_steps")) is not None]
    assert shares and max(shares) < 0.04
    assert max(run["command_minutes"] for run in runs) < 10


def test_the_ends_of_steps_are_noted(tmp_path):
    metrics, ends = tmp_path / "metrics.jsonl", []
    code = (
        "import sys, time\n"
        "for _ in range(2):\n"
        "    time.sleep(0.3)\n"
        "    open(sys.argv[1], 'a').write('{\"loss\": 1}\\n')\n"
        "time.sleep(0.3)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(metrics)])
    noting = threading.Thread(
        target=quickstart.note_steps, args=(process.pid, metrics, ends), daemon=True
    )
    noting.start()
    process.wait()
    noting.join(10)
    assert not noting.is_alive()
    assert len(ends) == 2 and ends[0].moment < ends[1].moment


def test_a_command_that_fails_is_named():
    usage, seconds = quickstart.timed([sys.executable, "-c", "pass"], os.environ)
    assert usage.ru_maxrss > 0 and seconds > 0
    with pytest.raises(SystemExit, match="exit.3.* ended with code 3"):
        quickstart.timed([sys.executable, "-c", "exit(3)"], os.environ)
