"""Rewards in processes of their own.

A call that hangs, crashes, raises or answers what cannot be sent is one failure, told and counted;
the others keep their values and order, and the worker that was lost is replaced. A pool that gives
no value any more ends the run. No process outlives its pool, its script or its parent.
"""

import functools
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
from rows import for_each

from jaxrl_llm.core import bind
from jaxrl_llm.rewards import RewardError, VerifierPool, VerifierWarning, score

VERIFIERS = """
import asyncio, os, pathlib, re, subprocess, sys, time

class RewardError(Exception):
    pass

def spin():
    while True:
        pass

def refuse(error):
    raise error

def chatter():
    print("noise on stdout", flush=True)
    sys.stdin.read()

def deafen():
    os.closerange(4, 1024)
    time.sleep(600)

ACTIONS = {
    "hang": spin, "sleep": lambda: time.sleep(600), "crash": lambda: os._exit(7),
    "raise": lambda: refuse(KeyError("no such\\nthing")), "exit": lambda: sys.exit(1),
    "none": lambda: None, "unpicklable": lambda: lambda: 0, "print": chatter, "deaf": deafen,
    "pid": os.getpid, "jax": lambda: "jax" in sys.modules,
    "prose": lambda: refuse(RewardError("no number")),
}

def judge(prompt, completion, metadata):
    value = ACTIONS[completion]() if completion in ACTIONS else len(completion)
    return len(completion) if completion == "print" else value

def columns(prompt, completion, metadata):
    return {"length": judge(prompt, completion, metadata), "one": 1}

async def moody(prompt, completion, metadata):
    if completion == "block":
        time.sleep(600)
    while completion in ("sleep", "deaf"):
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            if completion == "sleep":
                raise
    await asyncio.sleep(0.05 if completion == "crash" else 0.2)
    return judge(prompt, completion, metadata)

class AsyncScale:
    def __init__(self, weight):
        self.weight = weight
    async def __call__(self, prompt, completion, metadata):
        return await meeting(prompt, completion, metadata)

arrived = []

async def meeting(prompt, completion, metadata, *, size=3):
    arrived.append(completion)
    while len(arrived) < size:  # passes only if the calls are in one worker at one time
        await asyncio.sleep(0.01)
    return 1.0

async def busy(prompt, completion, metadata):
    time.sleep(0.2)
    return len(completion)

def nap(prompt, completion, metadata):
    time.sleep(0.4)
    return 1.0

def meet(prompt, completion, metadata):
    folder = pathlib.Path(metadata["folder"])
    (folder / completion).touch()
    while len(list(folder.iterdir())) < 3:
        time.sleep(0.01)
    return 1.0

def child(prompt, completion, metadata):
    if completion == "fork":
        process = subprocess.Popen(["sleep", "600"])
        pathlib.Path(metadata["file"]).write_text(str(process.pid))
        process.wait()
    left = ["sh", "-c", "setsid sleep 600 & echo $! >" + metadata["file"]]
    subprocess.run(left, start_new_session=True)
    time.sleep(600)

def backtrack(prompt, completion, metadata):
    pathlib.Path(metadata["file"]).write_text(str(os.getpid()))
    return re.match("(a+)+b", "a" * 60) is None  # takes years, and holds the interpreter

class Weighted:
    def __init__(self, weight):
        self.weight = weight
    def __call__(self, prompt, completion, metadata):
        return self.weight * len(completion)

def scaled(prompt, completion, metadata, *, weight=1.0):
    return weight * len(completion)

number = 3
"""


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "pool_verifiers.py").write_text(VERIFIERS)
    sys.path.insert(0, str(folder))
    import pool_verifiers

    yield pool_verifiers
    sys.path.remove(str(folder))
    del sys.modules["pool_verifiers"]


@pytest.fixture(scope="module")
def pool(verifiers):
    with VerifierPool(verifiers.judge, workers=2, deadline=5.0) as pool:
        yield pool


def run(pool, *completions):
    rows = [{"id": f"q{n}"} for n in range(len(completions))]
    return score(pool, ["p"] * len(completions), list(completions), rows)


def script(folder, verifiers, text):
    """Runs a program that finds the module of the verifiers."""
    (folder / "script.py").write_text(textwrap.dedent(text))
    path = os.pathsep.join(filter(None, [os.path.dirname(verifiers.__file__), *sys.path]))
    # Errors go to a file: what outlives the script would hold a pipe open.
    with (folder / "errors").open("w") as errors:
        return subprocess.run(
            [sys.executable, str(folder / "script.py")],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=120,
        )


