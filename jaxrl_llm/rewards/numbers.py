r"""Number notation: one canonical text for the many ways to write a number, and its exact value.

:func:`canonical` rewrites plain text, Unicode and LaTeX into a small set of LaTeX:

    3 1/2, 3\frac12, 3½             \frac{7}{2}
    1,234  1\,234  1{,}234  1_234   1234
    0.\overline{3}, 0.333...        \frac{1}{3}
    1.5e3, 10², x**2                (1.5\cdot 10^{3}), 10^{2}, x^{2}
    \mathrm{i}, \dfrac12, \sqrt2    i, \frac{1}{2}, \sqrt{2}

:func:`rational` evaluates what is arithmetic of rational numbers with fractions, so that quotients
of large powers are exact. Its numbers have a bounded size, so 9^{9^{9}} has no value here.
"""

import math
import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

LONGEST = 2000  # characters of an answer that is read as mathematics
_BITS = 1 << 16  # of a numerator or denominator
_LARGEST_FACTORIAL = 5000  # of about 54 000 bits
_DEEPEST = 40  # nested parentheses

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_GREEK = {
    unicodedata.lookup(f"GREEK SMALL LETTER {name.upper()}"): rf"\{name} "
    for name in (
        *("alpha", "beta", "gamma", "delta", "epsilon", "theta", "mu", "pi", "rho", "sigma"),
        *("tau", "phi", "omega"),
    )
} | {"λ": r"\lambda "}
_SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("−‐‑–﹣－", "-"),
        **dict.fromkeys("·⋅∙∗", r"\cdot "),
        **dict.fromkeys("’‘ʼ′", "'"),
        **dict.fromkeys("∅⌀", r"\emptyset "),
        **_GREEK,
        **{"×": r"\times ", "÷": r"\div ", "√": r"\sqrt ", "∞": r"\infty ", "±": r"\pm "},
        **{"≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx "},
        **{"∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "°": r"^{\circ}", "ℝ": r"\mathbb{R}"},
        **{"ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}", "∖": r"\setminus "},
        **{"≡": r"\equiv ", "∠": r"\angle ", "…": r"\ldots ", "\u2044": "/", "\u2215": "/"},
        **{"⟨": r"\langle ", "⟩": r"\rangle ", "|": "|", "‖": r"\|"},
    }
)
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|sec|csc|cot|log|ln|exp"
_TEXTS = re.compile(
    r"(?P<digit>(?<=[\d)}])\s*)?\\(?:text(?:bf|rm|it|normal|tt|sf)?|mbox|hbox|mathrm|mathsf|"
    r"operatorname\*?|mathop)\s*\{(?P<inner>[^{}\\$]*)\}"
)
_WORD = r"\\(?:mathrm|text)\s*\{[~\s]*(?![ie]\s*\})([A-Za-z]+)\s*\}"
_UNIT_OVER_UNIT = re.compile(rf"(?<=[\d}}])\s*{_WORD}\s*/\s*{_WORD}\s*(\^\s*\{{?[23]\}}?|)")
UNIT_LETTERS = frozenset("mgshlLNJWVAKCF")
_SIMPLE = (  # in this order
    (re.compile(r"\\(?:left|right|middle)\s*\.(?!\d)"), ""),
    (re.compile(r"\\(?:left|right|middle|displaystyle|textstyle|limits|[bB]igg?[lrm]?)\b"), ""),
    (
        re.compile(r"\\(?:boxed|mathbf|mathit|boldsymbol|bm|mathcal|mathnormal)\s*\{([^{}]*)\}"),
        r"\1",
    ),
    (re.compile(r"\\(?:ldots|dots|dotsc|cdots|dotsb)\b"), r"\\ldots "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:lbrace)\b"), r"\\{"),
    (re.compile(r"\\(?:rbrace)\b"), r"\\}"),
    (re.compile(r"\\[lr]vert\b|\\mid(?=[^A-Za-z]*\|)"), "|"),
    (re.compile(r"\\(?:leq|leqslant|le)(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant|ge)(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\(?:neq|ne)(?![A-Za-z])|!=|\\not\s*="), r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:varnothing|O)(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\*|\\ast\b|\\cdotp\b"), r"\\cdot "),
    (re.compile(r"\s*\(?\s*\\[bp]?mod\s*\{?\s*(\w+)\s*\}?\s*\)?"), r"\\pmod{\1}"),
    (re.compile(r"\s*\(\s*(?:\\text\{\s*mod\s*\}|mod)\s*(\w+)\s*\)"), r"\\pmod{\1}"),
    (
        re.compile(r"\s*\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)\s*)|\\degree\b"),
        r"\\text{degree}",
    ),
    (re.compile(r"\\text\{degree\}\s*([CF])(?![A-Za-z])"), r"\\text{degree \1}"),
    (re.compile(r"(?<=\d)\s*\\Omega$"), r"\\text{ohm}"),
    (re.compile(r"(?<![\\A-Za-z])(?:infinity|infty|inf|oo)(?![A-Za-z])"), r"\\infty "),
    (re.compile(rf"(?<![\\A-Za-z])({_FUNCTIONS}|pi|sqrt)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"\\?%|(?<=[\d\s}])\s*(?:\\text\{\s*)?(?:percent|pct)\b(?:\s*\})?"), r"\\%"),
)
# Between digits, a separator of groups of three; a comma counts outside of brackets only.
_GROUPS = re.compile(
    r"(?<![\d.,])\d{1,3}(?:(?:\\[,!;: ]|\{,\}|,\\!|~|_|'| )\d{3})+(?![\d]|,\d| ?\d)(?!/\d)"
)
_COMMAS = re.compile(r"(?<![\d.])(?<!\d,)\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_SPACES = re.compile(r"(?<!\\)\\(?:[,;:!> ]|q?quad\b|hspace\{[^{}]*\}|enspace\b|thinspace\b)|~")
_REPEATING = re.compile(
    r"(?<![\d.])(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{(\d+)\}|\\(?:overline|bar|dot)\s*(\d)"
    r"|\((\d+)\))(?![\d.(])"
)
_DOTTED = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?")
_GOES_ON = re.compile(r"(?<![\d.])(\d*)\.(\d*?)(\d{1,6}?)\3{2,}(?:\.\.\.|\s*\\ldots\s*)")
EXPONENT = re.compile(
    r"(?<![\w.])(?P<digits>\d+(?:\.\d*)?|\.\d+)[eE](?P<power>[-+]?\d{1,9})(?!\w|\.\d)"
)
# 2e-1 may be 2e - 1; nobody writes 1e for e, 0e, or e - 05.
TIMES_E = re.compile(r"(?!1e|0)\d+e[-+][1-9]\d*")
_MIXED = re.compile(
    r"(?<![\w.^_/\\}])(\d+)(?:\s*\\frac\{(\d+)\}\{(\d+)\}|\s+(\d+)\s?/\s?(\d+))(?![\d.]|\s?[/^!])"
)

_DEGREES = r"(-?\d+(?:\.\d+)?)\s*(?:\\text\{degree\}|(?:\\text\{\s*)?degrees?\b(?:\s*\})?)"
_ANGLE = re.compile(
    r"(\\(?:sin|cos|tan|sec|csc|cot)(?:\^\{\d+\})?)\s*"
    rf"(?:\(\s*{_DEGREES}\s*\)|\{{\s*{_DEGREES}\s*\}}|{_DEGREES})"
)


def _radians(match: re.Match) -> str:
    r"""``\sin 30`` degrees with its angle in radians."""
    return rf"{match[1]}(\frac{{{match[2] or match[3] or match[4]}\pi}}{{180}})"


def _words_of_latex(match: re.Match) -> str:
    r"""One form of ``\text{...}`` and its siblings: words, a letter, a function or a number."""
    behind, inner = match["digit"] is not None, match["inner"].strip()
    space = match["digit"] or ""
    word = inner.strip(" .,;:")
    if word.lower() in ("and", "or"):
        return ","
    if re.fullmatch(_FUNCTIONS, word):
        return rf"\{word} "
    if letter := re.fullmatch(r"\(?([A-Za-z])\)?", word):
        is_unit = behind and letter[1] in UNIT_LETTERS
        return rf"\text{{{letter[1]}}}" if is_unit else f"{space}{letter[1]}"
    if number := re.fullmatch(r"([-+]?[\d.,/ ]*\d)\s*([A-Za-z].*)?", word):
        rest = number[2]
        return f"{space}{number[1]}" + (rf"\text{{{rest}}}" if rest else "")
    if not word:
        return " "
    return rf"\text{{{inner}}}"


def _outside_brackets(text: str) -> str:
    """The text with the commas of digit groups removed where no bracket is open."""
    depth, start, parts = 0, 0, []
    for match in re.finditer(r"\\[{}]|[()\[\]]", text):
        opens = match[0] in ("(", "[", r"\{")
        if not depth and opens:
            parts.append(_COMMAS.sub(lambda x: x[0].replace(",", ""), text[start : match.start()]))
            start = match.start()
        depth = max(0, depth + (1 if opens else -1))
        if not depth and not opens:
            parts.append(text[start : match.end()])
            start = match.end()
    rest = text[start:]
    return "".join(parts) + (rest if depth else _COMMAS.sub(lambda x: x[0].replace(",", ""), rest))


def _close(text: str, start: int) -> int:
    """The position behind the bracket that closes the one at ``start``; -1 if none does."""
    opening = text[start]
    closing = {"{": "}", "(": ")", "[": "]"}[opening]
    depth = 0
    for place in range(start, len(text)):
        if place and text[place - 1] == "\\":
            continue
        depth += (text[place] == opening) - (text[place] == closing)
        if not depth:
            return place + 1
    return -1


def _argument(text: str, place: int, *, digits: bool) -> tuple[str, int]:
    """An argument at a place, without braces, and the place behind it."""
    while place < len(text) and text[place] == " ":
        place += 1
    if place >= len(text):
        return "", -1
    if text[place] == "{" or (digits and text[place] == "("):
        end = _close(text, place)
        return (text[place + 1 : end - 1], end) if end > 0 else ("", -1)
    pattern = r"\\[A-Za-z]+(?:\{[^{}]*\})?|-?\d+|-?[A-Za-z]" if digits else r"\\[A-Za-z]+|[^\\{}\s]"
    match = re.compile(pattern).match(text, place)
    return (match[0], match.end()) if match else ("", -1)


_TAKES = re.compile(r"\\frac(?![A-Za-z])|\\sqrt(?![A-Za-z])|\^|_|\\binom(?![A-Za-z])")


def _braced(text: str, depth: int = 0) -> str:
    r"""The text with braces around every argument of ``\frac``, ``\sqrt``, ``^`` and ``_``."""
    out, place = [], 0
    while match := _TAKES.search(text, place):
        name, end = match[0], match.end()
        out.append(text[place : match.start()])
        root = ""
        if name == r"\sqrt" and text[end : end + 1] == "[":
            close = _close(text, end)
            if close < 0:
                return "".join(out) + text[match.start() :]
            root, end = text[end:close], close
        arguments = []
        for _ in range(2 if name in (r"\frac", r"\binom") else 1):
            argument, end = _argument(text, end, digits=name in ("^", "_", r"\sqrt"))
            if end < 0:
                return "".join(out) + text[match.start() :]
            arguments.append(_braced(argument, depth + 1) if depth < _DEEPEST else argument)
        out.append(name + root + "".join(f"{{{x.strip()}}}" for x in arguments))
        place = end
    return "".join(out) + text[place:]


def _repeating(integer: str, fixed: str, period: str) -> str:
    shown = 10 ** len(fixed)
    value = Fraction(int((integer or "0") + fixed), shown)
    value += Fraction(int(period), shown * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _mixed(match: re.Match) -> str:
    integer = int(match[1])
    over, under = int(match[2] or match[4]), int(match[3] or match[5])
    if not 0 < over < under:  # 4 10/3 is not a number, which `adjacent` finds
        return match[0]
    return rf"\frac{{{integer * under + over}}}{{{under}}}"


def _vulgar(text: str) -> str:
    """Unicode fractions, superscripts and symbols as LaTeX; the rest in NFKC."""
    if text.isascii():
        return text
    out = []
    for char in text:
        parts = unicodedata.decomposition(char)
        if parts.startswith("<fraction>") and "2044" in parts:
            over, under = unicodedata.normalize("NFKC", char).split("\u2044")
            out.append(rf"\frac{{{over}}}{{{under}}}" if under else char)
        else:
            out.append(char)
    text = "".join(out)
    for marks, sign in ((_SUPERSCRIPTS, "^"), (_SUBSCRIPTS, "_")):
        runs = re.compile(f"[{''.join(marks)}]+")
        text = runs.sub(lambda x, m=marks, s=sign: f"{s}{{{''.join(m[c] for c in x[0])}}}", text)
    return unicodedata.normalize("NFKC", text.translate(_SYMBOLS)).translate(_SYMBOLS)


def _without_dollars(text: str) -> str:
    """The text without the delimiters of mathematics; a currency becomes a unit of the number."""
    text = re.sub(r"(?<!\\)\\[()\[\]]", "", text) if re.search(r"(?<!\\)\\[(\[]", text) else text
    money = r"\text{dollar}"
    text = re.sub(r"\\\$\s*([\d.,]*\d)", rf"\1{money}".replace("\\t", "\\\\t"), text)
    if text.count("$") % 2 == 0:
        return text.replace("$", "")
    text = re.sub(r"(\d)\s*\\?\$$", rf"\1{money}".replace("\\t", "\\\\t"), text)
    return re.sub(r"\$\s*([\d.,]*\d)", rf"\1{money}".replace("\\t", "\\\\t"), text, count=1)


def canonical(text: str, *, euler: bool = False) -> str:
    r"""One text for the ways to write the same mathematics; see the module.

    Args:
      text: An answer: LaTeX with or without dollar signs, or plain text.
      euler: Whether 2e-1 is 2e - 1, with Euler's number, and not 0.2.

    Example:
      >>> from jaxrl_llm.rewards.numbers import canonical
      >>> [canonical(x) for x in ("3 1/2", r"1{,}234.5", "10²", r"$0.\overline{3}$.")]
      ['\\frac{7}{2}', '1234.5', '10^{2}', '\\frac{1}{3}']
    """
    if len(text) > LONGEST:
        return " ".join(text.split())
    text = _without_dollars(_vulgar(text.strip()).strip())
    text = re.sub(r"(?<![.,;])[.,;]$", "", text)
    text = re.sub(r"([£€¥])\s*([\d.,]*\d)", r"\2\\text{\1}", text)
    text = _UNIT_OVER_UNIT.sub(r"\\text{\1/\2\3}", text)
    text = _TEXTS.sub(_words_of_latex, text)
    text = _GROUPS.sub(lambda x: "".join(re.findall(r"\d", x[0])), " ".join(text.split()))
    text = _SPACES.sub(" ", text)
    for pattern, new in _SIMPLE:
        text = pattern.sub(new, text)
    text = re.sub(r"(?<![A-Za-z0-9\\}])(?:and|or)(?![A-Za-z])|,\s*(?=,)", ",", text)
    text = _outside_brackets(re.sub(r",\s*,", ",", text))
    text = re.sub(r"(?<=\d)\.(?=[^\d\\(.]|$)", "", text)  # 5. is 5
    text = _DOTTED.sub(lambda x: _repeating(x[1], x[2], x[3] + x[4] + x[5]), text)
    text = _REPEATING.sub(lambda x: _repeating(x[1], x[2], x[3] or x[4] or x[5]), text)
    text = _GOES_ON.sub(lambda x: _repeating(x[1], x[2], x[3]), text)

    def exponent(number: re.Match) -> str:
        if euler and TIMES_E.fullmatch(number[0]):
            return number[0]
        return rf"({number['digits']}\cdot 10^{{{int(number['power'])}}})"

    text = EXPONENT.sub(exponent, text)
    text = _ANGLE.sub(_radians, _MIXED.sub(_mixed, _braced(text)))
    text = re.sub(r"(?<!\.)[.,;]+$", "", text.strip()) if not text.endswith("...") else text
    return " ".join(text.split())


class Rational(NamedTuple):
    """A rational number as it was written.

    Attributes:
      value: Its exact value.
      rounded: Whether it was written as a decimal of six digits or more, which may be rounded.
      percent: Whether a percent sign follows it; the value is then the hundredth.
    """

    value: Fraction
    rounded: bool
    percent: bool


class _Unread(Exception):
    """The text is not arithmetic of rational numbers, or a number is too large."""


_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<sign>\\(?:frac|cdot|times|div|%)|[-+/^(){}!:])\s*)"
)


class _Arithmetic:
    """A recursive reader of sums, products, quotients, powers and factorials of numbers."""

    def __init__(self, text: str):
        self.tokens, place = [], 0
        text = text.strip()
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None:
                raise _Unread
            self.tokens.append(match["number"] or match["sign"])
            place = match.end()
        self.place, self.depth, self.percent = 0, 0, False

    def peek(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self, token: str) -> None:
        if self.peek() != token:
            raise _Unread
        self.place += 1

    def whole(self) -> Fraction:
        value = self.sum()
        if self.place == len(self.tokens) - 1 and self.peek() == r"\%":
            self.percent, value = True, value / 100
            self.place += 1
        if self.place < len(self.tokens):
            raise _Unread
        return value

    def sum(self) -> Fraction:
        value = self.product()
        while sign := self.sign():
            value = _bounded(value + sign * self.product())
        return value

    def sign(self) -> int:
        """Takes a sign, if there is one; 0 if not."""
        sign = {"+": 1, "-": -1}.get(self.peek(), 0)
        self.place += abs(sign)
        return sign

    def product(self) -> Fraction:
        value = self.signed()
        while token := self.peek():
            if token in (r"\cdot", r"\times"):
                self.place += 1
                value = _bounded(value * self.signed())
            elif token in ("/", r"\div", ":"):
                self.place += 1
                value = _divided(value, self.signed())
            elif token == "(" or (token == r"\frac" and self.tokens[self.place - 1] in ")}"):
                value = _bounded(value * self.power())
            else:
                break
        return value

    def signed(self) -> Fraction:
        first = self.sign() or 1
        second = self.sign() or 1  # two signs, as in 5 - -3, but no more
        return first * second * self.power()

    def power(self) -> Fraction:
        value = self.atom()
        if self.peek() == "!":
            self.place += 1
            value = _factorial(value)
            if self.peek() == "!":  # a double factorial
                raise _Unread
        if self.peek() == "^":
            self.place += 1
            self.take("{")
            value = _raised(value, self.inside("}"))
            if self.peek() in ("^", "!"):
                raise _Unread
        return value

    def inside(self, closing: str) -> Fraction:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise _Unread
        value = self.sum()
        self.take(closing)
        self.depth -= 1
        return value

    def atom(self) -> Fraction:
        token = self.peek()
        self.place += 1
        if token in ("(", "{"):
            return self.inside(")" if token == "(" else "}")
        if token == r"\frac":
            self.take("{")
            over = self.inside("}")
            self.take("{")
            return _divided(over, self.inside("}"))
        if token and (token[0].isdigit() or token[0] == "."):
            return Fraction(token)
        raise _Unread


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS:
        raise _Unread
    return value


def _divided(value: Fraction, by: Fraction) -> Fraction:
    if not by:
        raise _Unread
    return _bounded(value / by)


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or not 0 <= value <= _LARGEST_FACTORIAL:
        raise _Unread
    return _bounded(Fraction(math.factorial(int(value))))


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or (not base and exponent <= 0):
        raise _Unread
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and base and abs(exponent) * max(bits - 1, 1) > _BITS:
        raise _Unread
    if abs(base) == 1:
        return base if exponent % 2 else Fraction(1)
    return _bounded(base ** int(exponent))


def rational(text: str) -> Rational | None:
    r"""The exact value of a canonical text that is arithmetic of rational numbers, else None.

    Example:
      >>> from jaxrl_llm.rewards.numbers import canonical, rational
      >>> rational(canonical("3 1/2")).value, rational("9^{9^{9}}"), rational("2x")
      (Fraction(7, 2), None, None)
    """
    if len(text) > LONGEST or not any(char.isdigit() for char in text):
        return None
    try:
        reader = _Arithmetic(text)
        value = reader.whole()
    except _Unread:
        return None
    return Rational(value, may_be_rounded(text), reader.percent)


def may_be_rounded(text: str) -> bool:
    """Whether a text has a decimal of six digits or more, which may stand for a longer one."""
    return any(len(x) > 6 and "." in x for x in re.findall(r"[\d.]{7,}", text))


_TINY = Fraction(1, 1000)  # below which six decimals are too few
_SIX_DECIMALS = Fraction(1, 2_000_000)


def close(a: Fraction, b: Fraction) -> bool:
    """Whether a decimal may stand for another number.

    It may to six decimals, and if both are below 0.001 to a thousandth of the larger one.
    """
    larger = max(abs(a), abs(b))
    apart = abs(a - b)
    return apart <= _SIX_DECIMALS and (larger >= _TINY or apart <= larger * _TINY)


def same(a: Rational, b: Rational) -> bool:
    """Whether two numbers are equal: exactly, or as decimals; a percent sign may be left out.

    12% is 0.12 and also 12, the answer to a question in percent. A sign that only one of them has
    may be left out of integers and of numbers above 1: 0.5% is not 0.5.

    Example:
      >>> from jaxrl_llm.rewards.numbers import canonical, rational, same
      >>> pairs = ("12%", "12"), ("12%", "0.12"), ("1/3", "0.333333"), ("1/3", "0.33")
      >>> [same(*(rational(canonical(x)) for x in pair)) for pair in pairs]
      [True, True, True, False]
    """
    rounded = a.rounded or b.rounded

    def equal(x: Fraction, y: Fraction) -> bool:
        return x == y or (rounded and close(x, y))

    if equal(a.value, b.value):
        return True
    if a.percent == b.percent:
        return False
    of_hundred, plain = (a, b) if a.percent else (b, a)
    shown = of_hundred.value * 100
    return (shown.denominator == 1 or abs(shown) > 1) and equal(shown, plain.value)
