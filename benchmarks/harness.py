"""Starts workers, runs them in turn, and turns seconds into the one JSON form of every benchmark.

    {"name", "workload", "device", "versions", "commit", "ours": {figures},
     "peers": {peer: {figures}}, "ratios": {peer: x}}

A ratio above one means that ours is faster. A figure is {"median", "min", "max"} over the runs,
except `peak_memory_bytes` and `compile_seconds` (the warm-up less as many median runs), which are
single numbers.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.worker import WARM_UPS, jax_device_name, package_versions

ROOT = Path(__file__).resolve().parents[1]
# Tests set the variable to the results that git tracks.
RESULTS = Path(os.environ.get("JAXRL_LLM_RESULTS") or ROOT / "benchmarks" / "results")
MIN_ROUNDS = 5


class WorkerError(RuntimeError):
    """A worker process ended or answered something else than it was asked."""


class Worker:
    """A measured process: `python -m module`, idle except while it answers `run`."""

    def __init__(self, python: str, module: str, workload: Mapping[str, Any]):
        self.module = module
        # On an accelerator: memory as it is needed, beside the others; float32 as torch means it.
        environment = dict(
            os.environ,
            PYTHONPATH=str(ROOT),
            TOKENIZERS_PARALLELISM="false",
            XLA_PYTHON_CLIENT_PREALLOCATE="false",
            JAX_DEFAULT_MATMUL_PRECISION="highest",
        )
        self._process = subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        try:
            self._send(workload)
            self.ready = self._receive("ready")
        except BaseException:
            self.kill()
            raise

    def _send(self, message: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise WorkerError(f"{self.module} has no stdin")
        stdin.write(json.dumps(message) + "\n")
        stdin.flush()

    def _receive(self, event: str) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise WorkerError(
                f"{self.module} ended with code {self._process.wait()} before {event!r}; "
                "its own message is above"
            )
        message = json.loads(line)
        if message.get("event") != event:
            raise WorkerError(f"{self.module} answered {message.get('event')!r}, not {event!r}")
        return message

    def run(self, seed: int) -> float:
        """Seconds of one run."""
        self._send({"command": "run", "seed": seed})
        return self._receive("done")["seconds"]

    def close(self) -> int:
        """End the process and return its peak memory in bytes."""
        self._send({"command": "close"})
        peak = self._receive("closed")["peak_memory_bytes"]
        self._process.wait()
        return peak

    def kill(self) -> None:
        """End the process at once and close its pipes; harmless when it has ended."""
        if self._process.poll() is None:
            self._process.kill()
        # Reaps the process and closes what it was connected by.
        with contextlib.suppress(BrokenPipeError), self._process:
            pass


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum, rounded to four significant digits."""
    return {
        name: float(f"{function(values):.4g}")
        for name, function in (("median", statistics.median), ("min", min), ("max", max))
    }


def figures(
    seconds: Sequence[float], *, tokens: int, warm_up_seconds: float, peak_memory_bytes: int
) -> dict[str, Any]:
    """The figures of one worker.

    Args:
        seconds: One value a run.
        tokens: Tokens that a run makes or trains on.
        warm_up_seconds: Seconds of the runs that compiled, together.
        peak_memory_bytes: As the worker measured it.
    """
    compile_seconds = max(0.0, warm_up_seconds - WARM_UPS * statistics.median(seconds))
    return {
        "seconds": summary(seconds),
        "tokens_per_s": summary([tokens / value for value in seconds]),
        "compile_seconds": float(f"{compile_seconds:.3g}"),
        "peak_memory_bytes": peak_memory_bytes,
    }


def check_agreement(checks: Mapping[str, Sequence], *, tolerance: float, share: float) -> None:
    """Raise unless every worker computes what the first one does.

    Args:
        checks: For each worker, numbers that depend on the weights and the inputs.
        tolerance: Relative difference that still counts as equal.
        share: Part of the numbers that must be equal.
    """
    (first, expected), *others = checks.items()
    for name, numbers in others:
        if len(numbers) != len(expected):
            raise WorkerError(f"{name} checks {len(numbers)} numbers and {first} {len(expected)}")
        near = [
            abs(a - b) <= tolerance * max(abs(a), abs(b))
            for a, b in zip(numbers, expected, strict=True)
        ]
        if sum(near) < share * len(near):
            raise WorkerError(
                f"{name} and {first} do not compute the same: {sum(near)} of {len(near)} numbers "
                f"agree ({list(numbers)[:4]} against {list(expected)[:4]})"
            )


def short(commit: str) -> str:
    """A commit as pages name it, with "-dirty" if the checkout had changes.

    Example:
        >>> short("fef92bc53bd3-dirty")
        'fef92bc-dirty'
    """
    number, dash, state = commit.partition("-")
    return f"{number[:7]}{dash}{state}"