def ends(pid, seconds=60.0):
    """Whether a process ends within that time; one that nobody has collected has ended."""
    for _ in range(int(seconds * 10)):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().split()[2] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_a_failure_is_a_counted_zero_and_the_pool_goes_on(verifiers):
    # Two pools, as one tells of five failures.
    fatal = {
        "hang": "gave nothing within 1 s",
        "sleep": "gave nothing within 1 s",
        "crash": "ended its process with exit status 7",
    }
    raised = {
        "raise": r"raised KeyError: 'no such.*thing' \(.*\.py:\d+\)",
        "exit": r"raised SystemExit: 1 \(.*\.py:\d+\)",
        "unpicklable": "raised .*lambda.*",
    }
    for failures, deadline in ((fatal, 1.0), (raised, 60.0)):
        with VerifierPool(verifiers.judge, workers=1, deadline=deadline) as pool:
            for count, (completion, told) in enumerate(failures.items(), start=1):
                with pytest.warns(VerifierWarning, match=rf"judge {told} on prompt 1 \(id 'q1'\)"):
                    scores = run(pool, "ab", completion, "abc")
                assert scores.rewards.tolist() == [2, 0, 3]
                assert (scores.failures, pool.failures) == (1, count)
                assert run(pool, "abcd").failures == 0
                assert pool.failures == count


def test_only_the_worker_that_hung_is_replaced(verifiers):
    with VerifierPool(verifiers.judge, workers=1, deadline=1.0) as pool:
        first = pool("p", "pid", {})
        assert pool("p", "pid", {}) == first
        with pytest.warns(VerifierWarning):
            assert pool("p", "hang", {}) == 0.0
        assert pool("p", "pid", {}) != first
        with pytest.raises(OSError):
            os.kill(int(first), 0)  # the process is gone


def test_many_failures_give_few_warnings(verifiers):
    with (
        VerifierPool(verifiers.judge, workers=1) as pool,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        run(pool, *["raise"] * 30)
        run(pool, *["raise"] * 10)
    told = [str(warning.message) for warning in caught]
    assert len(told) == 5 + 1 + 1
    assert "failed on 25 more of 30 completions (25 raised)" in told[5]
    assert "failed on 10 more of 10 completions (10 raised), 40 so far" in told[6]


def test_a_value_that_is_no_number_is_a_mistake_of_the_function(pool):
    with pytest.raises(RewardError, match="judge gave None for prompt 1 .id 'q1'"):
        run(pool, "ok", "none")


def test_what_the_function_prints_or_reads_does_no_harm(pool, capfd):
    assert run(pool, "print", "ab").rewards.tolist() == [5, 2]
    assert "noise" not in capfd.readouterr().out


def test_functions_of_every_kind_and_async_calls_at_one_time(verifiers):
    """``bind`` comes from the library, which imports JAX: one such pool is enough."""
    for function in (
        "pool_verifiers:meeting",
        verifiers.AsyncScale(2),
        functools.partial(verifiers.meeting, size=3),
        bind(verifiers.meeting, size=3),
    ):
        with VerifierPool(function, workers=1, deadline=60.0) as pool:
            assert run(pool, "a", "b", "c").rewards.tolist() == [1, 1, 1]
    for function in ("pool_verifiers:scaled", verifiers.Weighted(1)):
        with VerifierPool(function, workers=1) as pool:
            assert run(pool, "abc").rewards.tolist() == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("completion", "told"),
    [
        ("sleep", "gave nothing within 1 s"),
        ("deaf", "gave nothing within 1 s"),
        ("crash", "ended its process with exit status 7"),
        ("raise", r"raised KeyError: 'no such.*thing' \(.*\.py:\d+\)"),
        ("unpicklable", "raised .*lambda.*"),
    ],
)
def test_an_async_call_that_fails_costs_no_other(verifiers, completion, told):
    with VerifierPool(verifiers.moody, workers=2, deadline=1.0) as pool:
        texts = ["a", "bb", completion, "ccc", "dddd", "eeeee"]
        with pytest.warns(VerifierWarning, match=rf"moody {told} on prompt 2 ") as caught:
            scores = run(pool, *texts)
        assert len(caught) == 1 and scores.failed.tolist() == [text == completion for text in texts]
        assert scores.rewards.tolist() == [1, 2, 0, 3, 4, 5]
        assert run(pool, "abcd").failures == 0 and pool.failures == 1


def test_an_async_call_that_refuses_a_row_is_raised(verifiers):
    with (
        VerifierPool(verifiers.moody, workers=1) as pool,
        pytest.raises(RewardError, match="moody cannot grade prompt 1 .*no number"),
    ):
        run(pool, "a", "prose", "bb")


