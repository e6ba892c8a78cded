"""Commands and configs with options out of sense: one sentence, exit code 2, and no file.

python wrong_commands.py COUNT: prints a line for each, and what it came to: "refused", or "planned"
where the options make sense after all. Half are options of the command line, half of a config file;
``--plan`` keeps any from training.
"""

import contextlib
import dataclasses
import io
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm.cli import main as run_command
from jaxrl_llm.train import TrainConfig

LEAKS = re.compile(r"Traceback|(Attribute|Type|Key|Index|Overflow|Assertion|Recursion|Name)Error")
ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "tiny.py"
VALUES = (
    "nan", "inf", "-inf", "1e39", "-1", "0", "2.5", "True", "None", "x", "", "[]", "{}", "1,2",
    str(2**31), str(2**64), "-" + str(2**64), "\0", "é\u202e", "../..", "/dev/full", "a" * 5_000,
)  # fmt: skip
OBJECTS = (
    'float("nan")', 'float("inf")', "1e39", "-1", "0", "2.5", "True", "None", '"x"', '""', "[]",
    "{}", "(1, 2)", "2**31", "2**64", "-(2**64)", "b'x'", "object()", "print", "lambda: 0", "type",
    "Ellipsis", "10**400",
)  # fmt: skip
CONFIG = """import importlib.util
import dataclasses
spec = importlib.util.spec_from_file_location("tiny", {path!r})
tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)
config = tiny.config
config = dataclasses.replace(config, {outer}={value})
"""


def options() -> list[str]:
    """Every option of a run, with the section that it is in."""
    names = []
    for field in dataclasses.fields(TrainConfig):
        factory = field.default_factory
        section = factory() if factory is not dataclasses.MISSING else None
        if dataclasses.is_dataclass(section):
            names += [f"{field.name}.{x.name}" for x in dataclasses.fields(section)]
        else:
            names.append(field.name)
    return names


def cases(folder: Path, count: int) -> Iterator[tuple[str, list[str]]]:
    """A name of each case and the words of its command."""
    names = options()
    for n in range(count):
        rng = random.Random(n)
        if n % 2:
            picked = rng.sample(names, rng.randint(1, 2))
            words = [f"--{name.replace('_', '-')}={rng.choice(VALUES)}" for name in picked]
            yield f"command {n}: {words}", ["train", str(TINY), "--plan", *words]
            continue
        name, value = rng.choice(names), rng.choice(OBJECTS)
        section, _, field = name.rpartition(".")
        if section:
            value = f"dataclasses.replace(config.{section}, {field}={value})"
        file = folder / "config.py"
        file.write_text(CONFIG.format(path=str(TINY), outer=section or field, value=value))
        yield f"config {n}: {name} = {value}", ["train", str(file), "--plan"]


def outcome(words: list[str], folder: Path) -> str:
    """What a command came to, in a folder of its own."""
    before, err = sorted(os.listdir(folder)), io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = run_command(words)
    except BaseException as error:
        return f"it raises {error!r}"[:300]
    text = err.getvalue()
    if sorted(os.listdir(folder)) != before:
        return "it leaves files"
    # A sentence of ours has no name of an exception of Python's.
    if LEAKS.search(text) or (code and not text.strip()):
        return f"it says {text[-300:]!r}"
    return {0: "planned", 2: "refused"}.get(code, f"code {code}: {text[-300:]!r}")


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="jaxrl_llm-commands-"))
    os.chdir(folder)
    (folder / "runs").mkdir()
    (folder / "config.py").touch()
    for name, words in cases(folder, int(sys.argv[1])):
        print(json.dumps([name, "died"]), flush=True)
        print(json.dumps([name, outcome(words, folder)]), flush=True)


if __name__ == "__main__":
    main()
