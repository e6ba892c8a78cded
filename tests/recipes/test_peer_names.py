"""The names of peers in the catalog: each is something here, and is found."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import pytest

import jaxrl_llm
from jaxrl_llm.core import call_with
from jaxrl_llm.recipes import catalog
from jaxrl_llm.recipes.catalog.peers import NONE
from jaxrl_llm.recipes.recipe import Recipe

KEYS = {method.key for method in catalog.CATALOG}
# Read in the peer's source, and not run.
READ_ALONE = {
    ("tunix", "GRPOConfig.sampler_is=token"),
    ("slime", "--advantage-estimator=grpo"),
    ("slime", "--advantage-estimator=reinforce_plus_plus_baseline"),
}
OPTION = re.compile(r"jr\.train\.(\w+)\.(\w+)")


def test_every_name_is_one_thing_here():
    named = [(row.peer, str(row)) for row in catalog.PEER_NAMES]
    assert len(set(named)) == len(named)
    assert {row.peer for row in catalog.PEER_NAMES} == set(catalog.PEER_VERSIONS)
    for row in catalog.PEER_NAMES:
        assert set(row.keys) <= KEYS, row
        assert not row.differs or row.differs.endswith("."), row


@pytest.mark.parametrize("peer", catalog.PEER_VERSIONS)
def test_our_code_runs_as_it_stands(peer):
    for row in catalog.PEER_NAMES:
        if row.peer != peer:
            continue
        if row.ours == NONE:  # it says why, and belongs to no method
            assert row.differs and not row.keys, row
            continue
        if option := OPTION.fullmatch(row.ours):
            config = getattr(jaxrl_llm.train, option[1])
            assert option[2] in {field.name for field in dataclasses.fields(config)}, row
            continue
        made = eval(row.ours, {"jr": jaxrl_llm})
        assert isinstance(made, Recipe) or callable(made) or hasattr(made, "init"), row


def test_a_recipe_makes_one_update_a_batch_unless_its_row_says_how_many():
    """The updates of a preset are those of its paper, and a peer's name stands for none."""
    for row in catalog.PEER_NAMES:
        if row.ours.startswith("jr.recipes."):
            recipe = eval(row.ours, {"jr": jaxrl_llm})
            passes = getattr(recipe, "epochs", 1), getattr(recipe, "minibatches", 1)
            assert passes == (1, 1) or f" {passes[1]} minibatches" in row.differs, row


def test_a_recipe_belongs_first_to_the_method_of_its_preset():
    """`methods --like` describes the first method of a row."""
    of_key = {method.key: method.preset for method in catalog.CATALOG}
    others = []
    for row in catalog.PEER_NAMES:
        made = re.match(r"jr\.recipes\.(\w+)", row.ours)
        preset = of_key[row.keys[0]] if row.keys else None
        if preset and made and made[1] in of_key.values() and made[1] != preset:
            others.append(row.setting)
    # Its name is of a correction, which it leaves out.
    assert others == ["algorithm.rollout_correction.bypass_mode"]


def test_functions_take_the_options_that_stand_with_them():
    """Traced on arrays by the names of their parameters; those that need other arrays are few."""
    shape = (2, 4, 8)
    tokens = (
        "logp old_logp behavior_logp ref_logp values old_values returns token_rewards "
        "action_values entropy x sum_pi_sq"
    )
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in tokens.split()}
    for name in ("rewards", "advantages", "greedy_rewards", "lengths"):
        arrays[name] = jax.ShapeDtypeStruct(shape[:2], jnp.float32)
    arrays["mask"] = jax.ShapeDtypeStruct(shape, bool)
    arrays["truncated"] = jax.ShapeDtypeStruct(shape[:2], bool)
    traced, others = 0, set()
    for row in catalog.PEER_NAMES:
        code = row.ours != NONE and "jr.train." not in row.ours
        made = eval(row.ours, {"jr": jaxrl_llm}) if code else None
        if isinstance(made, Recipe | type) or not callable(made):
            continue
        named = inspect.signature(made).parameters
        if not {name for name, x in named.items() if x.default is x.empty} <= set(arrays):
            others.add(row.ours)
        elif named.keys() & arrays.keys() and "gdpo" not in row.ours:
            jax.eval_shape(lambda context, made=made: call_with(made, context=context), arrays)
            traced += 1
    assert traced > 90 and len(others) < 10, (traced, others)


def test_names_with_a_number_of_their_own_were_compared_with_that_peer():
    """With its code, as the catalog says, one of the methods that a row names."""
    compared, alone = {"TRL", "verl", "tunix", "OpenRLHF", "slime", "rlax"}, set()
    for row in catalog.PEER_NAMES:
        if row.peer in compared and row.keys and row.value:
            peers = {each.peer for key in row.keys for each in catalog.CONFIRMED.get(key, ())}
            if not any(peer.split()[0] == row.peer for peer in peers):
                alone.add((row.peer, str(row)))
    assert alone == READ_ALONE


def ours(text):
    return [row.ours for row in catalog.find_peer_names(text)]


@pytest.mark.parametrize(
    "text",
    [
        "verl:adv_estimator=rloo_vectorized",
        "verl:algorithm.adv_estimator=rloo_vectorized",
        "VERL:ADV_ESTIMATOR=RLOO_vectorized",
        "verl:adv_estimator='rloo_vectorized'",
        "verl:rloo_vectorized",
    ],
)
def test_a_name_is_found_however_it_is_written(text):
    assert ours(text) == ["jr.advantages.rloo"]


def test_without_a_peer_all_peers_are_searched():
    assert {row.peer for row in catalog.find_peer_names("cispo")} >= {"TRL", "verl", "slime"}
    assert {row.peer for row in catalog.find_peer_names("loss_mode=cispo")} == {"verl"}


def test_a_part_of_a_name_finds_all_that_have_it():
    values = {row.value for row in catalog.find_peer_names("verl:loss_agg_mode")}
    assert values >= {"token-mean", "seq-mean-token-mean"}
    assert {row.setting.split(".")[0] for row in catalog.find_peer_names("TRL:beta")} == {
        "GRPOConfig"
    }
    # An option of the command line, with and without its dashes, and a number as its value.
    assert ours("OpenRLHF:actor.dual_clip=3") == ours("openrlhf:--actor.dual_clip")
    assert len(catalog.find_peer_names("rlax")) == len(
        [row for row in catalog.PEER_NAMES if row.peer == "rlax"]
    )
    # Two trainers have an option of this name and value.
    assert {row.setting for row in catalog.find_peer_names("TRL:loss_type=sigmoid")} == {
        "DPOConfig.loss_type",
        "CPOConfig.loss_type",
        "TPOConfig.loss_type",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TRL:loss_type=dappo", "Did you mean loss_type=dapo"),
        ("verl:qqqq", "--like verl lists them all"),
        ("trlx:loss_type=dapo", "no library is named 'trlx', only TRL, verl"),
        ("loss_type=dappo", "no name matches 'loss_type=dappo'. Did you mean loss_type=dapo"),
        ("cipso", "Did you mean cispo"),
        ("qqqq", "no name matches 'qqqq'. --like with one of TRL, verl"),
    ],
)
def test_an_unknown_name_is_one_sentence(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        catalog.find_peer_names(text)


def test_a_method_says_what_peers_call_it():
    names = catalog.names_at_peers("gspo")
    assert names["TRL"] == ["GRPOConfig.importance_sampling_level=sequence"]
    assert names["OpenRLHF"] == ["--actor.policy_loss_type=gspo"]
    assert catalog.names_at_peers("salt") == {}
