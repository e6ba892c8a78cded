"""The threads that step environments, and what they tell the watchdog."""

import contextlib
import queue
import threading

from jaxrl_llm.rollout.workers import DeadlineError, Workers

FAR = 60.0  # seconds


class Recorder:
    """A watchdog that only writes down what it is told: texts, and None where all is over."""

    def __init__(self):
        self.seconds, self.notes = 0.0, []

    @contextlib.contextmanager
    def watching(self, seconds):
        self.seconds = seconds
        yield self.notes.append
        self.notes.append(None)


def test_a_call_is_told_before_it_begins_and_that_nothing_is_under_way_after_it():
    watch = Recorder()
    workers = Workers(2, FAR, watch)
    told = workers.run("step of a", lambda: list(watch.notes)).result(FAR)
    workers.run("step of b", lambda: None).result(FAR)
    workers.close()
    notes = list(dict.fromkeys(watch.notes))
    assert told == ["step of a holds the interpreter"]
    assert notes == [*told, None, "step of b holds the interpreter"] and watch.notes[-1] is None
    assert watch.seconds == FAR + 30.0


def test_of_several_calls_the_last_to_begin_is_named_and_the_others_are_counted():
    watch, begun, end = Recorder(), threading.Event(), threading.Event()
    workers = Workers(2, FAR, watch)
    first = workers.run("step of a", lambda: (begun.set(), end.wait(FAR)))
    assert begun.wait(FAR)
    told = workers.run("step of b", lambda: watch.notes[-1]).result(FAR)
    end.set()
    first.result(FAR)
    workers.close()
    assert told == "step of b, or one of 1 other calls under way, holds the interpreter"


def test_a_call_that_was_given_up_is_watched_no_longer():
    watch, end = Recorder(), threading.Event()
    workers = Workers(1, 0.1, watch)
    late = workers.run("step of a", lambda: end.wait(FAR)).result(FAR)
    assert isinstance(late, DeadlineError) and watch.notes[-1] is None
    assert workers.run("step of b", lambda: 1).result(FAR) == 1
    end.set()
    workers.close()


def test_what_is_under_way_when_they_close_is_watched_no_longer():
    watch, begun, end = Recorder(), threading.Event(), threading.Event()
    workers = Workers(1, FAR, watch)
    call = workers.run("step of a", lambda: (begun.set(), end.wait(FAR)))
    assert begun.wait(FAR)
    workers.close()
    assert watch.notes[-1] is None
    end.set()
    call.result(FAR)
    assert watch.notes.count(None) == 1


def test_calls_that_wait_when_they_close_never_begin():
    end, ran, threads = threading.Event(), [], queue.SimpleQueue()
    workers = Workers(1, FAR)
    workers.run("step of a", lambda: (threads.put(threading.current_thread()), end.wait(FAR)))
    waiting = workers.run("step of b", lambda: ran.append("b"))
    thread = threads.get(timeout=FAR)
    workers.close()
    end.set()
    thread.join(FAR)
    assert waiting.cancelled() and not ran
