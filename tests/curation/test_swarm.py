"""Groups of other trainers: the folder, which of them are drawn, what is shared."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from batches_of_collectors import outcome, play_batch
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import DEMONSTRATION, OWN, Collection, SwarmGroup, shared, shared_folder
from jaxrl_llm.curation.collectors.protocol import sized
from jaxrl_llm.data import Prompt
from jaxrl_llm.data.questions import Question
from jaxrl_llm.train.data.fields import check_fields

P, G, T = 4, 2, 6
DATA = [{"text": f"q{i}"} for i in range(10)]


def group(question, texts=("ab", "c"), rewards=(1.0, 0.0), ended=None):
    return SwarmGroup(question, texts, rewards, ended or (True,) * len(texts))


def test_what_one_puts_the_others_get(tmp_path):
    a, b, c = (shared_folder(str(tmp_path / "new"), node=node) for node in "abc")
    assert a.get() == ()
    first = [group("q1"), group("q\n\u2028é", ended=(True, False))]
    a.put(first, step=0)
    b.put([group("q2")], step=7)
    a.put([group("q3")], step=1)
    assert c.get() == (*first, group("q3"), group("q2"))
    assert a.get() == (group("q2"),) and b.get() == (*first, group("q3"))
    a.put([group("q4")], step=1)  # a run that is resumed does a batch again
    assert b.get() == (*first, group("q4"))
    a.put([], step=2)
    assert b.get() == (*first, group("q4"))


def test_a_node_has_a_bounded_number_of_files(tmp_path):
    a, b = (shared_folder(str(tmp_path), node=node, keep=2) for node in "ab")
    for step in range(5):
        a.put([group(f"q{step}")], step=step)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "a.00000003.json",
        "a.00000004.json",
    ]
    assert [each.question for each in b.get()] == ["q3", "q4"]
    last = shared_folder(str(tmp_path), node="b", keep=1).get()
    assert [each.question for each in last] == ["q4"]


def test_a_trainer_that_starts_again_leaves_nothing_of_its_later_steps(tmp_path):
    a, b = (shared_folder(str(tmp_path), node=node, keep=3) for node in "ab")
    for step in range(8):
        a.put([group(f"q{step}")], step=step)
    a.put([group("again")], step=6)  # from the checkpoint of step 6
    assert [each.question for each in b.get()] == ["q5", "again"]


GOOD = {"question": "q1", "texts": ["a", "b"], "rewards": [1, 0.5], "ended": [True, False]}


@for_each(
    "text",
    [
        json.dumps({"format": 1, "groups": [GOOD]})[:-9],  # half of a file
        "",
        "\x00",
        "[" * 100_000,
        "[]",
        json.dumps({"format": 2, "groups": [GOOD]}),
        json.dumps({"format": 1, "groups": [{**GOOD, "rewards": [1]}]}),
        json.dumps({"format": 1, "groups": [{**GOOD, "rewards": [1, True]}]}),
        json.dumps({"format": 1, "groups": [{**GOOD, "rewards": [1, float("nan")]}]}),
        json.dumps({"format": 1, "groups": [{**GOOD, "rewards": [1, 10**400]}]}),
        json.dumps({"format": 1, "groups": [{**GOOD, "texts": "ab"}, {**GOOD, "texts": [1, 2]}]}),
        json.dumps({"format": 1, "groups": [{**GOOD, "texts": [], "rewards": [], "ended": []}]}),
        json.dumps({"format": 1, "groups": [{**GOOD, "ended": [1, 0]}]}),
        json.dumps({"format": 1, "groups": [{**GOOD, "question": None}]}),
        json.dumps({"format": 1, "groups": [GOOD] * 5000}),
    ],
)
def test_a_file_that_is_none_of_ours_is_passed_over(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("swarm")
    a, b = (shared_folder(str(folder), node=node) for node in "ab")
    a.put([group("q3")], step=1)
    (folder / "a.00000000.json").write_text(text)
    assert b.get() == (group("q3"),)


def test_a_file_of_the_format_is_read_and_others_are_not(tmp_path):
    b, text = shared_folder(str(tmp_path), node="b"), json.dumps({"format": 1, "groups": [GOOD]})
    for name in ("a.00000001.json.tmp", "a.1.json", "x y.00000001.json", ".a.00000001.json"):
        (tmp_path / name).write_text(text)
    (tmp_path / "a.00000003.json").mkdir()
    assert b.get() == ()
    (tmp_path / "a.00000002.json").write_text(text)
    assert b.get() == (SwarmGroup("q1", ("a", "b"), (1.0, 0.5), (True, False)),)


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    a, b = (shared_folder(str(tmp_path), node=node) for node in "ab")
    a.put([group("q1")], step=0)

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        a.put([group("q2")], step=0)
    assert b.get() == (group("q1"),) and len(list(tmp_path.iterdir())) == 1


@dataclasses.dataclass
class Memory:
    """A swarm in memory; ``given`` is what the others have put there."""

    given: list
    put_there: dict = dataclasses.field(default_factory=dict)

    def put(self, groups, *, step):
        self.put_there[step] = list(groups)

    def get(self):
        return list(self.given)


def encode(text, ends=False):
    return [*text.encode(), *([0] if ends else [])]


def play(swarm, *, share=0.5, seed=0, where=(True, True), one_by_one=False):
    """A batch of four groups; requests, rows, state."""

    def answer(request, number, place):
        cut = {"lengths": np.array([2, T]), "truncated": np.array([False, True])}
        texts = (f"{number}", f"{number}!")
        return outcome(place, [0.0, 1.0], where=np.array(where), texts=texts, **cut)

    collector = sized(shared(swarm, share=share), group_size=G, max_new_tokens=T)
    batch, state = Collection(P, G, data=DATA, encode=encode), collector.init(10)
    timing = {"key": jax.random.key(seed), "one_by_one": one_by_one}
    rows, state, batch = play_batch(collector, state, batch, answer, **timing)
    return batch.requests, rows, state


@for_each("one_by_one", [False, True])
def test_half_of_a_batch_are_groups_of_others(one_by_one):
    swarm = Memory([group("q7"), group("q5", ("x", "yz"), ended=(False, True)), group("q7")])
    requests, rows, state = play(swarm, one_by_one=one_by_one)
    assert [request.role for request in requests] == [OWN] * 2 + [DEMONSTRATION] * 2
    assert [row.members for row in rows] == [((i, 0), (i, 1)) for i in range(4)]
    tokens = {7: [[97, 98, 0], [99, 0]], 5: [[120], [121, 122, 0]]}
    finish = {7: [1, 1], 5: [0, 1]}
    for request in requests[2:]:
        assert not request.sampled and request.rollouts == 2
        assert [x.tokens.tolist() for x in request.responses] == tokens[request.prompt]
        assert [x.finish for x in request.responses] == finish[request.prompt]
        assert {(x.reward, x.behavior_logp, x.version) for x in request.responses} == {(None,) * 3}
    # What is sampled is shared; what is drawn is not.
    assert swarm.put_there == {
        0: [SwarmGroup(f"q{i}", (f"{i}", f"{i}!"), (0.0, 1.0), (True, False)) for i in range(2)]
    }
    assert (int(state["shared"]), int(state["drawn"])) == (2, 2)


@for_each(
    "bad",
    [
        group("q1", rewards=(0.5, 0.5)),  # nothing to learn
        group("unknown"),
        group("q1", ("a", "b", "c"), (1.0, 0.0, 0.0)),  # more than G
        group("q1", ("a", "abcdef")),  # seven tokens with the one that ends it
        group("q1", ("a", ""), ended=(True, False)),  # no token
    ],
)
def test_what_cannot_train_is_not_drawn(bad):
    for seed in range(3):
        requests, _, _ = play(Memory([bad, group("q8")]), seed=seed)
        assert [request.prompt for request in requests] == [None] * 3 + [8]
    long = group("q1", ("a", "abcdef"), ended=(True, False))  # as many as fit
    assert [request.prompt for request in play(Memory([long]))[0]] == [None] * 3 + [1]


def test_a_trainer_that_is_alone_trains_on_its_groups():
    requests, rows, state = play(Memory([]), where=(True, False))
    assert [request.role for request in requests] == [OWN] * 4 and len(rows) == 4
    assert (int(state["shared"]), int(state["drawn"])) == (4, 0)
    swarm = Memory([])
    play(swarm, where=(False, False))  # no grade, nothing to share
    assert swarm.put_there == {0: []}
    swarm = Memory([])
    play(swarm, where=(True, False))
    assert swarm.put_there[0][0] == SwarmGroup("q0", ("0",), (0.0,), (True,))


def test_a_swarm_of_others():
    # Groups of others are graded so a recipe may read all of the reward.
    for recipe in (jr.recipes.gdpo(), jr.recipes.ttrl_majority(votes=1)):
        recipe = recipe.replace(collector=shared(Memory([])))
        check_fields(recipe, [Question(Prompt("q"), [1])])

    # At least one group is of this trainer.
    swarm = Memory([group(f"q{i}") for i in range(8)])
    requests, _, _ = play(swarm, share=0.99)
    assert [request.role for request in requests] == [OWN] + [DEMONSTRATION] * 3
    assert len({request.prompt for request in requests}) == 4


def test_the_key_alone_draws():
    swarm = Memory([group(f"q{i}") for i in range(5)])
    drawn = [tuple(r.prompt for r in play(swarm, seed=n)[0][2:]) for n in (*range(20), 3)]
    assert drawn[3] == drawn[-1] and len({*drawn}) > 5 and all(a != b for a, b in drawn)


def test_bad_options():
    with pytest.raises(ValueError, match="share must be above 0 and below 1; got 1"):
        shared(Memory([]), share=1)
    folder = shared_folder("x", node="a", keep=3)
    with pytest.raises(ValueError, match="capacity=3 has no effect with a swarm"):
        jr.recipes.sapo_swarm(swarm=folder, capacity=3)
    assert repr(jr.recipes.sapo_swarm(swarm=folder).collector) == (
        "shared(shared_folder('x', node='a', keep=3), share=0.5)"
    )
