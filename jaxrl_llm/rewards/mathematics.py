r"""Equality of two mathematical answers.

An answer is read whole or not at all. :func:`equal` compares, in this order:

1. lists, sets, tuples and intervals, part by part; ``x = 5`` with 5;
2. rational numbers in any notation, exactly (:mod:`jaxrl_llm.rewards.numbers`);
3. formulas, equations, inequalities, unions of intervals and matrices that the parser of
   math-verify reads to their last character;
4. what it does not read, such as ``\text{no solution}`` or ``x \equiv 3 \pmod 5``, as text without
   differences of spelling.

A formula that is read never equals one that is not. All of it is symmetric.
"""

import functools
import importlib
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jaxrl_llm.rewards.numbers import (
    EXPONENT,
    LONGEST,
    TIMES_E,
    UNIT_LETTERS,
    Rational,
    canonical,
    close,
    may_be_rounded,
    rational,
    same,
)

_MOST_PARTS = 30  # of a list that is compared without its order

# Words that mathematics answers with, and the forms that mean the same.
_PHRASES = {
    r"\text{no solution}": "no solution|no solutions|there is no solution|there are no solutions",
    r"\text{no real solution}": "no real solution|no real solutions|no real roots",
    r"\text{does not exist}": "does not exist|dne|the limit does not exist",
    r"\text{infinitely many}": "infinitely many|infinitely many solutions|infinite solutions",
    r"\mathbb{R}": "all real numbers|all reals|all real x|the set of all real numbers",
    r"\text{undefined}": "undefined|not defined|is undefined",
    r"\text{none}": "none",
    r"\emptyset": "empty set|the empty set",
    r"\infty": "positive infinity",
    r"-\infty": "negative infinity",
}
_PHRASE = {each: form for form, spelled in _PHRASES.items() for each in spelled.split("|")}

_UNITS = {
    "dollar": "dollars|usd|us dollars",
    "€": "euro|euros|eur",
    "degree": "degrees|deg",
    "cm": "centimeter|centimeters|centimetre|centimetres",
    "mm": "millimeter|millimeters|millimetre|millimetres",
    "m": "meter|meters|metre|metres",
    "km": "kilometer|kilometers|kilometre|kilometres",
    "in": "inch|inches",
    "ft": "foot|feet",
    "mi": "mile|miles",
    "yd": "yard|yards",
    "g": "gram|grams|gm",
    "kg": "kilogram|kilograms",
    "lb": "lbs|pound|pounds",
    "oz": "ounce|ounces",
    "s": "second|seconds|sec|secs",
    "min": "minute|minutes|mins",
    "h": "hour|hours|hr|hrs",
    "mph": "mi/h|miles per hour",
    "km/h": "kmh|kph|kilometers per hour|km per hour",
    "m/s": "meters per second",
    "l": "liter|liters|litre|litres",
    "": "unit|units|square units|cubic units|sq units|units^2|units^3|unit^2|unit^3",
}
_UNIT = {each: unit for unit, spelled in _UNITS.items() for each in spelled.split("|")}
_ATTACHED = "cm|mm|km|ft|kg|mph|lb|lbs|ml|mL|min|hr|mi|yd|oz|Hz|kHz|th|st|nd|rd"
# Behind a number, these words say more than its unit.
_NOT_UNITS = re.compile(
    r"\b(?:mod|modulo|if|when|where|for|or|and|is|are|not|no|less|more|than|least|most|to|between|"
    r"before|after|times|plus|minus|over|base|with|from|only|but|except|remainder|r)\b",
    re.IGNORECASE,
)
_POWER = r"(?:\s*\^\{?(?:-[1-3]|[23])\}?)?"
_TRAILING_UNIT = re.compile(
    rf"(?P<value>.*(?:[\d)}}\]!]|\\pi))\s*(?:"
    rf"(?P<latex>(?:\\text\{{[^{{}}\d=<>]+{_POWER}\}}{_POWER}\s*(?:\\cdot|/)?\s*){{1,4}})"
    rf"|\s(?P<words>[A-Za-z]{{2,}}[./]?(?:[ /][A-Za-z]+){{0,3}}{_POWER})"
    rf"|(?P<attached>(?<=\d)(?:{_ATTACHED}|m(?=\^|[23])){_POWER}[23]?)"
    rf"|\s(?P<letter>[{''.join(sorted(UNIT_LETTERS))}]{_POWER}))",
    re.DOTALL,
)
_RELATION = re.compile(r"\\(?:le|ge|ne|approx|in)(?![A-Za-z])|[<>=]")
_NAME = re.compile(
    r"(?:[A-Za-z'\s|]|\\(?:text|overline|vec|hat|angle|triangle|alpha|beta|gamma|delta|theta|"
    r"lambda|mu|phi|omega|sigma|rho|tau|epsilon)(?![A-Za-z])|\{[A-Za-z\s]*\}|_\{\w+\}|\^\{-1\})+"
    r"(?:\([\w\\,\s]*\))?\s*"
)
# A ratio of three or more numbers, or a time of the day.
_NO_QUOTIENT = re.compile(r"[^:{}]+(?::[^:{}]+){2,}|\d{1,2}:[0-5]\d")
_OPERATIONS = re.compile(r"\\(?:frac|sqrt|cdot|times|sin|cos|tan|log|ln|sum|int)")
# The commands that the parser reads in full; of \equiv and \approx it reads only one side.
_READ_COMMANDS = frozenset(
    re.findall(
        r"\S+",
        r"""frac sqrt cdot times div pi infty pm sin cos tan csc sec cot arcsin arccos arctan sinh
        cosh tanh log ln exp le ge ne in cup cap setminus emptyset mathbb binom lfloor rfloor lceil
        rceil begin end alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho
        sigma tau upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega
        varphi varepsilon vec hat sum int prod lim to max min gcd lcm overline % { } \ |""",
    )
)
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
# Neighbours that the parser reads as a product, or as a number without its neighbour.
_ADJACENT = re.compile(
    r"\d\s+\.?\d|\d*\.\d+\.\d|\d\s*_|\d\s*\\frac\{\d+\}\{\d+\}|\}\s*\d|\d\s*\{|\^\{[^{}]*\}\s*\^|[\"?@#&~`]"
)


