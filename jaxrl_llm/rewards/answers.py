r"""Answer extraction: from the text of a reply to the text of its answer, or None.

Verifiers compare these texts, ``majority_vote`` and maj@k count them. :func:`answer_of` returns the
extractor of a reward. All extractors read plain text in linear time, so no reply can hang them.
"""

import functools
import math
import re
import string
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, TypeVar

from jaxrl_llm.core.compose import Bound
from jaxrl_llm.core.reasoning import split_reply

Extract = Callable[[str], str | None]
"""From a completion to its answer, or None."""

R = TypeVar("R", bound=Callable)

_MINUS = "\u2212"  # which models write for the hyphen-minus of ASCII


def extracts(extract: Extract) -> Callable[[R], R]:
    """Decorator of a reward that sets its answer extractor, for :func:`answer_of`."""

    def mark(reward: R) -> R:
        reward.answer = extract  # type: ignore[attr-defined]
        return reward

    return mark


def answer_of(reward: Any) -> Extract | None:
    r"""The function that extracts the answer that a reward grades, or None if it has none.

    A reward declares it as an attribute ``answer``, a function of the completion; the verifiers of
    this package have it.

    Example:
      >>> from jaxrl_llm import rewards
      >>> rewards.answer_of(rewards.boxed_math)(r"so \boxed{ \dfrac12 }")
      '1/2'
    """
    answer = getattr(without_options(reward), "answer", None)
    return answer if callable(answer) else None  # else an attribute of the reward's own


CheckRow = Callable[[Mapping[str, Any]], None]
"""Raises RewardError, with one sentence, for the metadata of a row that cannot be graded."""


def checks_rows(check: CheckRow) -> Callable[[R], R]:
    """Decorator of a reward that sets its check of rows, for :func:`row_check`."""

    def mark(reward: R) -> R:
        reward.check_row = check  # type: ignore[attr-defined]
        return reward

    return mark


def row_check(reward: Any) -> CheckRow | None:
    """The function that refuses rows that a reward cannot grade, or None if it has none.

    It needs no reply, so rows can be checked before a run begins. A reward declares it as an
    attribute ``check_row``, a function of the metadata that raises RewardError.

    Example:
      >>> from jaxrl_llm import rewards
      >>> from jaxrl_llm.rewards.answers import row_check
      >>> try:
      ...     row_check(rewards.exact_match)({"answer": ""})
      ... except rewards.RewardError as error:
      ...     print(error)
      exact_match: metadata['answer'] must be a text that is not empty, got ''
    """
    check = getattr(without_options(reward), "check_row", None)
    return check if callable(check) else None


def without_options(reward: Any) -> Any:
    """The function that ``bind`` and ``functools.partial`` gave options to; else the reward."""
    while isinstance(reward, Bound | functools.partial):
        reward = reward.function if isinstance(reward, Bound) else reward.func
    return reward


def answer_text(answer: Any) -> str:
    """A right answer as a text; a float in decimals, where Python would write an exponent.

    Example:
      >>> from jaxrl_llm.rewards.answers import answer_text
      >>> answer_text(0.00001), answer_text(18.0), answer_text(18)
      ('0.00001', '18.0', '18')
    """
    if isinstance(answer, float) and math.isfinite(answer):
        return format(Decimal(float.__repr__(answer)), "f")
    return str(answer)


def after_thinking(text: str) -> str | None:
    """The final part of a reply, after the end of its thinking; None if no thinking has ended.

    The thinking may have been opened by the prompt. ``core.reasoning.split_reply`` has the markers:
    ``</think>``, the channels of gpt-oss, and those of other families.

    Example:
      >>> from jaxrl_llm import rewards
      >>> rewards.after_thinking("<think>two and two</think> 4")
      ' 4'
      >>> rewards.after_thinking("two and two[/THINK] 4")
      ' 4'
    """
    reply = split_reply(text)
    return None if reply.thinking is None else reply.final


def without_thinking(text: str) -> str:
    """The final part of a reply; the full text if no thinking has ended."""
    final = split_reply(text).final
    return text if final is None else final


