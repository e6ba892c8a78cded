"""Environments with live instances: forks, resumes, the bound on instances, what differs."""

import copy
import dataclasses
import gc
import itertools
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rows import for_each

from jaxrl_llm.environments import Observation, Parsed, Replay
from jaxrl_llm.testing import check_env

OPEN: list["Counter"] = []  # instances that have not been closed
STARTED: list["Counter"] = []


class Counter:
    """Adds numbers up; ends at 10, is cut off below 0, and raises at "raise"."""

    def __init__(self, total):
        self.total, self.closed, self.lock = total, 0, threading.Lock()
        OPEN.append(self)
        STARTED.append(self)

    def step(self, action):
        assert self.lock.acquire(blocking=False), "two threads step one instance"
        try:
            self.total += int(action.text)
            seen = said(str(self.total))
            return seen._replace(reward=0.5, done=self.total >= 10, stopped=self.total < 0)
        finally:
            self.lock.release()

    def close(self):
        self.closed += 1
        OPEN.remove(self)


@dataclasses.dataclass(frozen=True)
class Counting(Replay):
    offset: int = 0

    def start(self, task, seed):
        counter = Counter(self.offset + seed + task.get("from", 0))
        return counter, said(str(counter.total))


def said(text):
    return Observation([{"role": "user", "content": text}])


def text_of(seen):
    return seen.messages[0]["content"]


def starting(start, **options):
    """An environment whose instances ``start()`` makes."""

    class Started(Replay):
        def start(self, task, seed):
            return start()

    return Started(**options)


@pytest.fixture(autouse=True)
def clean():
    OPEN.clear()
    STARTED.clear()
    yield
    if any(counter.closed != 1 for counter in STARTED):  # only then, as it takes a second
        gc.collect()
    assert all(counter.closed == 1 for counter in STARTED)


def test_obeys_the_laws_of_an_environment():
    check_env(Counting(), [{}, {"from": 2}], ["1", "3", "-9"])
    check_env(Counting(live=0), [{}], ["1", "4"])


def test_an_episode_uses_one_instance():
    env = Counting()
    state, seen = env.reset({}, 1)
    for text, total in (("2", "3"), ("3", "6")):
        state, seen = env.step(state, Parsed(text))
        assert text_of(seen) == total
    assert len(STARTED) == 1
    assert state.actions == (Parsed("2"), Parsed("3")) and (state.task, state.seed) == ({}, 1)


def test_forks_go_on_from_one_state_and_do_not_meet():
    env = Counting()
    state, _ = env.step(env.reset({}, 0)[0], Parsed("1"))
    ways = [env.step(state, Parsed(text)) for text in ("2", "3", "2")]
    assert [text_of(seen) for _, seen in ways] == ["3", "4", "3"]
    assert [text_of(env.step(s, Parsed("1"))[1]) for s, _ in ways] == ["4", "5", "4"]
    assert len(STARTED) == 3  # the first way took the instance, the others one each


def test_a_group_that_starts_at_once_starts_each_instance_once():
    env = Counting()
    states = [env.reset({}, 3)[0] for _ in range(4)]
    assert len(set(map(pickle.dumps, states))) == 1
    for state in states:
        env.step(state, Parsed("1"))
    assert len(STARTED) == 4


def test_resumes_in_another_process_as_it_were():
    env = Counting(offset=1)
    state, _ = env.step(env.reset({"from": 2}, 0)[0], Parsed("1"))
    restored, other = pickle.loads(pickle.dumps((state, env)))
    assert other == env and restored == state
    assert other.step(restored, Parsed("2"))[1] == env.step(state, Parsed("2"))[1]


def test_waiting_instances_are_bounded_and_the_oldest_is_closed():
    env = Counting(live=2)
    states = [env.reset({}, seed)[0] for seed in range(4)]
    assert [counter.total for counter in OPEN] == [2, 3]
    # An episode whose instance was closed goes on.
    _, seen = env.step(states[0], Parsed("1"))
    assert text_of(seen) == "1" and len(OPEN) == 2


