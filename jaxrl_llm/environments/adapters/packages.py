"""Optional packages, loaded where they are used."""

import importlib
from types import ModuleType


def load(package: str, adapter: str, module: str | None = None) -> ModuleType:
    """A module of an optional package; ImportError names what to install.

    A file with the name of the package, such as a config, is not the package.
    """
    extra = "openenv" if package == "openenv" else "envs"
    needs = f"{adapter} needs the package {package}: pip install 'jaxrl_llm[{extra}]'."
    try:
        found = importlib.import_module(module or package)
    except ImportError as error:
        raise ImportError(needs) from error
    if not hasattr(importlib.import_module(package), "__path__"):
        raise ImportError(f"{needs} Imported was the file {found.__file__}.")
    return found
