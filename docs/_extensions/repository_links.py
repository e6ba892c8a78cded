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


def of_page(target: str) -> str:
    """A link of a page of docs/ or a folder of it."""
    target = re.sub(r"^\.\./((?:\.\./)*)notebooks/", r"\1notebooks/", target)
    return re.sub(r"^\.\./((?:\.\./)*)README\.md", r"\1readme.md", target)


def of_readme(target: str) -> str:
    """A link of the README, whose page lies in docs/."""
    if "://" in target or target.startswith("#"):
        return target
    if target in ("notebooks", "notebooks/"):
        return "notebooks/index.md"
    return target.removeprefix("docs/") if target.startswith("docs/") else of_page(f"../{target}")


def of_notebook(target: str) -> str:
    """A link of a notebook, which is copied into docs/notebooks/."""
    return re.sub(r"^\.\./docs/", "../", target)


def rewritten(text: str, target: Callable[[str], str]) -> str:
    """Text of Markdown with its links changed."""
    return LINK.sub(lambda m: f"]({target(m[1])})", text)


def on_source(app: "Sphinx", docname: str, source: list[str]) -> None:
    """Changes the links of a page as it is read."""
    if os.fspath(app.env.doc2path(docname)).endswith(".md"):
        source[0] = rewritten(source[0], of_page)


def setup(app: "Sphinx") -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", on_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
