"""Files that are written whole or not at all."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rows import for_each

from jaxrl_llm.core.runtime import files
from jaxrl_llm.core.runtime.files import (
    append_whole,
    hindrance,
    parse_json,
    reason,
    replaceable,
    with_home,
    write_whole,
)


def test_lines_are_added_whole_or_not_at_all(tmp_path, monkeypatch):
    """On a disk that takes ten bytes more, as a full one does: a part, then an error."""
    path, open_file, room = tmp_path / "lines", type(tmp_path).open, [10]
    append_whole(path, "first\n")

    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, data):
            if not room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = self.file.write(data[: room[0]])
            room[0] -= written
            return written

    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "open", lambda *args, **kwds: Full(open_file(*args, **kwds)))
        with pytest.raises(OSError, match="No space left"):
            append_whole(path, "a line of more than ten bytes\n")
    assert path.read_text() == "first\n"
    append_whole(path, "second\n")
    with path.open("a") as file:
        file.write('{"half": ')  # what a kill leaves
    append_whole(path, "third\n")
    assert path.read_text() == "first\nsecond\nthird\n"


def test_a_text_that_cannot_be_written_leaves_nothing_beside_the_old_one(tmp_path, monkeypatch):
    write_whole(tmp_path / "a", "old")

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "a", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


@for_each("number", [errno.EINVAL, errno.ENOSYS, errno.EBADF, errno.EPERM])
def test_a_file_system_that_cannot_sync_is_no_error(tmp_path, monkeypatch, number):
    def refuses(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuses)
    write_whole(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


@for_each(
    ("text", "written"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes", "there is not enough memory"),
        ("RESOURCE_EXHAUSTED: No space left on device", "no space is left on the device"),
        ("RESOURCE_EXHAUSTED: Too many open files", "RESOURCE_EXHAUSTED: Too many open files"),
    ],
)
def test_memory_and_space_are_told_apart(text, written):
    assert reason(ValueError(text)) == hindrance(ValueError(text)) == written


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    link.symlink_to("folder/target")
    write_whole(link, "first")  # of a link to nothing, as open() does
    target.chmod(0o600)
    before = target.stat().st_ino
    write_whole(link, "second")
    assert link.is_symlink() and link.read_text() == target.read_text() == "second"
    assert target.stat().st_ino != before  # replaced, not written over
    assert target.stat().st_mode & 0o777 == 0o600
    assert replaceable(link) == replaceable(target) == target.resolve()
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_a_pipe_and_a_device_are_written_through(tmp_path):
    pipe, full = tmp_path / "pipe", tmp_path / "full"
    os.mkfifo(pipe)
    full.symlink_to("/dev/full")
    texts = []
    reader = threading.Thread(target=lambda: texts.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "page")
    reader.join()
    assert texts == ["page"] and pipe.is_fifo()
    with pytest.raises(OSError, match="No space left") as error:
        write_whole(full, "page")
    assert error.value.filename == str(full) and full.is_char_device()
    assert replaceable(pipe) is replaceable(full) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "pipe"]


@for_each("kind", ["file", "pipe"])
def test_standard_output_is_written_in_order(tmp_path, kind):
    """It may be a regular file, which must not be replaced under the process that prints."""
    code = (
        "import pathlib, runpy, sys; name, path = sys.argv[1:]; print('before');"
        "runpy.run_path(name)['write_whole'](pathlib.Path(path), 'page\\n'); print('after')"
    )
    path = tmp_path / "out"
    words = [sys.executable, "-c", code, files.__file__, "/dev/stdout" if kind == "pipe" else path]
    with path.open("wb") as out:
        done = subprocess.run(words, stdout=out if kind == "file" else subprocess.PIPE, check=True)
    text = path.read_bytes() if kind == "file" else done.stdout
    assert text == b"before\npage\nafter\n"


def test_json_that_is_nested_too_deeply_is_a_value_error():
    assert parse_json('{"a": [1]}') == parse_json(b'{"a": [1]}') == {"a": [1]}
    for text in ("[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(text)


@for_each(
    "error", [KeyError("a"), OverflowError("big"), TypeError(), ValueError("bad"), BaseException()]
)
def test_whatever_a_parser_raises_names_the_file(tmp_path, error):
    match = f"load: {tmp_path} is not a readable model; it may be"
    with pytest.raises(ValueError, match=match), files.parsing("load", tmp_path, "model"):
        raise error


@for_each("error", [KeyboardInterrupt(), FileNotFoundError("a"), MemoryError()])
def test_what_is_no_fault_of_the_content_passes(tmp_path, error):
    with pytest.raises(type(error)), files.parsing("load", tmp_path, "model"):
        raise error


def test_only_a_leading_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/run", Path("~/run")):
        assert with_home(path) == tmp_path / "run"
    for path in ("./~/run", "run/~", "~no_such_user/run", "/~/run"):
        assert with_home(path) == Path(path)
