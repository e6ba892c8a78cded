"""A folder that one process holds at a time."""

import contextlib
import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import IO

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class InUseError(RuntimeError):
    """Another process holds the folder."""


class FolderLock:
    """Holds a folder until :meth:`release`, or until the process ends, however it ends.

    The operating system keeps the lock, so a killed process leaves none behind; the file ``.lock``
    in the folder only says which process it is. Where a file system has no locks, nothing is held.

    Args:
      folder: An existing folder.

    Raises:
      InUseError: If another process holds it; says which one, on which host, and since when.
      OSError: If the file cannot be written.

    Example:
      >>> import tempfile
      >>> folder = tempfile.mkdtemp()
      >>> lock = FolderLock(folder)
      >>> FolderLock(folder)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      jaxrl_llm.core.runtime.locks.InUseError: The folder ... is in use by process ...
      >>> lock.release()
      >>> FolderLock(folder).release()
    """

    def __init__(self, folder: str | Path):
        self._file: IO[bytes] | None = None
        try:
            import fcntl  # Unix has it, and Windows imports this module too
        except ImportError:
            return
        file = (Path(folder) / ".lock").open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            with file:
                if error.errno in _UNSUPPORTED:
                    return
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                file.seek(0)
                raise InUseError(
                    f"The folder {str(folder)!r} is in use by {_holder(file)}."
                ) from error
        try:
            row = {"process": os.getpid(), "host": socket.gethostname()}
            row["since"] = time.strftime("%Y-%m-%d %H:%M:%S%z")
            file.truncate(0)
            file.write(json.dumps(row).encode())
        except OSError:
            file.close()  # the traceback would hold it, and with it the folder
            raise
        self._file = file

    def release(self) -> None:
        """Releases the folder; a second call has no effect."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _holder(file: IO[bytes]) -> str:
    """Which process wrote a lock, in words."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        row = json.loads(file.read())
        return f"process {row['process']} on {row['host']} since {row['since']}"
    return "another process"  # it has just begun