@dataclass(frozen=True)
class _Node:
    """One reading of an answer or of a part of it.

    Attributes:
      kind: "number", "formula", "text", "list", "tuple" or "named".
      text: Its canonical text.
      parts: Of a list (without order), a tuple or an interval, or the value of a name.
      number: Of a number.
      unit: Of a number or a formula; empty for none.
      name: Of a named value; of a tuple its two brackets.
    """

    kind: str
    text: str
    parts: tuple["_Node", ...] = ()
    number: Rational | None = None
    unit: str = ""
    name: str = ""


def equal(a: str, b: str) -> bool:
    r"""Whether two answers are the same mathematics.

    Args:
      a, b: Answers: LaTeX with or without dollar signs, or plain text, but no prose.

    Raises:
      ImportError: If math-verify is not installed and a formula is not arithmetic.

    Example:
      >>> from jaxrl_llm.rewards.mathematics import equal
      >>> equal("3 1/2", r"\frac{7}{2}"), equal("x<2", "x>2"), equal("{1, 2}", "2, 1")
      (True, False, True)
    """
    if not a.strip() or not b.strip():
        return False
    return any(_same(x, y) for x in _readings(a) for y in _readings(b))


def vote_text(answer: str) -> str:
    r"""One text for answers that are :func:`equal` without the work of a parser, for a vote.

    A rational number is its value, in any notation, also in lists, sets and tuples; a list has no
    order. A unit, and the name in x = 5, are left out. Formulas are equal only as canonical texts:
    2 + x and x + 2 have two. Does not need math-verify.

    Example:
      >>> from jaxrl_llm.rewards.mathematics import vote_text
      >>> [vote_text(x) for x in ("0.50", r"x = \frac12", "{2, 1.0}", "(3, x + 1)", "12%")]
      ['1/2', '1/2', '{1,2}', '(3,x+1)', '12']
    """
    text = canonical(answer)
    sides, signs = split(text, _RELATION)
    if signs == ["="] and _is_name(sides[0]):
        text = sides[1]
    # A reader of other relations may ask the parser.
    is_read = len(text) <= LONGEST and not _RELATION.search(text)
    return _vote(node_of(text)) if is_read else _plain(text)


