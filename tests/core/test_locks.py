"""A folder is held by one process at a time, and by none that is dead."""

import signal
import socket
import subprocess

import pytest
from bare import command, environment

from jaxrl_llm.core.runtime.locks import FolderLock, InUseError

HOLD = """
import sys, time
from jaxrl_llm.core.runtime.locks import FolderLock
lock = FolderLock(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_told_which_one_it_is_until_that_is_killed(tmp_path):
    words = command(HOLD, str(tmp_path))
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        where = f"in use by process {other.pid} on {socket.gethostname()} since 20"
        with pytest.raises(InUseError, match=where):
            FolderLock(tmp_path)
        other.send_signal(signal.SIGKILL)
        other.wait()
    FolderLock(tmp_path).release()


def test_a_lock_of_this_process_counts_and_can_be_released(tmp_path):
    lock = FolderLock(tmp_path)
    with pytest.raises(InUseError):
        FolderLock(tmp_path)
    lock.release()
    lock.release()
    again = FolderLock(tmp_path)
    (tmp_path / ".lock").write_text("")  # what says whose it is may be cut
    with pytest.raises(InUseError, match="in use by another process"):
        FolderLock(tmp_path)
    again.release()


def test_a_lock_that_cannot_be_written_is_not_held(tmp_path, monkeypatch):
    def fails():
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space") as error:
        patch.setattr(socket, "gethostname", fails)
        FolderLock(tmp_path)
    FolderLock(tmp_path).release()
    assert error.tb is not None  # it has the frames, as in a notebook
