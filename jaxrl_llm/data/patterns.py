"""Regular expressions of a tokenizer's file, tested in another process before they are used.

They come with the model, and the engine of `tokenizers` backtracks: ``(x+)+y`` takes unbounded time
on a few dozen characters. Each is tested on runs of the characters that it names.
"""

import json
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LENGTH = 2048  # of a run; harmless expressions take time of its square, far below a second
_RUNS = 64  # of one expression
_CLASSES = ("a", "A", " ", "\n", "\t", "1", ".", "'", "\u00e9", "\u4e2d", "\u0301")
_CPU_SECONDS, _SECONDS, _MEMORY = 10, 300.0, 2**32


def check_patterns(settings: Any) -> None:
    """Tests the expressions of tokenizer.json that split or change text.

    Raises:
      ValueError: If they take more than ten seconds of CPU time for a few texts of 2,048
        characters, or the engine gives up on one.
    """
    steps = ("normalizer", "pre_tokenizer", "decoder")
    named = [settings.get(name) for name in steps] if isinstance(settings, dict) else []
    trials = [(pattern, _runs(pattern)) for pattern in dict.fromkeys(_patterns(named))]
    if not trials:
        return
    limits = [str(_CPU_SECONDS), str(_MEMORY)]
    script = Path(__file__).with_name("_try_patterns.py")
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(script), *limits],
            input=json.dumps(trials).encode(),
            capture_output=True,
            timeout=_SECONDS,
        )
        output, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        output, errors = error.stdout or b"", b""
    lines = output.decode(errors="replace").splitlines()
    if lines and lines[-1] == "done":
        return
    began = [line for line in lines if re.fullmatch(r"\d+ \d+", line)]
    if not began:
        told = errors.decode(errors="replace").strip().splitlines()
        raise ValueError(f"its regular expressions cannot be tried ({(told or ['killed'])[-1]})")
    number, place = map(int, began[-1].split())
    pattern, texts = trials[number]
    why = lines[-1] if lines[-1] != began[-1] else f"it takes more than {_CPU_SECONDS} s"
    raise ValueError(
        f"its regular expression {pattern[:80]!r} fails on {_LENGTH:,} characters "
        f"that begin with {texts[place][:8]!r}: {why}"
    )


def _patterns(value: Any) -> Iterator[str]:
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from _patterns(inner)
    if isinstance(value, dict) and isinstance(value.get("Regex"), str):
        yield value["Regex"]


def _runs(pattern: str) -> list[str]:
    """Texts of one repeated piece, after which a match fails and has to go back.

    At their end is every character of the expression: one that is nowhere ends a search at once.
    """
    letters = [x for x in pattern if x not in string.punctuation or x in "-_/#@&\"'`~,;:<>=!%"]
    words = re.findall(r"[^\W_]{2,}", pattern)
    pieces = list(dict.fromkeys([*_CLASSES, *letters, *words]))[:_RUNS]
    end = "\x01" + "".join(dict.fromkeys(pattern))
    return [(piece * _LENGTH)[:_LENGTH] + end for piece in pieces]
