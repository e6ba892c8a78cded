"""``for_each``: one test for all rows of a table, where a row is data and not a program."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from _pytest.mark import ParameterSet

_SHOWN = 60  # characters of a value in the name of a row


def for_each(names: str | Sequence[str], rows: Iterable[Any], *, ids: Any = None) -> Callable:
    """``pytest.mark.parametrize`` in one test: all rows run, and each that fails is reported.

    A test costs some milliseconds and a line of the collection, which thousands of small rows do
    not earn. Rows share the fixtures of the test. A row that compiles a program of its own, or that
    needs a fresh fixture, belongs into ``parametrize``.

    Args:
      names: The arguments that a row fills, as a sequence or with commas between them.
      rows: One tuple a row, or one value if there is one name; ``pytest.param`` gives a row an id.
      ids: Names of the rows, or a function that names a value.
    """
    single = isinstance(names, str) and "," not in names
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    table = [_row(row, single) for row in rows]
    for values, _ in table:
        if len(values) != len(names):
            raise ValueError(
                f"for_each: {len(values)} values for the names {list(names)}: {values!r}"
            )
    if ids is not None and not callable(ids):
        table = [(values, name) for (values, _), name in zip(table, ids, strict=True)]

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function)
        takes_subtests = "subtests" in signature.parameters

        @functools.wraps(function)
        def test(subtests, **fixtures):
            own = {"subtests": subtests} if takes_subtests else {}
            for values, name in table:
                row = dict(zip(names, values, strict=True))
                shown = {key: _shown(value, ids) for key, value in row.items()}
                with subtests.test(name, **({} if name else shown)):
                    function(**row, **own, **fixtures)

        kept = [x for name, x in signature.parameters.items() if name not in (*names, "subtests")]
        first = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = signature.replace(parameters=[first, *kept])
        del test.__wrapped__  # pytest would read the signature of the function behind it
        return test

    return decorate


def _row(row: Any, single: bool) -> tuple[tuple[Any, ...], str | None]:
    """The values of a row, and its name if ``pytest.param`` gives it one."""
    if isinstance(row, ParameterSet):
        if row.marks:
            raise ValueError(f"for_each: a row has no marks of its own: {row!r}")
        return tuple(row.values), row.id
    return ((row,) if single else tuple(row)), None


def _shown(value: Any, ids: Any) -> str:
    """How a value is named in the report of its row."""
    name = ids(value) if callable(ids) else getattr(value, "__name__", None)
    try:
        text = repr(value) if name is None else str(name)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
