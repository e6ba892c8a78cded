"""The text of a model's configuration, by which a checkpoint knows its model."""

import dataclasses
import re
import reprlib
import types
from typing import Any

from jaxrl_llm.core.compose import accepted
from jaxrl_llm.core.secrets import find_secrets, is_secret, mask, remember

# What the text of a model's configuration says of the precision of its products: the name of a
# dtype, its class, such as that of jnp.float32, or np.dtype.
_PRECISION = re.compile(
    r"(?:, |(?<=\())(?:dtype|quantization)=(?:'\w+'|None|<class '[\w.]+'>|dtype\('?\w+'?\))"
)
# What every model's configuration has; see ``Model.config``.
_FIELDS = ("vocab_size", "max_length", "num_layers", "num_kv_heads", "head_dim", "dtype")
# The modules of classes in a ``repr``.
_CLASS = re.compile(r"(<class ')[\w.]+\.")
_BRACKETS = {tuple: "()", list: "[]", set: "{}", frozenset: ("frozenset({", "})")}


def config_text(config: Any) -> str:
    """The text of a model's configuration, equal in every process.

    It is the ``repr``, without memory addresses and modules of classes, as a command may load the
    file that defines a class under another name. Secrets are masked.
    """
    kind, text = type(config), _text(config)
    if kind.__repr__ is object.__repr__ or " at 0x" in repr(config):
        text = re.sub(rf"(?<![\w.]){re.escape(kind.__module__)}\.", "", text)
    if secrets := find_secrets(config):
        remember(secrets)
        text = mask(text)
    return _CLASS.sub(r"\1", text)


@reprlib.recursive_repr()
def _text(value: Any) -> str:
    """The ``repr`` of a value, but of functions the names.

    An object without a ``repr`` is shown by its type, the fields that every configuration has, and
    those that its constructor takes.
    """
    kind = type(value)
    if isinstance(value, types.MethodType):
        return f"{_text(value.__self__)}.{value.__name__}"
    if kind is dict:
        return f"{{{', '.join(f'{_text(k)}: {_text(x)}' for k, x in value.items())}}}"
    if kind in _BRACKETS and value:
        shown = [_text(x) for x in value]
        if kind in (set, frozenset) and not all(isinstance(x, int | float) for x in value):
            shown.sort()  # other hashes, and so the order, are of their process
        start, end = _BRACKETS[kind]
        comma = "," if kind is tuple and len(shown) == 1 else ""
        return f"{start}{', '.join(shown)}{comma}{end}"
    text = repr(value)
    if " at 0x" in text and isinstance(name := getattr(value, "__name__", None), str):
        return name
    # A ``repr`` that was written for the class is taken as it is.
    if dataclasses.is_dataclass(kind) and hasattr(kind.__repr__, "__wrapped__"):
        names = [field.name for field in dataclasses.fields(value) if field.repr]
    elif getattr(kind.__repr__, "__module__", None) == "collections" and hasattr(kind, "_fields"):
        names = list(kind._fields)
    elif kind.__repr__ is object.__repr__:
        names = list(dict.fromkeys((*_FIELDS, *_parameters(kind))))
        names = [k for k in names if hasattr(value, k) and not is_secret(k, getattr(value, k))]
    else:
        return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    fields = ", ".join(f"{name}={_text(getattr(value, name))}" for name in names)
    return f"{kind.__name__ if isinstance(value, tuple) else kind.__qualname__}({fields})"


def _parameters(kind: type) -> list[str]:
    """The names that a constructor takes; none if it has no signature."""
    try:
        return list(accepted(kind))
    except (TypeError, ValueError):
        return []


def comparable(text: str) -> str:
    """A text of :func:`config_text`, also of an earlier version, as two of them are compared."""
    return mask(_CLASS.sub(r"\1", text))


def without_precision(model: str) -> str:
    """The text of a model's configuration without what it says of the precision of products."""
    return _PRECISION.sub("", model)
