"""Both ends of a grader and a candidate that share no process: calls go one way, plain data back.

It is passed to Python as a text, into two sandboxes that two pipes connect: one runs `serve`, with
the candidate's code, and one `grade`, with the tests. What the candidate returns arrives as plain
data (numbers, texts, lists, ...), so that no method of it runs where tests compare; any other
object stays where it is, and the tests hold a `Remote` to call it by, or `Items` to iterate over.
"""

import ast
import builtins
import contextlib
import importlib
import itertools
import json
import os
import sys
from collections.abc import ItemsView, Iterator, KeysView, ValuesView

LONGEST = 1 << 24  # characters of a message
LARGEST = 1 << 63  # integers from here on are sent in hexadecimal digits
MOST = 1 << 20  # items of an iterator that a test passes
SINGLE, LARGEST = 256, 4096  # items of the candidate's iterators one by one; then of a batch
ITERATORS = ("builtins", "itertools", "_collections")  # modules whose iterators only have items
PLAIN = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range, slice)
TAGS = {
    "t": tuple,
    "s": set,
    "f": frozenset,
    "l": iter,
    "r": lambda x: range(x[0], x[1], x[2]),
    "p": lambda x: slice(x[0], x[1], x[2]),
    "c": lambda x: complex(x[0], x[1]),
}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)


class Gone(BaseException):
    """The candidate no longer answers."""


class Unpassable(TypeError):
    """A test passes what is not plain data to the candidate, which is in another process."""