@for_each("text", ["99", "-99"])
def test_an_ended_episode_closes_its_instance_and_is_not_stepped(text):
    env = Counting()
    state, seen = env.step(env.reset({}, 0)[0], Parsed(text))
    assert (seen.done, seen.stopped) == (text == "99", text == "-99")
    assert state.ended and not OPEN
    with pytest.raises(ValueError, match=r"Counting.step: the episode has ended after 1 actions\."):
        env.step(state, Parsed("1"))


def test_an_instance_that_raises_is_closed_and_the_state_goes_on():
    env = Counting()
    state, _ = env.reset({}, 0)
    with pytest.raises(ValueError, match="invalid literal"):
        env.step(state, Parsed("a word"))
    assert not OPEN
    assert text_of(env.step(state, Parsed("1"))[1]) == "1"


def test_an_environment_that_draws_elsewhere_is_reported():
    drawn, begin = itertools.count(), said("begin")

    class Unseeded(Counter):
        def step(self, action):
            self.total = next(drawn)
            return super().step(action)

    kinds = ((Counter, begin), (Counter, begin), (Unseeded, Observation([])), (Unseeded, begin))
    starts = ((kind(0), first) for kind, first in kinds)
    env = starting(lambda: next(starts), live=0)
    state, _ = env.step(env.reset({}, 0)[0], Parsed("1"))
    with pytest.raises(RuntimeError, match=r"seed 0 and .* led elsewhere at reset, to \[\]"):
        env.step(state, Parsed("1"))
    with pytest.raises(RuntimeError, match=r"after action 1 of 1, to .*'\d'"):
        next(drawn)
        env.step(state, Parsed("1"))


class Numbered(Counter):
    """Says how many were started before it, which no seed decides."""

    def __init__(self, broken=False):
        self.broken, self.number = broken, len(STARTED)
        super().__init__(0)

    def step(self, action):
        if self.broken:
            raise OSError("the server has closed the session")
        return Observation([{"role": "user", "content": f"number {self.number}"}])


def test_an_episode_never_goes_on_with_the_instance_of_another():
    def start():
        instance = Numbered()
        return instance, instance.step(Parsed(""))

    env, action = starting(start), Parsed("1")
    states = [env.reset({}, 0)[0] for _ in range(2)]
    states = [env.step(state, action)[0] for state in states]
    for number in (1, 0):
        _, seen = env.step(states[number], action)
        assert text_of(seen) == f"number {number}"
    assert len(STARTED) == 2


def test_of_several_waiting_instances_the_newest_goes_on():
    env = starting(lambda: (Numbered(broken=not STARTED), said("begin")))
    states = [env.reset({}, 0)[0] for _ in range(2)]
    assert states[0] == states[1]
    assert text_of(env.step(states[1], Parsed("1"))[1]) == "number 1"


class Costing(Counter):
    def truncation_reward(self, end, action):
        return -self.total - 10.0 * (end == "length") - (0 if action is None else int(action.text))


class Costs(Counting):
    def start(self, task, seed):
        instance = Costing(self.offset + seed)
        return instance, said(str(instance.total))


def wait_until_closed():
    """Instances that a limit ends close in threads of their own."""
    for _ in range(6000):
        if not OPEN:
            return
        time.sleep(0.01)
    raise AssertionError("an instance is open")


@pytest.mark.parametrize("live", [256, 0])
def test_a_limit_of_the_run_asks_the_instance_and_closes_it(live):
    env = Costs(live=live)
    state, _ = env.step(env.reset({}, 3)[0], Parsed("2"))
    for end, action, reward in (("turns", None, -5), ("length", Parsed("1"), -16)):
        assert env.truncation_reward(state, end, action) == reward
        wait_until_closed()
    assert text_of(env.step(state, Parsed("1"))[1]) == "6"
    # A state of another process goes on with a new instance.
    other = pickle.loads(pickle.dumps(env))
    assert other.truncation_reward(state, "context", None) == -5


