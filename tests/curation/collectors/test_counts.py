"""Numbers of groups that a share of a batch gives, where the product has a rounding error."""

from rows import for_each

from jaxrl_llm import curation as cur
from jaxrl_llm.curation import Collection
from jaxrl_llm.curation.collectors.protocol import sized


def test_numbers_of_groups():
    # A number of groups in flight is not one too many.
    for oversample, capacity in ((1.1, 5), (1.15, 8), (1.5, 25)):
        collector = cur.partial_rollouts(oversample=oversample)
        made = sized(collector, group_size=2, max_new_tokens=4, num_groups=50)
        assert made.init(5).prompts.shape == (capacity,)

    # A share of a batch is not one group too few.
    collector = cur.judged(judges=0.29, refines=0.0)
    decision, _ = collector.observe(collector.init(5), Collection(100, 2))
    assert decision.ask == 71
    # What is no whole number is rounded down.
    decision, _ = cur.judged(judges=0.299, refines=0.0).observe({}, Collection(100, 2))
    assert decision.ask == 71


@for_each(("oversample", "ask"), [(1.0, 50), (1.1, 55), (1.15, 58), (2.5, 125)])
def test_refill_asks_at_first_for_as_many_groups_as_it_says(oversample, ask):
    collector = cur.refill(cur.informative_groups, oversample=oversample)
    decision, _ = collector.observe((), Collection(50, 2))
    assert decision.ask == ask
