"""What a run is, in words: its settings, the versions of what it stands on, its devices."""

import dataclasses
import platform
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax

_PACKAGES = ("jaxrl_llm", "jax", "jaxlib", "numpy", "optax", "flax", "orbax-checkpoint")


def settings(config: Any) -> dict[str, Any]:
    """A configuration as texts and numbers by dotted names; functions stand there by their names.

    Example:
      >>> from jaxrl_llm.train import SamplingConfig
      >>> from jaxrl_llm.train.logging.settings import settings
      >>> settings(SamplingConfig(top_k=5))["top_k"]
      5
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and field.name != "recipe":
            found |= {f"{field.name}.{k}": v for k, v in settings(value).items()}
        else:
            found[field.name] = _plain(value)
    return found


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
    # The place of an object in memory says nothing of a run, and differs at every resume.
    return type(value).__name__ if " at 0x" in text else text


def surroundings() -> dict[str, str]:
    """Versions and devices of this process."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            if package == "jaxrl_llm":  # run from a checkout
                import jaxrl_llm

                found[package] = jaxrl_llm.__version__
    kinds = Counter(f"{d.platform} {d.device_kind}" for d in jax.devices())
    found["devices"] = ", ".join(f"{n} x {_once(kind)}" for kind, n in kinds.items())
    found["processes"] = str(jax.process_count())
    found["machine"] = f"{platform.system()} {platform.machine()}"
    return found


def _once(kind: str) -> str:
    """A platform whose kind is its name says it once."""
    first, _, rest = kind.partition(" ")
    return first if rest.lower() == first.lower() else kind
