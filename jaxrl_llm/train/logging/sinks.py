"""Where the numbers of a run go besides metrics.jsonl: TensorBoard, trackio, Weights & Biases."""

import importlib
import json
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.train.files import reason, write_whole

_BACKLOG = 10_000  # lines that wait for a sink that fails; the oldest is dropped first


class RunInfo(NamedTuple):
    """What a sink is told of the run when it is opened.

    Attributes:
      folder: Of the run.
      first: Steps that were made before; above 0 the run is resumed, and its curves go on.
      settings: The configuration, flat: texts and numbers by dotted names.
    """

    folder: Path
    first: int
    settings: Mapping[str, Any]


class Sink(Protocol):
    """Takes the numbers of a run; any object with these two methods is one."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes numbers of a step by the names of metrics.jsonl, such as "reward"."""
        ...

    def close(self) -> None:
        """Brings what it has taken to where it belongs."""
        ...


SinkMaker = Callable[[RunInfo], Sink]
"""Opens a sink; a name such as "wandb" stands for one of those here."""


class TensorBoard:
    """Event files in RUN/tensorboard; ``tensorboard --logdir RUN`` shows them."""

    package = "tensorboardX"

    def __init__(self, run: RunInfo):
        import tensorboardX

        # Hides what was written of the steps that come now: after a checkpoint, or in a run that
        # starts over, whose first evaluation is of step 0.
        purge = run.first + 1 if run.first else 0
        self._writer = tensorboardX.SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()


class Trackio:
    """A trackio run named after the folder, in the project of the folder around it.

    A resumed run writes the steps after its checkpoint a second time.
    """

    package = "trackio"

    def __init__(self, run: RunInfo):
        import trackio

        project, name = _names(run.folder)
        self._module = trackio
        trackio.init(
            project=project,
            name=_run_id(run, "trackio", lambda: f"{name}-{_random()}"),
            config=dict(run.settings),
            resume="allow" if run.first else "never",
            embed=False,
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Logs the numbers of a step."""
        self._module.log(dict(numbers), step=step)

    def close(self) -> None:
        """Waits until all is written."""
        self._module.finish()


class WandB:
    """A Weights & Biases run; WANDB_MODE=offline and its other variables hold.

    The curves stand over "step", not over wandb's own count, which would refuse the steps that a
    resumed run makes again; they stand there twice.
    """

    package = "wandb"

    def __init__(self, run: RunInfo):
        import wandb

        project, name = _names(run.folder)
        self._run = wandb.init(
            project=project,
            name=name,
            id=_run_id(run, "wandb", _random),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Logs the numbers of a step."""
        self._run.log({"step": step, **numbers})

    def close(self) -> None:
        """Waits until all is sent."""
        self._run.finish()


SINKS: dict[str, Any] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": WandB}


def find_sinks(given: Sequence[str | SinkMaker]) -> list[SinkMaker]:
    """The makers of sinks that are given by name or as they are.

    Raises:
      ImportError: If the package of one is not installed; it says how to install it.
    """
    makers: list[SinkMaker] = []
    for each in given:
        if not isinstance(each, str):
            makers.append(each)
            continue
        package = SINKS[each].package
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ImportError(
                f"The sink {each!r} needs the package {package}: pip install 'jaxrl_llm[sinks]' "
                f"({error})."
            ) from error
        makers.append(SINKS[each])
    return makers


class _Open(NamedTuple):
    """A sink that is open, by its name, and the lines that it did not take."""

    name: str
    sink: Sink
    waiting: deque


class Sinks:
    """Sinks that cannot harm a run: one that fails is told of once, and loses nothing if it heals.

    What a sink did not take waits in memory and is offered again with the next step. One that
    cannot even be opened is left out; metrics.jsonl has all.

    Args:
      makers: See :func:`find_sinks`.
      run: What each is told.
    """

    def __init__(self, makers: Sequence[SinkMaker], run: RunInfo):
        self._open: list[_Open] = []
        for maker in makers:
            name = _name(maker)
            try:
                self._open.append(_Open(name, maker(run), deque(maxlen=_BACKLOG)))
            except Exception as error:
                _warn(f"The sink {name} cannot be opened and is left out: {reason(error)}.")

    def write(self, row: Mapping[str, Any]) -> None:
        """Hands a line of metrics.jsonl to all."""
        numbers = {k: v for k, v in flat(row).items() if _is_number(v)}
        step = int(numbers.pop("step"))
        for each in self._open:
            told = bool(each.waiting)
            each.waiting.append((step, numbers))
            try:
                while each.waiting:
                    each.sink.write(*each.waiting[0])
                    each.waiting.popleft()
            except Exception as error:
                if not told:
                    _warn(
                        f"The sink {each.name} fails at step {step}: {reason(error)}. It is tried "
                        "again with each step; metrics.jsonl has all."
                    )

    def close(self) -> None:
        """Closes all."""
        for each in self._open:
            try:
                each.sink.close()
            except Exception as error:
                _warn(f"The sink {each.name} cannot be closed: {reason(error)}.")
            if each.waiting:
                _warn(f"The sink {each.name} lacks {len(each.waiting)} line(s) of metrics.jsonl.")
        self._open = []


def flat(row: Mapping[str, Any], *, separator: str = "/") -> dict[str, Any]:
    """Nested mappings as one, with the names of the levels joined.

    Example:
      >>> from jaxrl_llm.train.logging.sinks import flat
      >>> flat({"step": 1, "held_out": {"greedy": {"mean": 0.5}}})
      {'step': 1, 'held_out/greedy/mean': 0.5}
    """
    found = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            inner = flat(value, separator=separator)
            found |= {f"{name}{separator}{k}": v for k, v in inner.items()}
        else:
            found[name] = value
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _name(maker: SinkMaker) -> str:
    """How messages call a sink."""
    known = (name for name, each in SINKS.items() if each is maker)
    return next(known, None) or getattr(maker, "__qualname__", type(maker).__name__)


def _names(folder: Path) -> tuple[str, str]:
    """Project and name of a run: the folder's name in that of the one around it."""
    return folder.parent.name or "jaxrl_llm", folder.name


def _random() -> str:
    import secrets

    return secrets.token_hex(4)


def _run_id(run: RunInfo, sink: str, make: Callable[[], str]) -> str:
    """The name under which a service knows the run, kept in its folder so that it can go on."""
    path = run.folder / "sinks.json"
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    if sink not in known or not run.first:
        known[sink] = make()
        write_whole(path, json.dumps(known) + "\n")
    return known[sink]


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
