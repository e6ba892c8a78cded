"""Completions as rows of a JSONL file, as text, and as text that is still being written."""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxrl_llm.cli import UsageError
from jaxrl_llm.cli.prompts import Asked
from jaxrl_llm.rollout import Completion
from jaxrl_llm.rollout.types import CANCELLED, FAILED, LENGTH, STOP

FINISH = {LENGTH: "length", STOP: "stop", FAILED: "failed", CANCELLED: "cancelled"}
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


def text_of(ids: Sequence[int], tokenizer, stops: Sequence[str]) -> str:
    """The text of token ids up to the first stop string."""
    text = tokenizer.decode(ids)
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def to_row(asked: Asked, sample: int, text: str, completion: Completion, run: str) -> dict:
    """A completion as an object of the JSONL file; log-probabilities are sums over its tokens."""
    out = completion.out
    values = (
        asked.index,
        sample,
        text,
        FINISH[completion.finish],
        len(completion),
        round(float(np.sum(out.behavior_logp, dtype=np.float64)), 5),
        round(float(np.sum(out.model_logp, dtype=np.float64)), 5),
        run,
    )
    row = dict(zip(FIELDS, values, strict=True))
    head = {name: row.pop(name) for name in FIELDS[:2]}
    return {**head, **asked.fields, "prompt": asked.text, **row}


def digest(settings: Mapping[str, Any]) -> str:
    """Names what a completion depends on apart from its prompt."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class OutFile:
    """A JSONL file to which completions are appended, group by group.

    Args:
      path: The file; its folder must exist.

    Raises:
      UsageError: If it cannot be written, or what it holds is not JSONL.
    """

    def __init__(self, path: Path):
        self.path = path
        with self._opened() as file:
            self._rows = self._read(file)

    def _opened(self) -> BinaryIO:
        try:
            return self.path.open("a+b")
        except OSError as error:
            raise UsageError(f"{str(self.path)!r} cannot be written: {error.strerror}.") from error

    def _read(self, file: BinaryIO) -> list[dict]:
        """The rows that are there; a last one that was cut off is taken out of the file."""
        file.seek(0)
        rows, end = [], 0
        for number, line in enumerate(file.read().split(b"\n"), 1):
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError as error:
                if end + len(line) < file.tell():
                    raise UsageError(f"Line {number} of {str(self.path)!r} is not JSON.") from error
                file.truncate(end)
                return rows
            rows += [row] if isinstance(row, dict) and "index" in row else []
            end += len(line) + 1
        if line:
            file.write(b"\n")
        return rows

    def __len__(self) -> int:
        return len(self._rows)

    def done(self, asked: Sequence[Asked], run: str) -> set[tuple[int, int]]:
        """Index and sample of the completions of these prompts that are there already."""
        texts = {each.index: each.text for each in asked}
        return {
            (row["index"], row["sample"])
            for row in self._rows
            if row.get("run") == run and texts.get(row["index"]) == row["prompt"]
        }

    def write(self, rows: Sequence[dict]) -> None:
        """Appends rows, all of them or, if the process dies, some."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with self._opened() as file:
            file.write(text.encode(errors="replace"))

    def flush(self) -> None:
        """Nothing waits."""


class Printer:
    """Prints the completions of prompts in the order of the prompts.

    Args:
      order: The places of all prompts.
      as_json: One JSON object a line instead of text.
    """

    def __init__(self, order: Sequence[int], *, as_json: bool):
        self._order, self._as_json = list(order), as_json
        self._titles = len(order) > 1
        self._held: dict[int, list[dict]] = {}

    def write(self, rows: Sequence[dict]) -> None:
        """Prints the completions of a prompt, or keeps them until it is their turn."""
        self._held[rows[0]["index"]] = list(rows)
        while self._order and self._order[0] in self._held:
            self._print(self._held.pop(self._order.pop(0)))

    def flush(self) -> None:
        """Prints what waits for prompts that have not been answered."""
        for index in sorted(self._held):
            self._print(self._held.pop(index))

    def _print(self, rows: Sequence[dict]) -> None:
        if self._as_json:
            print(*(json.dumps(row, ensure_ascii=False) for row in rows), sep="\n", flush=True)
            return
        if self._titles:
            print(f"# {rows[0]['prompt']}")
        for row in rows:
            number = f"{row['sample'] + 1}. " if len(rows) > 1 else ""
            print(f"{number}{row['completion']}", flush=True)


class Live:
    """Prints one completion while it is being sampled: the ``on_tokens`` of a generation.

    Args:
      tokenizer: A ``data.Tokenizer``.
      stops: Stop strings, which are not shown.
    """

    def __init__(self, tokenizer, stops: Sequence[str]):
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._ids: list[int] = []
        self._shown = ""

    def __call__(self, group_id, request: int, start: int, out) -> None:
        """New tokens."""
        del group_id, request, start
        self._ids += out.tokens.tolist()
        text = text_of(self._ids, self._tokenizer, self._stops)
        # A character may still lack bytes, and a stop string its end.
        text = text.rstrip("\ufffd")
        self._show(text[: len(text) - self._begun(text)])

    def write(self, rows: Sequence[dict]) -> None:
        """The completion is over: shows what was held back."""
        self._show(rows[0]["completion"])
        self.flush()

    def flush(self) -> None:
        """Ends the line."""
        if self._ids:
            print(flush=True)
        self._ids, self._shown = [], ""

    def _begun(self, text: str) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        starts = {stop[:n] for stop in self._stops for n in range(1, len(stop))}
        return max((len(s) for s in starts if text.endswith(s)), default=0)

    def _show(self, text: str) -> None:
        # What is out stays, even if a tokenizer reads the same tokens otherwise with more of them.
        if text.startswith(self._shown):
            sys.stdout.write(text[len(self._shown) :])
            sys.stdout.flush()
            self._shown = text