def _vote(node: _Node) -> str:
    if node.number is not None:
        value = node.number.value
        shown = 100 * value  # a percent sign is left out where `same` leaves it out
        if node.number.percent and (shown.denominator == 1 or abs(shown) > 1):
            value = shown
        try:
            return str(value)
        except ValueError:  # more digits than Python writes
            return f"{value.numerator:#x}/{value.denominator:#x}"
    parts = list(map(_vote, node.parts))
    if node.kind == "list":
        parts = sorted(set(parts)) if len(parts) <= _MOST_PARTS else parts
        return parts[0] if len(parts) == 1 else f"{{{','.join(parts)}}}"
    if node.kind == "tuple":
        return f"{node.name[0]}{','.join(parts)}{node.name[-1]}"
    # A space between digits is no product and no longer number.
    return _plain(re.sub(r"(?<=\d)\s+(?=\d)", "_", node.text))


@functools.lru_cache(maxsize=64)
def _readings(text: str) -> tuple[_Node, ...]:
    """The readings of a text: one, or two where a letter may be a unit or a number e."""
    texts = [canonical(text)]
    if any(TIMES_E.fullmatch(x[0]) for x in EXPONENT.finditer(text)):
        texts.append(canonical(text, euler=True))
    nodes = [node_of(x) for x in dict.fromkeys(texts)]
    unit = _TRAILING_UNIT.fullmatch(texts[0])
    if unit and unit["letter"] and nodes[0].unit:
        nodes.append(_Node("formula", texts[0]))
    return tuple(nodes)


def phrase(text: str) -> str | None:
    r"""The canonical form of words that answer, such as ``\text{No solutions}``."""
    words = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip(" .!").casefold()
    return _PHRASE.get(" ".join(words.split()))


def node_of(text: str, depth: int = 0) -> _Node:
    """The reading of a canonical text."""
    text = text.strip()
    while text.startswith("{") and text.endswith("}") and _matching(text) == len(text) - 1:
        text = text[1:-1].strip()
    text = phrase(text) or text
    if depth > 6 or r"\ldots" in text or "..." in text or r"\begin{cases}" in text:
        return _Node("text", text)
    for reader in (_pair_of_signs, _list, _related, _bracketed):
        node = reader(text, depth)
        if node is not None:
            return node
    return _scalar(text)


def _scalar(text: str) -> _Node:
    """A number or a formula, with its unit."""
    if _NO_QUOTIENT.fullmatch(text):
        return _Node("text", text)
    number = rational(text)
    if number is not None:
        return _Node("number", text, number=number)
    match = _TRAILING_UNIT.fullmatch(text)
    if match:
        words = match["latex"] or match["words"] or match["attached"] or match["letter"]
        unit = _unit(words)
        value = match["value"].strip()
        number = rational(value)
        if unit is not None and number is not None and not number.percent:
            return _Node("number", value, number=number, unit=unit)
        if unit is not None and match["latex"] and not _letters(value):
            return _Node("formula", value, unit=unit)
    return _Node("text" if r"\text" in text or not text else "formula", text)


def _unit(words: str) -> str | None:
    """The unit that words behind a number name, or None if they say something else."""
    words = re.sub(r"\\text\{((?:[^{}]|\{[^{}]*\})*)\}", r" \1", words).replace(r"\cdot", " ")
    words = re.sub(r"[{}.,]", "", words).strip()
    if _NOT_UNITS.search(words) or re.search(r"\bpi\b|sqrt", words):
        return None
    words = re.sub(r"\s*([/^])\s*", r"\1", " ".join(words.split()))
    power = re.search(r"\^?([23])$", words)
    base = words[: power.start()] if power else words
    base = base if len(base) == 1 else base.casefold()
    exponent = power[1] if power else ""
    for prefix, value in (("square ", "2"), ("sq ", "2"), ("cubic ", "3"), ("cu ", "3")):
        if base.startswith(prefix):
            base, exponent = base.removeprefix(prefix), value
    base = _UNIT.get(base, base)
    if len(base) > 3 and base.endswith("s") and not base.endswith("ss"):
        base = base[:-1]
    return f"{base}{exponent}" if base else ""


def _matching(text: str) -> int:
    """The position of the bracket that closes the first character; -1 if it is never closed."""
    depth = 0
    for match in re.finditer(r"\\(?:[A-Za-z]+|.)|[(){}\[\]]", text, re.DOTALL):
        depth += _turn(match[0])
        if not depth and _turn(match[0]):
            return match.end() - 1
    return -1


def _turn(token: str) -> int:
    if token in ("(", "[", "{", r"\{", r"\langle"):
        return 1
    return -1 if token in (")", "]", "}", r"\}", r"\rangle") else 0


