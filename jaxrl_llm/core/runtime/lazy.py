"""Packages that load their names on first use, so that importing them is cheap."""

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def load_module(name: str) -> ModuleType:
    """A module of this package.

    Raises:
      ModuleNotFoundError: If a package that it needs is not installed; it tells how to install it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("jaxrl_llm"):
            raise
        extra = "train,serve" if name.startswith("jaxrl_llm.serve") else "train"
        needs = f"{name} needs the package {error.name}: pip install 'jaxrl_llm[{extra}]'."
        raise ModuleNotFoundError(needs, name=error.name) from error


def lazy(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for the ``__init__`` of a package (PEP 562).

    ``package`` is its ``__name__``; ``homes`` maps each public name to the submodule with it.
    """

    def get(name: str) -> Any:
        if name in homes:
            return getattr(load_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted(homes)
