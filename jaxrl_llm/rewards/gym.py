"""Rewards of reasoning-gym's tasks, whose scorers read replies in a sandbox."""

import functools
import importlib
import importlib.metadata
import json
import os
import pickle
import re
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.core import checks
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.core.runtime.terminal import str_or_type
from jaxrl_llm.rewards._seccomp import seccomp_filter
from jaxrl_llm.rewards._service import Service, ServiceEnded
from jaxrl_llm.rewards.answers import without_thinking
from jaxrl_llm.rewards.sandbox import Limits, Program, SandboxError, check_sandbox
from jaxrl_llm.rewards.scoring import RewardError, VerifierWarning, one_line

_PROGRAM = Path(__file__).with_name("_forks.py").read_text(encoding="utf-8")
_START_SECONDS = 60.0  # that the scorer may take to be imported
_LATE_SECONDS = 10.0  # after its deadline, on a machine with much else to do
_MEMORY = 2**30
_SANDBOXES = 8  # of one reward, which has more than one only if threads call it at one time
_WARNED_ONE_BY_ONE = 5

Report = tuple[str, Any]
"""What became of scoring one answer: "value" and the score, or another word and the reason."""


class reasoning_gym:  # noqa: N801 (used as a function: `reward = reasoning_gym("chain_sum")`)
    """Scores a completion with reasoning-gym's scorer for a task.

        reward = scorer_task(answer, metadata["entry"]),   0 <= reward <= 1

    The answer is the text of the last `<answer>...</answer>` after the thinking of a completion, or
    else the text after it without outer whitespace. Many scorers return a partial reward for a
    close answer; `chain_sum` gives one for a text that contains the right number.

    Scorers of several tasks evaluate the answer as Python. The scorer therefore runs in a sandbox
    (see :func:`run_python`), where each completion is read in a process of its own that ends with
    it, and where a text that is evaluated must be a formula: numbers, operators, lists, and the
    functions of mathematics. Any other text is worth 0 and is not evaluated.

    The reward is 0, too, if the scorer raises, returns no number from 0 to 1, crashes, or exceeds
    `seconds`, provided that it can score the answer of the entry itself; a warning counts those
    that are not plain wrong answers. Otherwise the entry or the scorer is at fault, and the reward
    raises. An entry without an answer cannot be tested in this way.

    The reward reads the entry that `data.from_reasoning_gym` puts into the metadata. It can be
    pickled, so `VerifierPool` accepts it. The first call starts the sandbox, which ends with the
    reward or the process.

    Args:
      task: Name of the reasoning-gym dataset.
      seconds: Seconds that scoring one completion may take.
      trust: Run the scorer in this process, without the sandbox and its limits. A completion can
        then do whatever this process can.
      **options: Options of the dataset, where the scorer depends on them.

    Raises:
      ValueError: If there is no such task, or its scorer is not part of the package and `trust` is
        not set.
      SandboxError: If the sandbox cannot run here and `trust` is not set.
      RewardError: In scoring, if the scorer cannot score the answer of the entry itself.

    Example:
      >>> from jaxrl_llm import rewards
      >>> try:
      ...     reward = rewards.reasoning_gym("chain_sum")
      ... except rewards.SandboxError:  # no bubblewrap here
      ...     reward = rewards.reasoning_gym("chain_sum", trust=True)
      >>> reward("2 + 2 =", "<answer>4</answer>", {"entry": {"answer": "4"}})
      1.0

    References:
      Stojanovski et al., Reasoning Gym (arXiv:2505.24760).
    """

    def __init__(self, task: str, *, seconds: float = 10.0, trust: bool = False, **options: Any):
        checks.check_seconds("reasoning_gym", seconds=seconds)
        self.task, self.seconds, self.trust, self.options = task, float(seconds), trust, options
        self.failures = 0
        self.__qualname__ = f"reasoning_gym({task!r})"
        changed = {"seconds": seconds} if seconds != 10.0 else {}
        changed |= {"trust": True} if trust else {}
        shown = (f"{name}={stable_repr(x)}" for name, x in sorted((options | changed).items()))
        self.in_full = f"reasoning_gym({', '.join([repr(task), *shown])})"
        self._reset()
        self._module = type(self._dataset).__module__
        if trust:
            return
        if self._module.partition(".")[0] != "reasoning_gym":
            raise ValueError(
                f"reasoning_gym: the task {task!r} is defined in {self._module}, which the sandbox "
                "does not have; trust=True runs its scorer in this process."
            )
        try:
            check_sandbox()
        except SandboxError as error:
            raise SandboxError(
                f"{self.__qualname__} reads completions in a sandbox, which cannot run here "
                f"({one_line(str(error))}); trust=True, in a config or a script, runs the task's "
                "scorer in this process, where a completion can do whatever the process can."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        hidden = ("_lock", "_room", "_idle", "_dataset")
        return {name: value for name, value in vars(self).items() if name not in hidden}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def _reset(self) -> None:
        self._lock, self._room = threading.Lock(), threading.Semaphore(_SANDBOXES)
        self._idle: list[Service] = []

    def __call__(self, prompt: str, completion: str, metadata: Mapping[str, Any]) -> float:
        """The task's score of one completion."""
        del prompt
        entry = metadata.get("entry")
        if not isinstance(entry, Mapping):
            raise ValueError(
                f"{self.__qualname__}: metadata['entry'] is missing; prompts of "
                "from_reasoning_gym have it."
            )
        kind, value = self._report(without_thinking(completion), entry, is_completion=True)
        if kind == "value":
            return value
        answer = entry.get("answer")
        if answer is not None:
            known, why = self._report(answer, entry, is_completion=False)
            if known != "value":
                raise RewardError(
                    f"{self.__qualname__}: the task's scorer {_clause(known, why)} on the answer "
                    f"{one_line(stable_repr(answer))[:100]} of the entry itself, so no completion "
                    "can be right"
                )
        if kind != "raised" or answer is None:
            self._warn(f"{self.__qualname__}: the scorer {_clause(kind, value)} on a completion")
        return 0.0

    def _report(self, answer: Any, entry: Mapping[str, Any], *, is_completion: bool) -> Report:
        """What became of scoring an answer; a value is a number from 0 to 1."""
        if self.trust:
            kind, value = self._here(answer, entry, is_completion=is_completion)
        else:
            try:
                # Exact for what JSON would change, such as tuples and dates. The sandbox reads it.
                request = pickle.dumps((answer, is_completion, entry))
            except Exception as error:
                raise RewardError(
                    f"{self.__qualname__}: metadata['entry'] cannot be sent to the sandbox: "
                    f"{one_line(str_or_type(error))}"
                ) from error
            with self._room:
                kind, value = self._there(request)
        if kind == "value" and not 0 <= value <= 1:  # also NaN
            return "raised", f"the score {value:g}, which is not from 0 to 1"
        return kind, value

    @functools.cached_property
    def _dataset(self) -> Any:
        gym = _package()
        try:
            return gym.create_dataset(self.task, **self.options)
        except Exception as error:
            raise ValueError(
                f"reasoning_gym: the task {self.task!r} with options {self.options} cannot be "
                f"made: {error}."
            ) from error

    def _here(self, answer: Any, entry: Mapping[str, Any], *, is_completion: bool) -> Report:
        """Scores in this process."""
        try:
            if is_completion:
                tagged = _package().utils.extract_answer(answer)
                answer = answer.strip() if tagged is None else tagged
            return "value", float(self._dataset.score_answer(answer, entry))
        except Exception as error:
            return "raised", f"{type(error).__name__}: {one_line(str_or_type(error))}"

    def _there(self, request: bytes) -> Report:
        """Scores in a sandbox, which is started again if it has ended."""
        while True:
            idle, fresh = self._idle, False
            service = idle.pop() if idle else None
            if service is None or service.made_by != os.getpid():  # of a process that forked
                service, fresh = self._start(), True
            try:
                kind, value = json.loads(service.ask(request, self.seconds + _LATE_SECONDS))
                if not isinstance(value, float) if kind == "value" else not isinstance(kind, str):
                    raise ValueError("gave a report that cannot be read")
            except BaseException as error:
                service.close()
                if not isinstance(error, ServiceEnded | ValueError | TypeError):
                    raise
                if fresh:  # an earlier completion cannot have ended it
                    return "crashed", one_line(str_or_type(error))
            else:
                self._idle.append(service)
                return kind, value

    def _start(self) -> Service:
        program = Program(_PROGRAM, packages=_folders())
        service = Service(program, Limits(seconds=1e6, memory=_MEMORY))
        rules = seccomp_filter(alone=True)
        options = pickle.dumps(self.options)
        setup = pickle.dumps((self.task, self._module, options, self.seconds, rules))
        try:
            kind, why = json.loads(service.ask(setup, _START_SECONDS))
        except (ServiceEnded, ValueError) as error:
            kind, why = "ended", str(error)
        if kind != "ready":
            service.close()
            raise SandboxError(
                f"{self.__qualname__}: the task's scorer cannot be loaded in the sandbox "
                f"({one_line(str(why))}); trust=True runs it in this process"
            )
        return service

    def _warn(self, text: str) -> None:
        """Warns of the first few failures, and then whenever their number has doubled."""
        with self._lock:
            self.failures += 1
            count = self.failures
        if count <= _WARNED_ONE_BY_ONE or not count & (count - 1):
            warnings.warn(
                f"{text}, whose reward is 0; {count} such so far.", VerifierWarning, stacklevel=3
            )


def _clause(kind: str, why: Any) -> str:
    words = {"refused": "was refused", "late": "gave nothing in time", "raised": "raised"}
    return " ".join(filter(None, [words.get(kind, kind), one_line(str(why)) if why else ""]))


def _package() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ImportError(
            "reasoning_gym needs the package reasoning-gym: pip install 'jaxrl_llm[train]'."
        ) from error


@functools.cache
def _folders() -> tuple[str, ...]:
    """Files and folders of reasoning-gym and of all packages that it requires."""
    paths = {os.path.dirname(_package().__file__)}
    todo = ["reasoning-gym"]
    for name in todo:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # of another platform, or not as a wheel
            continue
        for file in found.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not top.endswith((".dist-info", ".pth")):
                paths.add(str(found.locate_file(top)))
        for requirement in found.requires or ():
            match = re.match(r"[\w.-]+", requirement)
            if match and "extra ==" not in requirement and match[0] not in todo:
                todo.append(match[0])
    return tuple(sorted(path for path in paths if os.path.exists(path)))
