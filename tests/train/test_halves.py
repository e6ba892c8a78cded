"""Groups of which the policy samples one half and the frozen reference the other."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.train import LoRAConfig, SamplingConfig, train
from jaxrl_llm.train.data.halves import with_roles
from jaxrl_llm.train.experiment.pairs import make_logp
from jaxrl_llm.train.experiment.rollouts import make_rollouts
from jaxrl_llm.train.experiment.setup import init_experiment

GROUP = SamplingConfig(group_size=4, max_new_tokens=6)
HALVES = ("policy", "reference")


def other():
    """A reference that is not the policy."""
    return *jr.testing.tiny_model(num_layers=1, seed=3), jr.testing.ByteTokenizer()


def test_xpo_by_its_name_samples_the_second_half_of_a_group_from_its_reference(tmp_path):
    lora = LoRAConfig(rank=2)
    config = tiny_run(tmp_path, recipe="xpo", reference=other, sampling=GROUP, lora=lora)
    experiment, _, _, state = init_experiment(config, tmp_path, resume=False)
    batch = make_rollouts(experiment, state).next().batch
    logp = jax.jit(make_logp(experiment))
    by_policy, by_reference = (
        np.where(batch.mask, logp(params, batch), 0.0) for params in (state.policy, other()[1])
    )
    assert batch.extras["steered"].tolist() == [[False, False, True, True]] * 4
    expected = np.concatenate([by_policy[:, :2], by_reference[:, 2:]], axis=1)
    np.testing.assert_allclose(batch.behavior_logp, expected, atol=1e-4)
    # The two are told apart in either half.
    assert np.abs(by_policy - by_reference).max(axis=(0, 2)).min() > 0.1


@pytest.mark.slow
def test_a_run_compares_the_halves(tmp_path):
    config = tiny_run(tmp_path, recipe="xpo", sampling=GROUP, steps=2)
    result = train(config)
    assert all(row["pairs"] > 0 and row["rollouts/demonstration"] > 0 for row in result.history)


def test_a_rollout_keeps_its_sampler_wherever_a_collector_puts_it():
    members = np.array([[[0, 3], [0, 0], [-1, -1]], [[4, 1], [4, 2], [4, 6]]])
    roles = np.array([[0, 0, 0], [0, 3, 0]])
    where = np.array([[True, True, False], [True] * 3])
    failed = np.array([[False, True, False], [False, False, False]])
    rewards = np.array([[9.0, 8.0, 7.0], [0.5, 6.0, 5.0]])
    scores = SimpleNamespace(failed=failed.ravel(), rewards=rewards.ravel())
    collected = SimpleNamespace(members=members, roles=roles, where=where, scores=scores)
    collected._replace = lambda roles, reward: (roles.tolist(), reward)
    assert with_roles(collected, HALVES, 4) == ([[2, 0, 0], [0, 3, 2]], 0.5)
