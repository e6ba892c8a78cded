"""Stored groups in a run whose recipe reads each reward apart."""

import jax
import numpy as np
import pytest
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.data import Cursor
from jaxrl_llm.train.rollouts import collect_rollouts
from jaxrl_llm.train.setup import load_experiment

pytestmark = pytest.mark.usefixtures("shared_programs")


def low_and_short(prompt, completion, metadata):
    return {"low": sum(ord(c) < 64 for c in completion) / 4, "short": 1 / (1 + len(completion))}


def test_stored_groups_have_the_parts_of_their_rewards(tmp_path):
    collector = jr.curation.replayed(capacity=8, share=0.5, regrade=True)
    recipe = jr.recipes.gdpo().replace(name="stored", collector=collector)
    config = tiny_run(tmp_path, recipe=recipe, reward=low_and_short)
    experiment, params = load_experiment(config)
    state, cursor = experiment.collector.init(len(experiment.train)), Cursor(0, 0)
    for step in range(2):
        key = jax.random.key(step)
        got = collect_rollouts(experiment, params, key, cursor, state, number=step, version=step)
        state, cursor = got.collector_state, got.cursor
    batch = got.batch
    assert got.metrics["rollouts/replayed"] == 4.0 and np.asarray(batch.where).all()
    assert {*batch.reward_components} == {"low", "short"}
    for values in batch.reward_components.values():
        assert np.isfinite(np.asarray(values)).all()
    total = sum(np.asarray(values) for values in batch.reward_components.values())
    np.testing.assert_allclose(np.asarray(batch.rewards), total, rtol=1e-6)
