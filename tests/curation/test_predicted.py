"""Predictions of solutions: their rewards, their gate and their cutoff."""

import dataclasses

import numpy as np
import pytest
from batches_of_collectors import outcome, play_batch
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm import curation as cur
from jaxrl_llm.curation import JUDGE, OWN, Collection, predicted
from jaxrl_llm.curation.collectors.needs import needs_of
from jaxrl_llm.curation.collectors.protocol import sized

G, T = 2, 16
DATA = [{"text": f"question {i}"} for i in range(10)]
PARSE, REWARD = jr.rewards.parse_meta_answer, jr.rewards.meta_answer_rewards
GATE, CUTOFF = cur.predictive_gate, cur.length_cutoff


def answers(*pairs):
    return tuple(f'{{"pass_rate": {rate}, "solution_length": {n}}}' for rate, n in pairs)


def play(collector, groups, said, solved, *, one_by_one=False):
    """The batch of a question a number: what is predicted of it, and the rewards it gets."""

    def answer(request, number, place):
        known = {"rewards": (0.0, 0.0), "texts": ("", ""), "lengths": np.array([3, 9])}
        known |= {"texts": said[place]} if request.role == JUDGE else solved[place]
        return outcome(place, **known)

    collector = sized(collector, group_size=G, max_new_tokens=T)
    batch, state = Collection(groups, G, data=DATA), collector.init(10)
    rows, state, batch = play_batch(collector, state, batch, answer, one_by_one=one_by_one)
    return batch.requests, rows, state


RIGHT = {"rewards": (1.0, 1.0)}
HALF = {"rewards": (1.0, 0.0)}
SAID = {0: answers((8, 5), (4, 20)), 1: answers((4, 6), (0, 3)), 2: ("no", "")}


@for_each("one_by_one", [False, True])
def test_half_of_a_batch_predicts_the_other_half(one_by_one):
    solved = {0: RIGHT, 1: HALF, 2: RIGHT}
    requests, rows, state = play(predicted(PARSE, REWARD), 5, SAID, solved, one_by_one=one_by_one)
    assert [request.role for request in requests] == [OWN] * 3 + [JUDGE] * 2
    assert [request.extends for request in requests] == [None] * 3 + [0, 1]
    assert [row.members for row in rows] == [((i, 0), (i, 1)) for i in range(5)]
    assert [row.rewards for row in rows[:3]] == [None] * 3
    # Right solutions of 3 and 9 tokens; a pass rate of 1, then off by a half.
    assert rows[3].rewards == pytest.approx((2 / 3, 0.1 / 3))
    # One right solution: no length lies between; exact, then off by a half.
    assert rows[4].rewards == pytest.approx((1 / 3, 0.1 / 3))
    counts = {name: int(value) for name, value in state.items()}
    assert counts == {"predictions": 4, "parsed": 4, "gated": 0}
    assert requests[3].text(DATA[0]).startswith("question 0\n\nDo not solve this.")


def test_predictions_of_a_question_without_grades_do_not_train():
    none = {"rewards": (0.0, 0.0), "where": np.zeros(2, bool)}
    _, rows, _ = play(predicted(PARSE, REWARD), 2, SAID, {0: none})
    assert [row.takes_part for row in rows] == [True, False]


@for_each("one_by_one", [False, True])
def test_the_efficient_form_drops_and_cuts_by_what_is_predicted(one_by_one):
    said = {
        0: answers((8, 3), (8, 3)),  # all agree that it is mastered
        1: answers((8, 3), (0, 5)),  # they differ
        2: ("", "no"),  # nothing is known
        3: answers((0, 2), (0, -1)),  # hopeless
        4: answers((4, 100), (5, 100)),
    }
    collector = predicted(PARSE, REWARD, gate=GATE, cutoff=CUTOFF)
    requests, rows, state = play(
        collector, 11, said, dict.fromkeys(range(6), HALF), one_by_one=one_by_one
    )
    assert [request.role for request in requests] == [JUDGE] * 5 + [OWN] * 4
    assert [request.extends for request in requests[5:]] == [1, 2, 4, None]
    assert [request.limit for request in requests[5:]] == [8, None, None, None]
    assert len(rows) == 11 and [row.takes_part for row in rows] == [
        *(False, True, True, False, True),
        *(True, True, True, True),
        *(False, False),
    ]
    assert rows[1].rewards == pytest.approx((0.1 / 3, 0.1 / 3)) and rows[2].rewards == (0, 0)
    assert int(state["gated"]) == 2 and int(state["parsed"]) == 8


def test_the_gate_and_its_parts():
    # Gate and cutoff are options of their own.
    said = {0: answers((8, 3), (8, 3))}
    requests, rows, _ = play(predicted(PARSE, REWARD, gate=GATE), 2, said, {0: RIGHT})
    assert len(requests) == 1 and not any(row.takes_part for row in rows)
    requests, rows, _ = play(predicted(PARSE, REWARD, cutoff=CUTOFF), 2, said, {0: RIGHT})
    assert [request.limit for request in requests] == [None, 6]

    # A part of one group is a question. Of a batch, the other groups of which are stored ones or
    # of another collector.
    requests, rows, _ = play(predicted(PARSE, REWARD, gate=GATE), 1, {}, {0: RIGHT})
    assert [(request.role, request.extends) for request in requests] == [(OWN, None)]
    assert [row.takes_part for row in rows] == [True]

    # What a run is told.
    plain, cut = predicted(PARSE, REWARD), predicted(PARSE, REWARD, cutoff=CUTOFF)
    assert needs_of(plain).sends_text and not needs_of(plain).slots
    assert needs_of(cut).slots
    assert repr(cut) == ("predicted(parse_meta_answer, meta_answer_rewards, cutoff=length_cutoff)")
    with pytest.raises(ValueError, match="prompts_per_step must be at least 2, got 1"):
        plain.check_sizes(DATA, group_size=G, num_groups=1)
    short = predicted(PARSE, REWARD, message=dataclasses.astuple)
    assert "message=" in repr(short)


@for_each("options", [{}, {"gate": GATE}, {"cutoff": CUTOFF}], ids=["plain", "gate", "cutoff"])
def test_it_is_no_source_of_prompts(options):
    """It sets the rewards of predictions in its rows, which a source's collector does not read."""
    source = predicted(PARSE, REWARD, **options)
    for make in (
        lambda: cur.refill(cur.informative_groups, source=source),
        lambda: cur.partial_rollouts(source=source),
    ):
        with pytest.raises(ValueError, match="source must ask for each group once") as error:
            make()
        assert "\n" not in str(error.value)
