"""Command-line parsing: options, configurations, runs and their checkpoints.

Invalid or contradictory arguments raise UsageError.
"""

import atexit
import contextlib
import copy
import dataclasses
import errno
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tyro

import jaxrl_llm
from jaxrl_llm.cli import UsageError
from jaxrl_llm.cli.rewards import find_reward
from jaxrl_llm.cli.trust import digest_of, is_noted, note
from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.compose import stable_repr
from jaxrl_llm.core.runtime.files import parse_json, reason
from jaxrl_llm.core.runtime.locks import InUseError
from jaxrl_llm.core.runtime.processes import ProcessError
from jaxrl_llm.core.runtime.terminal import str_or_type
from jaxrl_llm.core.secrets import mask
from jaxrl_llm.data.chat import dated, read_template_options, with_template_options
from jaxrl_llm.models.lora import LoRAConfig, with_adapter
from jaxrl_llm.recipes import Recipe
from jaxrl_llm.recipes.catalog import check_preset
from jaxrl_llm.train import (
    AsyncConfig,
    CheckpointError,
    Checkpoints,
    MeshConfig,
    OccupiedError,
    OptimizerConfig,
    TrainConfig,
)
from jaxrl_llm.train.checkpoint.config_text import config_text, without_precision
from jaxrl_llm.train.checkpoint.record import digest_of_files
from jaxrl_llm.train.checkpoint.serialization import base_fingerprint
from jaxrl_llm.train.experiment.experiment import Experiment
from jaxrl_llm.train.experiment.setup import with_mesh_sizes
from jaxrl_llm.train.logging.contents import date_of
from jaxrl_llm.train.logging.results import read_jsonl
from jaxrl_llm.train.optimizer import policy_optimizer

T = TypeVar("T")
_CRITIC = ("critic:optimizer-config", "critic:none")


# Errors in a command's arguments that appear only while it runs.
_WRONG = (
    ValueError, TypeError, ImportError, FileNotFoundError, NotADirectoryError, IsADirectoryError,
    FileExistsError, InUseError, OccupiedError,
)  # fmt: skip


# Why no folder of a name can be made, whoever tries.
_NAMES = (errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)


@contextlib.contextmanager
def usage_errors(prefix: str = "") -> Iterator[None]:
    """Turns errors of a command's arguments into UsageErrors, with the message without the prefix.

    These are invalid values, missing files and packages, an existing folder, and a config that
    exits the program.
    """
    try:
        yield
    except _WRONG as error:
        raise UsageError(str_or_type(error).removeprefix(prefix)) from error
    except CheckpointError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in _NAMES:
            raise
        raise UsageError(str_or_type(error)) from error
    except ProcessError as error:
        named = issubclass(error.kind, CheckpointError) and error.errno in _NAMES
        if not named and not issubclass(error.kind, _WRONG):
            raise
        raise UsageError(str_or_type(error)) from error
    except SystemExit as error:
        raise UsageError(f"the config ends the program, with sys.exit({error.code!r}).") from error


def parse(kind: type[T], arguments: Sequence[str], *, command: str, default=None) -> T:
    """Options of a command as a dataclass; tyro exits with 2 and a suggestion for unknown ones.

    A boolean of a configuration has two flags, ``--data.chat`` and ``--data.no-chat``, since the
    config file may set it either way. A boolean of a command is off by default and has one flag.
    """
    of_config, words = command == "train", list(arguments)
    if of_config and default is not None:
        words, default = _with_optimizers(kind, words, default)
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_by_name)
    with registry:
        try:
            options = tyro.cli(
                kind,
                args=words,
                prog=f"jaxrl-llm {command}",
                config=(tyro.conf.AvoidSubcommands if of_config else tyro.conf.FlagCreatePairsOff,),
                **({} if default is None else {"default": default}),
            )
            checks.check_numbers(command, options)
            return options
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from error


