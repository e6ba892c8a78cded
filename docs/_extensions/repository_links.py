"""Links between pages, README and notebooks, as they are in the repository, made those of the site.

On GitHub a page links to ``../notebooks/x.ipynb`` and ``../README.md``; on the site both are pages.
Other files of the repository become downloads.
"""

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

LINK = re.compile(r"\]\(([^)\s]+)\)")


def of_page(target: str, depth: int = 0) -> str:
    """A link of a page that lies so many folders below docs/."""
    target = re.sub(r"^\.\./((?:\.\./)*)notebooks/", r"\1notebooks/", target)
    target = re.sub(r"^\.\./((?:\.\./)*)README\.md", r"\1readme.md", target)
    # A page of elsewhere is a file to MyST only by its prefix.
    page, _, _ = target.partition("#")
    outside = target.startswith("../" * (depth + 1)) and page.endswith(".md")
    return f"path:{page}" if outside else target  # a download has no headings


def of_readme(target: str) -> str:
    """A link of the README, whose page lies in docs/."""
    if "://" in target or target.startswith("#"):
        return target
    if target in ("notebooks", "notebooks/"):
        return "notebooks/index.md"
    return target.removeprefix("docs/") if target.startswith("docs/") else of_page(f"../{target}")


def of_notebook(target: str) -> str:
    """A link of a notebook, which is copied into docs/notebooks/."""
    if target.startswith("../docs/"):
        return target.replace("../docs/", "../", 1)
    return f"path:../{target}" if target.startswith("../") else target


def rewritten(text: str, target: Callable[[str], str]) -> str:
    """Text of Markdown with its links changed."""
    return LINK.sub(lambda m: f"]({target(m[1])})", text)


def on_source(app: "Sphinx", docname: str, source: list[str]) -> None:
    """Changes the links of a page as it is read."""
    if os.fspath(app.env.doc2path(docname)).endswith(".md"):
        depth = docname.count("/")
        source[0] = rewritten(source[0], lambda target: of_page(target, depth))


def setup(app: "Sphinx") -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", on_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
