"""The catalog of methods, as data: the source of the command line, the README and the docs.

``methods.py`` has a row per method, ``confirmed.py`` the comparisons with the code of peers,
``papers.py`` a row per paper, ``peers.py`` the names that peers use.
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Sequence

from jaxrl_llm.core import checks
from jaxrl_llm.recipes import presets
from jaxrl_llm.recipes.catalog.confirmed import CONFIRMED
from jaxrl_llm.recipes.catalog.method import KINDS, Confirmed, Method
from jaxrl_llm.recipes.catalog.methods import METHODS
from jaxrl_llm.recipes.catalog.papers import PAPERS, Paper
from jaxrl_llm.recipes.catalog.peers import PEER_NAMES, VERSIONS, PeerName, find_peer_names
from jaxrl_llm.recipes.evolution import EvolutionRecipe
from jaxrl_llm.recipes.presets import evolution as evolution_presets
from jaxrl_llm.recipes.recipe import Recipe

__all__ = [
    "CATALOG",
    "CONFIRMED",
    "EVOLUTION_PRESETS",
    "KINDS",
    "PAPERS",
    "PEER_NAMES",
    "PEER_VERSIONS",
    "PRESETS",
    "Confirmed",
    "Method",
    "Paper",
    "PeerName",
    "as_table",
    "check_preset",
    "find_peer_names",
    "names_at_peers",
    "preset",
    "rows",
    "select",
]

CATALOG: tuple[Method, ...] = METHODS
PEER_VERSIONS = VERSIONS

# A preset enters the battery of jaxrl_llm.testing by standing in its package.
PRESETS: dict[str, Callable[..., Recipe]] = {
    name: getattr(presets, name) for name in presets.__all__
}

EVOLUTION_PRESETS: dict[str, Callable[..., EvolutionRecipe]] = {
    name: getattr(evolution_presets, name) for name in ("eggroll", "es_qiu", "open_es")
}

# Width of the table as text, in columns of a terminal.
_WIDTH = 100


def preset(name: str, *, length: float, num_prompts: int = 1) -> Recipe | EvolutionRecipe:
    """A preset by its name, for the command line.

    Args:
      name: Key in ``PRESETS`` or ``EVOLUTION_PRESETS``.
      length: The generation budget in tokens, for presets with a parameter of this name; the others
        ignore it.
      num_prompts: Number of prompts of the data set, for presets that remember each prompt.

    Returns:
      A recipe with the preset's defaults, except for these two parameters; with a ``length`` a
      penalty of long responses is on, for presets that have one.

    Raises:
      ValueError: If there is no such preset; the message suggests the nearest one.

    Example:
      >>> from jaxrl_llm.recipes import catalog
      >>> catalog.preset("dr_grpo", length=16).weights
      fixed_length(length=16)
    """
    check_preset("preset", name)
    return _made(name, length, num_prompts)


def check_preset(function: str, name: str) -> None:
    """Raises ValueError unless a preset has this name; it says what to write instead.

    Example:
      >>> from jaxrl_llm.recipes import catalog
      >>> catalog.check_preset("config", "dapo_clip")
      Traceback (most recent call last):
      ValueError: config: no preset 'dapo_clip'. The preset of this method is 'dapo'.
    """
    presets = (*PRESETS, *EVOLUTION_PRESETS)
    if name in presets:
        return
    method = next((method for method in CATALOG if method.key == name), None)
    if method is None:
        near = difflib.get_close_matches(name.lower(), presets, n=3)
        meant = f"Did you mean {' or '.join(map(repr, near))}?"
        hint = meant if near else f"There are {', '.join(presets)}."
        if name.partition("(")[0] in presets:
            hint = f"A name has no options; in Python, the recipe is jr.recipes.{name}."
    elif method.preset is None:
        hint = f"This method has none: `jaxrl-llm methods {name}` shows its functions."
    else:
        hint = f"The preset of this method is {method.preset!r}."
    raise ValueError(f"{function}: no preset {name!r}. {hint}")


@functools.lru_cache(maxsize=256, typed=True)
def _made(name: str, length: float, num_prompts: int) -> Recipe | EvolutionRecipe:
    """A preset once, since a configuration asks for it often and each has a dry run."""
    make = {**PRESETS, **EVOLUTION_PRESETS}[name]
    known = {"length": length, "num_prompts": num_prompts}
    return make(**{k: v for k, v in known.items() if k in inspect.signature(make).parameters})


def select(*, kind: str | None = None, name: str | None = None) -> tuple[Method, ...]:
    """The rows of a kind or a name.

    Args:
      kind: One of ``KINDS``; None for all.
      name: A key or the name of a preset, which selects only its row; else a part of a key, a
        title, a function's name or the title of a paper, in any case. None for all.

    Raises:
      ValueError: If the kind is unknown, or no row matches; the message suggests the nearest key.

    Example:
      >>> from jaxrl_llm.recipes import catalog
      >>> [method.key for method in catalog.select(kind="surrogate", name="gspo")]
      ['gspo']
      >>> [method.key for method in catalog.select(name="soup")]
      ['salsa_soup_ref']
      >>> [method.key for method in catalog.select(name="segment-level credit")]
      ['spo_chain', 'spo_tree']
    """
    rows = CATALOG
    if kind is not None:
        checks.check_option("methods", "kind", kind, KINDS)
        rows = tuple(method for method in rows if method.kind == kind)
    if name is None:
        return rows
    exact = tuple(method for method in rows if name in (method.key, method.preset))
    if exact:
        return exact
    word = name.lower()
    of_papers = {key for p in PAPERS if word in p.title.lower() for key in p.keys}
    rows = tuple(
        method
        for method in rows
        if method.key in of_papers
        or any(word in text.lower() for text in (method.key, method.title, *method.functions))
    )
    if not rows:
        near = difflib.get_close_matches(name, [method.key for method in CATALOG], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        of_kind = "" if kind is None else f" of kind {kind!r}"
        raise ValueError(f"methods: no method{of_kind} matches {name!r}.{hint}")
    return rows


def names_at_peers(*keys: str) -> dict[str, list[str]]:
    """The names that each peer uses for methods.

    Example:
      >>> from jaxrl_llm.recipes import catalog
      >>> catalog.names_at_peers("opo")
      {'verl': ['algorithm.adv_estimator=opo']}
    """
    names: dict[str, list[str]] = {}
    for row in PEER_NAMES:
        if set(row.keys) & set(keys):
            names.setdefault(row.peer, []).append(str(row))
    return names


def rows(methods: Sequence[Method] = CATALOG) -> list[dict]:
    """Rows as plain dictionaries for ``json.dumps``, with the comparisons with peers."""
    return [
        dataclasses.asdict(method)
        | {"whole": method.whole, "confirmed": [x._asdict() for x in CONFIRMED.get(method.key, ())]}
        for method in methods
    ]


def as_table(methods: Sequence[Method] = CATALOG, *, style: str = "text") -> str:
    """Rows as a table for people.

    Args:
      methods: Rows of the catalog.
      style: "text" for aligned columns, cut at 100 characters; "markdown" for the docs.

    Returns:
      Lines without a final newline.

    Raises:
      ValueError: If ``style`` is unknown.

    Example:
      >>> from jaxrl_llm.recipes import catalog
      >>> catalog.as_table().splitlines()[1].split()[:4]
      ['grpo', 'advantage', 'whole', '2402.03300']
    """
    checks.check_option("as_table", "style", style, ("text", "markdown"))

    def peers(method: Method) -> str:
        """The peers that a method was compared with, each with the compared options."""
        by_peer: dict[str, list[str]] = {}
        for peer, function, options in CONFIRMED.get(method.key, ()):
            name = "" if len(method.functions) == 1 else f"`{function.split('.')[-1]}`"
            values = "" if options == "defaults" else options
            by_peer.setdefault(peer, []).append(" ".join(x for x in (name, values) if x))
        texts = ((peer, ", ".join(x for x in what if x)) for peer, what in by_peer.items())
        return "; ".join(f"{peer} ({text})" if text else peer for peer, text in texts)

    if style == "markdown":
        header = ("method", "kind", "preset", "trains", "paper", "confirmed by", "title")
        table = [header, ("---",) * len(header)]
        for m in methods:
            link = f"[{m.arxiv}](https://arxiv.org/abs/{m.arxiv})" if m.arxiv else ""
            preset = f"`{m.preset}`" if m.preset else ""
            by = ", by `merge` and `train`" if m.commands else ""
            trains = f"not: {m.missing}" if m.missing else _trains(m) + by
            table.append((f"`{m.key}`", m.kind, preset, trains, link, peers(m), m.title))
        return "\n".join(f"| {' | '.join(row)} |" for row in table)
    header = ("method", "kind", "trains", "paper", "title")
    lines = [header]
    lines += [(m.key, m.kind, _trains(m), m.arxiv, m.title) for m in methods]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    widths[-1] = max(8, _WIDTH - sum(widths[:-1]) - 2 * (len(widths) - 1))

    def cut(text: str, width: int) -> str:
        return (text if len(text) <= width else text[: width - 3] + "...").ljust(width)

    return "\n".join(
        "  ".join(cut(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in lines
    )


def _trains(method: Method) -> str:
    """Whether a run by the preset's name, or by the commands, trains the complete method."""
    if method.preset is None and not method.commands:
        return ""
    return "whole" if method.whole else "in part"
