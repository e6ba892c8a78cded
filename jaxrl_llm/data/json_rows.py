"""Rows of JSON files with their values as they are written.

``datasets`` gives each column one type, that of the first 10 MB of a file, and refuses a row whose
value has another one; it also makes times of texts that look like dates. So it downloads and
unpacks the files here, and Python's parser reads them: JSON lines, objects over several lines, or
one list.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.core.runtime.files import parse_json

_MAX_DEPTH = 63
_BOM = b"\xef\xbb\xbf"
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]}]', re.DOTALL)
# A character beyond 16 bits is escaped in two halves; one alone cannot be written as UTF-8.
_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)


class JsonError(ValueError):
    """A file has a line that is not JSON, or a value that is not a row."""


class Table(NamedTuple):
    """Rows with the same columns.

    Attributes:
      rows: The rows; one that lacked a column has None there.
      fields: The names of the columns, in the order of first use.
      places: Where each row is, such as "line 2 of rows.jsonl"; empty if only its number is known.
    """

    rows: list[dict]
    fields: list[str]
    places: list[str]


def json_rows(datasets: Any, paths: Sequence[str]) -> Table:
    r"""All rows of JSON files, with the lines where they begin.

    A row of a list of texts has one column, "text".

    Args:
      datasets: The package, which reads remote, compressed and archived files.
      paths: Paths or addresses, as ``datasets`` names them.

    Raises:
      JsonError: With the line of the first value that is not JSON or not an object, that is nested
        more than 63 levels deep, or that has half a character.

    Example:
      >>> import datasets, pathlib, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "rows.jsonl")
      ...     _ = path.write_text('{"prompt": "a", "level": null}\n{"prompt": "b", "level": "2"}')
      ...     json_rows(datasets, [str(path)]).rows
      [{'prompt': 'a', 'level': None}, {'prompt': 'b', 'level': '2'}]
    """
    rows, places = list[dict](), list[str]()
    for file, name in unpacked(datasets, paths):
        for what, row in _rows_of_file(file, name):
            rows.append(row)
            places.append(f"{what} of {name}")
    return table_of(rows, places)


def table_of(rows: list[dict], places: Sequence[str] = ()) -> Table:
    """A table of rows; each may lack columns that others have."""
    fields = list(dict.fromkeys(name for row in rows for name in row))
    if any(len(row) < len(fields) for row in rows):
        rows = [{name: row.get(name) for name in fields} for row in rows]
    return Table(rows, fields, list(places))


def unpacked(datasets: Any, paths: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """The files of paths that may be remote, compressed or archives, each with its name."""
    with tempfile.TemporaryDirectory() as folder:
        config = datasets.DownloadConfig(cache_dir=folder)
        local = datasets.DownloadManager().download(list(paths))
        unpacker = datasets.DownloadManager(download_config=config)
        for path, place in zip(paths, map(Path, unpacker.extract(local)), strict=True):
            for file in map(Path, unpacker.iter_files([str(place)])):
                yield file, f"{path}::{file.relative_to(place)}" if place.is_dir() else path


def _rows_of_file(path: Path, name: str) -> Iterator[tuple[str, dict]]:
    """The rows of a file, each with its line or its item of a list."""
    for place, (line, value) in enumerate(_values(path, name)):
        what, items = f"line {line}", [value]
        if isinstance(value, list) and place == 0:
            what, items = "item {} of the list", value
        texts = items is value and all(isinstance(item, str) for item in items)
        for number, item in enumerate(items, 1):
            if not texts and not isinstance(item, dict):
                raise JsonError(
                    f"{name!r} cannot be read as json: {what.format(number)} is not a JSON object"
                )
            yield what.format(number), {"text": item} if texts else item


def _values(path: Path, name: str) -> Iterator[tuple[int, Any]]:
    """The values of a file, each with the number of its first line."""
    depth, first, lines = 0, 1, list[bytes]()  # of a value that goes on over several lines
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(_BOM) if number == 1 else line
            _check_characters(line, f"{name!r} cannot be read as json: line {number}")
            if not lines:
                if not line.strip():
                    continue
                first = number
                if line.count(b"[") + line.count(b"{") <= _MAX_DEPTH:
                    try:
                        yield first, json.loads(line.decode())
                        continue
                    except ValueError:
                        pass  # the value goes on, or the line has several, or it is not JSON
            lines.append(line)
            depth = _depth_after(line, depth, f"line {number} of {name!r}", number, first)
            if depth == 0:
                yield from _parsed(lines, first, name)
                lines = []
        if lines:
            yield from _parsed(lines, first, name)


def _check_characters(line: bytes, where: str) -> None:
    half = _HALF.search(line.replace(rb"\\", b"--"))  # no escape begins with the second of them
    if half:
        raise JsonError(f"{where} has half a character, {half[0].decode()}")


def _depth_after(line: bytes, depth: int, where: str, number: int, first: int) -> int:
    """The open brackets after a line; raises JsonError for too many."""
    for match in _STRING_OR_BRACKET.finditer(line):
        depth += (match[0][:1] in b"[{") - (depth > 0 and match[0][:1] in b"]}")
        if depth > _MAX_DEPTH:
            since = "" if first == number else f", in brackets open since line {first}"
            raise JsonError(f"{where} is nested more than {_MAX_DEPTH} levels deep{since}")
    return depth


def _parsed(lines: Sequence[bytes], first: int, name: str) -> Iterator[tuple[int, Any]]:
    """The values of lines that belong together, each with the number of its first line."""
    start = f"{name!r} cannot be read as json: line"
    try:
        text = b"".join(lines).decode()
    except UnicodeDecodeError as fault:
        line = first + fault.object[: fault.start].count(b"\n")
        raise JsonError(f"{start} {line} is not UTF-8 ({fault.reason})") from fault
    decoder, at, number = json.JSONDecoder(), 0, first
    while at < len(text):
        if text[at].isspace():
            number += text[at] == "\n"
            at += 1
            continue
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as fault:
            line = first + fault.lineno - 1
            if line > first and _is_object(lines[1]):  # one row a line, and this one is cut off
                line = first
            raise JsonError(
                f"{start} {line} is not JSON ({fault.msg} at column {fault.colno})"
            ) from fault
        except ValueError as fault:  # an integer of more digits than Python reads
            raise JsonError(f"{start} {number} is not JSON ({fault})") from fault
        yield number, value
        number, at = number + text.count("\n", at, end), end


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False
