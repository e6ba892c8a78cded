"""Program of a sandbox that scores replies with a task of reasoning-gym, each in its own fork.

It imports the task once, and never reads a reply: a fork reads one, scores it, reports through its
own pipe and ends, so no reply changes what scores the next one. It is passed to the sandbox as a
text and imports nothing of the package. A message stands behind its length in eight bytes.

The fork refuses text that a scorer evaluates as Python unless it is a formula: see `watch`.
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import math
import os
import pickle
import resource
import select
import signal
import struct
import sys
import time
import types

LENGTH = struct.Struct(">Q")
PACKAGES = "/packages"
LONGEST = 1 << 12  # bytes of a report
# Names in the code of a formula: what sympy makes of numbers and letters, its functions of
# mathematics and constants, and variables. None of them evaluates a text or reads an attribute.
NAMES = frozenset(
    (
        "Symbol Integer Float Rational Function pi oo zoo nan abs min max pow round "
        "Abs Max Min Mod sqrt cbrt root exp log ln sign floor ceiling re im conjugate "
        "sin cos tan cot sec csc asin acos atan acot asec acsc atan2 "
        "sinh cosh tanh coth sech csch asinh acosh atanh acoth asech acsch "
        "factorial factorial2 binomial gamma erf erfc erfi Ei li Si Ci C E I X Y Z "
        + " ".join("abcdefghijklmnopqrstuvwxyz")
    ).split()
)
# Files whose own code is evaluated: Python's, as for a namedtuple, and sympy's for polynomials.
TRUSTED = ("<frozen ", os.path.dirname(os.__file__) + "/", f"{PACKAGES}/sympy/polys/")
LIBC = ctypes.CDLL(None, use_errno=True)
PARSER = f"{PACKAGES}/sympy/parsing/sympy_parser.py"
# What sympy's parser executes before each text, in the names of that text.
PRELUDE = compile("from sympy import *", "<string>", "exec")


class Refused(BaseException):
    """A text is about to be evaluated that no formula is; no scorer catches it."""


def parts(code):
    """What code does, without the place from which it comes."""
    return code.co_code, code.co_names, code.co_consts


def watch(event, arguments):
    """An audit hook that lets only formulas be evaluated.

    Whatever evaluates a text, by eval, exec or sympy's parse_expr, first makes code of it and then
    raises this event. The names of that code include those of attributes, imports and assignments;
    a lambda, a function or a comprehension is a constant.
    """
    if event != "exec":
        return
    caller, code = sys._getframe(1).f_code.co_filename, arguments[0]
    if caller.startswith(TRUSTED) or (caller == PARSER and parts(code) == parts(PRELUDE)):
        return
    unknown = set(code.co_names) - NAMES
    if unknown or any(isinstance(x, types.CodeType) for x in code.co_consts):
        what = f"the name {min(unknown)[:40]!r}" if unknown else "a function"
        raise Refused(f"a text that is evaluated has {what}")


def import_task(task, module):
    """Imports the module that defines a task, and of the package nothing else.

    The __init__ of the package and of its parts import all tasks and matplotlib, which takes
    seconds. Should a task need them, they are imported after all.
    """
    names = module.split(".")
    for depth in range(1, len(names)):
        package = types.ModuleType(".".join(names[:depth]))
        package.__path__ = [os.path.join(PACKAGES, *names[:depth])]
        sys.modules[package.__name__] = package
    try:
        if task == "composite":
            raise ImportError("its parts are other tasks")
        importlib.import_module("reasoning_gym.coaching")  # which the factory imports in turn
        importlib.import_module(module)
    except ImportError:
        for name in [name for name in sys.modules if name.split(".")[0] == names[0]]:
            del sys.modules[name]
        importlib.import_module("reasoning_gym")


def load_dataset(task, module, options):
    """The dataset of a task, and the function that finds an answer in a completion."""
    import_task(task, module)
    create = importlib.import_module("reasoning_gym.factory").create_dataset
    dataset = create(task, **pickle.loads(options))  # which may hold objects of the package
    # What a first call imports and caches is then there for all forks.
    with contextlib.suppress(Exception):
        entry = dataset[0]
        dataset.score_answer(entry["answer"], entry)
    gc.collect()
    gc.freeze()  # so that forks copy less
    return dataset, importlib.import_module("reasoning_gym.utils").extract_answer


def value_of(dataset, extract, request):
    """A report: what became of scoring one answer."""
    try:
        answer, is_completion, entry = pickle.loads(request)
        if is_completion:
            tagged = extract(answer)
            answer = answer.strip() if tagged is None else tagged
        value = float(dataset.score_answer(answer, entry))
    except Refused as error:
        return ["refused", str(error)]
    except BaseException as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return ["raised", text.encode("utf-8", "replace").decode()]
    return ["value", value] if math.isfinite(value) else ["raised", f"the score {value}"]


def confine(seconds, rules):
    """Ends this process at its limits, and keeps it from all other processes."""
    cpu = math.ceil(seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))  # itself
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    memory = ctypes.create_string_buffer(rules, len(rules))
    program = struct.pack("HxxxxxxP", len(rules) // 8, ctypes.addressof(memory))
    # PR_SET_SECCOMP with a filter; bubblewrap has set that no program gains privileges.
    if LIBC.prctl(22, 2, ctypes.c_char_p(program), 0, 0):
        raise OSError(ctypes.get_errno(), "the filter of system calls was refused")


def fork(dataset, extract, request, seconds, rules):
    """The report of a fork, as bytes."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.closerange(3, writer)
        try:
            confine(seconds, rules)
        except BaseException as error:
            report = ["unconfined", str(error)]
        else:
            sys.addaudithook(watch)
            report = value_of(dataset, extract, request)
        os.write(writer, json.dumps(report).encode())
        os._exit(0)
    os.close(writer)
    text, end = b"", time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
        if not (more := os.read(reader, LONGEST)) or len(text) > LONGEST:
            break
        text += more
    else:
        text = b'["late", null]'
    os.close(reader)
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGXCPU:
        return b'["late", null]'
    return text or json.dumps(["crashed", f"ended its process with exit status {status}"]).encode()


def read(stream):
    """The next message; empty if there are no more."""
    header = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else b""


def send(body):
    """Writes one message."""
    message = LENGTH.pack(len(body)) + body
    while message:
        message = message[os.write(4, message) :]


def main():
    """Loads a task, reports it, and answers requests until there are no more."""
    requests = os.fdopen(3, "rb")
    task, module, options, seconds, rules = pickle.loads(read(requests))
    sys.path[:] = [*(path for path in sys.path if path != "/tmp"), PACKAGES]
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MPLCONFIGDIR="/tmp")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    try:
        dataset, extract = load_dataset(task, module, options)
    except BaseException as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        send(json.dumps(["unloadable", text]).encode())
        return
    send(b'["ready", null]')
    while request := read(requests):
        send(fork(dataset, extract, request, seconds, rules))


if __name__ == "__main__":
    main()
