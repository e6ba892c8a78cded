"""The numbers of docs/same_name_different_number.md are those of the golden data."""

import documented
import numpy as np
from rows import for_each

PAGE = documented.PAGE.read_text(encoding="utf-8")
TABLES = {m[2]: m[3] for m in documented.TABLE.finditer(PAGE)}


def rows(text):
    cells = [line.strip("|").split("|") for line in text.splitlines()[2:]]
    return {who.strip(): float(number) for who, number in cells}


def test_every_example_has_its_table():
    assert set(TABLES) == set(documented.examples())


@for_each("name", sorted(TABLES))
def test_numbers_of_the_page(name):
    written, computed = rows(TABLES[name]), rows(documented.table(documented.examples()[name]))
    assert written.keys() == computed.keys()
    pair = list(written.values()), list(computed.values())
    np.testing.assert_allclose(*pair, rtol=2e-4, atol=1e-7)


@for_each("name", sorted(TABLES))
def test_the_numbers_are_different(name):
    numbers = list(rows(TABLES[name]).values())
    assert np.ptp(numbers) > 1e-4 * np.max(np.abs(numbers))
