"""Text for a terminal, which would obey control characters in the text."""

import re
from typing import TextIO

# All control characters but newline and tab; also those that change the direction of text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""A text with its control characters escaped; newlines and tabs stay.

    Example:
      >>> visible("\x1b[2Jgone\n")
      '\\x1b[2Jgone\n'
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def for_stream(text: str, stream: TextIO) -> str:
    """The text unchanged for a file or a pipe, and :func:`visible` for a terminal."""
    return visible(text) if stream.isatty() else text


def str_or_type(value: object) -> str:
    """``str`` of a value, or its type if that fails, as for an error that cannot be printed."""
    try:
        return str(value)
    except Exception:
        return f"{type(value).__name__} that cannot be printed"
