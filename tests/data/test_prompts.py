"""Prompts, sets of them, and their split: a text is on one side, whatever the order of the rows."""

import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

from jaxrl_llm import rewards
from jaxrl_llm.data import Prompt, PromptSet, from_reasoning_gym, split_distinct
from jaxrl_llm.data.prompts import row_text

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def test_a_prompt_puts_answer_and_id_where_rewards_read_them():
    prompt = Prompt("1 + 1 =", "2", {"level": 3, "answer": "not this"}, "sum-0")
    assert prompt.metadata == {"level": 3, "answer": "2", "id": "sum-0"}
    assert pickle.loads(pickle.dumps(prompt)) == prompt
    assert len({prompt, prompt}) == 1


def test_a_prompt_without_an_answer_keeps_the_column_of_that_name():
    assert Prompt("q", metadata={"answer": "steps #### 18"}).metadata["answer"] == "steps #### 18"
    assert Prompt("q").metadata["answer"] is None


def test_games_with_one_text_are_different_questions():
    games = [Prompt("Play.", metadata={"rules": n // 2}, id=str(n)) for n in range(20)]
    with pytest.raises(ValueError, match="has 1 distinct text"):
        split_distinct(games)
    with pytest.warns(UserWarning, match="10 prompts of prompts are left out: the same row comes"):
        train, held_out = split_distinct(games, by_row=True)
    rules = [{x.metadata["rules"] for x in part} for part in (train, held_out)]
    assert [len(each) for each in rules] == [8, 2] and not rules[0] & rules[1]
    # A text that is in one row is split as without its metadata.
    alone = [Prompt(str(n), metadata={"rules": {"a", n}}) for n in range(20)]
    for by_row in (True, False):
        assert split_distinct(alone, by_row=by_row)[1].texts == split_distinct(alone)[1].texts


def test_the_text_of_a_row_is_equal_in_every_process():
    a, b = ({"x": {"p", "q", "r"}, "y": {1: object()}}, {"y": {1: object()}, "x": {"r", "q", "p"}})
    assert row_text(Prompt("q", metadata=a, id="1")) == row_text(Prompt("q", metadata=b, id="2"))
    assert row_text(Prompt("q", metadata=a)) != row_text(Prompt("q", metadata=a | {"x": {"p"}}))


def test_rows_that_are_left_out_with_another_answer_are_told():
    prompts = [Prompt(f"{n % 4}", str(n % 8)) for n in range(16)]
    with pytest.warns(UserWarning, match="split_distinct: 8 prompts of prompts are left out"):
        train, held_out = split_distinct(prompts)
    assert len(train) + len(held_out) == 4


def test_rows_that_are_left_out_with_other_columns_are_told():
    """A reward may read them; the id of a row is no such column."""
    prompts = [Prompt("a", metadata={"topic": x}, id=x) for x in ("art", "sport")]
    prompts += [Prompt(x, metadata={"topic": "art"}, id=str(i)) for i, x in enumerate("abcb")]
    told = "split_distinct: 1 prompts of prompts are left out: .* another answer or other columns"
    with pytest.warns(UserWarning, match=told):
        train, held_out = split_distinct(prompts)
    assert {x.metadata["topic"] for x in (*train, *held_out)} == {"art"}


def test_a_set_is_a_sequence():
    prompts = PromptSet([Prompt("a"), Prompt("b"), Prompt("c")], source="letters")
    assert len(prompts) == 3 and prompts[-1].text == "c"
    assert [prompt.text for prompt in prompts] == ["a", "b", "c"]
    assert prompts[1:] == PromptSet([Prompt("b"), Prompt("c")])
    assert prompts[1:].source == "letters" and "3 prompts from letters" in repr(prompts)


@for_each(
    ("prompts", "share", "told"),
    [
        ([], 0.2, "PromptSet: letters is empty"),
        ([Prompt("a"), Prompt(" \n", id="x")], 0.2, "prompt 'x' of letters has no text"),
        ([Prompt("a"), Prompt("a")], 0.2, "letters has 1 distinct text"),
        *(
            ([Prompt("a"), Prompt("b")], share, "held_out must be in .0, 1.;")
            for share in (0, 1, -0.1, 1.5, float("nan"))
        ),
    ],
)
def test_a_set_or_a_split_that_cannot_be_is_refused(prompts, share, told):
    with pytest.raises(ValueError, match=told):
        split_distinct(PromptSet(prompts, source="letters"), held_out=share)


def test_reasoning_gym():
    prompts = from_reasoning_gym("chain_sum", size=20, seed=3, **ONE_DIGIT)
    assert len(prompts) == 20 and prompts[7].id == "chain_sum-10"
    reward = rewards.reasoning_gym("chain_sum")
    for prompt in prompts:
        left, sign, right = prompt.text.removesuffix(" =").split()[-3:]
        value = int(left) + (1 if sign == "+" else -1) * int(right)
        assert prompt.answer == str(value)
        assert rewards.last_integer("", f"It is {value}.", prompt.metadata) == 1.0
        assert reward(prompt.text, str(value), prompt.metadata) == 1.0
        assert reward(prompt.text, str(value + 100), prompt.metadata) < 1.0
    assert prompts == from_reasoning_gym("chain_sum", size=20, seed=3, **ONE_DIGIT)


@for_each(
    ("task", "options", "told"),
    [
        ("chain_summ", {"size": 1}, "no task 'chain_summ'; did you mean 'chain_sum'"),
        ("zzzzzz", {"size": 1}, "no task 'zzzzzz'"),
        ("chain_sum", {"size": 0}, "size must be an integer above 0; got 0"),
        ("chain_sum", {"size": 1, "min_term": 2}, "no option 'min_term'; it has .*min_terms"),
        ("chain_sum", {"size": 1, "min_terms": 5, "max_terms": 2}, "refuses the options"),
    ],
)
def test_reasoning_gym_bad_input(task, options, told):
    with pytest.raises(ValueError, match=f"from_reasoning_gym: .*{told}"):
        from_reasoning_gym(task, **options)


@given(
    st.lists(st.integers(0, 40), min_size=2).filter(lambda numbers: len(set(numbers)) > 1),
    st.floats(0.01, 0.99),
    st.integers(0, 5),
)
def test_a_split_parts_the_distinct_texts(numbers, share, seed):
    prompts = [Prompt(f"question {number}", id=str(i)) for i, number in enumerate(numbers)]
    train, held_out = split_distinct(prompts, held_out=share, seed=seed)
    assert len(train) + len(held_out) == len(set(numbers))
    assert set(train.texts).isdisjoint(held_out.texts)
    assert set(train.texts) | set(held_out.texts) == {prompt.text for prompt in prompts}
    first = {}
    for prompt in prompts:
        first.setdefault(prompt.text, prompt.id)
    for part in (train, held_out):
        ids = [int(prompt.id) for prompt in part]
        assert ids == sorted(ids) and all(first[p.text] == p.id for p in part)
    mirrored = split_distinct(prompts[::-1], held_out=share, seed=seed)
    assert set(mirrored[1].texts) == set(held_out.texts)


def test_another_seed_holds_out_others():
    prompts = [Prompt(str(n)) for n in range(100)]
    sides = {split_distinct(prompts, seed=seed)[1].texts for seed in range(4)}
    assert len(sides) == 4


def test_one_question_of_a_generator_is_on_one_side_of_the_games_of_an_environment():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    prompts = from_reasoning_gym("chain_sum", size=300, **options)
    train, held_out = split_distinct(prompts, by_row=True)
    assert not set(train.texts) & set(held_out.texts)
    assert len(train) + len(held_out) == len(set(prompts.texts))


def test_reasoning_gym_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"needs the package reasoning-gym.*jaxrl_llm\[train\]"):
        from_reasoning_gym("chain_sum", size=1)
