"""A disk that is full while a checkpoint is written: the run goes on and the last one stands."""

import errno
import os
import shutil
import threading

import pytest
from test_checkpoint import assert_same, make_state, save_steps
from tiny_run import tiny_run

from jaxrl_llm.train import (
    CheckpointConfig,
    CheckpointError,
    EvaluationConfig,
    TrainingError,
    train,
)
from jaxrl_llm.train.checkpoint import checkpoints, record
from jaxrl_llm.train.logging import results
from jaxrl_llm.train.logging.results import read_jsonl

pytestmark = pytest.mark.usefixtures("shared_programs")

TOLD = r"The checkpoint of step {} cannot be written to '.*': no space is left on the device"


@pytest.fixture
def disk(monkeypatch):
    """A disk with room for metrics only, while it is full."""
    full, usage = [], shutil.disk_usage

    def told(path):
        return usage(path)._replace(free=1_000 if full else 1 << 40)

    monkeypatch.setattr(shutil, "disk_usage", told)
    return full


def late(monkeypatch, which):
    """The disk fills up behind the first look: the checksums of some checkpoints do not fit."""
    calls, write = [], record.write_record

    def fails(folder, notes, *, step):
        calls.append(folder)
        if len(calls) in which:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(folder, notes, step=step)

    monkeypatch.setattr(record, "write_record", fails)


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_run_goes_on_and_the_one_before_stands(whole_run, tmp_path, disk, acting):
    found, every = [], CheckpointConfig(every=2)

    def empty():
        disk.clear()
        found.extend(names(tmp_path))

    reward = acting({3 * 8: lambda: disk.append(True), 4 * 8: empty})  # in steps 4 and 5
    with pytest.warns(UserWarning, match=TOLD.format(4) + "; the one of step 2 stands. The run go"):
        done = train(tiny_run(tmp_path, checkpoint=every, reward=reward))
    assert_same(done.state, whole_run.state)
    assert found == ["step_00000002"]
    assert names(tmp_path) == ["step_00000002", "step_00000006"]


def test_one_that_fails_in_the_thread_is_told_while_the_run_goes_on(
    whole_run, tmp_path, monkeypatch
):
    late(monkeypatch, {2})
    told = []
    monkeypatch.setattr("warnings.warn", lambda text, **options: told.append(str(text)))
    done = train(tiny_run(tmp_path, checkpoint=CheckpointConfig(every=2)))
    assert_same(done.state, whole_run.state)
    assert len(told) == 1 and "of step 4 cannot be written" in told[0]
    assert names(tmp_path) == ["step_00000002", "step_00000006"]


def test_the_last_one_is_an_error(whole_run, tmp_path, disk, acting):
    every = CheckpointConfig(every=4)
    reward = acting({7 * 8: lambda: disk.append(True)})  # in step 8
    with pytest.raises(CheckpointError, match=TOLD.format(8) + "; the one of step 4 stands"):
        train(tiny_run(tmp_path, checkpoint=every, reward=reward, steps=8))
    assert names(tmp_path) == ["step_00000004"]
    disk.clear()
    done = train(tiny_run(tmp_path, checkpoint=every), resume=True, allow_changed=True)
    assert_same(done.state, whole_run.state)  # six steps


def test_an_error_after_a_save_that_failed_still_saves(whole_run, tmp_path, monkeypatch, acting):
    late(monkeypatch, {1})
    every = CheckpointConfig(every=2)

    def fail():
        raise OSError("the judge is away")

    with (
        pytest.warns(UserWarning, match="of step 2 cannot be written .*. The run goes on"),
        pytest.raises(Exception, match="the judge is away"),
    ):
        train(tiny_run(tmp_path, checkpoint=every, reward=acting({2 * 8: fail})))
    assert names(tmp_path) == ["step_00000002"]
    done = train(tiny_run(tmp_path, checkpoint=every), resume=True, allow_changed=True)
    assert_same(done.state, whole_run.state)


