"""Kills a run with SIGKILL at random moments, resumes it, and compares it with one that was not.

    python tests/faults/killing.py --kills 20

``--kind`` and ``--mesh`` choose among the runs of kinds.py. A moment is drawn evenly over what a
run takes from its first step, when its programs are compiled, to the end of its last checkpoint.
The moments of a run that is resumed begin with its first step too; else none would come further.
Each killed run is resumed until it ends; then the next one begins, until as many kills have been
made. Of every run that ends, the final state must equal that of the run that was not killed bit for
bit, and so must each completion, each number of each step and evaluation, and which checkpoint is
the best.
"""

import argparse
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE), str(HERE.parent / "train")]

from kinds import (  # noqa: E402
    KINDS,
    MESHES,
    PROCESSES,
    ROUNDED,
    STEPS,
    TIMED,
    count_devices,
    make_config,
)
from tiny_run import without_plot  # noqa: E402

from jaxrl_llm.core.runtime import processes  # noqa: E402
from jaxrl_llm.train import Checkpoints, ReportConfig, train  # noqa: E402

# Seconds: without a sign of a process, and until the others of a dead one must have ended.
SILENCE, PATIENCE = 30, 300.0
# By how much the numbers of kinds.ROUNDED may differ.
ROUNDING = 1e-5


class Ended(NamedTuple):
    """What a run that came to its end said, and when (time.time) its moments began."""

    digest: str
    began: float


class Tally(NamedTuple):
    """How often what happened.

    Attributes:
      kills: Processes that were killed.
      runs: Runs that came to their end after at least one kill.
      writing: Kills that left a checkpoint unfinished.
      resumed: Starts from a checkpoint.
    """

    kills: int
    runs: int
    writing: int
    resumed: int


class Begun:
    """Says when a process has made its first step, by which its programs are compiled."""

    def __init__(self, run):
        self.first, self.said = run.first, False

    def write(self, step, numbers) -> None:
        """Says it once."""
        if step > self.first and not self.said:
            self.said = True
            print("begun", flush=True)

    def close(self) -> None:
        """Nothing is left to do."""


def child(folder: Path, kind: str, mesh: str, *, process: int, port: int) -> None:
    """The run itself, in a process of its own, with --resume as a scheduler always gives it."""
    if (count := PROCESSES.get(mesh, 1)) > 1:
        processes.start(f"localhost:{port}", count, process, silence=SILENCE)
    without_plot()
    report = ReportConfig(sinks=(Begun,), peak_flops=1e12)
    state = train(make_config(folder, kind, mesh, report=report), resume=True).state
    # Frozen weights are in no checkpoint.
    arrays = state._replace(key=jax.random.key_data(state.key), base=(), data_cursor=())
    arrays = processes.to_host(arrays)
    digest = hashlib.sha256(repr((int(state.step), tuple(state.data_cursor))).encode())
    for leaf in jax.tree.leaves(arrays):
        digest.update(np.asarray(leaf).tobytes())
    print(f"ended {digest.hexdigest()}", flush=True)
    processes.finish()


def environment(cache: Path, *, devices: int = 1) -> dict[str, str]:
    """Variables of a process on CPU devices."""
    return dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        JAX_NUM_CPU_DEVICES=str(devices),
        JAX_COMPILATION_CACHE_DIR=str(cache),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        MPLBACKEND="Agg",
    )


