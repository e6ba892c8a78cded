"""The folder of a run: its files, and the lines for the user."""

import contextlib
import math
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.core.runtime import processes
from jaxrl_llm.core.runtime.files import reason, sync, with_home, write_whole
from jaxrl_llm.core.runtime.interrupt import catch_interrupt
from jaxrl_llm.core.runtime.locks import FolderLock
from jaxrl_llm.core.runtime.terminal import str_or_type
from jaxrl_llm.core.secrets import mask, mask_known
from jaxrl_llm.train.checkpoint import CheckpointError
from jaxrl_llm.train.checkpoint.checkpoints import left_in, wait_for_saves
from jaxrl_llm.train.evaluation.evaluate import Accuracy
from jaxrl_llm.train.logging.contents import (
    command_files,
    date_of,
    holds_steps,
    other_files,
    results_of,
)
from jaxrl_llm.train.logging.report import write_report
from jaxrl_llm.train.logging.results import JsonLines, damage_of, plot_reward, samples_table
from jaxrl_llm.train.logging.settings import (
    changed_evaluation,
    changed_score,
    changed_settings,
    evaluation_settings,
    fixed_settings,
)
from jaxrl_llm.train.logging.sinks import RunInfo, SinkMaker, Sinks, find_sinks


class TrainingError(RuntimeError):
    """The run cannot go on."""


class OccupiedError(TrainingError):
    """The run folder holds an earlier run, or files that are not of a run."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises TrainingError with the file that could not be written."""
    try:
        yield
    except OSError as error:
        raise TrainingError(f"{str(path)!r} cannot be written: {reason(error)}.") from error


def without_secrets(name: str, text: str) -> str:
    """The text of a file for a run folder, without the secrets in it; warns where it has some."""
    masked = mask(text)
    if masked != text:
        warnings.warn(
            f"{name} holds a secret, which its copy in the run folder has not: a config better "
            "reads it from a variable of the environment.",
            stacklevel=2,
        )
    return masked


