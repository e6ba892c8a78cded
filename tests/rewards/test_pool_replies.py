"""What a worker of a pool may send: values exactly, and nothing that is executed or believed."""

import importlib
import math
import os
import random
import struct
import sys

import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.rewards import FAILED, VerifierPool, VerifierWarning, score

# Its workers import JAX, which takes a second; one pool serves all tests of it.
RICH = """
import decimal, fractions, struct, types
import ml_dtypes
import numpy as np
from jaxrl_llm.rewards import FAILED

VALUES = [
    None, True, False, 0, 1, -1, 2**63 - 1, -(2**63), 10**5000, -(10**30), 0.0, -0.0, 0.1, 5e-324,
    1.7976931348623157e308, float("nan"), float("inf"), float("-inf"), "", "text", "\\ud800 \\0",
    [], [1, 1.0, True], [[0.5, 2], []], (1, 2.0), {}, {"reward": 1, "right": True},
    {"turn_rewards": [0.25, 1.0], "feedback": "why", "none": None, "nan": float("nan")},
    {1: 2, None: (3,)}, {1, 2},
    frozenset({3}), 2 + 3j, b"bytes", FAILED, np.float32(0.1), np.int64(7), np.bool_(True),
    np.arange(6, dtype=np.int16).reshape(2, 3), np.array(2.5), np.zeros((0, 2)),
    np.ones(2, ml_dtypes.bfloat16),
]

LOOSE = [
    fractions.Fraction(1, 4), decimal.Decimal("0.25"), np.float64(0.25),
    types.MappingProxyType({"reward": 0.25}),
]

def rich(prompt, completion, metadata):
    if prompt == "values":
        return VALUES[int(completion)]
    if prompt == "loose":
        return LOOSE[int(completion)]
    return list(struct.unpack(f"<{len(completion) // 16}d", bytes.fromhex(completion)))
"""

MODULE = """
import fcntl, json, os, pickle, struct, subprocess, sys

def wrong(prompt, completion, metadata):
    if completion == "deep":
        value = []
        for _ in range(100_000):
            value = [value]
        return value
    if completion == "long":
        return "x" * (1 << 26)
    return len(completion)

class Bomb:
    def __init__(self, path):
        self.path = path
    def __reduce__(self):
        return open, (self.path, "w")

def forge(prompt, completion, metadata):
    def framed(body):
        return struct.pack(">Q", len(body)) + body
    messages = {
        "pickle": framed(pickle.dumps((0, "value", Bomb(metadata["planted"])))),
        "number": framed(json.dumps(["0" * 32, 0, "value", 375000.0]).encode()),
        "form": framed(json.dumps({"reward": 375000.0}).encode()),
        "nested": framed(b"[" * 200_000),
        "long": struct.pack(">Q", 1 << 60),
        "short": struct.pack(">Q", 9) + b"1",
    }
    if completion in messages:
        for descriptor in range(3, 1024):
            try:
                os.write(descriptor, messages[completion])
            except OSError:
                pass
    return len(completion)

def pipes():
    names = [int(name) for name in os.listdir("/proc/self/fd")]
    count = 0
    for name in names:
        try:
            flags = fcntl.fcntl(name, fcntl.F_GETFL)
            pipe = os.readlink(f"/proc/self/fd/{name}").startswith("pipe:")
        except OSError:  # the listing itself
            continue
        count += pipe and name > 2 and flags & os.O_ACCMODE == os.O_WRONLY
    return count

def inherited(prompt, completion, metadata):
    if completion == "fork":
        child = os.fork()
        if not child:
            os._exit(pipes())
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if completion == "program":
        words = [sys.executable, "-c", "import pool_replies; print(pool_replies.pipes())"]
        done = subprocess.run(words, close_fds=False, stdout=subprocess.PIPE, check=True)
        return int(done.stdout)
    return pipes()

def variables(prompt, completion, metadata):
    return {"reward": 1.0, "names": " ".join(sorted(os.environ))}
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replies")
    (folder / "pool_replies.py").write_text(MODULE)
    (folder / "rich_replies.py").write_text(RICH)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))
        yield importlib.import_module("pool_replies")
        del sys.modules["pool_replies"]


def ask(function, *completions, **options):
    """The raw values of a pool."""
    with VerifierPool(function, workers=1, deadline=60.0, **options) as pool:
        return pool.score_batch([""] * len(completions), completions, [{}] * len(completions))


@pytest.fixture(scope="module")
def rich(functions):
    """A function that asks for values by their kind, and the module that has them."""
    module = importlib.import_module("rich_replies")
    with VerifierPool(module.rich, workers=1, deadline=60.0) as pool:

        def received(kind, *completions):
            size = len(completions)
            return pool.score_batch([kind] * size, [str(x) for x in completions], [{}] * size)

        yield received, module
    del sys.modules["rich_replies"]


def form(value):
    """What tells values apart that compare equal: types, bits of floats, dtypes."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, list | tuple):
        return type(value), [form(x) for x in value]
    if isinstance(value, dict):
        return [(form(k), form(v)) for k, v in value.items()]
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype, value.shape, value.tobytes()
    return type(value), value


