import random
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from rows import for_each

from jaxrl_llm.environments.arithmetic import calculate


@for_each(
    ("text", "value"),
    [
        ("2 + 3 * 4", "14"),
        (" ( 2 + 3 )\n* 4 ", "20"),
        ("0.1 + 0.2", "0.3"),
        ("1/3*3", "1"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** -3", "0.125"),
        ("10 ** -5", "0.00001"),
        ("1.5e3", "1500"),
        ("-1/3", "-0." + "3" * 30),
        ("2/3", "0." + "6" * 29 + "7"),
        ("0.1234567890123456789012345 * 1", "0.1234567890123456789012345"),
        ("123456789 * 987654321", "121932631112635269"),
        ("(-1) ** 100001", "-1"),
        ("0 ** 0", "1"),
        ("999 / 1000 / 10 ** 40", "0." + "0" * 40 + "999"),
    ],
)
def test_values_are_exact(text, value):
    assert calculate(text) == value


def test_random_expressions_equal_fractions():
    random.seed(1)
    for _ in range(200):
        numbers = [
            random.choice([str(random.randint(0, 99)), f"{random.random():.3f}"]) for _ in "abcd"
        ]
        signs = random.choices(["+", "-", "*"], k=3)
        text = numbers[0] + "".join(map("".join, zip(signs, numbers[1:], strict=True)))
        exact = eval("".join(f"Fraction('{p}')" if p[0].isdigit() else p for p in _split(text)))
        with localcontext(prec=50):
            assert Fraction(Decimal(calculate(text))) == exact


def _split(text):
    for sign in "+-*":
        text = text.replace(sign, f" {sign} ")
    return text.split()


PLAIN = "|a|1 2|1 +|(1)(2)|1, 2|()|1 if 1 else 2|1 < 2|e|1_0|1j|2 ^ 3|\x00|\ud800|２ + ２|1/0"
PLAIN += (
    "|__import__('os').system('ls')|0 ** -1|2 ** 0.5|9 ** 9 ** 9|(2 ** 999) ** 999|1e-999999999"
)
LONG = ["9" * 1001, "(" * 300 + "1" + ")" * 300, "-" * 999 + "1", "*".join(["1e900"] * 20)]


@for_each("text", [*PLAIN.split("|"), "1e999999999", *LONG])
def test_what_is_no_arithmetic_or_too_large_is_refused(text):
    with pytest.raises(ValueError, match="expression|zero|large|exponent"):
        calculate(text)
