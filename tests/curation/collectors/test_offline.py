"""Collectors of responses that the data have: what they read of a row, and what they refuse."""

import re

import jax
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm import curation as cur
from jaxrl_llm.curation import Collection
from jaxrl_llm.curation.collectors.needs import needs_of
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


def asked(collector, data=DATA, count=2, key=KEY, **options):
    batch = Collection(count, 8, data=data, **options)
    return collector.propose(collector.init(len(data)), key, batch, count)[0]


def test_groups():
    # What a row becomes: the tokens and the reward of each response.
    def lists(n):
        return list(zip(DATA[n]["responses"], DATA[n]["rewards"], strict=True))

    gold = [row(n, reference=f"gold {n}") for n in range(5)]
    kinds = (
        (cur.offline_pairs(), DATA, 2, lambda n: [(f"right {n}", 1.0), (f"wrong {n}", 0.0)]),
        (cur.offline_lists(3), DATA, 3, lists),
        (cur.offline_labels(), DATA, 1, lambda n: [("fine", float(n % 2 == 0))]),
        (
            *(cur.offline_triples(), gold, 3),
            lambda n: [(f"right {n}", 1.0), (f"wrong {n}", 0.0), (f"gold {n}", 2.0)],
        ),
    )
    for collector, data, width, expected in kinds:
        assert collector.width(8) == width and collector.needs.offline
        for request in asked(collector, data):
            found = [(x.tokens, x.reward) for x in request.responses]
            assert found == expected(request.prompt)
            assert (request.rollouts, request.sampled) == (len(found), False)
    assert not cur.only_demonstrations().needs.offline

    # Steps are one response with a label each, as a reward finds them again in the text.
    for request in asked(cur.offline_steps(separator=" | ")):
        ((response,), n) = request.responses, 1 + request.prompt % 3
        assert response.tokens == ["one", "one | two", "one | two | three"][n - 1]
        assert response.turn_rewards.tolist() == [1.0, 0.5, 0.0][:n]
        assert response.reward == [1.0, 0.5, 0.0][n - 1]
        assert response.turn_ends.tolist() == step_ends(response.tokens, separator=" | ")

    # Columns have other names and sources other orders.
    data = [x | {"good": x["chosen"], "bad": x["rejected"]} for x in DATA]
    collector = cur.offline_pairs(chosen="good", rejected="bad", source=cur.in_epochs())
    assert repr(collector) == "offline_pairs(chosen='good', rejected='bad')"
    collector.check_data(data)
    backward = cur.offline_pairs(source=cur.in_epochs(seed=3))
    assert "seed=3" in repr(backward)
    orders = [[x.prompt for x in asked(c, data)] for c in (collector, backward)]
    assert orders[0] != orders[1]
    with pytest.raises(ValueError, match="the source must name its prompts"):
        asked(cur.offline_pairs(source=cur.in_order()))


