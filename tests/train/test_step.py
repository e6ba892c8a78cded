import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_batch

import jaxrl_llm as jr
from jaxrl_llm.models.sharding import param_shardings, shard
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import (
    apply_gradients,
    init_state,
    make_gradients,
    make_mesh,
    make_scorer,
    make_step,
)
from jaxrl_llm.train.mesh import place_batch
from jaxrl_llm.train.passes import Passes
from jaxrl_llm.train.policy_gradient import order_key

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def run(recipe, batch, *, mesh=None, steps=1, optimizer=OPTIMIZER, **options):
    model, params = tiny_model()
    if mesh is not None:
        params = shard(params, param_shardings(params, mesh))
    state = init_state(params, optimizer, recipe, key=jax.random.key(0), mesh=mesh)
    step = make_step(model, recipe, optimizer, mesh=mesh, **options)
    for _ in range(steps):
        state, metrics = step(state, place_batch(batch, mesh))
    return state, metrics, step


def assert_close(a, b, atol=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


def test_one_step_is_the_gradient_of_the_recipe():
    model, params = tiny_model()
    recipe, batch = jr.recipes.rloo(), make_batch(prompts=2)
    state, metrics, _ = run(recipe, batch, optimizer=optax.sgd(1.0))

    def loss(params):
        logp, _ = jr.train.score(
            model, params, batch.prompt_tokens, batch.prompt_mask, batch.tokens, batch.mask
        )
        return recipe.loss(logp, recipe.prepare(batch, recipe.init())[0])

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert_close(state.params, jax.tree.map(lambda p, g: p - g, params, gradient))
    np.testing.assert_allclose(metrics["loss"], value, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradient), rtol=1e-5)
    np.testing.assert_allclose(metrics["update_norm"], optax.tree.norm(gradient), rtol=1e-5)
    np.testing.assert_allclose(metrics["reward"], batch.rewards.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["length"], batch.mask.sum(-1).mean(), rtol=1e-6)
    assert int(state.step) == 1


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_add_up(microbatches):
    recipe, batch = jr.recipes.dapo(), make_batch()
    plain = optax.sgd(1.0)  # Adam would blow rounding up where a gradient is nearly zero
    whole, metrics, _ = run(recipe, batch, optimizer=plain)
    parts, part_metrics, _ = run(recipe, batch, optimizer=plain, microbatches=microbatches)
    assert_close(whole.params, parts.params)
    assert_close(metrics, part_metrics)


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_a_mesh_changes_nothing(axes):
    recipe, batch = jr.recipes.grpo(kl_coef=0.0), make_batch(prompts=16)
    plain, mesh = optax.sgd(1.0), make_mesh(**axes)
    one, metrics, _ = run(recipe, batch, optimizer=plain, microbatches=2)
    many, mesh_metrics, step = run(
        recipe, batch, optimizer=plain, microbatches=2, mesh=mesh, steps=1
    )
    assert_close(one.params, jax.device_get(many.params))
    assert_close(metrics, jax.device_get(mesh_metrics))
    kernel = many.params["layers"]["0"]["mlp"]["up"]["kernel"]
    assert len(kernel.sharding.device_set) == 8
    assert kernel.sharding.is_fully_replicated == (axes == {"data": 8})
    many, _ = step(many, place_batch(batch, mesh))
    assert step.compiled._cache_size() <= 1  # none where a long session evicted it


def test_second_call_does_not_compile_and_state_is_donated():
    recipe, batch = jr.recipes.dr_grpo(length=5), make_batch(prompts=2)
    model, params = tiny_model()
    state = init_state(params, OPTIMIZER, recipe, key=jax.random.key(0), data_cursor=(0, 3))
    step = make_step(model, recipe, OPTIMIZER)
    after, _ = step(state, batch)
    last, _ = step(after, batch)
    assert step.compiled._cache_size() <= 1  # none where a long session evicted it
    assert state.params["norm"]["scale"].is_deleted()
    assert not params["norm"]["scale"].is_deleted()  # what the caller gave is still theirs
    assert last.data_cursor == (0, 3) and int(last.step) == 2
    np.testing.assert_array_equal(jax.random.key_data(last.key), jax.random.key_data(state.key))


