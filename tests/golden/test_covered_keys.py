"""The catalog says of each peer exactly what the golden data confirm, and nothing else."""

import confirmed
import golden_data
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import catalog

COVERED = golden_data.covered_keys()
LABELS = {label for labels in COVERED.values() for label in labels}
ROWS = {row.key: row for row in catalog.CATALOG}


def test_many_keys_are_covered():
    assert len(COVERED) >= 40 and set(COVERED) <= set(ROWS)


def test_a_row_has_only_comparisons_of_its_own_functions():
    """Those that it names, and those in the slots of its preset."""
    for key, rows in catalog.CONFIRMED.items():
        others = {row.function for row in rows} - set(ROWS[key].functions)
        assert not others or others <= confirmed.in_slots(key), key


@for_each(
    ("recipe", "paths"),
    [
        # By the slots, in the options of a bind, and in a collector that has another as its source.
        (jr.recipes.grpo(), {"advantages.grpo", "surrogates.ppo_clip", "aggregate.sequence_mean"}),
        (jr.recipes.dpo(), {"preferences.dpo"}),
        (jr.recipes.dots(), {"curation.informative_groups", "surrogates.decoupled_ppo"}),
    ],
)
def test_the_functions_of_a_recipe_are_read_from_its_slots(recipe, paths):
    found = confirmed.functions_in(recipe)
    assert paths <= found and "surrogates.dapo_clip" not in found


@pytest.mark.slow
def test_the_catalog_says_what_was_compared():
    """Written by `python tests/golden/confirmed.py`."""
    assert confirmed.FILE.read_text(encoding="utf-8") == confirmed.module()


def test_every_peer_of_the_data_is_named_and_no_other():
    said = {key: {row.peer for row in rows} for key, rows in catalog.CONFIRMED.items()}
    assert said == {key: set(labels) for key, labels in COVERED.items()}
    for method in catalog.CATALOG:
        assert not any(label in method.verified_against for label in LABELS)


@for_each(
    ("key", "peer", "functions", "options"),
    [
        # Peers that confirm a piece of a method and no more.
        ("d3s", "TRL", {"curation.top_fraction_token_mask"}, "defaults"),
        ("otr", "TRL", {"surrogates.otr_exact"}, "beta=0; tau=1"),
        ("salsa_soup_ref", "TRL", {"regularizers.ema_reference"}, "rate=0.6"),
        ("sdpo", "rlax", {"surrogates.distillation_divergence"}, "alpha=0 or 1"),
        ("pkpo", "maxrl", {"advantages.pkpo"}, "k=1 or 2 or 3; loo=True"),
    ],
)
def test_a_piece_is_said_to_be_one(key, peer, functions, options):
    rows = [row for row in catalog.CONFIRMED[key] if row.peer.startswith(peer)]
    assert {row.function for row in rows} == functions
    assert {row.options for row in rows} == {options}
