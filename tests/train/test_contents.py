"""Which folders a run may begin in."""

import json
import shutil

import pytest
from helpers import refuses
from rows import for_each
from tiny_run import begun, tiny_run

from jaxrl_llm.core.runtime.locks import FolderLock
from jaxrl_llm.train import MeshConfig, OccupiedError, train
from jaxrl_llm.train.logging import RunFolder
from jaxrl_llm.train.logging.contents import has_run, holds_steps, other_files

pytestmark = pytest.mark.usefixtures("shared_programs")


def texts(folder):
    """All that a folder holds."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}


@for_each(
    ("names", "listed"),
    [
        (("config.py", "metrics.jsonl", "report.html"), "('config.py', 'metrics.jsonl', 'report."),
        (tuple(f"{n}.txt" for n in range(5)), "('0.txt', '1.txt', '2.txt' and 2 more)"),
        ((".gitignore", "notes.md"), "('notes.md')"),
        ((".lock",), "('.lock')"),
        (("run.json", "sessions.jsonl"), "('run.json', 'sessions.jsonl')"),
    ],
)
def test_files_of_others_are_refused_and_stay(tmp_path, names, listed):
    folder = tmp_path / names[0]
    folder.mkdir()
    for name in names:
        (folder / name).write_text('{"name": "of somebody else"}\n')
    before = texts(folder)
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(OccupiedError) as error:
            train(tiny_run(folder), **options)
        told = str(error.value)
        assert told.startswith(f"The folder {str(folder)!r} has files that do not belong to ")
        assert listed in told and "--run-dir" in told and texts(folder) == before


@for_each("name", [".gitignore", ".DS_Store", "lost+found"])
def test_what_a_system_puts_into_a_folder_is_no_file_of_others(tmp_path, name):
    path = tmp_path / "run" / name
    path.parent.mkdir()
    path.write_text("")
    with RunFolder(path.parent, resume=False) as folder:
        folder.start(0, {})
    assert has_run(path.parent) and path.read_text() == ""
    shutil.rmtree(path.parent)


@for_each(
    ("name", "text"),
    [
        ("sessions.jsonl", '{"step": 0, "event": "start"}\n{"st'),
        ("run.json", '{"config": "a.py", "folder": "/", "overrides": []}'),
        (".lock", '{"process": 1, "host": "a", "since": "then"}'),
        ("checkpoints/step_00000002/record.json", "{}"),
    ],
)
def test_one_file_tells_that_a_run_began(tmp_path, name, text):
    folder = tmp_path / name.replace("/", " ")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert not has_run(folder) and other_files(folder) == ["notes.txt"]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert has_run(folder) and other_files(folder) == []
    path.write_bytes(b"[" * 100_000)
    assert has_run(folder) == (name.endswith("record.json"))


def test_which_runs_have_steps(tmp_path):
    FolderLock(tmp_path).release()
    (tmp_path / "reference.npz").write_text("")  # written before the first step
    assert has_run(tmp_path)
    begun(tmp_path)
    assert not holds_steps(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "held_out": {}}\n{"step": "x"}\n')
    assert not holds_steps(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    assert holds_steps(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoints" / "step_00000001.damaged").mkdir(parents=True)
    assert holds_steps(tmp_path)


def test_a_run_with_steps_is_replaced_only_if_asked_to(tmp_path):
    train(tiny_run(tmp_path, steps=1))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints" / "step_00000009.damaged").mkdir()
    (tmp_path / "skipped_step_00000001.npz").write_text("")
    before = (tmp_path / "metrics.jsonl").read_text()
    sentence = "already holds a run; continue it .--resume., .* start over .--overwrite."
    with pytest.raises(OccupiedError, match=sentence):
        train(tiny_run(tmp_path, steps=1))
    with pytest.raises(ValueError, match="overwrite has no effect with resume"):
        train(tiny_run(tmp_path, steps=1), resume=True, overwrite=True)
    with pytest.raises(ValueError, match="over 8 devices"):  # before it begins
        train(tiny_run(tmp_path, mesh=MeshConfig(data=-1)), overwrite=True)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    lines = []
    result = train(tiny_run(tmp_path, steps=2), overwrite=True, log=lines.append)
    assert lines[0].endswith("holds a run, which is replaced; it starts over.")
    assert [row["step"] for row in result.history] == [1, 2]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "skipped_step_00000001.npz").exists()
    starts = (tmp_path / "sessions.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in starts] == ["start", "end"]


@for_each("name", ["", "  ", "a\0b"])
def test_an_empty_name_is_refused(name):
    refuses("the name of a run folder must not be empty", RunFolder, name, resume=False)


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path):
    class NeverError(Exception):
        pass

    def model():
        raise NeverError

    with pytest.raises(NeverError):
        train(tiny_run(tmp_path / "runs" / "first", model=model))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NeverError):
        train(tiny_run(tmp_path, model=model))
    assert list(tmp_path.iterdir()) == []
