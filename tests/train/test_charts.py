"""Curves as pictures in SVG, which any numbers and any text leave whole."""

import math
import re
from xml.etree import ElementTree

import pytest
from rows import for_each

from jaxrl_llm.train.logging.charts import HEIGHT, WIDTH, Series, chart, number, text, ticks


def drawn(*series, title="t"):
    """A chart as a tree; what is no XML fails here."""
    return ElementTree.fromstring(chart(series, title=title))


def found(tree, kind):
    return [e for e in tree.iter() if kind in e.get("class", "").split()]


def corners(path):
    """The points of a line, in the picture."""
    return [tuple(map(float, p.split(","))) for p in path.get("d")[1:].split("L")]


def titles(tree):
    return [e.text for e in tree.iter("title")]


def test_a_line_goes_where_its_numbers_are():
    tree = drawn(Series("loss", [(0, 0.0), (5, 1.0), (10, 0.5)]))
    (line,) = found(tree, "line")
    (x0, y0), (x1, y1), (x2, y2) = corners(line)
    assert x1 - x0 == pytest.approx(x2 - x1) and y0 > y2 > y1  # up is less
    assert y0 - y2 == pytest.approx(y2 - y1, abs=0.11)
    assert 0 < x0 < x2 < WIDTH and 0 < y1 < y0 < HEIGHT
    assert titles(tree) == ["loss, step 0: 0", "loss, step 5: 1", "loss, step 10: 0.5"]
    assert tree.get("role") == "img" and tree.get("aria-label") == "t"
    labels = [e.text for e in tree.iter("text")]
    assert labels == ["0", "0.5", "1", "0", "2", "4", "6", "8", "10"]


def test_what_is_no_number_breaks_the_line_and_is_marked():
    nan = float("nan")
    tree = drawn(Series("x", [(1, 1.0), (2, 2.0), (3, None), (4, nan), (5, 3.0), (6, 2.0)]))
    assert [len(corners(line)) for line in found(tree, "line")] == [2, 2]
    assert len(found(tree, "lost")) == 2
    assert "x, step 3: non-finite" in titles(tree)
    tree = drawn(Series("x", [(1, None), (2, math.inf)]))
    assert not found(tree, "line") and len(found(tree, "lost")) == 2


@for_each(
    "points",
    [
        [],
        [(1, 3.0), (2, 3.0)],
        [(1, 1e301), (2, 1.0)],
        [(1, 5e-324), (2, 0.0)],
        [(1, 1.0), (2, 1.0 + 2**-52)],
        [(7, -2.0), (7, -3.0)],
        [(1, -5), (10**9, 5)],
    ],
)
def test_any_numbers_can_be_drawn(points):
    tree = drawn(Series("x", points))
    assert "nan" not in ElementTree.tostring(tree, "unicode")
    for line in found(tree, "line"):
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in corners(line))


def test_a_long_curve_is_means_with_a_band_around_them():
    points = [(i, float(i % 2)) for i in range(100_000)]
    tree = drawn(Series("x", points))
    (line,) = found(tree, "line")
    assert len(corners(line)) <= 180 and len(chart([Series("x", points)], title="t")) < 60_000
    _, y = corners(line)[7]
    (band,) = found(tree, "band")
    heights = {p.split(",")[1] for p in band.get("points").split()}
    assert len(heights) == 2  # from all the zeros to all the ones
    low, high = sorted(map(float, heights))
    assert low < y < high and "556 steps around" in titles(tree)[0]
    # A single value that is far out stays to be seen.
    spike = drawn(Series("x", [(i, 1e3 * (i == 700)) for i in range(2000)]))
    assert any(e.text == "1000" for e in spike.iter("text"))


def test_intervals_beside_a_curve():
    curve = Series("batch", [(0, 0.2), (10, 0.4)])
    dots = Series("held out", [(0, 0.3), (10, 0.5)], [(0.1, 0.4), (0.4, 0.9)])
    lost = Series("lost", [(0, None)], [(0.1, 0.4)])
    bare = Series("bare", [(0, 0.3)], [(None, None)])  # one question has no interval
    tree = drawn(curve, dots, lost, bare)
    whiskers = found(tree, "whisker")
    assert [len(each.findall("path")) for each in whiskers] == [1, 1, 0]
    assert "sc1" in whiskers[0].get("class").split() and "bare, step 0: 0.3" in titles(tree)
    assert "held out, step 10: 0.5 [0.4, 0.9]" in titles(tree)
    labels = [e.text for e in tree.iter("text")]
    assert "0.8" in labels  # the ends are within the picture


def test_text_is_shown_and_not_done():
    assert text("a < b & 'c'\n\t\"d\"") == "a &lt; b &amp; &#x27;c&#x27;\n\t&quot;d&quot;"
    assert text("\x00\x1b[31m\u202e\ud83d\r") == r"\x00\x1b[31m\u202e\ud83d\r"
    assert text("数学 é 👩\u200d👧 ى") == "数学 é 👩\u200d👧 ى"
    assert text(None) == "None"
    tree = drawn(Series("</svg><script>", [(1, 1.0)]), title='"><script>')
    assert tree.get("aria-label") == '"><script>' and not list(tree.iter("script"))
    text("".join(map(chr, range(0x3000)))).encode()  # never half a character


def test_round_numbers():
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(-3.0, 7.0) == [-2.0, 0.0, 2.0, 4.0, 6.0]
    assert ticks(1.0, 1.0) == [1.0]
    for low, high in ((0.0, 3e-7), (-1e12, 5e13), (99.0, 101.0), (0.123, 0.124)):
        marks = ticks(low, high)
        assert 2 <= len(marks) <= 6 and low <= marks[0] and marks[-1] <= high
        assert len({number(x) for x in marks}) == len(marks)


def test_numbers_to_read():
    values = (0.0, 0.012345, 2e-5, 9999.0, 12345.0, -1.5e6, 3.2e9, 9.89e14)
    texts = ["0", "0.01235", "2e-05", "9999", "12.35k", "-1.5M", "3.2G", "989T"]
    assert [*map(number, values)] == texts
    assert number(math.nan) == number(None) == "non-finite"


def test_a_picture_holds_nothing_from_elsewhere():
    picture = chart([Series("x", [(1, 1.0), (2, None)])], title="t")
    assert not re.search(r"href|src|url\(|http|<script|<image|<foreignObject", picture)
