"""Milliseconds to run a program in the sandbox, and how many runs a second all cores make.

python -m benchmarks.sandbox --save

The program reads a number and prints its double. ``alone`` is one run after another, ``together``
as many at one time as there are cores, ``asserts`` a reward of three assertions, which starts two
sandboxes. ``python`` is the same program in a bare process, without any protection.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks import harness
from benchmarks.worker import cpu_name, package_versions
from jaxrl_llm import rewards

SIZES = {"runs": 40}
TINY = {"runs": 2}
PROGRAM = "print(2 * int(input()))"
ASSERTS = {"tests": [f"assert double({n}) == {2 * n}" for n in range(3)]}
REPLY = "```python\ndef double(x):\n    return x + x\n```"


def sandboxed() -> None:
    """One run, checked."""
    result = rewards.run_python(PROGRAM, stdin="21")
    if result.stdout != "42\n":
        raise SystemExit(f"the sandbox answers {result}")


def bare() -> None:
    """The same without a sandbox."""
    subprocess.run([sys.executable, "-S", "-c", PROGRAM], input=b"21", capture_output=True)


def asserts() -> None:
    """One reward, checked."""
    if rewards.code_asserts("", REPLY, ASSERTS)["reward"] != 1.0:
        raise SystemExit("the assertions fail")


def milliseconds(call: Callable[[], None], count: int) -> list[float]:
    """Of each of several calls, one after another."""
    values = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        values.append(1000.0 * (time.perf_counter() - start))
    return values


def per_second(call: Callable[[], None], count: int, threads: int) -> float:
    """Calls a second of several threads."""
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        list(pool.map(lambda _: call(), range(count)))
        return count / (time.perf_counter() - start)


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    options = harness.parser(__doc__.splitlines()[0]).parse_args(argv)
    if options.peer_python is not None or options.gguf is not None:
        raise SystemExit("benchmarks.sandbox runs no model and has no peers.")
    count, cores = (TINY if options.tiny else SIZES)["runs"], os.cpu_count() or 1
    version = rewards.check_sandbox()
    spent: dict[str, list[float]] = {"alone": [], "asserts": [], "python": []}
    rates: list[float] = []
    for _ in range(options.rounds):
        for name, call in (("alone", sandboxed), ("asserts", asserts), ("python", bare)):
            spent[name] += milliseconds(call, count)
        rates.append(per_second(sandboxed, 2 * count, cores))
    result = {
        "name": "sandbox",
        "workload": {"program": PROGRAM, "runs": count, "rounds": options.rounds, "threads": cores},
        "device": cpu_name(),
        "versions": {"ours": {**package_versions(("jaxrl_llm",)), "sandbox": version}},
        "commit": harness.commit(),
        "milliseconds": {name: harness.summary(values) for name, values in spent.items()},
        "together_per_second": harness.summary(rates),
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
