"""``jaxrl-llm explain``."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

import jaxrl_llm
from jaxrl_llm.cli import UsageError, options
from jaxrl_llm.cli.methods import LENGTH, wrapped
from jaxrl_llm.core import Transform, functions_of
from jaxrl_llm.recipes import catalog
from jaxrl_llm.recipes.records import format_value

# The packages whose public functions make what a recipe holds, such as collectors.
_LAYERS = ("curation", "advantages", "regularizers", "surrogates", "diffusion", "evolution")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explain:
    """Shows a method's formulas with its numbers filled in, slot by slot, and where the code is.

    Attributes:
      name: Name of a preset, or the key of its method.
      beside: Name of the preset to compare with.
    """

    name: Annotated[str, tyro.conf.Positional]
    beside: str = "grpo"


@dataclasses.dataclass(frozen=True)
class Described:
    """A function of a slot: its name, its place, its first sentence and its formula's lines."""

    name: str
    place: str
    summary: str
    formula: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Slot:
    """A slot of a recipe next to the same slot of another recipe.

    Attributes:
      field: Name of the slot.
      value: Its value, as text.
      other: The value in the other recipe.
      functions: The functions that it calls.
    """

    field: str
    value: str
    other: str
    functions: tuple[Described, ...]


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    _check_one_name(arguments)
    wanted = options.parse(Explain, arguments, command="explain")
    with options.usage_errors():
        text = explain(_preset_of(wanted.name), _preset_of(wanted.beside))
    print(text)
    return 0


def _check_one_name(arguments: Sequence[str]) -> None:
    """Raises UsageError for two names without an option, which says how to compare them."""
    words, names = iter(arguments), []
    for word in words:
        if word == "--beside":
            next(words, None)
        elif not word.startswith("-"):
            names.append(word)
    if len(names) > 1:
        name, other, *_ = names
        raise UsageError(
            f"explain shows one method; to compare two: jaxrl-llm explain {name} --beside {other}"
        )


def _preset_of(name: str) -> str:
    """The preset of a method's key; any other name unchanged."""
    if name in catalog.PRESETS or name in catalog.EVOLUTION_PRESETS:
        return name
    presets = {method.key: method.preset for method in catalog.CATALOG}
    preset = presets.get(name, name)
    if preset is None:
        raise ValueError(f"{name!r} has no preset; `jaxrl-llm methods {name}` describes it.")
    return preset


def explain(name: str, beside: str = "grpo") -> str:
    """A preset's slots as text, each next to that of another preset.

    Presets that need a generation budget get that of ``jaxrl-llm methods``.

    Raises:
      ValueError: If a name is unknown.
    """
    alike, lines = [], []
    both = slots(name, beside)
    doc = inspect.getdoc({**catalog.PRESETS, **catalog.EVOLUTION_PRESETS}[name]) or ""
    for slot in both:
        same = slot.value == slot.other
        if same and not slot.functions:
            alike.append(f"{slot.field} = {slot.value}")
            continue
        lines += wrapped(f"{slot.field} = {slot.value}", 0)
        note = f"as in {beside}" if same else f"{beside}: {slot.other}"
        lines += wrapped(f"({note})", 2) if name != beside else []
        for each in slot.functions:
            lines += ["", f"  {each.name}, {each.place}", *wrapped(each.summary, 4)]
            lines += [f"      {line}".rstrip() for line in each.formula]
        lines.append("")
    lines += wrapped(f"As in {beside}: {', '.join(alike)}", 0) if alike else []
    head = [f"{name}: {doc.splitlines()[0]}", *_about(name), *_cost(name)]
    return "\n".join([*head, "", *lines]).rstrip()


def slots(name: str, beside: str = "grpo") -> list[Slot]:
    """The slots of a preset whose value is not the default in both recipes.

    Raises:
      ValueError: If a name is unknown.
    """
    recipe, other = (catalog.preset(each, length=LENGTH) for each in (name, beside))
    # What the recipe computes takes the place of a default, and is no number before a run.
    computed = {each.name: each.source for each in getattr(recipe, "computed", ())}
    found = []
    for field in dataclasses.fields(recipe):
        value, theirs = getattr(recipe, field.name), getattr(other, field.name, None)
        if field.name in ("name", "paper") or (value == field.default and value == theirs):
            continue
        functions = tuple(_described(f, {**computed, **bound}) for f, bound in _functions(value))
        found.append(Slot(field.name, format_value(value), format_value(theirs), functions))
    return found


