"""Curves as SVG text that a page embeds, without scripts, files or fonts."""

import math
import unicodedata
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 10, 24
_MOST_POINTS = 180
_COLORS = 6


class Series(NamedTuple):
    """One curve."""

    name: str  # in the legend
    points: Sequence[tuple[float, float | None]]  # (step, value); None if non-finite
    # Lower and upper ends, in the order of the points; empty for a plain curve.
    intervals: Sequence[tuple[float | None, float | None]] = ()


def text(value: object) -> str:
    r"""Any text as HTML that shows it, with control and direction characters made visible.

    Example:
      >>> from jaxrl_llm.train.logging.charts import text
      >>> print(text("<b> \x00"))
      &lt;b&gt; \x00
    """
    # Cc: control, Cf: format, such as a change of direction, Cs: half of a character. Joiners of
    # emoji and of scripts that need them are text.
    hidden, joiners = ("Cc", "Cf", "Cs", "Co", "Cn"), "\n\t\u200c\u200d"
    return "".join(
        ascii(c)[1:-1] if unicodedata.category(c) in hidden and c not in joiners else c
        for c in escape(str(value))
    )


def number(value: float | None) -> str:
    """A number to read: four digits, thousands and millions by letter.

    Example:
      >>> from jaxrl_llm.train.logging.charts import number
      >>> number(0.123456), number(1234567.0), number(None)
      ('0.1235', '1.235M', 'non-finite')
    """
    if value is None or not math.isfinite(value):
        return "non-finite"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"


