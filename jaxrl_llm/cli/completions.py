"""What ``jaxrl-llm sample`` reads and writes: prompts, rows of a JSONL file, text on a terminal.

A file that cannot be read or written, or has a wrong row, raises UsageError.
"""

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from jaxrl_llm.cli import UsageError
from jaxrl_llm.core.runtime.files import (
    open_through,
    parse_json,
    reason,
    replaceable,
    write_all,
    write_whole,
)
from jaxrl_llm.core.runtime.terminal import for_stream
from jaxrl_llm.rollout import Completion
from jaxrl_llm.rollout.types import CANCELLED, FAILED, LENGTH, STOP

FINISH = {LENGTH: "length", STOP: "stop", FAILED: "failed", CANCELLED: "cancelled"}
_FAILED = FINISH[FAILED]
FIELDS = (
    "index",
    "sample",
    "completion",
    "finish",
    "num_tokens",
    "behavior_logp",
    "model_logp",
    "run",
)


class PromptRow(NamedTuple):
    """A prompt, its index from 0, and the other fields of its row of a JSONL file."""

    index: int
    text: str
    fields: dict[str, Any]


def read_prompts(texts: Sequence[str], file: Path | None) -> list[PromptRow] | None:
    """All prompts, or None if they are to be typed at a terminal.

    ``texts`` are of the command line; without any, a file or a pipe is read, a prompt a line. A
    line of a .jsonl file is an object with a field "prompt" and none of :data:`FIELDS`.
    """
    if texts:
        rows, source = [(text, {}) for text in texts], "the command line"
    elif file is not None:
        source, rows = f"The file {str(file)!r}", []
        try:
            lines = enumerate(file.read_text(encoding="utf-8-sig").split("\n"), 1)
        except UnicodeDecodeError as error:
            raise UsageError(f"{source} cannot be read: it is not UTF-8.") from error
        except OSError as error:
            raise UsageError(f"{source} cannot be read: {error.strerror}.") from error
        for number, line in lines:
            where, row = f"Line {number} of {str(file)!r}", {"prompt": line}
            if not line.strip():
                continue
            if file.suffix.lower() == ".jsonl":
                try:
                    row = parse_json(line)
                except ValueError as error:
                    raise UsageError(f"{where} is not JSON: {error}.") from error
            prompt = row.pop("prompt", None) if isinstance(row, dict) else None
            if not isinstance(prompt, str) or not prompt.strip():
                raise UsageError(f"{where} must be a JSON object whose field 'prompt' is a text.")
            if both := sorted(set(row) & set(FIELDS)):
                raise UsageError(
                    f"{where} has a field {both[0]!r}, which its completions have too."
                )
            rows.append((prompt, row))
    elif sys.stdin.isatty():
        return None
    else:
        source = "Standard input"
        try:
            text = sys.stdin.read().removeprefix("\ufeff")
            text.encode()  # some locales read other bytes as surrogates
        except UnicodeError as error:
            raise UsageError(f"{source} cannot be read: it is not UTF-8.") from error
        # Not splitlines, for which half a dozen other characters end a line too.
        rows = [(line, {}) for line in text.split("\n") if line.strip()]
    if not rows:
        raise UsageError(f"{source} holds no prompt.")
    return [PromptRow(i, text, fields) for i, (text, fields) in enumerate(rows)]


def typed_lines() -> Iterator[str]:
    """Prompts typed at a terminal, one per line, until Ctrl-D or Ctrl-C."""
    import readline  # noqa: F401 (input() then knows the arrow keys)

    while True:
        try:
            if sys.stdout.isatty():
                line = input(">>> ")
            else:  # the sign must not be among the completions
                print(">>> ", end="", flush=True, file=sys.stderr)
                line = sys.stdin.readline()
                if not line:
                    return
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if line.strip():
            yield line.rstrip("\n")


def text_to_stop(ids: Sequence[int], tokenizer, stops: Sequence[str]) -> str:
    """The text of token ids up to the first stop string."""
    text = tokenizer.decode(ids)
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def to_row(prompt: PromptRow, sample: int, text: str, completion: Completion, run: str) -> dict:
    """A completion as an object of the JSONL file; log-probabilities are sums over its tokens."""
    out = completion.out
    return {
        "index": prompt.index,
        "sample": sample,
        **prompt.fields,
        "prompt": prompt.text,
        "completion": text,
        "finish": FINISH[completion.finish],
        "num_tokens": len(completion),
        "behavior_logp": round(float(np.sum(out.behavior_logp, dtype=np.float64)), 5),
        "model_logp": round(float(np.sum(out.model_logp, dtype=np.float64)), 5),
        "run": run,
    }