def test_epochs_hold_old_logp_fixed():
    recipe, batch = jr.recipes.grpo(kl_coef=0.0), make_batch(prompts=4)
    model, params = tiny_model()
    scored = batch.replace(old_logp=make_scorer(model, microbatches=2)(params, batch))
    computed, metrics, _ = run(recipe, batch, epochs=3, optimizer=optax.sgd(1.0))
    state = init_state(params, optax.sgd(1.0), recipe, key=jax.random.key(0))
    step, rows = make_step(model, recipe, optax.sgd(1.0)), []
    for _ in range(3):
        state, row = step(state, scored)
        rows.append(row)
    assert_close(computed.params, state.params, atol=1e-4)
    values = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    first = {"entropy", "reward", "reward_std", "informative", "length", "tokens"}
    expected = {name: x[0] if name in first else x.mean() for name, x in values.items()}
    expected |= {"approx_kl": values["approx_kl"][-1], "ratio_max": values["ratio_max"].max()}
    assert_close(metrics, expected | {"skipped": 0.0}, atol=1e-3)
    assert float(metrics["approx_kl"]) > 0
    assert int(computed.step) == 1 and int(state.step) == 3


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_minibatches_are_optimizer_steps_on_disjoint_groups(microbatches):
    """Advantages of the whole batch, weights of each minibatch, one old policy, a random order."""
    recipe, batch = jr.recipes.dapo(), make_batch(prompts=8)
    model, params = tiny_model()
    optimizer, key = optax.sgd(1.0), jax.random.key(0)
    options = {"epochs": 2, "minibatches": 4, "microbatches": microbatches}
    after, metrics, _ = run(recipe, batch, optimizer=optimizer, **options)

    order = np.asarray(Passes(2, 4).order(order_key(key, 0), 8))
    assert order.shape == (8, 2)
    assert all(sorted(epoch.ravel()) == list(range(8)) for epoch in order.reshape(2, -1))
    assert not np.array_equal(order[:4], order[4:])
    scored = batch.replace(old_logp=make_scorer(model)(params, batch))
    whole, _ = recipe.prepare(scored, recipe.init())
    state = init_state(params, optimizer, recipe, key=key)
    gradients, rows = make_gradients(model, recipe), []
    for groups in order:
        part = recipe.weigh(jax.tree.map(lambda x, groups=groups: x[groups], whole))
        np.testing.assert_allclose(part.weights.sum(), 1.0, rtol=1e-6)
        state, row = apply_gradients(optimizer, state, gradients(state, part))
        rows.append(row)
    assert_close(after.params, state.params)
    np.testing.assert_allclose(metrics["loss"], np.mean([r["loss"] for r in rows]), atol=1e-5)
    np.testing.assert_allclose(metrics["tokens"], batch.mask.sum())
    np.testing.assert_allclose(metrics["reward"], batch.rewards.mean(), rtol=1e-6)
    assert int(after.step) == 1 and float(metrics["skipped"]) == 0


def test_minibatches_are_the_same_on_a_mesh():
    recipe, batch = jr.recipes.dapo(), make_batch(prompts=16)
    options = {"optimizer": optax.sgd(1.0), "minibatches": 4}
    one, metrics, _ = run(recipe, batch, **options)
    many, mesh_metrics, _ = run(recipe, batch, mesh=make_mesh(data=2, fsdp=2, tensor=2), **options)
    assert_close(one.params, jax.device_get(many.params))
    assert_close(metrics, jax.device_get(mesh_metrics))


def test_gap_to_the_sampler_is_of_the_policy_before_its_first_update():
    recipe, batch = jr.recipes.grpo(kl_coef=0.0), make_batch(prompts=4)
    model, params = tiny_model()
    batch = batch.replace(behavior_logp=make_scorer(model)(params, batch))
    for options in ({"epochs": 3}, {"minibatches": 2}, {}):
        _, metrics, _ = run(recipe, batch, optimizer=optax.sgd(1.0), **options)
        assert float(metrics["sampler_gap_max"]) < 1e-5
        np.testing.assert_allclose(metrics["sampler_ess"], 1.0, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"epochs": 2}, {"minibatches": 2}])
