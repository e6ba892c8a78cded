"""What a judge's text says: the last of two words, a number on a scale."""

import pytest
from rows import for_each

from jaxrl_llm.rewards import rating, verdict


@for_each(
    ("texts", "want"),
    [
        ("yes | No? On second thought: Yes!", 1.0),
        ("NO. | <think>yes yes</think> no", 0.0),
        ("nothing is known; yesterday | ", None),
    ],
)
def test_the_last_word_counts(texts, want):
    assert {verdict(text) for text in texts.split(" | ")} == {want}


def test_words_are_two_that_differ():
    assert verdict("The FIRST one", words=("first", "second")) == 0.0
    for words in (("a",), ("yes", "YES"), ("", "no")):
        with pytest.raises(ValueError, match="verdict: words must be two that differ"):
            verdict("yes", words=words)


@for_each(
    ("texts", "want"),
    [
        ("7 | 7/10 | I rate it 7 out of 10. | **7**/10 | 7 (out of 10) | Rating scale: 7", 0.7),
        ("On a 10-point scale: 7 | Out of 10 - 7 | Accuracy/7", 0.7),
        ("Of 3 steps 2 are right. Rating: 7.5 / 10.", 0.75),
        (r"**3** out of 10 | \boxed{3}/10 | [[3]]/10 | Score: 3 on a scale of 1 to 10", 0.3),
        ("On a scale from 0-10, I give it 4. | Rating (1-10): 4", 0.4),
        ("Quality on the 1 to 10 scale: **8** | 7/10 to 8/10", 0.8),
        ("<think>10</think> 0", 0.0),
        ("11 | -1 | v2 is fine", None),
    ],
)
def test_the_last_number_counts(texts, want):
    assert {rating(text) for text in texts.split(" | ")} == {want}


def test_scales():
    assert rating("4", low=1, high=5) == 0.75
    with pytest.raises(ValueError, match="rating: low must be below high; got 5 and 1"):
        rating("4", low=5, high=1)


def test_a_long_text_takes_linear_time():
    for text in ("9" * 300_000, "1" + " " * 300_000 + "x", "1-2" + " " * 300_000, "(1 - " * 60_000):
        rating(text)  # hours, if each digit and space began a search of its own
    assert rating("9" * 300_000 + " 7/10") == 0.7
