"""Files that are written completely or not at all, and readable file errors."""

import contextlib
import errno
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def replaceable(path: Path) -> Path | None:
    """The regular file that a path names, through links, whether it exists or not.

    None for what is written through: a device, a pipe, and what this process has as its standard
    output or error, such as /dev/stdout.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    special = not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))
    if special or _standard_stream(status) is not None:
        return None
    return Path(os.path.realpath(path))


def open_through(path: Path) -> IO[bytes]:
    """A device, a pipe or a standard stream, opened for writing and unbuffered."""
    number = _standard_stream(path.stat())
    if number is None:
        return path.open("wb", buffering=0)
    for stream in (sys.stdout, sys.stderr):  # what was printed comes first
        stream.flush()
    return os.fdopen(os.dup(number), "wb", buffering=0)


def _standard_stream(status: os.stat_result) -> int | None:
    """Which of standard output and error a file is."""
    for number in (1, 2):
        with contextlib.suppress(OSError):  # a closed one
            if os.path.samestat(status, os.fstat(number)):
                return number
    return None


def write_all(file: IO[bytes], content: bytes) -> None:
    """Writes bytes to an unbuffered file: a full disk takes a part of them, and then fails."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file such that it holds the old content or the new one, never a part.

    A link stays, and its target is replaced. A device or a pipe is written to.

    Raises:
      OSError: If it cannot be written; names the path.
    """
    data = content.encode() if isinstance(content, str) else content
    unfinished = None
    try:
        target = replaceable(path)
        if target is None:
            with open_through(path) as file:
                write_all(file, data)
            return
        unfinished = target.with_name(f"{target.name}.tmp")
        unfinished.write_bytes(data)
        with contextlib.suppress(FileNotFoundError):
            unfinished.chmod(stat.S_IMODE(target.stat().st_mode))  # a private file stays private
        sync(unfinished)  # the new name may reach the disk before the text does
        os.replace(unfinished, target)
    except OSError as error:
        if unfinished is not None:
            with contextlib.suppress(OSError):
                unfinished.unlink()
        if error.errno is not None:  # else its message is all it has
            error.filename = error.filename or str(path)
        raise


def append_whole(path: Path, text: str) -> None:
    """Adds lines to a file, all or none; a part of a line that a kill left is removed first.

    Raises:
      OSError: If it cannot be written; the file is as it was.
    """
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:  # at the end of the last complete line
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                end = file.read().rfind(b"\n") + 1
                file.truncate(end)
        try:
            write_all(file, text.encode())
        except OSError:
            file.truncate(end)
            raise


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError also where it is nested deeper than Python calls go."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@contextlib.contextmanager
def parsing(function: str, path: Path, what: str) -> Iterator[None]:
    """Whatever is raised of a file's content becomes one ValueError that names the file.

    Parsers that trust a file raise anything; a panic of one in Rust is a BaseException. Errors of
    the file system, and those that name the file already, pass.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, OSError | KeyboardInterrupt | SystemExit | MemoryError) or (
            isinstance(error, ValueError) and str(path) in str(error)
        ):
            raise
        raise ValueError(
            f"{function}: {path} is not a readable {what}, it may be truncated or damaged "
            f"({type(error).__name__}: {error})"
        ) from error


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, would survive a loss of power.

    Raises:
      OSError: If it was not written. File systems that cannot sync report other errors, which
        are ignored.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise


def sync_all(folder: Path) -> None:
    """:func:`sync` for a folder and all of its contents."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def free_name(path: Path) -> Path:
    """A free name in the same folder for a damaged file or folder."""
    number = 0
    while (name := path.with_name(f"{path.name}.damaged{number or ''}")).exists():
        number += 1
    return name


def reason(error: BaseException) -> str:
    """The reason of a write error, in a few words."""
    text = str(error)
    if "No space left on device" in text:
        return "no space is left on the device"
    # A quota and too many open files have this kind too.
    out_of_memory = "RESOURCE_EXHAUSTED" in text and "memory" in text.lower()
    if isinstance(error, MemoryError) or out_of_memory:
        return "there is not enough memory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return (" ".join(text.split()) or type(error).__name__)[:200].rstrip(". ")


def hindrance(error: BaseException) -> str | None:
    """The reason why an intact file could not be read; None if the file may be damaged.

    A damaged file does not parse or lacks a part. A machine without the memory for it, or without
    the permission to open it, says nothing about the file.
    """
    chain, cause = [], error
    while cause is not None:  # the error and what led to it
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for each in chain:
        text = str(each)
        if isinstance(each, MemoryError) or "RESOURCE_EXHAUSTED" in text:
            return reason(each)
        if isinstance(each, PermissionError) or "PERMISSION_DENIED" in text:
            return "permission denied"
    parsing = (ValueError, LookupError, TypeError, AttributeError, EOFError)
    missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    # Orbax wraps the error that says what it was.
    damaged = any(isinstance(each, parsing + missing) for each in chain)
    return None if damaged else reason(error)