def test_the_deadline_of_an_async_call_begins_with_the_call(verifiers):
    """Calls that never wait run one after the other, each within the deadline."""
    with VerifierPool(verifiers.busy, workers=1, deadline=0.6) as pool:
        assert run(pool, *["x"] * 8).rewards.tolist() == [1] * 8 and pool.failures == 0


@for_each("on_error", ["drop", "zero", "raise"])
def test_what_becomes_of_a_failed_call_is_an_option(verifiers, on_error):
    """Columns of a failed completion are zero."""
    rows = (["p"] * 3, ["ab", "crash", "abc"], [{"id": f"q{n}"} for n in range(3)])
    with (
        VerifierPool(verifiers.columns, workers=1) as pool,
        pytest.warns(VerifierWarning, match="status 7 on prompt 1"),
    ):
        if on_error == "raise":
            with pytest.raises(RewardError, match=r"columns ended .* on prompt 1 \(id 'q1'\)"):
                score(pool, *rows, on_error=on_error)
            return
        scores = score(pool, *rows, on_error=on_error)
    assert scores.rewards.tolist() == [3, 0, 4] and scores.failures == 1
    assert scores.reward_components["length"].tolist() == [2, 0, 3]
    assert scores.failed.tolist() == [False, on_error == "drop", False]
    assert scores.unanswered.tolist() == [False, True, False]
    assert "status 7 on prompt 1 (id 'q1')" in scores.error


def test_workers_work_at_the_same_time(verifiers, tmp_path):
    with VerifierPool(verifiers.meet, workers=3, deadline=20) as pool:
        # Each call waits for the other two, so one after the other they would hang.
        scores = score(pool, ["p"] * 3, list("abc"), [{"folder": str(tmp_path)}] * 3)
    assert scores.rewards.tolist() == [1, 1, 1]


def test_the_deadline_of_score_is_not_the_pools(verifiers):
    with VerifierPool(verifiers.nap, workers=1) as pool:
        assert score(pool, ["p"] * 2, ["a"] * 2, deadline=0.1).rewards.tolist() == [1, 1]


def test_a_worker_that_died_while_idle_is_replaced_without_a_failure(verifiers):
    with VerifierPool(verifiers.judge, workers=1) as pool:
        os.kill(int(pool("p", "pid", {})), 9)
        time.sleep(0.2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert pool("p", "ab", {}) == 2
        assert pool.failures == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "leave"])
def test_children_of_a_hung_call_end_with_it(verifiers, tmp_path, how):
    """Also those that left its session, and whose parent has ended."""
    note = tmp_path / "pid"
    with (
        VerifierPool(verifiers.child, workers=1, deadline=1.0) as pool,
        pytest.warns(VerifierWarning, match="nothing within 1 s"),
    ):
        assert pool("p", how, {"file": str(note)}) == 0.0
    assert ends(int(note.read_text()))


def test_a_closed_pool_is_refused(verifiers):
    pool = VerifierPool(verifiers.judge, workers=1)
    pid = int(pool("p", "pid", {}))
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="the pool is closed"):
        pool("p", "a", {})
    with pytest.raises(OSError):
        os.kill(pid, 0)


def test_a_forgotten_pool_ends_its_workers(verifiers):
    pool = VerifierPool(verifiers.judge, workers=1)
    pid = int(pool("p", "pid", {}))
    del pool
    if os.path.exists(f"/proc/{pid}"):  # only then, as it takes a second
        gc.collect()
    with pytest.raises(OSError):
        os.kill(pid, 0)


def local(prompt, completion, metadata):
    return 1.0


local_main = type(local)(local.__code__, {}, "local_main")
local_main.__module__ = "__main__"


@for_each(
    ("function", "told"),
    [
        (lambda p, c, m: 1.0, "cannot be sent to another process"),
        (local_main, "it is defined in the running script or notebook"),
        (3, "must be callable or a text 'module:name', got int"),
        ("no_colon", "is written 'module:name'"),
        ("json:", "is written 'module:name'"),
        ("no_such_module_at_all:f", "there is no module 'no_such_module_at_all'"),
        ("no_such_package_at_all.part:f", "there is no module"),
        ("json:no_such_function", "could not load json:no_such_function: AttributeError"),
        ("pool_verifiers:number", "could not load .*not callable"),
    ],
)
def test_functions_that_a_worker_cannot_have(verifiers, function, told):
    with pytest.raises(ValueError, match=told):
        VerifierPool(function, workers=1)


def test_a_module_that_ends_the_worker(verifiers, tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ValueError, match="could not load deadly:f: it ended its process with exit status 3"
    ):
        VerifierPool("deadly:f", workers=1)


