"""The pages docs/coming_from/*.md tell the truth: names, numbers, links, and code that runs."""

import re
from pathlib import Path

import coming_from
import golden_data
import pytest

from jaxrl_llm.recipes import Recipe
from jaxrl_llm.train import TrainConfig

TEXTS = {
    page: (coming_from.FOLDER / f"{page}.md").read_text(encoding="utf-8")
    for page in coming_from.PAGES
}


@pytest.mark.parametrize("page", coming_from.PAGES)
def test_the_tables_are_current(page):
    assert coming_from.write(TEXTS[page], page) == TEXTS[page], (
        "run python tests/golden/coming_from.py"
    )


@pytest.mark.parametrize("page", coming_from.PAGES)
def test_our_lines_give_the_numbers_of_the_peer(page):
    for manifest, entry, output, code in coming_from.NUMBERS[page]:
        theirs = coming_from.theirs(manifest, entry, output)
        tolerance = golden_data.load(manifest).entries[entry]["tolerance"]["float32"]
        found = coming_from.ours(manifest, entry, code)
        assert theirs != 0 and golden_data.close(found, theirs, tolerance), (entry, found, theirs)


@pytest.mark.parametrize("page", coming_from.PAGES)
def test_our_code_runs_as_pasted(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXTS[page], re.MULTILINE | re.DOTALL)
    assert blocks
    made = []
    for block in blocks:
        names: dict = {"__name__": "__main__"}
        exec(compile(block, f"{page}.md", "exec"), names)
        made += [x for x in names.values() if isinstance(x, TrainConfig | Recipe)]
    # What the page says that its blocks print.
    said = "".join(re.findall(r"^```text\n(.*?)^```$", TEXTS[page], re.MULTILINE | re.DOTALL))
    assert capsys.readouterr().out == said and (made or said)


@pytest.mark.parametrize("page", coming_from.PAGES)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXTS[page]):
        if not target.startswith("http"):
            assert (coming_from.FOLDER / target).resolve().exists(), target
    # The README has a link to each page.
    readme = (Path(coming_from.FOLDER).parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"docs/coming_from/{page}.md" in readme
