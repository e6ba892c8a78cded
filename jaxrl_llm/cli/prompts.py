"""Prompts of a command line, of a file or of a pipe."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.cli import UsageError


class Asked(NamedTuple):
    """A prompt as it was given.

    Attributes:
      index: Its place, from 0.
      text: The prompt.
      fields: What else its row of a JSONL file holds.
    """

    index: int
    text: str
    fields: dict[str, Any]


def read_prompts(
    texts: Sequence[str], file: Path | None, *, taken: Sequence[str]
) -> list[Asked] | None:
    """All prompts, or None if somebody sits at a terminal to type them.

    Args:
      texts: Of the command line; a file and a pipe are read if there are none.
      file: A prompt a line; if it ends in .jsonl, an object a line with a field "prompt".
      taken: Fields that a row must not have, since its answers have them.

    Raises:
      UsageError: If the file cannot be read, a row has no prompt, or there is none at all.
    """
    if texts:
        found, source = [(text, {}) for text in texts], "the command line"
    elif file is not None:
        found, source = _of_file(file, taken), f"The file {str(file)!r}"
    elif sys.stdin.isatty():
        return None
    else:
        found, source = [(line, {}) for line in _lines(sys.stdin.read())], "Standard input"
    if not found:
        raise UsageError(f"{source} holds no prompt.")
    return [Asked(i, text, fields) for i, (text, fields) in enumerate(found)]


def _lines(text: str) -> list[str]:
    # Not splitlines, for which half a dozen other characters end a line too.
    return [line for line in text.split("\n") if line.strip()]


def _of_file(file: Path, taken: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"The file {str(file)!r} cannot be read: it is not UTF-8.") from error
    except OSError as error:
        raise UsageError(f"The file {str(file)!r} cannot be read: {error.strerror}.") from error
    if file.suffix.lower() != ".jsonl":
        return [(line, {}) for line in _lines(text)]
    lines = enumerate(text.split("\n"), 1)
    return [_row(line, f"Line {n} of {str(file)!r}", taken) for n, line in lines if line.strip()]


def _row(line: str, where: str, taken: Sequence[str]) -> tuple[str, dict[str, Any]]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}.") from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(f"{where} must be a JSON object whose field 'prompt' is a text.")
    if both := sorted(set(row) & set(taken)):
        raise UsageError(f"{where} has a field {both[0]!r}, which is a field of its answers too.")
    return prompt, {name: value for name, value in row.items() if name != "prompt"}
