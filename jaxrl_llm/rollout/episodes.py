"""Episodes: environments played in the slots of an engine.

    prompt   reset(task, seed) -> messages -> tokens
    turn     sampled tokens -> parsed -> step(state, action) -> messages -> tokens, ...

The tokens of an episode are the sampled tokens and, between them, those of the observations.
Sampled tokens train exactly as they were sampled. If the chat template later rewrites earlier turns
(for example drops their reasoning), or the environment replaces the text of a turn, the response
continues from the last common token: it is a tree of tokens, in which later tokens do not read the
abandoned ones (``Rollout.ends``).

Environments step in threads while other episodes decode; a step that raises or exceeds its deadline
ends only its own episode.

An episode ends with one of :data:`ENDS`: "done" by the environment; "stopped" if the environment
cut it off; "length" in the middle of a turn that reached the maximum length; "context" if no tokens
are left for the next observation and a reply; "turns" after the maximum number of turns;
"env_error" and "env_timeout" if the environment failed: such an episode has no reward.

At "length", "context" and "turns", which are limits of the run, the last turn also earns what
``truncation_reward`` of the environment returns, if it has that method.
"""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.reasoning import reasoning_end
from jaxrl_llm.core.runtime.watchdog import Watchdog
from jaxrl_llm.curation.collectors.protocol import Response, TurnStart
from jaxrl_llm.data.messages import Message, Parsed
from jaxrl_llm.environments.asking import SubagentError, answered_by
from jaxrl_llm.environments.protocol import Env, Observation, truncation_reward_of
from jaxrl_llm.rewards.scoring import Scores
from jaxrl_llm.rollout.engine.requests import Completion, NextTurn, slice_tokens
from jaxrl_llm.rollout.slots import Tokens
from jaxrl_llm.rollout.subagent import CallRecord, SubagentPlayer
from jaxrl_llm.rollout.types import CANCELLED, LENGTH, STOP
from jaxrl_llm.rollout.workers import DeadlineError, Workers

ENDS = ("done", "stopped", "length", "context", "turns", "env_error", "env_timeout")
_LIMITS = ("length", "context", "turns")  # of the run, not of the environment
_FAILED = ("env_error", "env_timeout")
# The name under which the details of scores hold episodes.
EPISODES = "episodes"
# Of a reward: batches are in float32.
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class EpisodeOptions:
    """Settings of episodes.

    Attributes:
      max_turns: Maximum number of turns of the policy.
      turn_tokens: Maximum tokens of a turn; a turn that reaches it ends there, and the environment
        sees that it is incomplete. None for only the limit of the episode.
      seconds: Deadline of one ``reset``, ``step`` or ``truncation_reward``.
      workers: Number of environments that step at one time.
    """

    max_turns: int = 16
    turn_tokens: int | None = None
    seconds: float = 30.0
    workers: int = 16

    def __post_init__(self):
        checks.check_numbers("episodes", self)
        checks.check_positive("episodes", max_turns=self.max_turns, turn_tokens=self.turn_tokens)
        checks.check_positive("episodes", workers=self.workers)
        checks.check_seconds("episodes", seconds=self.seconds)


class Turn(NamedTuple):
    """A turn of the policy.

    Attributes:
      tokens: Number of sampled tokens.
      text: The tokens as text.
      reward: The environment's reward for it.
      state: Name of the state that the policy saw before it.
      next_state: Name of the next state.
      info: The environment's numbers for it, by name.
      calls: Questions that the environment asked the subagent in this turn.
      reasoning: The reasoning in its text, as the renderer parses it.
    """

    tokens: int
    text: str
    reward: float = 0.0
    state: str = ""
    next_state: str = ""
    info: Mapping[str, float] = {}
    calls: tuple[CallRecord, ...] = ()
    reasoning: str = ""


