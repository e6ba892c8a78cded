"""Collectors of responses that the data have: what they read of a row, and what they refuse."""

import re

import jax
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm import curation
from jaxrl_llm.curation import Collection
from jaxrl_llm.curation.collectors.protocol import declares
from jaxrl_llm.preferences import degrade_mask
from jaxrl_llm.recipes import fspo
from jaxrl_llm.rewards import step_ends
from jaxrl_llm.rollout.collect import DataRows
from jaxrl_llm.train.logging.settings import recipe_settings

KEY = jax.random.key(0)


def row(n, **changes):
    columns = {
        "id": f"q{n}",
        "text": f"question {n}",
        "chosen": f"right {n}",
        "rejected": [7, 8, n],
        "responses": ["a", "b", "c"][: 2 + n % 2],
        "rewards": [0.5, -1, 2][: 2 + n % 2],
        "completion": "fine",
        "label": n % 2 == 0,
        "completions": ["one", "two", "three"][: 1 + n % 3],
        "labels": [True, 0.5, False][: 1 + n % 3],
    }
    return columns | {"rejected": f"wrong {n}"} | changes


DATA = [row(n) for n in range(5)]


def asked(collector, data=DATA, **sizes):
    collection = Collection(2, 8, data=data, **sizes)
    return collector.propose(collector.init(len(data)), KEY, collection, 2)[0]


def test_groups():
    # A pair is a group of two and a list of as many as it has.
    for request in asked(curation.offline_pairs()):
        assert [(x.tokens, x.reward) for x in request.responses] == [
            (DATA[request.prompt]["chosen"], 1.0),
            (DATA[request.prompt]["rejected"], 0.0),
        ]
    for request in asked(curation.offline_lists(3)):
        n = 2 + request.prompt % 2
        assert (request.rollouts, request.sampled) == (n, False)
        assert [x.reward for x in request.responses] == [0.5, -1.0, 2.0][:n]
    for request in asked(curation.offline_labels()):
        assert [x.reward for x in request.responses] == [float(request.prompt % 2 == 0)]
    kinds = (curation.offline_pairs(), curation.offline_lists(3), curation.offline_labels())
    kinds += (curation.offline_steps(separator="\n"),)
    assert [x.width(8) for x in kinds] == [2, 3, 1, 1]
    assert all(x.offline for x in kinds) and not curation.only_demonstrations().offline

    # A triple has a gold response above the pair.
    data = [row(n, reference=f"gold {n}") for n in range(5)]
    for request in asked(curation.offline_triples(), data):
        n = request.prompt
        want = [(f"right {n}", 1.0), (f"wrong {n}", 0.0), (f"gold {n}", 2.0)]
        assert [(x.tokens, x.reward) for x in request.responses] == want

    # Steps are one response with a label each.
    for request in asked(curation.offline_steps(separator=" | ")):
        ((response,), n) = request.responses, 1 + request.prompt % 3
        assert response.tokens == ["one", "one | two", "one | two | three"][n - 1]
        assert response.turn_rewards.tolist() == [1.0, 0.5, 0.0][:n]
        assert response.reward == [1.0, 0.5, 0.0][n - 1]
        # As a reward finds them again in the text.
        assert response.turn_ends.tolist() == step_ends(response.tokens, separator=" | ")

    # Columns have other names and sources other orders.
    data = [x | {"good": x["chosen"], "bad": x["rejected"]} for x in DATA]
    collector = curation.offline_pairs(chosen="good", rejected="bad", source=curation.in_epochs())
    assert repr(collector) == "offline_pairs(chosen='good', rejected='bad')"
    collector.check_data(data)
    backward = curation.offline_pairs(source=curation.in_epochs(seed=3))
    assert "seed=3" in repr(backward)
    orders = [[x.prompt for x in asked(c, data)] for c in (collector, backward)]
    assert orders[0] != orders[1]
    with pytest.raises(ValueError, match="the source must name its prompts"):
        asked(curation.offline_pairs(source=curation.in_order()))


