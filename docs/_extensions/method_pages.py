"""One page a method: its formulas, its numbers, what was compared with whom, and its claim.

Everything comes from the catalog, from the code and from benchmarks/results.
"""

import dataclasses
import inspect
import json
import operator
import re
from pathlib import Path

import formulas
import method_figures

import jaxrl_llm
from benchmarks.papers_page import verdicts
from jaxrl_llm.cli import explain
from jaxrl_llm.recipes import catalog

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT / "benchmarks" / "results" / "claims"
PRESETS = {**catalog.PRESETS, **catalog.EVOLUTION_PRESETS}
READ = {
    "CODE": "the released code",
    "PAPER": "the paper",
    "NOTES": "notes on the paper",
    "ABSTRACT": "the abstract of the paper",
}


def pages() -> dict[str, str | bytes]:
    """The pages of all methods, their figures, and an index by kind."""
    figures = method_figures.draw(catalog.CATALOG)
    without = [method.key for method in catalog.CATALOG if method.key not in figures]
    if without:
        raise RuntimeError(f"methods without a figure: {', '.join(without)}; see method_own.py")
    claims, differences = verdicts(), sections(ROOT / "docs" / "same_name_different_number.md")
    found: dict[str, str | bytes] = {"methods/index.md": index()}
    for method in catalog.CATALOG:
        found[f"methods/{method.key}.md"] = "\n".join(
            [
                *head(method),
                *functions(method),
                *figure(method, figures),
                *recipe(method),
                *confirmed(method),
                *claimed(method, claims),
                *at_peers(method, differences),
                *code(method),
            ]
        )
        found[f"methods/figures/{method.key}.png"] = figures[method.key].png
    return found


def index() -> str:
    """The methods by kind."""
    text = (
        "All methods of the catalog by kind. Each page has the formula, the defaults, the projects "
        "that confirmed the numbers, and the names of the method in other libraries."
    )
    lines = ["# Methods", "", text, ""]
    for kind in catalog.KINDS:
        methods = catalog.select(kind=kind)
        lines += [
            f"## {kind.capitalize()}",
            "",
            "| method | preset | paper |",
            "| --- | --- | --- |",
        ]
        for m in methods:
            paper = f"[{m.arxiv}](https://arxiv.org/abs/{m.arxiv})" if m.arxiv else ""
            preset = f"`{m.preset}`" if m.preset else ""
            lines.append(f"| [{m.title}]({m.key}.md) | {preset} | {paper} |")
        lines.append("")
    return "\n".join(lines)


def head(method: catalog.Method) -> list[str]:
    """Title, paper, and whether a run by the preset's name is the method."""
    # In no menu, which would be as long as the catalog on every page; the index has them all.
    lines = ["---", "orphan: true", "---", "", f"# {method.key}", "", f"{method.title}.", ""]
    for paper in catalog.PAPERS:
        if method.key in paper.keys:
            lines.append(f"- Paper: [{paper.title}](https://arxiv.org/abs/{paper.arxiv})")
    if method.arxiv and not any(method.arxiv == p.arxiv for p in catalog.PAPERS):
        lines.append(f"- Paper: [arXiv:{method.arxiv}](https://arxiv.org/abs/{method.arxiv})")
    lines.append(f"- Kind: {method.kind}")
    if method.arxiv:
        lines.append(f"- Read from: {READ[method.confidence]}")
    if method.preset:
        complete = "the complete method" if method.whole else f"all but {method.missing}"
        lines.append(f"- Train: `jaxrl-llm train CONFIG --recipe {method.preset}`, {complete}")
    elif method.commands:
        lines += ["- Train:", *(f"  - `{command}`" for command in method.commands)]
    elif method.missing:
        lines.append(f"- Not trained by name: it needs {method.missing}")
    return [*lines, ""]


def math(lines: str) -> list[str]:
    """Lines of a formula as a display, or as they are where they are none."""
    latex = formulas.block_to_latex(lines)
    if latex is None:
        return ["```text", lines, "```", ""]
    return ["```{math}", latex, "```", ""]


def summary_of(doc: str) -> str:
    """The first sentence of a docstring in Markdown."""
    text = " ".join(doc.partition("\n\n")[0].split())
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", text)
    return text.replace("``", "`")


def functions(method: catalog.Method) -> list[str]:
    """Each function with its sentence and its formula."""
    lines = ["## Functions", ""]
    for path in method.functions:
        function = operator.attrgetter(path)(jaxrl_llm)
        doc = inspect.getdoc(function) or ""
        name = f"{{py:obj}}`jr.{path} <jaxrl_llm.{path}>`"
        lines += [f"{name}: {summary_of(doc)}", ""]
        formula = explain.formula_of(function)
        lines += math("\n".join(formula)) if formula else []
    return lines


