"""Atomic file writes, and readable file errors."""

import contextlib
import errno
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def with_home(path: str | Path) -> Path:
    """A path in which a leading ``~`` is the home folder.

    The text ``./~`` stays, as in a shell; a Path does not keep the dot.
    """
    return Path(os.path.expanduser(path))


def replaceable(path: Path) -> Path | None:
    """The regular file that a path names once links are followed; the file need not exist.

    None for a path that is written in place: a device, a pipe, or the standard output or error of
    this process, such as /dev/stdout.
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
    """Opens a device, a pipe or a standard stream for unbuffered writing."""
    number = _standard_stream(path.stat())
    if number is None:
        return path.open("wb", buffering=0)
    for stream in (sys.stdout, sys.stderr):  # earlier output comes first
        stream.flush()
    return os.fdopen(os.dup(number), "wb", buffering=0)


def _standard_stream(status: os.stat_result) -> int | None:
    """The descriptor of standard output or error if the file is one of them, else None."""
    for number in (1, 2):
        with contextlib.suppress(OSError):  # the stream is closed
            if os.path.samestat(status, os.fstat(number)):
                return number
    return None


def write_all(file: IO[bytes], content: bytes) -> None:
    """Writes all bytes to an unbuffered file; a full disk accepts a part of them, then fails."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file atomically: it holds the old content or the new content, never a part.

    A link stays, and its target is replaced. A device or a pipe is written in place.

    Raises:
      OSError: If the file cannot be written; the error names the path.
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
        sync(unfinished)  # else the new name may reach the disk before the content
        os.replace(unfinished, target)
    except OSError as error:
        if unfinished is not None:
            with contextlib.suppress(OSError):
                unfinished.unlink()
        if error.errno is not None:  # an error without a number shows only its message
            error.filename = error.filename or str(path)
        raise


def append_whole(path: Path, text: str) -> None:
    """Appends lines to a file, all or none. Removes a partial line left by a killed process first.

    Raises:
      OSError: If the lines cannot be written; the file then has none of them.
    """
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:  # find the end of the last complete line
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
    """The value of a JSON text; also raises ValueError if the text is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@contextlib.contextmanager
def parsing(function: str, path: Path, what: str) -> Iterator[None]:
    """Turns any error from the content of a file into one ValueError that names the file.

    A parser that trusts its input may raise anything; a panic of a Rust parser is a BaseException.
    File system errors, and a ValueError that already names the file, pass through.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, OSError | KeyboardInterrupt | SystemExit | MemoryError) or (
            isinstance(error, ValueError) and str(path) in str(error)
        ):
            raise
        raise ValueError(
            f"{function}: {path} is not a readable {what}; it may be truncated or damaged "
            f"({type(error).__name__}: {error})"
        ) from error


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, would survive a loss of power.

    Raises:
      OSError: If the data was not written. Other errors, which come from file systems that cannot
        sync, are ignored.
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
    """The reason for a write error, in a few words."""
    text = str(error)
    if "No space left on device" in text:
        return "no space is left on the device"
    # A quota and too many open files are RESOURCE_EXHAUSTED too.
    out_of_memory = "RESOURCE_EXHAUSTED" in text and "memory" in text.lower()
    if isinstance(error, MemoryError) or out_of_memory:
        return "there is not enough memory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return (" ".join(text.split()) or type(error).__name__)[:200].rstrip(". ")


def hindrance(error: BaseException) -> str | None:
    """The reason why an intact file could not be read; None if the file may be damaged.

    A damaged file does not parse or lacks a part. An error from lack of memory or of permission
    says nothing about the file.
    """
    chain, cause = [], error
    while cause is not None:  # the error and its causes
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
    # Orbax wraps the original error.
    damaged = any(isinstance(each, parsing + missing) for each in chain)
    return None if damaged else reason(error)