def encode(value, other):
    """Plain data as JSON; `other` makes an entry of anything else."""
    if isinstance(value, int) and not -LARGEST < value < LARGEST:
        return {"i": hex(value)}  # Python may refuse to write it in decimal digits
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(x, other) for x in value]
    if isinstance(value, dict):
        return {"d": [[encode(k, other), encode(v, other)] for k, v in value.items()]}
    for tag, kind in (("t", tuple), ("s", set), ("f", frozenset)):
        if isinstance(value, kind):
            return {tag: [encode(x, other) for x in value]}
    for tag, kind in (("r", range), ("p", slice)):
        if isinstance(value, kind):
            return {tag: [encode(x, other) for x in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": value.decode("latin-1")}
    return other(value)


def decode(entry, other):
    """The value of an entry that `encode` made, or the sender claims to have."""
    if isinstance(entry, list):
        return [decode(x, other) for x in entry]
    if not isinstance(entry, dict):
        return entry
    ((tag, content),) = entry.items()
    if tag == "d":
        return {decode(k, other): decode(v, other) for k, v in content}
    if tag == "i":
        return int(content, 16)
    if tag == "b":
        return content.encode("latin-1")
    if tag in TAGS:
        return TAGS[tag]([decode(x, other) for x in content])
    return other(tag, content)


def bare(value):
    """Whether a value is an iterator of Python's; others, as a file, may be asked for more."""
    return isinstance(value, Iterator) and type(value).__module__ in ITERATORS


def exception(names, message):
    """The first of the built-in exceptions with these names that a message can make."""
    for name in names:
        kind = getattr(builtins, str(name), None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            continue
        # An end of an iteration would end one of the test.
        if not issubclass(kind, (StopIteration, StopAsyncIteration)):
            with contextlib.suppress(TypeError):  # such as UnicodeDecodeError, of five arguments
                return kind(message)
    return RuntimeError(message)


def send(sink, line):
    """Writes one message."""
    sink.write(line + "\n")
    sink.flush()


def serve(path, requests, replies):
    """Runs the code of the candidate, then answers calls of what it defines."""
    source = open(requests, encoding="utf-8")  # noqa: SIM115
    sink = open(replies, "w", encoding="utf-8")  # noqa: SIM115
    module = type(sys)("solution")
    sys.modules["solution"] = module
    with open(path, encoding="utf-8", newline="") as file:
        exec(compile(file.read(), path, "exec"), module.__dict__)
    objects = []

    late = {}  # exceptions of iterators, raised when the items before them have been taken

    def items(number, iterator, most):
        if number in late:
            raise late.pop(number)
        taken = []
        # That of a class may begin again, and has attributes that show how far it is.
        while len(taken) < (most if bare(iterator) else 1):
            try:
                taken.append((True, next(iterator)))
            except StopIteration as end:
                taken.append((False, end.value))
                break
            except Exception as error:
                if not taken:
                    raise
                late[number] = error
                break
        return taken

    def keep(value):
        objects.append(value)
        return {"n" if hasattr(type(value), "__next__") else "o": len(objects) - 1}

    def answer(kind, *what):
        if kind == "name":
            return getattr(module, what[0])
        target = objects[what[0]]
        if kind == "attribute":
            return getattr(target, what[1])
        if kind == "iterate":
            iterator = iter(target)
            return None if iterator is target else iterator
        if kind == "next":
            return items(what[0], target, what[1])
        return target(*what[1], **what[2])

    send(sink, json.dumps("ready"))
    for line in source:
        try:
            value = answer(*decode(json.loads(line), lambda tag, number: objects[number]))
            reply = json.dumps(["value", encode(value, keep)])
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            reply = json.dumps(["raised", names, str(error)])
        send(sink, reply)


class Channel:
    """The grader's end."""

    def __init__(self, requests, replies):
        self.sink = open(requests, "w", encoding="utf-8")  # noqa: SIM115
        self.source = open(replies, encoding="utf-8", errors="replace")  # noqa: SIM115
        self.gone = False
        self.answered = False  # with plain data or an exception

    def receive(self):
        """The next message."""
        try:
            return json.loads(self.source.readline(LONGEST))
        except (OSError, ValueError, RecursionError):
            self.gone = True
            raise Gone from None

    def ask(self, *question):
        """The value that answers a question, or the exception that the candidate raised."""

        def handle(value):
            if isinstance(value, Remote):
                return {"o": object.__getattribute__(value, "number")}
            if isinstance(value, (KeysView, ValuesView, ItemsView)):
                return encode(list(value), handle)
            name = type(value).__name__
            why = f"a test passes a {name} to the candidate, which can get only plain data"
            if bare(value):
                items = [encode(x, handle) for x in itertools.islice(value, MOST)]
                if len(items) < MOST:
                    return {"l": items}
                why = f"a test passes a {name} of {MOST} or more items to the candidate"
            # These may come from an answer, and then the row is not at fault: an endless iterator,
            # an exception, or a method of a mapping where right code returns an object.
            owner = getattr(value, "__self__", value)
            theirs = self.answered and (bare(owner) or isinstance(owner, (*PLAIN, BaseException)))
            raise (TypeError if theirs else Unpassable)(why)

        text = json.dumps(encode(list(question), handle))
        try:
            if self.gone:
                raise Gone
            send(self.sink, text)
        except OSError:
            self.gone = True
            raise Gone from None
        reply = self.receive()
        try:
            if reply[0] == "value":
                value = decode(reply[1], self.remote)
                self.answered = self.answered or not isinstance(value, Remote)
                return value
            self.answered = True
            error = exception(reply[1], str(reply[2]))
        except Exception:
            self.gone = True  # what no server of ours sends
            raise Gone from None
        raise error

    def remote(self, tag, content):
        """The local proxy of the candidate's object."""
        return (Items if tag == "n" else Remote)(self, int(content))


class Remote:
    """An object of the candidate's process: it can be called, and has attributes and items."""

    def __init__(self, channel, number):
        object.__setattr__(self, "channel", channel)
        object.__setattr__(self, "number", number)

    def __call__(self, *arguments, **options):
        """Calls it there."""
        return ask(self, "call", arguments, options)

    def __getattribute__(self, name):
        """Reads an attribute there; none that Python itself looks for here."""
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        return ask(self, "attribute", name)

    def __getitem__(self, key):
        """Reads an item there."""
        return ask(self, "attribute", "__getitem__")(key)

    def refuse(self, *_) -> bool:
        """Its class decides what it equals, so a test that compares it fails."""
        raise AssertionError("the candidate returned an object, which cannot be compared")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = refuse
    __hash__ = None


class Items(Remote):
    """An iterator of the candidate's process, which makes each item when a test takes it.

    Of a long one of Python's, such as a generator, batches of items are made in advance, since each
    question takes a while.
    """

    def __init__(self, channel, number):
        super().__init__(channel, number)
        object.__setattr__(self, "taken", 0)
        object.__setattr__(self, "batch", [])  # the last item first

    def __iter__(self):
        """Begins an iteration there."""
        iterator = ask(self, "iterate")
        return self if iterator is None else iterator

    def __next__(self):
        """Takes one item."""
        batch, taken = (object.__getattribute__(self, name) for name in ("batch", "taken"))
        if not batch:
            batch += ask(self, "next", 1 if taken < SINGLE else min(taken, LARGEST))[::-1]
        more, value = batch.pop()
        object.__setattr__(self, "taken", taken + 1)
        if more:
            return value
        raise StopIteration(value)

    def __bool__(self, *_):
        """As that of Python's iterators, which tests that read ``f(x) or []`` rely on."""
        return True


def ask(remote, kind, *what):
    """The answer to a question about the candidate's object."""
    number = object.__getattribute__(remote, "number")
    return object.__getattribute__(remote, "channel").ask(kind, number, *what)


def names_in(text):
    """The names that code reads, those that it defines, and the modules that it imports."""
    read, defined, modules = set(), set(dir(builtins)), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
            modules.add(node.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").partition(".")[0])
        elif isinstance(node, DEFINITIONS) and node.name:
            defined.add(node.name)
    return read, defined, modules


class Names:
    """The names of the tests: what the candidate defines, and what nobody does.

    A name that neither the tests nor Python define is the candidate's, or else a module of the
    standard library. One that the candidate lacks is no fault of the row: the reply may be wrong.
    It is a ``stray``, and no code can pass, if the prompt does not have the name either, while the
    candidate does define what else the tests read.
    """

    def __init__(self, channel, job):
        read, defined, modules = names_in(job["setup"])
        self.modules, self.of_setup = set(modules), read - defined
        self.wanted = {name: name for name in self.of_setup}
        for test in job["tests"]:
            more, known, modules = names_in(test)
            self.wanted |= {name: name for name in (read | more) - defined - known}
            self.modules |= modules
        entry = job["entry_point"]
        if entry:
            self.wanted |= {"candidate": entry, entry: entry}
        self.values, missing = dict[str, object](__name__="tests"), set()
        for name, there in self.wanted.items():
            try:
                self.values[name] = channel.ask("name", there)
            except Exception:
                missing.add(name)
        follows = entry not in missing if entry else len(missing) < len(self.wanted)
        for name in missing - {"candidate", entry}:
            if name in sys.stdlib_module_names:
                with contextlib.suppress(Exception):
                    self.values[name] = importlib.import_module(name)
        prompt = job["prompt"].lower()
        named = {name for name in missing if not prompt or name.lower() in prompt}
        self.strays = missing - self.values.keys() - named if follows else set()

    def fault(self, error, answered):
        """Why a test that raised this fails whatever the code is; None if it may not.

        An exception of the candidate arrives without the name that a missing one has here.
        """
        name = getattr(error, "name", None)
        if isinstance(error, Unpassable):
            return str(error)
        if isinstance(error, ImportError) and str(name).partition(".")[0] in self.modules:
            return f"it fails with {type(error).__name__}: {error}"
        if isinstance(error, NameError) and name in self.strays:
            return f"it reads {name!r}, which neither it, the prompt nor the code defines"
        # After an answer, a name that the test sets may be missing since the answer is wrong.
        own = isinstance(error, UnboundLocalError) or (name and name not in self.wanted)
        if isinstance(error, NameError) and own and not answered:
            return f"it fails with {type(error).__name__}: {error}"
        return None


def report(nonce, what):
    """Prints one line behind the nonce."""
    os.write(1, f"{nonce} {' '.join(str(what).split())[:300]}\n".encode())


def grade(nonce, requests, replies):
    """Runs the tests of the standard input, and prints behind the nonce whether each holds.

    In the place of a test that no candidate can pass it prints why.
    """
    job = json.load(sys.stdin)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    channel = Channel(requests, replies)
    try:
        if channel.receive() != "ready":
            return
        names = Names(channel, job)
        try:
            exec(compile(job["setup"], "setup", "exec"), names.values)
        except Gone:
            raise
        except BaseException as error:
            # What reads nothing of the candidate fails with every one.
            if names.fault(error, channel.answered) or not names.of_setup:
                for _ in job["tests"]:
                    report(nonce, f"the setup fails with {type(error).__name__}: {error}")
            return
        answered = channel.answered
        for test in job["tests"]:
            channel.answered = answered
            try:
                exec(compile(test, "test", "exec"), dict(names.values))
                verdict = int(not channel.gone)
            except Gone:
                raise
            except BaseException as error:
                verdict = names.fault(error, channel.answered) or 0
            report(nonce, verdict)
    except Gone:
        pass
