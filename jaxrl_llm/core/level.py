"""Whether a function speaks of tokens or of whole sequences.

A sequence-level surrogate repeats one value over the tokens of a sequence. Averaging that value
with token weights would count long sequences more and so change the method; the Recipe asks for the
level and refuses.
"""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def sequence_level(function: F) -> F:
    """Marks a surrogate as sequence-level, or a weighting as one that keeps its meaning."""
    function.level = "sequence"  # type: ignore[attr-defined]
    return function


def level_of(function: Callable) -> str:
    """``"sequence"`` if the function (or what it is bound from) is marked so, else ``"token"``."""
    # `function` is what a Bound holds, `func` a functools.partial: both must keep the mark.
    for inner in ("function", "func"):
        function = getattr(function, inner, function)
    return getattr(function, "level", "token")
