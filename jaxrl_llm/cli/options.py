"""From words on the command line to configurations: tyro, config files, names of functions."""

import importlib.util
import json
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tyro

from jaxrl_llm.cli import UsageError
from jaxrl_llm.recipes import EVOLUTION_PRESETS, PRESETS, Recipe
from jaxrl_llm.train import TrainConfig

T = TypeVar("T")


def parse(kind: type[T], arguments: Sequence[str], *, command: str, default=None) -> T:
    """Options of a command as a dataclass; tyro exits with 2 and a suggestion for unknown ones.

    Raises:
      UsageError: If the options are known but do not fit together.
    """
    arguments = _critic_last(arguments) if command == "train" else arguments
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_by_name)
    options = {} if default is None else {"default": default}
    with registry:
        try:
            return tyro.cli(
                kind,
                args=list(arguments),
                prog=f"jaxrl-llm {command}",
                config=(tyro.conf.FlagCreatePairsOff,),
                **options,
            )
        except (ValueError, TypeError) as error:
            raise UsageError(str(error)) from error


_CRITIC = ("critic:optimizer-config", "critic:none")


def _critic_last(arguments: Sequence[str]) -> list[str]:
    """The words about the critic behind all others: tyro reads an optional part as a subcommand.

    An option of it chooses it; ``critic:optimizer-config`` and ``critic:none`` do so without any.
    """
    chosen, own, rest = [], [], []
    words = iter(arguments)
    for word in words:
        if word in _CRITIC:
            chosen.append(word)
        elif word.startswith("--critic."):
            own += [word] if "=" in word else [word, *[w for w in [next(words, None)] if w]]
        else:
            rest.append(word)
    return [*rest, *(chosen or _CRITIC[:1] * bool(own)), *own]


def _by_name(info: tyro.constructors.PrimitiveTypeInfo):
    """How fields that hold functions and recipes are written on a command line."""
    origin = typing.get_origin(info.type)
    if origin is tuple:  # of several such words, each of which comes here as well
        return None
    union = origin in (typing.Union, types.UnionType)
    parts = typing.get_args(info.type) if union else (info.type,)
    if Recipe not in parts and not any("Callable" in str(part) for part in parts):
        return None
    optional = type(None) in parts
    named = str in parts

    def from_words(words: list[str]) -> Any:
        if optional and words[0] == "None":
            return None
        presets = (*PRESETS, *EVOLUTION_PRESETS)
        if Recipe in parts and words[0] not in presets:
            raise ValueError(f"no preset {words[0]!r}; there are {', '.join(presets)}")
        return words[0] if named else find_reward(words[0])

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="PRESET" if Recipe in parts else "NAME",
        instance_from_str=from_words,
        is_instance=lambda x: True,
        str_from_instance=lambda x: [x if isinstance(x, str) else _name(x)],
    )


def _name(value: Any) -> str:
    if value is None:
        return "None"
    return getattr(value, "name", None) or getattr(value, "__qualname__", None) or repr(value)


def find_reward(name: str) -> Callable:
    """The built-in reward of a name.

    Raises:
      ValueError: If there is none of that name.
    """
    from jaxrl_llm import rewards

    kind, _, task = name.partition(":")
    if kind == "last_integer" and not task:
        return rewards.last_integer
    if kind == "math_verify" and not task:
        return _MathVerify()
    if kind == "reasoning_gym" and task:
        return rewards.reasoning_gym(task)
    raise ValueError(
        f"no reward {name!r}; there are last_integer, math_verify and reasoning_gym:TASK, and a "
        "config file can use any function"
    )


class _MathVerify:
    """`math_verify` in processes that start with the first batch, not while options are read."""

    name = "math_verify"
    patience = 600.0  # the pool's

    def __init__(self):
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("math_verify needs its package: pip install 'jaxrl_llm[train]'")
        self._pool: Any = None

    def score_batch(self, prompts, completions, metadata) -> list[Any]:
        """Values of a batch, from the pool."""
        from jaxrl_llm import rewards

        if self._pool is None:
            self._pool = rewards.math_verify_pool()
        return self._pool.score_batch(prompts, completions, metadata)

    def __call__(self, prompt, completion, metadata) -> Any:
        """The value of one completion."""
        return self.score_batch([prompt], [completion], [metadata])[0]


def split_config(path: str) -> tuple[str, str]:
    """The file of a configuration and its name there: of ``FILE.py:NAME``, or ``config``."""
    file, _, name = path.rpartition(":")
    return (file, name) if file.endswith(".py") and name.isidentifier() else (path, "config")


def load_config(
    path: str | Path, *, name: str = "config", folder: str | None = None
) -> TrainConfig:
    """A configuration that a Python file defines.

    The file is run as a module of its own name, so that worker processes find its functions.

    Args:
      path: The file.
      name: Of the configuration in it.
      folder: Where the modules are that it imports, if not beside it.

    Raises:
      UsageError: If there is no such file, it fails, or it defines no TrainConfig.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"There is no config file {str(path)!r}.")
    module_name = path.stem
    if module_name in sys.modules or not module_name.isidentifier():
        module_name = f"jaxrl_llm_config_{abs(hash(str(path.absolute())))}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"The config file {str(path)!r} must be a Python file, ending in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.append(str(path.absolute().parent))
    if folder is not None:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        kind = "" if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: "
        raise UsageError(f"The config file {str(path)!r} fails: {kind}{error}") from error
    config = getattr(module, name, None)
    if not isinstance(config, TrainConfig):
        found = f"does not define `{name}`" if config is None else f"defines it as {config!r}"
        there = [key for key, value in vars(module).items() if isinstance(value, TrainConfig)]
        hint = f" There is `{'`, `'.join(there)}`: {path}:{there[0]}" if there else ""
        raise UsageError(
            f"The config file {str(path)!r} must define `{name}`, a jaxrl_llm.train.TrainConfig; "
            f"it {found}.{hint}"
        )
    return config


class Target(NamedTuple):
    """What a command is pointed at: a configuration, and the run folder if it is a run."""

    config: TrainConfig
    run_dir: Path | None


def load_target(name: str) -> Target:
    """A run folder that ``jaxrl-llm train`` made, or a config file.

    Raises:
      UsageError: If it is neither.
    """
    path = Path(name)
    if not path.is_dir():
        file, own = split_config(name)
        return Target(load_config(file, name=own), None)
    record = path / "run.json"
    if not record.is_file():
        raise UsageError(f"The folder {name!r} is not a run of jaxrl-llm train: no run.json in it.")
    found = json.loads(record.read_text())
    own = split_config(found["config"])[1]
    config = load_config(path / "config.py", name=own, folder=found.get("folder"))
    return Target(parse_config(config, found["overrides"]), path)


def parse_config(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """A configuration with options of the command line laid over it."""
    return parse(TrainConfig, overrides, command="train", default=config)


def is_run(name: str) -> bool:
    """Whether a name is the folder of a run."""
    return (Path(name) / "run.json").is_file()


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache, so that the second start is quick."""
    import os

    import jax

    if jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(Path(base) / "jaxrl_llm" / "jax"))
