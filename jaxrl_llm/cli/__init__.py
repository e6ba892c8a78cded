"""Layer 5: the command line, ``jaxrl-llm train|evaluate|sample|pairs|serve|...``.

Exit codes: 0 done, 1 failed, 2 wrong usage (unknown option, a config that does not fit together),
130 after Ctrl-C. After SIGTERM ``train`` saves and exits 0, the others die of it. An error is one
sentence on stderr; ``--debug`` shows where it came from instead.
"""

import contextlib
import difflib
import importlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from jaxrl_llm.core.runtime.compiler import copy_functions_late
from jaxrl_llm.core.runtime.heap import keep_freed_memory
from jaxrl_llm.core.runtime.terminal import str_or_type, visible
from jaxrl_llm.core.runtime.threads import end_within
from jaxrl_llm.core.secrets import mask

COMMANDS = {
    "train": "train a model from a config file",
    "evaluate": "measure a run, or the model of a config, on its held-out questions",
    "sample": "sample completions of prompts",
    "pairs": "sample right and wrong answers and write them as preference pairs",
    "serve": "answer requests for tokens and chats over HTTP",
    "export": "export the model of a run as a Hugging Face folder",
    "merge": "average or merge models into a Hugging Face folder",
    "report": "write a page about a run, finished or in progress",
    "methods": "list the methods of this package",
    "explain": "show the formulas of a method, slot by slot, alone or next to another",
}

_HELP = """usage: jaxrl-llm COMMAND [options]

Reinforcement learning of language models in JAX.

commands:
{commands}

options:
  -h, --help  show this text; after a command, its options
  --version   show the version of the package
  --debug     show where an error came from

example:
  jaxrl-llm train quickstart --optimizer.learning-rate 1e-5"""


class UsageError(Exception):
    """The words of a command are wrong, or contradict each other."""


# Seconds that the process may go on after its command: a call that hangs in another thread, or
# a file system that does not answer, must not hold it for ever. Some sinks upload what is left.
_AFTER_SUCCESS, _AFTER_FAILURE, _AFTER_INTERRUPT = 600.0, 60.0, 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Without arguments it runs those of the process, which then ends soon after, whatever still runs
    in its threads.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a locale lacks must not end a run
            stream.reconfigure(errors="backslashreplace")
    if argv is None:  # not for the process of a caller
        copy_functions_late()
        if sys.argv[1:2] == ["train"]:
            keep_freed_memory()
    code, seconds = 1, _AFTER_FAILURE  # for a BaseException, which nothing below turns into a code
    try:
        code = _run(argv)
        seconds = _AFTER_FAILURE if code else _AFTER_SUCCESS
    except KeyboardInterrupt:
        print("\njaxrl-llm: stopped; checkpoints that were saved remain.", file=sys.stderr)
        code, seconds = 130, _AFTER_INTERRUPT
    finally:
        if argv is None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            end_within(seconds, code)
    if code:
        _leave(code)
    return code


def _leave(code: int) -> None:
    """Where there are other processes, a failed one does not wait for them."""
    if "jax" in sys.modules:
        from jaxrl_llm.core.runtime import processes

        processes.leave(code)


def shown(text: str) -> str:
    """A message for a terminal: without secrets, and with its control characters written out."""
    return visible(mask(text))


def _of_tracing(error: Exception) -> str | None:
    """What to change, if a function that is compiled needs the values of its arrays; else None."""
    if "jax" not in sys.modules:
        return None
    errors = sys.modules["jax"].errors
    if not isinstance(error, errors.TracerArrayConversionError | errors.ConcretizationTypeError):
        return None
    frame = traceback.extract_tb(error.__traceback__)[-1]  # jax leaves its own frames out
    return (
        f"{frame.name} (line {frame.lineno} of {frame.filename}) reads the values of an array "
        "while it is compiled; use jax.numpy for NumPy, and jnp.where for an if."
    )


def _run(argv: Sequence[str] | None) -> int:
    def show_warning(message, category, filename, lineno, file=None, line=None) -> None:
        """A warning as one line; those of other packages are left out."""
        del filename, lineno, file, line
        if issubclass(category, UserWarning):
            print(f"jaxrl-llm: warning: {shown(str(message))}", file=sys.stderr)

    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
        print(_HELP.format(commands="\n".join(lines)))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from jaxrl_llm import __version__

        print(f"jaxrl-llm {__version__}")
        return 0
    name = arguments[0]
    try:
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(COMMANDS)}."
            raise UsageError(f"There is no command {name!r}.{hint}")
        warnings.showwarning = show_warning
        try:
            command = importlib.import_module(f"jaxrl_llm.cli.{name}")
        except ModuleNotFoundError as error:
            extras = "train,serve" if name == "serve" else "train"
            raise UsageError(
                f"This command needs {error.name}: pip install 'jaxrl_llm[{extras}]'."
            ) from error
        return command.run(arguments[1:])
    except SystemExit as stop:  # tyro has printed the problem or the help
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:  # the reader of our output has closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the flush at exit)
        return 128 + 13
    except Exception as error:
        code = 2 if isinstance(error, UsageError) else 1
        if debug:
            print(shown("".join(traceback.format_exception(error))), end="", file=sys.stderr)
            return code
        prefix = f"jaxrl-llm {name}" if name in COMMANDS else "jaxrl-llm"
        text = _of_tracing(error) or " ".join(str_or_type(error).split())
        clear = (UsageError, ValueError, TypeError, OSError, RuntimeError, ImportError)
        if not text or not isinstance(error, clear):  # the message alone does not tell
            text = f"{type(error).__name__}: {text} (--debug shows where)".replace(": (", " (")
        elif type(error).__name__ == "RewardError" and error.__cause__ is not None:
            text = f"{text.rstrip('.')} (--debug shows the whole traceback)."
        print(f"{prefix}: error: {shown(text)}", file=sys.stderr)
        return code
