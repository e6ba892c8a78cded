"""Scripts of a process of their own that import a module of ``core.runtime`` without JAX.

The packages above it are empty ones, which saves the second that their imports take.
"""

import os
import sys
from pathlib import Path

import jaxrl_llm

_ROOT = str(Path(jaxrl_llm.__file__).parent)
BARE = f"""
import importlib.machinery, sys, types
for name, folder in (("", ""), (".core", "/core"), (".core.runtime", "/core/runtime")):
    package = sys.modules["jaxrl_llm" + name] = types.ModuleType("jaxrl_llm" + name)
    package.__path__ = [{_ROOT!r} + folder]
"""


def command(script: str, *words: str) -> list[str]:
    """The words that run a script."""
    return [sys.executable, "-c", BARE + script, *words]


def environment(**changes: str) -> dict[str, str]:
    """Variables of a script, which finds what this process finds."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | changes
