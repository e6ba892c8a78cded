"""Whole runs that train on stored rollouts: resumed exactly, and weighed for what sampled them."""

import jax
import numpy as np
import pytest
from exact_resume import assert_resumes
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.data import Cursor
from jaxrl_llm.train import CheckpointConfig, SamplingConfig, train
from jaxrl_llm.train.experiment.rollouts import collect_rollouts
from jaxrl_llm.train.experiment.setup import load_experiment

SLOTS = SamplingConfig(group_size=2, max_new_tokens=4, slots=4)
pytestmark = pytest.mark.usefixtures("shared_programs")


def reward(prompt, completion, metadata):
    """A number and a text, which a stored rollout does not have again."""
    low = sum(ord(c) < 64 for c in completion) / 4
    return {"reward": low, "short": 1.0 / (1 + len(completion)), "feedback": f"{low:.2f}"}


def recipe():
    collector = jr.curation.replayed(
        capacity=6,
        share=0.5,
        unique=True,
        source=jr.curation.refill(jr.curation.informative_groups, max_rounds=3),
    )
    return jr.recipes.rollout_replay().replace(name="half", collector=collector)


@pytest.mark.slow
def test_half_of_a_batch_is_replayed_with_the_ratio_to_what_sampled_it(tmp_path):
    config = tiny_run(
        tmp_path / "run",
        recipe=recipe(),
        reward=reward,
        steps=4,
        checkpoint=CheckpointConfig(every=1, keep=4),
        sampling=SLOTS,
    )
    result = train(config)
    first, *later = result.history
    # What was sampled for this batch has the logp of the weights that train.
    assert "rollouts/replayed" not in first and first["sampler_gap_max"] < 1e-4
    assert first["staleness_max"] == 0.0
    for row in later:
        assert row["rollouts/replayed"] == 4.0  # of 8
        # The other half was sampled by weights of 1 to 3 updates ago.
        assert row["sampler_gap_max"] > 1e-3 and row["sampler_ess"] < 0.99999
        assert 1.0 <= row["staleness_max"] <= row["step"] - 1
    buffer = result.state.collector_state.buffer
    assert int(buffer.added) == 4 + 3 * 2
    filled = buffer.order >= 0
    assert len(set(buffer.prompt_ids[filled].tolist())) == filled.sum()
    assert (buffer.items.lengths[filled] > 0).all()
    assert (buffer.items.rewards[filled].std(axis=-1) > 0).all()
    assert_resumes(config, result, tmp_path / "again", first=2)


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