def ticks(low: float, high: float, *, most: int = 5) -> list[float]:
    """Round numbers within a range: multiples of 1, 2 or 5 times a power of ten.

    Example:
      >>> from jaxrl_llm.train.logging.charts import ticks
      >>> ticks(0.0, 1.0)
      [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    unit = next(power * m for m in (1, 2, 5, 10, 20) if (high - low) / (power * m) <= most)
    first, last = math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9)
    digits = max(0, 1 - math.floor(math.log10(unit)))
    return [round(i * unit, digits) for i in range(first, last + 1)]


class _Bucket(NamedTuple):
    """Neighboring points as one: position, mean, minimum, maximum and count."""

    x: float
    mean: float
    low: float
    high: float
    count: int


def axis_limits(values: Sequence[float]) -> tuple[float, float]:
    """Minimum and maximum of an axis, never equal, with a small margin."""
    low, high = min(values), max(values)
    room = (high - low) / 20
    if low + room == low:  # all but equal
        pad = max(abs(low) / 2, 1e-12) if low else 0.5
        return low - pad, high + pad
    within = low >= 0 and low - room < 0
    return 0.0 if within else low - room, high + room


def chart(series: Sequence[Series], *, title: str) -> str:
    """Curves over the steps as one SVG; a cross at the bottom marks a non-finite value.

    Long curves are means of neighboring steps, with a band from the least to the greatest. Series
    without any number are only crosses. The title is for readers without the image.
    """
    curves = [(s, [(x, y) for x, y in s.points if _finite(y)]) for s in series]
    values = [y for _, points in curves for _, y in points if y is not None]
    ends = [end for s in series for pair in s.intervals for end in pair]
    values += [end for end in ends if end is not None and _finite(end)]
    steps = [x for s in series for x, _ in s.points]
    low, high = axis_limits(values or [0.0, 1.0])
    first, last = (min(steps), max(steps)) if steps else (0.0, 1.0)
    if first == last:
        first, last = first - 1, last + 1

    def place_x(x: float) -> float:
        return _LEFT + (x - first) / (last - first) * (WIDTH - _LEFT - _RIGHT)

    def place_y(y: float) -> float:
        return HEIGHT - _BOTTOM - (y - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    html = []
    for value in ticks(low, high):
        y = place_y(value)
        html.append(f'<path class="grid" d="M{_LEFT},{y:.1f}H{WIDTH - _RIGHT}"/>')
        html.append(f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" class="end">{number(value)}</text>')
    for value in ticks(first, last, most=6):
        if value == int(value):
            where = f'x="{place_x(value):.1f}" y="{HEIGHT - 8}"'
            html.append(f'<text {where} class="mid">{value:g}</text>')
    for i, (each, points) in enumerate(curves):
        color = f"c{i % _COLORS}"
        if each.intervals:
            shift = 3 * (
                i - len(series) / 2
            )  # so that intervals of one step do not hide each other
            html += _intervals(each, color, lambda x, d=shift: place_x(x) + d, place_y)
        else:
            html += _curve(each, points, color, place_x, place_y)
        lost = [x for x, y in each.points if not _finite(y)]
        for x in lost[:: max(1, len(lost) // _MOST_POINTS)]:
            bottom = HEIGHT - _BOTTOM
            html.append(
                f'<path class="lost" d="M{place_x(x) - 3:.1f},{bottom - 3}l6,6m0,-6l-6,6">'
                f"<title>{text(each.name)}, step {x:g}: non-finite</title></path>"
            )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(title)}">'
        f"{''.join(html)}</svg>"
    )


def _finite(value: float | None) -> bool:
    """Whether a number can be drawn; beyond 1e300 differences overflow."""
    return value is not None and abs(value) < 1e300


def _curve(series: Series, points, color: str, place_x, place_y) -> list[str]:
    """A line, broken at non-finite values, with a tooltip for each bucket."""
    buckets, html = [], []
    size = max(-(-len(points) // _MOST_POINTS), 1)
    for i in range(0, len(points), size):
        steps, values = zip(*points[i : i + size], strict=True)
        middle, mean = sum(steps) / len(steps), math.fsum(values) / len(values)
        buckets.append(_Bucket(middle, mean, min(values), max(values), len(values)))
    if any(b.count > 1 for b in buckets):
        upper = [f"{place_x(b.x):.1f},{place_y(b.high):.1f}" for b in buckets]
        lower = [f"{place_x(b.x):.1f},{place_y(b.low):.1f}" for b in reversed(buckets)]
        html.append(f'<polygon class="band f{color}" points="{" ".join(upper + lower)}"/>')
        lines = [buckets]
    else:
        lines, line = [], []
        for x, y in series.points:
            if y is not None and _finite(y):
                line.append(_Bucket(x, y, y, y, 1))
            elif line:
                lines, line = [*lines, line], []
        lines = [*lines, line] if line else lines
    for line in lines:
        path = "L".join(f"{place_x(b.x):.1f},{place_y(b.mean):.1f}" for b in line)
        html.append(f'<path class="line s{color}" d="M{path}"/>')
    dot = 2 if len(buckets) <= 40 else 0
    for b in buckets:
        x, y = place_x(b.x), place_y(b.mean)
        if dot:
            html.append(f'<circle class="f{color}" cx="{x:.1f}" cy="{y:.1f}" r="{dot}"/>')
        about = f"step {b.x:g}" if b.count == 1 else f"{b.count} steps around {b.x:.0f}"
        html.append(
            f'<circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="5">'
            f"<title>{text(series.name)}, {about}: {number(b.mean)}</title></circle>"
        )
    return html


def _intervals(series: Series, color: str, place_x, place_y) -> list[str]:
    """Dots with the interval of each, if it has one."""
    html = []
    for (step, value), (low, high) in zip(series.points, series.intervals, strict=True):
        if not _finite(value):
            continue
        x, about, whisker = place_x(step), f"step {step:g}: {number(value)}", ""
        if _finite(low) and _finite(high):
            top, bottom = place_y(high), place_y(low)
            about += f" [{number(low)}, {number(high)}]"
            whisker = (
                f'<path d="M{x:.1f},{top:.1f}V{bottom:.1f}M{x - 4:.1f},'
                f'{top:.1f}h8M{x - 4:.1f},{bottom:.1f}h8"/>'
            )
        html.append(
            f'<g class="s{color} whisker">{whisker}'
            f'<circle class="f{color}" cx="{x:.1f}" cy="{place_y(value):.1f}" r="3.5">'
            f"<title>{text(series.name)}, {about}</title></circle></g>"
        )
    return html