def _with_optimizers(kind: type, words: list[str], default: Any) -> tuple[list[str], Any]:
    """The words, and the defaults of a run in which all optimizers that the words change exist.

    tyro has options of an optional record where its default is a record. The policy's optimizer
    begins as that of the recipe, and the critic's as the policy's; one of another kind, or one that
    a word asks for, begins with the defaults of its class.
    """
    run = getattr(default, "run", default)
    asked, left_out = (word in words for word in _CRITIC)
    words = [word for word in words if word not in _CRITIC]
    shows = bool({"-h", "--help"} & set(words))
    found: dict[str, OptimizerConfig | None] = {"critic": None} if left_out else {}
    if getattr(run, "optimizer", ...) is None and (shows or _changes("optimizer", words)):
        found["optimizer"] = OptimizerConfig()
        if not _changes("optimizer.name", words):
            others = [] if shows else _without(("optimizer", "critic"), words)
            policy = parse(kind, others, command="train", default=default)
            found["optimizer"] = policy_optimizer(getattr(policy, "run", policy))
    asked |= shows and getattr(run, "critic_optimizer", None) is not None
    if getattr(run, "critic", ...) is None and (asked or _changes("critic", words)):
        found["critic"] = OptimizerConfig()
        if not asked and not _changes("critic.name", words):
            others = _without(("critic",), words)
            policy = parse(kind, others, command="train", default=default)
            found["critic"] = policy_optimizer(getattr(policy, "run", policy))
    if not found:
        return words, default
    run = copy.copy(run)
    for name, value in found.items():
        # Unchecked: whether it has an effect depends on the recipe, which the words may change.
        object.__setattr__(run, name, value)
    return words, dataclasses.replace(default, run=run) if hasattr(default, "run") else run


def _changes(option: str, words: Sequence[str]) -> bool:
    """Whether a word sets an option, or one of its record."""
    return any(re.match(rf"--{re.escape(option)}(\.|=|$)", word) for word in words)


def _without(records: Sequence[str], words: Sequence[str]) -> list[str]:
    """The words that set no option of some records."""
    rest, each = [], iter(words)
    for word in each:
        if not any(_changes(record, [word]) for record in records):
            rest.append(word)
        elif "=" not in word:
            next(each, None)
    return rest


def _not_on_command_line(words: list[str]) -> Any:
    raise ValueError("an environment is chosen in the config file, not on the command line")


_FROM_CONFIG = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="(of the config)",
    instance_from_str=_not_on_command_line,
    is_instance=lambda x: True,
    str_from_instance=lambda x: [type(x).__name__],
)


_OF_TEMPLATE = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="NAME=VALUE ...",
    instance_from_str=read_template_options,
    is_instance=lambda x: isinstance(x, Mapping),
    str_from_instance=lambda x: [f"{name}={json.dumps(value)}" for name, value in x.items()],
)


def _by_name(info: tyro.constructors.PrimitiveTypeInfo):
    """How fields that hold functions and recipes are written on a command line."""
    origin = typing.get_origin(info.type)
    if origin is Mapping:  # the options of a template
        return _OF_TEMPLATE
    if origin is tuple:  # tyro asks again for each of its elements
        return None
    is_union = origin in (typing.Union, types.UnionType)
    kinds = typing.get_args(info.type) if is_union else (info.type,)
    if all(hasattr(info.type, name) for name in ("reset", "step")):
        return _FROM_CONFIG
    if Recipe not in kinds and not any("Callable" in str(kind) for kind in kinds):
        return None

    def from_words(words: list[str]) -> Any:
        if type(None) in kinds and words[0] == "None":
            return None
        if Recipe in kinds:
            check_preset("config", words[0])
        return words[0] if str in kinds else find_reward(words[0])

    def to_words(value: Any) -> list[str]:
        if value is None or isinstance(value, str):
            return [str(value)]
        name = getattr(value, "name", None) or getattr(value, "__qualname__", None)
        return [name if isinstance(name, str) else mask(stable_repr(value))]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="PRESET" if Recipe in kinds else "NAME",
        instance_from_str=from_words,
        is_instance=lambda x: True,
        str_from_instance=to_words,
    )


