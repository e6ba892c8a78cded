"""Optional packages, loaded where they are used."""

import importlib
from types import ModuleType


def load(package: str, adapter: str, module: str | None = None) -> ModuleType:
    """A module of an optional package; ImportError names what to install."""
    try:
        return importlib.import_module(module or package)
    except ImportError as error:
        raise ImportError(
            f"{adapter} needs the package {package}: pip install 'jaxrl_llm[envs]'."
        ) from error
