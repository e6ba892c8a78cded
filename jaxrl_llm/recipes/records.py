"""Printing of the frozen records of this package, and copies with changes."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.core import Transform
from jaxrl_llm.core.compose import stable_repr


def name_of(function: Callable) -> str:
    """The name of a function in a message."""
    return getattr(function, "__name__", repr(function))


def format_value(value) -> str:
    """A slot's value as text: functions by name, with their options."""
    if isinstance(value, Transform):
        return repr(value)
    if isinstance(value, tuple):
        name = type(value).__name__ if hasattr(value, "_fields") else ""
        comma = "," if len(value) == 1 and not name else ""
        return f"{name}({', '.join(map(format_value, value))}{comma})"
    return stable_repr(value)


def format_fields(record, *, leave_out: str = "") -> str:
    """The fields of a record that differ from their defaults, written as arguments."""
    changed = []
    for field in dataclasses.fields(record):
        if field.name == leave_out:
            continue
        value = getattr(record, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            changed.append(f"{field.name}={format_value(value)}")
    return ", ".join(changed)


def replace_fields(record: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of a record with some fields changed; its checks run again.

    Raises TypeError if a name is not a field; the message suggests the nearest one.
    """
    fields = [field.name for field in dataclasses.fields(record)]
    for name in changes:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"{type(record).__name__}.replace: there is no field {name!r}.{hint} "
                f"Fields: {', '.join(fields)}."
            )
    return dataclasses.replace(record, **changes)
