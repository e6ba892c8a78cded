"""What a teacher reads that is the policy itself."""

import numpy as np
import pytest

from jaxrl_llm import curation as cur

TEMPLATES = {
    "template": "{prompt}|{solution}{feedback}",
    "solution_template": "S {solution}",
    "feedback_template": "F {feedback}",
}
TEXTS = [["a", "<think>no\nyes</think>\nb", "c"], ["{x}", "e", "f"]]
REWARDS = np.array([[0.0, 0.5, 1.0], [0.2, 0.0, 0.4]])
WHERE = np.ones((2, 3), bool)


def messages(**options):
    options = {"rewards": REWARDS, "where": WHERE} | options
    texts = options.pop("texts", TEXTS)
    return cur.solution_messages(texts, prompts=["p", "q"], **TEMPLATES, **options)


def test_solutions():
    # The first right sibling is the solution.
    assert messages() == [["p|S b", "p|S c", "p|S b"], [None] * 3]
    assert messages(success=0.6) == [["p|S c", "p|S c", None], [None] * 3]
    assert messages(success=0.3)[1] == ["q|S f", "q|S f", None]

    # What takes no part neither teaches nor learns.
    where = np.array([[True, False, True], [True] * 3])
    assert messages(where=where) == [["p|S c", None, None], [None] * 3]

    # Feedback stands in for a solution.
    feedback = [["x", "y", "z"], [None, " ", "{prompt}"]]
    last = [None, None, "q|F {prompt}"]
    assert messages(feedback=feedback) == [["p|S b", "p|S c", "p|S b"], last]
    both = messages(feedback=feedback, feedback_with_solution=True)
    assert both == [["p|S bF x", "p|S cF y", "p|S bF z"], last]

    # Thinking that the prompt began is no part of a solution.
    texts = [["a", "no <think> yes </think>\nb", "c"], ["hm\n</think> e", "f", "g"]]
    rewards = np.array([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    assert messages(texts=texts, rewards=rewards)[1] == [None, "q|S e", "q|S e"]

    # The solution of the data is in every message.
    told = cur.ReferenceMessages(
        column="key", template="{prompt}|{solution}{other}", solution_template="S {solution}"
    )
    rows = [{"id": "a", "key": "{prompt}"}, {"id": "b", "key": "2"}]
    found = told(TEXTS, prompts=["p", "q"], metadata=rows)
    assert found == [["p|S {prompt}{other}"] * 3, ["q|S 2{other}"] * 3]
    (first, *_), _ = cur.ReferenceMessages("key")(TEXTS, prompts=["What?", "q"], metadata=rows)
    assert first.startswith("What?\n\n") and "\n\n{prompt}\n\n" in first
    assert "{feedback}" not in first
    for row, words in (
        ({"id": "a"}, "prompt 'a' has no 'key'"),
        ({"id": "a", "key": " "}, "ReferenceMessages: 'key' of prompt 'a' is empty"),
        ({"id": "a", "key": 3}, "ReferenceMessages: .*'key'.*'a'"),
    ):
        with pytest.raises(ValueError, match=words):
            told.check(row)


def test_templates():
    # A template may have other braces.
    (first, *_), _ = cur.solution_messages(
        TEXTS, prompts=["p", "q"], rewards=REWARDS, where=WHERE, template=r"\boxed{answer} {prompt}"
    )
    assert first == r"\boxed{answer} p"

    # A solution with braces is taken as it is.
    assert messages(success=0.2)[1] == ["q|S f", "q|S {x}", "q|S {x}"]

    # The first template asks the question again.
    (first, *_), _ = cur.solution_messages(
        TEXTS, prompts=["What?", "q"], rewards=REWARDS, where=WHERE
    )
    assert first.startswith("What?\n\n") and "\n\nb\n\n" in first and "yes" not in first

    # Shapes that disagree.
    with pytest.raises(ValueError, match="solution_messages: rewards must have shape"):
        messages(rewards=REWARDS[:1])
