"""The pages docs/coming_from/*.md tell the truth: names, numbers, links, and code that runs."""

import re
from pathlib import Path

import coming_from
import golden_data
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import Recipe, catalog
from jaxrl_llm.recipes.catalog.peers import NONE
from jaxrl_llm.train import TrainConfig
from jaxrl_llm.train.config import find_prompts

TEXTS = {
    page: (coming_from.FOLDER / f"{page}.md").read_text(encoding="utf-8")
    for page in coming_from.PAGES
}


@for_each("page", coming_from.PAGES)
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


def combined(page):
    """The recipes of a page that combine several settings, by name."""
    code = TEXTS[page].partition("### Several settings at once")[2]
    names = {}
    exec(re.search(r"^```python\n(.*?)^```$", code, re.MULTILINE | re.DOTALL)[1], names)
    return {name: value for name, value in names.items() if isinstance(value, Recipe)}


@for_each("which", ["trl recipe", "verl recipe", "verl grpo"])
def test_several_settings_are_the_loss_that_the_page_says(which):
    page, name = which.split()
    rng, shape, G = np.random.default_rng(0), (3, 4, 6), 4
    mask = np.arange(6) < rng.integers(1, 7, shape[:2])[..., None]
    old, behavior, ref = (-rng.random(shape) for _ in range(3))
    logp, rewards = old + rng.normal(0.0, 0.6, shape), rng.random(shape[:2])
    batch = jr.recipes.Batch(
        tokens=np.zeros(shape, np.int32),
        mask=mask,
        where=np.ones(shape[:2], bool),
        rewards=np.float32(rewards),
        prompt_tokens=np.zeros((3, 1), np.int32),
        prompt_mask=np.ones((3, 1), bool),
        old_logp=np.float32(old),
        behavior_logp=np.float32(behavior),
        ref_logp=np.float32(ref),
    )
    ratio, log_ref = np.exp(logp - old), ref - logp
    if page == "trl":
        centered = rewards - rewards.mean(-1, keepdims=True)
        a = (centered / (rewards.std(ddof=1) + 1e-4))[..., None]
        loss = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.28) * a)
        loss += 0.04 * ratio * (np.exp(log_ref) - log_ref - 1)
        expected = loss[mask].mean()
    else:
        scores = rewards - 0.001 * ((old - ref) * mask).sum(-1)
        a = (scores - scores.mean(-1, keepdims=True)) * G / (G - 1)
        if name == "grpo":
            a *= (G - 1) / G / (scores.std(-1, ddof=1, keepdims=True) + 1e-6)
        a = a[..., None]
        loss = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
        loss = np.where(a < 0, np.minimum(loss, -3.0 * a), loss)
        weighted = loss * np.minimum(np.exp(old - behavior), 2.0)
        expected = (weighted * mask).sum(-1).mean()
    recipe = combined(page)[name]
    ready, _ = recipe.prepare(batch, recipe.init())
    np.testing.assert_allclose(recipe.loss(np.float32(logp), ready), expected, rtol=2e-5)


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


@for_each("page", coming_from.PAGES)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXTS[page]):
        if not target.startswith("http"):
            assert (coming_from.FOLDER / target).resolve().exists(), target
    # The README has a link to each page.
    readme = (Path(coming_from.FOLDER).parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"docs/coming_from/{page}.md" in readme
