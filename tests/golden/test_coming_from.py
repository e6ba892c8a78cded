"""The pages docs/coming_from/*.md tell the truth: names, numbers, links, and code that runs."""

import re
from pathlib import Path

import coming_from
import golden_data
import jax.numpy as jnp
import pytest

import jaxrl_llm as jr
from jaxrl_llm.recipes import Recipe, catalog
from jaxrl_llm.recipes.catalog.peers import NONE
from jaxrl_llm.train import TrainConfig
from jaxrl_llm.train.config import find_prompts

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


def test_the_correction_for_stale_rollouts_weighs_them():
    pattern = r"`(jr\.bind\(jr\.corrections\.rollout_correction.*?)` into the slot `correction`"
    (code,) = re.findall(pattern, TEXTS["verl"])
    recipe = jr.recipes.grpo().replace(correction=eval(code, {"jr": jr}))
    recipe.check_staleness(1)
    old_logp, mask = jnp.log(jnp.array([[1.5, 3.0]])), jnp.ones((1, 2), bool)
    weights, _ = recipe.correction(old_logp, jnp.zeros((1, 2)), mask)
    assert weights[0].tolist() == pytest.approx([1.5, 2.0])


def test_a_file_of_verl_is_read_as_its_page_says(tmp_path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    path = tmp_path / "train.parquet"
    pytest.importorskip("datasets").Dataset.from_list([row]).to_parquet(path)
    (prompt,) = find_prompts(str(path))
    assert prompt.text == "1 + 1?" and prompt.metadata["reward_model"]["ground_truth"] == "2"
    assert '`metadata["reward_model"]["ground_truth"]`' in TEXTS["verl"]
    (row,) = catalog.find_peer_names("verl:max_prompt_length")
    assert row.ours == NONE and "ends the run before its first step" in TEXTS["verl"]


@pytest.mark.parametrize("page", coming_from.PAGES)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXTS[page]):
        if not target.startswith("http"):
            assert (coming_from.FOLDER / target).resolve().exists(), target
    # The README has a link to each page.
    readme = (Path(coming_from.FOLDER).parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"docs/coming_from/{page}.md" in readme
