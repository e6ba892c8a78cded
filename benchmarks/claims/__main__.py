"""Runs claims; writes their results, their plots and docs/claims.md.

Most claims keep one core busy, so several run at a time, those that took longest before first.
"""

import argparse
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
    verdicts, failed = {}, []
    # Before anything is written, which would make the checkout differ.
    commit, began = repository.commit(), time.perf_counter()
    make = functools.partial(harness.result_or_error, commit=commit, quick=chosen.quick)
    for name, result in _results(chosen.names or harness.names(), make, jobs=chosen.jobs):
        if isinstance(result, str):  # the others go on
            _say(f"{name}:\n{result}")
            failed.append(name)
            continue
        verdict = result["verdict"]
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
        if not (chosen.names or failed):
            seconds = time.perf_counter() - began
            table.save_whole(len(verdicts), jobs=chosen.jobs, seconds=seconds, commit=commit)
        table.main([])
    print(json.dumps({"name": "claims", "verdicts": dict(sorted(verdicts.items()))}), flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(sorted(failed))}")


def _results(
    names: Sequence[str], make: Callable[[str], dict[str, Any] | str], *, jobs: int
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """The name of each claim and its result, or its error as text, as they come."""
    if min(jobs, len(names)) <= 1:
        yield from ((name, make(name)) for name in names)
        return
    names = sorted(names, key=harness.seconds_before, reverse=True)
    spawn = multiprocessing.get_context("spawn")  # jax has threads, which a fork does not copy
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        made = {pool.submit(make, name): name for name in names}
        for done in as_completed(made):
            yield made[done], done.result()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
