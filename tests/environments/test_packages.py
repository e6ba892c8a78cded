"""The packages of adapters are optional: what is missing is named with the extra that has it."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from rows import for_each

from jaxrl_llm.environments.adapters import packages

EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


@for_each(
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


def test_a_file_of_the_name_of_a_package_is_told(tmp_path, monkeypatch):
    file = tmp_path / "no_such_game.py"
    file.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    needed = r"Game needs the package no_such_game: pip install 'jaxrl_llm\[envs\]'"
    with pytest.raises(ImportError, match=rf"{needed}. Imported was the file {file}"):
        packages.load("no_such_game", "Game")
    monkeypatch.delitem(sys.modules, "no_such_game")
    file.unlink()
    (tmp_path / "no_such_game").mkdir()
    (tmp_path / "no_such_game" / "__init__.py").write_text("level = 3")
    assert packages.load("no_such_game", "Game").level == 3
