"""Small things about files: whole or not at all, sizes that tell a cut one, errors in words."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

_SIZES = "sizes.json"


def write_whole(path: Path, text: str) -> None:
    """Writes a file such that it holds the old text or the new one, never a part."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def write_sizes(folder: Path) -> None:
    """Notes the size of every file of a folder that is whole."""
    files = (file for file in folder.rglob("*") if file.is_file())
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
    write_whole(folder / _SIZES, json.dumps(sizes))


def check_sizes(folder: Path) -> None:
    """Raises ValueError if a file was cut or lost since :func:`write_sizes`."""
    if not (folder / _SIZES).is_file():
        return
    for name, size in json.loads((folder / _SIZES).read_text()).items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found != size:
            raise ValueError(f"its file {name} has {found} bytes of {size}")


def free_name(path: Path) -> Path:
    """A name beside ``path`` for what is set aside."""
    number = 0
    while (name := path.with_name(f"{path.name}.damaged{number or ''}")).exists():
        number += 1
    return name


def reason(error: BaseException) -> str:
    """Why something could not be written, in a few words."""
    text = str(error)
    if "No space left on device" in text or "RESOURCE_EXHAUSTED" in text:
        return "no space is left on the device"
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
            return "there is not enough memory"
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
