"""Docstrings on the site: formulas become mathematics, and arXiv ids become links."""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import formulas

if TYPE_CHECKING:
    from sphinx.application import Sphinx

SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Examples?|References|Note):\s*$")
BAR = re.compile(r"(``[^`]*``|`[^`]*`)|\|")
ARXIV = re.compile(r"(?<![`/])arXiv:(\d{4}\.\d{4,5})")


def with_formulas(
    lines: Sequence[str], display: Callable[[str, bool], list[str]] | None = None
) -> list[str]:
    """The lines of a docstring with the indented blocks before its sections as formulas.

    Args:
      lines: Of the docstring, without its common indent.
      display: From the LaTeX of a formula, or from a block that is none (then with False), to the
        lines in its place; None for those of reStructuredText.
    """
    display = display or restructured
    out: list[str] = []
    i = 0
    while i < len(lines):
        if SECTION.match(lines[i]):
            return out + linked(lines[i:])
        entries = bool(out) and out[-1].endswith(":") and re.match("  [^ ]", lines[i])
        if not entries and (not lines[i].startswith("    ") or (i and lines[i - 1].strip())):
            out += linked(lines[i : i + 1])
            i += 1
            continue
        indent = "  " if entries else "    "
        end = i
        while end < len(lines) and (lines[end].startswith(indent) or not lines[end].strip()):
            end += 1
        if entries:
            out += ["", *linked(bulleted(lines[i:end])), ""]
            i = end
            continue
        block = "\n".join(lines[i:end]).rstrip()
        if next((line for line in reversed(out) if line.strip()), "").endswith("::"):
            out += lines[i:end]
        else:
            latex = formulas.block_to_latex(block)
            out += display(block if latex is None else latex, latex is not None)
        i = end
    return out


def restructured(text: str, is_formula: bool) -> list[str]:
    """A formula, or a block of code, in reStructuredText."""
    head, indent = (".. math::", "    ") if is_formula else ("::", "")
    return [head, "", *(indent + line for line in text.split("\n")), ""]


def bulleted(lines: Sequence[str]) -> list[str]:
    """Entries that are indented by two spaces, as a list."""
    return [line[2:] if line.startswith("   ") else re.sub("^  ", "- ", line) for line in lines]


def linked(lines: Sequence[str]) -> list[str]:
    """Lines with a link for each arXiv id, and bars that are bars, outside of code."""
    bars = (BAR.sub(lambda m: m[1] or r"\|", line) for line in lines)
    return [ARXIV.sub(r"`arXiv:\1 <https://arxiv.org/abs/\1>`__", line) for line in bars]


def on_docstring(app, what: str, name: str, obj: object, options: object, lines: list[str]):
    """Changes a docstring in place, before napoleon reads its sections."""
    lines[:] = with_formulas(lines)


def on_read(app, doctree) -> None:
    """Makes all nodes of a page its own.

    Those that MyST has from reStructuredText belong to a document with the environment of the whole
    build, which would be stored with the page.
    """
    for node in doctree.findall():
        node.document = doctree


def setup(app: "Sphinx") -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", on_docstring, priority=400)
    app.connect("doctree-read", on_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
