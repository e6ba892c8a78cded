"""Results of a run as files: lines of JSON, a table of completions, a curve of the reward."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.runtime.files import append_whole, parse_json, write_whole


class JsonLines:
    """A file of one JSON object a line, each with its "step".

    A line that cannot be written is stored in memory and written before the next line.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._unwritten: list[str] = []

    @property
    def unwritten(self) -> int:
        """How many lines are not written yet."""
        return len(self._unwritten)

    def keep_up_to(self, step: int, *, but: Callable[[dict], bool] = lambda row: False) -> None:
        """Removes the lines of later steps, and those that ``but`` names.

        A resumed run will write them again.
        """
        rows = read_jsonl(self.path) if self.path.exists() and step else []
        lines = [json.dumps(row) for row in rows if row["step"] <= step and not but(row)]
        write_whole(self.path, "".join(f"{line}\n" for line in lines))

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a line: arrays as numbers, non-finite numbers as null.

        Raises:
          OSError: If it cannot be written now.
        """
        self._unwritten.append(json.dumps(_plain(row)) + "\n")
        self.flush()

    def flush(self) -> None:
        """Writes the lines that could not be written before, in order.

        Raises:
          OSError: If they still cannot be written.
        """
        if self._unwritten:
            append_whole(self.path, "".join(self._unwritten))
            self._unwritten.clear()

    def rows(self) -> list[dict]:
        """All lines, also those that are not written yet."""
        return read_jsonl(self.path) + [json.loads(line) for line in self._unwritten]


def _plain(value: Any) -> Any:
    """A value that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str | None) else str(value)


class Rows(NamedTuple):
    """The lines of a file of :class:`JsonLines`."""

    rows: list[dict]
    damaged: list[int]  # numbers, from 1, of lines that were cut off or changed


def read_lines(path: Path) -> Rows:
    """The objects of a JSONL file with an integer "step", and which lines are not."""
    rows, damaged = [], []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        try:
            row = parse_json(line.decode(errors="replace")) if line.strip() else {"step": 0}
        except ValueError:
            row = None
        if not _is_row(row):
            damaged.append(number)
        elif line.strip():
            rows.append(row)
    return Rows(rows, damaged)


_TABLES = ("held_out", "settings", "about", "changed")  # what a row holds under names of its own
_LARGEST = 10**300


def _is_row(row: Any) -> bool:
    """Whether a value is a line as a run writes it: a step, and numbers that are no larger."""
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return False
    tables = [row.get(name, {}) for name in _TABLES]
    if not all(isinstance(table, dict) for table in tables):
        return False
    kinds = list(tables[0].values())
    values = [x for each in (row, *kinds) if isinstance(each, dict) for x in each.values()]
    huge = any(isinstance(x, int) and abs(x) > _LARGEST for x in values)
    return not huge and all(isinstance(kind, dict) for kind in kinds)


def read_jsonl(path: Path) -> list[dict]:
    """The rows of :func:`read_lines` alone."""
    return read_lines(path).rows


def damage_of(path: Path) -> str:
    """A sentence about the damaged lines of a file; empty for none, and for no file."""
    damaged = read_lines(path).damaged if Path(path).is_file() else []
    if not damaged:
        return ""
    lines = f"line {damaged[0]}" + (f" and {len(damaged) - 1} more" if damaged[1:] else "")
    return f"{str(path)!r} is damaged at {lines}, which {'are' if damaged[1:] else 'is'} left out."


def samples_table(rows: Sequence[Mapping[str, Any]], *, width: int = 100) -> str:
    """Completions as a table to read; long texts are cut in the middle."""

    def cell(text: str, size: int) -> str:
        text = repr(text)[1:-1]
        half = size // 2 - 1
        return text if len(text) <= size else f"{text[:half]}..{text[-half:]}"

    half = (width - 12) // 2
    lines = [f"{'reward':>7}  {'prompt':<{half}}  completion"]
    for row in rows:
        prompt, completion = cell(row["prompt"], half), cell(row["completion"], half)
        lines.append(f"{row['reward']:>7.3g}  {prompt:<{half}}  {completion}")
    return "\n".join(lines)


def training_reward(row: Mapping[str, Any]) -> float | None:
    """The mean reward of the rollouts sampled for a step; None if the row is of no such step.

    The batch itself may hold only some of them, chosen by their rewards.
    """
    sampled = row.get("sampled_reward")
    return row.get("reward") if sampled is None else sampled


def plot_reward(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str = "") -> None:
    """A PNG of the reward of each step, and on held-out questions with its interval.

    ``rows`` are the lines of the metrics file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)  # no global state, no display
    axes = figure.add_subplot()
    train = [(row["step"], r) for row in rows if (r := training_reward(row)) is not None]
    if train:
        axes.plot(*zip(*train, strict=True), marker=".", label="training, sampled")
    for kind, marker in (("greedy", "s"), ("sampled", "o"), ("pairs", "^")):
        held_out = [(r["step"], r["held_out"][kind]) for r in rows if kind in r.get("held_out", {})]
        if held_out:
            steps = [step for step, _ in held_out]
            values = [[value[x] for x in ("low", "mean", "high")] for _, value in held_out]
            low, means, high = np.array(values, np.float64).T  # null, of no interval, is NaN
            ends, label = (means - low, high - means), f"held out, {kind}, 95% interval"
            axes.errorbar(steps, means, ends, fmt=marker, capsize=4, label=label)
    axes.set(xlabel="step", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left")  # "best" looks at every point, slowly
    figure.savefig(path, dpi=120)