def _about(name: str) -> Iterator[str]:
    """The paper of a preset, by its row in the catalog, and what peers call it."""
    method = next((method for method in catalog.CATALOG if method.preset == name), None)
    if method is None:  # a preset that is being written
        yield "no row in the catalog yet: recipes/catalog/methods.py"
        return
    if method.arxiv:
        yield f"https://arxiv.org/abs/{method.arxiv}, read from {method.confidence}"
    for peer, names in catalog.names_at_peers(method.key).items():
        yield from wrapped(f"{peer}: {', '.join(names)}", 0)


def _cost(name: str) -> list[str]:
    """What a batch of a preset costs besides its optimizer steps."""
    if name in catalog.EVOLUTION_PRESETS:
        return []
    from jaxrl_llm.train.update.cost import describe

    recipe: Any = catalog.preset(name, length=LENGTH)
    text = describe(recipe, epochs=recipe.epochs, minibatches=recipe.minibatches)
    return wrapped(text, 0)


def _functions(value: Any) -> Iterator[tuple[Callable, Mapping[str, Any]]]:
    """The functions that a slot calls, each with its bound options and the entries it is given."""
    if isinstance(value, Transform):
        for function in functions_of(value):
            yield from _functions(function)
    elif isinstance(value, tuple):
        for each in value:
            yield from _functions(each)
    elif inspect.isfunction(value):
        yield value, {}
    elif callable(getattr(value, "function", None)):
        bound = dict(getattr(value, "options", ())) | dict(getattr(value, "names", ()))
        for function, others in _functions(value.function):
            yield function, {**others, **bound}
    elif dataclasses.is_dataclass(value):
        maker = repr(value).partition("(")[0]  # such as that of a collector
        for layer in _LAYERS:
            if inspect.isfunction(function := getattr(getattr(jaxrl_llm, layer), maker, None)):
                known = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
                yield function, known
                return


def _described(function: Callable, bound: Mapping[str, Any]) -> Described:
    """A function, its formula with the numbers of its options."""
    path = Path(inspect.getfile(function))
    root = Path(jaxrl_llm.__file__).parent.parent
    place = path.relative_to(root) if path.is_relative_to(root) else path
    place = f"{place}:{inspect.getsourcelines(function)[1]}"
    doc = inspect.getdoc(function)
    if doc is None:
        return Described(function.__name__, place, "", ())
    summary = " ".join(doc.partition("\n\n")[0].split())
    summary = re.sub(r":\w+:`~?([\w.]+)`", r"\1", summary)
    numbers = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty
    }
    numbers = {k: v for k, v in {**numbers, **bound}.items() if _is_number(v)}
    filled = tuple(_fill(line, numbers) for line in formula_of(function))
    return Described(function.__name__, place, summary, filled)


def formula_of(function: Callable) -> list[str]:
    """The formula of a docstring, or that of the function that its first sentence names."""
    summary, _, rest = (inspect.getdoc(function) or "").partition("\n\n")
    formula = _formula(rest)
    named = re.search(r":func:`(\w+)`", summary)
    known = getattr(function, "__globals__", {})
    if not formula and named and inspect.isfunction(base := known.get(named[1])):
        formula = _formula((inspect.getdoc(base) or "").partition("\n\n")[2])
    return formula


def _formula(text: str) -> list[str]:
    """The indented lines that a docstring's text begins with."""
    lines = []
    for line in text.split("\n"):
        if line and not line.startswith("    "):
            break
        lines.append(line)
    return textwrap.dedent("\n".join(lines)).strip("\n").split("\n") if any(lines) else []


def _fill(formula: str, numbers: Mapping[str, float]) -> str:
    """A formula with numbers in the place of options."""
    names = "|".join(map(re.escape, sorted(numbers, key=len, reverse=True)))
    if not names:
        return formula
    option = rf"(?<![\w.\"'])({names})(?![\w(\[=\"'])"
    return re.sub(option, lambda m: f"{numbers[m[1]]:g}", formula)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
