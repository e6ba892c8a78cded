# ruff: noqa: E501
"""Programs that try to get out of the sandbox, to pass without an answer, or never to end.

`PROGRAMS` are whole programs, by family. ``T`` names what stands outside: a file with the answer
(`file`), a folder (`folder`), a variable of the environment (`variable`), a process (`pid`), ports
of TCP and UDP and a Unix and an abstract socket that tell the answer to whoever connects (`port`,
`udp`, `unix`, `abstract`). The answer is what the test expects, so that whoever reads it passes;
it also stands in ``T`` for those programs that show by it that they did what they must not.
`FUNCTIONS` are the same for code whose function ``f(T)`` is called, and must return the answer.
"""

_SLEEP = "import time\ntime.sleep(60)"
_LOOP = "while True:\n    pass"


def _tcp(target: str, family: str = "AF_INET", kind: str = "SOCK_STREAM") -> str:
    return (
        f"import socket\ns = socket.socket(socket.{family}, socket.{kind})\ns.settimeout(0.3)\n"
        f"s.connect({target})\ns.send(b'x')\nprint(s.recv(99).decode())"
    )


def _syscall(number: int, *arguments: str) -> str:
    values = ", ".join(["ctypes.c_long(" + str(number) + ")", *arguments])
    return (
        "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n"
        f"r = c.syscall({values})\nprint(T['answer'] if r >= 0 else ctypes.get_errno())"
    )


