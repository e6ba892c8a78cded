"""No file of a run and nothing on a terminal holds a secret that the run was given."""

import re

import pytest
from test_cli import run

PLANTED = {
    name: f"q7{name}-Planted/9{name}=="
    for name in ("argument", "field", "bound", "literal", "variable")
}
PLANTED["private"] = "sk-q7private-9-Planted-private"
CONFIG = """
import dataclasses
import os

from tiny_run import CONFIG, low_bytes
from jaxrl_llm import bind
from jaxrl_llm.train import ReportConfig

SERVICE_PASSWORD = "{literal}"


class Client:
    def __init__(self, url, api_key):
        self.url, self.api_key, self._session = url, api_key, "{private}"
        self.hf_token = os.environ["JUDGE_HF_TOKEN"]

    def __repr__(self):
        return f"Client<{{self.url}} {{self.api_key}} {{self._session}} {{self.hf_token}}>"


@dataclasses.dataclass(frozen=True)
class Judge:
    client: Client
    token: str
    retries: int = 3

    def __call__(self, prompt, completion, metadata):
        if FAILS:
            raise OSError(f"401 for {{self.client!r}}, {{self.token}}, {{SERVICE_PASSWORD}}")
        return low_bytes(prompt, completion, metadata)


@dataclasses.dataclass
class Numbers:
    folder: object

    def write(self, step, numbers):
        (self.folder / "numbers.txt").write_text(str(numbers))

    def close(self):
        pass


def numbers(run, *, api_key):
    (run.folder / "settings.txt").write_text(str(run.settings))
    return Numbers(run.folder)


config = dataclasses.replace(
    CONFIG,
    steps=1,
    reward=Judge(Client("https://x.org?n=1&token={argument}", "{argument}"), token="{field}"),
    report=ReportConfig(sinks=(bind(numbers, api_key="{bound}"),)),
)
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.core.secrets._known", set())
    monkeypatch.setenv("JUDGE_HF_TOKEN", PLANTED["variable"])

    def write(fails):
        path = tmp_path / "judged.py"
        path.write_text(CONFIG.format(**PLANTED).replace("FAILS", str(fails)))
        return path

    return write


def found(texts):
    return [
        (where, name) for where, text in texts.items() for name, x in PLANTED.items() if x in text
    ]


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize("fails", [False, True])
def test_no_file_and_no_line_has_a_secret(capsys, tmp_path, config, fails):
    folder = tmp_path / "run"
    code, out, err = run(capsys, "train", config(fails), "--run-dir", folder)
    assert code == int(fails), err
    told = "jaxrl-llm: warning: .*config.py holds a secret, which its copy .* has not"
    assert re.search(told, err)
    texts = {"out": out, "err": err}
    for path in folder.rglob("*"):
        if path.is_file():
            texts[path.name] = path.read_bytes().decode(errors="replace")
    names = {"sessions.jsonl", "run.json", "config.py", "report.html", "settings.txt"}
    assert names <= texts.keys()
    assert found(texts) == []
    if not fails:  # what is masked is what is noted as made here
        code, out, err = run(capsys, "sample", folder, "one", "--max-new-tokens", "2")
        assert code == 0, err
        assert found({"out": out, "err": err}) == []
    for plain in ("reward.retries", '"sampling.max_new_tokens": 4', "***"):
        assert plain in texts["sessions.jsonl"]


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_traceback_has_no_secret(capsys, tmp_path, config):
    code, out, err = run(capsys, "train", config(True), "--run-dir", tmp_path / "run", "--debug")
    assert code == 1 and "Traceback" in err and "401 for Client<" in err
    assert found({"out": out, "err": err}) == []


def test_help_has_no_secret(capsys, config):
    code, out, err = run(capsys, "train", config(False), "--help")
    assert code == 0 and found({"out": out, "err": err}) == []
