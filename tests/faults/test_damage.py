"""Files of a checkpoint that were cut, changed or lost: the last good one is used, and said so."""

import os
import shutil

import numpy as np
import pytest
from test_checkpoint import assert_same, make_state, save_steps
from tiny_run import tiny_run

from jaxrl_llm.train import CheckpointConfig, CheckpointError, Checkpoints, train
from jaxrl_llm.train.checkpoint.record import check_record

pytestmark = pytest.mark.usefixtures("shared_programs")


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def flip(file, where=0.5):
    """Flips one bit."""
    data = bytearray(file.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1 << 4
    file.write_bytes(data)


def grow(file):
    file.write_bytes(file.read_bytes() + b"?")


def lose(file):
    file.unlink()


DAMAGE = {cut: r"has \d+ bytes of \d+", flip: "was changed: its checksum", lose: "is missing"}


def files_of(folder):
    return sorted(file for file in folder.rglob("*") if file.is_file())


def largest(folder):
    return max(files_of(folder), key=lambda file: file.stat().st_size)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_steps(tmp_path_factory.mktemp("saved"), 1, 2)


@pytest.fixture
def copied(saved, tmp_path):
    """Two checkpoints that a test may damage, and the states in them."""
    checkpoints, states = saved
    shutil.copytree(checkpoints.folder, tmp_path / "run")
    return Checkpoints(tmp_path / "run", model=checkpoints.model), states


def test_every_file_of_a_checkpoint_is_watched(copied):
    checkpoints, _ = copied
    folder = checkpoints.path(2)
    check_record(folder)
    for file in files_of(folder):
        whole = file.read_bytes()
        for damage in DAMAGE if whole else (lose, grow):
            damage(file)
            with pytest.raises(ValueError) as error:
                check_record(folder)
            # A record that is no JSON any more says so in its own words.
            assert f"its file {file.relative_to(folder)}" in str(error.value) or (
                file.name == "record.json" and damage is not lose
            )
            file.write_bytes(whole)
    check_record(folder)


def test_a_flip_anywhere_in_the_weights_is_seen(copied):
    checkpoints, _ = copied
    file = largest(checkpoints.path(2))
    for where in np.linspace(0, 1, 23):
        flip(file, where)
        with pytest.raises(ValueError, match="was changed: its checksum differs"):
            check_record(checkpoints.path(2))
        flip(file, where)
    check_record(checkpoints.path(2))


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_one_before_is_used_and_the_loss_is_said(copied, damage):
    checkpoints, states = copied
    damage(largest(checkpoints.path(2)))
    like = make_state(seed=5)[1]
    told = rf"step_00000002' cannot be read and is passed over: its file .* {DAMAGE[damage]}.*; "
    told += "the one of step 1 is used, what came after it is lost"
    with pytest.warns(UserWarning, match=told):
        assert_same(checkpoints.restore(like), states[1])
    with pytest.warns(UserWarning, match=told):
        assert_same(checkpoints.restore_params(like.params), states[1].params)
    with (
        pytest.warns(UserWarning, match="is passed over: .*; none is left"),
        pytest.raises(CheckpointError, match="There is no checkpoint that can be read"),
    ):
        checkpoints.restore(like, step=2)
    assert checkpoints.steps() == [1, 2]  # nothing is deleted because of it


def test_a_renamed_checkpoint_is_not_that_of_its_name(copied):
    checkpoints, states = copied
    checkpoints.path(2).rename(checkpoints.path(9))
    with pytest.warns(UserWarning, match="00009' cannot be read .*it is the checkpoint of step 2"):
        assert_same(checkpoints.restore(make_state(seed=5)[1]), states[1])
    assert checkpoints.last == 1


def test_a_run_goes_on_from_the_last_good_one(whole_run, tmp_path):
    config = tiny_run(tmp_path, checkpoint=CheckpointConfig(every=2))
    train(tiny_run(tmp_path, checkpoint=CheckpointConfig(every=2), steps=4))
    flip(largest(tmp_path / "checkpoints" / "step_00000004"))
    with pytest.warns(UserWarning, match="00004' cannot be read .*; the one of step 2 is used"):
        done = train(config, resume=True)
    assert_same(done.state, whole_run.state)
    assert [row["step"] for row in done.history] == [1, 2, 3, 4, 5, 6]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000004", "step_00000004.damaged", "step_00000006"]