PROGRAMS: dict[str, list[str]] = {
    "fork bombs": [
        "import os\nwhile True:\n    os.fork()",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "import os\nwhile True:\n    if os.fork():\n        os._exit(0)",
        "import os\nfor _ in range(100):\n    if not os.fork():\n        os.setsid()\n" + _SLEEP,
        "import os\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n        import time; time.sleep(60)\nprint(1)",
        "import subprocess, sys\nwhile True:\n    subprocess.Popen([sys.executable, '-c', '1'])",
        "import subprocess, sys\np = [subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']) for _ in range(99)]",
        "import multiprocessing as m, time\np = [m.Process(target=time.sleep, args=(60,)) for _ in range(99)]\n[x.start() for x in p]",
        "from concurrent.futures import ProcessPoolExecutor as P\nimport time\nlist(P(64).map(time.sleep, [60] * 64))",
        "import os\ndef b():\n    while True:\n        try:\n            os.fork() or b()\n        except OSError:\n            pass\nb()",
        "import os, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n    try:\n        os.fork() or os._exit(0)\n    except OSError:\n        pass",
        "import os\nos.setpgrp()\n[os.fork() for _ in range(12)]\n" + _SLEEP,
        "import os\nos.posix_spawn('/bin/sh', ['sh', '-c', ':(){ :|:& };:'], {})",
        "import os\nos.system('for i in $(seq 9999); do sleep 60 & done'); " + "print(1)",
    ],
    "threads": [
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()",
        "import threading, time\nwhile True:\n    try:\n        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n    except RuntimeError:\n        pass",
        "import _thread\nwhile True:\n    _thread.start_new_thread(print, ())",
        "import threading\nl = threading.Lock()\nl.acquire()\nl.acquire()",
        "import threading\nt = threading.Thread(target=lambda: None)\nt.run = t.join\nthreading.Event().wait()",
        "from concurrent.futures import ThreadPoolExecutor as P\nimport time\nlist(P(500).map(time.sleep, [60] * 500))",
    ],
    "memory": [
        "x = bytearray(10**10)",
        "x = []\nwhile True:\n    x.append(bytearray(10**7))",
        "x = 'x'\nwhile True:\n    x += x",
        "x = []\nwhile True:\n    x = [x, x, *x]",
        "x = 10 ** 10 ** 10",
        "x = [0] * 10**12",
        "x = list(range(10**11))",
        "while True:\n    try:\n        x = [bytearray(10**6) for _ in range(10**6)]\n    except MemoryError:\n        pass",
        "import mmap\nx = [mmap.mmap(-1, 10**8) for _ in range(99)]\nfor m in x:\n    m.write(b'x' * 10**8)",
        "import os\n[os.fork() for _ in range(3)]\nx = bytearray(b'x') * (3 * 10**8)\n" + _SLEEP,
        "import os, mmap\n[os.fork() for _ in range(3)]\nm = mmap.mmap(-1, 3 * 10**8)\n"
        "m.write(b'x' * (3 * 10**8))\n" + _SLEEP,
        "import re\nre.match(r'(a*)*' * 20 + 'b', 'a' * 10**6)",
        "import itertools\nlist(itertools.product(range(10**4), repeat=9))",
        "d = {}\nn = 0\nwhile True:\n    d[n] = str(n) * 99\n    n += 1",
        "import os\nx = os.memfd_create('x')\nwhile True:\n    os.write(x, b'x' * 10**7)",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n):\n    return f(n + 1)\nf(0)",
        "import ast\nast.parse('(' * 10**6)",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))\nx = bytearray(2**33)\nprint(1)",
    ],
    "disk": [
        "f = open('/tmp/x', 'wb')\nwhile True:\n    f.write(b'x' * 10**7)",
        "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'wb').write(b'x' * 10**6)\n    n += 1",
        "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'w').close()\n    n += 1",
        "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
        "f = open('/dev/shm/x', 'wb')\nwhile True:\n    f.write(b'x' * 10**7)",
        "f = open('/tmp/x', 'wb')\nf.truncate(10**12)\nprint(1)",
        "import os\nf = os.open('/tmp/x', os.O_CREAT | os.O_RDWR)\nos.posix_fallocate(f, 0, 10**10)",
        *(
            f"open({path!r}, 'w').write('x')\nprint(1)"
            for path in [
                "/x",
                "/usr/x",
                "/lib/x",
                "/dev/x",
                "/etc/x",
                "/root/x",
                "/var/x",
                "/sys/x",
            ]
        ),
        "open(T['file'], 'w').write('gone')",
        "open(T['folder'] + '/new', 'w').write('x')",
        "import shutil\nshutil.rmtree(T['folder'])",
        "import shutil, os\nfor x in os.listdir('/'):\n    shutil.rmtree('/' + x, ignore_errors=True)",
        "import sys, os\nopen(os.__file__, 'w').write('print(1)')",
        "import os\nos.chmod('/usr/lib', 0o777)\nopen('/usr/lib/x', 'w')",
        "import os\nos.remount = os.statvfs('/')\nos.rename('/usr', '/tmp/usr')",
    ],
    "network": [
        _tcp("('127.0.0.1', T['port'])"),
        _tcp("('localhost', T['port'])"),
        _tcp("('0.0.0.0', T['port'])"),
        _tcp("('::1', T['port'])", "AF_INET6"),
        _tcp("('192.0.2.1', 80)"),
        _tcp("('8.8.8.8', 53)", kind="SOCK_DGRAM"),
        _tcp("('127.0.0.1', T['udp'])", kind="SOCK_DGRAM"),
        _tcp("T['unix']", "AF_UNIX"),
        _tcp("'\\0' + T['abstract']", "AF_UNIX"),
        _tcp("(2, T['port'])", "AF_VSOCK"),
        _tcp("(1, 1024)", "AF_VSOCK"),
        "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)\nprint(T['answer'])",
        "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nprint(T['answer'])",
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\nprint(T['answer'])",
        "import socket\nsocket.socket(38, socket.SOCK_SEQPACKET)\nprint(T['answer'])",  # AF_ALG
        "import urllib.request as u\nprint(u.urlopen(f\"http://127.0.0.1:{T['port']}\", timeout=0.3).read())",
        "import urllib.request as u\nprint(u.urlopen('http://169.254.169.254/latest', timeout=0.3))",
        "import socket\nprint(socket.getaddrinfo('example.com', 80))",
        "import socket\ns = socket.create_server(('0.0.0.0', 0))\ns.accept()",
        "import asyncio\nasync def f():\n    r, w = await asyncio.open_connection('127.0.0.1', T['port'])\n    print((await r.read(99)).decode())\nasyncio.run(f())",
    ],
    "links": [
        "import os\nos.symlink(T['file'], '/tmp/x')\nprint(open('/tmp/x').read())",
        "import os\nos.symlink(T['folder'], '/tmp/x')\nopen('/tmp/x/new', 'w').write('x')",
        "import os\nos.link(T['file'], '/tmp/x')\nprint(open('/tmp/x').read())",
        "import os\nos.symlink('/proc/1/root', '/tmp/x')\nprint(open('/tmp/x' + T['file']).read())",
        "import os\nos.symlink('/proc/self/fd', '/tmp/x')\nprint(os.listdir('/tmp/x'))",
        "print(open('/tmp/' + '../' * 50 + T['file'][1:]).read())",
        "import os\nos.chdir('/')\n[os.chdir('..') for _ in range(50)]\nprint(open(T['file'][1:]).read())",
        "import os\nos.chroot('/tmp')\n[os.chdir('..') for _ in range(50)]\nos.chroot('.')\nprint(open(T['file']).read())",
        "import os\nf = os.open('/', os.O_PATH)\nprint(os.read(os.open('..' + T['file'], 0, dir_fd=f), 99))",
        "import os\nos.remove('/tmp/main.py')\nos.symlink(T['file'], '/tmp/main.py')\nprint(open('/tmp/main.py').read())",
        "import os\nos.remove('/dev/null')\nos.symlink(T['file'], '/dev/null')",
        "import os\nos.mknod('/tmp/sda', 0o60666, os.makedev(8, 0))\nprint(open('/tmp/sda', 'rb').read(99))",
        "import os\nos.mknod('/tmp/mem', 0o20666, os.makedev(1, 1))\nprint(open('/tmp/mem', 'rb').read(99))",
        "import os\nos.mkfifo('/tmp/p')\nopen('/tmp/p')",
    ],
    "signals": [
        *(
            f"import os, signal\nos.kill({pid}, signal.{name})\n" + _SLEEP
            for pid in ("T['pid']", "os.getppid()", "1", "-1", "0")
            for name in ("SIGKILL", "SIGSTOP")
        ),
        "import os, signal\nfor pid in range(2, 5000):\n    try:\n        pid == os.getpid() or os.kill(pid, signal.SIGKILL)\n    except OSError:\n        pass",
        "import signal\nfor n in range(1, 32):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\n"
        + _LOOP,
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\n" + _LOOP,
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import os\nos.abort()",
        "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(T['pid']), signal.SIGKILL)",
        "import os\nos.setpriority(os.PRIO_PROCESS, T['pid'], 19)\nprint(1)",
    ],
    "output": [
        "while True:\n    print('x' * 10**6)",
        "import sys\nwhile True:\n    sys.stderr.write('x' * 10**6)",
        "import os\nwhile True:\n    os.write(1, b'\\xff' * 10**5)",
        "print('x' * 10**8)",
        "print('x\\n' * 10**6)",
        "import sys\nwhile True:\n    print('a')\n    print('b', file=sys.stderr)",
        "import os\nos.fork()\nwhile True:\n    print('x' * 999)",
        "import os\nos.close(1)\nos.close(2)\n" + _SLEEP,
        "import os\nos.write(1, b'\\0\\x1b[2J\\x1b]0;x\\x07' * 99)",
        "import sys\nsys.stdout = None\nprint('x')",
        "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSTI, b'x')\nprint(1)",
    ],
    "reading": [
        "print(open(T['file']).read())",
        "import os\nprint(os.environ[T['variable']])",
        "import os\nprint(os.listdir(T['folder']))",
        "import os\nfor d, _, names in os.walk('/'):\n    for n in names:\n        try:\n            text = open(d + '/' + n).read(999)\n            'answer-' in text and 'main' not in n and print(text)\n        except (OSError, ValueError):\n            pass",
        *(
            f"print(open({path}).read())"
            for path in [
                "'/proc/self/environ'",
                "'/proc/1/environ'",
                "'/proc/1/cmdline'",
                "'/proc/self/mem'",
                "'/proc/self/maps'",
                "'/proc/cmdline'",
                "'/proc/mounts'",
                "'/proc/kcore'",
                "'/etc/passwd'",
                "'/etc/shadow'",
                "'/etc/hosts'",
                "'/root/.bash_history'",
                "'/sys/class/net/lo/address'",
                "'/dev/sda'",
                "'/dev/mem'",
                "'/dev/kmsg'",
                "'/run/docker.sock'",
            ]
        ),
        *(
            f"print(open(f\"/proc/{{T['pid']}}/{path}\").read())"
            for path in ("environ", "cmdline", "root{T['file']}", "cwd/answer")
        ),
        "import subprocess\nprint(subprocess.check_output(['cat', T['file']]))",
        "import os\nprint(os.popen('cat ' + T['file']).read())",
        "from importlib.machinery import SourceFileLoader as L\nL('x', T['file']).load_module()",
        "import os\nfor n in range(3, 999):\n    try:\n        print(os.read(n, 999).decode())\n    except OSError:\n        pass",
        "import os\nfor n in range(999):\n    try:\n        os.lseek(n, 0, 0)\n        print(os.read(n, 9999).decode())\n    except OSError:\n        pass",
        "import gc\nprint([x for x in gc.get_objects() if 'answer-' in str(x)])",
        "import sys\nf = sys._getframe()\nwhile f:\n    print(f.f_locals, f.f_globals)\n    f = f.f_back",
        "import inspect, sys\nprint(inspect.getsource(sys.modules['__main__']))",
        "import linecache\nprint(linecache.getlines(T['file']))",
    ],
    "exits": [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "raise SystemExit(0)",
        "import os\nos.fork() or os._exit(0)\nos._exit(0)",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', ''])",
        "import atexit, os\natexit.register(os._exit, 0)",
        "import atexit\natexit.register(print, T['marker'])",
        "import sys\nsys.excepthook = lambda *x: None\nraise ValueError",
        "import signal, os\nsignal.signal(signal.SIGALRM, lambda *x: os._exit(0))\n"
        "signal.alarm(1)\n" + _LOOP,
        "class X:\n    def __del__(self):\n        import os\n        os._exit(0)\nx = X()",
        "import threading, os\nthreading.Timer(0.1, os._exit, [0]).start()\n" + _LOOP,
        "",
        "pass",
        "return",
        "(" * 500,
        "\ufeff\u202e",
    ],
    "sleeping": [
        _SLEEP,
        _LOOP,
        "import select\nselect.select([], [], [])",
        "import signal\nsignal.pause()",
        "import time\nwhile True:\n    try:\n        time.sleep(60)\n    except BaseException:\n        pass",
        "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
        "sum(range(10**12))",
        "print(7 ** 10**9 % 10)",
        "import os\nos.nice(19)\n" + _LOOP,
        "import os\nos.sched_setaffinity(0, {0})\n" + _LOOP,
        "import os\nr, w = os.pipe()\nos.read(r, 1)",
        "import hashlib\nhashlib.pbkdf2_hmac('sha256', b'x', b'x', 10**9)",
        "hash((1,) * 10**8)\n'x'.zfill(10**8).count('y')\n" + _LOOP,
        "import os, time\nif os.fork():\n    os._exit(0)\ntime.sleep(60)",
    ],
    "markers": [
        f"print({text!r})"
        for text in (
            "ok",
            "PASSED",
            "All tests passed",
            "True",
            "1",
            "OK\n\n1 passed in 0.01s",
            "+",
        )
    ]
    + [
        "print(T['marker'])",
        "import sys\nprint(T['marker'], file=sys.stderr)",
        "print(T)",
        "import os\nos.write(1, b'1 passed\\n')\nos._exit(0)",
        "print('answer-' + '0' * 32)",
    ],
    "patches": [
        "import builtins\nbuiltins.print = lambda *x: None",
        "import builtins\nbuiltins.open = None\nbuiltins.__import__ = None",
        "import builtins\nbuiltins.str = lambda *x: T['marker']\nprint(str(1))",
        "import sys\nsys.modules.clear()",
        "import sys\nsys.settrace(lambda *x: None)\nsys.setprofile(print)\n" + "x = 1",
        "import gc\nfor x in gc.get_objects():\n    try:\n        x.clear()\n    except BaseException:\n        pass",
        "import sys\nsys.stdout.write = print\nprint(1)",
        "open('/tmp/json.py', 'w').write('x = 1')\nimport importlib, json\nimportlib.reload(json)",
    ],
    "stdin": [
        "import sys\nsys.stdin.close()\nprint(input())",
        "while True:\n    input()",
        "import os\nos.close(0)\nos.open('/dev/zero', 0)\nprint(input())",
        "open('/dev/zero').read()",
        "open('/dev/random', 'rb').read(10**9)",
        "open('/dev/stdin', 'w').write(T['marker'])\nprint(open('/dev/stdin').read())",
        "import os\nos.write(0, b'x')\nprint(1)",
        "import os\nprint(os.ttyname(0))",
    ],
    "system calls": [
        _syscall(101, "0", "0", "0", "0"),  # ptrace, TRACEME
        _syscall(101, "16", "T['pid']", "0", "0"),  # ptrace, ATTACH
        _syscall(310, "T['pid']", "0", "0", "0", "0", "0"),  # process_vm_readv
        _syscall(272, "0x10000000"),  # unshare, a user namespace
        _syscall(272, "0x00020000"),
        _syscall(272, "0x40000000"),
        _syscall(56, "0x10000011", "0", "0", "0", "0"),  # clone
        _syscall(435, "0", "0"),  # clone3
        _syscall(308, "0", "0"),  # setns
        _syscall(165, "b'x'", "b'/tmp'", "b'tmpfs'", "0", "0"),  # mount
        _syscall(166, "b'/tmp'", "2"),  # umount2
        _syscall(155, "b'/tmp'", "b'/tmp'"),  # pivot_root
        _syscall(321, "0", "0", "0"),  # bpf
        _syscall(425, "8", "ctypes.create_string_buffer(256)"),  # io_uring_setup
        _syscall(323, "0"),  # userfaultfd
        _syscall(298, "0", "0", "-1", "-1", "0"),  # perf_event_open
        _syscall(250, "0", "-3", "0"),  # keyctl
        _syscall(248, "b'user'", "b'x'", "b'x'", "1", "-3"),  # add_key
        _syscall(319, "b'x'", "0"),  # memfd_create
        _syscall(29, "0", "1 << 30", "0o1600"),  # shmget
        _syscall(68, "0", "0o1600"),  # msgget
        _syscall(169, "0xfee1dead", "672274793", "0x1234567"),  # reboot
        _syscall(170, "b'x'", "1"),  # sethostname
        _syscall(304, "0", "0", "0"),  # open_by_handle_at
        _syscall(135, "0x0040000"),  # personality
        _syscall(0x40000000 + 39),  # getpid, by the numbers of x32
        "import os\nos.setuid(0)\nprint(T['answer'])",
        "import os\nos.setgroups([0])\nprint(T['answer'])",
        "import ctypes\nctypes.string_at(0)",
        "import ctypes\nctypes.memset(id(1), 255, 10**6)",
    ],
}