def split(text: str, separator: re.Pattern) -> tuple[list[str], list[str]]:
    """The parts of a text between separators outside of brackets, and the separators."""
    parts, found, depth, start = [], [], 0, 0
    for match in re.finditer(r"\\(?:[A-Za-z]+|.)|[(){}\[\],;<>=]", text, re.DOTALL):
        depth += _turn(match[0])
        if depth == 0 and separator.fullmatch(match[0]):
            parts.append(text[start : match.start()].strip())
            found.append(match[0])
            start = match.end()
    parts.append(text[start:].strip())
    return parts, found


SEPARATOR = re.compile("[,;]")
_SIGNS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")


def _list(text: str, depth: int) -> _Node | None:
    parts, found = split(text, SEPARATOR)
    if not found or r"\begin" in text:
        return None
    if not all(parts):
        return _Node("text", text)
    return _Node("list", text, tuple(node_of(part, depth + 1) for part in parts))


def _pair_of_signs(text: str, depth: int) -> _Node | None:
    r"""``2 \pm x`` as the list of 2 + x and 2 - x."""
    if len(re.findall(r"\\(?:pm|mp)(?![A-Za-z])", text)) != 1 or split(text, SEPARATOR)[1]:
        return None
    both = (re.sub(r"\\(?:pm|mp)(?![A-Za-z])", sign, text) for sign in "+-")
    parts = tuple(node_of(re.sub(r"(^|[=(])\s*\+", r"\1", each), depth + 1) for each in both)
    return _Node("list", text, parts)


def _related(text: str, depth: int) -> _Node | None:
    """Named values, chains of equal numbers, and other relations."""
    parts, found = split(text, _RELATION)
    if not found:
        return None
    if not all(parts):
        return _Node("text", text)
    if set(found) <= {">", r"\ge"}:  # 3 > x > 1 is 1 < x < 3
        turned = {">": "<", r"\ge": r"\le "}
        parts, found = parts[::-1], [turned[x].strip() for x in reversed(found)]
        text = parts[0] + "".join(f"{x} {y}" for x, y in zip(found, parts[1:], strict=True))
    if not set(found) <= {"=", r"\approx", r"\in"}:
        return _Node("formula", text)
    if _is_name(parts[0]):
        value = node_of(parts[-1], depth + 1)
        return _Node("named", text, (value,), name=_plain(parts[0]))
    sides = [node_of(part, depth + 1) for part in parts]
    if all(side.kind in ("number", "formula") for side in sides):
        near = all(_near(sides[0], side, r"\approx" in found) for side in sides[1:])
        if near and not any(_letters(side.text) for side in sides):
            return sides[0] if r"\approx" in found else sides[-1]
    return _Node("text" if r"\approx" in found else "formula", text)


def _is_name(text: str) -> bool:
    named = _NAME.fullmatch(text) and not _OPERATIONS.search(text)
    return bool(named) and text not in ("e", "i")


def _letters(text: str) -> bool:
    return bool(re.search("[A-Za-z]", _COMMAND.sub("", text)))


def _near(a: _Node, b: _Node, roughly: bool) -> bool:
    """Whether the sides of 22/7 = 3 1/7 are equal, or those of an approximation within 1%."""
    if not roughly:
        return _same(a, b)
    values = [_constant(_formula(x)) for x in (a, b)]
    if any(x is None for x in values):
        return False
    return abs(values[0] - values[1]) <= abs(values[0]) / 100


_SET_OF = re.compile(
    r"\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|\\colon|\||:)(.*)", re.DOTALL
)


def _bracketed(text: str, depth: int) -> _Node | None:
    """Sets, tuples and intervals."""
    opening = re.match(r"\\\{|\\langle|[(\[]", text)
    if opening is None:
        return None
    end = _matching(text)
    closing = re.search(r"(?:\\\}|\\rangle|[)\]])$", text)
    if closing is None or end != len(text) - 1:
        return None
    inner = text[opening.end() : closing.start()].strip()
    if opening[0] == r"\{":
        condition = _SET_OF.fullmatch(inner)
        if condition:
            return node_of(condition[2], depth + 1)
        if not inner:
            return _Node("formula", r"\emptyset")
        if re.search(r"\\mid|\||:", inner):
            return _Node("text", text)
        node = node_of(inner, depth + 1)
        return node if node.kind == "list" else _Node("list", text, (node,))
    parts, found = split(inner, SEPARATOR)
    if not found:
        return node_of(inner, depth + 1) if opening[0] == "(" and closing[0] == ")" else None
    if not all(parts):
        return _Node("text", text)
    nodes = tuple(node_of(part, depth + 1) for part in parts)
    return _Node("tuple", text, nodes, name=opening[0] + closing[0])