def commit(checkout: Path = ROOT) -> str:
    """The commit of a checkout, "-dirty" when files are changed; "unknown" without git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"],
            cwd=checkout,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def measure(
    name: str,
    *,
    workload: Mapping[str, Any],
    private: Mapping[str, Any],
    ours: str,
    peers: Mapping[str, str],
    peer_python: str | None,
    rounds: int,
    tokens: int,
    tolerance: float = 0.0,
    tolerances: Mapping[str, float] | None = None,
    share: float = 1.0,
) -> dict[str, Any]:
    """Run ours in turn with each peer (A B A B ..., then A C A C ...) and return the result.

    One peer is in memory at a time, beside ours; a ratio compares the runs of one turn.

    Args:
        name: Of the benchmark.
        workload: What is run; it becomes part of the result.
        private: Also sent to the workers, but left out of the result: paths, prompts.
        ours: Module of our worker, run in this Python.
        peers: Module of each peer's worker by name, run in `peer_python`.
        peer_python: A Python that has the peers, or None to measure ours alone.
        rounds: Runs of each peer after the warm-up, and of ours beside each.
        tokens: Tokens of a run.
        tolerance: See `check_agreement`.
        tolerances: Those of peers that have one of their own.
        share: See `check_agreement`.
    """
    message = {**workload, **private}
    others = {} if peer_python is None else dict(peers)
    workers: dict[str, Worker] = {}
    seconds: dict[str, list[float]] = {}
    measured: dict[str, dict[str, Any]] = {}
    ratios: dict[str, float] = {}

    def start(worker: str, python: str, module: str) -> None:
        _say(f"{worker}: loads and warms up")
        workers[worker], seconds[worker] = Worker(python, module, message), []

    def end(worker: str) -> None:
        measured[worker] = figures(
            seconds[worker],
            tokens=tokens,
            warm_up_seconds=workers[worker].ready["warm_up_seconds"],
            peak_memory_bytes=workers[worker].close(),
        )

    def turns(names: Sequence[str]) -> None:
        for seed in range(1, rounds + 1):
            for worker in names:
                seconds[worker].append(workers[worker].run(seed))
                _say(f"{worker}: run {seed} of {rounds}, {seconds[worker][-1]:.3g} s")

    try:
        start("ours", sys.executable, ours)
        for peer, module in others.items():
            start(peer, str(peer_python), module)
            checks = {worker: workers[worker].ready["check"] for worker in ("ours", peer)}
            allowed = (tolerances or {}).get(peer, tolerance)
            check_agreement(checks, tolerance=allowed, share=share)
            turns(("ours", peer))
            beside = statistics.median(seconds["ours"][-rounds:])
            ratios[peer] = float(f"{statistics.median(seconds[peer]) / beside:.3g}")
            end(peer)
        if not others:
            turns(("ours",))
        end("ours")
    finally:
        for process in workers.values():
            process.kill()
    return {
        "name": name,
        "workload": {**workload, "runs": rounds},
        "device": workers["ours"].ready["device"],
        "versions": {worker: process.ready["versions"] for worker, process in workers.items()},
        "commit": commit(),
        "ours": measured.pop("ours"),
        "peers": measured,
        "ratios": ratios,
    }


def save(result: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write a result to NAME-DEVICE.json and return where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['name']}-{result['device']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def of_ours(name: str, workload: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a benchmark that has no peers and ran in this process or its children."""
    return {
        "name": name,
        "workload": workload,
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "jaxrl_llm"))},
        "commit": commit(),
        "ours": ours,
        "peers": {},
        "ratios": {},
    }


def finish(result: Mapping[str, Any], *, to_file: bool) -> None:
    """Save the result where asked, and print it as the last line."""
    if to_file:
        _say(f"saved {save(result)}")
    print(json.dumps(result), flush=True)


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--peer-python", help="a Python that has the peers; ours alone without")
    options.add_argument(
        "--gguf", help="SmolLM2-135M-Instruct as a .gguf file; found by name without"
    )
    options.add_argument("--rounds", type=_rounds, default=MIN_ROUNDS, help="runs of each worker")
    options.add_argument("--tiny", action="store_true", help="a small random model, for tests")
    options.add_argument("--save", action="store_true", help="write benchmarks/results")
    return options


def refuse_peers(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the command if it was given peers or a model, which one with random weights ignores."""
    if options.peer_python or options.gguf:
        parser.error("weights are random and there are no peers: no --gguf, no --peer-python")


def checkouts(before: Path | None) -> dict[str, Path]:
    """The folders of the code that is compared: this one, and the one before if there is one."""
    return {"now": ROOT} if before is None else {"now": ROOT, "before": before}


def options_beside(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of a benchmark whose children run the code of this checkout and another's.

    A child has ``child``, the request that :func:`run_child` gives it.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a small random model, for tests")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument("--child", type=json.loads, help="used by the command itself")
    options = parser.parse_args(argv)
    if options.save and options.before is None:
        parser.error("--save needs --before: the page compares the two")
    return options


def run_child(script: str, request: Mapping[str, Any], checkout: Path, **environment: str) -> Any:
    """The JSON that ``script --child REQUEST`` prints, in a process with the code of a checkout."""
    run = subprocess.run(
        [sys.executable, str(Path(script).resolve()), "--child", json.dumps(request)],
        env=os.environ | {"PYTHONPATH": str(checkout.resolve())} | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(run.stdout)


def _rounds(text: str) -> int:
    rounds = int(text)
    if rounds < MIN_ROUNDS:
        raise argparse.ArgumentTypeError(f"a median needs at least {MIN_ROUNDS} runs, not {rounds}")
    return rounds


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