_DEFINE = "def f(T):\n    return "

FUNCTIONS: list[str] = [
    # Objects that claim to equal everything, in every disguise.
    "class X:\n    def __eq__(self, other):\n        return True\n" + _DEFINE + "X()",
    "class X(str):\n    def __eq__(self, other):\n        return True\n    __hash__ = None\n"
    + _DEFINE
    + "X('')",
    "class X(list):\n    def __eq__(self, other):\n        return True\n" + _DEFINE + "X()",
    "class X(int):\n    def __eq__(self, other):\n        return True\n" + _DEFINE + "X(1)",
    "class M(type):\n    def __eq__(self, other):\n        return True\nclass X(metaclass=M):\n"
    "    pass\n" + _DEFINE + "X",
    "from unittest.mock import ANY\n" + _DEFINE + "ANY",
    # The grader's own words and channel.
    "import os\nfor n in range(99):\n    try:\n        os.write(n, b'[\"value\", 1]\\n')\n"
    "    except OSError:\n        pass\n" + _DEFINE + "1",
    "import os\ndef f(T):\n    for n in range(99):\n        try:\n            os.write(n, "
    'b\'["raised", "StopIteration", ""]\\n\')\n        except OSError:\n            pass',
    "import os\nos.closerange(0, 99)\n" + _DEFINE + "1",
    "import os\nos.closerange(3, 99)\n" + _DEFINE + "1",
    "import os\nprint('\"ready\"', flush=True)\nos._exit(0)",
    'import os\nos.write(4, b\'"ready"\\n["value", {"x": 1}]\\n\')\n' + _SLEEP,
    "import os\nwhile True:\n    os.write(4, b'[' * 65536)",
    "import os\nos.write(4, b'\"ready\"\\n')\nwhile True:\n    os.write(4, b'x' * 65536)",
    # Early ends.
    "import sys\nsys.exit(0)",
    "import os\nos._exit(0)",
    "import os\ndef f(T):\n    os._exit(0)",
    "import sys\ndef f(T):\n    sys.exit(0)",
    "def f(T):\n    raise StopIteration",
    "def f(T):\n    raise AssertionError",
    "def f(T):\n    raise KeyboardInterrupt",
    "import atexit, os\natexit.register(os._exit, 0)\n" + _DEFINE + "None",
    "import threading, os\nthreading.Timer(0.05, os._exit, [0]).start()\ndef f(T):\n    "
    + "while True:\n        pass",
    # Changes to what a grader in the same process would use.
    "import builtins\nbuiltins.AssertionError = Warning\n" + _DEFINE + "1",
    "import builtins\nbuiltins.str = builtins.len = builtins.isinstance = lambda *x: True\n"
    + _DEFINE
    + "1",
    "import json\njson.dumps = lambda *x: '[\"value\", null]'\n" + _DEFINE + "1",
    "import sys\nm = sys.modules['__main__']\nm.encode = lambda *x: {'o': 0}\n" + _DEFINE + "f",
    "import sys\nfor m in list(sys.modules.values()):\n    m.__dict__.pop('Remote', None)\n"
    + _DEFINE
    + "1",
    "import gc\ndef f(T):\n    return [str(x) for x in gc.get_objects() if 'answer-' in str(x)][:1]",
    "import sys\ndef f(T):\n    frame = sys._getframe()\n    while frame.f_back:\n        frame = frame.f_back\n    return str(frame.f_globals)[:999]",
    "def f(T):\n    return open(T['file']).read()",
    "def f(T):\n    return open('/tmp/.stdin').read()",
    "def f(T):\n    return open('/tmp/main.py').read()[-99:]",
    "import os\ndef f(T):\n    return os.environ.get(T['variable'])",
    # Sizes and times.
    "def f(T):\n    while True:\n        pass",
    "def f(T):\n    return 'x' * 10**8",
    "def f(T):\n    x = []\n    for _ in range(10**5):\n        x = [x]\n    return x",
    "def f(T):\n    x = []\n    x.append(x)\n    return x",
    "def f(T):\n    return 10 ** 10**6",
    "def f(T):\n    while True:\n        yield 1",
    "import os\ndef f(T):\n    while True:\n        os.fork()",
    "def f(T):\n    print('1 passed')\n    return T['marker']",
    "def assert_(*x):\n    pass\nnonce = 1\n" + _DEFINE + "True",
    "f = None",
    "",
]

QUICK: list[str] = [
    family[0] for name, family in PROGRAMS.items() if name not in ("system calls",)
] + [PROGRAMS["system calls"][3], PROGRAMS["network"][8], PROGRAMS["reading"][1]]
QUICK_FUNCTIONS: list[str] = [FUNCTIONS[n] for n in (0, 6, 15)]
