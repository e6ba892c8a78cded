"""Steps of a response: where they end, and which tokens are theirs."""

import pytest

import jaxrl_llm as jr

# Words as tokens, one with two characters in UTF-8 and one without any text.
WORDS = ["one", " two", "\n", "\n", "drei", " für", "\n\n4", ""]


def decode(tokens):
    return "".join(WORDS[t] for t in tokens)


TEXT = decode(range(len(WORDS)))


def test_steps_of_a_text():
    assert jr.rewards.step_ends(TEXT) == [9, 19, 20]
    assert jr.rewards.step_ends("a;b;", separator=";") == [2, 4]
    # Space goes to the step before.
    assert jr.rewards.step_ends("a\n\n \n\nb") == [6, 7]
    assert jr.rewards.step_ends("") == [0] and jr.rewards.step_ends("\n\n") == [2]
    with pytest.raises(ValueError, match="step_ends: separator must not be empty"):
        jr.rewards.step_ends("a", separator="")


def test_tokens_of_steps():
    tokens = list(range(len(WORDS)))
    # Token 6 lies across the second end; the last has no text and belongs to the last step.
    turns = jr.rewards.turns_of_tokens(tokens, [9, 19, 20], decode=decode)
    assert turns.tolist() == [0, 0, 0, 0, 1, 1, 1, 2] and turns.dtype == "int32"
    turns = jr.rewards.turns_of_tokens(tokens, [9, 17], decode=decode)
    assert turns.tolist() == [0, 0, 0, 0, 1, 1, -1, -1]
    assert jr.rewards.turns_of_tokens(tokens, [20], decode=decode).tolist() == [0] * 8
    assert jr.rewards.turns_of_tokens([], [0], decode=decode).tolist() == []
    with pytest.raises(ValueError, match=r"ends must be ascending; got \[9, 3\]"):
        jr.rewards.turns_of_tokens(tokens, [9, 3], decode=decode)


def test_the_rule_by_brute_force():
    tokens = [0, 1, 2, 3, 4, 5, 1, 0, 6, 5]
    length = len(decode(tokens))
    for first in range(length + 1):
        for last in range(first, length):
            turns = jr.rewards.turns_of_tokens(tokens, [first, last], decode=decode)
            for t, turn in enumerate(turns):
                start = len(decode(tokens[:t]))
                before = (first <= start) + (last <= start)
                assert turn == (before if before < 2 else -1)
