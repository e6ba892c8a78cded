"""Writes docs/estimators.md from the results of benchmarks.estimators.

python -m benchmarks.estimators_page            # write
python -m benchmarks.estimators_page --check    # exit 1 if it would change anything
"""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import RESULTS, ROOT

PAGE = ROOT / "docs" / "estimators.md"

_HEAD = """# Cost of the estimators

The tables compare the time of each compiled estimator with its floor. The floor is a compiled
program that reads the same inputs once and writes arrays like its outputs once. The two are
measured in turn. "With gradient" is the token loss together with a product of its Jacobian with
respect to `logp`. Its first ratio is relative to the floor of the loss; its last ratio is relative
to a floor that also writes an array like the gradient.

`python -m benchmarks.estimators --save` measures the times, and
`python -m benchmarks.estimators_page` writes this page.
"""


def page() -> str:
    """The whole page."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("estimators-*.json"))]
    return "\n".join([_HEAD, *(section(result) for result in found)])


def section(result: Mapping[str, Any]) -> str:
    """The tables of one device."""
    work, bars = result["workload"], result["bars"]
    rewards, tokens = (" x ".join(map(str, work[name])) for name in ("rewards", "tokens"))
    lines = [
        f"## {result['device']}, jax {result['versions']['jax']}",
        "",
        f"### Token losses, {tokens}, float32",
        "",
        f"The limit for a surrogate is {bars['forward']:g} times its floor, and with its gradient "
        f"{bars['gradient']:g} times the floor of both. {over(result)}",
        "",
        "| function | floor, ms | ms | ratio | with gradient, ms | ratio | to its own floor |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    columns = ("floor_ms", "forward_ms", "forward_ratio", "gradient_ms")
    columns += ("gradient_ratio", "gradient_own_ratio")
    for name, row in result["token_terms"].items():
        cells = [f"{row[column]:g}" if column in row else "" for column in columns]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += [
        "",
        f"### Functions of rewards, {rewards}, float32",
        "",
        "These take microseconds, so the ratio is mostly the cost of a call. Growth is the time of "
        "four times as many groups divided by four times the time: 1 is linear, 4 is quadratic.",
        "",
        "| function | floor, ms | ms | ratio | growth |",
        "| --- | --- | --- | --- | --- |",
    ]
    columns = ("floor_ms", "forward_ms", "forward_ratio", "growth")
    for name, row in result["advantages"].items():
        lines.append(f"| `{name}` | {' | '.join(f'{row[column]:g}' for column in columns)} |")
    return "\n".join([*lines, ""])


def over(result: Mapping[str, Any]) -> str:
    """Which surrogates are above a bar, in words."""
    bars, names = result["bars"], []
    for name, row in result["token_terms"].items():
        if "gradient_ratio" not in row:
            continue
        columns = {"forward": "forward_ratio", "gradient": "gradient_own_ratio"}
        worse = [bar for bar, column in columns.items() if row[column] > bars[bar]]
        if worse:
            names.append(f"`{name}` ({' and '.join(worse)})")
    return f"Above a limit: {', '.join(names)}." if names else "None is above its limit."


def main(argv: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    new = page()
    if PAGE.exists() and PAGE.read_text() == new:
        return 0
    if options.check:
        print(f"{PAGE.name} is out of date: run python -m benchmarks.estimators_page")
        return 1
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
