"""Turns that are updated one after the other: each by a policy that has seen those before."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_batch
from rows import for_each
from step_makers import assert_close, flat_step, one_layer, shared_scorer, shared_step, state_of
from step_makers import run as any_run

import jaxrl_llm as jr
from jaxrl_llm.recipes import TurnUpdates
from jaxrl_llm.train import init_state, make_gradients, make_mesh

RECIPE = jr.recipes.seeupo(kl_coef=0.0)
SGD = optax.sgd(0.05)
MODEL, PARAMS = one_layer()


def batch_of_turns(turns=3):
    """Up to three turns of two tokens; a fourth one that no rollout has."""
    batch = make_batch(prompts=4, group=4, length=6, seed=3)
    turn_ids = np.broadcast_to(np.arange(6) // (6 // turns), batch.mask.shape)
    there = [np.any(np.asarray(batch.mask) & (turn_ids == k), -1) for k in range(4)]
    extras = {"turn_ids": jnp.asarray(turn_ids), "turn_where": jnp.asarray(np.stack(there, -1))}
    return batch.replace(rewards=batch.rewards.at[1].set(0.0), extras=extras)


def run(recipe, batch, *, optimizer=SGD, **options):
    return any_run(recipe, batch, optimizer=optimizer, **options)[:2]


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("order", ["backward", "forward"])
def test_turns_are_steps_with_a_running_factor(order):
    """The factor by hand, in NumPy; scores and gradients of the same recipe without turns."""
    params = PARAMS
    batch, plain = batch_of_turns(), RECIPE.replace(turn_updates=None)
    recipe = RECIPE.replace(turn_updates=TurnUpdates(order=order, eps_low=0.05, eps_high=0.1))
    state, metrics = run(recipe, batch)

    prepared, _ = plain.prepare(batch, plain.init())
    a = np.asarray(batch.rewards) - np.mean(batch.rewards, -1, keepdims=True)
    a = np.clip((a - a.mean()) / a.std(ddof=1), -3, 3)
    np.testing.assert_allclose(prepared.advantages, a, atol=1e-5)
    scorer, gradients = shared_scorer(MODEL), make_gradients(MODEL, plain)
    start = state_of(plain, SGD)
    factor, factors = np.ones((4, 4)), []
    for turn in [2, 1, 0] if order == "backward" else [0, 1, 2]:
        mask = batch.mask & (batch.extras["turn_ids"] == turn)
        old = scorer(params, batch)
        part = plain.weigh(
            prepared.replace(mask=mask, old_logp=old, advantages=jnp.float32(a * factor))
        )
        grads = gradients(start._replace(params=params), part).grads
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
        change = np.where(mask, np.float64(scorer(params, batch)) - old, 0.0).sum(-1)
        ratio = np.exp(change / np.maximum(np.sum(mask, -1), 1))
        factor = np.clip(factor * np.clip(ratio, 0.95, 1.1), 0.95, 1.1)
        factors.append(factor)
    assert_close(state.params, params)
    # It is not 1, and not everywhere at its bounds.
    assert np.ptp(factors[0]) > 1e-3 and ((factors[0] > 0.95) & (factors[0] < 1.1)).any()
    assert int(state.step) == 1 and float(metrics["skipped"]) == 0.0
    assert float(metrics["tokens"]) == float(np.sum(batch.mask))


@pytest.mark.slow
def test_one_turn_is_gspo_with_advantages_of_the_batch():
    batch = batch_of_turns(turns=1)
    state, _ = run(RECIPE, batch)
    plain, _ = run(RECIPE.replace(turn_updates=None), batch)
    assert_close(state.params, plain.params)


@pytest.mark.slow
def test_turns_that_are_not_there_make_no_step():
    """With momentum even a gradient of 0 would move the parameters."""
    batch, adam = batch_of_turns(), optax.adam(1e-2)
    state, metrics = run(RECIPE, batch, optimizer=adam)
    assert int(state.opt_state[0].count) == 3 and float(metrics["skipped"]) == 0.0
    still = batch.replace(rewards=jnp.ones_like(batch.rewards))
    after, _ = run(RECIPE, still)
    assert_close(after.params, PARAMS, atol=0)


@pytest.mark.slow
def test_metrics_are_of_the_turns_that_are_there():
    """A fourth column of turns, which no rollout has, changes nothing."""
    batch = batch_of_turns()
    batch = batch.replace(behavior_logp=jnp.full(batch.mask.shape, -4.0))
    three = batch.with_extras({"turn_where": batch.extras["turn_where"][..., :3]})
    (_, wide), (_, narrow) = run(RECIPE, batch), run(RECIPE, three)
    assert_close(wide, narrow)
    assert wide["sampler_gap"] > 0
    lengths = np.sum(batch.mask, -1)
    np.testing.assert_allclose(wide["length"], lengths[lengths > 0].mean(), rtol=1e-6)


@pytest.mark.slow
def test_rewards_count_whatever_trains():
    def none(advantages, mask):
        return jnp.zeros_like(mask)

    batch = batch_of_turns()
    _, metrics = run(RECIPE.replace(selection=none), batch)
    assert metrics["updates"] == metrics["tokens"] == 0
    np.testing.assert_allclose(metrics["reward"], np.mean(batch.rewards), rtol=1e-6)


@pytest.mark.slow
def test_a_batch_whose_turns_are_all_skipped_leaves_the_state_of_the_recipe():
    recipe = RECIPE.replace(advantage=jr.advantages.score_scaler())
    batch = batch_of_turns()
    rewards = batch.rewards.at[0, 0].set(jnp.nan)
    state, metrics = run(recipe, batch.replace(rewards=rewards))
    assert metrics["skipped"] == 3
    assert_close(state.algo_state, recipe.init(), atol=0)


@pytest.mark.slow
def test_microbatches_and_meshes_change_nothing():
    batch = batch_of_turns()
    whole, metrics = run(RECIPE, batch)
    for options in ({"microbatches": 2}, {"mesh": make_mesh(data=2, fsdp=2, tensor=2)}):
        parts, numbers = run(RECIPE, batch, **options)
        assert_close(parts.params, whole.params)
        assert_close(numbers, metrics, atol=1e-4)


@pytest.mark.slow
def test_a_random_order_is_drawn_from_the_runs_key():
    recipe = RECIPE.replace(turn_updates=TurnUpdates(order="random"))
    batch, step, ends = batch_of_turns(), shared_step(MODEL, recipe, SGD, remat="none"), []
    for seed in (0, 0, 1, 2, 3):
        state = init_state(PARAMS, SGD, recipe, key=jax.random.key(seed))
        state = jax.tree.map(lambda x: jnp.copy(x), state)
        ends.append(np.asarray(jax.tree.leaves(step(state, batch)[0].params)[0]))
    np.testing.assert_array_equal(ends[0], ends[1])
    assert any(np.abs(ends[0] - x).max() > 0 for x in ends[2:])


@for_each(
    "call, error, message",
    [
        (
            lambda: flat_step(MODEL, RECIPE, SGD, epochs=2),
            ValueError,
            "'seeupo' makes an optimizer s",
        ),
        (
            lambda: RECIPE.check_staleness(1),
            ValueError,
            "'seeupo' takes the ratio of each turn to the",
        ),
        (
            lambda: RECIPE.replace(turn_updates="back"),
            TypeError,
            "must be a TurnUpdates; got 'back'",
        ),
        (lambda: TurnUpdates(order="reverse"), ValueError, "order must be one of 'backward'"),
        (
            lambda: RECIPE.prepare(make_batch(), RECIPE.init()),
            ValueError,
            "the batch has no turn_ids",
        ),
    ],
)
def test_what_does_not_go_with_turns_is_one_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()
