r"""Verifiers of text: DAPO's math rule, F1, exact match, multiple choice, the format of thinking.

All have the form `(prompt, completion, metadata)`; ``metadata["answer"]`` is the right answer. Each
makes one pass over the text and needs no deadline. They raise RewardError for a row that they
cannot grade, such as one without an answer.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from jaxrl_llm.core.reasoning import is_well_formed
from jaxrl_llm.rewards.answers import (
    LETTERS,
    answer_text,
    answer_words,
    boxed_text,
    checks_rows,
    choice_letter,
    extracts,
    final_answer,
    math_text,
    normalize_math,
    normalize_words,
    without_thinking,
)
from jaxrl_llm.rewards.scoring import RewardError


def _check_text(function: str) -> Callable[[Mapping[str, Any]], None]:
    """The check of a row whose answer is a text."""

    def check(metadata: Mapping[str, Any]) -> None:
        _answers(function, metadata)

    return check


@extracts(final_answer)
@checks_rows(_check_text("dapo_math"))
def dapo_math(prompt: str, completion: str, metadata: Mapping[str, Any]) -> float:
    r"""One if the line after the last "Answer:" equals the answer after normalization, else -1.

        reward = 1 if normalize(line) = normalize(answer) else -1

    Only the last 300 characters are read. An answer with an integer value, such as 18.0, may also
    be given as that integer.

    Args:
      prompt: Not read.
      completion: The reply, which should end in "Answer: ...".
      metadata: Has "answer", a number or a text.

    Returns:
      1.0 or -1.0, the scale of `overlong_rewards`. A method that is defined only for rewards of 0
      and 1 rejects it.

    Raises:
      RewardError: If metadata has no "answer", or an empty text or NaN.

    Example:
      >>> from jaxrl_llm import rewards
      >>> rewards.dapo_math("", "so x = 18.\nAnswer: $18$", {"answer": "18"})
      1.0

    References:
      DAPO (arXiv:2503.14476), with the normalization of Minerva (arXiv:2206.14858). slime truncates
      the answer to an integer; verl uses a box if there is no such line.
    """
    del prompt

    def whole_number(text: str) -> str:
        try:
            number = Decimal(text)
        except InvalidOperation:
            return text
        small = number.is_finite() and number.adjusted() < _MOST_DIGITS
        return str(int(number)) if small and number == int(number) else text

    answers = {normalize_math(x) for x in _answers("dapo_math", metadata)}
    return 1.0 if final_answer(completion) in answers | set(map(whole_number, answers)) else -1.0


_MOST_DIGITS = 1000  # of an answer that is an integer
_CLOSED = ("yes", "no", "noanswer")


@extracts(answer_words)
@checks_rows(_check_text("f1"))
def f1(prompt: str, completion: str, metadata: Mapping[str, Any]) -> float:
    """F1 of the words of the reply and the answer; the best F1 if there are several answers.

        F1 = 2 common / (words of the reply + words of the answer)

    Words are compared in lower case and NFKC, without punctuation and articles, by
    :func:`normalize_words`; the thinking is not read. If either is "yes", "no" or
    "noanswer", they must be equal.

    Args:
      prompt: Not read.
      completion: The reply.
      metadata: Has "answer": a text, or a list of texts any of which is right.

    Returns:
      F1 in [0, 1].

    Raises:
      RewardError: If metadata has no "answer", an empty list, or an empty text or NaN in it.

    Example:
      >>> from jaxrl_llm import rewards
      >>> round(rewards.f1("", "the Eiffel Tower, Paris", {"answer": "Eiffel Tower"}), 3)
      0.8

    References:
      SQuAD (arXiv:1606.05250); yes and no as HotpotQA (arXiv:1809.09600) and slime.
    """
    del prompt
    reply = answer_words(completion)

    def overlap(answer: str) -> float:
        if reply == answer:
            return 1.0
        if reply in _CLOSED or answer in _CLOSED:
            return 0.0
        ours, theirs = Counter(reply.split()), Counter(answer.split())
        return 2.0 * (ours & theirs).total() / (ours.total() + theirs.total())

    return max(overlap(normalize_words(x)) for x in _answers("f1", metadata))


@extracts(answer_words)
@checks_rows(_check_text("exact_match"))
def exact_match(prompt: str, completion: str, metadata: Mapping[str, Any]) -> float:
    """One if the words of the reply are those of an answer, as :func:`f1` reads them, else zero.

    Args:
      prompt, completion, metadata: As of :func:`f1`.

    Returns:
      1.0 or 0.0.

    Raises:
      RewardError: As :func:`f1`.

    Example:
      >>> from jaxrl_llm import rewards
      >>> rewards.exact_match("", "The Eiffel tower.", {"answer": ["Eiffel Tower", "La Tour"]})
      1.0

    References:
      SQuAD (arXiv:1606.05250).
    """
    del prompt
    reply = answer_words(completion)
    return float(any(reply == normalize_words(x) for x in _answers("exact_match", metadata)))


def _choice(text: str) -> str | None:
    """The letter that a reply chooses, or else what stands in its box or after "Answer:"."""
    rest = without_thinking(text)
    return choice_letter(text) or boxed_text(rest) or final_answer(rest)


def _bare(label: str) -> str:
    """The name of an option without what may stand around it, as in "(2)" and "2."."""
    return label.strip(" ()[].:")


def _check_choice(metadata: Mapping[str, Any]) -> None:
    multiple_choice("", "", metadata)


@extracts(_choice)
@checks_rows(_check_choice)
def multiple_choice(prompt: str, completion: str, metadata: Mapping[str, Any]) -> float:
    """One if the reply chooses the right option, else zero.

        reward = 1[choice_letter(completion) = letter of the answer]

    The options have the letters A, B, ... in their order. A reply without a letter that contains
    the text of exactly one option chooses that option.

    Args:
      prompt: Not read.
      completion: The reply; see :func:`choice_letter`.
      metadata: "answer" is the letter of the right option, its index from 0, or its text; a text
        needs "choices", the texts of the options. Without "choices" there are ten letters. Choices
        as of ARC are a mapping with the texts as "text" and their names as "label", such as 1 to 4;
        the answer, and a reply without a letter, may be such a name, in a reply also as "(2)" or
        "2."; there, a text comes before a name.
        Integers of a file are loaded as letters if each is the position of a text in "choices".

    Returns:
      1.0 or 0.0.

    Raises:
      RewardError: If metadata has no "answer", or one that is not an option.

    Example:
      >>> from jaxrl_llm import rewards
      >>> rewards.multiple_choice("", "So the answer is (B).", {"answer": "B"})
      1.0
      >>> rewards.multiple_choice("", "Lyon", {"answer": 1, "choices": ["Paris", "Lyon"]})
      1.0

    References:
      GPQA (arXiv:2311.12022). slime also scores one if the text of the right option occurs
      anywhere, even next to other options.
    """
    del prompt
    choices, labels = metadata.get("choices"), list[str]()
    if isinstance(choices, Mapping) and isinstance(choices.get("text"), list | tuple):
        labels = [str(label) for label in choices.get("label") or ()][: len(choices["text"])]
        choices = choices["text"]
    choices = list(choices.values() if isinstance(choices, Mapping) else choices or ())
    letters = LETTERS[: len(choices)] if choices else LETTERS
    if len(choices) > len(LETTERS):
        raise RewardError(
            f"multiple_choice: there are at most {len(LETTERS)} options, got {len(choices)}"
        )
    named = [normalize_words(str(choice)) for choice in choices]
    answer = metadata.get("answer")
    text = answer.strip().upper() if isinstance(answer, str) else ""
    if answer in labels:
        wanted = letters[labels.index(answer)]
    elif len(text) == 1 and text in letters:
        wanted = text
    elif isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
        wanted = letters[answer]
    elif isinstance(answer, str) and named.count(normalize_words(answer)) == 1:
        wanted = letters[named.index(normalize_words(answer))]
    else:
        options = f"the options {', '.join(letters)}" + (" or their texts" if named else "")
        raise RewardError(
            f"multiple_choice: metadata['answer'] must be one of {options}, got {answer!r}"
        )
    letter = choice_letter(completion, letters)
    if letter is None and named:
        reply = f" {answer_words(completion)} "
        present = [
            x for x, name in zip(letters, named, strict=True) if name and f" {name} " in reply
        ]
        letter = present[0] if len(present) == 1 else None
    if letter is None and labels:
        stated = _bare(math_text(without_thinking(completion)) or "")  # the number of an option
        bare = [_bare(label) for label in labels]
        letter = letters[bare.index(stated)] if stated in bare else None
    return float(letter == wanted)


def think_format(prompt: str, completion: str, metadata: Mapping[str, Any]) -> float:
    """One if the reply begins with one ``<think>`` part that ends, else zero.

    Many chat templates write ``<think>`` into the prompt, which is not a part of the completion: a
    completion without the tag has it from the prompt, if it has ``</think>`` once. Line breaks may
    stand before the tag. The tags of other families, such as ``[THINK]`` and ``[/THINK]``, count in
    the same way, and so do channels, as of gpt-oss, with an analysis and a final message.

    Args:
      prompt, metadata: Not read.
      completion: The reply.

    Returns:
      1.0 or 0.0.

    Example:
      >>> from jaxrl_llm import rewards
      >>> [rewards.think_format("", x, {}) for x in ("<think>2</think> 4", "2</think> 4")]
      [1.0, 1.0]
      >>> [rewards.think_format("", x, {}) for x in ("<think>2", "4", "2</think> 4</think>")]
      [0.0, 0.0, 0.0]

    References:
      DeepSeek-R1 (arXiv:2501.12948), as TRL's `think_format_reward`, which is zero for a completion
      whose tag is in the prompt.
    """
    del prompt, metadata
    return float(is_well_formed(completion))


def word_repetition(prompt: str, completion: str, metadata: Mapping[str, Any]) -> float:
    """The share of repeated runs of three words, from 0 to 1; give it a negative weight.

        1 - distinct / all runs of three words

    `repetition_rewards` is the same for tokens, in a recipe's chain.

    Args:
      prompt, metadata: Not read.
      completion: The reply; its words are compared in lower case.

    Returns:
      The share, 0.0 for fewer than three words.

    Example:
      >>> from jaxrl_llm import rewards
      >>> rewards.word_repetition("", "no no no no no", {})
      0.6666666666666667

    References:
      Demystifying long chain-of-thought reasoning (arXiv:2502.03373), appendix C.2, as in open-r1.
    """
    del prompt, metadata
    words = completion.lower().split()
    runs = list(zip(words, words[1:], words[2:], strict=False))
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0


def _answers(function: str, metadata: Mapping[str, Any]) -> list[str]:
    """The texts of ``metadata["answer"]``, any of which is right."""
    answer = metadata.get("answer")
    answers = answer if isinstance(answer, list | tuple) else [answer]
    if not answers or any(x is None or isinstance(x, bool | Mapping) for x in answers):
        raise RewardError(f"{function}: metadata['answer'] must be a string, got {answer!r}")
    texts = [answer_text(x) for x in answers]
    missing = any(isinstance(x, float) and math.isnan(x) for x in answers)
    if missing or not all(map(str.strip, texts)):
        raise RewardError(
            f"{function}: metadata['answer'] must be a text that is not empty, got {answer!r}"
        )
    return texts
