"""The packages of adapters are optional: what is missing is named with the extra that has it."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from jaxrl_llm.environments.adapters import packages

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


@pytest.mark.parametrize(
    ("package", "extra"),
    [
        ("gymnasium", "envs"),
        ("textworld", "envs"),
        ("scienceworld", "envs"),
        ("reasoning_gym", "envs"),
        ("openenv", "openenv"),
    ],
)
def test_the_extra_of_a_missing_package_installs_it(package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"Adapter needs the package {package}: .*\[{extra}\]"):
        packages.load(package, "Adapter")
    installed = {re.match(r"[\w-]+", requirement)[0] for requirement in EXTRAS[extra]}
    assert package.replace("_", "-") in installed
