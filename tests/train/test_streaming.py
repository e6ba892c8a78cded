"""Rollouts in slots inside the loop: the same rollouts, graded while others decode."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
from tiny_run import CONFIG, tiny_run

from jaxrl_llm.rewards import RewardError, Scores
from jaxrl_llm.rollout import Generation
from jaxrl_llm.train import SamplingConfig, train
from jaxrl_llm.train.grading import join_scores
from jaxrl_llm.train.rollouts import collect_rollouts
from jaxrl_llm.train.setup import init_experiment

SAMPLING = SamplingConfig(group_size=2, max_new_tokens=8)


def with_slots(slots):
    return dataclasses.replace(SAMPLING, slots=slots)


def collected(tmp_path, slots, **changes):
    config = tiny_run(tmp_path / str(slots), sampling=with_slots(slots), **changes)
    experiment, _, _, state = init_experiment(config, tmp_path, resume=False)
    return collect_rollouts(
        experiment, state.params, state.key, state.data_cursor, number=0, version=3
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return collected(tmp_path_factory.mktemp("whole"), None)


@pytest.mark.parametrize("slots", [2, 4, 8])
def test_slots_change_nothing_but_the_time(whole, tmp_path, slots):
    found = collected(tmp_path, slots)
    assert found.rows == whole.rows and found.cursor == whole.cursor
    for name in ("tokens", "mask", "rewards", "where"):
        np.testing.assert_array_equal(getattr(found.batch, name), getattr(whole.batch, name))
    np.testing.assert_allclose(found.batch.behavior_logp, whole.batch.behavior_logp, atol=1e-5)
    assert found.metrics == whole.metrics


def test_a_group_is_graded_while_others_decode(tmp_path, monkeypatch):
    graded, seen = threading.Event(), []

    def reward(prompt, completion, metadata):
        graded.set()
        return 1.0

    step = Generation.step

    def slow_step(self):
        step(self)
        if (
            self._scheduler.finished
        ):  # the first group is on its way to the reward, others are not done
            seen.append(bool(self._scheduler.has_work))

    def waits(self):
        for number, done in enumerate(iterate(self)):
            yield done
            if not number:
                assert graded.wait(10), "nothing is graded before all have ended"

    iterate = Generation.__iter__
    monkeypatch.setattr(Generation, "__iter__", waits)
    monkeypatch.setattr(Generation, "step", slow_step)
    collected(tmp_path, 2, reward=reward)
    assert seen[0]


def test_columns_and_errors_come_through(tmp_path):
    found = collected(tmp_path, 4, reward=lambda p, c, m: {"reward": 1.0, "a": float(len(c))})
    assert (found.batch.rewards == 1.0).all()
    assert found.metrics["reward/a"] > 0

    def fails(prompt, completion, metadata):
        raise OSError("no")

    with pytest.raises(Exception, match="q0"):
        collected(tmp_path, 4, reward=fails)


def test_a_group_whose_verifiers_all_failed_counts_zero():
    good = Scores(np.ones(2, np.float32), {"a": np.array([1, 2], np.float32)}, 0)
    dead = Scores(np.zeros(2, np.float32), {}, 2)
    for order in ([good, dead], [dead, good]):
        found = join_scores(order)
        at = slice(0, 2) if order[0] is good else slice(2, 4)
        assert found.failures == 2 and found.reward_components["a"][at].tolist() == [1, 2]
        assert found.reward_components["a"].sum() == 3 and found.rewards.sum() == 2
    assert join_scores([dead, dead]).reward_components == {}
    with pytest.raises(RewardError, match="names"):
        join_scores([good, Scores(np.ones(2, np.float32), {}, 0)])


def test_a_run_in_slots_is_a_run(tmp_path):
    result = train(tiny_run(tmp_path / "a", sampling=with_slots(4), steps=2))
    same = train(tiny_run(tmp_path / "b", sampling=SAMPLING, steps=2))
    for x, y in zip(*map(jax.tree.leaves, (result.state.params, same.state.params)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("slots", [6, 16, 12])
def test_slots_that_make_no_grid_are_refused(slots):
    with pytest.raises(ValueError, match="slots must be below the 4 prompts"):
        dataclasses.replace(CONFIG, sampling=with_slots(slots))
    with pytest.raises(ValueError, match="slots"):
        SamplingConfig(slots=0)
