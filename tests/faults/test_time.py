"""Clocks that jump and rewards that are slow change nothing but time."""

import random
import time

import pytest
from test_checkpoint import assert_same
from tiny_run import tiny_run

from jaxrl_llm.train import AsyncConfig, CheckpointConfig, train
from jaxrl_llm.train.logging.results import read_jsonl

pytestmark = pytest.mark.usefixtures("shared_programs")

NUMBERS = ("step", "loss", "grad_norm", "reward", "entropy", "sampler_gap", "tokens")


def told(run_dir):
    """What a run wrote that must not depend on time."""
    metrics = [{k: row.get(k) for k in NUMBERS} for row in read_jsonl(run_dir / "metrics.jsonl")]
    return metrics, read_jsonl(run_dir / "samples.jsonl")


def test_a_clock_that_jumps_changes_nothing(whole_run, tmp_path, monkeypatch):
    """The time of day is years ahead in steps 1 to 3, and years behind from there on."""
    calls, now, given = [], time.time, tiny_run("unused").reward
    monkeypatch.setattr(time, "time", lambda: now() + (3e8 if len(calls) < 3 * 8 else -3e8))

    def reward(prompt, completion, metadata):
        calls.append(prompt)
        return given(prompt, completion, metadata)

    options = {"checkpoint": CheckpointConfig(every=3), "reward": reward}
    train(tiny_run(tmp_path, **options, steps=4))
    done = train(tiny_run(tmp_path, **options), resume=True)
    assert_same(done.state, whole_run.state)
    assert told(tmp_path) == told(whole_run.run_dir)
    assert len(calls) == 6 * 8


def slow(share):
    """The reward of the tiny run, some calls of which take a while."""
    draw, given = random.Random(1), tiny_run("unused").reward

    def reward(prompt, completion, metadata):
        if draw.random() < share:
            time.sleep(0.05)
        return given(prompt, completion, metadata)

    return reward


def test_slow_rewards_change_nothing(whole_run, tmp_path):
    done = train(tiny_run(tmp_path, reward=slow(0.2), checkpoint=CheckpointConfig(every=1)))
    assert_same(done.state, whole_run.state)
    assert told(tmp_path) == told(whole_run.run_dir)


@pytest.mark.slow
def test_slow_rewards_lose_no_question_of_those_sampled_ahead(whole_run, tmp_path):
    options = {"asynchrony": AsyncConfig(max_staleness=2), "checkpoint": CheckpointConfig(every=1)}
    train(tiny_run(tmp_path, reward=slow(0.5), **options))
    prompts = [(row["step"], row["prompt"]) for row in told(tmp_path)[1]]
    assert prompts == [(row["step"], row["prompt"]) for row in told(whole_run.run_dir)[1]]


@pytest.mark.slow
def test_a_slow_disk_changes_nothing(whole_run, tmp_path, monkeypatch):
    """Checkpoints that take longer than steps wait for each other, and the last one is whole."""
    from jaxrl_llm.train.checkpoint import record

    write = record.write_record

    def slowly(folder, notes, *, step):
        time.sleep(0.3)
        write(folder, notes, step=step)

    monkeypatch.setattr(record, "write_record", slowly)
    done = train(tiny_run(tmp_path, checkpoint=CheckpointConfig(every=1)))
    assert_same(done.state, whole_run.state)
    assert told(tmp_path) == told(whole_run.run_dir)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000005", "step_00000006"]