_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def boxed_answer(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, up to its closing brace.

    None if there is no box, or if the last box is not closed because the reply was cut off.

    Example:
      >>> from jaxrl_llm import rewards
      >>> rewards.boxed_answer(r"\boxed{1}, no: \boxed{\frac{1}{2}}.")
      '\\frac{1}{2}'
    """
    text = without_thinking(text)
    opening = next(iter(deque(_BOXED.finditer(text), maxlen=1)), None)
    if opening is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, opening.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # an escaped brace is a character
        if not depth:
            return text[opening.end() : brace.start()]
    return None


# With Markdown's emphasis, which may begin before the word or earlier in its line, and may end
# behind the word, behind the colon or behind the answer.
_STATED = re.compile(
    r"(?:(?<!\S)([*_]{1,3})(?=[^\s*_])[^\n*_:]*?)?answer([*_]{0,3})\s*:((?:[*_]{1,3}(?=\s))?)"
    r"\s*([^\n]+)",
    re.IGNORECASE,
)
_LONGEST = 300  # characters at the end of a reply in which its answer stands


def final_answer(text: str) -> str | None:
    r"""The rest of the line after the last "Answer:" of the last 300 characters, normalized.

    Markdown's emphasis, which DAPO's code keeps, does not make an answer wrong here, except for
    underscores around the answer alone, which may be a part of it. A period after it does, as
    there.

    Example:
      >>> from jaxrl_llm import rewards
      >>> rewards.final_answer("...\nAnswer: $1,234$ dollars")
      '1234'

    References:
      DAPO (arXiv:2503.14476), whose prompt asks for that line.
    """
    text = without_thinking(text)
    line = next(iter(deque(_STATED.finditer(text[-_LONGEST:]), maxlen=1)), None)
    if line is None:
        return None
    opening, after_word, after_colon, answer = line.groups()
    closing = "" if after_word or after_colon else (opening or "")[::-1]
    return normalize_math(_without_emphasis(answer, closing))


def _without_emphasis(line: str, closing: str) -> str:
    """A line without the asterisks around it, or at its end of an emphasis that began earlier.

    ``closing`` ends the emphasis that began before the word "Answer".
    """
    line = line.strip().removesuffix(closing)
    if line.startswith("*"):
        return line.strip("* \t") or line
    return re.sub(r"\s*\*\*+$", "", line)  # a single one may be a part of the answer, as in a^*


# The rules of Minerva's appendix, in their order.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_DROPPED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots"),
    *("sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds"),
    *("meters", "meals", "edges", "students", "childrentickets", "multiples"),
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}"),
    *("\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_UNWRAPPED = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


# The patterns take a time that grows with the square of the length.
_LONGEST_UNWRAPPED = 1000


def normalize_math(text: str) -> str:
    r"""A mathematical answer without units, words and LaTeX that do not change its value.

    The text before the last "=" is removed, as are spaces, dollar signs, units, ``\text`` and the
    commas of an integer; ``\frac12`` and ``\sqrt2`` get their braces, and the minus sign U+2212
    becomes that of ASCII. A text of more than 1,000 characters keeps ``\text`` and the like.

    Example:
      >>> from jaxrl_llm import rewards
      >>> [rewards.normalize_math(x) for x in ("x = 1,000 dollars", r"\frac12", "5.00")]
      ['1000', '\\frac{1}{2}', '5.00']

    References:
      Minerva (arXiv:2206.14858), appendix D.1, as in verl's and slime's DAPO reward, which keep
      U+2212 and the commas of a negative integer.
    """
    text = text.rpartition("=")[2].replace(_MINUS, "-")
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for old in _DROPPED:
        text = text.replace(old, "")
    for pattern, new in _UNWRAPPED if len(text) <= _LONGEST_UNWRAPPED else ():
        text = pattern.sub(new, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.removeprefix("-").isdigit() else text).strip()


def boxed_text(text: str) -> str | None:
    r""":func:`boxed_answer`, normalized, with ``\frac`` in place of its size variants."""
    content = boxed_answer(text)
    if content is None:
        return None
    for old, new in (("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\left", ""), ("\\right", "")):
        content = content.replace(old, new)
    content = content.strip()
    return normalize_math(content) if len(content) <= _LONGEST else content


_NUMERAL = re.compile(rf"[-{_MINUS}]?\d[\d,]*(?:\.\d+)?(?:/\d+|[eE][-+{_MINUS}]?\d+\b)?")


def math_text(text: str) -> str | None:
    """The box of a reply, or the line after "Answer:", or its last number, normalized."""
    text = without_thinking(text)
    answer = boxed_text(text)
    answer = final_answer(text) if answer is None else answer
    if answer is not None:
        return answer
    last = next(iter(deque(_NUMERAL.finditer(text), maxlen=1)), None)
    return None if last is None else normalize_math(last[0])


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_OF_NUMBER = r"(?<![\w.)])-(?=\.?\d)|(?<=\d)[./](?=\d)|(?<![\w.])\.(?=\d)"  # sign, point, stroke
# TriviaQA's script also drops these quotes and accents; the dashes are what models write for "-".
_MARKS = "‘’‚‛“”„‟´`«»‹›…¡¿"
_PUNCTUATION = re.compile(rf"(?!{_OF_NUMBER})[{re.escape(string.punctuation + _MARKS)}]")
_DASHES = str.maketrans("‐‑‒–—―−\u2044", "-------/")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
_VULGAR = re.compile(r"(?<=\d)(?=[¼-¾⅐-⅞])")


def normalize_words(text: str) -> str:
    """Folded case, NFKC, without punctuation, articles and extra spaces.

    Numbers keep their sign, decimal point and fraction's stroke. Unicode's spaces, dashes, quotes,
    ligatures and widths are as ASCII writes them, and a character is equal to its composed form. A
    text of articles or of punctuation alone keeps them, so it is not empty.

    Example:
      >>> from jaxrl_llm import rewards
      >>> [rewards.normalize_words(x) for x in ("The Eiffel  Tower!", "-1.5.", "A", "“Café”")]
      ['eiffel tower', '-1.5', 'a', 'café']

    References:
      SQuAD (arXiv:1606.05250), its evaluation script, in which -1.5 is 15 and "A" is empty.
      TriviaQA (arXiv:1705.03551), whose script also drops typographic quotes.
    """
    text = _INVISIBLE.sub("", _VULGAR.sub(" ", text)).translate(_DASHES).replace("…", " ")
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    text = text.translate(_DASHES)
    words = " ".join(_PUNCTUATION.sub("", text).split())
    return " ".join(_ARTICLES.sub(" ", words).split()) or words or text.strip()


def answer_words(text: str) -> str:
    """The reply after its thinking, by :func:`normalize_words`."""
    return normalize_words(without_thinking(text))


LETTERS = string.ascii_uppercase[:10]
# Runs are bounded, so that no run of spaces takes quadratic time.
_OPEN = r"[\s(\[{*_$\"'`:=]{0,8}(?:\\(?:text|textbf|mathrm|mathbf)\s?\{\s?)?[(\[]?"
_LETTER = (
    r"[A-Z](?![A-Za-z0-9'])(?! [a-z])"  # a capital that stands alone,
    r"|[A-Z](?=\s(?:is|because|since|as|and|with)\b)"  # that a reason follows,
    r"|[a-z](?=[)\].,*]|\s{0,8}$)"  # or a small letter at the end
)
# After "answer", where the letter is a claim, also before these words, but for A and I: "A given".
_REASON = r"[B-HJ-Z](?=\s(?:due|from|by|for|which|given|according|based|but|so)\b)"
_STATEMENTS = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        rf"(?i:\banswer\b)\s?(?i:is)?{_OPEN}(?i:(?:option|choice)\s)?{_OPEN}({_LETTER}|{_REASON})",
        rf"(?i:\b(?:option|choice)\b)\s?(?i:is)?{_OPEN}({_LETTER})",
        r"\b([A-Z])\b[)\]}*\s]{0,8}(?i:is\s(?:the\s)?correct)",
    )
)
_WHOLE = re.compile(r"[\s(\[*]{0,8}([A-Za-z])[\s)\].*]{0,8}")
_ALONE = re.compile(r"(?<![A-Za-z0-9'])([A-Z])(?![A-Za-z0-9'])(?! [a-z])")


def choice_letter(text: str, letters: str = LETTERS) -> str | None:
    r"""The letter of the option that a reply chooses, after its thinking.

    The first match of: a letter that is the whole reply; a letter in the last box; the last
    "answer is X" or "Answer: (X)"; the last "option X"; the last "X is correct"; the last single
    capital letter. A capital before a lower-case word ("A cat", "B cells") counts as a word, but
    after "answer" and "option" for "B because" and similar, and after "answer" for "B due to".

    Args:
      text: The reply.
      letters: Letters of the options, capitals.

    Example:
      >>> from jaxrl_llm import rewards
      >>> rewards.choice_letter("Option A is too small. The answer is (C).", "ABCD")
      'C'

    References:
      GPQA (arXiv:2311.12022) has four options. slime's rule takes the first match and also matches
      letters within words ("choice because" is B there).
    """
    text = without_thinking(text)
    whole = _WHOLE.fullmatch(text)
    if whole is not None and whole[1].upper() in letters:
        return whole[1].upper()
    box = boxed_answer(text)
    if box is not None:
        inner = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\b|[\s{}()\[\].$]", "", box).upper()
        if len(inner) == 1 and inner in letters:
            return inner
    for pattern in (*_STATEMENTS, _ALONE):
        named = (match[1].upper() for match in pattern.finditer(text))
        last = next(iter(deque((x for x in named if x in letters), maxlen=1)), None)
        if last is not None:
            return last
    return None