class Episode(NamedTuple):
    """An episode that has ended.

    Attributes:
      turns: Turns of the policy.
      end: One of :data:`ENDS`.
      error: The failure; empty if there was none.
    """

    turns: tuple[Turn, ...]
    end: str
    error: str = ""

    @property
    def reward(self) -> float:
        """The sum of the rewards of its turns."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def failed(self) -> bool:
        """Whether the environment failed, so that it has no reward."""
        return self.end in _FAILED

    @property
    def finish(self) -> int:
        """As of a response: STOP, LENGTH or CANCELLED."""
        if self.end == "done":
            return STOP
        return CANCELLED if self.failed else LENGTH


def stored_episode(
    response: Response,
    decode: Callable[[list[int]], str],
    parse: Callable[[list[int]], Parsed],
) -> Episode:
    """The episode of a complete response of an earlier batch, whose reward is of its last turn.

    A turn is a stretch of tokens that train, between observations; the states of the environment
    and its answers to a turn are not stored.

    Example:
      >>> import numpy as np
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.rollout.episodes import stored_episode
      >>> tokenizer, trains = jr.testing.ByteTokenizer(), np.array([True, True, False, True])
      >>> response = jr.curation.Response(np.array([72, 105, 32, 33]), trains=trains, reward=1.0)
      >>> parse = jr.data.make_renderer(tokenizer).parse
      >>> episode = stored_episode(response, tokenizer.decode, parse)
      >>> [(turn.text, turn.reward) for turn in episode.turns], episode.end
      ([('Hi', 0.0), ('!', 1.0)], 'done')
    """
    tokens, trains = np.asarray(response.tokens), np.asarray(response.trains, np.int8)
    edges = np.flatnonzero(np.diff(trains, prepend=0, append=0)).reshape(-1, 2)
    spans = [tokens[first:end].tolist() for first, end in edges]
    turns = [Turn(len(x), decode(x), reasoning=parse(x).reasoning) for x in spans]
    if not turns:
        raise ValueError("stored_episode: no token of the response trains, so it has no turn.")
    turns[-1] = turns[-1]._replace(reward=float(response.reward or 0.0))
    return Episode(tuple(turns), "done" if response.finish == STOP else "stopped")


class Start(NamedTuple):
    """The beginning of the episodes of a group: state, what the policy sees, and its tokens."""

    state: Any
    name: str
    prompt: tuple[int, ...]
    messages: tuple[Message, ...]


class _Left(NamedTuple):
    """Tokens that the later tokens do not read: their places, and where the later ones begin."""

    places: np.ndarray
    out: Tokens
    end: int


class _Point(NamedTuple):
    """Where a turn of an episode begins: the state, and what was before it."""

    state: Any
    name: str
    prompt: tuple[int, ...]
    messages: tuple[Message, ...]
    turns: tuple[Turn, ...] = ()
    sampled: tuple[np.ndarray, ...] = ()
    starts: tuple[TurnStart, ...] = ()
    places: tuple[int, ...] = ()
    left: tuple[_Left, ...] = ()


class _Play:
    """An episode under way from a point on: the state, and which of its tokens were sampled.

    ``read`` are the tokens that the policy reads, at ``places``; those of ``left`` are read no
    more.
    """

    def __init__(self, point: _Point, read: np.ndarray):
        self.state, self.name = point.state, point.name
        self.prompt, self.messages = point.prompt, list(point.messages)
        self.turns, self.sampled = list(point.turns), list(point.sampled)
        self.starts, self.length = list(point.starts), sum(map(len, point.sampled))
        if point.turns:  # a branch, whose point has the starts before its own
            self.starts.append(TurnStart(self.length, point))
        self.places, self.left, self.read = list(point.places), list(point.left), read
        self.end: str | None = None
        self.error = ""

    def point(self) -> _Point:
        """Here, where a turn begins."""
        return _Point(
            self.state,
            self.name,
            self.prompt,
            tuple(self.messages),
            tuple(self.turns),
            tuple(self.sampled),
            tuple(self.starts),
            tuple(self.places),
            tuple(self.left),
        )

    def goes_on(self, tokens: np.ndarray) -> bool:
        """Whether the tokens of a response are those that the policy has read, and another turn."""
        n = len(self.read)
        return self.end is None and len(tokens) > n and np.array_equal(tokens[:n], self.read)

    def add(self, count: int, *, sampled: bool) -> None:
        """Tokens that come after those that the policy reads."""
        self.sampled.append(np.full(count, sampled))
        self.places += range(self.length, self.length + count)
        self.length += count

    def cut(self, keep: int, out: Tokens) -> None:
        """Drops from the context what comes after its first ``keep`` tokens."""
        if keep < len(self.places):
            lost = slice_tokens(out, keep, len(self.places))
            self.left.append(_Left(np.array(self.places[keep:]), lost, self.length))
            del self.places[keep:]

    def tokens(self, out: Tokens) -> tuple[Tokens, np.ndarray | None]:
        """All tokens in the order of time, from those that the policy reads, and their ends."""
        if not self.left:
            return out, None
        ends = np.full(self.length, self.length, np.int32)
        pieces = [(np.array(self.places), out)]
        for each in self.left:
            ends[each.places] = each.end
            pieces.append((each.places, each.out))

        def join(*arrays: np.ndarray) -> np.ndarray:
            joined = np.zeros((self.length, *arrays[0].shape[1:]), arrays[0].dtype)
            for (places, _), part in zip(pieces, arrays, strict=True):
                joined[places] = part
            return joined

        return jax.tree.map(join, *(piece for _, piece in pieces)), ends


class Taken(NamedTuple):
    """An episode that has ended, and its response in the order of time.

    Attributes:
      episode: The episode.
      out: Its tokens.
      sampled: bool ``[t]``, which of them the policy sampled.
      ends: int32 ``[t]``, see ``Rollout.ends``; None where nothing was rewritten.
      starts: Where its turns begin, but the first.
    """

    episode: Episode
    out: Tokens
    sampled: np.ndarray
    ends: np.ndarray | None
    starts: tuple[TurnStart, ...]


class Episodes:
    """Plays the episodes of a batch.

    Args:
      env: The environment.
      renderer: From ``data.make_renderer``.
      decode: Text of token ids.
      seed: Integers that identify the run and the batch: with the index of the task they seed its
        episodes, equally for all rollouts of a group.
      max_new_tokens: Maximum length of an episode, including observations.
      options: See :class:`EpisodeOptions`.
      watch: Ends the process if a call of the environment holds the interpreter.
      subagent: Answers what the environment asks; None where nobody does.
      no_rewrites: Why the run cannot train on turns that are rewritten later; the error quotes it.
        Empty if it can.
    """

    def __init__(
        self,
        env: Env,
        renderer: Any,
        *,
        decode: Callable[[list[int]], str],
        seed: Sequence[int],
        max_new_tokens: int,
        options: EpisodeOptions = EpisodeOptions(),  # noqa: B008 (frozen)
        watch: Watchdog | None = None,
        subagent: SubagentPlayer | None = None,
        no_rewrites: str = "",
    ):
        self._env, self._renderer, self._decode = env, renderer, decode
        self._subagent, self._no_rewrites = subagent, no_rewrites
        self._seed, self._most, self.options = tuple(seed), max_new_tokens, options
        self._workers = Workers(options.workers, options.seconds, watch)
        self._starts: dict[int, Start] = {}
        self._names: dict[int, str] = {}
        self._plays: dict[int, _Play] = {}
        self._begins: dict[int, tuple[_Point, np.ndarray]] = {}
        self._most_turns: dict[int, int] = {}

    @property
    def turn_tokens(self) -> int | None:
        """The most tokens of a turn."""
        return self.options.turn_tokens

    def start(self, place: int, task: Mapping[str, Any], name: str) -> Start:
        """The beginning of the episodes of a task; each task is reset once.

        Args:
          place: Of the task in the data set.
          task: Its row.
          name: What errors call it.

        Raises:
          RuntimeError: If the environment fails.
        """
        if place not in self._starts:
            seed = int(np.random.SeedSequence((*self._seed, place)).generate_state(1)[0])
            self._names[place] = name
            what = self._what("reset", place)
            done = self._workers.run(what, lambda: _await(self._env.reset(task, seed))).result()
            if isinstance(done, BaseException):
                raise RuntimeError(
                    f"environment: reset of prompt {name} failed: {_said(done).rstrip('.')}."
                ) from done
            if wrong := _wrong(done):
                raise RuntimeError(f"environment: reset of prompt {name} gives {wrong}.")
            state, observation = done
            if observation.done or observation.stopped:
                raise RuntimeError(f"environment: prompt {name} has ended before its first turn.")
            try:
                prompt = self._renderer.prompt(observation.messages, tuple(self._env.tools))
            except Exception as error:  # a text that the tokenizer or the template refuses
                raise RuntimeError(
                    f"environment: the first observation of prompt {name} cannot be read: "
                    f"{_said(error)}."
                ) from error
            messages = tuple(observation.messages)
            self._starts[place] = Start(state, _name(observation), tuple(prompt), messages)
        return self._starts[place]

    def prompt(self, place: int, task: Mapping[str, Any], name: str, room: int) -> tuple[int, ...]:
        """The tokens with which the episodes of a task begin; see :meth:`start`.

        Raises:
          RuntimeError: If the environment fails.
          ValueError: If they are more than ``room``.
        """
        prompt = self.start(place, task, name).prompt
        if len(prompt) > room:
            raise ValueError(
                f"environment: the first observation of prompt {name} has {len(prompt)} tokens, "
                f"but prompts have room for {room}; increase sampling.prompt_length."
            )
        return prompt

    def stored(self, response: Response) -> Episode:
        """The episode of a complete response of an earlier batch."""
        return stored_episode(response, self._decode, self._renderer.parse)

    def follow(self, place: int) -> Callable[[Completion], Future]:
        """What a generation asks after each turn of the responses to a task that has started.

        A response that does not continue the tokens of its episode begins the episode again. The
        future raises ValueError if the response has earlier turns that the episode has not played,
        or if its past is rewritten although there is a reason against it.
        """

        def follow(completion: Completion) -> Future:
            play = self._plays.get(completion.request)
            if play is None or not play.goes_on(completion.tokens):  # it begins, or begins again
                start = self._starts[place]
                first = _Point(start.state, start.name, start.prompt, start.messages)
                begin = self._begins.get(completion.request, (first, np.zeros(0, np.int32)))
                play = self._plays[completion.request] = _Play(*begin)
            if (completion.out.version[len(play.read) :] < 0).any():
                failed: Future = Future()
                failed.set_exception(
                    ValueError(
                        "Episodes: the environment did not play the earlier turns of request "
                        f"{completion.request}; an episode can be forked only in its first turn."
                    )
                )
                return failed
            return self._after_turn(play, completion, place)

        return follow

    def _what(self, call: str, place: int) -> str:
        return f"{type(self._env).__name__}.{call} of prompt {self._names[place]}"

    def limit(self, request: int, turns: int) -> None:
        """Ends the episode of a request after so many turns, if that is fewer than the run's."""
        self._most_turns[request] = min(turns, self.options.max_turns)

    def begin(self, request: int, response: Response) -> np.ndarray:
        """An episode that goes on where a turn of another one begins.

        Returns:
          The places of the tokens of the response that the policy reads.

        Raises:
          ValueError: If no turn begins behind the tokens of the response.
        """
        n = len(response.tokens)
        starts = [start for start in response.turn_starts or () if start.length == n]
        if not starts:
            raise ValueError(
                f"a collector asks for an episode that goes on after {n} tokens of another one, "
                "where no turn begins."
            )
        places = np.array(starts[0].play.places, int)
        self._begins[request] = starts[0].play, np.asarray(response.tokens)[places]
        return places

    def _after_turn(self, play: _Play, completion: Completion, place: int) -> Future:
        tokens = completion.tokens[len(play.read) :].tolist()
        play.read = completion.tokens
        play.add(len(tokens), sampled=True)
        text, stopped = self._decode(tokens), completion.finish == STOP
        action, request = self._renderer.parse(tokens), completion.request
        turn = Turn(
            len(tokens), text, state=play.name, next_state=play.name, reasoning=action.reasoning
        )
        following: Future = Future()
        if not stopped and play.length >= self._most:
            play.turns.append(turn)
            play.end = "length"
            self._end_at_limit(play, place, following, action)
            return following
        what = self._what("step", place)

        def enter(result: Any) -> None:
            calls: tuple[CallRecord, ...] = ()
            if not isinstance(result, BaseException):
                result, calls = result
            entered = self._enter(play, completion, tokens, turn._replace(calls=calls), result)
            if self._no_rewrites and entered and entered.keep != len(completion):
                raise ValueError(
                    f"environment: after {what} the chat template, or Observation.instead, "
                    f"rewrites earlier turns, but {self._no_rewrites}."
                )
            if play.end in _LIMITS:
                self._end_at_limit(play, place, following, None)
            else:
                following.set_result(entered)

        self._run(what, lambda: self._step(play, request, action), enter, following)
        return following

    def _end_at_limit(
        self, play: _Play, place: int, following: Future, action: Parsed | None
    ) -> None:
        """Resolves ``following`` with None, once the last turn has what this end earns."""
        method = truncation_reward_of(self._env)
        if method is None:
            following.set_result(None)
            return
        state, end, what = play.state, play.end, self._what("truncation_reward", place)

        def call() -> Any:
            with answered_by(_refuse):
                return _await(method(state, end, action))

        def enter(result: Any) -> None:
            failed, last = isinstance(result, BaseException), play.turns[-1]
            wrong = _said(result) if failed else _wrong_number(result)
            if wrong or (wrong := _wrong_number(last.reward + float(result))):
                play.end = "env_timeout" if isinstance(result, DeadlineError) else "env_error"
                play.error = f"truncation_reward failed: {wrong}"
            else:
                play.turns[-1] = last._replace(reward=last.reward + float(result))
            following.set_result(None)

        self._run(what, call, enter, following)

    def _run(
        self,
        what: str,
        call: Callable[[], Any],
        enter: Callable[[Any], None],
        following: Future,
    ) -> None:
        """Makes a call; ``enter`` gets its result or exception, and must resolve ``following``."""

        def entered(answer: Future) -> None:
            if answer.cancelled():
                following.cancel()
                return
            try:
                enter(answer.result())
            except InvalidStateError:
                pass  # cancelled
            except BaseException as error:
                following.set_exception(error)

        self._workers.run(what, call).add_done_callback(entered)

    def _step(
        self, play: _Play, request: int, action: Parsed
    ) -> tuple[Any, tuple[CallRecord, ...]]:
        """What the environment returns for a turn, and what it asked the subagent."""
        player, calls = self._subagent, list[CallRecord]()
        if player is None:
            return _await(self._env.step(play.state, action)), ()
        before = sum(len(turn.calls) for turn in play.turns)
        thread = threading.get_ident()

        def answer(messages: Sequence[Message], check: Callable | None) -> str:
            # The number of a question decides its random numbers: it must not depend on timing.
            if threading.get_ident() != thread:
                raise SubagentError(
                    "ask: a step asks one question at a time, in the thread in which it was called."
                )
            calls.append(player.ask(request, before + len(calls), messages, check))
            return calls[-1].text

        with answered_by(answer):
            result = _await(self._env.step(play.state, action))
        return result, tuple(calls)

    def _enter(
        self, play: _Play, completion: Completion, tokens: list[int], turn: Turn, result: Any
    ) -> NextTurn | None:
        """Records a turn, and the tokens that come next; None where the episode has ended."""
        wrong = None if isinstance(result, BaseException) else _wrong(result)
        if isinstance(result, BaseException) or wrong:
            play.turns.append(turn)
            play.end = "env_timeout" if isinstance(result, DeadlineError) else "env_error"
            play.error = f"step gives {wrong}" if wrong else f"step failed: {_said(result)}"
            return None
        play.state, observation = result
        play.name = _name(observation)
        info = {name: float(value) for name, value in observation.info.items()}
        play.turns.append(
            turn._replace(reward=float(observation.reward), next_state=play.name, info=info)
        )
        if observation.done or observation.stopped:
            play.end = "done" if observation.done else "stopped"
        elif len(play.turns) >= self._most_turns.get(completion.request, self.options.max_turns):
            play.end = "turns"
        if play.end is not None:
            return None
        try:
            keep, added = self._next(play, completion, tokens, observation)
        except Exception as error:  # a text that the tokenizer or the template refuses
            play.end, play.error = "env_error", f"the observation cannot be read: {_said(error)}"
            return None
        if play.length + len(added) >= self._most:
            play.end = "context"
            return None
        play.cut(keep, completion.out)
        play.read = np.concatenate([completion.tokens[:keep], np.int32(added)])
        play.add(len(added), sampled=False)
        play.starts.append(TurnStart(play.length, play.point()))
        return NextTurn(added, keep)

    def _next(
        self, play: _Play, completion: Completion, tokens: list[int], observation: Observation
    ) -> tuple[int, list[int]]:
        """How many tokens of a response the policy goes on reading, and what comes after them."""
        renderer, keep = self._renderer, len(completion)
        turn, stopped = renderer.message(tokens), completion.finish == STOP
        added: list[int] = []
        if observation.instead is not None:
            keep -= len(tokens)
            turn = {"role": "assistant", "content": observation.instead}
            added, stopped = renderer.turn(observation.instead), True
        play.messages += [turn, *observation.messages]
        read, tools = completion.tokens[:keep].tolist(), tuple(self._env.tools)
        rewritten = _rewritten(renderer, tools, play.messages, prompt=play.prompt, read=read)
        if rewritten is not None:
            return rewritten
        return keep, added + renderer.follow(observation.messages, stopped=stopped)

    def take(self, completion: Completion) -> Taken:
        """The episode of a response that has ended."""
        play = self._plays.pop(completion.request)
        self._most_turns.pop(completion.request, None)
        if play.end is None:
            raise ValueError(f"Episodes: that of request {completion.request} has not ended.")
        episode = Episode(tuple(play.turns), play.end, play.error)
        if not episode.failed and (wrong := _wrong_number(episode.reward)):
            error = f"the sum of its rewards is {wrong}"
            episode = episode._replace(end="env_error", error=error)
        out, ends = play.tokens(completion.out)
        return Taken(episode, out, np.concatenate(play.sampled), ends, tuple(play.starts))

    def scores(self, episodes: Sequence[Episode]) -> Scores:
        """The rewards of episodes, which are their details under "episodes"."""
        failed = np.array([episode.failed for episode in episodes], bool)
        rewards = [0.0 if episode.failed else episode.reward for episode in episodes]
        errors = [episode.error for episode in episodes if episode.failed]
        return Scores(
            np.array(rewards, np.float32),
            {},
            failed,
            error=errors[0] if errors else "",
            details={EPISODES: tuple(episodes)},
        )

    def close(self) -> None:
        """Ends the threads; those in a step that hangs are left behind."""
        self._workers.close()


