"""Checks that an environment fulfills the contract of :class:`jaxrl_llm.environments.Env`."""

import asyncio
import contextvars
import inspect
import json
import numbers
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxrl_llm.environments import Env, Observation, Parsed, answered_by
from jaxrl_llm.environments.protocol import truncation_reward_of

_ROLES = ("tool", "user", "system")
_LARGEST = float(np.finfo(np.float32).max)


def check_env(
    env: Env,
    tasks: Iterable[Mapping[str, Any]],
    actions: Sequence[str | Parsed],
    *,
    seeds: Sequence[int] = (0, 1),
    turns: int = 8,
) -> None:
    """Raises AssertionError unless an environment keeps the contract that episodes rely on.

    - ``reset`` gives the same observation for the same task and seed, and a state from which the
      same actions lead to the same observations; the episode has not ended.
    - ``step`` does not change its arguments: a state can be stepped again, with the same or another
      action. A pickled copy of the state can be stepped too.
    - Messages contain text and have the role tool or user. ``reset`` may also use the role system.
    - Rewards and ``info`` are finite in float32, and names in ``info`` are texts; the reward of
      ``reset`` is 0. ``done`` and ``stopped`` are bool and not both True. ``state`` and ``instead``
      are texts or None; ``instead`` is None at ``reset``.
    - ``truncation_reward``, if there is one, returns the same finite number twice and does not
      change the state.
    - An episode that has ended stays ended: the reply that ended it, given again, raises ValueError
      or ends the episode too.
    - Tools have distinct names and a JSON schema of type "object".

    Args:
      env: The environment; its ``step`` and ``truncation_reward`` may be async.
      tasks: Rows to start episodes from.
      actions: Replies, as texts or parsed. An episode uses them in order, repeats them if it lasts
        longer, and also tries every other reply at each state. Only what they reach is checked,
        so they should reach each ending.
      seeds: Seeds for each row.
      turns: Largest number of turns of an episode.

    Raises:
      AssertionError: At the first violation; it names the task, the seed and the turn.
      ValueError: If there is no action or no task.

    Example:
      >>> import jaxrl_llm as jr
      >>> env = jr.environments.NumberGuess()
      >>> jr.testing.check_env(env, [{"text": "play"}], ["4", "no idea"])
    """
    tasks, replies = list(tasks), [a if isinstance(a, Parsed) else Parsed(a) for a in actions]
    if not tasks or not replies:
        raise ValueError("check_env: tasks and actions must not be empty.")
    names = [tool.name for tool in env.tools]
    _expect(len(set(names)) == len(names), "tools", f"two have one name: {names}")
    for tool in env.tools:
        try:
            kind = json.loads(json.dumps(dict(tool.parameters))).get("type")
        except (TypeError, ValueError) as error:
            kind = f"none: {error}"
        _expect(kind == "object", "tools", f"the schema of {tool.name!r} has type {kind!r}")
    for i, task in enumerate(tasks):
        for seed in seeds:
            _check_episode(env, task, seed, replies, turns, f"task {i}, seed {seed}")


def _check_episode(env: Env, task, seed: int, replies: list[Parsed], turns: int, place: str):
    state, first = env.reset(task, seed)
    _check_observation(first, f"{place}, reset", reset=True)
    twin, again = env.reset(task, seed)
    _expect(_same(first, again), f"{place}, reset", "a second reset to this task and seed differs")
    for k in range(turns):
        action, where = replies[k % len(replies)], f"{place}, turn {k}"
        try:
            copy = pickle.dumps(state)
        except Exception as error:
            raise AssertionError(
                f"check_env: {where}: the state cannot be pickled: {error}"
            ) from error
        after, seen = _step(env, state, action)
        _check_observation(seen, where, reset=False)
        for other in replies:
            what = f"{where}, reply {other.text!r}"
            last, result = _step(env, state, other)
            _check_observation(result, what, reset=False)
            if result.done or result.stopped:
                _check_ended(env, last, other, what)
        _expect(
            _same(seen, _step(env, state, action)[1]),
            where,
            "a second step with the same state and action differs: step changes its argument, or "
            "something outside of the state",
        )
        _expect(
            _same(seen, _step(env, pickle.loads(copy), action)[1]),
            where,
            "a step from a pickled copy of the state differs",
        )
        twin, other = _step(env, twin, action)
        _expect(
            _same(seen, other),
            where,
            "a second reset to this task and seed leads elsewhere: reset depends on more than task "
            "and seed",
        )
        # Behind the steps: it ends the live instances of Replay that they compare with others.
        for end in ("length", "context", "turns") if k else ("length",):
            unfinished = action._replace(complete=False) if end == "length" else None
            _check_limit(env, state, end, unfinished, copy, f"{where}, {end}")
        state = after
        if seen.done or seen.stopped:
            return


