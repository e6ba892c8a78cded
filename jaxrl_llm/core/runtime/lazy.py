"""Packages that load their names on first use, so that importing them is cheap."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for the ``__init__`` of a package (PEP 562).

    ``package`` is its ``__name__``; ``homes`` maps each public name to the submodule with it.
    """

    def get(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}.")

    return get, lambda: sorted(homes)