def _plain(text: str) -> str:
    r"""A text without differences of spelling: spaces, and the case of the words of ``\text``."""
    text = re.sub(r"\\text\{([^{}]*)\}", lambda x: x[1].casefold().strip(" .!"), text)
    return re.sub(r"\s+|\.$", "", text)


def _same(a: _Node, b: _Node) -> bool:
    """Whether two readings are equal."""
    if a.kind == "named" or b.kind == "named":
        return _same_named(a, b)
    if "list" in (a.kind, b.kind):
        return _same_lists(a, b)
    if a.kind == b.kind == "tuple":
        return (
            a.name == b.name and len(a.parts) == len(b.parts) and all(map(_same, a.parts, b.parts))
        )
    if "text" in (a.kind, b.kind):
        return _same_texts(a, b)
    if a.unit and b.unit and a.unit != b.unit:
        return False
    if a.number is not None and b.number is not None:
        return same(a.number, b.number)
    return _same_formulas(a, b)


def _same_texts(a: _Node, b: _Node) -> bool:
    r"""Of texts; a word that has no ``\text`` around it is the same word."""
    if a.kind == b.kind == "text":
        return _plain(a.text) == _plain(b.text)
    words, other = (a, b) if a.kind == "text" else (b, a)
    if other.kind != "formula" or not re.fullmatch("[A-Za-z ]+", other.text):
        return False
    return _plain(words.text) == _plain(rf"\text{{{other.text}}}")


def _same_named(a: _Node, b: _Node) -> bool:
    """X = 5 is 5, and not y = 5; of equations, those with the same solutions."""
    if a.kind == b.kind:
        if a.name == b.name and _same(a.parts[0], b.parts[0]):
            return True
        of_numbers = any(_numeric(x.parts[0]) for x in (a, b))
        return not of_numbers and _same_formulas(a, b)
    named, other = (a, b) if a.kind == "named" else (b, a)
    is_relation = other.kind == "formula" and _RELATION.search(other.text)
    return bool(is_relation and _same_formulas(named, other)) or _same(named.parts[0], other)


def _numeric(node: _Node) -> bool:
    return node.kind == "number" or not _letters(node.text)


