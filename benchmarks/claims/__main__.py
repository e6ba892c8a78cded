"""Runs claims; writes their results, their plots and docs/claims.md.

Most claims keep one core busy, so several run at a time, those that took longest before first.
"""

import argparse
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from benchmarks import harness as repository
from benchmarks.claims import harness, table


def main(argv: Sequence[str] | None = None) -> None:
    """Run the claims named, or all, and print one JSON line last."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__)
    options.add_argument("names", nargs="*", metavar="name", help="all without")
    options.add_argument("--quick", action="store_true", help="the tests' form; writes nothing")
    options.add_argument("--jobs", type=int, default=os.cpu_count(), help="claims at a time")
    chosen = options.parse_args(argv)
    unknown = sorted(set(chosen.names) - set(harness.names()))
    if unknown:
        options.error(f"no claim {', '.join(unknown)}; there are {', '.join(harness.names())}")
    verdicts = {}
    for result in _results(chosen.names or harness.names(), chosen.jobs, quick=chosen.quick):
        name, verdict = result["name"], result["verdict"]
        for measure in result["measures"]:
            _say(
                f"{name}: {measure['what']}: {table.number(measure['value'])} "
                f"({table.interval(measure)}), holds {table.condition(measure)}: "
                f"{measure['verdict']}"
            )
        _say(f"{name}: {verdict}, {result['seconds']:.1f} s")
        if not chosen.quick:
            harness.save(result)
        verdicts[name] = verdict
    if not chosen.quick:
        table.main([])
    print(json.dumps({"name": "claims", "verdicts": dict(sorted(verdicts.items()))}), flush=True)


def _results(names: Sequence[str], jobs: int, *, quick: bool) -> Iterator[dict[str, Any]]:
    """The results of claims, as they come."""
    # Before anything is written, which would make the checkout differ.
    commit = repository.commit()
    if min(jobs, len(names)) <= 1:
        yield from (harness.result(name, commit=commit, quick=quick) for name in names)
        return
    names = sorted(names, key=harness.seconds_before, reverse=True)
    spawn = multiprocessing.get_context("spawn")  # jax has threads, which a fork does not copy
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        make = functools.partial(harness.result, commit=commit, quick=quick)
        for done in as_completed([pool.submit(make, name) for name in names]):
            yield done.result()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