def rewrites_reasoning(renderer: Any, tokenizer: Any, tools: Sequence[Any]) -> bool:
    """Whether a chat template drops the reasoning of turns from what the policy reads later.

    Two turns are tried, each with a reply of role "tool" if there are tools, else of "user".
    """
    messages: list[Message] = [{"role": "user", "content": "Hi"}]
    reply: Message = {"role": "tool" if tools else "user", "content": "And now?"}
    prompt, read = renderer.prompt(messages, tools), list[int]()
    said = "<think>\nHm.\n</think>\n\nYes."
    if reasoning_end(tokenizer.decode(prompt, skip_special=False)):
        said = said.removeprefix("<think>\n")  # the template has opened the reasoning
    for _ in range(2):
        turn = renderer.turn(said)
        read += turn
        messages += [renderer.message(turn), reply]
        if _rewritten(renderer, tools, messages, prompt=prompt, read=read) is not None:
            return True
        read += renderer.follow([reply], stopped=True)
    return False


def _rewritten(
    renderer: Any,
    tools: Sequence[Any],
    messages: Sequence[Message],
    *,
    prompt: Sequence[int],
    read: Sequence[int],
) -> tuple[int, list[int]] | None:
    """How many of the tokens after a prompt the template keeps, and the tokens that follow them.

    None if the template keeps all of them.
    """
    if not (renderer.rewrites and renderer.rewritten(messages)):
        return None
    begun, rendered = [*prompt, *read], renderer.prompt(messages, tools)
    pairs = enumerate(zip(begun, rendered, strict=False))
    same = next((n for n, (a, b) in pairs if a != b), min(len(begun), len(rendered)))
    # A template that opens a turn otherwise than it writes it later changes the prompt.
    return (same - len(prompt), rendered[same:]) if same >= len(prompt) else None


