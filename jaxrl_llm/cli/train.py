"""``jaxrl-llm train``."""

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro

import jaxrl_llm
from jaxrl_llm.cli import UsageError, options
from jaxrl_llm.cli.trust import digest_of, note
from jaxrl_llm.core.runtime import processes
from jaxrl_llm.core.runtime.terminal import visible
from jaxrl_llm.core.secrets import find_secrets, remember
from jaxrl_llm.train import DistributedConfig, TrainConfig
from jaxrl_llm.train.logging.run_folder import without_secrets
from jaxrl_llm.train.logging.settings import changed_score
from jaxrl_llm.train.loop import run_to_end
from jaxrl_llm.train.run import begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Trains a model from a config file; every option of the file can be overridden here.

    Attributes:
      config: A Python file that defines `config`, a TrainConfig, or FILE.py:NAME; or the name of a
        config that comes with the package, such as quickstart.
      run: The configuration.
      resume: Continue from the last checkpoint in the run folder, or start if there is none yet.
      allow_changed: With --resume, continue even if settings that affect training differ.
      overwrite: Start over if the run folder has a run, which is deleted.
      plan: Only print the memory that the run needs on each device, and whether it fits.
      plan_memory: Memory in GB (10^9 bytes) of each device to plan for; the devices need not be
        present, and the sizes of the mesh give their number.
      distributed: The processes of the run; each is started with the same command.
    """

    config: tyro.conf.Positional[str]
    run: Annotated[TrainConfig, tyro.conf.arg(name="")]
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    allow_changed: tyro.conf.FlagCreatePairsOff[bool] = False
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    plan: tyro.conf.FlagCreatePairsOff[bool] = False
    plan_memory: float | None = None
    distributed: DistributedConfig = DistributedConfig()


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    if arguments and not arguments[0].startswith("-"):
        arguments = [options.named_config(arguments[0]), *arguments[1:]]
    split = [options.split_config(word) for word in arguments]
    files = ((*pair, word) for pair, word in zip(split, arguments, strict=True))
    path, name, word = next((x for x in files if x[0].endswith(".py")), (None, "config", ""))
    if path is None:
        if not {"-h", "--help"} & set(arguments):
            text = "A config file, or the name of one, is needed: jaxrl-llm train quickstart"
            raise UsageError(text)
        print(_HELP.format(names=", ".join(options.shipped_configs())))
        return 0
    default = Train(config=word, run=options.load_config(path, name=name))
    args = options.parse(Train, arguments, command="train", default=default)
    if args.plan or args.plan_memory is not None:
        return _plan(args)
    if args.allow_changed and not args.resume:
        raise UsageError("--allow-changed has no effect without --resume.")
    if args.overwrite and args.resume:
        raise UsageError("--overwrite has no effect with --resume.")
    with options.usage_errors():
        args.distributed.start()
    overrides = config_words(arguments, word)
    remember(find_secrets(args.run))
    text = without_secrets("config.py", Path(path).read_text("utf-8"))
    versions = {"jaxrl_llm": jaxrl_llm.__version__, "jax": jax.__version__}
    # The folder, since the config may import modules from it.
    record = {"config": word, "folder": str(Path(path).absolute().parent)}
    record |= {"overrides": overrides, "versions": versions}
    record = json.loads(without_secrets("run.json", json.dumps(record)))
    note(digest_of(text.encode(), record))
    files = {"config.py": text, "run.json": json.dumps(record, indent=1) + "\n"}
    options.use_compilation_cache()

    def print_line(line: str) -> None:
        from tqdm import tqdm

        tqdm.write(visible(line), file=sys.stdout)
        sys.stdout.flush()

    log = print_line if processes.is_first() else None
    with contextlib.ExitStack() as stack:
        with options.usage_errors():
            begun = begin(
                args.run,
                resume=args.resume,
                allow_changed=args.allow_changed,
                overwrite=args.overwrite,
                log=log,
                files=files,
            )
            run = stack.enter_context(begun)
        try:
            result = run_to_end(run)
        except SystemExit as error:
            text = f"What the config calls ends the program, with sys.exit({error.code!r})."
            raise RuntimeError(text) from error
    if log is not None:
        rows = {row["step"]: row.get("settings") for row in result.history if "held_out" in row}
        first, last = rows.get(0) or {}, rows.get(int(result.state.step)) or {}
        for kind, after in result.after.items():
            before = result.before.get(kind)
            alike = not (first and last and changed_score(first, last, kind))
            gain = f" ({after.mean - before.mean:+.3f})" if before and alike else ""
            log(f"held out, {kind:<7}  before {before}  after {after}{gain}")
        step = int(result.state.step)
        if result.interrupted is not None:
            log(f"Interrupted after step {step}; go on with the same command and --resume.")
        checkpoint = f"The checkpoint of step {step}, metrics.jsonl" if step else "metrics.jsonl"
        log(f"{checkpoint} and report.html: {result.run_dir}")
    processes.finish()
    # After SIGTERM, as where a machine is taken away, the exit code is 0: nothing is lost.
    return 128 + signal.SIGINT if result.interrupted == signal.SIGINT else 0


def _plan(args: Train) -> int:
    """Prints the plan of a run; 2 if it does not fit."""
    from jaxrl_llm.train.memory.memory_plan import OutOfMemory, plan_text

    if not args.plan:
        raise UsageError("--plan-memory has no effect without --plan.")
    if args.plan_memory is not None and args.plan_memory <= 0:
        raise UsageError(f"--plan-memory must be above 0; got {args.plan_memory:g}.")
    for name in ("resume", "allow_changed", "overwrite"):
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')} has no effect with --plan.")
    if args.distributed != DistributedConfig():
        raise UsageError("the options of --distributed have no effect with --plan.")
    memory = None if args.plan_memory is None else args.plan_memory * 1e9
    with options.usage_errors():
        try:
            print(plan_text(args.run, memory=memory))
        except OutOfMemory as error:
            print(error)
            raise UsageError("the run does not fit the memory of its devices.") from error
    return 0


def config_words(arguments: Sequence[str], path: str) -> list[str]:
    """The arguments that set the configuration, without those about this start of the run."""
    words, settings, starts = iter(arguments), [], ("--resume", "--allow-changed", "--overwrite")
    for word in words:
        if word.startswith("--distributed."):
            if "=" not in word and not word.endswith("detect"):
                next(words, None)
        elif word != path and word.replace("_", "-") not in starts:  # either spelling is taken
            settings.append(word)
    return settings


_HELP = """usage: jaxrl-llm train CONFIG [options]

Trains a model from a config file. CONFIG is a Python file that defines `config`, a
jaxrl_llm.train.TrainConfig, or FILE.py:NAME for another TrainConfig in it. Each of its fields is an
option, such as --optimizer.learning-rate 1e-5. With a config, --help shows all options and their
values:

  jaxrl-llm train quickstart --help

A name without a folder or a file ending is a config that comes with the package, and tiny:flow is
another TrainConfig in that file:
{names}.

Ctrl-C ends a run after the current step, with a checkpoint and exit code 130. SIGTERM, as when a
machine is preempted, does the same with exit code 0. The same command with --resume continues.

On several hosts, start it on each with --distributed.detect, or with the other options of
--distributed: docs/pods.md."""
