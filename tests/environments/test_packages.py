"""Optional packages: what is told where one is absent."""

import sys

import pytest

from jaxrl_llm.environments.adapters import packages


def test_an_absent_package_and_a_file_of_its_name_are_told(tmp_path, monkeypatch):
    needed = r"Game needs the package no_such_game: pip install 'jaxrl_llm\[envs\]'"
    with pytest.raises(ImportError, match=needed):
        packages.load("no_such_game", "Game")
    file = tmp_path / "no_such_game.py"
    file.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=rf"{needed}. Imported was the file {file}"):
        packages.load("no_such_game", "Game")
    monkeypatch.delitem(sys.modules, "no_such_game")
    file.unlink()
    (tmp_path / "no_such_game").mkdir()
    (tmp_path / "no_such_game" / "__init__.py").write_text("level = 3")
    assert packages.load("no_such_game", "Game").level == 3
