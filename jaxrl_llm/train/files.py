"""Small things about files: whole or not at all, checksums that tell damage, errors in words."""

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_RECORD = "record.json"
_PART = 1 << 22


def write_whole(path: Path, text: str) -> None:
    """Writes a file such that it holds the old text or the new one, never a part."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_text(text)
        sync(unfinished)  # the new name may reach the disk before the text does
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def append_whole(path: Path, text: str) -> None:
    """Adds lines to a file, all of them or none; what a kill left of a line goes first.

    Raises:
      OSError: If it cannot be written; the file is as it was.
    """
    with path.open("a+b", buffering=0) as file:
        end = _end_of_lines(file)
        rest = text.encode()
        try:
            while rest:  # a disk that fills up takes a part and fails at the next
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(end)
            raise


def _end_of_lines(file) -> int:
    """Where the last whole line of a file ends; what is behind it is cut off."""
    end = file.seek(0, os.SEEK_END)
    if end:
        file.seek(end - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            end = file.read().rfind(b"\n") + 1
            file.truncate(end)
    return end


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, would survive a loss of power.

    Raises:
      OSError: If it was not written. Where there is nothing to wait for, file systems say so in
        many ways, and it does nothing.
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


def write_record(folder: Path, notes: Mapping[str, Any] | None = None) -> None:
    """Notes size and checksum of every file of a folder that is whole, and what is given.

    It reads everything, in one thread: others go on meanwhile.
    """
    found = sorted(file for file in folder.rglob("*") if file.is_file())
    marks = {file.relative_to(folder).as_posix(): _marks(file) for file in found}
    write_whole(folder / _RECORD, json.dumps({"notes": dict(notes or {}), "files": marks}))


def check_record(folder: Path) -> None:
    """Raises ValueError if a file was lost, cut or changed since :func:`write_record`."""
    if not (folder / _RECORD).is_file():
        raise ValueError(f"its file {_RECORD} is missing")
    files = json.loads((folder / _RECORD).read_text())["files"]
    for name, (size, _) in files.items():
        if not (folder / name).is_file():
            raise ValueError(f"its file {name} is missing")
        if (found := (folder / name).stat().st_size) != size:
            raise ValueError(f"its file {name} has {found} bytes of {size}")
    with ThreadPoolExecutor() as pool:
        sums = pool.map(_marks, [folder / name for name in files])
        for (name, (_, given)), (_, found) in zip(files.items(), sums, strict=True):
            if found != given:
                raise ValueError(f"its file {name} was changed: its checksum does not fit")


def read_notes(folder: Path) -> dict[str, Any]:
    """What :func:`write_record` was given; nothing where that cannot be read."""
    try:
        return dict(json.loads((folder / _RECORD).read_text())["notes"])
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def replace_notes(folder: Path, notes: Mapping[str, Any]) -> None:
    """Gives :func:`read_notes` something else to find; the checksums stay."""
    record = json.loads((folder / _RECORD).read_text())
    write_whole(folder / _RECORD, json.dumps(record | {"notes": dict(notes)}))


def _marks(file: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file, in bytes read as they come: large ones do not fit in memory."""
    size, value = 0, 0
    with file.open("rb") as source:
        while part := source.read(_PART):
            size, value = size + len(part), zlib.crc32(part, value)
    return size, value


def free_name(path: Path) -> Path:
    """A name beside ``path`` for what is set aside."""
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

    A file that is damaged does not parse or lacks a part; a machine that has no memory for it or
    may not open it says nothing about the file.
    """
    chain = list(_chain(error))
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


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
