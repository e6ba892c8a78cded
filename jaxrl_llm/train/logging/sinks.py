"""Sinks for the metrics of a run besides metrics.jsonl: TensorBoard, trackio, Weights & Biases."""

import importlib
import json
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.core.runtime.files import reason, write_whole

_BACKLOG = 10_000  # lines that wait for a sink that fails; the oldest is dropped first


class RunInfo(NamedTuple):
    """The description of the run that a sink receives when it is opened."""

    folder: Path
    first: int  # steps made before; above 0 the run is resumed, and its curves go on
    settings: Mapping[str, Any]  # the configuration: texts and numbers by dotted names


class Sink(Protocol):
    """Takes the metrics of a run; any object with these two methods is a sink."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the metrics of a step by their names in metrics.jsonl, such as "reward"."""
        ...

    def close(self) -> None:
        """Sends or writes what is left."""
        ...


SinkMaker = Callable[[RunInfo], Sink]
"""Opens a sink; a name such as "wandb" stands for one of this module."""


class TensorBoard:
    """Event files in RUN/tensorboard; ``tensorboard --logdir RUN`` shows them."""

    package = "tensorboardX"

    def __init__(self, run: RunInfo):
        import tensorboardX

        # Hides earlier records of the steps that follow: after a checkpoint, or all if a run
        # starts over.
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

    A resumed run logs the steps after its checkpoint a second time.
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
    """A Weights & Biases run; WANDB_MODE=offline and its other variables are respected.

    The curves are over "step", not over wandb's count, which would refuse the steps that a
    resumed run repeats; those appear twice.
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


def find_sinks(sinks: Sequence[str | SinkMaker]) -> list[SinkMaker]:
    """The functions that open sinks, from names or such functions.

    Raises:
      ImportError: If the package of one is not installed; it tells how to install it.
    """
    makers: list[SinkMaker] = []
    for each in sinks:
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
    """An open sink, with its name and the lines that it has not accepted yet."""

    name: str
    sink: Sink
    waiting: deque


class Sinks:
    """Sinks that cannot harm a run: a failure is a warning, and nothing is lost if it passes.

    Lines that a sink did not accept wait in memory and are sent again with the next step. A sink
    that cannot be opened is left out; metrics.jsonl has everything.

    Args:
      makers: See :func:`find_sinks`.
      run: The description of the run that each sink receives.
    """

    def __init__(self, makers: Sequence[SinkMaker], run: RunInfo):
        self._open: list[_Open] = []
        for maker in makers:
            known = [name for name, each in SINKS.items() if each is maker]
            name = known[0] if known else getattr(maker, "__qualname__", type(maker).__name__)
            try:
                self._open.append(_Open(name, maker(run), deque(maxlen=_BACKLOG)))
            except Exception as error:
                _warn(f"The sink {name} cannot be opened and is left out: {reason(error)}.")

    def write(self, row: Mapping[str, Any]) -> None:
        """Passes a line of metrics.jsonl to all sinks."""
        numbers = {
            name: value
            for name, value in flat(row).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        step = int(numbers.pop("step"))
        for each in self._open:
            failing = bool(each.waiting)
            each.waiting.append((step, numbers))
            try:
                while each.waiting:
                    each.sink.write(*each.waiting[0])
                    each.waiting.popleft()
            except Exception as error:
                if not failing:
                    _warn(
                        f"The sink {each.name} fails at step {step}: {reason(error)}. It is tried "
                        "again with each step; metrics.jsonl has everything."
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
    flattened = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            inner = flat(value, separator=separator)
            flattened |= {f"{name}{separator}{k}": v for k, v in inner.items()}
        else:
            flattened[name] = value
    return flattened


def _names(folder: Path) -> tuple[str, str]:
    """Project and name of a run: the folder's name in that of the one around it."""
    return folder.parent.name or "jaxrl_llm", folder.name


def _random() -> str:
    import secrets

    return secrets.token_hex(4)


def _run_id(run: RunInfo, sink: str, make: Callable[[], str]) -> str:
    """The id of the run at a service, stored in its folder so that a resumed run goes on."""
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
