"""The content of a folder before a run begins in it: nothing, an earlier run, or other files."""

import contextlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from jaxrl_llm.core.runtime.files import parse_json
from jaxrl_llm.train.checkpoint.checkpoints import left_in
from jaxrl_llm.train.logging.results import read_jsonl

# What a system puts into a folder by itself. Hidden files, as of version control, do not count
# either: a run writes none of these names.
_SYSTEM = ("lost+found", "desktop.ini", "Thumbs.db")


def has_run(folder: Path) -> bool:
    """Whether a run began in a folder, by any one of the files that tell.

    A kill may come before the others are written, and a copy may lack some: the lock of its
    process, the line of a start in sessions.jsonl, run.json, or a checkpoint with its record.
    """
    lock, start, command = _row(folder / ".lock"), _row(folder / "sessions.jsonl"), None
    if (folder / "run.json").is_file():
        command = _object((folder / "run.json").read_bytes())
    return (
        _has(lock, "process", "host", "since")
        or _has(start, "event", "step")
        or _has(command, "config", "overrides")
        or any((folder / "checkpoints").glob("step_*/record.json"))
    )


def other_files(folder: Path) -> list[str]:
    """The names in a folder that keep a run from beginning there; none where one began already."""
    if not folder.is_dir() or has_run(folder):
        return []
    names = [path.name for path in folder.iterdir() if path.name not in _SYSTEM]
    taken = [".lock"] if (folder / ".lock").is_dir() or _line(folder / ".lock") else []
    return taken + sorted(name for name in names if not name.startswith("."))


def holds_steps(folder: Path) -> bool:
    """Whether the run in a folder has made steps, which a new run there would overwrite."""
    if left_in(folder / "checkpoints"):
        return True
    metrics = folder / "metrics.jsonl"
    steps = (row.get("step") for row in read_jsonl(metrics)) if metrics.is_file() else ()
    return any(isinstance(step, int) and step > 0 for step in steps)


def date_of(folder: Path) -> datetime | None:
    """The date that chat templates write in all sessions of a run; None if no session has one.

    An earlier version wrote a date for each session; the first counts.
    """
    path = folder / "sessions.jsonl"
    rows = read_jsonl(path) if path.is_file() else []
    dates = [row["date"] for row in rows if "date" in row][-1:]
    for text in dates or [row["time"] for row in rows if "time" in row][:1]:
        with contextlib.suppress(TypeError, ValueError):  # of a damaged line
            return datetime.fromisoformat(text).replace(tzinfo=None)
    return None


def results_of(folder: Path) -> Iterator[Path]:
    """Files that a run removes to start over: checkpoints, report, curve, skipped batches.

    Lines of its other files are replaced as the new ones are written.
    """
    yield from (folder / "checkpoints").glob("step_*")
    yield from folder.glob("skipped_step_*.npz")
    yield from (path for name in ("report.html", "reward.png") if (path := folder / name).is_file())


def command_files(folder: Path) -> Iterator[Path]:
    """Files by which ``jaxrl-llm train`` describes the run that it made."""
    if (folder / "run.json").is_file():  # else the config is a file of the user
        names = ("config.py", "run.json")
        yield from [path for name in names if (path := folder / name).is_file()]


def _line(path: Path) -> bytes:
    """The first line of a file, at most 1 MB of it; empty where there is no file."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.readline(1 << 20)


def _row(path: Path) -> object:
    return _object(_line(path))


def _object(text: bytes) -> object:
    try:
        return parse_json(text)
    except ValueError:  # of somebody else, or cut off
        return None


def _has(row: object, *names: str) -> bool:
    return isinstance(row, dict) and all(name in row for name in names)
