"""A disk that is full while a checkpoint is written: the run goes on and the last one stands."""

import errno
import os
import shutil
import time

import pytest
from test_checkpoint import assert_same, make_state, save_steps
from tiny_run import low_bytes, tiny_run

from jaxrl_llm.train import (
    CheckpointConfig,
    CheckpointError,
    EvaluationConfig,
    TrainingError,
    train,
)
from jaxrl_llm.train.checkpoint import record
from jaxrl_llm.train.logging import results
from jaxrl_llm.train.logging.results import read_jsonl

pytestmark = pytest.mark.usefixtures("shared_programs")

TOLD = r"The checkpoint of step {} cannot be written to '.*': no space is left on the device"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return train(tiny_run(tmp_path_factory.mktemp("whole")))


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


def test_the_run_goes_on_and_the_one_before_stands(whole_run, tmp_path, disk):
    config = tiny_run(tmp_path, checkpoint=CheckpointConfig(every=2))
    calls, found = [], []

    def reward(prompt, completion, metadata):
        calls.append(prompt)
        if len(calls) == 3 * 8 + 1:  # in step 4
            disk.append(True)
        if len(calls) == 4 * 8 + 1:  # in step 5
            disk.clear()
            found.extend(names(tmp_path))
        return config.reward(prompt, completion, metadata)

    changed = tiny_run(tmp_path, checkpoint=CheckpointConfig(every=2), reward=reward)
    with pytest.warns(UserWarning, match=TOLD.format(4) + "; the one of step 2 stands. The run go"):
        done = train(changed)
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


def test_the_last_one_is_an_error(whole_run, tmp_path, disk):
    config = tiny_run(tmp_path, checkpoint=CheckpointConfig(every=4))
    calls = []

    def reward(prompt, completion, metadata):
        calls.append(prompt)
        if len(calls) == 7 * 8 + 1:  # in step 8
            disk.append(True)
        return config.reward(prompt, completion, metadata)

    changed = tiny_run(tmp_path, checkpoint=CheckpointConfig(every=4), reward=reward, steps=8)
    with pytest.raises(CheckpointError, match=TOLD.format(8) + "; the one of step 4 stands"):
        train(changed)
    assert names(tmp_path) == ["step_00000004"]
    disk.clear()
    assert_same(train(config, resume=True, allow_changed=True).state, whole_run.state)  # six steps


def test_an_error_after_a_save_that_failed_still_saves(whole_run, tmp_path, monkeypatch):
    late(monkeypatch, {1})
    config = tiny_run(tmp_path, checkpoint=CheckpointConfig(every=2))

    def reward(prompt, completion, metadata):
        if len(seen) == 2 * 8:
            raise OSError("the judge is away")
        seen.append(prompt)
        return config.reward(prompt, completion, metadata)

    seen = []
    changed = tiny_run(tmp_path, checkpoint=CheckpointConfig(every=2), reward=reward)
    with (
        pytest.warns(UserWarning, match="of step 2 cannot be written .*. The run goes on"),
        pytest.raises(Exception, match="the judge is away"),
    ):
        train(changed)
    assert names(tmp_path) == ["step_00000002"]
    assert_same(train(config, resume=True, allow_changed=True).state, whole_run.state)


def test_what_is_not_required_is_a_warning_and_is_not_the_last(tmp_path, disk, monkeypatch):
    checkpoints, _ = save_steps(tmp_path, 1)
    disk.append(True)
    state = make_state(step=2)[1]
    with pytest.warns(UserWarning, match=TOLD.format(2)):
        checkpoints.save(state, required=False)
    assert checkpoints.last == 1
    disk.clear()
    late(monkeypatch, {1, 3})
    checkpoints.save(state, required=False)
    with pytest.warns(UserWarning, match=TOLD.format(2)):
        checkpoints.wait()
    assert checkpoints.last == 1 and checkpoints.steps() == [1]
    checkpoints.save(state, required=False)
    checkpoints.wait()
    checkpoints.poll()  # nothing is under way
    assert checkpoints.last == 2 and checkpoints.steps() == [1, 2]
    checkpoints.save(make_state(step=3)[1])
    with pytest.raises(CheckpointError, match=TOLD.format(3)):
        checkpoints.wait()
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


def filling(full, between):
    """The reward, while some of whose calls the disk is full."""
    calls = []

    def reward(prompt, completion, metadata):
        calls.append(prompt)
        full[:] = [True] if len(calls) in between else []
        return low_bytes(prompt, completion, metadata)

    return reward


def test_lines_of_a_full_disk_are_written_once_there_is_room(whole_run, tmp_path, lines_full):
    reward = filling(lines_full, range(8 + 1, 3 * 8 + 1))  # steps 2 and 3
    with pytest.warns(UserWarning) as told:
        done = train(tiny_run(tmp_path, reward=reward))
    assert_same(done.state, whole_run.state)
    texts = [str(each.message) for each in told if "cannot be written" in str(each.message)]
    assert len(texts) == 2  # once for each of the two files
    assert "metrics.jsonl' cannot be written: no space is left on the device. Its lin" in texts[0]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    samples = [(folder / "samples.jsonl").read_text() for folder in (tmp_path, whole_run.run_dir)]
    assert samples[0] == samples[1]


def test_completions_are_written_though_metrics_cannot_be(whole_run, tmp_path, monkeypatch):
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


def test_lines_that_never_found_room_are_an_error_at_the_end(whole_run, tmp_path, lines_full):
    reward = filling(lines_full, range(3 * 8 + 1, 99))
    evaluation = EvaluationConfig()  # of which the lines are read back
    with (
        pytest.warns(UserWarning, match="Its lines stay in memory"),
        pytest.raises(TrainingError, match="metrics.jsonl' cannot be written: no space is left"),
    ):
        train(tiny_run(tmp_path, reward=reward, evaluation=evaluation))
    assert names(tmp_path) == ["step_00000006"]


def test_a_failed_save_makes_room_for_the_lines(tmp_path, monkeypatch):
    late(monkeypatch, {1})
    append, left = results.append_whole, []

    def appends(path, text):
        left.extend((tmp_path / "checkpoints").glob("*unfinished*"))
        append(path, text)

    def reward(prompt, completion, metadata):
        if len(calls) == 8:  # in step 2, the save after step 1 has failed by then
            time.sleep(1.0)
            monkeypatch.setattr(results, "append_whole", appends)
        calls.append(prompt)
        return low_bytes(prompt, completion, metadata)

    calls = []
    checkpoint = CheckpointConfig(every=1)
    with pytest.warns(UserWarning, match="of step 1 cannot be written"):
        train(tiny_run(tmp_path, reward=reward, checkpoint=checkpoint, steps=2))
    assert not left
