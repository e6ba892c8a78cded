"""A training process asks for huge pages where the system gives them only to who asks."""

import os
import subprocess
import sys

import pytest

from jaxrl_llm.cli import huge_pages, main

ASK = "glibc.malloc.hugetlb=1"
linux = pytest.mark.skipif(not huge_pages._knows(), reason="needs a glibc from 2.35 on")


@pytest.fixture
def mode(tmp_path):
    def mode(text):
        path = tmp_path / "enabled"
        path.write_text(text)
        return path

    return mode


@linux
def test_what_is_asked(mode):
    asks = mode("always [madvise] never\n")
    assert huge_pages.environment({"A": "1"}, mode=asks) == {"A": "1", "GLIBC_TUNABLES": ASK}
    other = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}
    found = huge_pages.environment(other, mode=asks)
    assert found == {"GLIBC_TUNABLES": f"glibc.malloc.arena_max=2:{ASK}"}


@pytest.mark.parametrize("text", ["[always] madvise never", "always madvise [never]"])
def test_it_is_not_asked_where_it_would_change_nothing(mode, text):
    assert huge_pages.environment({}, mode=mode(text)) is None


def test_what_the_user_said_stands(mode, tmp_path):
    asks = mode("always [madvise] never")
    for said in (ASK, "glibc.malloc.hugetlb=0"):
        assert huge_pages.environment({"GLIBC_TUNABLES": said}, mode=asks) is None
    assert huge_pages.environment({}, mode=tmp_path / "missing") is None


@pytest.mark.parametrize("version", ["glibc 2.34", "musl 1.2", "", None, "glibc new"])
def test_a_library_that_does_not_know(mode, monkeypatch, version):
    monkeypatch.setattr(os, "confstr", lambda name: version)
    assert huge_pages.environment({}, mode=mode("always [madvise] never")) is None


def test_the_same_command_is_run_again(monkeypatch, capsys):
    """Once, only for training, and what fails leaves the process as it is."""
    started = []

    def execve(*call):
        started.append(call)
        raise OSError("not here")

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(huge_pages, "environment", lambda given: {"ASKED": "yes"})
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "jaxrl_llm", "train", "--help"])
    monkeypatch.setattr(sys, "argv", ["jaxrl-llm", "train", "--help"])
    assert main() == 0
    words = [sys.executable, "-m", "jaxrl_llm", "train", "--help"]
    assert started == [(sys.executable, words, {"ASKED": "yes"})]
    assert "jaxrl-llm train" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["jaxrl-llm", "methods"])
    assert main() == 0 and main(["train", "--help"]) == 0
    assert len(started) == 1


def test_a_training_process_stays_the_same_process(tmp_path):
    """A configuration is a program: this one tells in which process it is read."""
    config = tmp_path / "config.py"
    told = tmp_path / "told"
    config.write_text(
        "import os, pathlib\n"
        f"pathlib.Path({str(told)!r}).write_text("
        'f\'{os.getpid()} {os.environ.get("GLIBC_TUNABLES", "")}\')\n'
    )
    command = [sys.executable, "-m", "jaxrl_llm", "train", str(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        _, err = process.communicate()
    assert process.returncode == 2 and "must define `config`" in err
    pid, _, tunables = told.read_text().partition(" ")
    assert int(pid) == process.pid
    wanted = huge_pages.environment(os.environ) or os.environ
    assert tunables == wanted.get("GLIBC_TUNABLES", "")
