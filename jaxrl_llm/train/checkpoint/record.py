"""The record of a checkpoint's files: size and checksum of each, which tell damage, and notes."""

import hashlib
import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxrl_llm.core.runtime.files import write_whole

_RECORD = "record.json"
_PART = 1 << 22


def write_record(
    folder: Path, notes: Mapping[str, Any] | None = None, *, step: int | None = None
) -> None:
    """Writes size and checksum of every file of a complete folder, its step and the notes.

    It reads everything in one thread, so that other work goes on.
    """
    paths = sorted(file for file in folder.rglob("*") if file.is_file())
    entries = {file.relative_to(folder).as_posix(): _size_and_checksum(file) for file in paths}
    record = {"notes": dict(notes or {}), "files": entries, "step": step}
    write_whole(folder / _RECORD, json.dumps(record))


def check_record(folder: Path, *, step: int | None = None) -> None:
    """Raises ValueError if a file was lost, cut or changed since :func:`write_record`.

    Also raises if the record is for another step than ``step``, for example after a renamed folder.
    """
    if not (folder / _RECORD).is_file():
        raise ValueError(f"its file {_RECORD} is missing")
    record = json.loads((folder / _RECORD).read_text())
    files, written = record["files"], record.get("step")
    if step is not None and written not in (step, None):
        raise ValueError(f"it is the checkpoint of step {written} under another name")
    for name, (size, _) in files.items():
        if not (folder / name).is_file():
            raise ValueError(f"its file {name} is missing")
        if (present := (folder / name).stat().st_size) != size:
            raise ValueError(f"its file {name} has {present} bytes of {size}")
    with ThreadPoolExecutor() as pool:
        sums = pool.map(_size_and_checksum, [folder / name for name in files])
        for (name, (_, expected)), (_, checksum) in zip(files.items(), sums, strict=True):
            if checksum != expected:
                raise ValueError(f"its file {name} was changed: its checksum differs")


def read_notes(folder: Path) -> dict[str, Any]:
    """The notes of :func:`write_record`; empty where they cannot be read."""
    try:
        return dict(json.loads((folder / _RECORD).read_text())["notes"])
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def digest_of_files(folder: Path) -> str:
    """A short digest of the sizes and checksums of a checkpoint's files, whatever its notes."""
    files = json.loads((folder / _RECORD).read_text())["files"]
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]


def replace_notes(folder: Path, notes: Mapping[str, Any]) -> None:
    """Replaces the notes; the checksums stay."""
    record = json.loads((folder / _RECORD).read_text())
    write_whole(folder / _RECORD, json.dumps(record | {"notes": dict(notes)}))


def _size_and_checksum(file: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file, read piece by piece, since memory may be smaller."""
    size, value = 0, 0
    with file.open("rb") as source:
        while part := source.read(_PART):
            size, value = size + len(part), zlib.crc32(part, value)
    return size, value