class RunFolder:
    """The files of one run; used as a context, which ends with ``report.html``.

    ``metrics.jsonl`` and ``samples.jsonl`` have the numbers and some completions of each step,
    ``sessions.jsonl`` a line when the run is started or resumed and one when it ends;
    ``reward.png`` and ``checkpoints`` are in the same folder, which no other run can use until this
    run has ended. Lines that cannot be written, as on a full disk, stay in memory and are written
    later, at the latest when the run ends.

    Args:
      path: The folder; created if it does not exist.
      resume: Whether it may hold a run already.
      overwrite: Whether a run that it holds is replaced, once this one begins; one without a step
        always is.
      log: Takes lines for the user; None is silent.
      sinks: Where the metrics go as well; see :class:`~jaxrl_llm.train.ReportConfig`.

    Attributes:
      resumes: Whether there is a checkpoint to resume from, complete or damaged; never without
        ``resume``.
      date: The date that chat templates write in the run: that of its first session.

    Raises:
      CheckpointError: If the folder cannot be written.
      ImportError: If the package of a sink is not installed.
      InUseError: If a running process uses the folder.
      OccupiedError: If it holds files that are not of a run, or a run with steps that this one
        neither resumes nor replaces; nothing is written then.
      ValueError: If the name is empty, or the run is to be both resumed and replaced.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        resume: bool,
        overwrite: bool = False,
        log: Callable[[str], Any] | None = None,
        sinks: Sequence[str | SinkMaker] = (),
    ):
        if not str(path).strip() or "\0" in str(path):
            raise ValueError(
                f"RunFolder: the name of a run folder must not be empty; got {str(path)!r}."
            )
        if resume and overwrite:
            raise ValueError("train: overwrite has no effect with resume.")
        self.path, self._writes = with_home(path).absolute(), processes.is_first()
        self.talks = log is not None and self._writes
        self._log = log if self.talks else None
        self._makers = find_sinks(sinks)
        self._sinks: Sinks | None = None  # until it starts
        self._step, self._ended = 0, False
        self._evaluation: dict[str, Any] = {}  # the settings that decide its evaluations
        self._again: int | None = None  # the step whose evaluation is made again
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.samples = JsonLines(self.path / "samples.jsonl")
        self.sessions = JsonLines(self.path / "sessions.jsonl")
        self.checkpoints = self.path / "checkpoints"
        self._last_rows: list[Mapping] = []
        self._lock: FolderLock | None = None
        self._made: list[Path] = []  # folders that were not there, the innermost first
        self._new = False  # it was empty
        self._replaces = overwrite
        try:
            self.resumes = processes.from_first(lambda: self._take(resume, overwrite))
            self.date = processes.from_first(lambda: self._find_date(resume))
            processes.together(self._check_shared)
        except BaseException:
            self._release()
            raise

    def log(self, line: str) -> None:
        """Passes a line on to the user, without secrets that are known."""
        if self._log is not None:
            self._log(mask_known(line))

    def _take(self, resume: bool, overwrite: bool) -> bool:
        """Makes and locks the folder; whether there is something to resume from."""
        name = repr(str(self.path))
        wait_for_saves()
        try:
            if others := other_files(self.path):
                listed = ", ".join(map(repr, others[:3]))
                rest = f" and {len(others) - 3} more" if len(others) > 3 else ""
                raise OccupiedError(
                    f"The folder {name} has files that do not belong to a run ({listed}{rest}); "
                    "name another folder (--run-dir)."
                )
            self._new = not self.path.is_dir() or not any(self.path.iterdir())
            folders = (self.path, *self.path.parents)
            self._made = [folder for folder in folders if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
            self._lock = FolderLock(self.path)
        except OSError as error:
            raise CheckpointError(
                f"The run folder {name} cannot be written: {error.strerror}."
            ) from error
        if resume and left_in(self.checkpoints):
            return True
        if resume:  # a scheduler restarts with one command, however far the run came
            state = "has no checkpoint yet"
            if self._new:
                state = "is new or empty, and nothing is resumed"
            self.log(f"The run folder {name} {state}; the run starts from step 0.")
            return False
        if holds_steps(self.path) and not overwrite:
            raise OccupiedError(
                f"The run folder {name} already holds a run; continue it (--resume), name another "
                "folder (--run-dir), or delete it and start over (--overwrite)."
            )
        if self.sessions.path.exists():
            which = "a run, which is replaced" if overwrite else "a run without a step"
            self.log(f"{name} holds {which}; it starts over.")
        return False

    def _find_date(self, resume: bool) -> datetime:
        before = date_of(self.path) if resume else None
        return datetime.now().replace(microsecond=0) if before is None else before

    def _check_shared(self) -> None:
        if not self.path.is_dir():
            raise CheckpointError(
                f"The run folder {str(self.path)!r} does not exist for process "
                f"{jax.process_index()}; all processes of a run need it, on a shared file system."
            )

    def _release(self) -> None:
        """Lets go of the folder; nothing is left of a run that could not begin in a new one."""
        with contextlib.suppress(OSError):  # such as a folder that is not empty
            names = [path.name for path in self.path.iterdir()]
            if self._new and self._lock is not None and names == [".lock"]:
                (self.path / ".lock").unlink()
            for folder in self._made:
                folder.rmdir()
        if self._lock is not None:
            self._lock.release()

    def changed(self, settings: Mapping[str, Any], *, allowed: bool) -> dict[str, tuple[Any, Any]]:
        """The settings that a resumed run changes and that change what it learns, old and new.

        Raises:
          ValueError: If there are any and they are not allowed, or if no checkpoint of the run can
            be read with them; it names them.
        """
        if not self.resumes:
            return {}

        def find() -> tuple[dict[str, tuple], list[str]] | None:
            known = self._last_settings()
            if known is None:
                return None
            return changed_settings(known, settings), fixed_settings(known, settings)

        compared, name = processes.from_first(find), repr(str(self.path))
        if compared is None:
            self.log(f"No sessions.jsonl in {name} has the settings of the run: none is compared.")
            return {}
        changed, fixed = compared
        refused = {key: pair for key, pair in changed.items() if key in fixed or not allowed}
        if not refused:
            return changed
        text = "; ".join(f"{key} was {a!r}, is {b!r}" for key, (a, b) in refused.items())
        remedy = ", or accept the changes (--allow-changed)"
        if fixed:
            remedy = f"; a resumed run cannot change {', '.join(fixed)}"
        elif any(key in changed for key in ("data.prompts", "data.evaluation", "data.held_out")):
            remedy += "; the questions must stay the same"
        if "minibatches" in refused:
            option = f"--minibatches {refused['minibatches'][0]}"
            remedy = f" ({option} if it was another mesh that changed their number){remedy}"
        raise ValueError(
            f"train: the run in {name} had other settings: {text}. Resume it with the same "
            f"settings{remedy}."
        )

    def changed_score(self, settings: Mapping[str, Any], metric: str) -> dict[str, tuple[Any, Any]]:
        """The settings that a resumed run changes and that decide a metric, old and new.

        Call it before :meth:`start`, after which the settings of the run are the new ones.
        """
        if not self.resumes:
            return {}

        def find() -> dict[str, tuple[Any, Any]]:
            known = self._last_settings()
            return {} if known is None else changed_score(known, settings, metric)

        # Of the first process, whose settings are written: a reward may name its own host.
        return processes.from_first(find)

    def _last_settings(self) -> dict[str, Any] | None:
        """The settings of the last session, or None if sessions.jsonl has none."""
        rows = self.sessions.rows() if self.sessions.path.is_file() else []
        known = [row["settings"] for row in rows if isinstance(row.get("settings"), dict)]
        return known[-1] if known else None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if self._sinks is not None:
                self._close(self._sinks, kind, error)
        finally:
            self._release()

    def _close(self, sinks: Sinks, kind, error) -> None:
        """Writes what is left, how the run ended, and the report."""
        if not self._ended:
            for lines in (self.metrics, self.samples):
                with _optional(lines.path):
                    lines.flush()
        if error is not None:
            text = str_or_type(error)
            self._note_end(f"{kind.__name__}: {mask(text)}" if text else kind.__name__)
        if kind is None or issubclass(kind, Exception):  # a second Ctrl-C should end at once
            with catch_interrupt():  # a SIGTERM that comes now costs neither report nor exit code
                sinks.close()
                path = self.path / "report.html"
                with _optional(path):
                    write_report(self.path, path)

    def start(
        self,
        step: int,
        files: Mapping[str, str],
        *,
        settings: Mapping[str, Any] | None = None,
        changed: Mapping[str, tuple[Any, Any]] | None = None,
        about: Mapping[str, str] | None = None,
        evaluates: bool = False,
    ) -> None:
        """Begins the files, or drops what a run wrote after the checkpoint it resumes from.

        Args:
          step: How many steps were made.
          files: Texts to keep, by file name.
          settings: The configuration; see :func:`~jaxrl_llm.train.logging.settings.settings`.
          changed: Settings that a resumed run changes, see :meth:`changed`.
          about: Versions and devices.
          evaluates: Whether the session evaluates the state that it begins with. An evaluation of
            it that was made with other settings is then made again; it stays in the file until
            the new one replaces it.
        """
        if not self._writes:
            return
        self._evaluation = evaluation_settings(settings or {})
        # Those of the last session, if an earlier version made the evaluation.
        last = (self._last_settings() or {}) if step and evaluates else {}
        if self._replaces:
            for path in list(results_of(self.path)):
                with writing(path):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        row = {"step": step, "event": "start", "time": _now(), "date": self.date.isoformat()}
        with writing(self.sessions.path):  # first, since it marks the folder as that of a run
            if not step:
                self.sessions.keep_up_to(0)
            row |= {"settings": settings or {}, "about": about or {}}
            self.sessions.write(row | ({"changed": changed} if changed else {}))
        if not files and (not step or changed):
            # The command that made the run no longer describes it.
            for path in command_files(self.path):
                with writing(path):
                    path.unlink()
        for name, text in files.items():
            with writing(self.path / name):
                write_whole(self.path / name, without_secrets(name, text))
        for lines in (self.metrics, self.samples):
            if step and (told := damage_of(lines.path)):
                self.log(told)
            with writing(lines.path):
                lines.keep_up_to(step)
        if step and evaluates:
            self._find_again(step, last)
        self._step = step
        self._sinks = Sinks(self._makers, RunInfo(self.path, step, settings or {}))

    def _find_again(self, step: int, last: Mapping[str, Any]) -> None:
        """Finds out whether the evaluation after a step had other settings, and is made again."""
        if (row := self._evaluated(step)) is None:
            return
        old = row.get("settings", last)
        if old and (changed := changed_evaluation(old, self._evaluation)):
            text = "; ".join(f"{key} was {a!r}, is {b!r}" for key, (a, b) in changed.items())
            self.log(f"The evaluation after step {step} is made again: {text}.")
            self._again = step

    def _evaluated(self, step: int) -> dict[str, Any] | None:
        """The line of the last evaluation after a step."""
        rows = reversed(self.metrics.rows())
        return next((row for row in rows if row["step"] == step and "held_out" in row), None)

    def step(self, step: int, metrics: Mapping[str, Any], rows: Iterable[Mapping]) -> None:
        """Writes the metrics and some completions of a step."""
        rows = list(rows)
        self._last_rows = rows or self._last_rows
        self._write({"step": step, **metrics})
        if not self._writes:
            return
        for row in rows:
            _append(self.samples, {"step": step, **row})

    def held_out(self, step: int, results: Mapping[str, Accuracy], rows: list[dict]) -> None:
        """Writes an evaluation, and shows it with some completions."""
        values = {kind: accuracy.record() for kind, accuracy in results.items()}
        if step == self._again:
            with _optional(self.metrics.path):  # else the old line stays before the new one
                self.metrics.keep_up_to(
                    step, but=lambda row: row["step"] == step and "held_out" in row
                )
            self._again = None
        # A resumed run compares them; they are no numbers for sinks.
        more = {"settings": self._evaluation} if self._evaluation else {}
        self._write({"step": step, "held_out": values}, **more)
        text = ", ".join(f"{kind} {accuracy}" for kind, accuracy in results.items())
        questions = next(iter(results.values())).questions
        what = "Accuracy" if all(x.binary for x in results.values()) else "Mean reward"
        what = "Share of pairs in the right order" if set(results) == {"pairs"} else what
        if failed := sum(accuracy.failed for accuracy in results.values()):
            text += f"; {failed} responses are left out, since the reward failed on them"
        self.log(f"{what} on {questions} held-out questions after step {step}: {text}")
        if rows:
            self.log(samples_table(rows))

    def _write(self, row: Mapping[str, Any], **more: Any) -> None:
        """Writes metrics, first to the file, which also has ``more``, then to the sinks."""
        self._step = row["step"]
        if not self._writes:
            return
        _append(self.metrics, {**row, **more})
        if self._sinks is not None:
            self._sinks.write(row)

    def show_samples(self) -> None:
        """Shows the completions of the last step that has some."""
        if self._last_rows:
            self.log(samples_table(self._last_rows))

    def accuracy_at(self, step: int) -> dict[str, Accuracy]:
        """The evaluation after a step, if there was one that is not made again."""

        def find() -> dict[str, Any]:
            row = None if step == self._again else self._evaluated(step)
            return {} if row is None else row["held_out"]

        results = processes.from_first(find)
        return {
            kind: Accuracy(
                mean=value["mean"],
                low=math.nan if value["low"] is None else value["low"],
                high=math.nan if value["high"] is None else value["high"],
                questions=value["questions"],
                samples=value["samples"],
                binary=value["binary"],
                failed=value["failed"],
                calibration_error=value.get("calibration_error"),
                brier=value.get("brier"),
            )
            for kind, value in results.items()
        }

    def history(self) -> list[dict]:
        """The lines of metrics.jsonl, as the first process reads them."""
        return processes.from_first(self.metrics.rows)

    def sync_lines(self) -> None:
        """Makes the lines survive a loss of power, as a checkpoint does that is saved after them.

        A resumed run does not write the lines of steps before its checkpoint again.
        """
        for lines in (self.metrics, self.samples) if self._writes else ():
            with contextlib.suppress(OSError):  # whose first one was warned of
                lines.flush()
                sync(lines.path)

    def end(self, *, interrupted: int | None, seconds: Mapping[str, float]) -> None:
        """Records how the run ended and draws reward.png.

        Args:
          interrupted: The signal that ended it early, if one did.
          seconds: Seconds of work after the last line of metrics.jsonl.

        Raises:
          TrainingError: If lines of metrics.jsonl or samples.jsonl still cannot be written.
        """
        self._ended = True

        def flush(lines: JsonLines) -> None:
            with writing(lines.path):
                lines.flush()

        def flush_both() -> None:
            with contextlib.ExitStack() as stack:  # the second is tried if the first fails
                for lines in (self.metrics, self.samples):
                    stack.callback(flush, lines)

        processes.from_first(flush_both)
        outcome = "done" if interrupted is None else signal.Signals(interrupted).name
        self._note_end(outcome, {f"seconds_{k}": v for k, v in seconds.items()})
        path = self.path / "reward.png"
        if self._writes:
            with _optional(path):
                plot_reward(self.metrics.rows(), path, title=self.path.name)

    def _note_end(self, outcome: str, numbers: Mapping[str, Any] | None = None) -> None:
        if not self._writes:
            return
        row = {"step": self._step, "event": "end", "time": _now(), "outcome": outcome}
        with contextlib.suppress(OSError):  # an error before this one is reported
            self.sessions.write(row | dict(numbers or {}))

    def progress(self, first: int, steps: int):
        """A tqdm bar over the steps; hidden in a silent run."""
        from tqdm import tqdm

        return tqdm(
            total=steps,
            initial=first,
            unit="step",
            disable=not self.talks,
            dynamic_ncols=True,
            postfix="compiling the first step",  # until it ends
        )


def _append(lines: JsonLines, row: Mapping[str, Any]) -> None:
    """Writes a line, or warns of the first one that cannot be written."""
    try:
        lines.write(row)
    except OSError as error:
        if lines.unwritten == 1:
            warnings.warn(
                f"{str(lines.path)!r} cannot be written: {reason(error)}. Its lines stay in "
                "memory until they can be written; the run goes on.",
                stacklevel=4,
            )


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


@contextlib.contextmanager
def _optional(path: Path) -> Iterator[None]:
    """Turns an error into a warning: the run does not need this file."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{str(path)!r} cannot be written: {reason(error)}.", stacklevel=4)
