"""Values of prefixes in the loop: what goes on from them, what trains, and a resumed run."""

import numpy as np
import pytest
from batch_makers import loaded_batch
from rows import for_each
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.train import SamplingConfig
from jaxrl_llm.train.experiment.setup import load_experiment

RECIPE = jr.recipes.vineppo(step_length=3, rollouts=2)
pytestmark = pytest.mark.usefixtures("shared_programs")


def batch_of(folder, **changes):
    sampling = SamplingConfig(group_size=2, max_new_tokens=8, **changes)
    config = tiny_run(folder, recipe=RECIPE, sampling=sampling)
    return loaded_batch(config)[2]


def test_segments_of_a_batch_and_their_values(tmp_path):
    out = batch_of(tmp_path)
    batch = out.batch
    extras = {name: np.asarray(x) for name, x in batch.extras.items()}
    mask, ids = np.asarray(batch.mask), extras["segment_ids"]
    length = mask.sum(-1)
    np.testing.assert_array_equal(ids, np.where(mask, np.arange(mask.shape[-1]) // 3, -1))
    np.testing.assert_array_equal(extras["segment_where"].sum(-1), -(-length // 3))
    assert np.asarray(batch.where).all() and mask.shape[:2] == (4, 2)
    # The prompt of a group has one value; each is a mean of two rewards, quarters.
    values = extras["prefix_values"]
    np.testing.assert_array_equal(values[:, 0, 0], values[:, 1, 0])
    np.testing.assert_array_equal(values * 8, np.round(values * 8))
    assert len(np.unique(values[extras["segment_where"]])) > 2
    # Rollouts of the batch, and two from each prefix.
    prefixes = extras["segment_where"].sum() - (length > 0).sum() + 4
    assert out.metrics["rollouts_sampled"] <= 8 + 2 * prefixes
    # What only estimates a value is no reward of the policy.
    assert out.metrics["rollouts_sampled"] > 8 and np.unique(values).size > 2
    np.testing.assert_allclose(
        out.metrics["sampled_reward"], np.asarray(batch.rewards).mean(), rtol=1e-6
    )


@pytest.mark.slow
def test_where_all_that_goes_on_is_the_same_nothing_is_left(tmp_path):
    """A policy that draws one token alone: every value is the reward, and no segment adds to it."""
    batch = batch_of(tmp_path, temperature=1e-4).batch
    where = np.asarray(batch.extras["segment_where"])
    rewards = np.broadcast_to(np.asarray(batch.rewards)[..., None], where.shape)
    values = np.asarray(batch.extras["prefix_values"])
    np.testing.assert_allclose(values[where], rewards[where], atol=1e-6)
    assert np.unique(rewards).size > 1
    credit = jr.advantages.segment_advantages(batch.rewards, values, where)
    np.testing.assert_allclose(credit, 0, atol=1e-6)


@for_each("recipe", [RECIPE, jr.recipes.spo_chain(interval=2, rollouts=2)])
def test_without_its_collector_a_run_lacks_the_values(tmp_path, recipe):
    with pytest.raises(ValueError, match=r"needs 'prefix_values' .*no training run provides"):
        load_experiment(tiny_run(tmp_path, recipe=recipe.replace(collector=None)))
