"""Counts the pairs of answers that `boxed_math` and math-verify alone grade wrongly.

python -m benchmarks.mathematics --save       # measure
python -m benchmarks.rewards_page             # write the figures into docs/rewards.md

The pairs are those of tests/golden/mathematics.json. Each is graded in both directions: one text in
the box of a reply, the other as the right answer. math-verify is called as its documentation does:
`verify(parse(answer), parse(reply))`, with the answer between dollar signs.
"""

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from benchmarks import harness
from benchmarks.worker import cpu_name, package_versions
from jaxrl_llm import rewards

PAIRS = harness.ROOT / "tests" / "golden" / "mathematics.json"


def pairs() -> list[tuple[str, bool, str, str]]:
    """The kind of a pair, whether it is equal, and its two answers."""
    kinds = json.loads(PAIRS.read_text())["kinds"]
    return [
        (kind, verdict == "equal", *pair)
        for kind, verdicts in kinds.items()
        for verdict, rows in verdicts.items()
        for pair in rows
    ]


def ours(answer: str, reply: str) -> bool:
    """The verdict of `boxed_math`."""
    return rewards.boxed_math("", rf"\boxed{{{reply}}}", {"answer": answer}) == 1.0


def alone(answer: str, reply: str) -> bool:
    """The verdict of math-verify as its users call it."""
    from math_verify import parse, verify

    gold = answer if "$" in answer or r"\(" in answer else f"${answer}$"
    target = parse(rf"\boxed{{{reply}}}", parsing_timeout=None)
    return bool(verify(parse(gold, parsing_timeout=None), target, timeout_seconds=None))


def graded(verdict: Callable[[str, str], bool]) -> dict[str, Any]:
    """What a grader makes of all pairs, in both directions."""
    false_positives, false_negatives, asymmetric = [], [], []
    verdict("1", "2")  # imports
    start = time.perf_counter()
    for kind, is_equal, a, b in pairs():
        both = verdict(a, b), verdict(b, a)
        if both[0] != both[1]:
            asymmetric.append([kind, a, b])
        for found, (answer, reply) in zip(both, ((a, b), (b, a)), strict=True):
            if found and not is_equal:
                false_positives.append([kind, answer, reply])
            elif is_equal and not found:
                false_negatives.append([kind, answer, reply])
    seconds = time.perf_counter() - start
    return {
        "false_positives": false_positives,
        "false_negatives": false_negatives,
        "asymmetric": asymmetric,
        "milliseconds_per_call": round(1000 * seconds / (2 * len(pairs())), 2),
    }


def main(argv: list[str] | None = None) -> None:
    """Grade all pairs and print one JSON line last."""
    options = harness.parser(__doc__.splitlines()[0]).parse_args(argv)
    if options.peer_python is not None or options.gguf is not None:
        raise SystemExit("benchmarks.mathematics runs no model and its peer is a dependency.")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    result = {
        "name": "mathematics",
        "workload": {"pairs": len(pairs()), "kinds": len({kind for kind, *_ in pairs()})},
        "device": cpu_name(),
        "versions": {"ours": package_versions(("jaxrl_llm", "math-verify"))},
        "commit": harness.commit(),
        "graders": {"boxed_math": graded(ours), "math-verify alone": graded(alone)},
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