def _check_ended(env: Env, state: Any, reply: Parsed, place: str) -> None:
    """Checks that the reply which ended an episode does not go on from its last state."""
    try:
        _, seen = _step(env, state, reply)
    except ValueError:  # a refusal of the step
        return
    _expect(
        seen.done or seen.stopped,
        place,
        "the episode has ended, but the same step from its last state goes on; it must return "
        "done or stopped again, or raise ValueError",
    )


def _check_limit(
    env: Env, state: Any, end: str, action: Parsed | None, copy: bytes, place: str
) -> None:
    """Checks what an episode earns that a limit of the run ends at a state, pickled as a copy."""
    method = truncation_reward_of(env)
    if method is None:
        return
    with answered_by(None):  # no subagent answers there
        reward, again = (_in_thread(lambda: method(state, end, action)) for _ in range(2))
    _check_number("truncation_reward", reward, place)
    _expect(pickle.dumps(state) == copy, place, "truncation_reward changes its state")
    _expect(reward == again, place, "a second truncation_reward of the same state differs")


def _check_number(name: str, value: Any, place: str) -> None:
    finite = isinstance(value, numbers.Real) and abs(float(value)) <= _LARGEST
    _expect(finite, place, f"{name} is {value!r}, not a finite number")


def _check_observation(observation: Observation, place: str, *, reset: bool) -> None:
    """Checks one observation from ``reset`` or ``step``."""
    kind = type(observation).__name__
    _expect(isinstance(observation, Observation), place, f"it gave a {kind}, not an Observation")
    roles = _ROLES if reset else _ROLES[:2]
    for message in observation.messages:
        role, content = message.get("role"), message.get("content")
        _expect(role in roles, place, f"a message has the role {role!r}, not one of {roles}")
        _expect(isinstance(content, str), place, f"a message's content is {content!r}, not a text")
    ended = (observation.done, observation.stopped)
    _expect(
        all(isinstance(x, bool) for x in ended), place, f"done and stopped are {ended}, not bool"
    )
    _expect(ended != (True, True), place, "an episode is both done and stopped")
    if reset:
        _expect(ended == (False, False), place, "an episode has ended before its first turn")
        _expect(observation.reward == 0, place, f"reset earns {observation.reward!r}")
    elif not any(ended):
        _expect(bool(observation.messages), place, "an episode goes on without a message")
    for name in observation.info:
        _expect(isinstance(name, str), place, f"info has the name {name!r}, not a text")
    for name, value in (("reward", observation.reward), *observation.info.items()):
        _check_number(name, value, place)
    other = observation.instead
    _expect(
        other is None or (isinstance(other, str) and not reset),
        place,
        f"instead is {other!r}, which is no text in place of an action",
    )
    name = observation.state
    _expect(name is None or isinstance(name, str), place, f"state is {name!r}, not a text or None")


def _step(env: Env, state: Any, action: Parsed) -> tuple[Any, Observation]:
    return _in_thread(lambda: env.step(state, action))


def _in_thread(call: Callable[[], Any]) -> Any:
    """Calls in a thread of its own, as episodes do: a notebook's has a loop that runs."""

    def resolved():
        result = call()
        if not inspect.isawaitable(result):
            return result

        async def resolve():
            return await result

        return asyncio.run(resolve())

    with ThreadPoolExecutor(1) as thread:
        # With the context variables of the caller, such as the subagent of answered_by.
        return thread.submit(contextvars.copy_context().run, resolved).result()


def _same(a: Observation, b: Observation) -> bool:
    return a._replace(messages=list(a.messages)) == b._replace(messages=list(b.messages))


def _expect(law: bool, place: str, message: str) -> None:
    if not law:
        raise AssertionError(f"check_env: {place}: {message}.")
