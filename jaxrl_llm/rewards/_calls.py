"""Both ends of a grader and a candidate that share no process: calls go one way, plain data back.

It is passed to Python as a text, into two sandboxes that two pipes connect: one runs `serve`, with
the candidate's code, and one `grade`, with the tests. What the candidate returns arrives as plain
data (numbers, texts, lists, ...), so that no method of it runs where tests compare; any other
object stays where it is, and the tests hold a `Remote` to call it by.
"""

import ast
import builtins
import contextlib
import itertools
import json
import os
import sys

LONGEST = 1 << 24  # characters of a message
LARGEST = 1 << 63  # integers from here on are sent in hexadecimal digits
TAGS = {
    "t": tuple,
    "s": set,
    "f": frozenset,
    "r": lambda x: range(x[0], x[1], x[2]),
    "c": lambda x: complex(x[0], x[1]),
}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)


class Gone(BaseException):
    """The candidate no longer answers."""


class Unpassable(TypeError):
    """A test passes a function to the candidate, which is in another process."""


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
    if isinstance(value, range):
        return {"r": [encode(x, other) for x in (value.start, value.stop, value.step)]}
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

    def keep(value):
        if hasattr(type(value), "__next__"):
            return {"l": [encode(x, keep) for x in itertools.islice(value, 1 << 20)]}
        objects.append(value)
        return {"o": len(objects) - 1}

    def answer(kind, *what):
        if kind == "name":
            return getattr(module, what[0])
        target = objects[what[0]]
        if kind == "attribute":
            return getattr(target, what[1])
        return target(*what[1], **what[2])

    send(sink, json.dumps("ready"))
    for line in source:
        try:
            value = answer(*decode(json.loads(line), lambda tag, number: objects[number]))
            reply = json.dumps(["value", encode(value, keep)])
        except BaseException as error:
            reply = json.dumps(["raised", type(error).__name__, str(error)])
        send(sink, reply)


class Channel:
    """The grader's end."""

    def __init__(self, requests, replies):
        self.sink = open(requests, "w", encoding="utf-8")  # noqa: SIM115
        self.source = open(replies, encoding="utf-8", errors="replace")  # noqa: SIM115
        self.gone = False

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
            if callable(value):
                raise Unpassable(f"a test passes a {type(value).__name__} to the candidate")
            raise TypeError(f"{type(value).__name__} cannot be passed to the candidate")

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
                return decode(reply[1], self.remote)
            kind, message = getattr(builtins, str(reply[1]), None), str(reply[2])
        except Exception:
            self.gone = True  # what no server of ours sends
            raise Gone from None
        # An end of an iteration would end one of the test.
        if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind is StopIteration:
            kind = RuntimeError
        raise kind(message)

    def remote(self, tag, content):
        """The local proxy of the candidate's object."""
        if tag == "l":
            return iter([decode(x, self.remote) for x in content])
        return Remote(self, int(content))


class Remote:
    """An object of the candidate's process: it can be called, and has attributes and items."""

    def __init__(self, channel, number):
        object.__setattr__(self, "channel", channel)
        object.__setattr__(self, "number", number)

    def __call__(self, *arguments, **options):
        """Calls it there."""
        channel = object.__getattribute__(self, "channel")
        number = object.__getattribute__(self, "number")
        return channel.ask("call", number, arguments, options)

    def __getattribute__(self, name):
        """Reads an attribute there; none that Python itself looks for here."""
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        channel = object.__getattribute__(self, "channel")
        return channel.ask("attribute", object.__getattribute__(self, "number"), name)

    def __getitem__(self, key):
        """Reads an item there."""
        channel = object.__getattribute__(self, "channel")
        number = object.__getattribute__(self, "number")
        return channel.ask("attribute", number, "__getitem__")(key)

    def refuse(self, *_):
        """Its class decides what it equals, so a test that compares it fails."""
        raise AssertionError("the candidate returned an object, which cannot be compared")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = refuse
    __hash__ = None


def free_names(texts):
    """Names that tests read and neither they nor Python define."""
    read, defined = set(), set(dir(builtins))
    for node in itertools.chain.from_iterable(ast.walk(ast.parse(text)) for text in texts):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, DEFINITIONS) and node.name:
            defined.add(node.name)
    return read - defined


def report(nonce, what):
    """Prints one line behind the nonce."""
    os.write(1, f"{nonce} {' '.join(str(what).split())[:300]}\n".encode())


def grade(nonce, requests, replies):
    """Runs the tests of the standard input, and prints behind the nonce whether each holds.

    In the place of a test that no candidate can pass, or of all of them, it prints why.
    """
    job = json.load(sys.stdin)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    channel = Channel(requests, replies)
    try:
        if channel.receive() != "ready":
            return
        names = {"__name__": "tests"}
        wanted = {name: name for name in free_names([job["setup"], *job["tests"]])}
        if job["entry_point"]:
            wanted |= {"candidate": job["entry_point"], job["entry_point"]: job["entry_point"]}
        for name, there in wanted.items():
            with contextlib.suppress(Exception):  # a test that reads what is not there fails
                names[name] = channel.ask("name", there)
        try:
            exec(compile(job["setup"], "setup", "exec"), names)
        except Gone:
            raise
        except BaseException as error:
            # What reads nothing of the candidate fails with every one.
            if isinstance(error, Unpassable) or not free_names([job["setup"]]):
                report(nonce, f"the setup fails with {type(error).__name__}: {error}")
            return
        for test in job["tests"]:
            try:
                exec(compile(test, "test", "exec"), dict(names))
                passed = not channel.gone
            except Gone:
                raise
            except Unpassable as error:
                passed = error
            except BaseException:
                passed = False
            report(nonce, passed if isinstance(passed, Unpassable) else int(passed))
    except Gone:
        pass