def split_config(path: str) -> tuple[str, str]:
    """The file of a configuration and its name there, from ``FILE.py:NAME``; default ``config``."""
    file, _, name = path.rpartition(":")
    return (file, name) if file.endswith(".py") and name.isidentifier() else (path, "config")


def shipped_configs() -> dict[str, Path]:
    """The config files that come with the package, by name.

    A wheel has them inside the package, a clone next to it.
    """
    package = Path(jaxrl_llm.__file__).parent
    folders = (package / "configs", package.parent / "configs")
    folder = next((x for x in folders if (x / "quickstart.py").is_file()), folders[0])
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def named_config(word: str) -> str:
    """The file of a bare name, such as ``quickstart`` or ``tiny:scorer``; others are unchanged.

    A file of that name takes precedence.

    Raises:
      UsageError: If a bare name is not in :func:`shipped_configs`; the message lists them.
    """
    name, colon, part = word.partition(":")
    if not name.isidentifier() or Path(word).is_file():
        return word
    shipped = shipped_configs()
    if name not in shipped:
        raise UsageError(
            f"There is no config file {word!r}, and no config of that name comes with the package, "
            f"which has {', '.join(shipped)}."
        )
    return f"{shipped[name]}{colon}{part}"


def load_config(path: str | Path, *, name: str = "config") -> TrainConfig:
    """The configuration ``name`` that a Python file defines.

    The file is executed as a module of its own name, so that worker processes can import its
    functions. If another module has that name, such as a package that the config uses, it gets a
    private name.
    """
    path = Path(path)
    folders = [str(path.absolute().parent)]
    module_name = path.stem
    if path.is_file() and _is_taken(module_name, path):
        module_name, importable = _private_module(path, "config")
        folders.append(importable)
    return _config_of(path, name, module_name, folders)


def _is_taken(module_name: str, path: Path) -> bool:
    """Whether a module of that name is imported, or another file than this would be."""
    if module_name in sys.modules or not module_name.isidentifier():
        return True
    spec = importlib.util.find_spec(module_name)
    return spec is not None and Path(spec.origin or "").resolve() != path.resolve()


