"""docs/rewards.md names the methods that read an entry of a reward: each reads it."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rows import for_each

from jaxrl_llm.core import accepted
from jaxrl_llm.recipes import catalog, polychromic
from jaxrl_llm.recipes.wiring import TEACHER_TEXTS
from jaxrl_llm.testing.cases import make_case
from jaxrl_llm.train.data.fields import check_fields, host_fields

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
TABLE = TEXT.partition("## What a reward may return")[2].partition("```")[0]
ROWS = [
    (entry, name)
    for first, names in re.findall(r"^\| ([^|]+) \|[^|]+\| ([^|]+) \|$", TABLE, re.MULTILINE)
    for entry in re.findall(r"`(\w+)`", first) or [first]
    for name in re.findall(r"`(\w+)`", names)
]
# Steps end somewhere, whatever their rewards are.
ENDS_ALONE = ("eapo", "epo", "oprl", "seeupo")
# Entries that are fields of the batch under another name.
FIELDS = {"turn_ends": "turn_ids", "any name": "reward_components"}
FIELDS |= dict.fromkeys(("task", "grounding", "history"), "reward_components")


def advantages(recipe, batch):
    ready, _ = recipe.prepare(batch, recipe.init(), key=jax.random.key(0))
    return ready.advantages


def changed(value):
    """Other values of a field: the opposite, one answer or step, or those of the next rollout."""
    if value.dtype == bool:
        return ~value
    integers = jnp.issubdtype(value.dtype, jnp.integer)
    return jnp.minimum(value, 0) if integers else jnp.roll(value, 1, axis=1)


def test_the_page_names_what_presets_require_of_a_reward():
    named = {entry for entry, _ in ROWS}
    assert named >= {"satisfied", "task", "grounding", "history", "right_steps", "penalty"}
    assert named >= {"flawed", "answer_ids", "feedback", "turn_rewards", "test_passes", "turn_ends"}


@pytest.mark.of_many
@pytest.mark.parametrize(("entry", "name"), ROWS)
def test_a_method_reads_its_entries(entry, name):
    recipe = catalog.preset(name, length=8, num_prompts=8)
    if name == "polychromic":  # sets smaller than the groups of the case
        recipe = polychromic(size=2)
    if entry == "feedback":
        assert entry in accepted(recipe.computed_from("responses")[TEACHER_TEXTS])
        return
    if entry == "right_steps":
        assert recipe.collector.policy.steps == entry
        return
    if entry == "penalty":
        assert entry in accepted(recipe.collector.rule)
        return
    if name == "ttrl_majority":  # whose rollouts vote before the batch is made
        assert entry in accepted(recipe.collector.regrade)
        return
    field, batch = FIELDS.get(entry, entry), make_case(recipe=recipe).batch
    assert field in host_fields(recipe) | (recipe.required_fields & {"reward_components"})
    if field == "reward_components":
        entries = [entry] if entry in batch.reward_components else list(batch.reward_components)
        new = {k: changed(x) if k in entries else x for k, x in batch.reward_components.items()}
        other = batch.replace(reward_components=new)
    else:
        new = changed(batch.extras[field])
        other = batch.replace(extras={**batch.extras, field: new})
    assert (advantages(recipe, other) != advantages(recipe, batch)).any()


@for_each("name", ENDS_ALONE)
def test_some_read_only_where_steps_end(name):
    recipe = catalog.preset(name, length=8, num_prompts=8)
    check_fields(recipe, ())  # without an environment
    assert "turn_ids" in host_fields(recipe) and "turn_rewards" not in host_fields(recipe)
    assert f"`{name}`" in TABLE and "whose values they do not read" in TABLE
