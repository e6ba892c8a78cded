"""Only runs that were made here execute their config.py without being asked to."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from rows import for_each
from test_cli import config_file, one_sentence, refused, run

from jaxrl_llm.cli import UsageError, options, trust

RECORD = {"config": "task.py", "folder": "/nowhere", "overrides": []}


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """The user's state and temporary folders, both empty."""
    for name in ("state", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "state"


@pytest.fixture
def folder(tmp_path):
    """A run from elsewhere, whose config.py leaves a file where it is executed."""
    folder = tmp_path / "run"
    folder.mkdir()
    path, traces = config_file(folder), str(tmp_path / "traces")
    with open(path) as file:
        text = f"with open({traces!r}, 'a') as file:\n    file.write('.')\n{file.read()}"
    (folder / "config.py").write_text(text)
    (folder / "run.json").write_text(json.dumps(RECORD))
    return folder


COMMANDS = [
    ["evaluate", "{}"],
    ["sample", "{}", "one"],
    ["serve", "{}", "--port", "0"],
    ["export", "{}", "{}/out"],
    ["pairs", "{}", "--out", "{}/out.jsonl"],
    ["merge", "{}@1", "{}@2", "--out", "{}/out"],
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its socket
@for_each("words", COMMANDS, ids=lambda words: words[0])
def test_a_run_from_elsewhere_is_not_executed(capsys, tmp_path, folder, words):
    code, out, err = run(capsys, *(word.format(folder) for word in words))
    assert code == 2 and out in ("", f"Loading {folder} ...\n")
    one_sentence(err, f"{str(folder)!r} was not made here", "config.py", "--trust")
    assert not (tmp_path / "traces").exists()


def test_trust_is_given_once_and_for_what_was_read(tmp_path, folder):
    assert options.load_target(str(folder), trust=True).run_dir == folder
    assert options.load_target(str(folder)).config.steps == 2
    moved = shutil.move(folder, tmp_path / "moved")
    assert options.load_target(str(moved)).config.steps == 2
    assert (tmp_path / "traces").read_text() == "..."
    for name, text in {
        "run.json": json.dumps(RECORD | {"overrides": ["--steps", "3"]}),
        "config.py": "raise SystemExit",
    }.items():
        before = (tmp_path / "moved" / name).read_text()
        (tmp_path / "moved" / name).write_text(text)
        with pytest.raises(UsageError, match="was changed since"):
            options.load_target(str(moved))
        (tmp_path / "moved" / name).write_text(before)


def test_the_copy_of_a_config_finds_what_lies_beside_the_original(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "task", raising=False)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "steps.txt").write_text("7")
    (tmp_path / "run").mkdir()
    path = config_file(tmp_path / "run", name="config.py")
    text = "from pathlib import Path\n" + Path(path).read_text()
    text += "\nSTEPS = Path(__file__).parent / 'steps.txt'\n"
    text += "config = dataclasses.replace(config, steps=int(STEPS.read_text()))\n"
    Path(path).write_text(text)
    record = RECORD | {"folder": str(tmp_path / "there")}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    assert options.load_target(str(tmp_path / "run"), trust=True).config.steps == 7


def test_trust_without_a_run_has_no_effect(capsys, tmp_path):
    path = config_file(tmp_path)
    refused(capsys, f"evaluate {path} --trust", "--trust has no effect on", "which is not a run")
    refused(
        capsys, f"merge a b --out {tmp_path / 'out'} --trust", "--trust has no effect without a run"
    )


def test_a_model_folder_is_data(tmp_path, folder):
    (folder / "config.json").write_text("{}")
    assert not options.names_run(str(folder))
    with pytest.raises(UsageError, match=r"its config\.json is that of a model"):
        options.load_target(str(folder))
    assert not (tmp_path / "traces").exists()


def test_notes_are_private(state):
    trust.note("abc")
    trust.note("abc")
    file = state / "jaxrl_llm" / "runs"
    assert file.read_text() == "abc\n" and file.stat().st_mode & 0o777 == 0o600
    assert trust.is_noted("abc") and not trust.is_noted("ab")
    file.parent.chmod(0o777)  # anyone may have written it
    assert not trust.is_noted("abc")


def test_a_home_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "state"))
    with pytest.warns(UserWarning, match="'.*file/state/jaxrl_llm' cannot be written .*temporary"):
        trust.note("abc")
    assert trust.is_noted("abc")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="nothing notes that this run was made here"):
        trust.note("abc")
    assert not trust.is_noted("abc")


def test_a_relative_state_folder_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    trust.note("abc")
    assert (tmp_path / "home/.local/state/jaxrl_llm/runs").read_text() == "abc\n"