def test_every_value_arrives_exactly_as_it_was_returned(rich):
    ask_for, module = rich
    received = ask_for("values", *range(len(module.VALUES)))
    assert [form(x) for x in received] == [form(x) for x in module.VALUES]
    assert received[module.VALUES.index(FAILED)] == FAILED
    # What counts as a number arrives as one.
    assert ask_for("loose", *range(4)) == [0.25, 0.25, 0.25, {"reward": 0.25}]


def test_floats_keep_every_bit(rich):
    draw = random.Random(0)
    patterns = [draw.randbytes(8) for _ in range(500)]
    patterns += [struct.pack("<Q", bits) for bits in (1, (1 << 52) - 1, 1 << 52, 1 << 63)]
    (received,) = rich[0]("doubles", b"".join(patterns).hex())
    for x, bits in zip(received, patterns, strict=True):
        assert math.isnan(struct.unpack("<d", bits)[0]) if x != x else struct.pack("<d", x) == bits


def test_a_value_that_cannot_be_sent_is_a_failed_call(functions):
    with VerifierPool(functions.wrong, workers=1, deadline=60.0) as pool:
        for kind, told in (("deep", "RecursionError"), ("long", "ValueError: the value takes")):
            with pytest.warns(VerifierWarning, match=rf"wrong raised {told}"):
                assert score(pool, ["p"] * 2, [kind, "abc"]).rewards.tolist() == [0, 3]


@pytest.mark.parametrize(
    "kind",
    [
        "pickle",
        "long",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("number", "form", "nested", "short")),
    ],
)
def test_a_forged_reply_costs_the_call_and_nothing_else(functions, tmp_path, kind):
    planted = tmp_path / "planted"
    texts = ["ab", kind, "abcd"]
    # The short one takes the reply behind it for its own: nothing readable comes any more.
    with (
        VerifierPool(functions.forge, workers=1, deadline=3.0) as pool,
        pytest.warns(VerifierWarning, match=r"forge gave .* on prompt 1\.") as told,
    ):
        scores = score(pool, ["p"] * 3, texts, [{"planted": str(planted)}] * 3)
        assert score(pool, ["p"], ["abc"], [{"planted": ""}]).rewards.tolist() == [3]
    assert scores.rewards.tolist() == [2, 0, 4] and scores.failures == 1
    assert kind == "short" or "a reply that cannot be read" in str(told[0].message)
    assert not planted.exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="lists descriptors by /proc")
def test_children_of_a_call_have_no_descriptor_of_the_replies(functions):
    here, forked, started = ask(functions.inherited, "", "fork", "program")
    assert here >= 1 and (forked, started) == (here - 1, 0)


def test_a_worker_has_few_variables_and_those_that_are_named(functions, monkeypatch):
    for name in ("PLANTED_API_KEY", "JUDGE_TOKEN", "LC_PLANTED", "XLA_PLANTED"):
        monkeypatch.setenv(name, "value")
    (received,) = ask(functions.variables, "", environment=["JUDGE_TOKEN", "NOT_SET"])
    names = set(received["names"].split())
    assert names >= {"JUDGE_TOKEN", "LC_PLANTED", "XLA_PLANTED", "PATH", "PYTHONPATH"}
    assert not names & {"PLANTED_API_KEY", "NOT_SET"} and "JUDGE_TOKEN" in os.environ
    assert names - set(os.environ) <= {"JAX_PLATFORMS", "LC_CTYPE"}


@for_each("environment", ["JUDGE_TOKEN", {"JUDGE_TOKEN": "secret"}, [1]])
def test_the_environment_is_named_without_values(functions, environment):
    with pytest.raises(ValueError, match="environment must be a sequence of names") as told:
        VerifierPool(functions.wrong, workers=1, environment=environment)
    assert "secret" not in str(told.value)
