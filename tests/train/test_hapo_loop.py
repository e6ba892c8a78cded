"""HAPO in the loop: statistics of a batch set the sampling temperature of the next."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.curation.collectors.protocol import Collection, Outcome, Request, Response, Row
from jaxrl_llm.train import make_scorer, train
from jaxrl_llm.train.experiment.rollouts import collect_rollouts
from jaxrl_llm.train.experiment.setup import init_experiment
from jaxrl_llm.train.models.score import Scorer, score_hidden


def stats_of(entropy, mask):
    return jr.advantages.entropy_signal(entropy, mask, quantile=0.8).stats


COLLECTOR = jr.curation.entropy_temperature(stats_of, tau=0.3)
pytestmark = pytest.mark.usefixtures("shared_programs")


def collection(responses, **changes):
    """A finished group of these responses."""
    n = len(responses)
    outcome = Outcome(
        prompt=0,
        rewards=np.zeros(n, np.float32),
        where=np.ones(n, bool),
        lengths=np.full(n, 1),
        truncated=np.zeros(n, bool),
        reward_components={},
        responses=responses,
    )
    requests = (Request(n),)
    return Collection(1, n, requests=requests, outcomes=(outcome,))._replace(**changes)


def test_the_statistics_are_those_of_the_sampled_tokens_that_train():
    state = COLLECTOR.init(3)
    (request,), state = COLLECTOR.propose(state, jax.random.key(0), Collection(1, 2), 1)
    assert request.entropy_stats == (0.0,) * 4
    tokens = np.zeros(3, np.int32)
    responses = (
        Response(tokens, entropy=np.float32([0.1, 0.2, 0.4])),
        Response(
            np.zeros(6, np.int32),
            entropy=np.float32([9.0, 9.0, 0.8, 1.6, np.nan, 0.4]),
            trains=np.array([False, True, True, True, True, True]),
            version=np.array([0, -1, 0, 0, 0, -1]),
        ),
        Response(tokens),  # of which nothing is known
    )
    decision, after = COLLECTOR.observe(state, collection(responses))
    assert decision.rows == (Row(((0, 0), (0, 1), (0, 2))),)
    want = stats_of(jnp.array([0.1, 0.2, 0.4, 0.8, 1.6]), jnp.ones(5, bool))
    np.testing.assert_allclose(after.stats, np.stack(want), rtol=1e-6)
    np.testing.assert_allclose(after.stats[:2], [np.log(0.8), 1.200566], rtol=1e-5)
    (request,), _ = COLLECTOR.propose(after, jax.random.key(0), Collection(1, 2), 1)
    assert request.entropy_stats == tuple(map(float, after.stats))
    # Without a number the old ones stay; what a source brings complete is not sampled.
    _, same = COLLECTOR.observe(after, collection(responses[2:]))
    np.testing.assert_array_equal(same.stats, after.stats)
    waiting = collection(responses, outcomes=(None,))
    assert COLLECTOR.observe(after, waiting)[0].rows is None


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params, batch):
    """The logits ``[P, G, T, V]`` of every token at temperature 1, as a trainer computes them."""
    fields = (batch.prompt_tokens, batch.prompt_mask, batch.tokens, batch.mask)
    return score_hidden(model, params, *fields) @ model.output_matrix(params).T


@pytest.mark.slow
def test_a_batch_is_sampled_at_the_temperatures_of_the_one_before(tmp_path):
    config = tiny_run(tmp_path / "run", recipe=jr.recipes.hapo(tau=0.4), steps=2)
    experiment, *_, first = init_experiment(config, tmp_path, resume=False)
    policy, key = first.policy, first.key
    start = policy, key, first.data_cursor, first.collector_state
    rollouts = collect_rollouts(experiment, *start, number=0, version=0)
    batch = jax.tree.map(jnp.asarray, rollouts.batch)
    score = make_scorer(experiment.model)
    # The first batch has no statistics: it is sampled at the temperature that trains.
    logp, mask = np.asarray(score(policy, batch)), np.asarray(batch.mask)
    np.testing.assert_allclose(logp[mask], batch.behavior_logp[mask], rtol=1e-3, atol=1e-3)
    # What the sampler's entropies give is what a trainer's do.
    scorer = jax.jit(lambda params, batch: Scorer(experiment.model)(params, batch))
    entropy = scorer(policy, batch).entropy
    want = stats_of(entropy, batch.mask)
    np.testing.assert_allclose(rollouts.collector_state.stats, np.stack(want), rtol=2e-3)
    start = policy, key, rollouts.cursor, rollouts.collector_state
    again = collect_rollouts(experiment, *start, number=1, version=1)
    batch = jax.tree.map(jnp.asarray, again.batch)
    mask = np.asarray(batch.mask)
    entropy = np.asarray(scorer(policy, batch).entropy)
    temperature = jr.advantages.signal_temperature(jnp.asarray(entropy), want, tau=0.4)
    assert np.ptp(np.asarray(temperature)[mask]) > 0.2
    logits = logits_of(experiment.model, policy, batch)
    logp = jax.nn.log_softmax(logits / temperature[..., None])
    logp = np.take_along_axis(np.asarray(logp), np.asarray(batch.tokens)[..., None], axis=-1)
    np.testing.assert_allclose(batch.behavior_logp[mask], logp[mask, 0], rtol=1e-3, atol=1e-3)
    away = np.abs(np.asarray(score(policy, batch)) - np.asarray(batch.behavior_logp))
    assert away[mask].max() > 0.01
    state = train(config).state.collector_state
    assert state.stats[1] > 0 and np.isfinite(state.stats).all()
