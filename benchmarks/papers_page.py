"""Writes the table of docs/papers.md from the catalog and benchmarks/results/claims.

python -m benchmarks.papers_page            # write
python -m benchmarks.papers_page --check    # exit 1 if it would change anything
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks import pages
from benchmarks.harness import RESULTS, ROOT
from jaxrl_llm.recipes import catalog

PAGE = ROOT / "docs" / "papers.md"
COLUMNS = ("paper", "methods", "train by", "peers' names", "read from", "confirmed by", "claim")


def verdicts(folder: Path = RESULTS / "claims") -> dict[str, str]:
    """What became of each claim, by its name."""
    results = (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))
    return {result["name"]: result["verdict"] for result in results}


def row(paper: catalog.Paper, claims: Mapping[str, str]) -> tuple[str, ...]:
    """A paper's line."""
    title = f"{paper.title} ([{paper.arxiv}](https://arxiv.org/abs/{paper.arxiv}))"
    if not paper.keys:
        page = f"[{paper.page.removeprefix('docs/')}]({paper.page.removeprefix('docs/')})"
        return title, paper.idea, page if paper.page else "not here yet", "", "", "", ""
    methods = [next(m for m in catalog.CATALOG if m.key == key) for key in paper.keys]
    by = [f"`{m.preset}`" for m in methods if m.preset]
    by += [f"`{command}`" for m in methods if not m.preset for command in m.commands]
    peers = [peer for m in methods for peer, _, _ in catalog.CONFIRMED.get(m.key, ())]
    names = {m.key for m in methods} | {m.preset for m in methods}
    called = catalog.names_at_peers(*paper.keys).items()
    found = [f"[{name}](claims.md#{name}): {claims[name]}" for name in claims if name in names]
    return (
        title,
        "<br>".join(f"`{m.key}`: {m.title}" for m in methods),
        ", ".join(dict.fromkeys(by)) or "functions alone",
        "<br>".join(f"{peer}: {', '.join(f'`{x}`' for x in names)}" for peer, names in called),
        ", ".join(dict.fromkeys(m.confidence for m in methods)),
        ", ".join(dict.fromkeys(peers)),
        "; ".join(found),
    )


def table() -> str:
    """All papers, by title."""
    claims, papers = verdicts(), sorted(catalog.PAPERS, key=lambda paper: paper.title.lower())
    return pages.table(
        f"{len(papers)} papers (`python -m benchmarks.papers_page`):",
        COLUMNS,
        [row(paper, claims) for paper in papers],
    )


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    return pages.write(PAGE, table, "benchmarks.papers_page", argv)


if __name__ == "__main__":
    sys.exit(main())