def test_orders():
    # Stages open one after the other.
    data = [row(n, stage=n // 2) for n in range(6)]
    collector = curation.staged((2, 4))
    collector.check_data(data)
    state, seen = collector.init(6), []
    for step in range(6):
        collection = Collection(2, 8, step=step, data=data)
        requests, _ = collector.propose(state, KEY, collection, 2)
        seen.append([x.prompt for x in requests])
        finished = collection._replace(requests=requests, outcomes=("done",) * 2)
        state = collector.observe(state, finished)[1]
    assert all(sorted(places) == [0, 1] for places in seen[:2])
    assert all(max(places) < 4 for places in seen[2:4])
    assert {n for places in seen[2:] for n in places} >= {0, 1, 2, 3}
    late = Collection(6, 8, step=9, data=data)
    everything, _ = collector.propose(collector.init(6), KEY, late, 6)
    assert sorted(x.prompt for x in everything) == list(range(6))
    with pytest.raises(ValueError, match="no 'stage' of a prompt is open at step 0"):
        collector.check_data([row(n, stage=1) for n in range(2)])

    # Copies lose ever more of the longest tokens.
    data = [row(0, chosen="a bb ccc dddd", rejected="no"), row(1, chosen="a bb", rejected="no")]
    data.append(row(2, chosen=[7, 8, 9], rejected=[7, 9]))
    words = ["", "a", "bb", "ccc", "dddd", "no", "<end>", "longest", "it", "x"]
    collection = Collection(
        3,
        8,
        data=data,
        stop_ids=(6,),
        encode=lambda text, ends=False: [*map(words.index, text.split()), *([6] if ends else [])],
        decode=lambda ids: " ".join(words[i] for i in ids),
    )
    collector = curation.degraded_pairs(degrade_mask)
    requests, _ = collector.propose(collector.init(3), KEY, collection, 3)
    again, _ = collector.propose(collector.init(3), jax.random.key(1), collection, 3)
    copies = {}
    for request, same in zip(requests, again, strict=True):
        (chosen, rejected, *rest), other = request.responses, same.responses[2:]
        assert (chosen.reward, rejected.reward) == (1.0, 0.0) and request.rollouts == 2 + len(rest)
        copies[request.prompt] = [(x.tokens.tolist(), x.reward) for x in rest]
        assert copies[request.prompt] == [(x.tokens.tolist(), x.reward) for x in other]
    assert copies[0] == [([1, 2, 3, 6], 0.75), ([1, 2, 6], 0.5), ([1, 6], 0.25)]
    assert copies[1] == [([1, 6], 0.5)]  # a half of two words is the first that is a word
    assert copies[2] == [([8, 9], 0.5), ([9], 0.25)]  # ids without a stop token
    assert repr(collector) == "degraded_pairs(degrade_mask, degrees=4)"
    with pytest.raises(ValueError, match="degrees must be at least 2; got 1"):
        curation.degraded_pairs(degrade_mask, degrees=1)
    with pytest.raises(TypeError, match="remove must be a function"):
        curation.degraded_pairs(0.5)

    # Documents end as the one before them did whatever ends a turn.
    collection = Collection(
        1,
        1,
        data=[{"pretraining": "a"}],
        stop_ids=(6, 9),
        encode=lambda text, ends=False: [1, 9] if ends else [1],  # a chat template ends with 9
    )
    collector = curation.plain_texts().for_run(1, 8)
    ((request,), _) = collector.propose(collector.init(1), KEY, collection, 1)
    assert request.prompt_tokens == (6,) and request.responses[0].tokens.tolist() == [1, 6]


def users(*names):
    return [row(n, user=name) for n, name in enumerate(names)]


def shots_in(request):
    """The rows whose pairs stand in the prompt of a request."""
    lines = [] if request.text is None else request.text.splitlines()
    return [int(x.split()[-1]) for x in lines if x.startswith("Preferred answer: right")]


def test_examples():
    # Examples are other pairs of the same user.
    data = users("a", "b", "a", "a", "b", "c")
    collector = curation.few_shot_pairs(shots=2)
    assert collector.sends_text and collector.offline and collector.width(8) == 2
    collector.check_data(data)
    collection = Collection(6, 8, data=data)
    requests, _ = collector.propose(collector.init(6), KEY, collection, 6)
    assert sorted(x.prompt for x in requests) == list(range(6))
    for request in requests:
        n, shots = request.prompt, shots_in(request)
        assert [x.tokens for x in request.responses] == [f"right {n}", f"wrong {n}"]
        mates = {i for i in range(6) if data[i]["user"] == data[n]["user"]} - {n}
        assert len(set(shots)) == len(shots) == min(len(mates), 2) and set(shots) <= mates
        assert request.text is None or request.text.endswith(f"question {n}")
    # As many as there is room for.
    short = collection._replace(takes_text=lambda text: text.count("Preferred") < 2)
    less, _ = collector.propose(collector.init(6), KEY, short, 6)
    assert [shots_in(x) for x in less] == [shots_in(x)[:1] for x in requests]
    none = curation.few_shot_pairs(shots=0)
    assert {x.text for x in none.propose(none.init(6), KEY, collection, 6)[0]} == {None}

    # Few shot pairs print what differs so that a resume notices it.
    made = curation.few_shot_pairs
    assert repr(made(shots=2)) == "few_shot_pairs(shots=2, user='user')"
    source = curation.in_epochs(seed=3)
    assert repr(made(source=source)) == (
        "few_shot_pairs(shots=4, user='user', source=in_epochs(seed=3))"
    )
    changes = (
        {},
        {"chosen": "better"},
        {"rejected": "worse"},
        {"shot": "{question} {chosen} {rejected}"},
        {"template": "{shots} {question}"},
    )
    recipes = [fspo().replace(collector=made(**change)) for change in changes]
    texts = {recipe_settings(recipe, length=8)["recipe.collector"] for recipe in recipes}
    assert len(texts) == len({repr(recipe.collector) for recipe in recipes}) == len(changes)

    # Examples are drawn anew and do not depend on how many are asked for.
    data = users(*"aaaaaaaa")
    collector, collection = curation.few_shot_pairs(shots=3), Collection(4, 8, data=data)

    def texts(key, count):
        requests = collector.propose(collector.init(8), key, collection, count)[0]
        return [x.text for x in requests]

    assert texts(KEY, 4)[:2] == texts(KEY, 2)
    assert texts(KEY, 4) != texts(jax.random.key(1), 4)


@for_each("kind", ["few_shot_pairs", "staged"])
def test_a_batch_does_not_read_all_rows_again(kind):
    class Rows(DataRows):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return rows[index]

    rows = [x | {"stage": 0} for x in users(*"aabb" * 25)]
    data = Rows(rows)
    collector = (
        curation.few_shot_pairs(shots=1) if kind == "few_shot_pairs" else curation.staged((9,))
    )
    reads = []
    for _ in range(2):
        before = data.reads
        collector.propose(collector.init(100), KEY, Collection(2, 2, data=data), 2)
        reads.append(data.reads - before)
    assert reads[0] >= 100 and reads[1] <= 10


@for_each(
    ("collector", "changes", "message"),
    [
        (curation.offline_pairs(), {"chosen": None}, "prompt 'q2' has no 'chosen' in its row"),
        (curation.offline_pairs(), {"rejected": " "}, "'rejected' of prompt 'q2' is empty"),
        (curation.offline_pairs(), {"rejected": "right 2"}, "of prompt 'q2' are equal"),
        (curation.offline_pairs(), {"chosen": [1, -2]}, "has a token id below 0"),
        (curation.offline_pairs(), {"chosen": [1, 2]}, "has a text and token ids"),
        (
            curation.offline_lists(3),
            {"responses": ["a"]},
            "has 1 as 'responses'; a list has 2 to 3",
        ),
        (curation.offline_lists(3), {"responses": ["a"] * 4}, "has 4 as 'responses'"),
        (curation.offline_lists(3), {"responses": "abc"}, "has a text as 'responses'"),
        (curation.offline_lists(3), {"rewards": [1.0]}, "each response has one reward"),
        (curation.offline_lists(3), {"rewards": [1.0, np.nan]}, "must be finite numbers"),
        (curation.offline_triples(), {}, "prompt 'q0' has no 'reference' in its row"),
        (curation.few_shot_pairs(), {}, "prompt 'q0' has no 'user' in its row"),
        (curation.staged((9,)), {}, "staged: 'stage' of prompt 'q0' must be an integer from 0"),
        (curation.offline_labels(), {"label": "yes"}, "must be true or false; got 'yes'"),
        (curation.offline_labels(), {"label": None}, "has no 'label'"),
        (curation.offline_labels(), {"completion": ""}, "is empty"),
        (curation.offline_steps(), {"completions": []}, "must be a list of steps; got"),
        (curation.offline_steps(), {"labels": [True]}, "each step has one label"),
        (curation.offline_steps(), {"labels": [1, 0, 2]}, "or in [0, 1]; got"),
        (curation.offline_steps(), {"completions": ["a", " ", "c"]}, "is not empty"),
        (curation.offline_steps(), {"completions": ["a", "b\n\nc", "d"]}, "holds no separator"),
    ],
)
def test_rows_that_are_no_preferences_are_named(collector, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        collector.check_data([*DATA[:2], row(2, **changes)])


@for_each("kind", ["demonstrations", "only", "labels"])
def test_a_sampled_completion_that_was_cut_off_is_no_response(kind):
    column = "completion"
    collector = {
        "demonstrations": lambda: curation.demonstrations(column=column),
        "only": lambda: curation.only_demonstrations(column=column),
        "labels": curation.offline_labels,
    }[kind]()

    def checked(**changes):
        part = getattr(collector, "policy", None)
        sampled = row(2, completion="4", label=1, **changes)
        collector.check_data([sampled]) if part is None else part.check(sampled)

    for finish in ("length", "cancelled"):
        with pytest.raises(ValueError, match=f"of prompt 'q2' has the finish '{finish}', .* only"):
            checked(finish=finish, num_tokens=8)
        checked(finish=finish)  # a column of the data
    checked(finish="stop", num_tokens=8)


def test_mistakes():
    # What cannot be a collector is refused.
    with pytest.raises(ValueError, match="size must be at least 2; got 1"):
        curation.offline_lists(1)
    with pytest.raises(TypeError, match="size must be an integer"):
        curation.offline_lists(2.5)
    with pytest.raises(ValueError, match="columns must have names that differ"):
        curation.offline_pairs(chosen="text", rejected="text")
    with pytest.raises(ValueError, match="each of the 2 rows has another 'user'"):
        curation.few_shot_pairs().check_data(users("a", "b"))
    with pytest.raises(ValueError, match="'user' of prompt 'q0' must be a string or a number"):
        curation.few_shot_pairs().check_data([row(0, user=["a"])])
    with pytest.raises(ValueError, match="'stage' of prompt 'q1' is 2, which never opens"):
        curation.staged((9,)).check_data([row(0, stage=0), row(1, stage=2)])
    with pytest.raises(ValueError, match="'chosen' of prompt 'q0' must be a string"):
        curation.few_shot_pairs().check_data([row(0, user="a", chosen=[1], rejected=[2])])
    with pytest.raises(ValueError, match="few_shot_pairs: columns must have names that differ"):
        curation.few_shot_pairs(user="chosen")
    with pytest.raises(TypeError, match="few_shot_pairs: shots must be an integer"):
        curation.few_shot_pairs(shots=1.5)
    with pytest.raises(ValueError, match="stage_mask: boundaries must be increasing"):
        curation.staged(())

    # A mixture samples nothing only if no part does.
    pairs, labels = curation.offline_pairs(), curation.offline_labels()
    sampled = curation.mixed((curation.in_order(), 0.5), (pairs, 0.5))
    nested = curation.mixed((sampled, 0.5), (pairs, 0.5))
    for collector, there in (
        (pairs, True),
        (curation.mixed((pairs, 0.5), (labels, 0.5)), True),
        (curation.mixed((curation.mixed((pairs, 1), (labels, 1)), 1), (pairs, 1)), True),
        (curation.in_order(), False),
        (sampled, False),
        (nested, False),
    ):
        assert declares(collector, "offline") is there
        assert declares(collector, "has_rewards") is there
    graded = curation.only_demonstrations(reward=1.0)
    mixture = curation.mixed((graded, 0.5), (pairs, 0.5))
    assert declares(mixture, "has_rewards") and not declares(mixture, "offline")
    # One part is enough for what a run must do besides.
    assert declares(nested, "brings_responses")
    assert declares(None, "offline") is False
