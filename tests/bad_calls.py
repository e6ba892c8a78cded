"""Tables of calls beside the messages that they raise."""

import builtins
import re
from typing import Any

import jax
import pytest


def bad_calls(table: str) -> list[tuple[type[Exception], str, str]]:
    """The rows of a table: ``call  # message`` below ``ValueError:`` or ``TypeError:``.

    A message is a pattern. It may stand below a long call.
    """
    rows, error = [], None
    for line in table.strip().replace("\n    #", "  #").splitlines():
        if "  # " in line:
            call, message = line.split("  # ", 1)
            rows.append((error, call, message))
        else:
            error = getattr(builtins, line.removesuffix(":"))
    return rows


def raises(error: type[Exception], call: str, message: str, names: dict[str, Any]) -> None:
    """``call`` raises ``message`` behind the name of its function, or what follows a "!"."""
    name = re.search(r"\w+(?=\()", call)[0]
    pattern = message[1:] if message.startswith("!") else f"{name}[:,].*{message}"
    with pytest.raises(error, match=f"^({pattern})"):
        jax.eval_shape(lambda: eval(call, dict(names)))  # no operation runs
