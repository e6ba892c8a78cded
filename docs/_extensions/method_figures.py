"""One figure a method, on the same inputs: of the function or the preset that says most of it."""

import collections
import contextlib
import functools
import io
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import matplotlib.pyplot as plt
import method_curves
import method_own
import method_pushes
import numpy as np
from matplotlib.figure import Figure
from method_curves import KINDS, SWEEP, Kind

import jaxrl_llm as jr
from jaxrl_llm.recipes import catalog

STYLE = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
LAYERS = ("surrogates", "advantages", "preferences", "corrections", "regularizers", "rewards",
          "curation", "evolution", "aggregate", "diffusion", "rollout", "models")  # fmt: skip
# The layer of a kind of method, where it is not the kind with an s.
LAYER_OF = {"reference": "regularizers"} | {x: x for x in LAYERS if not x.endswith("s")}
# A rule over one input is the method here; elsewhere what the preset pushes says more.
RULES = ("curation", "rollout", "evolution", "reference")
# Where a method has such a function in any layer, its figure comes before that of the preset.
FIRST = [kind for kind in KINDS if kind.values in (method_curves.weight, method_curves.pair_loss)]


class Picture(NamedTuple):
    """A figure as a PNG, what it shows, and the kind of figure."""

    png: bytes
    caption: str
    kind: str


class Choice(NamedTuple):
    """A figure with its caption and its kind."""

    figure: Figure
    caption: str
    kind: str


def draw(methods: Sequence[catalog.Method]) -> dict[str, Picture]:
    """Pictures by key, of the methods that have one."""
    pictures = {}
    # Each program runs once on a few numbers, so compiling it fast is what counts.
    with plt.rc_context(STYLE), quick_compiler():
        for method in methods:
            found = choose(method)
            if found is None:
                continue
            buffer = io.BytesIO()
            found.figure.savefig(buffer, dpi=110, metadata={"Software": None})
            plt.close(found.figure)
            pictures[method.key] = Picture(buffer.getvalue(), found.caption, found.kind)
    return pictures


@contextlib.contextmanager
def quick_compiler() -> Iterator[None]:
    """XLA without most of its optimizations."""
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def choose(method: catalog.Method) -> Choice | None:
    """The first figure that suits a method: of its own functions, its preset, or any function.

    Methods that no kind suits have one of their own.
    """
    if method.key in method_own.OWN:
        return Choice(*method_own.OWN[method.key](), "own")
    own = LAYER_OF.get(method.kind, f"{method.kind}s")
    rules = (*KINDS, SWEEP)
    found = of_functions(method, own, rules if method.kind in RULES else KINDS, alone=True)
    if method.kind == "regularizer":
        found = found or of_functions(method, own, [SWEEP], alone=True)
    for layer in LAYERS:
        found = found or of_functions(method, layer, FIRST)
    found = found or of_preset(method.preset)
    for layer in (own, *LAYERS):
        found = found or of_functions(method, layer, rules)
    return found


def of_functions(
    method: catalog.Method, layer: str, kinds: Sequence[Kind], *, alone: bool = False
) -> Choice | None:
    """A figure of a method's functions in a layer; ``alone``: of those of no other method."""
    here = functions(method, layer)

    def order(name: str) -> tuple:
        named = name.startswith(method.key) or method.key.endswith(name)
        return not named, name.endswith("_returns"), shared()[f"{layer}.{name}"]

    for name in sorted(here, key=order):
        others, _, count = order(name)
        if alone and (
            others and count > 1 or name.removesuffix("_returns") in here.keys() - {name}
        ):
            continue
        for kind in kinds:
            if not kind.suits(layer, here[name]):
                continue
            group = here if kind.most > 1 else {name: here[name]}
            found = of_kind(kind, {n: f for n, f in group.items() if kind.suits(layer, f)})
            if found is not None:
                return found
    return None


def of_kind(kind: Kind, group: Mapping[str, Callable]) -> Choice | None:
    """A figure of those functions that a kind suits, if it shows anything."""
    values = {}
    for name, function in group.items():
        try:
            value = kind.values(function)
        except (TypeError, ValueError):  # it takes or returns something else
            continue
        if any(same(value, other) for other in values.values()):
            continue
        values[name] = value
        if len(values) == kind.most:
            break
    if not values:
        return None
    try:
        return Choice(kind.show(values), kind.caption(values), kind.values.__name__)
    except (TypeError, ValueError):
        return None


def same(value: object, other: object) -> bool:
    """Whether two functions would be drawn alike."""
    return isinstance(value, jax.Array) and np.allclose(value, other, rtol=1e-3)


def of_preset(preset: str | None) -> Choice | None:
    """The pushes of a preset, or the fitness of one that evolves."""
    if preset is None:
        return None
    if preset in catalog.EVOLUTION_PRESETS:
        shape = catalog.preset(preset, length=1).fitness
        kind = next(kind for kind in KINDS if kind.values is method_curves.fitness)
        return of_kind(kind, {shape.__name__: shape})
    try:
        return Choice(method_pushes.show(preset), method_pushes.caption(preset), "push")
    except ValueError:
        return None


def functions(method: catalog.Method, layer: str) -> dict[str, Callable]:
    """The functions of a method in a layer by name."""
    found = {}
    for path in method.functions:
        home, _, name = path.partition(".")
        function = operator.attrgetter(path)(jr)
        if home == layer and callable(function):
            found[name] = function
    return found


@functools.cache
def shared() -> collections.Counter:
    """How many methods have each function."""
    return collections.Counter(path for method in catalog.CATALOG for path in method.functions)
