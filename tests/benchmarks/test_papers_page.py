"""docs/papers.md has every paper, and each paper has what it brings."""

import re

from benchmarks import papers_page
from benchmarks.harness import ROOT
from jaxrl_llm.recipes import catalog


def test_every_paper_has_its_methods():
    assert len(catalog.PAPERS) == 129 == len({paper.arxiv for paper in catalog.PAPERS})
    known = {method.key for method in catalog.CATALOG}
    for paper in catalog.PAPERS:
        assert re.fullmatch(r"\d{4}\.\d{5}", paper.arxiv), paper
        assert set(paper.keys) <= known and bool(paper.keys) != bool(paper.idea), paper
        assert not paper.page or (ROOT / paper.page).is_file(), paper


def test_a_paper_says_what_trains_what_confirmed_it_and_its_claim():
    papers = {paper.arxiv: paper for paper in catalog.PAPERS}
    line = papers_page.row(papers["2511.20347"], {"sapo": "holds", "other": "undecided"})
    assert "`sapo`: Soft adaptive policy optimization" in line[1] and line[2] == "`sapo`"
    assert "TRL: `GRPOConfig.loss_type=sapo`" in line[3]
    assert line[4] == "CODE" and "verl" in line[5]
    assert line[6] == "[sapo](claims.md#sapo): holds"
    line = papers_page.row(papers["2406.10707"], {})
    assert line[2] == "[training.md](training.md)" and not any(line[3:])


def test_the_page_is_current():
    assert papers_page.main(["--check"]) == 0, "run python -m benchmarks.papers_page"
