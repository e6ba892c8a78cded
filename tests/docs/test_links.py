"""Links of README, docs and notebooks lead to files and headings that there are."""

import importlib.util
import json
import re
from pathlib import Path

from rows import for_each

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What the build of the site writes is checked by the build.
GENERATED = ("docs/api/", "docs/methods/", "docs/notebooks/", "docs/readme.md", "docs/_extensions/")
PAGES = [page for page in PAGES if not page.relative_to(ROOT).as_posix().startswith(GENERATED)]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


spec = importlib.util.spec_from_file_location(
    "repository_links", ROOT / "docs" / "_extensions" / "repository_links.py"
)
repository_links = importlib.util.module_from_spec(spec)
spec.loader.exec_module(repository_links)


def prose(text: str) -> str:
    return re.sub(r"^(`{3,}).*?^\1`*$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ +(.+?)\s*$", prose(page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def broken(page: Path, text: str) -> list[str]:
    wrong = []
    for link in LINK.findall(text):
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        has_anchor = not anchor or target.suffix != ".md" or anchor in anchors(target)
        if not target.exists() or not has_anchor:
            wrong.append(link)
    return wrong


@for_each("page", PAGES, ids=lambda page: page.stem)
def test_links_of_pages(page):
    assert not broken(page, prose(page.read_text()))


@for_each("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_notebooks(path):
    cells = json.loads(path.read_text())["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    assert not broken(path, text)


def test_the_site_offers_files_of_the_repository():
    """What is no page of the site is a download, whose name is a file's."""
    docs, downloads = ROOT / "docs", []
    for page in PAGES:
        if page.parent not in (ROOT, docs, *docs.iterdir()) or page.name == "CONTRIBUTING.md":
            continue
        of_readme = page.parent == ROOT
        to_site = repository_links.of_readme if of_readme else repository_links.of_page
        folder = docs if of_readme else page.parent
        for link in LINK.findall(prose(page.read_text())):
            target = to_site(link)
            if target.startswith("path:"):
                downloads.append(target)
                assert (folder / target.removeprefix("path:")).is_file(), (page.name, link)
    assert "path:../CONTRIBUTING.md" in downloads


def test_a_broken_link_is_seen():
    page = ROOT / "docs" / "index.md"
    links = "[a](training.md#measured) [b](training.md#no-such) [c](nothing.md) [d](#nowhere)"
    assert broken(page, links) == ["training.md#no-such", "nothing.md", "#nowhere"]


def test_every_page_is_in_a_contents():
    """A page that no toctree names cannot be reached from the site's menu."""
    trees = re.findall(r"```\{toctree\}\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.S)
    named = {line for tree in trees for line in tree.split("\n") if line and line[0] != ":"}
    docs = ROOT / "docs"
    pages = {p.relative_to(docs).with_suffix("").as_posix() for p in PAGES if docs in p.parents}
    pages -= {"index"}
    assert pages <= named
    generated = {"readme", "notebooks/index", "methods/index", "api/index"}
    assert named - pages == generated
