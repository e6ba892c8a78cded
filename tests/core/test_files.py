"""Files that are written whole or not at all."""

import errno
import os

import pytest

from jaxrl_llm.core.runtime.files import append_whole, hindrance, reason, write_whole


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


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EBADF, errno.EPERM])
def test_a_file_system_that_cannot_sync_is_no_error(tmp_path, monkeypatch, number):
    def refuses(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuses)
    write_whole(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes", "there is not enough memory"),
        ("RESOURCE_EXHAUSTED: No space left on device", "no space is left on the device"),
        ("RESOURCE_EXHAUSTED: Too many open files", "RESOURCE_EXHAUSTED: Too many open files"),
    ],
)
def test_memory_and_space_are_told_apart(text, written):
    assert reason(ValueError(text)) == hindrance(ValueError(text)) == written
