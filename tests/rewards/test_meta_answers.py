"""Predictions as text, read and rewarded as MASA's released code does."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.rewards import MetaAnswer, meta_answer_rewards, parse_meta_answer

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "masa_texts.json").read_text())
TRUTH = {
    "problem": GOLDEN["problem"],
    "texts": GOLDEN["solutions"],
    "rewards": np.float32(GOLDEN["rewards"]),
    "lengths": np.array(GOLDEN["lengths"]),
}


@for_each(("text", "value"), GOLDEN["texts"])
def test_rewards_of_texts_are_those_of_the_released_code(text, value):
    (ours,) = meta_answer_rewards([parse_meta_answer(text)], **TRUTH)
    assert ours == pytest.approx(value, abs=1e-6)


def test_what_differs_from_the_released_code():
    """Keys in another order, and a space before the first, are read."""
    for text in ('{ "math_notion": [], "pass_rate": 4}', '{"pass_rate": 4, "math_notion": []}'):
        answer = parse_meta_answer(text)
        assert answer.rate == 0.5 and answer.notions == () and math.isnan(answer.length)
    assert math.isnan(parse_meta_answer('{"pass_rate": true}').rate)


def test_the_last_object_with_a_key_counts():
    text = '{"pass_rate": 1} {"pass_rate": 2, "solution_length": 7} {"other": 3} {{{'
    assert parse_meta_answer(text)[:2] == (7.0, 0.25)
    assert parse_meta_answer(text, scale=2).rate == 1.0
    assert parse_meta_answer('{"a": ' * 5000).notions == ()


def test_notions_are_singular():
    singular = {"identities": "identity", "boxes": "box", "cosines": "cosine", "Sines": "Sine"}
    for word in ("series", "class", "sum", *singular):
        answer = parse_meta_answer(json.dumps({"math_notion": [word, word]}))
        assert answer.notions == (singular.get(word, word),)


def test_masked_solutions_do_not_count():
    answer = MetaAnswer(150.0, 1.0, ("median",))
    where = np.array([True, True, False, False])
    (ours,) = meta_answer_rewards([answer], **TRUTH, where=where)
    assert ours == pytest.approx(1.0)
    (none,) = meta_answer_rewards([answer], **TRUTH, where=np.zeros(4, bool))
    assert none == 0.0
    with pytest.raises(ValueError, match="parse_meta_answer: scale"):
        parse_meta_answer("", scale=0)
