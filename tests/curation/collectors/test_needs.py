"""The needs of a collector, and of one that is built of others."""

import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import Needs, needs_of_sources
from jaxrl_llm.curation.collectors.needs import needs_of

PAIRS, GRADED = jr.curation.offline_pairs(), jr.curation.only_demonstrations(reward=1.0)


class Plain:
    """A collector that is built of others."""

    def __init__(self, *sources):
        self.sources = sources

    init = propose = observe = print


def test_needs_add_up():
    both = Needs(slots=True, draft_steps=6) | Needs(sends_text=True, draft_steps=4)
    assert both == Needs(slots=True, sends_text=True, draft_steps=6)
    assert repr(Needs()) == "Needs()" and repr(both).startswith("Needs(sends_text=True, slots")
    with pytest.raises(ValueError, match="one entropy_tau is possible .* not 0.1 and 0.2"):
        Needs(entropy_tau=0.1) | Needs(entropy_tau=0.2)


@for_each(
    ("sources", "offline", "has_rewards", "helps"),
    [
        ((PAIRS,), True, True, True),
        ((PAIRS, GRADED), False, True, True),
        ((PAIRS, jr.curation.in_order()), False, False, False),
        ((), False, False, False),
    ],
)
def test_some_needs_hold_only_if_all_sources_have_them(sources, offline, has_rewards, helps):
    needs = needs_of_sources(*sources)
    assert (needs.offline, needs.has_rewards, needs.helps_every_group) == (
        offline,
        has_rewards,
        helps,
    )
    assert needs.brings_responses == bool(sources)
    # Whether a collector samples beyond its sources, only it can say.
    assert not needs.samples_nothing
    # A collector without needs has those of the collectors that it is built of.
    assert needs_of(Plain(*sources)) == needs


def test_a_mixture_samples_nothing_if_no_part_samples():
    assert needs_of(jr.curation.mixed((PAIRS, 1.0), (GRADED, 1.0))).samples_nothing
    assert not needs_of(
        jr.curation.mixed((PAIRS, 1.0), (jr.curation.in_order(), 1.0))
    ).samples_nothing


def test_attributes_of_before_are_refused():
    class Old(type(jr.curation.in_order())):
        needs_slots = True
        sends_text = True

    words = r"write needs = jr.curation.Needs\(sends_text=True, slots=True\) in place of the "
    with pytest.raises(TypeError, match=words + "attributes sends_text, needs_slots"):
        jr.recipes.grpo().replace(collector=Old())
    wrong = type("Wrong", (Plain,), {"needs": {"slots"}})()
    with pytest.raises(TypeError, match="needs must be a jr.curation.Needs; got {'slots'}"):
        needs_of(wrong)
