"""Shared code of text environments: messages to the policy, and lenient parsing of replies."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.data.messages import Message

_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+")  # the hyphens of "4-6" and "try-5" are no minus


def column(task: Mapping[str, Any], name: str, default: Any) -> Any:
    """What a row has in a column; the default if it has none, or null as in a table.

    Example:
      >>> column({"seed": None}, "seed", 3), column({"seed": 0}, "seed", 3)
      (3, 0)
    """
    value = task.get(name)
    return default if value is None else value


def user(text: str) -> list[Message]:
    r"""A message of role "user", without empty lines and spaces at the ends of lines.

    Example:
      >>> user("  A room.  \n\n\n A door.")
      [{'role': 'user', 'content': 'A room.\nA door.'}]
    """
    lines = (line.strip() for line in text.splitlines())
    return [{"role": "user", "content": "\n".join(line for line in lines if line)}]


def verbatim(text: str) -> list[Message]:
    r"""A message of role "user" with the text as it is, such as code or a drawing.

    Example:
      >>> verbatim("if x:\n    y")
      [{'role': 'user', 'content': 'if x:\n    y'}]
    """
    return [{"role": "user", "content": text}]


def choice(reply: str, options: Iterable[str]) -> str | None:
    """The last option that a reply names, in any case; None if it names none.

    Example:
      >>> choice("Go NORTH!", ["go north", "go east"])
      'go north'
      >>> choice("not north, so I go east.", ["go north", "north", "east", "go east"])
      'go east'
      >>> choice("northern lights", ["north"])
      >>> choice("let's go 'north'", ["north", "s"])
      'north'
    """
    reply, best, named = " ".join(reply.lower().split()), (0, 0), None
    for option in options:
        words = re.escape(" ".join(option.lower().split()))
        # The "s" of "let's" is no word, but what stands in quotation marks may be an option.
        for match in re.finditer(rf"(?<!\w)(?<!\w['’]){words}(?!\w)", reply):
            # Of two that end at one place, the longer holds the other.
            place = (match.end(), match.end() - match.start())
            if place > best:
                best, named = place, option
    return named


def last_number(reply: str) -> int | None:
    """The last integer in a reply, None for none.

    Example:
      >>> last_number("not 3, but -4.")
      -4
    """
    # Some hundred digits are no answer to anything, and more than 4,300 no integer to Python.
    numbers = [number for number in _NUMBER.findall(reply) if len(number) < 100]
    return int(numbers[-1]) if numbers else None