def start(folder: Path, cache: Path, kind: str, mesh: str) -> list[subprocess.Popen]:
    """The processes of a run, each of which runs :func:`child`.

    Their programs are kept in a cache of their own: one that is killed may leave half of an entry.
    """
    count = PROCESSES.get(mesh, 1)
    variables = environment(cache, devices=sum(count_devices(kind, mesh)) // count)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--child", str(folder), "--kind", kind, "--mesh", mesh]
    command += ["--port", str(port)]
    # Where one of several dies, the others tell it at length.
    quiet = {"stderr": subprocess.DEVNULL} if count > 1 else {}
    return [
        subprocess.Popen(
            [*command, "--process", str(index)],
            env=variables,
            stdout=subprocess.DEVNULL if index else subprocess.PIPE,
            text=True,
            **quiet,
        )
        for index in range(count)
    ]


def follow(
    run: list[subprocess.Popen], *, kill_after: float | None = None, victim: int = 0
) -> Ended | None:
    """Waits for the end of a run, or kills one of its processes; None if it did.

    Args:
      run: From :func:`start`.
      kill_after: Seconds after its moments began.
      victim: Which process is killed; the others must then end by themselves.

    Raises:
      AssertionError: If others go on.
      RuntimeError: If it fails by itself.
    """
    first, said = run[0], None
    if first.stdout is None:
        raise RuntimeError("the process has no output")
    try:
        with first.stdout as lines:
            for line in lines:
                if line.startswith(("begun", "ended")):
                    said = line.split()
                    break
            began = time.time()
            if kill_after is not None and said == ["begun"]:
                try:
                    run[victim].wait(kill_after)
                except subprocess.TimeoutExpired:
                    run[victim].kill()
                    for each in run:
                        each.wait(PATIENCE)
                    return None
            said = [line.split() for line in lines if line.startswith("ended")] or [said]
        codes = [each.wait(PATIENCE) for each in run]
    except subprocess.TimeoutExpired as error:
        raise AssertionError("a process goes on though another one has ended") from error
    finally:
        for each in run:
            each.kill()
            each.wait()
    if any(codes) or said[0] is None or len(said[0]) != 2:
        raise RuntimeError(f"the run failed by itself, with codes {codes}")
    return Ended(said[0][1], began)


def unfinished(folder: Path) -> bool:
    """Whether a checkpoint was being written."""
    return any((folder / "checkpoints").glob("*.unfinished*"))


def told(folder: Path, name: str) -> list[dict]:
    """The lines of a file of a run, without what depends on time; of pairs there is no sample."""
    if not (folder / name).exists():
        return []
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    timed = ("seconds", "per_second", "mfu")
    return [{k: v for k, v in row.items() if not any(t in k for t in timed)} for row in rows]


def questions(folder: Path) -> dict[int, list[str]]:
    """The questions of each step, in order."""
    steps: dict[int, list[str]] = {}
    for row in told(folder, "samples.jsonl"):
        steps.setdefault(row["step"], []).append(row["prompt"])
    return steps


def best(folder: Path) -> int | None:
    """The step of the best checkpoint."""
    model: Any = None  # none is read
    return Checkpoints(folder / "checkpoints", model=model, best="greedy").best_step()


def differ(name: str, a: Any, b: Any, kind: str) -> bool:
    """Whether a number of two runs differs by more than it may."""
    if name in ROUNDED.get(kind, ()) and a is not None and b is not None:
        return abs(a - b) > ROUNDING
    return a != b


def check(folder: Path, ended: Ended, expected: Path, whole: Ended, *, kind: str) -> None:
    """Raises AssertionError unless a run that was killed left what one that was not left.

    Where rollouts are sampled ahead, which weights sample them depends on time: then only the
    questions are compared, of which none may be lost or used twice.
    """
    assert questions(folder) == questions(expected), "a question was lost or used twice"
    if kind in TIMED:
        return
    assert best(folder) == best(expected), "another checkpoint is the best"
    for name in ("samples.jsonl", "metrics.jsonl"):
        rows, wanted = told(folder, name), told(expected, name)
        assert len(rows) == len(wanted), f"{name} has {len(rows)} lines, not {len(wanted)}"
        for row, other in zip(rows, wanted, strict=True):
            names = {k for k in row | other if differ(k, row.get(k), other.get(k), kind)}
            assert not names, f"{name} differs in {names} of step {row['step']}"
    assert ended.digest == whole.digest, "the final states differ"


def torture(
    folder: Path,
    *,
    kills: int,
    seed: int = 0,
    kind: str = "one batch at a time",
    mesh: str = "one device",
    say=print,
) -> Tally:
    """Kills and resumes runs until there were so many kills, and checks every run that ended.

    Args:
      folder: For the runs; empty.
      kills: How many processes to kill.
      seed: Of the moments.
      kind: Of the run, one of ``kinds.KINDS``.
      mesh: Its devices, one of ``kinds.MESHES``.
      say: Told what happens.

    Raises:
      AssertionError: If a run that was killed left something else than one that was not.
    """
    draw, cache, whole = random.Random(seed), folder / "cache", folder / "whole"
    expected = follow(start(whole, cache, kind, mesh))
    if expected is None:
        raise RuntimeError("a run that nobody killed did not end")
    last = whole / "checkpoints" / f"step_{STEPS:08d}" / "record.json"
    span = last.stat().st_mtime - expected.began
    done = runs = tries = writing = resumed = 0
    while done < kills:
        tries, before = tries + 1, done
        run = folder / f"run{tries}"
        while True:
            resumed += any((run / "checkpoints").glob("step_????????"))
            moment = draw.uniform(0, span) if done < kills else None
            begun = start(run, cache, kind, mesh)
            ended = follow(begun, kill_after=moment, victim=draw.randrange(len(begun)))
            if ended is not None:
                break
            done, writing = done + 1, writing + unfinished(run)
            rows = len(told(run, "metrics.jsonl"))
            say(f"kill {done} of {kills}, {moment:.2f} s later, {rows} lines of metrics")
        runs += done > before  # else it ended before its moment came
        check(run, ended, whole, expected, kind=kind)
    return Tally(done, runs, writing, resumed)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="one batch at a time", choices=KINDS)
    parser.add_argument("--mesh", default="one device", choices=MESHES)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, options.kind, options.mesh, process=options.process, port=options.port)
        return
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm-killing-") as name:
        which = {"seed": options.seed, "kind": options.kind, "mesh": options.mesh}
        print(torture(Path(name), kills=options.kills, **which))


if __name__ == "__main__":
    main()