def _await(result: Any) -> Any:
    """A result, or that of an awaitable."""
    if not inspect.isawaitable(result):
        return result

    async def wait():
        return await result

    return asyncio.run(wait())


def _refuse(messages: Sequence[Message], check: Callable | None) -> str:
    """Refuses what the environment asks at a limit of the run."""
    raise SubagentError("ask: truncation_reward cannot ask a subagent; ask in step.")


def _said(error: BaseException) -> str:
    if isinstance(error, DeadlineError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _name(observation: Observation) -> str:
    """Names a state: as the environment does, or by its messages."""
    if observation.state is not None:
        return observation.state
    return repr([(m["role"], m["content"]) for m in observation.messages])


def _wrong_number(value: Any) -> str | None:
    """What is wrong with a reward or a number of ``info``; None where nothing is."""
    try:
        finite = math.isfinite(value) and abs(float(value)) <= _LARGEST
    except (TypeError, ValueError, OverflowError):
        finite = False
    return None if finite else f"{value!r}, which is no finite number in float32"


def _wrong(result: Any) -> str | None:
    """What is wrong with a state and an observation; None where nothing is."""
    if not isinstance(result, tuple) or len(result) != 2:
        return f"{type(result).__name__}, where a state and an Observation are needed"
    observation = result[1]
    if not isinstance(observation, Observation):
        return f"{type(observation).__name__}, where an Observation is needed"
    if not isinstance(observation.messages, Sequence) or isinstance(observation.messages, str):
        return f"messages {observation.messages!r}, which are no sequence"
    if not (observation.state is None or isinstance(observation.state, str)):
        return f"state of type {type(observation.state).__name__}, which is no text"
    if not (observation.instead is None or isinstance(observation.instead, str)):
        return f"instead {observation.instead!r}, which is no text"
    if not isinstance(observation.info, Mapping):
        return f"info {observation.info!r}, which is no mapping"
    for message in observation.messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            return f"the message {message!r}, which has no role and content"
        if not isinstance(message["content"], str):
            return f"a message with content {message['content']!r}, which is no text"
        if message["role"] not in ("tool", "user", "system"):
            return f"a message of role {message['role']!r}; it may be tool, user or system"
    for name in observation.info:
        if not isinstance(name, str):
            return f"info with the name {name!r}, which is no text"
    for name, value in (("reward", observation.reward), *observation.info.items()):
        if wrong := _wrong_number(value):
            return f"{name} {wrong}"
    if not observation.messages and not (observation.done or observation.stopped):
        return "no messages, and has not ended"
    return None
