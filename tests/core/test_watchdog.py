"""A call that holds the interpreter ends its process; whatever is in time is left alone."""

import os
import signal
import subprocess
import time

import pytest
from bare import command, environment

from jaxrl_llm.core.runtime.watchdog import Watchdog

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs processes of Unix")

HEAD = """
import os, re, signal, sys, time
from jaxrl_llm.core.runtime import watchdog

dog = watchdog.Watchdog()
"""


def run(text):
    """A script that ends by itself or by the watchdog."""
    words, env = command(HEAD + text), environment()
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)


def test_a_call_that_holds_the_interpreter_ends_the_process():
    done = run("""
with dog.watching(0.5) as note:
    note("the first call")
    note("the second call \\N{SNOWMAN}")
    re.match("(a+)+b", "a" * 60)
""")
    assert done.returncode == -signal.SIGKILL
    assert done.stderr.startswith(
        "jaxrl-llm: error: the second call \N{SNOWMAN}: nothing else ran "
    )


@pytest.mark.slow
def test_the_end_of_a_call_arrives_if_the_watcher_is_behind():
    """Its notes, of 64 bytes, fill each page of the pipe while the watcher starts."""
    done = run("""
with dog.watching(1.0) as note:
    for _ in range(1100):
        note("x" * 51)
time.sleep(4.0)
print("alive")
""")
    assert done.returncode == 0 and done.stdout == "alive\n", done.stderr


@pytest.mark.slow
def test_what_is_noted_in_time_or_over_is_left_alone():
    done = run("""
with dog.watching(2.0) as note, dog.watching(2.0) as other:
    for _ in range(25):
        note("it goes on")
        other("so does this one")
        time.sleep(0.1)
note("it has ended")
time.sleep(3.0)
print("alive")
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


@pytest.mark.slow
def test_a_process_that_is_stopped_for_a_while_goes_on():
    script = """
with dog.watching(1.0) as note:
    note("it stops")
    print("stops", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    note("it goes on")
print("alive")
"""
    words, env = command(HEAD + script), environment()
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
    with process, process.stdout as lines:
        assert next(lines) == "stops\n"
        time.sleep(3.0)
        process.send_signal(signal.SIGCONT)
        assert next(lines) == "alive\n" and process.wait(60) == 0


def test_it_ends_with_its_process_and_is_started_anew_when_it_was_ended():
    done = run("""
with dog.watching(60.0) as note:
    note("a call")
    first = dog._process
    first.kill()
    first.wait()
    note("a call")  # finds nobody there, and starts another
    assert dog._process.pid != first.pid and dog._process.poll() is None
    print(dog._process.pid)
""")
    assert done.returncode == 0, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_nothing_runs_before_something_is_watched():
    dog = Watchdog()
    with dog.watching(1.0):
        pass
    assert dog._process is None


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_a_second_interrupt_is_heard_while_the_interpreter_is_held(signals):
    done = run(f"""
signal.signal(signal.SIGINT, lambda *_: None)
with dog.hearing(), dog.watching({60.0 if signals == 2 else 2.0}) as note:
    note("a call")
    for _ in range({signals}):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
    re.match("(a+)+b", "a" * 60)
""")
    assert done.returncode == -signal.SIGKILL
    assert done.stderr.startswith("jaxrl-llm: stopped: " if signals == 2 else "jaxrl-llm: error: ")
