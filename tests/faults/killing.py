"""Kills a run with SIGKILL at random moments, resumes it, and compares it with one that was not.

    python tests/faults/killing.py --kills 20

A moment is drawn evenly over what a run takes from its second batch, when its programs are
compiled, to the end of its last checkpoint. A run that is resumed has those for evaluations only
after the first of them, and its moments begin there; else none would come further. Each killed run
is resumed until it ends; then the next one begins, until as many kills have been made. Of every run
that ends, the final state must equal that of the run that was not killed bit for bit, and so must
each completion, each number of each step and evaluation, and which checkpoint is the best.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
STEPS, BATCH = 12, 8


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


def child(folder: Path, *, staleness: int) -> None:
    """The run itself, in a process of its own, with --resume as a scheduler always gives it."""
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "train")]
    import jax
    import numpy as np
    from tiny_run import CONFIG, low_bytes, prompts, tiny_run

    from jaxrl_llm.data import split_distinct
    from jaxrl_llm.train import AsyncConfig, CheckpointConfig, EvaluationConfig, train

    split = {"held_out": CONFIG.data.held_out, "seed": CONFIG.data.seed}
    trained = {prompt.text for prompt in split_distinct(prompts(), **split)[0]}
    calls, evaluated, begun = [], [], threading.Event()

    def reward(prompt, completion, metadata):
        (calls if prompt in trained else evaluated).append(prompt)
        if prompt in trained and len(calls) > BATCH and evaluated and not begun.is_set():
            begun.set()
            print("begun", flush=True)
        return low_bytes(prompt, completion, metadata)

    config = tiny_run(
        folder,
        steps=STEPS,
        reward=reward,
        checkpoint=CheckpointConfig(every=2, keep=2, best="greedy"),
        evaluation=EvaluationConfig(every=2),
        asynchrony=AsyncConfig(max_staleness=staleness),
        samples_shown=BATCH,
    )
    state = train(config, resume=True).state
    arrays = (state.params, state.opt_state, state.algo_state, jax.random.key_data(state.key))
    digest = hashlib.sha256(repr((int(state.step), tuple(state.data_cursor))).encode())
    for leaf in jax.tree.leaves(arrays):
        digest.update(np.asarray(leaf).tobytes())
    print(f"ended {digest.hexdigest()}", flush=True)


def environment(cache: Path) -> dict[str, str]:
    """Variables of a process on one CPU device."""
    return dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        JAX_NUM_CPU_DEVICES="1",
        JAX_COMPILATION_CACHE_DIR=str(cache),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        MPLBACKEND="Agg",
    )


def start(folder: Path, cache: Path, *, staleness: int = 0) -> subprocess.Popen:
    """A process that runs :func:`child`.

    Its programs are kept in a cache of its own: one that is killed may leave half of an entry.
    """
    command = [sys.executable, __file__, "--child", str(folder), "--staleness", str(staleness)]
    return subprocess.Popen(command, env=environment(cache), stdout=subprocess.PIPE, text=True)


def follow(process: subprocess.Popen, *, kill_after: float | None = None) -> Ended | None:
    """Waits for the end of a run, or kills it; None if it was killed.

    Args:
      process: From :func:`start`.
      kill_after: Seconds after its moments began.

    Raises:
      RuntimeError: If it fails by itself.
    """
    if process.stdout is None:
        raise RuntimeError("the process has no output")
    said = None
    with process, process.stdout as lines:
        for line in lines:
            if line.startswith(("begun", "ended")):
                said = line.split()
                break
        began = time.time()
        if kill_after is not None and said == ["begun"]:
            try:
                process.wait(kill_after)
            except subprocess.TimeoutExpired:
                process.kill()
                return None
        said = [line.split() for line in lines if line.startswith("ended")] or [said]
        if process.wait() or said[0] is None or len(said[0]) != 2:
            raise RuntimeError(f"the run failed by itself, with code {process.returncode}")
        return Ended(said[0][1], began)


def unfinished(folder: Path) -> bool:
    """Whether a checkpoint was being written."""
    return any((folder / "checkpoints").glob("*.unfinished*"))


def told(folder: Path, name: str) -> list[dict]:
    """The lines of a file of a run, without what depends on time."""
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
    from jaxrl_llm.train import Checkpoints

    model: Any = None  # none is read
    return Checkpoints(folder / "checkpoints", model=model, best="greedy").best_step()


def check(folder: Path, ended: Ended, expected: Path, whole: Ended, *, staleness: int) -> None:
    """Raises AssertionError unless a run that was killed left what one that was not left.

    Where rollouts are sampled ahead, which weights sample them depends on time: then only the
    questions are compared, of which none may be lost or used twice.
    """
    assert questions(folder) == questions(expected), "a question was lost or used twice"
    if staleness:
        return
    assert best(folder) == best(expected), "another checkpoint is the best"
    for name in ("samples.jsonl", "metrics.jsonl"):
        rows, wanted = told(folder, name), told(expected, name)
        assert len(rows) == len(wanted), f"{name} has {len(rows)} lines, not {len(wanted)}"
        for row, other in zip(rows, wanted, strict=True):
            differ = {k for k in row | other if row.get(k) != other.get(k)}
            assert not differ, f"{name} differs in {differ} of step {row['step']}"
    assert ended.digest == whole.digest, "the final states differ"


def torture(folder: Path, *, kills: int, seed: int = 0, staleness: int = 0, say=print) -> Tally:
    """Kills and resumes runs until there were so many kills, and checks every run that ended.

    Args:
      folder: For the runs; empty.
      kills: How many processes to kill.
      seed: Of the moments.
      staleness: Updates by which rollouts may be sampled ahead.
      say: Told what happens.

    Raises:
      AssertionError: If a run that was killed left something else than one that was not.
    """
    draw, cache, whole = random.Random(seed), folder / "cache", folder / "whole"
    expected = follow(start(whole, cache, staleness=staleness))
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
            ended = follow(start(run, cache, staleness=staleness), kill_after=moment)
            if ended is not None:
                break
            done, writing = done + 1, writing + unfinished(run)
            rows = sum("loss" in row for row in told(run, "metrics.jsonl"))
            say(f"kill {done} of {kills}, {moment:.2f} s later, {rows} steps done")
        runs += done > before  # else it ended before its moment came
        check(run, ended, whole, expected, staleness=staleness)
    return Tally(done, runs, writing, resumed)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, staleness=options.staleness)
        return
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm-killing-") as name:
        given = {"kills": options.kills, "seed": options.seed, "staleness": options.staleness}
        print(torture(Path(name), **given))


if __name__ == "__main__":
    main()
