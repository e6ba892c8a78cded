"""Compilers of devices that are not there are asked for by name."""

import importlib.util
import json

import jax
import pytest

from benchmarks import absent, compiled


@pytest.mark.parametrize("kind", absent.KINDS)
def test_a_compiler_that_is_not_here_is_named(kind, monkeypatch):
    def nothing(name):
        raise ModuleNotFoundError(name)

    for find in (lambda name: None, nothing):
        monkeypatch.setattr(importlib.util, "find_spec", find)
        assert absent.missing(kind) in {"libtpu", "jax-cuda12-plugin"}
        with pytest.raises(SystemExit, match="pip install"), absent.present(kind, 1):
            raise AssertionError
    assert jax.default_backend() == "cpu"


def test_what_a_program_takes():
    found = {"device": "h100", "arguments_bytes": 3, "temporary_bytes": 4}
    assert compiled.taken(found) == found | {"taken_bytes": 7, "memory_bytes": 80_000_000_000}


def test_what_is_saved_stands_beside_what_was(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "package_versions", lambda packages: {})
    first, second = list(compiled.programs())[:2]
    compiled.save({second: {"taken_bytes": 1}}, tmp_path)
    compiled.save({first: {"taken_bytes": 2}}, tmp_path)
    found = json.loads((tmp_path / "compiled.json").read_text())["programs"]
    assert list(found) == [first, second]