def _same_lists(a: _Node, b: _Node) -> bool:
    """Of lists and sets in any order; one of a single value is that value."""
    ours, theirs = (_distinct(x.parts if x.kind == "list" else (x,)) for x in (a, b))
    if len(ours) != len(theirs):
        return False
    if a.kind != b.kind and len(ours) != 1:
        return False
    if len(ours) == 1:
        return _same(ours[0], theirs[0])
    names = [[x.name for x in side if x.kind == "named"] for side in (ours, theirs)]
    in_order = len(ours) > _MOST_PARTS or any(
        len(set(mine)) == len(ours) and not other for mine, other in (names, names[::-1])
    )
    if in_order:  # x = 1, y = 2 is 1, 2 and not 2, 1
        return all(map(_same, ours, theirs))
    left = list(theirs)
    for part in ours:
        found = next((x for x in left if _same(part, x)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _distinct(parts: Sequence[_Node]) -> list[_Node]:
    kept: list[_Node] = []
    for part in parts[: _MOST_PARTS + 1]:
        if part.kind != "number" or not any(x.kind == "number" and _same(x, part) for x in kept):
            kept.append(part)
    return kept + list(parts[_MOST_PARTS + 1 :])


# --- formulas, read by the parser of math-verify -------------------------------------------------


class _NoTimeoutWarning(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "Timeout is disabled" not in str(record.msg)


_FILTER = _NoTimeoutWarning()


def package() -> Any:
    """math-verify, without its remark that its time limits are off: they are off on purpose."""
    try:
        module = importlib.import_module("math_verify")
    except ImportError as error:
        raise ImportError(
            "math_verify needs the package math-verify: pip install 'jaxrl_llm[train]'."
        ) from error
    logging.getLogger("math_verify.grader").addFilter(_FILTER)
    return module


def _formula(node: _Node) -> Any:
    """The sympy object of a node, or None if the parser does not read its whole text."""
    if node.number is not None:
        import sympy

        return sympy.Rational(node.number.value.numerator, node.number.value.denominator)
    return _parsed(node.text)


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """The parse of a canonical text, or None."""
    commands = {match[1] for match in _COMMAND.finditer(text)}
    if not commands <= _READ_COMMANDS or len(text) > 1000 or r"\begin{cases}" in text:
        return None
    text = re.sub(r"(\\log_\{[^{}]*\})\s*(\d+(?:\.\d+)?)", r"\1{\2}", text)
    if _ADJACENT.search(re.sub(r"\\begin\{\w+\}.*\\end\{\w+\}", "", text, flags=re.DOTALL)):
        return None
    if re.search(r"[A-Za-z]\s*\d", _COMMAND.sub(";", text.partition(r"\begin")[0])):
        return None  # x3 may be a power, an index or a product
    if _has_huge_binomial(text):
        return None
    package()
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from sympy import Basic, Float, I, MatrixBase, Product, Sum, Symbol, nan, zoo
    from sympy import Rational as Number

    # It reads 2(3) as a mixed number, and without braces the argument of \log_{2} 8 as 80.
    text = re.sub(r"(?<![\w{])(\d+(?:\.\d+)?)\s*\(", r"\1\\cdot (", text)
    try:
        parsed = latex2sympy(
            text,
            is_real=True,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        if not isinstance(parsed, Basic | MatrixBase) or parsed.has(nan, zoo):
            return None
        if not parsed.has(Sum, Product):
            parsed = parsed.xreplace({Symbol("i", real=True): I})
        # The parser makes decimals floats of 53 bits.
        parsed = parsed.xreplace({x: Number(str(x)) for x in parsed.atoms(Float)})
    except Exception:  # of any kind, for a text that it does not read
        return None
    return parsed


_BINOMIAL = re.compile(r"\\binom\{(\d+)\}\{(\d+)\}")


def _has_huge_binomial(text: str) -> bool:
    """Whether the parser, which evaluates binomials, would take long for one."""
    others = _BINOMIAL.sub("", text)
    if r"\binom" in others and re.search(r"\d{5}", others):
        return True
    for over, under in _BINOMIAL.findall(text):
        if max(len(over), len(under)) > 12:
            return True
        if len(over) * min(int(under), abs(int(over) - int(under))) > 4 * _MOST_DIGITS:
            return True
    return False


def _same_formulas(a: _Node, b: _Node) -> bool:
    """Of what the parser reads, by value; of what it does not read, by text."""
    ours, theirs = _formula(a), _formula(b)
    if ours is None or theirs is None:
        return ours is theirs and _plain(a.text) == _plain(b.text)
    try:
        return _same_values(ours, theirs, may_be_rounded(a.text) or may_be_rounded(b.text))
    except Exception:  # of any kind, where sympy cannot compare
        return _plain(a.text) == _plain(b.text)


def _same_values(ours: Any, theirs: Any, rounded: bool) -> bool:
    """Of two objects of sympy."""
    from sympy import Expr, MatrixExpr

    if ours == theirs:
        return True
    plain = [isinstance(x, Expr) and not isinstance(x, MatrixExpr) for x in (ours, theirs)]
    if all(plain):
        return _same_expressions(ours, theirs, rounded)
    if any(plain):  # a number is no relation, set or matrix
        return False
    return _same_objects(ours, theirs)


def _same_objects(ours: Any, theirs: Any) -> bool:
    """Of relations, sets and matrices, by math-verify, in both directions."""
    verify: Callable = package().verify

    def verified(gold: Any, reply: Any) -> bool:
        return verify(gold, reply, allow_set_relation_comp=True, timeout_seconds=None)

    if max(map(_digits, (ours, theirs))) > 60:  # more than the package compares
        return False
    return (
        _same_inequalities(ours, theirs)
        or verified(ours, theirs)
        and verified(theirs, ours)
        and not _are_apart(ours, theirs)
    )


def _same_inequalities(ours: Any, theirs: Any) -> bool:
    """Whether one inequality is the other times a positive number, as 2x < 4 and x < 2."""
    from sympy import GreaterThan, LessThan, StrictGreaterThan, StrictLessThan

    kinds = ((StrictLessThan, StrictGreaterThan), (LessThan, GreaterThan))
    if not any(isinstance(ours, kind) and isinstance(theirs, kind) for kind in kinds):
        return False
    ratio = (ours.gts - ours.lts) / (theirs.gts - theirs.lts)
    symbols = sorted(ours.free_symbols | theirs.free_symbols, key=str)
    values = [
        _constant(ratio, 50, {x: _coordinate(point, k) for k, x in enumerate(symbols)})
        for point in range(4)
    ]
    if any(x is None or not x.is_extended_positive for x in values):
        return False
    return all(_same_constants(values[0], x, False, 50) for x in values[1:])


def _same_expressions(ours: Any, theirs: Any, rounded: bool) -> bool:
    """Of two expressions: constants to 50 digits or more, others at points of their variables."""
    digits = max(map(_digits, (ours, theirs)))
    if digits > _MOST_DIGITS:  # nor can they be told apart
        return False
    ours, theirs = map(_real_roots, (ours, theirs))
    symbols = sorted(ours.free_symbols | theirs.free_symbols, key=str)
    if not symbols:
        a, b = (_constant(x, digits) for x in (ours, theirs))
        return a is not None and b is not None and _same_constants(a, b, rounded, digits)
    points = [{x: _coordinate(point, k) for k, x in enumerate(symbols)} for point in range(6)]
    if (verdict := _same_where_real(ours, theirs, points, rounded, digits)) is not None:
        return verdict
    compared = 0
    for values in points:
        a, b = (_constant(x, digits, values) for x in (ours, theirs))
        if (a is None) != (b is None):
            return False
        if a is None or b is None:
            continue
        if not _same_constants(a, b, rounded, digits):
            return False
        compared += 1
    if compared >= 3:
        return True
    verify: Callable = package().verify
    return verify(ours, theirs, timeout_seconds=None) and verify(theirs, ours, timeout_seconds=None)


def _same_where_real(
    ours: Any, theirs: Any, points: Sequence[Mapping[Any, Any]], rounded: bool, digits: int
) -> bool | None:
    r"""Of expressions with roots or logarithms: where every root and logarithm is real.

    The points with positive variables are compared too, as \sqrt{ab} is \sqrt a\sqrt b only there.

    Returns:
      None if all parts are real at the points anyway, or at fewer than three of them. None also
      for an absolute value, as \ln|x| is not \ln x.
    """
    from sympy import Abs

    if ours.has(Abs) or theirs.has(Abs):
        return None
    real = [x for x in points if _is_real(ours, x) and _is_real(theirs, x)]
    if len(real) == len(points):
        return None
    positive = [{x: abs(y) for x, y in point.items()} for point in points]
    real += [x for x in positive if _is_real(ours, x) and _is_real(theirs, x)]
    if len(real) < 3:
        return None
    for point in real:
        a, b = (_constant(x, digits, point) for x in (ours, theirs))
        if a is None or b is None or not _same_constants(a, b, rounded, digits):
            return False
    return True


def _is_real(expression: Any, point: Mapping[Any, Any]) -> bool:
    """Whether no root and no logarithm in an expression is of a negative number at a point."""
    from sympy import Pow, log

    for part in expression.atoms(Pow, log):
        if isinstance(part, log) or part.exp.is_integer is False:
            value = _constant(part.args[0], 20, point)
            if value is not None and not value.is_extended_nonnegative:
                return False
    return True


def _real_roots(expression: Any) -> Any:
    r"""The expression with odd roots of real numbers as real roots: \sqrt[3]{-8} is -2."""
    from sympy import Abs, Pow, sign

    roots = {}
    for part in expression.atoms(Pow):
        power = part.exp.doit() if part.exp.is_rational and _size(part.exp) < 1000 else None
        if power is None or not power.is_Rational or power.q % 2 == 0 or power.q == 1:
            continue
        if part.base.is_extended_real and not part.base.is_nonnegative:
            roots[part] = sign(part.base) ** power.p * Pow(Abs(part.base), power)
    return expression.xreplace(roots)


_MOST_DIGITS = 6000


def _digits(expression: Any) -> int:
    """How many digits tell two constants apart: 50, and those of its integers and their powers."""
    from sympy import Integer, Pow, Product, Sum, binomial, factorial, preorder_traversal

    digits = 50.0
    for part in preorder_traversal(expression):
        if isinstance(part, Pow | factorial) and part.args[0].is_number:
            exponent = _size(part.args[-1])
            if exponent > 20:
                digits += exponent * math.log10(10 + _size(part.args[0]))
        elif isinstance(part, binomial):
            digits += 0.31 * _size(part.args[0])
        elif isinstance(part, Sum | Product) and _is_long(part):
            return _MOST_DIGITS + 1
        elif isinstance(part, Integer) and abs(part) > 10**15:
            digits += part.p.bit_length() * 0.31
        if digits > _MOST_DIGITS:
            break
    return int(min(digits, _MOST_DIGITS + 1))


def _is_long(series: Any) -> bool:
    """Whether a sum or product of more than 200 terms has terms that take long."""
    from sympy import binomial, factorial, oo

    index, *bounds = series.limits[0]
    costly = series.function.has(binomial, factorial) or series.free_symbols
    return bool(costly) and any(x.is_Integer and abs(x) > 200 for x in bounds if x is not oo)


def _size(value: Any) -> float:
    """A bound of the absolute value of an exponent or a base, without evaluating it."""
    if value.is_Rational:
        return float(max(abs(value.p), value.q)) if abs(value.p).bit_length() < 900 else math.inf
    if value.is_Pow or value.is_Mul or value.is_Add:
        sizes = [_size(x) for x in value.args]
        try:
            if value.is_Pow:
                return max(sizes[0], 1.0) ** sizes[1]
        except OverflowError:
            return math.inf
        return sum(sizes) if value.is_Add else math.prod(sizes)
    return 10.0


def _coordinate(point: int, variable: int) -> Any:
    """A rational number between -3 and 3 that no identity singles out."""
    from sympy import Rational as Number

    places = (-1, 1, 1, -1, 1, -1)
    return places[(point + variable) % 6] * Number(
        1009 + 797 * point + 613 * variable + 37 * point * variable, 2003 + 101 * variable
    )


def _constant(value: Any, digits: int = 50, point: Mapping[Any, Any] | None = None) -> Any:
    """The value at a point with so many digits, a complex number of sympy; None for none."""
    if value is None:
        return None
    try:
        value = value.xreplace(dict(point)) if point else value
        number = value.evalf(digits, maxn=8 * digits)
        if not number.is_number or number.is_finite is not True:
            return number if number.is_infinite and number.is_extended_real else None
        real, imaginary = number.as_real_imag()
        if not (real.is_Float or real.is_Rational) or not (
            imaginary.is_Float or imaginary.is_Rational
        ):
            return None
    except Exception:  # of what sympy cannot evaluate
        return None
    return number


def _same_constants(a: Any, b: Any, rounded: bool, digits: int) -> bool:
    """Of two values with so many digits; rounded decimals by :func:`numbers.close`."""
    if a.is_infinite or b.is_infinite:
        return a == b
    import sympy

    (ax, ay), (bx, by) = a.as_real_imag(), b.as_real_imag()
    larger = max(abs(x) for x in (ax, ay, bx, by))
    if larger < sympy.Float(f"1e-{2 * digits}"):
        return True
    tolerance = larger * sympy.Float(f"1e-{digits - 12}", digits)
    for x, y in ((ax, bx), (ay, by)):
        if abs(x - y) <= tolerance:
            continue
        if not rounded or larger > 1e30 or not close(*(_fraction(z) for z in (x, y))):
            return False
    return True


def _fraction(value: Any) -> Fraction:
    import sympy

    exact = sympy.Rational(value)
    return Fraction(int(exact.p), int(exact.q))


_TINY = 1e-3  # below which the six decimals of math-verify are too few


def _are_apart(ours: Any, theirs: Any) -> bool:
    """Whether tiny numbers, which math-verify holds equal, differ by more than a thousandth.

    It rounds to six decimals, or drops what is below 1e-15.
    """

    def values(side: Any) -> list:
        return [x.doit().evalf(15) for x in _numbers(side)]

    try:
        a, b = values(ours), values(theirs)
        if not any(0 < abs(x) < _TINY for x in (*a, *b)):
            return False
        if len(a) != len(b) or not all(x.is_comparable for x in (*a, *b)):
            return False
        pairs = list(zip(sorted(a), sorted(b), strict=True))
    except Exception:  # of what the package compares without its value
        return False
    return any(
        max(abs(x), abs(y)) < _TINY and abs(x - y) > 1e-3 * max(abs(x), abs(y)) for x, y in pairs
    )


def _numbers(value: Any) -> list:
    """The numbers of an expression: itself, or those in a set, a matrix or an inequality."""
    import sympy

    if getattr(value, "is_number", False):
        return [value]
    if isinstance(value, sympy.MatrixBase):
        return [x for each in value.flat() for x in _numbers(each)]
    if isinstance(value, sympy.Set | sympy.Tuple | sympy.And | sympy.Rel):
        return [x for each in value.args for x in _numbers(each)]
    return []