def figure(method: catalog.Method, figures: dict[str, method_figures.Picture]) -> list[str]:
    """The figure with what it shows."""
    picture = f"![Figure of {method.key}](figures/{method.key}.png)"
    return ["## Picture", "", picture, "", figures[method.key].caption, ""]


def recipe(method: catalog.Method) -> list[str]:
    """The slots of the preset with their numbers, beside those of GRPO, and its options."""
    if not method.preset:
        return []
    make = PRESETS[method.preset]
    lines = ["## Recipe", "", "The slots in which the preset differs from the default recipe. "
             "The formulas contain the preset's numbers.", ""]  # fmt: skip
    lines += ["| slot | here | `grpo` |", "| --- | --- | --- |"]
    slots = explain.slots(method.preset)
    for slot in slots:
        other = "the same" if slot.value == slot.other else f"`{cell(slot.other)}`"
        lines.append(f"| {slot.field} | `{cell(slot.value)}` | {other} |")
    lines.append("")
    for slot in slots:
        for each in slot.functions:
            lines += [f"**{each.name}** ({slot.field}, `{each.place}`)", ""]
            lines += math("\n".join(each.formula)) if each.formula else [each.summary, ""]
    lines += ["### Options", "", "The defaults and their sources:", ""]
    name = f"{make.__module__.rpartition('.')[0]}.{make.__name__}"
    public = f"jaxrl_llm.recipes.{method.preset}"
    path = public if hasattr(jaxrl_llm.recipes, method.preset) else name
    return [*lines, "```{eval-rst}", f".. autofunction:: {path}", "   :no-index:", "```", ""]


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def confirmed(method: catalog.Method) -> list[str]:
    """Whose code gave numbers that ours are compared with."""
    lines = ["## Verified", ""]
    rows = catalog.CONFIRMED.get(method.key, ())
    if rows:
        lines += ["Values and gradients were compared with the code of these projects "
                  "([how](../../tests/golden/estimators/README.md)):", "",
                  "| peer | function | options |", "| --- | --- | --- |"]  # fmt: skip
        lines += [f"| {r.peer} | `{r.function}` | {cell(r.options)} |" for r in rows] + [""]
    return [*lines, f"Our own tests: {method.verified_against}.", ""]


def claimed(method: catalog.Method, claims: dict[str, str]) -> list[str]:
    """What became of the claim of the paper."""
    lines = []
    for name in dict.fromkeys((method.key, method.preset)):
        if name not in claims:
            continue
        statement = json.loads((CLAIMS / f"{name}.json").read_text())["statement"]
        lines += ["## Claim", "", f"{statement}: **{claims[name]}** "
                  f"([how it was tried](../claims.md#{name})).", ""]  # fmt: skip
        if (CLAIMS / f"{name}.png").exists():
            lines += [f"![Claim {name}](../../benchmarks/results/claims/{name}.png)", ""]
    return lines


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of a page: its heading, the anchor of it, and its text."""

    heading: str
    anchor: str
    text: str


def sections(page: Path) -> list[Section]:
    """The sections of a page below its headings of level 3."""
    parts = re.split(r"^#{2,3} ", page.read_text(), flags=re.M)[1:]
    found = []
    for part in parts:
        heading, _, text = part.partition("\n")
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(Section(heading, anchor, text))
    return found


def at_peers(method: catalog.Method, differences: list[Section]) -> list[str]:
    """What peers call it, what differs there, and the pages that have the numbers."""
    lines = []
    rows = [row for row in catalog.PEER_NAMES if method.key in row.keys]
    if rows:
        lines += ["## In other libraries", "", "| library | there | here | what differs |",
                  "| --- | --- | --- | --- |"]  # fmt: skip
        lines += [
            f"| {row.peer} {catalog.PEER_VERSIONS[row.peer]} | `{cell(str(row))}` | "
            f"`{cell(row.ours)}` | {cell(row.differs)} |"
            for row in rows
        ] + [""]
    names = {path.rpartition(".")[2] for path in method.functions} | {method.preset or method.key}
    near = [s for s in differences if s.text.strip() and names & set(re.findall(r"`(\w+)", s.text))]
    near += [
        s
        for s in differences
        if s not in near and re.sub(r"\W", "_", s.heading.lower()).startswith(f"{method.key}_")
    ]
    if near:
        lines += ["## Same name, different number", ""]
        page = "../same_name_different_number.md"
        lines += [f"- [{s.heading}]({page}#{s.anchor})" for s in near] + [""]
    return lines


def code(method: catalog.Method) -> list[str]:
    """The source of the preset."""
    if not method.preset:
        return []
    source = inspect.getsource(inspect.unwrap(PRESETS[method.preset]))
    source = re.sub(r'    """.*?"""\n', "", source, count=1, flags=re.S)  # it is above
    head = ["## Code", "", "````{admonition} The preset", ":class: dropdown", "", "```python"]
    return [*head, source.rstrip(), "```", "````", ""]
