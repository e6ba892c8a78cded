"""What the library holds, as data: it feeds the command line, the README's table and the docs."""

import dataclasses
import inspect
from collections.abc import Callable

from jaxrl_llm.core import checks
from jaxrl_llm.recipes import presets
from jaxrl_llm.recipes.catalog import (
    baselines,
    basics,
    controllers,
    curation,
    evolution,
    off_policy,
    outcomes,
    ratios,
    rollouts,
    teachers,
    tracked,
)
from jaxrl_llm.recipes.catalog.method import KINDS, Method
from jaxrl_llm.recipes.catalog.peers import PEERS
from jaxrl_llm.recipes.evolution import EvolutionRecipe
from jaxrl_llm.recipes.presets import evolution as evolution_presets
from jaxrl_llm.recipes.recipe import Recipe

__all__ = [
    "CATALOG",
    "EVOLUTION_PRESETS",
    "KINDS",
    "PRESETS",
    "Method",
    "as_table",
    "preset",
    "rows",
]

# A preset enters the battery of jaxrl_llm.testing by standing in its package.
PRESETS: dict[str, Callable[..., Recipe]] = {
    name: getattr(presets, name) for name in presets.__all__
}

EVOLUTION_PRESETS: dict[str, Callable[..., EvolutionRecipe]] = {
    name: getattr(evolution_presets, name) for name in ("eggroll", "es_qiu", "open_es")
}


def preset(name: str, *, length: float, num_prompts: int = 1) -> Recipe | EvolutionRecipe:
    """A preset by its name alone, as a command line gives it.

    Args:
      name: Key in ``PRESETS`` or ``EVOLUTION_PRESETS``.
      length: The generation budget in tokens, for the presets that need one (those with a
        parameter of this name); the others have no use for it.
      num_prompts: How many prompts the data set has, for those that remember each.

    Returns:
      A recipe with the preset's defaults.

    Raises:
      ValueError: If there is no such preset, with the nearest one.

    Example:
      >>> from jaxrl_llm.recipes import catalog
      >>> catalog.preset("dr_grpo", length=16).weights
      fixed_length(length=16)
    """
    every = {**PRESETS, **EVOLUTION_PRESETS}
    checks.check_option("preset", "name", name, every)
    make, known = every[name], {"length": length, "num_prompts": num_prompts}
    return make(**{k: v for k, v in known.items() if k in inspect.signature(make).parameters})


_ROWS = (
    *basics.ROWS,
    *baselines.ROWS,
    *off_policy.ROWS,
    *ratios.ROWS,
    *curation.ROWS,
    *tracked.ROWS,
    *outcomes.ROWS,
    *teachers.ROWS,
    *controllers.ROWS,
    *rollouts.ROWS,
    *evolution.ROWS,
)


def _with_peers(row: Method) -> Method:
    """The row with the peers whose own numbers its functions are held to."""
    labels = PEERS.get(row.key, ())
    text = "; ".join([*([", ".join(labels)] if labels else []), row.verified_against])
    return dataclasses.replace(row, verified_against=text)


CATALOG: tuple[Method, ...] = tuple(_with_peers(row) for row in _ROWS)


def rows() -> list[dict]:
    """The catalog as plain dictionaries, ready for ``json.dumps``."""
    return [dataclasses.asdict(method) for method in CATALOG]


def as_table(*, style: str = "text") -> str:
    """The catalog as a table for people.

    Args:
      style: "text" for aligned columns, "markdown" for the README.

    Returns:
      Lines without a final newline.

    Raises:
      ValueError: If ``style`` is unknown.

    Example:
      >>> from jaxrl_llm.recipes import catalog
      >>> catalog.as_table().splitlines()[1].split()[:4]
      ['grpo', 'advantage', 'grpo', '2402.03300']
    """
    checks.check_option("as_table", "style", style, ("text", "markdown"))
    header = ("method", "kind", "preset", "paper", "verified against", "title")
    lines = [(m.key, m.kind, m.preset or "", m.arxiv, m.verified_against, m.title) for m in CATALOG]
    if style == "markdown":
        table = [header, ("---",) * len(header)]
        for key, kind, preset, arxiv, *rest in lines:
            link = f"[{arxiv}](https://arxiv.org/abs/{arxiv})" if arxiv else ""
            table.append((f"`{key}`", kind, f"`{preset}`" if preset else "", link, *rest))
        return "\n".join(f"| {' | '.join(row)} |" for row in table)
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *lines)
    )
