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
from jaxrl_llm.cli import options
from jaxrl_llm.cli.methods import LENGTH, wrapped
from jaxrl_llm.core import Transform, functions_of
from jaxrl_llm.recipes import catalog
from jaxrl_llm.recipes.records import format_value

# The packages whose public functions make what a recipe holds, such as collectors.
_LAYERS = ("curation", "advantages", "regularizers", "surrogates", "diffusion", "evolution")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explain:
    """A method as its formulas with its numbers filled in, slot by slot, and where the code is.

    Attributes:
      name: Of a preset.
      beside: Of the preset that it is compared with.
    """

    name: Annotated[str, tyro.conf.Positional]
    beside: str = "grpo"


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    wanted = options.parse(Explain, arguments, command="explain")
    with options.usage_errors():
        text = explain(wanted.name, wanted.beside)
    print(text)
    return 0


def explain(name: str, beside: str = "grpo") -> str:
    """A preset's slots as text, each beside that of another preset.

    Presets that need a generation budget have that of ``jaxrl-llm methods``.

    Raises:
      ValueError: If a name is unknown.
    """
    recipe, other = (catalog.preset(each, length=LENGTH) for each in (name, beside))
    doc = inspect.getdoc({**catalog.PRESETS, **catalog.EVOLUTION_PRESETS}[name]) or ""
    lines, alike = [f"{name}: {doc.splitlines()[0]}", *_about(name), ""], []
    for field in dataclasses.fields(recipe):
        value, theirs = getattr(recipe, field.name), getattr(other, field.name, None)
        if field.name in ("name", "paper") or (value == field.default and value == theirs):
            continue
        same = format_value(value) == format_value(theirs)
        if same and not list(_functions(value)):
            alike.append(f"{field.name} = {format_value(value)}")
            continue
        note = f"as in {beside}" if same else f"{beside}: {format_value(theirs)}"
        lines += wrapped(f"{field.name} = {format_value(value)}", 0)
        lines += wrapped(f"({note})", 2) if name != beside else []
        for function, bound in _functions(value):
            lines += _described(function, bound)
        lines.append("")
    lines += wrapped(f"As in {beside}: {', '.join(alike)}", 0) if alike else []
    return "\n".join(lines).rstrip()


def _about(name: str) -> Iterator[str]:
    """The paper of a preset, by its row in the catalog, and what peers call it."""
    method = next(method for method in catalog.CATALOG if method.preset == name)
    if method.arxiv:
        yield f"https://arxiv.org/abs/{method.arxiv}, read from {method.confidence}"
    for peer, names in catalog.names_at_peers(method.key).items():
        yield from wrapped(f"{peer}: {', '.join(names)}", 0)


def _functions(value: Any) -> Iterator[tuple[Callable, Mapping[str, Any]]]:
    """The functions that a slot calls, each with the options that are bound to it."""
    if isinstance(value, Transform):
        for function in functions_of(value):
            yield from _functions(function)
    elif isinstance(value, tuple):
        for each in value:
            yield from _functions(each)
    elif inspect.isfunction(value):
        yield value, {}
    elif callable(getattr(value, "function", None)):
        bound = dict(getattr(value, "options", ()))
        for function, others in _functions(value.function):
            yield function, {**others, **bound}
    elif dataclasses.is_dataclass(value):
        maker = repr(value).partition("(")[0]  # such as that of a collector
        for layer in _LAYERS:
            if inspect.isfunction(function := getattr(getattr(jaxrl_llm, layer), maker, None)):
                known = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
                yield function, known
                return


def _described(function: Callable, bound: Mapping[str, Any]) -> list[str]:
    """Name, place, first sentence and formula of a function."""
    path = Path(inspect.getfile(function))
    root = Path(jaxrl_llm.__file__).parent.parent
    place = path.relative_to(root) if path.is_relative_to(root) else path
    line = inspect.getsourcelines(function)[1]
    lines = ["", f"  {function.__name__}, {place}:{line}"]
    doc = inspect.getdoc(function)
    if doc is None:
        return lines
    summary, _, rest = doc.partition("\n\n")
    lines += wrapped(re.sub(r":\w+:`~?([\w.]+)`", r"\1", " ".join(summary.split())), 4)
    formula = _formula(rest)
    named = re.search(r":func:`(\w+)`", summary)
    if not formula and named and inspect.isfunction(base := function.__globals__.get(named[1])):
        formula = _formula((inspect.getdoc(base) or "").partition("\n\n")[2])
    numbers = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty
    }
    numbers = {k: v for k, v in {**numbers, **bound}.items() if _is_number(v)}
    return lines + [f"      {_fill(line, numbers)}".rstrip() for line in formula]


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
    return re.sub(rf"(?<![\w.\"'])({names})(?![\w(=\"'])", lambda m: f"{numbers[m[1]]:g}", formula)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
