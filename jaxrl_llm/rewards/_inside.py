"""First code of a sandbox: changes the user, sets the limits, then is the program of the payload.

It is passed to Python as a text and imports nothing of the package. The payload comes on the
standard input, as `sandbox.py` wrote it, and nothing of the program runs before the limits hold.

The first process of the PID namespace only waits: when the program ends, so does it, and with it
the kernel ends whatever the program has started.
"""

import marshal
import os
import signal
import sys


def prepare():
    """Does all that precedes the program; returns its code and its module's names."""
    import resource  # where there is no sandbox there may be no such module

    with open(0, "rb", closefd=False) as stream:
        payload = marshal.load(stream)
    if program := os.fork():
        wait(program)
    if uid := payload["uid"]:  # of root: RLIMIT_NPROC binds every user but that one
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    texts = {"main.py": payload["code"], **payload["files"], ".stdin": payload["stdin"]}
    for name, text in texts.items():
        path = os.path.join("/tmp", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    os.dup2(os.open("/tmp/.stdin", os.O_RDONLY), 0)
    for place, number in enumerate(payload["fds"], 3):
        os.dup2(number, place)
    os.closerange(3 + len(payload["fds"]), 1 << 16)
    for name, limit in payload["limits"].items():
        kind = getattr(resource, name)
        highest = resource.getrlimit(kind)[1]
        if highest != resource.RLIM_INFINITY:
            limit = tuple(min(x, highest) for x in limit)
        resource.setrlimit(kind, limit)
    sys.excepthook = show
    sys.argv = ["/tmp/main.py", *payload["arguments"]]
    sys.path.insert(0, "/tmp")
    module = sys.modules["__main__"] = type(sys)("__main__")
    module.__dict__.update(__file__="/tmp/main.py", __builtins__=__builtins__)
    os.write(payload["started"], b"+")
    os.close(payload["started"])
    return compile(payload["code"], "/tmp/main.py", "exec"), module.__dict__


def wait(program):
    """Ends the first process with the program; it holds no descriptor that others wait for."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which the first process never gets from within
    os.closerange(0, 1 << 16)
    while True:
        ended, status = os.wait()
        if ended == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def show(kind, error, trace):
    """Prints an exception without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == "<string>":
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    exec(*prepare())
