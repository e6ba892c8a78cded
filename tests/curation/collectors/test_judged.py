"""Tasks of judging and refining: which there are, their messages, their rewards."""

import jax
import numpy as np
from batches_of_collectors import outcome, play_batch
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import JUDGE, Collection, judged

P, G = 8, 2
DATA = [{"text": f"question {i}"} for i in range(10)]


def graded(place, rewards, **changes):
    return outcome(place, rewards, texts=tuple(f"answer {place}.{g}" for g in range(G)), **changes)


def play(collector, rewards, one_by_one=False):
    """All requests of a batch whose questions have these rewards, and the rows."""

    def answer(request, number, place):
        return graded(place, rewards[number] if number < len(rewards) else MIXED)

    rows, state, batch = play_batch(
        collector, collector.init(10), Collection(P, G, data=DATA), answer, one_by_one=one_by_one
    )
    return batch.requests, rows, state


RIGHT, WRONG, MIXED = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]


@for_each("one_by_one", [False, True])
def test_half_of_a_batch_judges_and_refines(one_by_one):
    requests, rows, state = play(judged(point=0.0), [MIXED, MIXED, MIXED, RIGHT], one_by_one)
    assert len(rows) == P and [row.members[0] for row in rows] == [(i, 0) for i in range(P)]
    assert [request.role for request in requests].count(JUDGE) == 2
    assert [request.text is not None for request in requests] == [False] * 4 + [True] * 4
    for request in requests[6:]:
        # The wrong one of the group; the run's reward grades what comes of it.
        expected = f"question {request.prompt}\n\nAnswer:\nanswer {request.prompt}.0\n\n"
        assert request.text.startswith(expected) and request.reward is None
        assert request.prompt < 3
    assert (int(state["judged"]), int(state["refined"])) == (2, 2)
    assert len({(r.prompt, r.role) for r in requests[4:]}) == 4


def test_judges():
    # The right verdict has the reward.
    requests, _, _ = play(judged(judges=0.5, refines=0.0), [RIGHT, WRONG, RIGHT, WRONG])
    verdicts = {"Yes.": 1, "no": 0, "yes or no? yes": 1, "perhaps": None, "YES, no": 0}
    verdicts |= {"Yes, I know it now": 1, "not sure": None, "No. Another noted: eyes": 0}
    for request in requests[4:]:
        assert request.text.endswith("Is this answer right? Reply yes or no.")
        right = request.prompt % 2 == 0
        assert request.reward([*verdicts]) == [float(x == right) for x in verdicts.values()]

    # Two answers are compared.
    requests, _, _ = play(judged(judges=0.5, refines=0.0, point=0.0), [MIXED] * 4)
    orders = set()
    for request in requests[4:]:
        first_is_right = f"answer {request.prompt}.1\n\nAnswer:" in request.text
        orders.add(first_is_right)
        texts = ["First", "the second", "First, after seconds"]
        assert request.reward(texts) == [first_is_right, not first_is_right, first_is_right]
    assert len(orders) == 2

    # Further questions take the places of tasks that there are not.
    requests, _, state = play(judged(), [RIGHT] * 4)
    assert [request.role for request in requests].count(JUDGE) == 2
    assert [request.text is None for request in requests] == [True] * 4 + [False] * 2 + [True] * 2
    assert int(state["refined"]) == 0
    assert requests[-1].prompt is None and requests[-1].rollouts == G

    # An answer that was cut off or has no room is not judged.
    collector, done = judged(judges=0.5, refines=0.0), [graded(i, WRONG) for i in range(4)]
    cut = [each._replace(truncated=np.ones(G, bool)) for each in done]

    def tasks(outcomes, takes_text=bool):
        requests = (jr.curation.Request(G),) * 4
        batch = Collection(P, G, requests=requests, outcomes=tuple(outcomes), data=DATA)
        batch = batch._replace(takes_text=takes_text)
        proposed, _ = collector.propose(collector.init(10), jax.random.key(0), batch, 4)
        return [request.text for request in proposed if request.text is not None]

    assert len(tasks(done)) == 4
    assert len(tasks([*cut[:3], done[3]])) == 1
    assert len(tasks(done, lambda text: "question 2" in text)) == 1


def test_messages_of_a_user_and_bad_options():
    def message(question, answers):
        return f"{question}: {len(answers)}"

    requests, _, _ = play(judged(judge=message, refine=message), [WRONG] * 4)
    assert {request.text for request in requests[4:]} <= {f"question {i}: 1" for i in range(4)}
    assert repr(judged(point=0.5)) == "judged(judges=0.25, refines=0.25, point=0.5)"
    assert jr.recipes.spark().collector == judged()
