"""A lock on a folder, held by one process at a time."""

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
    """Locks a folder until :meth:`release`, or until the process ends in any way.

    The operating system keeps the lock, so a killed process leaves none behind. The file ``.lock``
    in the folder only names the process. On a file system without locks, nothing is locked.

    Args:
      folder: An existing folder.

    Raises:
      InUseError: If another process holds the lock; says which one, on which host, and since when.
      OSError: If the file ``.lock`` cannot be written.

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
            import fcntl  # only on Unix, but Windows imports this module too
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
            file.close()  # else the traceback keeps the file open and the folder locked
            raise
        self._file = file

    def release(self) -> None:
        """Releases the folder; a second call has no effect."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _holder(file: IO[bytes]) -> str:
    """The process that wrote a lock file, in words."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        row = json.loads(file.read())
        return f"process {row['process']} on {row['host']} since {row['since']}"
    return "another process"  # it has not written the file yet
