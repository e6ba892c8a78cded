"""Writes the pages of the site that come from the code: the API, the methods, notebooks, README.

They lie below docs/ in files that git ignores. A page is written only where it changed, so that the
next build reads only that one.
"""

import inspect
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import method_pages
import repository_links
from sphinx.application import Sphinx

import jaxrl_llm

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("Foundation", "Arrays in, arrays out", "Methods, models and data", "Environments",
          "Rollouts", "Training", "Serving", "Command line and checks")  # fmt: skip


def layers() -> list[list[str]]:
    """The namespaces by layer, from the bottom, as the import contract has them."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    lines = tools["importlinter"]["contracts"][0]["layers"]
    public = set(jaxrl_llm._NAMESPACES)
    found = [[n for n in re.findall(r"\w+", line) if n in public] for line in reversed(lines)]
    return [names for names in found if names]


def public(module: ModuleType) -> list[str]:
    """The public names of a namespace."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def heading(text: str, mark: str = "=") -> str:
    """A heading of reStructuredText."""
    return f"{text}\n{mark * len(text)}\n"


def entry(namespace: str, name: str, value: object) -> str:
    """The directive for a public object, or a link where another namespace has its entry."""
    home = (getattr(value, "__module__", None) or "").split(".")
    if home[0] == "jaxrl_llm" and home[1:2] not in ([], [namespace]):
        other = getattr(jaxrl_llm, home[1], None)
        if getattr(other, name, None) is value and name in public(other):
            return f"``{name}``: :py:obj:`~jaxrl_llm.{home[1]}.{name}`\n"
    if inspect.isclass(value):
        return f".. autoclass:: {name}\n   :members:\n"
    if callable(value):
        return f".. autofunction:: {name}\n"
    return f".. py:data:: {name}\n"


def api() -> dict[str, str]:
    """The pages of the API: an index by layer, one a namespace, one a file of it."""
    pages = {}
    index = [heading("API"), "By layer, from the bottom; a layer imports only from those above it "
             "on this page.\n"]  # fmt: skip
    for i, names in enumerate(layers()):
        title = LAYERS[min(i, len(LAYERS) - 1)]
        index += [heading(title, "-"), "\n".join(f"- :doc:`{n}`: {summary(n)}" for n in names), ""]
        listed = "".join(f"   {name}\n" for name in names)
        index.append(f".. toctree::\n   :hidden:\n\n{listed}")
        for name in names:
            pages |= namespace_pages(name)
    return pages | {"api/index.rst": "\n".join(index)}


def summary(namespace: str) -> str:
    """The first line of a namespace's docstring."""
    doc = inspect.getdoc(getattr(jaxrl_llm, namespace)) or ""
    return " ".join(doc.partition("\n\n")[0].split())


def namespace_pages(namespace: str) -> dict[str, str]:
    """The page of a namespace and, where it has several files, one a file."""
    module = getattr(jaxrl_llm, namespace)
    files: dict[str, list[str]] = {}
    for name in public(module):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            continue
        home = getattr(value, "__module__", "") or ""
        home = home if home.startswith(module.__name__) else module.__name__
        files.setdefault(home, []).append(name)
    top = [heading(f"``{namespace}``"), f".. automodule:: {module.__name__}\n   :no-members:\n"]
    entries = {
        home: [entry(namespace, name, getattr(module, name)) for name in names]
        for home, names in files.items()
    }
    current = f".. currentmodule:: {module.__name__}\n"
    own = entries.pop(module.__name__, [])
    pages = {}
    for home, texts in sorted(entries.items()):
        short = home.removeprefix(module.__name__ + ".")
        # The file's own name is not indexed: a function in it may have the same.
        lines = [heading(f"{namespace}.{short}"), f".. automodule:: {home}", "   :no-members:"]
        pages[f"api/{namespace}/{short.replace('.', '_')}.rst"] = "\n".join(
            [*lines, "   :no-index:\n", current, *texts]
        )
    top += [current, *own] if own else []
    if pages:
        listed = "".join(f"   {path.removeprefix('api/')[:-4]}\n" for path in pages)
        top.append(f".. toctree::\n   :maxdepth: 1\n\n{listed}")
        rows = []
        for home, names in sorted(files.items()):
            links = ", ".join(f":py:obj:`{n} <{module.__name__}.{n}>`" for n in names)
            short = home.removeprefix(module.__name__ + ".")
            if home != module.__name__:
                link = f":doc:`{short} <{namespace}/{short.replace('.', '_')}>`"
                rows.append(f"{link}\n   {links}\n")
        top = [*top, *rows]
    return pages | {f"api/{namespace}.rst": "\n".join(top)}


def notebooks() -> dict[str, str]:
    """The notebooks, with their links made those of the site, and an index."""
    pages, rows = {}, []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                text = "".join(cell["source"])
                cell["source"] = repository_links.rewritten(text, repository_links.of_notebook)
        pages[f"notebooks/{path.name}"] = json.dumps(notebook, indent=1)
        rows.append(path.stem)
    toctree = "\n".join(["```{toctree}", ":maxdepth: 1", "", *rows, "```"])
    text = "# Notebooks\n\nEach runs on a CPU in two minutes at most.\n\n"
    return pages | {"notebooks/index.md": text + toctree + "\n"}


def readme() -> dict[str, str]:
    """The README as a page."""
    text = (ROOT / "README.md").read_text()
    return {"readme.md": repository_links.rewritten(text, repository_links.of_readme)}


def write(folder: Path, pages: Mapping[str, str | bytes]) -> None:
    """Writes what changed, and removes generated pages that are no more."""
    for name, content in pages.items():
        path = folder / name
        data = content if isinstance(content, bytes) else content.encode()
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    for generated in ("api", "methods", "notebooks"):
        for path in (folder / generated).rglob("*.*"):
            if path.is_file() and str(path.relative_to(folder)) not in pages:
                path.unlink()


def generate(app: Sphinx) -> None:
    """Writes all generated pages."""
    source = Path(app.srcdir)
    write(source, {**api(), **notebooks(), **readme(), **method_pages.pages()})


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", generate)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
