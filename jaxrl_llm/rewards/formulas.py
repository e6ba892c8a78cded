"""The answer in the text of a reply, and the right answers of a row, as mathematics."""

import functools
import itertools
import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.rewards.answers import answer_text, boxed_answer
from jaxrl_llm.rewards.mathematics import SEPARATOR, node_of, phrase, split
from jaxrl_llm.rewards.numbers import canonical
from jaxrl_llm.rewards.scoring import RewardError

_LONGEST_END = 20_000  # characters at the end of a reply without a box in which its answer stands
_TOKENS = re.compile(
    r"(?P<latex>\\(?:text\w*|mathrm|operatorname|mathbf)\{[^{}\n]*\}|\\[A-Za-z]+|\\[{}%,;!])"
    r"|(?P<number>(?=(?:\\?[$£€¥][ ]?)?\.?\d)(?:\\?[$£€¥][ ]?)?"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d|,\d)|\d+)?"
    r"(?:(?<=\d)\.\d+|(?<![\d.])\.\d+|(?<=\d)(?:\.(?=\\|\())?)"
    r"(?:[eE][-+]?\d+(?!\w))?(?:[ ]?%)?[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⁰¹²³⁴⁵⁶⁷⁸⁹⁻]{0,9}|[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])"
    r"|(?P<word>[A-Za-z]+)|(?P<operator>\*\*|[-+*/^_=<>≤≥×÷·−!|π∞√±°′²³]|(?<=\d):(?=\d))"
    r"|(?P<bracket>[(){}\[\]])|(?P<comma>,)|(?P<space>[ ]+)"
)
_WORDS_OF_MATHEMATICS = re.compile(
    r"sqrt|pi|sin|cos|tan|log|ln|exp|sec|csc|cot|arcsin|arccos|arctan|infinity"
)
_VALUE = re.compile(r"\d|[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞π∞]|\\[A-Za-z]{2}|[A-Za-z]\s?[-+*/^=<>(]|pi\b")
_ENDS = "*_^/+=<>|,×÷· "
_DELIMITED = (
    # No formula has an opening inside, so that a search ends at the next one.
    r"(?<!\\)\$\$(?P<a>[^$]+)\$\$|(?<!\\)\\\[(?P<b>(?:[^\\]|\\[^\[\]])+)\\\]"
    r"|(?<!\\)\\\((?P<c>(?:[^\\\n]|\\[^()\n])+)\\\)"
    r"|(?<!\\)\$(?=[^\s$])(?P<d>(?:[^$\n\\]|\\.)+)(?<!\s)\$(?!\d)"
)
_FORMULA = re.compile(_DELIMITED)
_JOINED = re.compile(r"\s*(?:,|;|,?\s*(?:and|or))\s*")
_STATED = re.compile(r"(?i)answer\s*(?:\*{1,3}\s*)?(?:is\b|:)\s*:?")
_LETTER = re.compile(r"[(\[]?([A-Za-z])[)\]]?")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BETWEEN_BOXES = re.compile(r"[\s$,;]*(?:and|or)?[\s$,;]*")


def _boxes(text: str) -> str | None:
    """The last box with those that it continues, as in two boxes joined by "and"."""
    last = boxed_answer(text)
    if last is None:
        return None
    boxes, end = [last], text.rindex(r"\boxed")
    for _ in range(8):
        before = text.rfind(r"\boxed", 0, end)
        content = boxed_answer(text[before:end]) if before >= 0 else None
        if content is None:
            break
        behind = text[before:end].rindex("}") + before + 1
        if len(text[behind:end]) > 12 or not _BETWEEN_BOXES.fullmatch(text, behind, end):
            break
        boxes, end = [content, *boxes], before
    return ",".join(dict.fromkeys(x.strip() for x in boxes))


def _is_part(text: str, token: re.Match) -> bool:
    """Whether a token outside of delimiters belongs to mathematics, and is no word."""
    word = token["word"]
    if word is None or _WORDS_OF_MATHEMATICS.fullmatch(word):
        return True
    before = text[max(0, token.start() - 5) : token.start()]
    behind = text[token.end() : token.end() + 3]
    if len(word) <= 3 and (before[-1:].isdigit() or before[-1:] in tuple("^_*+=")):
        return True
    if len(word) <= 3 and behind[:1] in tuple("^_*+=</"):
        return True
    if len(word) > 1:
        return False
    # n(n+1) is a product; P(3,4) is a point with its name.
    near = re.search(r"(?:[-+*/^=<>≤≥−(]|sin|cos|tan|log|ln|exp)\s?$", before) or re.match(
        r"\s?[-+*/^=<>≤≥−]|\((?![^()]{0,99},)", text[token.end() : token.end() + 102]
    )
    return bool(near)