def test_orders():
    # Stages open one after the other.
    data = [row(n, stage=n // 2) for n in range(6)]
    collector = cur.staged((2, 4))
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
    assert sorted(x.prompt for x in asked(collector, data, 6, step=9)) == list(range(6))
    with pytest.raises(ValueError, match="no 'stage' of a prompt is open at step 0"):
        collector.check_data([row(n, stage=1) for n in range(2)])

    # Copies lose ever more of the longest tokens.
    data = [row(0, chosen="a bb ccc dddd", rejected="no"), row(1, chosen="a bb", rejected="no")]
    data.append(row(2, chosen=[7, 8, 9], rejected=[7, 9]))
    words = ["", "a", "bb", "ccc", "dddd", "no", "<end>", "longest", "it", "x"]
    tokenizer = {
        "stop_ids": (6,),
        "encode": lambda text, ends=False: [*map(words.index, text.split()), *[6] * ends],
        "decode": lambda ids: " ".join(words[i] for i in ids),
    }
    collector = cur.degraded_pairs(degrade_mask)
    keys = (KEY, jax.random.key(1))
    requests, again = (asked(collector, data, 3, key, **tokenizer) for key in keys)
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

    # Documents end as the one before them did whatever ends a turn.
    (request,) = asked(
        cur.plain_texts().for_run(1, 8),
        [{"pretraining": "a"}],
        1,
        stop_ids=(6, 9),
        encode=lambda text, ends=False: [1, 9] if ends else [1],  # a chat template ends with 9
    )
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
    collector = cur.few_shot_pairs(shots=2)
    assert collector.needs.sends_text and collector.needs.offline and collector.width(8) == 2
    collector.check_data(data)
    requests = asked(collector, data, 6)
    assert sorted(x.prompt for x in requests) == list(range(6))
    for request in requests:
        n, shots = request.prompt, shots_in(request)
        assert [x.tokens for x in request.responses] == [f"right {n}", f"wrong {n}"]
        mates = {i for i in range(6) if data[i]["user"] == data[n]["user"]} - {n}
        assert len(set(shots)) == len(shots) == min(len(mates), 2) and set(shots) <= mates
        assert request.text is None or request.text.endswith(f"question {n}")
    # As many as there is room for.
    less = asked(collector, data, 6, takes_text=lambda text: text.count("Preferred") < 2)
    assert [shots_in(x) for x in less] == [shots_in(x)[:1] for x in requests]
    assert {x.text for x in asked(cur.few_shot_pairs(shots=0), data, 6)} == {None}

    # Few shot pairs print what differs so that a resume notices it.
    made = cur.few_shot_pairs
    assert repr(made(shots=2)) == "few_shot_pairs(shots=2, user='user')"
    source = cur.in_epochs(seed=3)
    assert repr(made(source=source)).endswith("user='user', source=in_epochs(seed=3))")
    texts = {"shot": "{question} {chosen} {rejected}", "template": "{shots} {question}"}
    changes = ({"chosen": "better"}, {"rejected": "worse"}, *({k: v} for k, v in texts.items()))
    recipes = [fspo().replace(collector=made(**change)) for change in ({}, *changes)]
    settings = {recipe_settings(recipe, length=8)["recipe.collector"] for recipe in recipes}
    assert len(settings) == len({repr(recipe.collector) for recipe in recipes}) == 5

    # Examples are drawn anew and do not depend on how many are asked for.
    data = users(*"aaaaaaaa")
    collector, collection = cur.few_shot_pairs(shots=3), Collection(4, 8, data=data)

    def texts(key, count):
        requests = collector.propose(collector.init(8), key, collection, count)[0]
        return [x.text for x in requests]

    assert texts(KEY, 4)[:2] == texts(KEY, 2)
    assert texts(KEY, 4) != texts(jax.random.key(1), 4)


@for_each("collector", [cur.few_shot_pairs(shots=1), cur.staged((9,))])
def test_a_batch_does_not_read_all_rows_again(collector):
    class Rows(DataRows):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return rows[index]

    rows = [x | {"stage": 0} for x in users(*"aabb" * 25)]
    data = Rows(rows)
    for least, most in ((100, 1e9), (0, 10)):
        before = data.reads
        collector.propose(collector.init(100), KEY, Collection(2, 2, data=data), 2)
        assert least <= data.reads - before <= most


@for_each(
    ("collector", "changes", "message"),
    [
        (cur.offline_pairs(), {"chosen": None}, "prompt 'q2' has no 'chosen' in its row"),
        (cur.offline_pairs(), {"rejected": " "}, "'rejected' of prompt 'q2' is empty"),
        (cur.offline_pairs(), {"rejected": "right 2"}, "of prompt 'q2' are equal"),
        (cur.offline_pairs(), {"chosen": [1, -2]}, "has a token id below 0"),
        (cur.offline_pairs(), {"chosen": [1, 2]}, "has a text and token ids"),
        (cur.offline_lists(3), {"responses": ["a"]}, "has 1 as 'responses'; a list has 2 to 3"),
        (cur.offline_lists(3), {"responses": ["a"] * 4}, "has 4 as 'responses'"),
        (cur.offline_lists(3), {"responses": "abc"}, "has a text as 'responses'"),
        (cur.offline_lists(3), {"rewards": [1.0]}, "each response has one reward"),
        (cur.offline_lists(3), {"rewards": [1.0, np.nan]}, "must be finite numbers"),
        (cur.offline_triples(), {}, "prompt 'q0' has no 'reference' in its row"),
        (cur.few_shot_pairs(), {}, "prompt 'q0' has no 'user' in its row"),
        (cur.staged((9,)), {}, "staged: 'stage' of prompt 'q0' must be an integer from 0"),
        (cur.offline_labels(), {"label": "yes"}, "must be true or false; got 'yes'"),
        (cur.offline_labels(), {"label": None}, "has no 'label'"),
        (cur.offline_labels(), {"completion": ""}, "is empty"),
        (cur.offline_steps(), {"completions": []}, "must be a list of steps; got"),
        (cur.offline_steps(), {"labels": [True]}, "each step has one label"),
        (cur.offline_steps(), {"labels": [1, 0, 2]}, "or in [0, 1]; got"),
        (cur.offline_steps(), {"completions": ["a", " ", "c"]}, "is not empty"),
        (cur.offline_steps(), {"completions": ["a", "b\n\nc", "d"]}, "holds no separator"),
    ],
)
def test_rows_that_are_no_preferences_are_named(collector, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        collector.check_data([*DATA[:2], row(2, **changes)])


@for_each(
    "collector",
    [
        cur.demonstrations(column="completion"),
        cur.only_demonstrations(column="completion"),
        cur.offline_labels(),
    ],
)
def test_a_sampled_completion_that_was_cut_off_is_no_response(collector):
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
    with pytest.raises(ValueError, match="each of the 2 rows has another 'user'"):
        cur.few_shot_pairs().check_data(users("a", "b"))
    with pytest.raises(ValueError, match="'user' of prompt 'q0' must be a string or a number"):
        cur.few_shot_pairs().check_data([row(0, user=["a"])])
    with pytest.raises(ValueError, match="'stage' of prompt 'q1' is 2, which never opens"):
        cur.staged((9,)).check_data([row(0, stage=0), row(1, stage=2)])
    with pytest.raises(ValueError, match="'chosen' of prompt 'q0' must be a string"):
        cur.few_shot_pairs().check_data([row(0, user="a", chosen=[1], rejected=[2])])

    # A mixture samples nothing only if no part does.
    pairs, labels = cur.offline_pairs(), cur.offline_labels()
    graded = cur.only_demonstrations(reward=1.0)
    sampled = mix(cur.in_order(), pairs)
    for collector, offline, has_rewards in (
        (pairs, True, True),
        (mix(pairs, labels), True, True),
        (mix(mix(pairs, labels), pairs), True, True),
        (cur.in_order(), False, False),
        (sampled, False, False),
        (mix(sampled, pairs), False, False),
        (mix(graded, pairs), False, True),
    ):
        assert needs_of(collector).offline is offline
        assert needs_of(collector).has_rewards is has_rewards
    # One part is enough for what a run must do besides.
    assert needs_of(mix(sampled, pairs)).brings_responses
    assert needs_of(None).offline is False


def mix(*parts):
    return cur.mixed(*((part, 1) for part in parts))
