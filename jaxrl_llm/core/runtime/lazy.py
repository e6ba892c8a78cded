"""Packages whose names load on first use, so that importing them costs nothing heavy."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Args:
      package: Its ``__name__``.
      homes: Public name -> the submodule that defines it.

    Returns:
      The two functions, to be assigned in the package's ``__init__``.
    """

    def get(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}.")

    return get, lambda: sorted(homes)
