"""Files that are written whole or not at all, and errors of files in words."""

import contextlib
import errno
import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file such that it holds the old content or the new one, never a part."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        if isinstance(content, bytes):
            unfinished.write_bytes(content)
        else:
            unfinished.write_text(content)
        sync(unfinished)  # the new name may reach the disk before the text does
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
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
        rest = text.encode()
        try:
            while rest:  # a full disk takes a part and then fails
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(end)
            raise


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
    """The same for all that is in a folder, and the folder."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def free_name(path: Path) -> Path:
    """A free name in the same folder for a damaged file or folder."""
    number = 0
    while (name := path.with_name(f"{path.name}.damaged{number or ''}")).exists():
        number += 1
    return name


def reason(error: BaseException) -> str:
    """Why something could not be written, in a few words."""
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
    """Why a file could not be read though nothing is wrong with it; None if something may be.

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