def test_a_limit_of_the_run_closes_an_instance_that_says_nothing_of_it():
    env = Counting()
    state, _ = env.reset({}, 0)
    assert env.truncation_reward(state, "length", Parsed("1")) == 0
    wait_until_closed()
    assert len(STARTED) == 1
    assert env.truncation_reward(state, "length", Parsed("1")) == 0
    assert len(STARTED) == 1  # nobody waits, and a new one would say nothing either
    check_env(env, [{}], ["1"])


def test_close_waits_for_those_that_a_limit_ends():
    may_close = threading.Event()

    class Slow(Counter):
        def close(self):
            assert may_close.wait(60)
            super().close()

    env = starting(lambda: (Slow(0), said("0")))
    assert env.truncation_reward(env.reset({}, 0)[0], "turns", None) == 0
    assert OPEN  # it does not wait
    threading.Timer(0.05, may_close.set).start()
    env.close()
    assert not OPEN


def test_closes_with_the_environment_and_goes_on_after_close():
    env = Counting()
    state, _ = env.reset({}, 0)
    env.close()
    assert not OPEN
    env.step(state, Parsed("1"))
    assert len(OPEN) == 1
    del env
    if OPEN:
        gc.collect()
    assert not OPEN


def test_options_are_a_value():
    env = Counting(2, live=5)
    assert env == Counting(2, live=5) != Counting(3, live=5)
    assert repr(env) == "Counting(live=5, offset=2)" and hash(env) == hash(Counting(2, live=5))
    changed = dataclasses.replace(copy.deepcopy(env), offset=4)
    assert changed.reset({}, 0)[1].messages[0]["content"] == "4"
    with pytest.raises(ValueError, match="Counting: live must be at least 0, got -1"):
        Counting(live=-1)
    with pytest.raises(NotImplementedError, match="Replay.start"):
        Replay().reset({}, 0)


class Stuck(Counter):
    """A counter that cannot be closed."""

    def close(self):
        super().close()
        raise OSError("the server is gone")


def test_an_instance_that_cannot_be_closed_costs_no_episode():
    env = starting(lambda: (Stuck(0), said("begin")), live=1)
    _, seen = env.step(env.reset({}, 0)[0], Parsed("99"))
    assert (seen.done, seen.reward) == (True, 0.5)
    states = [env.reset({}, seed)[0] for seed in range(2)]  # the second closes the first
    assert [env.step(state, Parsed("1"))[1].done for state in states] == [False, False]
    env.close()
    assert not OPEN


def test_an_instance_whose_observation_cannot_be_read_is_closed():
    class Unreadable(Counter):
        def step(self, action):
            return super().step(action)._replace(reward="much")

    env = starting(lambda: (Unreadable(0), said("begin")))
    state, _ = env.reset({}, 0)
    with pytest.raises(ValueError, match="could not convert string to float"):
        env.step(state, Parsed("1"))
    assert not OPEN


def test_threads_step_episodes_of_one_environment():
    live, workers, most = 2, 4, []

    class Counted(Counting):
        def start(self, task, seed):
            started = super().start(task, seed)
            most.append(len(OPEN))
            return started

    env = Counted(live=live)

    def episode(seed):
        state, _ = env.reset({}, seed % 4)
        for _ in range(5):
            state, seen = env.step(state, Parsed("1"))
        return int(text_of(seen))

    with ThreadPoolExecutor(workers) as pool:
        totals = list(pool.map(episode, range(32)))
    assert totals == [seed % 4 + 5 for seed in range(32)]
    # Instances that wait, and one for each step under way.
    assert live < max(most) <= live + workers and len(OPEN) <= live
