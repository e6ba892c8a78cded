"""Exact arithmetic on untrusted text: bounded in size and time, without evaluating any code."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

_CHARACTERS = re.compile(r"[0-9.eE+\-*/%() ]*")
_MAX_LENGTH = 1000  # characters
_MAX_BITS = 10_000  # of a numerator or denominator: some 3,000 digits
_MAX_EXPONENT = 1000
_DIGITS = 30  # after the point, without zeros right after it
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, exact where its decimals end.

    Numbers are stored as fractions, so 0.1 + 0.2 is 0.3; a value with more than 30 decimals, not
    counting zeros right after the point, is rounded to that many. Powers have integer exponents.

    Args:
      expression: Numbers, ``+ - * / // % **`` and parentheses, up to 1,000 characters.

    Raises:
      ValueError: If it is something else, divides by zero, or gets too large.

    Example:
      >>> calculate("0.1 + 0.2"), calculate("2 ** 100"), calculate("(1 - 7) // 4")
      ('0.3', '1267650600228229401496703205376', '-2')
      >>> calculate("2 / 3")
      '0.666666666666666666666666666667'
    """
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"the expression has more than {_MAX_LENGTH} characters")
    text = " ".join(expression.split())
    if not text or not _CHARACTERS.fullmatch(text):
        raise ValueError("an expression has numbers, + - * / // % ** and parentheses only")
    try:
        value = _value(ast.parse(text, mode="eval").body, text)
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("the expression is not arithmetic") from error
    if value.denominator == 1:
        return str(value.numerator)
    sign, value = "-" * (value < 0), abs(value)
    places = _DIGITS
    while value.numerator * 10 ** (places - _DIGITS + 1) < value.denominator:
        places += 1  # leading zeros are no digits
    digits = str(round(value * 10**places)).rjust(places + 1, "0")  # half to even
    integer, decimals = digits[:-places], digits[-places:].rstrip("0")
    return f"{sign}{integer}.{decimals}" if decimals else f"{sign}{integer}"


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant):
        digits = text[node.col_offset : node.end_col_offset]
        exponent = digits.lower().partition("e")[2]
        if exponent and abs(int(exponent)) > _MAX_EXPONENT:
            raise ValueError(f"the exponent of {digits} is larger than {_MAX_EXPONENT}")
        return _bounded(Fraction(digits))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp):
        raise ValueError("an expression has numbers, + - * / // % ** and parentheses only")
    left, right = _value(node.left, text), _value(node.right, text)
    if isinstance(node.op, ast.Pow):
        return _power(left, right)
    if type(node.op) not in _OPERATORS:
        raise ValueError("an expression has numbers, + - * / // % ** and parentheses only")
    return _bounded(_OPERATORS[type(node.op)](left, right))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("the exponent of ** must be an integer")
    if abs(exponent) > _MAX_EXPONENT or _bits(base) * abs(exponent) > _MAX_BITS:
        # 0, 1 and -1 stay small.
        if base in (0, 1, -1) and not (base == 0 and exponent < 0):
            return base if base != -1 or exponent % 2 else Fraction(1)
        raise ValueError("the power is too large")
    return _bounded(base ** int(exponent))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > _MAX_BITS:
        raise ValueError("a number is too large")
    return value
