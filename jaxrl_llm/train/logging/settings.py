"""A run in words: its settings, the versions of its packages, its devices."""

import dataclasses
import platform
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax

from jaxrl_llm.recipes import EVOLUTION_PRESETS, PRESETS
from jaxrl_llm.recipes.catalog import preset
from jaxrl_llm.recipes.records import format_value

_PACKAGES = ("jaxrl_llm", "jax", "jaxlib", "numpy", "optax", "flax", "orbax-checkpoint")


def settings(config: Any) -> dict[str, Any]:
    """A configuration as texts and numbers by dotted names; functions by their names.

    Example:
      >>> from jaxrl_llm.train import SamplingConfig
      >>> from jaxrl_llm.train.logging.settings import settings
      >>> settings(SamplingConfig(top_k=5))["top_k"]
      5
    """
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "recipe":
            flat |= recipe_settings(value, length=config.sampling.max_new_tokens)
        elif dataclasses.is_dataclass(value):
            flat |= {f"{field.name}.{k}": v for k, v in settings(value).items()}
        else:
            flat[field.name] = _plain(value)
    return flat


def recipe_settings(recipe: Any, *, length: int) -> dict[str, Any]:
    """A recipe by its name, in which slots it differs from the preset of that name, and its slots.

    Slots that hold nothing are left out.

    Args:
      recipe: A recipe, or the name of a preset.
      length: Tokens of the longest response, for presets that depend on it.

    Example:
      >>> from jaxrl_llm.train.logging.settings import recipe_settings
      >>> recipe_settings("rloo", length=8)["recipe"]
      'rloo'
    """
    name = recipe if isinstance(recipe, str) else recipe.name
    flat, presets = {"recipe": name}, []
    if name in (*PRESETS, *EVOLUTION_PRESETS):
        presets = [preset(name, length=length, num_prompts=count) for count in (1, 2)]
    slots = presets[0] if isinstance(recipe, str) else recipe
    for field in dataclasses.fields(slots):
        if field.name != "name" and (value := getattr(slots, field.name)) not in (None, (), ""):
            slot = isinstance(value, tuple) or callable(value)
            flat[f"recipe.{field.name}"] = format_value(value) if slot else _plain(value)
    if presets and not isinstance(recipe, str):

        def values(name: str) -> list:
            return [getattr(each, name) for each in (recipe, *presets)]

        names = [field.name for field in dataclasses.fields(presets[0])]
        # Where both presets differ, the slot depends on the number of questions.
        changed = [k for k in names for slot, a, b in [values(k)] if slot != a and a == b]
        flat["recipe.changed_slots"] = ", ".join(changed) or "none"
    return flat


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return ", ".join(str(_plain(x)) for x in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_plain(v)}" for k, v in value.items())
    named = callable(value) and not dataclasses.is_dataclass(value)
    name = getattr(value, "__qualname__", None) or getattr(value, "name", None)
    if named and isinstance(name, str):
        return name
    text = repr(value)
    # An address in memory differs at every resume.
    return type(value).__name__ if " at 0x" in text else text


# Settings of the length of a run, of what it reports and of how its work is laid out. They do not
# change what is learned, so a resumed run may have others.
_FREE = (
    "steps", "run_dir", "samples_shown", "samples_every", "max_skipped", "reward_deadline",
    "microbatches", "remat", "packing", "mesh", "checkpoint", "evaluation", "report",
    "reference_logp",
)  # fmt: skip


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ and that a resumed run should not change, by name, with both values.

    Example:
      >>> changed_settings({"seed": 1, "steps": 5}, {"seed": 2, "steps": 9})
      {'seed': (1, 2)}
    """
    names = [name for name in {**new, **old} if name.partition(".")[0] not in _FREE]
    values = {name: (old.get(name), new.get(name)) for name in names}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def surroundings() -> dict[str, str]:
    """Versions and devices of this process."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            if package == "jaxrl_llm":  # run from a checkout
                import jaxrl_llm

                versions[package] = jaxrl_llm.__version__
    devices = Counter((d.platform, d.device_kind) for d in jax.devices())
    versions["devices"] = ", ".join(
        f"{n} x {name}" if kind.lower() == name.lower() else f"{n} x {name} {kind}"
        for (name, kind), n in devices.items()
    )
    versions["processes"] = str(jax.process_count())
    versions["machine"] = f"{platform.system()} {platform.machine()}"
    return versions