def test_the_kl_of_an_update_is_measured_after_it(options):
    """Also where there is one: a method that reads it would otherwise see 0 for ever."""
    recipe, batch = jr.recipes.drpo_len(length=5), make_batch(prompts=4)
    model, params = tiny_model()
    before = make_scorer(model)(params, batch)
    state, *_ = run(recipe, batch, optimizer=optax.sgd(1.0), **options)
    after = make_scorer(model)(state.params, batch)
    expected = jr.diagnostics.approx_kl(after, before, batch.mask, estimator="k3")
    assert expected > 1e-4
    np.testing.assert_allclose(state.algo_state.last_kl, expected, rtol=1e-3)
    if not options:  # older weights may have sampled: the update is measured all the same
        stale = batch.replace(old_logp=before - 0.5 * batch.mask)
        state, *_ = run(recipe, stale, optimizer=optax.sgd(1.0))
        after = make_scorer(model)(state.params, batch)
        expected = jr.diagnostics.approx_kl(after, before, batch.mask, estimator="k3")
        np.testing.assert_allclose(state.algo_state.last_kl, expected, rtol=1e-3)
    unread, *_ = run(jr.recipes.dapo(), batch, optimizer=optax.sgd(1.0), **options)
    assert float(unread.algo_state.last_kl) == 0


def test_several_updates_need_a_ratio():
    with pytest.raises(ValueError, match="'rloo' has a surrogate without a ratio to old_logp"):
        make_step(tiny_model()[0], jr.recipes.rloo(), OPTIMIZER, epochs=2)


def test_bad_numbers_are_named():
    model, params = tiny_model()
    recipe, batch = jr.recipes.dapo(), make_batch()
    for options in (
        {"microbatches": 0},
        {"epochs": 0},
        {"minibatches": 0},
        {"temperature": 0.0},
    ):
        name = next(iter(options))
        with pytest.raises(ValueError, match=f"make_step: {name} must be above 0"):
            make_step(model, recipe, OPTIMIZER, **options)
    with pytest.raises(ValueError, match="8 prompts do not split into 3 microbatches"):
        run(recipe, batch, microbatches=3)
    with pytest.raises(ValueError, match="8 prompts do not split into 3 minibatches"):
        run(recipe, batch, minibatches=3)
    with pytest.raises(ValueError, match="a minibatch of 2 prompts .* over 8 device"):
        run(recipe, batch, minibatches=4, mesh=make_mesh(data=8))
    with pytest.raises(ValueError, match="a microbatch of 4 prompts .* over 8 devices"):
        run(recipe, batch, microbatches=2, mesh=make_mesh(data=8))
    with pytest.raises(TypeError, match="init_state: key must be a typed key"):
        init_state(params, OPTIMIZER, recipe, key=jnp.zeros(2, jnp.uint32))
    with pytest.raises(ValueError, match="the batch has no ref_logp"):
        run(jr.recipes.grpo(kl_coef=0.1), batch)


def test_an_optimizer_keeps_float32_beside_bfloat16_parameters():
    recipe, batch = jr.recipes.dr_grpo(length=5), make_batch()
    model, params = tiny_model(dtype="bfloat16")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    optimizer = optax.adamw(1e-2)
    state = init_state(params, optimizer, recipe, key=jax.random.key(0))
    after, _ = make_step(model, recipe, optimizer)(state, batch)
    assert {x.dtype for x in jax.tree.leaves(after.params)} == {jnp.dtype("bfloat16")}
    assert {x.dtype.name for x in jax.tree.leaves(after.opt_state)} == {"float32", "int32"}


def test_a_bfloat16_model_gathers_gradients_in_float32():
    recipe, batch = jr.recipes.dr_grpo(length=5), make_batch()
    model, params = tiny_model(dtype="bfloat16")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    seen = {}

    def spy(updates, state, params=None):
        seen["dtypes"] = {x.dtype for x in jax.tree.leaves(updates)}
        return updates, state

    optimizer = optax.chain(optax.GradientTransformation(lambda p: (), spy), optax.sgd(0.1))
    state = init_state(params, optimizer, recipe, key=jax.random.key(0))
    state, metrics = make_step(model, recipe, optimizer, microbatches=2)(state, batch)
    assert seen["dtypes"] == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(metrics)} == {jnp.dtype("float32")}
