"""Body of a process that calls one function of a reply: arguments in, result out, both as JSON.

It is passed to Python as a text, into the sandbox, where the reply is a file. The standard input
has an argument a line, and only the result reaches the standard output. The expected result stays
outside, so there is nothing here for the reply to find.
"""

import json
import os
import sys

# As the harness of LiveCodeBench has them: what a solution on LeetCode may use without an import.
MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools "
    "operator io sys json"
)
DEEPEST = 50_000  # calls, as there


def load(path):
    """The module of the reply."""
    module = type(sys)("solution")
    sys.modules["solution"] = module
    names = module.__dict__
    for name in [*MODULES.split(), "builtins", "typing"]:
        exec(f"from {name} import *", names)
    exec(f"import {', '.join(MODULES.split())}", names)
    with open(path, encoding="utf-8", newline="") as file:
        exec(compile(file.read(), path, "exec"), names)
    return names


def call(name, path="/tmp/solution.py"):
    """Calls the method of ``class Solution``, or the function, with the arguments of the input."""
    lines = sys.stdin.read().strip("\n")
    arguments = [json.loads(line) for line in lines.split("\n")] if lines.strip() else []
    dumps, write = json.dumps, os.write
    result = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the reply prints is no result
    sys.setrecursionlimit(DEEPEST)
    names = load(path)
    owner = names["Solution"]() if isinstance(names.get("Solution"), type) else None
    function = getattr(owner, name, None) or names[name]
    text = memoryview(dumps(function(*arguments)).encode())
    while text:
        text = text[write(result, text) :]