@for_each(
    ("options", "message"),
    [
        *(({"workers": x}, "workers must be an integer above 0") for x in (0, 1.5, True)),
        *(({"deadline": x}, "deadline must be above 0") for x in (0, float("nan"))),
        ({"deadline": float("inf")}, "deadline must be finite; got inf"),
        ({"deadline": 1e9}, "deadline must be at most 1,000,000 seconds; got 1e.09"),
        ({"patience": 1e39}, "patience must be at most 1e.18"),
        ({"patience": 0}, "patience must be above 0"),
        ({"deadline": 7.0, "patience": 5.0}, "not be below the deadline, got 5 s and a dead"),
    ],
)
def test_bad_options(verifiers, options, message):
    with pytest.raises(ValueError, match=message):
        VerifierPool(verifiers.judge, **options)


def test_no_worker_outlives_a_script_without_a_guard(verifiers, tmp_path):
    """A plain script, no `if __name__`, that never closes its pool, and one that is killed."""
    told = script(
        tmp_path,
        verifiers,
        """
        import os, warnings
        warnings.simplefilter("ignore")  # JAX warns of a fork
        from jaxrl_llm.rewards import VerifierPool
        killed = os.fork()
        pool = VerifierPool("pool_verifiers:judge", workers=1)
        print(int(pool("p", "pid", {})), flush=True)
        if not killed:
            os.kill(os.getpid(), 9)
        os.waitpid(killed, 0)
        """,
    )
    assert (told.returncode, (tmp_path / "errors").read_text()) == (0, "")
    workers = [int(pid) for pid in told.stdout.split()]
    assert len(set(workers)) == 2 and all(map(ends, workers))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "deadline"),
    [
        ("child", 600.0),  # a program that the call has started
        ("backtrack", 1.0),  # a call that lets no thread of its process run
    ],
)
def test_what_a_call_runs_ends_with_a_parent_that_is_killed(
    verifiers, tmp_path, function, deadline
):
    note = tmp_path / "pid"
    told = script(
        tmp_path,
        verifiers,
        f"""
        import os, pathlib, threading, time
        from jaxrl_llm.rewards import VerifierPool, _process
        _process._GRACE_SECONDS = 1.0
        pool = VerifierPool("pool_verifiers:{function}", workers=1, deadline={deadline})
        call = ("p", "fork", {{"file": {str(note)!r}}})
        threading.Thread(target=pool, args=call, daemon=True).start()
        while not (pathlib.Path({str(note)!r}).exists() and os.path.getsize({str(note)!r})):
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
        """,
    )
    assert told.returncode == -9
    pid = int(note.read_text())
    try:
        assert ends(pid)
    finally:
        if not ends(pid, 0.1):
            os.kill(pid, 9)


@pytest.mark.parametrize("of_a_pool", [True, False])
def test_ctrl_c_is_heard_during_a_hang(pool, monkeypatch, of_a_pool):
    """The main thread only waits, so an interrupt reaches it and no deadline has to pass."""
    hangs, over = threading.Event(), threading.Event()

    def hang(*arguments):
        hangs.set()
        over.wait(120)

    def interrupt():
        hangs.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(pool, "deadline", 600.0)
    monkeypatch.setattr(pool, "_call", hang)
    threading.Thread(target=interrupt, daemon=True).start()
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        score(pool if of_a_pool else hang, ["p"], ["c"], deadline=600.0)
    over.set()
    assert time.monotonic() - before < 60


