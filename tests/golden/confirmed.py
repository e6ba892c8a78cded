"""What each peer confirmed, read off the comparisons themselves.

`python tests/golden/confirmed.py` traces our side of every entry of the golden data, notes which
functions of the catalog it calls directly and with which options, and writes them into the catalog.
A row has the functions that it names, and those in the slots of its preset; a comparison of any
other function confirms no part of the row's method.
"""

import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import golden_data
import golden_ours
import jax
import jax.numpy as jnp

import jaxrl_llm as jr
from jaxrl_llm.recipes import catalog

FILE = Path(catalog.__file__).parent / "confirmed.py"

Calls = dict[str, dict[str, set[str]]]  # function -> option -> values; "" holds the default calls


@functools.cache
def functions() -> dict[CodeType, tuple[str, Callable]]:
    """The functions of the catalog by their code."""
    paths = {path for method in catalog.CATALOG for path in method.functions}
    plain = {path: inspect.unwrap(operator.attrgetter(path)(jr)) for path in sorted(paths)}
    return {f.__code__: (path, f) for path, f in plain.items() if inspect.isfunction(f)}


def text(value: Any) -> str | None:
    """An option's value in a message; None for arrays and what has no name."""
    if isinstance(value, bool | int | str | None):
        return repr(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        parts = [text(x) for x in value]
        return None if None in parts or not parts else ", ".join(filter(None, parts))
    name = getattr(value, "__name__", None) if callable(value) else None
    return None if name is None or "<" in name else name


def changed(function: Callable, values: Mapping[str, Any]) -> dict[str, str]:
    """The keyword options of a call that are not the function's defaults."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name in values:
            value = text(values[parameter.name])
            if value is not None and value != text(parameter.default):
                found[parameter.name] = value
    return found


def functions_in(value: Any) -> set[str]:
    """The functions of the catalog in the slots of a recipe, and in the options of their binds."""
    if inspect.isfunction(value):
        known = functions().get(inspect.unwrap(value).__code__)
        return {known[0]} if known else set()
    if dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        parts = value.values() if isinstance(value, Mapping) else value
        parts = parts if isinstance(parts, Iterable) and not isinstance(parts, str) else ()
    return set().union(*map(functions_in, parts))


@functools.cache
def in_slots(key: str) -> set[str]:
    """The functions of the catalog in the slots of a row's preset.

    Weights put the numbers of other functions together, and are confirmed with their own row.
    """
    (method,) = (method for method in catalog.CATALOG if method.key == key)
    if method.preset is None:
        return set()
    every = functions_in(catalog.preset(method.preset, length=8, num_prompts=4))
    return {path for path in every if not path.startswith("aggregate.")}


def calls(ours: golden_data.Ours, inputs: Mapping) -> list[tuple[str, dict[str, str]]]:
    """The functions of the catalog that ours calls, but not those that they call themselves."""
    known, found = functions(), []

    def note(frame, event, _):
        if event != "call" or frame.f_code not in known:
            return
        path, function = known[frame.f_code]
        call = (path, changed(function, frame.f_locals))
        outer = frame.f_back
        while outer is not None:
            if outer.f_code in known:
                return
            outer = outer.f_back
        found.append(call)

    arrays = {name: jnp.asarray(x) for name, x in inputs.items()}
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        if ours.host:
            ours.run(inputs)
        else:
            jax.eval_shape(lambda a: ours.run(a), arrays)
    finally:
        sys.setprofile(before)
    return found


def confirmed() -> dict[str, tuple[catalog.Confirmed, ...]]:
    """By key of the catalog: peer, function and options."""
    jax.clear_caches()  # a function that this process has traced before would not be called
    rows = {method.key: set(method.functions) for method in catalog.CATALOG}
    found: dict[tuple[str, str], Calls] = {}
    for name, table in sorted(golden_ours.tables().items()):
        manifest = golden_data.load(name)
        for entry in manifest.entries.values():
            inputs = manifest.inputs[entry["inputs"]][entry["cases"][0]]
            made = calls(table[entry["name"]], inputs)
            for key in entry["keys"]:
                named, slots = rows[key], in_slots(key)
                own = [call for call in made if call[0] in named]
                others = [call for call in made if call[0] in slots]
                by_function = found.setdefault((key, manifest.label), {})
                for path, options in own or others:
                    values = by_function.setdefault(path, {})
                    if not options:
                        values.setdefault("", set())
                    for option, value in options.items():
                        values.setdefault(option, set()).add(value)
    result: dict[str, tuple[catalog.Confirmed, ...]] = {}
    for (key, peer), by_function in sorted(found.items(), key=lambda x: (x[0][0], x[0][1].lower())):
        row = tuple(
            catalog.Confirmed(peer, path, options_text(values))
            for path, values in sorted(by_function.items())
        )
        result[key] = (*result.get(key, ()), *row)
    return result


def options_text(values: dict[str, set[str]]) -> str:
    """Values that were compared: "defaults", and then what else."""
    named = [f"{k}={' or '.join(sorted(v))}" for k, v in sorted(values.items()) if k]
    return "; ".join([*(["defaults"] if "" in values else []), *named])


def module() -> str:
    """The text of the catalog's file."""
    lines = [
        '"""What the code of peers confirmed: which function, with which options.',
        "",
        "Written by `python tests/golden/confirmed.py` from the comparisons with the golden data.",
        '"""',
        "",
        "from jaxrl_llm.recipes.catalog.method import Confirmed",
        "",
        "# Key of the catalog, peer, function, options.",
        "# fmt: off",
        "_ROWS = (",
    ]
    for key, row in confirmed().items():
        for peer, path, options in row:
            quoted = options.replace('"', '\\"')
            head = f'    ("{key}", "{peer}", "{path}",'
            one = f'{head} "{quoted}"),'
            lines += [one] if len(one) <= 100 else [head, *_split(quoted)]
    lines += [
        ")",
        "# fmt: on",
        "",
        "CONFIRMED: dict[str, tuple[Confirmed, ...]] = {}",
        "for _key, _peer, _function, _options in _ROWS:",
        "    _row = Confirmed(_peer, _function, _options)",
        "    CONFIRMED[_key] = (*CONFIRMED.get(_key, ()), _row)",
        "",
    ]
    return "\n".join(lines)


def _split(options: str, width: int = 84) -> list[str]:
    """A long text as literals in lines of their own."""
    parts, line = [], ""
    for word in options.split(" "):
        if len(line) + len(word) + 1 > width:
            parts.append(line)
            line = ""
        line += word + " "
    parts.append(line.rstrip())
    lines = [f'        "{part}"' for part in parts]
    return [*lines[:-1], lines[-1] + "),"]


if __name__ == "__main__":
    FILE.write_text(module(), encoding="utf-8")
    print(f"{FILE}: {sum(map(len, confirmed().values()))} functions of peers")
