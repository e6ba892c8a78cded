"""A record of the run folders made on this machine, whose config.py may be executed.

Opening a run executes its config.py. `train` records each run in a private file of the user, by a
digest of the code to execute. A run may therefore be moved, copied or resumed on this machine; a
run from elsewhere, or with a changed config.py, is opened only with --trust, which records it.
"""

import hashlib
import json
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.core.runtime.files import reason

_FILE = "runs"


def digest_of(config: bytes, record: Mapping[str, Any]) -> str:
    """A digest of the code that opening a run executes: its config.py, options and folder."""
    settings = [record.get(name) for name in ("config", "folder", "overrides")]
    return hashlib.sha256(json.dumps(settings).encode() + b"\0" + config).hexdigest()


def is_noted(digest: str) -> bool:
    """Whether a run was made here or trusted before."""
    for folder in _folders():
        try:
            if _is_private(folder) and digest in (folder / _FILE).read_text().split():
                return True
        except (OSError, ValueError):  # no file, or one that cannot be read
            continue
    return False


def note(digest: str) -> None:
    """Records a run; warns if only the temporary folder is writable, or none."""
    if is_noted(digest):
        return
    first, problem = None, ""
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(folder):
                raise PermissionError(0, "others may write to it")
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            handle = os.open(folder / _FILE, flags, mode=0o600)
            try:
                os.write(handle, f"{digest}\n".encode())
            finally:
                os.close(handle)
        except OSError as error:
            first = first or folder
            problem = problem or reason(error)
            continue
        if first is not None:
            warnings.warn(
                f"{str(first)!r} cannot be written ({problem}), so {str(folder)!r} notes that this "
                "run was made here: once that is cleared, opening the run needs --trust.",
                stacklevel=2,
            )
        return
    warnings.warn(
        f"{str(first)!r} cannot be written ({problem}), so nothing notes that this run was made "
        "here: opening it needs --trust.",
        stacklevel=2,
    )


def _folders() -> Iterator[Path]:
    """Where notes may lie: the user's state folder, or a folder of the user's among temporary ones.

    The second is for machines where the first cannot be written.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # as its specification says
        base = os.path.expanduser("~/.local/state")
    yield Path(base) / "jaxrl_llm"
    user = os.getuid() if hasattr(os, "getuid") else "user"
    yield Path(tempfile.gettempdir()) / f"jaxrl_llm-state-{user}"


def _is_private(folder: Path) -> bool:
    """Whether a folder is this user's, and nobody else can write to it."""
    status = folder.lstat()  # a link in a folder for all may be anyone's
    if not hasattr(os, "getuid"):
        return stat.S_ISDIR(status.st_mode)
    private = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return stat.S_ISDIR(status.st_mode) and private