def test_a_module_may_make_the_pool_of_its_own_function(tmp_path, monkeypatch):
    (tmp_path / "own_pool.py").write_text(
        textwrap.dedent(
            """
            import os, pathlib
            from jaxrl_llm.rewards import VerifierPool

            with (pathlib.Path(__file__).parent / "imports").open("a") as file:
                file.write("x")
                count = file.tell()

            def one(prompt, completion, metadata):
                return 1.0

            pool = VerifierPool(one, workers=1) if count < 4 else None  # no bomb if this fails
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from own_pool import pool

    with pool:
        assert run(pool, "a").rewards.tolist() == [1.0]
    assert (tmp_path / "imports").read_text() == "xx"  # here and in the one worker


# What may hang though every call has a deadline.


def test_a_worker_that_is_stopped_does_not_hold_a_large_text(verifiers):
    with VerifierPool(verifiers.judge, workers=1, deadline=0.5) as pool:
        os.kill(int(run(pool, "pid").rewards[0]), signal.SIGSTOP)
        before = time.monotonic()
        scores = run(pool, "x" * 2_000_000)  # a pipe takes 64 KiB
        assert time.monotonic() - before < 30
        assert scores.rewards.tolist() == [2_000_000] and pool.failures == 0


def test_a_worker_that_closes_its_connection_and_goes_on_is_replaced(verifiers, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.rewards._process._END_SECONDS", 0.2)
    told = "closed the connection of its process, which goes on"
    with (
        VerifierPool(verifiers.judge, workers=1, deadline=5.0) as pool,
        pytest.warns(VerifierWarning, match=told),
    ):
        assert run(pool, "deaf", "abc").rewards.tolist() == [0, 3]


@pytest.mark.slow
def test_a_pool_that_gives_no_value_any_more_ends_the_run(verifiers):
    with VerifierPool(verifiers.judge, workers=2, deadline=1.5, patience=4.0) as pool:
        run(pool, "ab")
        time.sleep(4.5)  # nobody asks: that is no silence
        assert run(pool, "abc").rewards.tolist() == [3]
        told = r"judge returned no value for 4 s, though a call may take 1.5 s; \d of 2 workers"
        with pytest.raises(RewardError, match=told), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(20):  # batches that all hang, each well within the patience
                run(pool, "sleep")


def test_whatever_hangs_the_caller_is_freed(verifiers, monkeypatch):
    with VerifierPool(verifiers.judge, workers=2, deadline=0.2, patience=0.5) as pool:
        monkeypatch.setattr(pool, "_call", lambda arguments: threading.Event().wait(60))
        with pytest.raises(RewardError, match="no value for 0.5 s, .* 2 of 2 workers are alive"):
            run(pool, "ab", "abc")


def test_a_pool_whose_workers_cannot_come_back_ends_the_run(verifiers, monkeypatch):
    def full(*arguments, **options):
        raise OSError(11, "Resource temporarily unavailable")

    with VerifierPool(verifiers.judge, workers=1, deadline=5.0) as pool:
        errors = []

        def ask():
            try:
                run(pool, "crash")
            except RewardError as error:
                errors.append(str(error))

        monkeypatch.setattr(subprocess, "Popen", full)
        threads = [threading.Thread(target=ask) for _ in range(2)]  # one waits for the other's
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        told = "no worker can be started for judge: resource temporarily unavailable."
        assert errors == [f"VerifierPool: {told}"] * 2
        monkeypatch.undo()
        assert run(pool, "abc").rewards.tolist() == [3]  # and goes on once they can


# What becomes of a worker that imports it, the first time and each time after.
FRAGILE = """
import os, pathlib

count = pathlib.Path(__file__).with_name("count")
count.write_text(count.read_text() + "x" if count.exists() else "x")
fate = {fates}[len(count.read_text()) - 1]
if fate == "die":
    os._exit(9)
if fate == "raise":
    raise ImportError("half of it is gone")

def judge(prompt, completion, metadata):
    if completion == "crash":
        os._exit(7)
    return len(completion)
"""


def fragile_pool(folder, monkeypatch, *fates, **options):
    """Of a module that meets these fates, one each time that it is imported."""
    (folder / "fragile.py").write_text(FRAGILE.format(fates=fates))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr("jaxrl_llm.rewards.pool._RETRY_SECONDS", 0.01)
    return VerifierPool("fragile:judge", workers=1, deadline=0.5, **options)


def test_a_worker_that_dies_while_it_starts_is_replaced(tmp_path, monkeypatch):
    with (
        fragile_pool(tmp_path, monkeypatch, "load", "die", "die", "load") as pool,
        pytest.warns(VerifierWarning, match="exit status 7"),
    ):
        assert run(pool, "crash", "abc").rewards.tolist() == [0, 3]
        assert pool.failures == 1


@pytest.mark.parametrize(
    ("fates", "told"),
    [
        (["raise"], "could not load fragile:judge: ImportError: half of it is gone"),
        (["die"] * 500, "exit status 9|no value for 1 s"),
    ],
)
def test_workers_that_cannot_come_back_end_the_run(tmp_path, monkeypatch, fates, told):
    with (
        fragile_pool(tmp_path, monkeypatch, "load", *fates, patience=1.0) as pool,
        pytest.raises(RewardError, match=told),
    ):
        run(pool, "crash", "abc")


def test_patience_is_longer_than_a_call(verifiers):
    with VerifierPool(verifiers.judge, workers=1, deadline=900.0) as pool:
        assert pool.patience == 1800
    with VerifierPool(verifiers.judge, workers=1) as pool:
        assert pool.patience == 600


def test_workers_do_not_import_jax(pool):
    assert pool("p", "jax", {}) is False
