"""The folder of a run: what is written where, and what the user is told."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.train.checkpoint import CheckpointError, steps_in
from jaxrl_llm.train.evaluate import Accuracy
from jaxrl_llm.train.files import reason, write_whole
from jaxrl_llm.train.metrics import JsonLines, plot_reward, read_jsonl, samples_table


class TrainingError(RuntimeError):
    """The run cannot go on."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says in one sentence which file could not be written."""
    try:
        yield
    except OSError as error:
        raise TrainingError(f"{str(path)!r} cannot be written: {reason(error)}.") from error


class RunFolder:
    """``metrics.jsonl``, ``samples.jsonl``, ``reward.png`` and ``checkpoints`` of one run.

    Args:
      path: The folder; made if there is none.
      resume: Whether it may hold a run already.
      say: Takes lines for the user; None is silent.

    Raises:
      CheckpointError: If the folder cannot be written.
      TrainingError: If it holds checkpoints of a run and this one does not resume it.
    """

    def __init__(self, path: str | Path, *, resume: bool, say: Callable[[str], Any] | None = None):
        self.path, self.say = Path(path).absolute(), say or (lambda line: None)
        self.shows_progress = say is not None and jax.process_index() == 0
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise CheckpointError(
                f"The run folder {str(self.path)!r} cannot be written: {error.strerror}."
            ) from error
        self.metrics = JsonLines(self.path / "metrics.jsonl")
        self.samples = JsonLines(self.path / "samples.jsonl")
        self.checkpoints = self.path / "checkpoints"
        self._last_rows: list[Mapping] = []
        if resume:
            return
        if steps_in(self.checkpoints):
            raise TrainingError(
                f"The run folder {str(self.path)!r} already holds a run; go on with it (--resume) "
                "or name another folder (--run-dir)."
            )
        if self.metrics.path.exists():
            self.say(f"{str(self.path)!r} holds a run without a checkpoint; it starts over.")

    def start(self, step: int, files: Mapping[str, str]) -> None:
        """Begins the files, or drops what a run wrote after the checkpoint it resumes from."""
        for name, text in files.items():
            with writing(self.path / name):
                write_whole(self.path / name, text)
        for lines in (self.metrics, self.samples):
            with writing(lines.path):
                lines.keep_up_to(step)

    def step(self, step: int, metrics: Mapping[str, Any], rows: Iterable[Mapping]) -> None:
        """Writes the numbers and some completions of a step."""
        self._last_rows = list(rows)
        with writing(self.metrics.path):
            self.metrics.write({"step": step, **metrics})
        with writing(self.samples.path):
            for row in self._last_rows:
                self.samples.write({"step": step, **row})

    def held_out(self, step: int, found: Mapping[str, Accuracy], rows: list[dict]) -> None:
        """Writes an evaluation, and shows it with some completions."""
        values = {kind: accuracy._asdict() for kind, accuracy in found.items()}
        with writing(self.metrics.path):
            self.metrics.write({"step": step, "held_out": values})
        text = ", ".join(f"{kind} {accuracy}" for kind, accuracy in found.items())
        questions = next(iter(found.values())).questions
        self.say(f"Accuracy on {questions} held-out questions after step {step}: {text}")
        if rows:
            self.say(samples_table(rows))

    def show_samples(self) -> None:
        """Shows the completions of the last step."""
        if self._last_rows:
            self.say(samples_table(self._last_rows))

    def accuracy_at(self, step: int) -> dict[str, Accuracy]:
        """The evaluation after a step, if there was one."""
        for row in reversed(self.history()):
            if row["step"] == step and "held_out" in row:
                return {kind: Accuracy(**value) for kind, value in row["held_out"].items()}
        return {}

    def history(self) -> list[dict]:
        """The lines of metrics.jsonl."""
        return read_jsonl(self.metrics.path)

    def plot(self) -> None:
        """Draws reward.png; a run is no worse for a curve that could not be drawn."""
        path = self.path / "reward.png"
        try:
            plot_reward(self.history(), path, title=self.path.name)
        except OSError as error:
            warnings.warn(f"{str(path)!r} cannot be written: {reason(error)}.", stacklevel=2)

    def progress(self, first: int, steps: int):
        """A tqdm bar over the steps; hidden where nobody listens."""
        from tqdm import tqdm

        return tqdm(
            total=steps,
            initial=first,
            unit="step",
            disable=not self.shows_progress,
            dynamic_ncols=True,
        )