def _runs(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Where mathematics without delimiters begins and ends: tokens that follow each other."""
    runs, begin, last = [], -1, -1
    for token in _TOKENS.finditer(text, start, end):
        inside = bool(token[0]) and _is_part(text, token)
        if inside and begin >= 0 and token.start() == last:
            last = token.end()
            continue
        if begin >= 0:
            runs.append((begin, last))
        begin, last = (token.start(), token.end()) if inside else (-1, -1)
    if begin >= 0:
        runs.append((begin, last))
    return [part for run in runs for part in _pieces(text, *run)]


def _pieces(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """The formulas of a run: between open brackets, and numbers that nothing joins."""
    cuts, stack = [start], list[int]()
    for match in re.compile(r"\\.|[(){}\[\]]").finditer(text, start, end):
        if match[0] in "([{":
            stack.append(match.start())
        elif match[0] in ")]}":
            if stack:
                stack.pop()
            else:
                cuts.append(match.end())
    cuts += [place + 1 for place in stack]
    pieces = []
    for a, b in zip(sorted(cuts), [*sorted(cuts)[1:], end], strict=True):
        b = b - 1 if b < end and text[b - 1] in "()[]{}" else b
        # 2024 5 are two numbers, 3 1/2 and 1 000 are one
        for gap in re.compile(r"(?<=\d) (?=\d)(?!\d+/\d)(?!\d{3}(?!\d))").finditer(text, a, b):
            pieces.append((a, gap.start()))
            a = gap.end()
        pieces.append((a, b))
    return [x for a, b in pieces if (x := _trimmed(text, a, b)) is not None]


def _trimmed(text: str, start: int, end: int) -> tuple[int, int] | None:
    """A piece without operators at its ends, Markdown or a hyphen before it; None for no value."""
    while start < end and text[start] in _ENDS + ")]}!":
        start += 1
    while start < end and text[end - 1] in _ENDS + "-−([{":
        end -= 1
    if text[start : start + 1] in ("-", "−"):
        joins = start > 0 and (text[start - 1].isalnum() or text[start - 1] in ")")
        before = text[max(0, start - 9) : start].rstrip(" ")
        bullet = text[start + 1 : start + 2] == " " and before.endswith("\n")
        if joins or bullet:
            return _trimmed(text, start + 1, end)
    if re.fullmatch(r"[\d.,]+!", text[start:end]):  # an exclamation
        end -= 1
    piece = text[start:end]
    has_value = re.search(
        r"\d|[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞π∞]|\\[A-Za-z]{2}|[A-Za-z]\s?[-+*/^=<>(]|pi\b", piece
    )
    return (start, end) if has_value else None


def _items(text: str, *, lists: bool = False) -> list[tuple[int, int, str]]:
    """The formulas and numbers of a text: where each begins and ends, and its text.

    Args:
      text: Of a reply.
      lists: Whether numbers with commas between them are one item.
    """
    items = [
        (x.start(), x.end(), next(y for y in x.groups() if y is not None))
        for x in _FORMULA.finditer(text)
    ]
    outside, place = [], 0
    for start, end, _ in [*items, (len(text), len(text), "")]:
        outside.append((place, start))
        place = end
    for run in outside:
        for a, b in _runs(text, *run):
            parts = [(a, b)] if lists else _between_commas(text, a, b)
            items += [(x, y, _last_side(text[x:y])) for x, y in parts]
    return sorted(items)


def _between_commas(text: str, start: int, end: int) -> list[tuple[int, int]]:
    parts, _ = split(text[start:end], SEPARATOR)
    if len(parts) == 1 or re.fullmatch(r"\\?[\d.,$£€¥]+%?", text[start:end]):
        return [(start, end)]
    found, place = [], start
    for part in parts:
        place = text.index(part, place)
        if (piece := _trimmed(text, place, place + len(part))) is not None:
            found.append(piece)
        place += len(part)
    return found


def _last_side(text: str) -> str:
    """The last side of a chain of numbers, such as 5 - 9 = -4; other texts as they are."""
    sides = text.split("=")
    if len(sides) > 1 and not re.search(r"[A-Za-z<>≤≥]", "".join(sides[:-1])):
        return sides[-1].strip()
    return text


def _are_joined(text: str, a: tuple[int, int, str], b: tuple[int, int, str]) -> bool:
    """Whether two items between delimiters are parts of a list."""
    delimited = all(text[x[0]] in "$\\" and x[1] - x[0] > len(x[2]) for x in (a, b))
    return delimited and bool(_JOINED.fullmatch(text, a[1], b[0]))


def _joined(text: str, items: Sequence[tuple[int, int, str]], place: int, step: int) -> str:
    """An item with those that it is listed with, as in $1$ and $2$."""
    chosen = [items[place]]
    while 0 <= place + step < len(items):
        if not _are_joined(text, *sorted((items[place], items[place + step]))):
            break
        place += step
        chosen.append(items[place])
    return ",".join(x[2] for x in sorted(chosen))


def replied(text: str) -> str | None:
    r"""The answer in the text of a reply: its box, the text after "answer is", or the last formula.

    A number outside of formulas is a formula, with the operators and letters around it. None if
    there is none, or if the last box is not closed because the reply was cut off.

    Example:
      >>> from jaxrl_llm.rewards.formulas import replied
      >>> replied("So it is 3 1/2."), replied(r"Thus $x$ is $\frac12$"), replied("Answer: 2x + 3")
      ('3 1/2', '\\frac12', '2x + 3')
    """
    if _BOX.search(text):
        return _boxes(text.replace(r"\fbox", r"\boxed"))
    text = text[-_LONGEST_END:]
    stated = next(iter(deque(_STATED.finditer(text), maxlen=1)), None)
    if stated is not None:
        line = text[stated.end() :].lstrip().partition("\n")[0][:300].strip(" *_.")
        if phrase(line):
            return line
        if letter := _LETTER.fullmatch(line):
            return letter[1]
        rest = text[stated.end() : stated.end() + 1000]
        items = _items(rest, lists=True)
        if items and items[0][0] <= 50:
            return _joined(rest, items, 0, 1)
    items = _items(text)
    if not items:
        return None
    last = max(range(len(items)), key=lambda k: items[k][1])
    return _joined(text, items, last, -1)


_ANCHORED = re.compile(r"\$.*\$|\\boxed|\\\(|\\\[|\\text", re.DOTALL)
_NOT_PROSE = ("sqrt", "infinity", "and", "sin", "cos", "tan", "log", "exp", "arcsin", "arccos")


def _is_prose(text: str) -> bool:
    r"""Whether a text has words; beside LaTeX, capitals are points, as in \triangle ABC."""
    words = [word.strip(".,;:!?'\"()[]{}") for word in text.split()]
    words = [w for w in words if not (w.isupper() and "\\" in text)]
    return any(len(w) > 2 and w.isalpha() and w.lower() not in _NOT_PROSE for w in words)


@functools.lru_cache(maxsize=256)
def answer_in(text: str) -> str | None:
    """The mathematics of a right answer, as data writes it; None if it is prose or empty.

    It is the box or the text after "####" if there is one, and otherwise the full text. Of a text
    with words it is the number with its unit, or its only formula; None if it has two or more,
    as in "2 hours 30 minutes", unless they are a list such as $1$ and $2$.
    """
    text = text.strip()
    if _BOX.search(text):
        return replied(text)
    marked = "####" in text
    text = text.rpartition("####")[2].strip()
    if not canonical(text) or not re.search(r"\w|\\|[^\s\x00-\x7f]", text):
        return None
    alone = _FORMULA.fullmatch(text)
    if alone or phrase(text) or not _is_prose(text):
        return text
    node = node_of(canonical(text))
    if node.number is not None or (node.kind == "named" and node.parts[0].kind == "number"):
        return text
    if r"\text" in text and not _is_prose(re.sub(r"\\text\s*\{[^{}]*\}", "", text)):
        return text
    if marked or _STATED.search(text):
        return replied(text)
    if _ANCHORED.search(text) or re.search(r"\d", text):
        items = _items(text)
        # Of 2 hours 30 minutes, neither number is the answer.
        if items and all(_are_joined(text, *pair) for pair in itertools.pairwise(items)):
            return replied(text)
    return None


def right_answers(function: str, metadata: Mapping[str, Any]) -> list[str]:
    """The texts of ``metadata["answer"]``; a reply that equals one of them is right.

    Raises:
      RewardError: If there is none, or one is empty, NaN or prose without mathematics.
    """
    answer = metadata.get("answer")
    answers = answer if isinstance(answer, list | tuple) else [answer]
    read = [None if _is_missing(x) else answer_in(answer_text(x)) for x in answers]
    texts = [x for x in read if x is not None]
    if not texts or len(texts) < len(read):
        raise RewardError(
            f"{function}: metadata['answer'] must be readable as mathematics, got {answer!r}; "
            r"write LaTeX (words as \text{...}, a product of letters between dollar signs), or "
            "grade prose otherwise"
        )
    # Words around a number may matter, as in "March 5", so that the full text is right too.
    full = [answer_text(x).strip() for x in answers]
    return list(
        dict.fromkeys([*texts, *(x for x in full if _is_prose(x) and not _MARKED.search(x))])
    )


_MARKED = re.compile(rf"{_BOX.pattern}|####")


def _is_missing(answer: Any) -> bool:
    if answer is None or isinstance(answer, bool | Mapping):
        return True
    return isinstance(answer, float) and math.isnan(answer)
