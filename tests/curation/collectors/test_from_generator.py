"""Collectors that are generators: refill against its rule in words, and what they may ask for."""

import numpy as np
import pytest
from batches_of_collectors import outcome, play_batch

from jaxrl_llm import bind
from jaxrl_llm import curation as cur

COLLECTION = cur.Collection(num_groups=3, group_size=2)


def rewards_of(seed, number):
    """Half of the groups have equal rewards."""
    rng = np.random.default_rng((seed, number))
    return [1.0, 1.0] if rng.random() < 0.5 else [0.0, 1.0]


@pytest.mark.parametrize("oversample", [1.0, 2.0])
@pytest.mark.parametrize("max_rounds", [2, 10])
def test_refill_takes_the_first_groups_that_pass_whatever_finishes_first(oversample, max_rounds):
    collector = cur.refill(cur.informative_groups, oversample=oversample, max_rounds=max_rounds)
    for seed in range(12):
        answer = lambda request, number, place: outcome(place, rewards_of(seed, number))  # noqa: B023, E731
        numbers = range(3 * max_rounds)
        passed = [n for n in numbers if rewards_of(seed, n) == [0.0, 1.0]][:3]
        dropped = [n for n in numbers if n not in passed][: 3 - len(passed)]
        for order in range(3):
            rows, _, _ = play_batch(collector, (), COLLECTION, answer, order=order)
            members = [row.members[0][0] for row in rows]
            assert members == sorted(passed + dropped)
            assert [row.takes_part for row in rows] == [n in passed for n in members]


def test_the_rule_sees_each_outcome_once():
    seen = []

    def rule(rewards, where):
        seen.append(int(where.any(-1).sum()))
        return where

    collector = cur.refill(rule)
    answer = lambda request, number, place: outcome(place, [0.0, 1.0])  # noqa: E731
    play_batch(collector, (), COLLECTION, answer, order=0)
    assert sum(seen) == 3


def asks_and_requests(batch, *, rounds):
    groups = batch.ask(2)
    for _ in range(rounds):
        groups.append(batch.request(cur.Request(1, prompt=7)))
        groups += batch.ask(1)
    while any(group.outcome is None for group in groups):
        yield
    return [group.row() for group in groups[:3]]


def test_requests_have_the_order_in_which_the_generator_made_them():
    collector = cur.from_generator(bind(asks_and_requests, rounds=2))
    answer = lambda request, number, place: outcome(place, [0.0] * request.rollouts)  # noqa: E731
    rows, _, collection = play_batch(collector, (), COLLECTION, answer, order=1)
    assert [request.prompt for request in collection.requests] == [None, None, 7, None, 7, None]
    assert [len(row.members) for row in rows] == [2, 2, 1]


def test_what_it_needs_is_its_sources_and_what_it_says():
    text = cur.Needs(sends_text=True)
    collector = cur.from_generator(asks_and_requests, needs=text)
    assert collector.needs == text | cur.Needs(asks_again=True)
    assert repr(collector).endswith("asks_and_requests, needs=Needs(sends_text=True))")
    with pytest.raises(TypeError, match="from_generator: needs must be a curation.Needs; got 'x'"):
        cur.from_generator(asks_and_requests, needs="x")
    with pytest.raises(TypeError, match="from_generator: collect must be a function; got 3"):
        cur.from_generator(3)
    with pytest.raises(ValueError, match="must ask for each group once"):
        cur.from_generator(asks_and_requests, source=cur.refill(cur.informative_groups))


def test_a_row_of_a_group_that_has_not_finished_is_refused():
    def hasty(batch):
        return [group.row() for group in batch.ask(3)]
        yield

    collector = cur.from_generator(hasty)
    with pytest.raises(ValueError, match="group 0 has not finished; wait for its outcome with yie"):
        collector.observe((), COLLECTION)
