"""The record of a checkpoint's files: size and checksum of each, which tell damage, and notes."""

import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxrl_llm.train.files import write_whole

_RECORD = "record.json"
_PART = 1 << 22


def write_record(folder: Path, notes: Mapping[str, Any] | None = None) -> None:
    """Notes size and checksum of every file of a folder that is whole, and what is given.

    It reads everything, in one thread: others go on meanwhile.
    """
    found = sorted(file for file in folder.rglob("*") if file.is_file())
    sizes = {file.relative_to(folder).as_posix(): _size_and_checksum(file) for file in found}
    write_whole(folder / _RECORD, json.dumps({"notes": dict(notes or {}), "files": sizes}))


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
        sums = pool.map(_size_and_checksum, [folder / name for name in files])
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


def _size_and_checksum(file: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file, in bytes read as they come: large ones do not fit in memory."""
    size, value = 0, 0
    with file.open("rb") as source:
        while part := source.read(_PART):
            size, value = size + len(part), zlib.crc32(part, value)
    return size, value
