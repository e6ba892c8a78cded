"""The train step scores the last response to each prompt again, and the tracker forgets by it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.recipes import Batch
from jaxrl_llm.train import SamplingConfig, init_state, make_scorer, make_step, train

Q, P, G, T = 6, 2, 2, 4
MODEL, PARAMS = jr.testing.tiny_model(num_layers=1)
RECIPE = jr.recipes.spo_tracker(num_prompts=Q, length=3, first=0)  # shorter than the responses
RECIPE = RECIPE.replace(minibatches=1)
OPTIMIZER = optax.sgd(2e-4)


def batch_of(seed, ids, **extras):
    """Random responses to prompts whose tokens depend on their ids."""
    rng = np.random.default_rng(seed)
    mask = np.arange(T) < rng.integers(1, T + 1, (P, G))[..., None]
    prompts = np.array(ids)[:, None] * 5 + np.arange(3)
    return Batch(
        tokens=jnp.asarray(rng.integers(0, 100, (P, G, T)), jnp.int32),
        mask=jnp.asarray(mask),
        rewards=jnp.array([[1.0, 0.0], [0.0, 0.0]]),
        where=jnp.ones((P, G), bool),
        prompt_tokens=jnp.asarray(prompts, jnp.int32),
        prompt_mask=jnp.ones((P, 3), bool),
        extras={"prompt_ids": jnp.asarray(ids, jnp.int32), **extras},
    )


BATCHES = [batch_of(0, [1, 4]), batch_of(1, [4, 2]), batch_of(2, [1, 4])]


@pytest.fixture(scope="module")
def states():
    """The states of three steps, the first before them."""
    state = init_state(PARAMS, OPTIMIZER, RECIPE, key=jax.random.key(0))
    step = make_step(MODEL, RECIPE, OPTIMIZER, temperature=0.8, donate=False, microbatches=2)
    states = [state]
    for batch in BATCHES:
        states.append(step(states[-1], batch)[0])
    return states


def test_the_tracker_forgets_by_the_shift_since_the_last_visit(states):
    score = make_scorer(MODEL, temperature=0.8)
    alpha = beta = np.full(Q, 0.5)
    last, shifts = {}, []
    for state, after, batch in zip(states[:-1], states[1:], BATCHES, strict=True):
        now, mask = np.asarray(score(state.policy, batch)), np.asarray(batch.mask)
        alpha, beta = alpha.copy(), beta.copy()
        for p, q in enumerate(batch.extras["prompt_ids"].tolist()):
            shift = 0.0
            if q in last:  # the same response, as the policies of both visits score it
                row, place = last[q]
                then = np.asarray(score(states[row].policy, BATCHES[row]))[place, -1, :3]
                again = np.asarray(score(state.policy, BATCHES[row]))[place, -1, :3]
                there = np.asarray(BATCHES[row].mask)[place, -1, :3]
                shift = np.abs(then - again)[there].mean()
                shifts.append(shift)
            rho = np.clip(2.0 ** (-shift / 0.06), 0.875, 0.96)
            r = np.asarray(batch.rewards)[p]
            alpha[q], beta[q] = rho * alpha[q] + r.sum(), rho * beta[q] + (1 - r).sum()
            last[q] = int(state.step), p
        np.testing.assert_allclose(after.algo_state.advantage.alpha, alpha, rtol=1e-4)
        np.testing.assert_allclose(after.algo_state.advantage.beta, beta, rtol=1e-4)
        visits = after.algo_state.controllers["policy_shift"]
        for p, q in enumerate(batch.extras["prompt_ids"].tolist()):
            there = mask[p, -1, :3]
            np.testing.assert_array_equal(visits.mask[q], there)
            want = np.where(there, now[p, -1, :3], 0)
            np.testing.assert_allclose(visits.logp[q], want, rtol=1e-4, atol=1e-5)
    assert len(shifts) == 3 and all(1e-4 < shift < 0.05 for shift in shifts), shifts


@pytest.mark.slow
def test_a_shift_that_the_batch_brings_is_taken():
    batch = batch_of(0, [1, 4], policy_shift=jnp.array([0.0, 0.06]))
    state = init_state(PARAMS, OPTIMIZER, RECIPE, key=jax.random.key(0))
    step = make_step(MODEL, RECIPE, OPTIMIZER, donate=False)
    after = step(state, batch)[0].algo_state
    total = np.asarray(after.advantage.alpha + after.advantage.beta)
    np.testing.assert_allclose(total[[1, 4, 0]], [2.96, 2.875, 1.0], rtol=1e-6)
    assert not after.controllers["policy_shift"].mask.any()
    with pytest.raises(ValueError, match="'spo_tracker': the batch has no prompt_ids in its extr"):
        step(state, batch.replace(extras={}))


@pytest.mark.slow
def test_a_run_draws_prompts_by_the_rates_that_training_tracks(tmp_path):
    sampling = SamplingConfig(group_size=1, max_new_tokens=4)
    result = train(tiny_run(tmp_path, recipe="spo_tracker", steps=2, sampling=sampling))
    # That of before the last batch, to which the collector has added its outcomes.
    tracked, belief = result.state.algo_state.advantage, result.state.collector_state
    total = np.asarray(tracked.alpha + tracked.beta)
    visited = total != 1.0
    assert total[visited].min() > 0.875 * 8  # from eight rollouts each
    assert result.history[0]["rollouts_sampled"] == 4 * 9 and 4 <= visited.sum() <= 8
    np.testing.assert_array_equal(belief.alpha + belief.beta != 1.0, visited)


def test_a_belief_that_a_collector_follows_is_of_its_data_set():
    follows = jr.recipes.spo_tracker(num_prompts=3, length=4).collector
    new = follows.follow(follows.init(3), jr.advantages.BetaTracker(np.ones(3), np.zeros(3)))
    assert new.alpha.tolist() == [1.0] * 3 and new.beta.tolist() == [0.0] * 3
    with pytest.raises(ValueError, match="it follows a belief about 2 prompts; the data set has 3"):
        follows.follow(new, jr.advantages.BetaTracker(np.ones(2), np.zeros(2)))
    with pytest.raises(ValueError, match="cannot be a part of another collector"):
        refill = jr.curation.refill(jr.curation.informative_groups, source=follows)
        jr.recipes.dapo().replace(collector=refill)