def _private_module(path: Path, kind: str, copied_from: Path | None = None) -> tuple[str, str]:
    """A module name that nothing else has, and a folder from which the file is imported by it.

    Worker processes import a function's module by name, so the folder exists as long as this
    process. Its module executes the file, for which ``__file__`` is then the same everywhere: its
    path, or that of the file that it is a copy of, beside which it may look for its data.
    """
    place, named = str(path.absolute()), str((copied_from or path).absolute())
    module_name = f"jaxrl_llm_{kind}_{hashlib.sha256(place.encode()).hexdigest()[:12]}"
    folder = tempfile.mkdtemp(prefix="jaxrl_llm_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    content = f"__import__('pathlib').Path({place!r}).read_bytes()"
    text = f"__file__ = {named!r}\nexec(compile({content}, {place!r}, 'exec'))\n"
    Path(folder, f"{module_name}.py").write_text(text, "utf-8")
    return module_name, folder


def _config_of(
    path: Path, name: str, module_name: str, folders: Sequence[str], *, executed: Path | None = None
) -> TrainConfig:
    """The configuration ``name`` of a file that runs as a module and may import from folders.

    ``executed`` is a file that executes it, if it is not executed itself.
    """
    if not path.is_file():
        hint = ""
        if path.suffix == ".py" and path.stem in shipped_configs():
            named = path.stem if name == "config" else f"{path.stem}:{name}"
            hint = f" The one that comes with the package is {named}."
        raise UsageError(f"There is no config file {str(path)!r}.{hint}")
    spec = importlib.util.spec_from_file_location(module_name, executed or path)
    if spec is None or spec.loader is None:
        raise UsageError(f"The config file {str(path)!r} must be a Python file, ending in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.extend(folders)
    try:
        path.read_text("utf-8")  # a copy goes into the folder of a run
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        kind = "" if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: "
        why = f"{kind}{str_or_type(error)}"
        raise UsageError(f"The config file {str(path)!r} fails: {why}") from error
    config = getattr(module, name, None)
    if not isinstance(config, TrainConfig):
        problem = f"does not define `{name}`" if config is None else f"defines it as {config!r}"
        others = [key for key, value in vars(module).items() if isinstance(value, TrainConfig)]
        hint = f" There is `{'`, `'.join(others)}`: {path}:{others[0]}" if others else ""
        raise UsageError(
            f"The config file {str(path)!r} must define `{name}`, a jaxrl_llm.train.TrainConfig; "
            f"it {problem}.{hint}"
        )
    return config


class Target(NamedTuple):
    """The target of a command: a configuration, and the run folder if it is a run."""

    config: TrainConfig
    run_dir: Path | None


def load_target(name: str, *, trust: bool = False) -> Target:
    """A run folder that ``jaxrl-llm train`` made, a config file, or the name of a shipped one.

    The config.py of a run is executed only if the run was made here, or with ``trust``.
    """
    if not name:
        raise UsageError("The name of a run folder or config file must not be empty.")
    path = Path(name)
    if not path.is_dir():
        if not split_config(name)[0].endswith(".py"):
            check_exists(name)
        file, config_name = split_config(named_config(name))
        return Target(load_config(file, name=config_name), None)
    if not names_run(name):
        what = "no run.json in it"
        if (path / "config.json").is_file():
            what = "its config.json is that of a model"
        raise UsageError(f"The folder {name!r} is not a run of jaxrl-llm train: {what}.")
    record = _command(path / "run.json")
    copied = path / "config.py"
    content = copied.read_bytes() if copied.is_file() else b""
    made = digest_of(content, record)
    if trust:
        note(made)
    elif not is_noted(made):
        raise UsageError(
            f"The run {name!r} was not made here or was changed since, and opening it executes its "
            "config.py: read that file, and if you trust it, give --trust, which is needed once."
        )
    # The name is private, since the config may itself import a module called `config` from the
    # folder that it was copied from.
    file, config_name = split_config(record["config"])
    folder = record.get("folder")
    module_name, importable, executed = "config", "", None
    if copied.is_file():
        beside = Path(folder, Path(file).name) if folder else None
        module_name, importable = _private_module(copied, "run", beside)
        executed = Path(importable, f"{module_name}.py")
    folders = [word for word in (importable, folder) if word]
    config = _config_of(copied, config_name, module_name, folders, executed=executed)
    return Target(parse_config(config, record["overrides"]), path)


def _command(path: Path) -> dict[str, Any]:
    """The command that started a run, of its run.json."""
    try:
        record = parse_json(path.read_bytes())
    except ValueError as error:
        where = f"line {error.lineno}: " if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(f"{str(path)!r} is damaged: {where}{str_or_type(error)}.") from error
    names = {"config": str, "overrides": list}
    for name, kind in names.items():
        if not isinstance(record, dict) or not isinstance(record.get(name), kind):
            raise UsageError(f"{str(path)!r} is damaged: it lacks {name!r}.")
    if not all(isinstance(word, str) for word in record["overrides"]):
        raise UsageError(f"{str(path)!r} is damaged: 'overrides' are not all texts.")
    return record


def parse_config(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """A configuration with overrides from the command line."""
    return parse(TrainConfig, overrides, command="train", default=config)


def names_run(name: str) -> bool:
    """Whether a name is the folder of a run; a folder with a model's config.json is a model."""
    path = Path(name)
    return bool(name) and (path / "run.json").is_file() and not (path / "config.json").is_file()


class CheckpointChoice(NamedTuple):
    """The checkpoint of a run, ``target``, that a command reads: the last by default.

    ``trust`` opens a run that was not made here.
    """

    target: str
    step: int | None
    best: bool
    trust: bool = False

    def check(self, config: TrainConfig | None) -> None:
        """Raises UsageError if the run with this configuration has no such checkpoint."""
        used = {"--step": self.step is not None, "--best": self.best, "--trust": self.trust}
        for option in filter(used.get, used):
            if config is None:
                raise UsageError(f"{option} has no effect on {self.target!r}, which is not a run.")
        if self.best and self.step is not None:
            raise UsageError("--step has no effect with --best.")
        if self.best and config is not None and config.checkpoint.best is None:
            raise UsageError(
                f"The run {self.target!r} saved no best checkpoint; it has no checkpoint.best."
            )

    def resolve(self, checkpoints: Checkpoints) -> int | None:
        """The step to read; None for the last checkpoint that is readable."""
        if not self.best:
            return self.step
        best = checkpoints.best_step()
        if best is None:
            raise UsageError(f"The run {self.target!r} has no checkpoint yet that was rated.")
        return best

    def restore(
        self, run_dir: Path, experiment: Experiment, params: ArrayTree, **marks: str
    ) -> tuple[ArrayTree, Checkpoints]:
        """The policy of the checkpoint, from the parameters before training; the checkpoints.

        The questions must be those of the run: of others, it may have trained on held-out ones.
        So must be what ``marks`` identifies, such as a reference.
        """
        config = experiment.config
        marks |= base_fingerprint(params, config.lora) | {"questions": experiment.questions}
        checkpoints = Checkpoints(
            run_dir / "checkpoints",
            model=experiment.model,
            best=config.checkpoint.best,
            run=marks,
        )
        return checkpoints.restore_policy(params, step=self.resolve(checkpoints)), checkpoints


class Policy(NamedTuple):
    """A model with its parameters and tokenizer; for a run, also what it comes from."""

    model: Any
    params: Any
    tokenizer: Any
    config: TrainConfig | None = None
    step: int | None = None
    checkpoint: str | None = None  # a digest of its files

    def function(self) -> tuple[str, LoRAConfig]:
        """What computes the model's results from its parameters, in any precision."""
        lora = LoRAConfig() if self.config is None else self.config.lora
        return without_precision(config_text(self.model.config)), lora


def check_exists(name: str) -> None:
    """Raises UsageError for the name of no file in a folder of runs, such as a mistyped run.

    It is then not looked for on the hub.
    """
    beside = Path(name).parent if not Path(name).exists() and "/" in name else None
    if beside is not None and any(names_run(str(x)) for x in beside.glob("*")):
        raise UsageError(f"There is no run {name!r}.")


def load_policy(
    choice: CheckpointChoice,
    *,
    dtype: str | None = None,
    template_options: Mapping[str, Any] | None = None,
    check: Callable[[TrainConfig], None] = lambda config: None,
) -> Policy:
    """The model of a name, or of a run at the chosen checkpoint.

    ``dtype`` None is float32, or that of the run. ``template_options`` are those of the chat
    template, in place of the run's of the same names. ``check`` may raise UsageError for the
    configuration of a run, before anything is loaded.
    """
    name = choice.target
    if not names_run(name):
        from jaxrl_llm import data, models

        choice.check(None)
        check_exists(name)
        with usage_errors():
            # Before the weights: an option that the template does not read is an error.
            tokenizer = with_template_options(data.load_tokenizer(name), template_options)
            model, params = models.load_model(name, dtype=dtype or "float32")
            return Policy(model, params, tokenizer)
    from jaxrl_llm.train.experiment.run_models import load_model

    config, _ = load_target(name, trust=choice.trust)
    choice.check(config)
    if config.resolved_recipe.needs.head:
        raise UsageError(
            f"The run {name!r} trained a reward model, which writes no text; export it and score "
            "with train.reward_model."
        )
    check(config)
    config = add_template_options(config, template_options)
    before = in_its_precision(Path(name), config)
    if dtype is not None:
        with usage_errors():
            config = dataclasses.replace(config, dtype=dtype)
    with usage_errors():
        model, params, tokenizer = load_model(without_start(config), None)
        model, params = with_adapter(model, params, config.lora)
        frozen = params
        if config.lora.rank is not None and before.product_dtype != config.product_dtype:
            there, weights, _ = load_model(before, None)
            frozen = with_adapter(there, weights, config.lora)[1]
        checkpoints = Checkpoints(
            Path(name) / "checkpoints",
            model=model,
            best=config.checkpoint.best,
            run=base_fingerprint(frozen, config.lora),
        )
        params = checkpoints.restore_policy(params, step=choice.resolve(checkpoints))
    files = digest_of_files(checkpoints.path(checkpoints.last or 0))
    return Policy(model, params, tokenizer, config, checkpoints.last, files)


def add_template_options(config: TrainConfig, options: Mapping[str, Any] | None) -> TrainConfig:
    """The config with options of the chat template in place of those of the same names."""
    if not options:
        return config
    data, both = config.data, {**config.data.template_options, **options}
    with usage_errors():
        return dataclasses.replace(config, data=dataclasses.replace(data, template_options=both))


def without_start(config: TrainConfig) -> TrainConfig:
    """The config without ``init_from``, which may be gone, if a checkpoint has all weights."""
    return config if config.lora.rank is not None else dataclasses.replace(config, init_from=None)


def on_these_devices(config: TrainConfig) -> TrainConfig:
    """The config of a run for what only samples: without devices apart, on one if its mesh fails.

    A mesh takes all devices or one, so that of a run fits no machine of another size.
    """
    import jax

    config = dataclasses.replace(config, asynchrony=AsyncConfig())
    try:
        with_mesh_sizes(config)
    except ValueError:
        sizes = dataclasses.astuple(config.mesh)
        had = f"had a mesh of {math.prod(sizes)} devices" if -1 not in sizes else "had another mesh"
        print(f"The run {had}; one of {jax.device_count()} is used.", file=sys.stderr)
        return dataclasses.replace(config, mesh=MeshConfig())
    return config


def in_its_precision(run_dir: Path, config: TrainConfig) -> TrainConfig:
    """The config with the dtype that "auto" was in a run that trained an adapter.

    The frozen weights are rounded to it, and the checkpoint knows them by their values.
    """
    sessions = run_dir / "sessions.jsonl"
    if config.dtype != "auto" or config.lora.rank is None or not sessions.is_file():
        return config
    settings = [row["settings"] for row in read_jsonl(sessions) if "settings" in row]
    dtype = settings[-1].get("dtype") if settings else None
    return dataclasses.replace(config, dtype=dtype) if isinstance(dtype, str) else config


def on_its_date(name: str) -> contextlib.AbstractContextManager[None]:
    """A context in which chat templates write the date of a run; of what is no run, the present."""
    return dated(date_of(Path(name)) if names_run(name) else None)


def check_creatable(path: str | Path) -> None:
    """Raises UsageError if a file or folder cannot be created, before its content is computed.

    Folders above it that do not exist are created with it.
    """
    above = next(each for each in Path(path).absolute().parents if os.path.lexists(each))
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be created: {reason(error)}.") from error


def use_compilation_cache() -> None:
    """Stores compiled programs in the user's cache, so that the next start is fast.

    The cache is not locked: a program that another process is still writing, or was killed while it
    wrote, cannot be read, and is compiled here.
    """
    import warnings

    import jax

    text = "Error reading persistent compilation cache entry"
    warnings.filterwarnings("ignore", text, UserWarning)
    if jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(Path(base) / "jaxrl_llm" / "jax"))
