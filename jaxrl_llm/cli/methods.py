"""``jaxrl-llm methods``."""

import dataclasses
import inspect
import json
import operator
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Annotated

import tyro

import jaxrl_llm
from jaxrl_llm.cli import UsageError, options
from jaxrl_llm.recipes import catalog
from jaxrl_llm.recipes.records import format_value

_WIDTH = 100
# Stands for the generation budget in the recipe of a preset that needs one.
LENGTH = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Methods:
    """Lists the methods of this package: which train by name, and which were compared with peers.

    Attributes:
      name: A method's key or a preset's name shows its details; a part of a key, a title, a
        function's name or the title of a paper lists all matches.
      kind: List only methods of this kind.
      like: A peer's name for a method: TRL:loss_type=dapo, verl:adv_estimator=opo, rlax:vtrace.
        Without the peer, all peers are searched; the peer alone lists all of its names.
      json: Print a JSON list instead of a table.
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    kind: str | None = None
    like: str | None = None
    json: bool = False


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    wanted = options.parse(Methods, arguments, command="methods")
    if wanted.like is not None:
        return _like(wanted.like, wanted)
    with options.usage_errors("methods: "):
        methods = catalog.select(kind=wanted.kind, name=wanted.name)
    if wanted.json:
        print(json.dumps(catalog.rows(methods), indent=1))
    elif wanted.name is not None and len(methods) == 1:
        print(describe(methods[0]))
    else:
        print(catalog.as_table(methods))
    return 0


def _like(text: str, wanted: Methods) -> int:
    """Prints what a peer's name is here."""
    if wanted.kind is not None:
        raise UsageError("--like has no effect with --kind.")
    if wanted.name is not None:
        raise UsageError(f"--like takes one name, and has no effect with another ({wanted.name}).")
    with options.usage_errors("methods: "):
        rows = catalog.find_peer_names(text)
    if wanted.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
        return 0
    blocks = []
    for row in rows:
        lines = [f"{row.peer} {catalog.PEER_VERSIONS[row.peer]}: {row}"]
        lines += wrapped(f"here     {row.ours}", more=9)
        lines += wrapped(f"differs  {row.differs}", more=9) if row.differs else []
        lines += wrapped(f"methods  {', '.join(row.keys)}", more=9) if row.keys else []
        blocks.append("\n".join(lines))
    first = {row.keys[:1] for row in rows}
    if len(first) == 1 and first != {()}:
        blocks.append("The first of these methods, with its own defaults:")
        blocks.append(describe(*catalog.select(name=rows[0].keys[0])))
    print("\n\n".join(blocks))
    return 0


def describe(method: catalog.Method) -> str:
    """The details of one method, in lines of at most 100 characters."""
    lines = [*textwrap.wrap(f"{method.key}: {method.title}", _WIDTH), ""]
    if method.arxiv:
        lines.append(f"paper       https://arxiv.org/abs/{method.arxiv}")
    for paper in catalog.PAPERS:
        if method.key in paper.keys:
            lines += wrapped(paper.title, 12, more=0)
    lines.append(f"kind        {method.kind}")
    if method.arxiv:
        lines.append(f"confidence  {method.confidence}")
    if method.preset:
        trains = "whole" if method.whole else f"without {method.missing}"
        lines += textwrap.wrap(f"trains      {trains}", _WIDTH)
    elif method.commands:
        lines += ["trains      whole, by", *(f"  {command}" for command in method.commands)]
    elif method.missing:
        lines += textwrap.wrap(f"trains      not: it needs {method.missing}", _WIDTH)
    lines += ["", "functions"]
    for path in method.functions:
        lines += _signature(f"jr.{path}", operator.attrgetter(path)(jaxrl_llm))
    if method.preset:
        make = {**catalog.PRESETS, **catalog.EVOLUTION_PRESETS}[method.preset]
        recipe = catalog.preset(method.preset, length=LENGTH)
        lines += ["", "preset", *_signature(f"jr.recipes.{method.preset}", make), ""]
        takes_length = "length" in inspect.signature(make).parameters
        lines.append(f"its recipe{f' with length={LENGTH}' if takes_length else ''}")
        for field in dataclasses.fields(recipe):
            value = getattr(recipe, field.name)
            if field.default is dataclasses.MISSING or value != field.default:
                lines += wrapped(f"{field.name} = {format_value(value)}")
    lines += ["", "confirmed by"]
    for peer, function, compared in catalog.CONFIRMED.get(method.key, ()):
        lines += wrapped(f"{peer}: {function}, {compared}")
    lines += wrapped(f"own checks: {method.verified_against}")
    names = catalog.names_at_peers(method.key)
    if names:
        lines += ["", "at peers (--like tells what differs)"]
        lines += [
            line for peer, of in names.items() for line in wrapped(f"{peer}: {', '.join(of)}")
        ]
    return "\n".join(lines)


def _signature(name: str, function: Callable) -> list[str]:
    """``name(parameters)`` without annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    plain = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    return wrapped(re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", f"{name}{plain}"))


def wrapped(text: str, indent: int = 2, *, more: int = 4) -> list[str]:
    """Lines of a text with an indent, and with ``more`` from the second line on."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + more),
        break_long_words=False,
        break_on_hyphens=False,
    )
