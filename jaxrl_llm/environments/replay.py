"""Environments whose state lives outside of Python: in a game's interpreter, a server, a simulator.

The state of an episode is its history: task, seed, and the actions so far, with what a subagent
answered. A step goes to the live instance at that state; if there is none, after a fork or a
resume, a new instance is started from task and seed, replays the actions, whose questions get the
same answers, and must observe the same observations::

    class Countdown(Replay):
        def start(self, task, seed):
            instance = connect(seed)                    # has step(action) and close()
            return instance, Observation([{"role": "user", "content": instance.text}])
"""

import contextlib
import hashlib
import inspect
import json
import pickle
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.data.messages import Parsed, ToolSpec
from jaxrl_llm.environments.asking import Answer, recorded
from jaxrl_llm.environments.protocol import Observation

# Seconds that a call waits until its instance is closed, and ``close`` for all that close slowly.
_MOMENT, _LAST_SECONDS = 0.1, 10.0


class Instance(Protocol):
    """A live instance of an environment, at one state of one episode.

    Its class may have ``truncation_reward(end, action) -> float``, which is not async; see
    :class:`jaxrl_llm.environments.Env`.
    """

    def step(self, action: Parsed) -> Observation:
        """Takes an action; the instance has changed."""
        ...

    def close(self) -> None:
        """Ends it; called once."""
        ...


class ReplayState(NamedTuple):
    """The state of a :class:`Replay`: the history of the episode.

    Attributes:
      task: The row of the data set.
      seed: Seed of the episode.
      actions: The actions so far.
      seen: A fingerprint of the observation of ``reset``, then of each action's.
      ended: Whether the last observation was done or stopped.
      answers: What the subagent answered to the questions of the actions, in order; see
        :func:`jaxrl_llm.environments.ask`.
    """

    task: Mapping[str, Any]
    seed: int
    actions: tuple[Parsed, ...]
    seen: tuple[str, ...]
    ended: bool
    answers: tuple[Answer, ...] = ()


@dataclass(frozen=True)
class Replay:
    """The base of environments with live instances: a subclass writes ``start``.

    Threads may step different episodes at once.

    Attributes:
      live: Maximum number of instances that wait for their next action. Those that waited longest
        are closed first; their episodes continue with new instances, which replay all actions. With
        at least as many as there are parallel episodes, nothing is replayed.

    Raises:
      ValueError: If ``live`` is below 0, or an episode that has ended is stepped.
      RuntimeError: If replayed actions lead to a different observation.

    Example:
      >>> from jaxrl_llm.environments import Observation, Parsed, Replay
      >>> class Counter:
      ...     total = 0
      ...     def step(self, action):
      ...         self.total += int(action.text)
      ...         message = {"role": "user", "content": str(self.total)}
      ...         return Observation([message], done=self.total >= 3)
      ...     def close(self):
      ...         pass
      >>> class Counting(Replay):
      ...     def start(self, task, seed):
      ...         return Counter(), Observation([{"role": "user", "content": "count to 3"}])
      >>> env = Counting()
      >>> state, _ = env.reset({}, seed=0)
      >>> state, _ = env.step(state, Parsed("1"))
      >>> for text in "12":  # two ways on from one state
      ...     _, observation = env.step(state, Parsed(text))
      ...     print(observation.messages[0]["content"], observation.done)
      2 False
      3 True
    """

    live: int = field(default=256, kw_only=True)

    def __post_init__(self):
        if self.live < 0:
            raise ValueError(f"{self._name}: live must be at least 0, got {self.live}.")
        waiting = _Waiting(self.live)
        object.__setattr__(self, "_waiting", waiting)
        # Runs when the environment is collected and when Python ends.
        object.__setattr__(self, "_finalizer", weakref.finalize(self, waiting.close))

    def __getstate__(self):
        hidden = ("_waiting", "_finalizer")
        return {name: value for name, value in vars(self).items() if name not in hidden}

    def __setstate__(self, fields):
        vars(self).update(fields)
        Replay.__post_init__(self)

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """What the policy may call."""
        return ()

    @property
    def _instances(self) -> "_Waiting":
        return vars(self)["_waiting"]  # no field: what is no option is neither compared nor printed

    @property
    def _name(self) -> str:
        return type(self).__name__

    def start(self, task: Mapping[str, Any], seed: int) -> tuple[Instance, Observation]:
        """A new instance at the beginning of an episode; a function of only task and seed.

        It asks no subagent: only the answers to questions of actions are kept.
        """
        raise NotImplementedError(f"{self._name}.start: to be written by the subclass.")

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[ReplayState, Observation]:
        """The first state of an episode."""
        instance, observation = self.start(task, seed)
        return self._after(ReplayState(task, seed, (), (), False), instance, observation)

    def step(self, state: ReplayState, action: Parsed) -> tuple[ReplayState, Observation]:
        """The state after an action; ``state`` is what it was."""
        if state.ended:
            raise ValueError(
                f"{self._name}.step: the episode has ended after {len(state.actions)} actions."
            )
        instance = self._instances.take(_key(state)) or self._restart(state)
        with _closed_on_error(instance), recorded() as answers:
            observation = instance.step(action)
        state = state._replace(actions=(*state.actions, action), answers=(*state.answers, *answers))
        return self._after(state, instance, observation)

    def truncation_reward(self, state: ReplayState, end: str, action: Parsed | None) -> float:
        """What the instance earns at a limit of the run, 0 without its method; it is closed."""
        instance: Any = self._instances.take(_key(state))
        if instance is None:
            if self._instances.any_rewards is False:
                return 0.0
            instance = self._restart(state)
        try:
            if not _has_truncation_reward(instance):
                return 0.0
            reward = instance.truncation_reward(end, action)
            if inspect.isawaitable(reward):
                if inspect.iscoroutine(reward):
                    reward.close()  # else Python warns that nobody awaited it
                raise TypeError(
                    f"{self._name}: truncation_reward of {type(instance).__name__} is async; an "
                    "instance's must return a number."
                )
            return reward
        finally:
            self._instances.end(instance)

    def close(self) -> None:
        """Closes the waiting instances. Every state can continue, with new instances."""
        self._instances.close()

    def _after(self, state, instance, observation) -> tuple[ReplayState, Observation]:
        """The state after an observation, at which the instance waits unless that was the last."""
        with _closed_on_error(instance):
            after = state._replace(
                seen=(*state.seen, _fingerprint(observation)),
                ended=observation.done or observation.stopped,
            )
            key = _key(after)
        if after.ended:
            _close(instance)
        else:
            self._instances.put(key, instance)
        return after, observation

    def _restart(self, state: ReplayState) -> Instance:
        """A fresh instance that has taken the actions of a state."""
        instance, observation = self.start(state.task, state.seed)
        with _closed_on_error(instance), recorded(state.answers):
            for k, expected in enumerate(state.seen):
                if k:
                    observation = instance.step(state.actions[k - 1])
                if _fingerprint(observation) != expected:
                    after = f"after action {k} of {len(state.actions)}" if k else "at reset"
                    raise RuntimeError(
                        f"{self._name}: seed {state.seed} and the same actions led elsewhere "
                        f"{after}, to {list(observation.messages)!r}; the environment depends on "
                        "more than task, seed, actions and the answers of a subagent."
                    )
        return instance