def digest(settings: Mapping[str, Any]) -> str:
    """A short name for everything that a completion depends on, apart from its prompt."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


_OF_MODELS = (".gguf", ".jinja", ".json", ".safetensors")


def digest_of_model(path: Path, out: Path | None) -> str | None:
    """A short name for the files of a model on this machine: names, sizes and times of change.

    ``out`` is not one of them, wherever it is. None if nothing has that path.
    """
    path = path.expanduser()
    files = path.iterdir() if path.is_dir() else [path]
    written = None if out is None else out.resolve()
    found = {}
    for file in sorted(files):
        if file.suffix in _OF_MODELS and file.is_file() and file.resolve() != written:
            status = file.stat()
            found[file.name] = (status.st_size, status.st_mtime_ns)
    return digest(found) if found else None


class OutFile:
    """A JSONL file, in a folder that exists, to which completions are appended by group.

    A device or a pipe is only written to; it has no earlier completions.
    """

    def __init__(self, path: Path):
        self.path = path
        self._rows: list[dict] = []
        self._stream: IO[bytes] | None = None
        with self._errors():
            if replaceable(path) is None:
                self._stream = open_through(path)
                return
        with self._opened() as file:
            file.seek(0)
            end = 0
            for number, line in enumerate(file.read().split(b"\n"), 1):
                try:
                    row = parse_json(line) if line.strip() else {}
                except ValueError as error:
                    if end + len(line) < file.tell():
                        message = f"Line {number} of {str(path)!r} is not JSON."
                        raise UsageError(message) from error
                    file.truncate(end)  # an incomplete last row
                    break
                self._rows += [row] if isinstance(row, dict) and "index" in row else []
                end += len(line) + 1
            else:
                if line:
                    file.write(b"\n")

    def _opened(self) -> IO[bytes]:
        with self._errors():
            return self.path.open("a+b")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(f"{str(self.path)!r} cannot be written: {error.strerror}.") from error

    def __del__(self):
        if self._stream is not None:
            self._stream.close()

    def __len__(self) -> int:
        return len(self._rows)

    def done(self, prompts: Sequence[PromptRow], run: str) -> set[tuple[int, int]]:
        """Index and sample of the completions of these prompts that are already in the file."""
        is_of = _rows_of(prompts, run)
        rows = [row for row in self._rows if is_of(row) and row.get("finish") != _FAILED]
        return {(row["index"], row["sample"]) for row in rows}

    def drop_failed(self, prompts: Sequence[PromptRow], run: str, n: int) -> int:
        """Removes the failed ones of ``n`` completions of these prompts; returns their number."""
        is_of = _rows_of(prompts, run)

        def has_failed(row: Any) -> bool:
            return is_of(row) and row.get("finish") == _FAILED and row["sample"] < n

        before = len(self._rows)
        self._rows = [row for row in self._rows if not has_failed(row)]
        if len(self._rows) < before:
            with self._errors():
                lines = self.path.read_bytes().split(b"\n")
                kept = [x for x in lines if not x.strip() or not has_failed(parse_json(x))]
                write_whole(self.path, b"\n".join(kept))
        return before - len(self._rows)

    def write(self, rows: Sequence[dict]) -> None:
        """Appends rows; if the process dies, only some of them are written."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        data = text.encode(errors="replace")
        try:
            if self._stream is not None:
                write_all(self._stream, data)
                return
            with self._opened() as file:
                file.write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(f"{str(self.path)!r} cannot be written: {reason(error)}.") from error

    def flush(self) -> None:
        """Does nothing: rows are written immediately."""


def _rows_of(prompts: Sequence[PromptRow], run: str) -> Callable[[Any], bool]:
    """Whether a row of a file is a completion of these prompts under this name of a run."""
    texts = {each.index: each.text for each in prompts}

    def is_of(row: Any) -> bool:
        named = isinstance(row, dict) and "index" in row and row.get("run") == run
        return named and texts.get(row["index"]) == row["prompt"]

    return is_of


class Printer:
    """Prints the completions of prompts in the order of the prompts, as text or JSON objects."""

    def __init__(self, order: Sequence[int], *, as_json: bool):
        self._order, self._as_json = list(order), as_json
        self._titles = len(order) > 1
        self._waiting: dict[int, list[dict]] = {}

    def write(self, rows: Sequence[dict]) -> None:
        """Prints the completions of a prompt once all prompts before it have been printed."""
        self._waiting[rows[0]["index"]] = list(rows)
        while self._order and self._order[0] in self._waiting:
            self._print(self._waiting.pop(self._order.pop(0)))

    def flush(self) -> None:
        """Prints the completions that wait for those of an earlier prompt."""
        for index in sorted(self._waiting):
            self._print(self._waiting.pop(index))

    def _print(self, rows: Sequence[dict]) -> None:
        if self._as_json:
            lines = (json.dumps(row, ensure_ascii=False) for row in rows)
            print(*(for_stream(line, sys.stdout) for line in lines), sep="\n", flush=True)
            return
        if self._titles:
            print(for_stream(f"# {rows[0]['prompt']}", sys.stdout))
        for row in rows:
            number = f"{row['sample'] + 1}. " if len(rows) > 1 else ""
            print(for_stream(f"{number}{row['completion']}", sys.stdout), flush=True)


class Live:
    """Prints one completion while it is sampled: the ``on_tokens`` of a generation."""

    def __init__(self, tokenizer, stops: Sequence[str]):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._ids: list[int] = []
        self._printed = ""

    def __call__(self, group_id, request: int, start: int, out) -> None:
        """New tokens."""
        del group_id, request, start
        self._ids += out.tokens.tolist()
        text = text_to_stop(self._ids, self._tokenizer, self._stops)
        # A character may still lack bytes, and a stop string its end.
        text = text.rstrip("\ufffd")
        # How many of the last characters may be the beginning of a stop string.
        starts = {stop[:n] for stop in self._stops for n in range(1, len(stop))}
        partial = max((len(s) for s in starts if text.endswith(s)), default=0)
        self._print(text[: len(text) - partial])

    def write(self, rows: Sequence[dict]) -> None:
        """The completion has ended: prints the rest of it."""
        self._print(rows[0]["completion"])
        self.flush()

    def flush(self) -> None:
        """Ends the line."""
        if self._ids:
            print(flush=True)
        self._ids, self._printed = [], ""

    def _print(self, text: str) -> None:
        # Printed text stays, even if later tokens change how the tokenizer reads earlier ones.
        if text.startswith(self._printed):
            sys.stdout.write(for_stream(text[len(self._printed) :], sys.stdout))
            sys.stdout.flush()
            self._printed = text