def test_what_is_not_required_is_a_warning_and_is_not_the_last(tmp_path, disk, monkeypatch):
    saves, _ = save_steps(tmp_path, 1)
    disk.append(True)
    state = make_state(step=2)[1]
    with pytest.warns(UserWarning, match=TOLD.format(2)):
        saves.save(state, required=False)
    assert saves.last == 1
    disk.clear()
    late(monkeypatch, {1, 3})
    saves.save(state, required=False)
    with pytest.warns(UserWarning, match=TOLD.format(2)):
        saves.wait()
    assert saves.last == 1 and saves.steps() == [1]
    saves.save(state, required=False)
    saves.wait()
    saves.poll()  # nothing is under way
    assert saves.last == 2 and saves.steps() == [1, 2]
    saves.save(make_state(step=3)[1])
    with pytest.raises(CheckpointError, match=TOLD.format(3)):
        saves.wait()
    assert [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []


@pytest.fixture
def lines_full(monkeypatch):
    """A disk that takes no line while the list holds something."""
    full, append = [], results.append_whole

    def appends(path, text):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(path, text)

    monkeypatch.setattr(results, "append_whole", appends)
    return full


def test_lines_of_a_full_disk_are_written_once_there_is_room(
    whole_run, tmp_path, lines_full, acting
):
    reward = acting({8: lambda: lines_full.append(True), 3 * 8: lines_full.clear})  # steps 2 and 3
    with pytest.warns(UserWarning) as told:
        done = train(tiny_run(tmp_path, reward=reward))
    assert_same(done.state, whole_run.state)
    texts = [str(each.message) for each in told if "cannot be written" in str(each.message)]
    assert len(texts) == 2  # once for each of the two files
    assert "metrics.jsonl' cannot be written: no space is left on the device. Its lin" in texts[0]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    samples = [(folder / "samples.jsonl").read_text() for folder in (tmp_path, whole_run.run_dir)]
    assert samples[0] == samples[1]


def test_completions_are_written_though_metrics_cannot_be(tmp_path, monkeypatch):
    append, lines = results.append_whole, []

    def appends(path, text):
        if path.name == "sessions.jsonl":
            return append(path, text)
        lines.append(path.name)
        # A line of each file a step, and once more at the end.
        if len(lines) <= 2 * 6 or path.name == "metrics.jsonl":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(path, text)

    monkeypatch.setattr(results, "append_whole", appends)
    with (
        pytest.warns(UserWarning, match="Its lines stay in memory"),
        pytest.raises(TrainingError, match="metrics.jsonl' cannot be written: no space is left"),
    ):
        train(tiny_run(tmp_path, samples_shown=1))
    kept = [row["step"] for row in read_jsonl(tmp_path / "samples.jsonl")]
    assert kept == [1, 2, 3, 4, 5, 6]


def test_lines_that_never_found_room_are_an_error_at_the_end(tmp_path, lines_full, acting):
    reward = acting({3 * 8: lambda: lines_full.append(True)})
    evaluation = EvaluationConfig()  # of which the lines are read back
    with (
        pytest.warns(UserWarning, match="Its lines stay in memory"),
        pytest.raises(TrainingError, match="metrics.jsonl' cannot be written: no space is left"),
    ):
        train(tiny_run(tmp_path, reward=reward, evaluation=evaluation))
    assert names(tmp_path) == ["step_00000006"]


def test_a_failed_save_makes_room_for_the_lines(tmp_path, monkeypatch, acting):
    late(monkeypatch, {1})
    append, left = results.append_whole, []

    def appends(path, text):
        left.extend((tmp_path / "checkpoints").glob("*unfinished*"))
        append(path, text)

    def watch():  # in step 2, once the save after step 1 has failed
        for thread in threading.enumerate():
            if thread.name.startswith(checkpoints._THREADS):
                thread.join(60)
        monkeypatch.setattr(results, "append_whole", appends)

    checkpoint = CheckpointConfig(every=1)
    with pytest.warns(UserWarning, match="of step 1 cannot be written"):
        train(tiny_run(tmp_path, reward=acting({8: watch}), checkpoint=checkpoint, steps=2))
    assert not left