class _Waiting:
    """Instances by the state at which they stand, the longest wait first; several may share one.

    ``any_rewards`` is whether a class of the instances so far has ``truncation_reward``; None
    before the first instance.
    """

    def __init__(self, most: int):
        self._most, self._lock = most, threading.Lock()
        self.any_rewards: bool | None = None
        self._waiting: list[tuple[bytes, Instance]] = []
        self._ending: list[threading.Thread] = []

    def take(self, key: bytes) -> Instance | None:
        """The one that waits shortest: the world outside may have ended an older one."""
        with self._lock:
            for i in reversed(range(len(self._waiting))):
                if self._waiting[i][0] == key:
                    return self._waiting.pop(i)[1]
        return None

    def put(self, key: bytes, instance: Instance) -> None:
        with self._lock:
            self.any_rewards = self.any_rewards or _has_truncation_reward(instance)
            self._waiting.append((key, instance))
            excess = len(self._waiting) - self._most
            closing = [self._waiting.pop(0) for _ in range(excess)]
        for _, old in closing:
            _close(old)

    def end(self, instance: Instance) -> None:
        """Closes an instance whose reward is known: a slow end must not cost it by a deadline."""
        thread = threading.Thread(target=_close, args=(instance,), daemon=True)
        thread.start()
        thread.join(_MOMENT)  # most end at once, and a server counts those that are open
        with self._lock:
            self._ending = [each for each in (*self._ending, thread) if each.is_alive()]

    def close(self) -> None:
        with self._lock:
            closing, self._waiting = self._waiting, []
            ending, self._ending = self._ending, []
        for _, instance in closing:
            _close(instance)
        until = time.monotonic() + _LAST_SECONDS
        for thread in ending:
            thread.join(max(0.0, until - time.monotonic()))


@contextlib.contextmanager
def _closed_on_error(instance: Instance):
    try:
        yield
    except BaseException:
        _close(instance)
        raise


def _close(instance: Instance) -> None:
    # Its episode has its rewards, or an error of its own, or goes on with another instance.
    with contextlib.suppress(Exception):
        instance.close()


def _has_truncation_reward(instance: Any) -> bool:
    # Of its class: an instance may pass any name on to a server.
    return hasattr(type(instance), "truncation_reward")


def _key(state: ReplayState) -> bytes:
    # With what was seen: randomness that the seed does not control tells instances apart.
    return pickle.dumps((state.task, state.seed, state.actions, state.seen, state.answers))


def _fingerprint(observation: Observation) -> str:
    messages = [dict(message) for message in observation.messages]
    values = (messages, float(observation.reward), observation.done, observation.stopped)
    return hashlib.sha256(json.dumps(values, default=repr).encode()).hexdigest()[:16]
