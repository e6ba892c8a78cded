"""An update that is non-finite changes nothing but the count of steps.

With SGD at rate 0.5, parameters (1, -0, 3; 2) and gradients (0.5, 0, -1; 1) give (0.75, 0, 3.5;
1.5): gradient norm 1.5, update norm 0.75. A loss, gradient or scale that is NaN or infinite leaves
every bit of parameters, optimizer and method, on each way in which a device can leave it out.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exact_resume import assert_resumes
from helpers import make_batch
from rows import for_each
from step_makers import flat_step, one_layer, state_of
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.core import Transform
from jaxrl_llm.train import (
    CheckpointConfig,
    OptimizerConfig,
    init_critic,
    make_optimizer,
    make_step,
    train,
)
from jaxrl_llm.train import optimizer as module

LOSS, NAN, INF = (jnp.float32(x) for x in (2.0, jnp.nan, jnp.inf))
PARAMS = {"a": jnp.array([1.0, -0.0, 3.0]), "b": jnp.array([[2.0]])}
GRADS = {"a": jnp.array([0.5, 0.0, -1.0]), "b": jnp.array([[1.0]])}


def each_way(test):
    """Both ways in which an update is left out, on the devices of this machine."""
    signature = inspect.signature(test)

    def on(platform, **given):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.jax, "default_backend", lambda: platform)
            test(**given)

    first = inspect.Parameter("platform", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    on.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])
    on.__name__, on.__doc__ = test.__name__, test.__doc__
    return for_each("platform", ["cpu", "gpu"])(on)


def bits(tree):
    """Every array as bytes: -0.0 is not 0.0, and NaN equals itself."""

    def plain(x):
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return [plain(x).tobytes() for x in jax.tree.leaves(tree)]


@each_way
def test_one_update_by_hand():
    optimizer = optax.sgd(0.5)
    carry = (PARAMS, optimizer.init(PARAMS))
    (params, _), metrics = module.apply_if_finite(optimizer, carry, LOSS, GRADS)
    np.testing.assert_array_equal(params["a"], [0.75, 0.0, 3.5])
    np.testing.assert_array_equal(params["b"], [[1.5]])
    assert float(metrics["loss"]) == 2.0 and float(metrics["skipped"]) == 0.0
    assert "withheld" not in metrics  # without a scale
    np.testing.assert_allclose(metrics["grad_norm"], 1.5)
    np.testing.assert_allclose(metrics["update_norm"], 0.75)


@each_way
def test_an_update_that_is_non_finite_is_left_out():
    spoil = optax.stateless(lambda updates, params: jax.tree.map(jnp.log, updates))
    optimizer = optax.chain(optax.sgd(0.5, momentum=0.9), spoil)
    carry = (PARAMS, optimizer.init(PARAMS))
    after, metrics = jax.jit(functools.partial(module.apply_if_finite, optimizer))(
        carry, LOSS, GRADS
    )
    assert bits(after) == bits(carry)
    assert float(metrics["skipped"]) == 1.0 and float(metrics["update_norm"]) == 0.0


@each_way
def test_an_update_with_matrix_products_is_computed_once():
    calls = []

    def count(updates, params):
        jax.debug.callback(lambda: calls.append(1))
        return jax.tree.map(lambda x: x * jnp.dot(jnp.ones(2), jnp.ones(2)), updates)

    for optimizer, times in (
        (optax.stateless(count), 1),
        (optax.stateless(lambda u, p: jax.debug.callback(lambda: calls.append(1)) or u), 2),
    ):
        calls.clear()
        carry = (PARAMS, optimizer.init(PARAMS))
        _, metrics = module.apply_if_finite(optimizer, carry, LOSS, GRADS)
        jax.block_until_ready(metrics)
        jax.effects_barrier()
        assert len(calls) == times


@for_each("length", [0.0, 0.3, 5.0])
def test_gradients_are_shortened_by_the_norm_that_is_known(length):
    """As optax does it, and in a step without a second norm."""
    grads = jax.tree.map(lambda x: x * length / 1.5, GRADS)
    config = OptimizerConfig(name="sgd", learning_rate=0.5, b1=0.0, max_grad_norm=1.0)
    ours = make_optimizer(config)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5))
    found, expected = (
        module.apply_if_finite(each, (PARAMS, each.init(PARAMS)), LOSS, grads)
        for each in (ours, theirs)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), found[0][0], expected[0][0]
    )
    np.testing.assert_allclose(found[1]["update_norm"], 0.5 * min(length, 1.0), rtol=1e-6)
    told, _ = ours.update(grads, ours.init(PARAMS), PARAMS, grad_norm=jnp.float32(4.0))
    np.testing.assert_allclose(told["b"], -0.5 * grads["b"] / 4, rtol=1e-6)


SGD = OptimizerConfig(name="sgd", learning_rate=1.0, b1=0.0, max_grad_norm=1.0)
WRAPPED = {  # the wrapper, the norm of the gradient before it, and that of the update
    "scaled": (lambda inner: optax.chain(optax.scale(10.0), inner), 0.5, 1.0),
    "followed": (lambda inner: optax.chain(inner, optax.scale(2.0)), 3.0, 2.0),
    "masked": (lambda inner: optax.masked(inner, {"a": True, "b": False}), 1.5, 2**0.5),
}


@each_way
@for_each("name", WRAPPED)
def test_a_wrapped_optimizer_bounds_the_gradient_that_it_gets(name):
    """Wrappers pass extra arguments on, also where they change the gradient."""
    wrap, length, expected = WRAPPED[name]
    optimizer = wrap(make_optimizer(SGD))
    grads = jax.tree.map(lambda x: x * length / 1.5, GRADS)
    carry = (PARAMS, optimizer.init(PARAMS))
    _, metrics = module.apply_if_finite(optimizer, carry, LOSS, grads)
    np.testing.assert_allclose(metrics["grad_norm"], length, rtol=1e-6)
    np.testing.assert_allclose(metrics["update_norm"], expected, rtol=1e-6)


@each_way
def test_the_mean_of_several_gradients_is_bounded_by_its_own_norm():
    optimizer = optax.MultiSteps(make_optimizer(SGD), 2).gradient_transformation()
    carry, norms = (PARAMS, optimizer.init(PARAMS)), []
    for factor in (8.0, 0.1):  # the mean has a norm above 6, the second gradient one of 0.15
        grads = jax.tree.map(functools.partial(jnp.multiply, factor), GRADS)
        carry, metrics = module.apply_if_finite(optimizer, carry, LOSS, grads)
        norms.append(float(metrics["update_norm"]))
    np.testing.assert_allclose(norms, [0.0, 1.0], rtol=1e-6)


@each_way
def test_a_step_computes_the_norm_of_its_gradient_once(monkeypatch):
    calls, norm = [], module.trees.norm
    monkeypatch.setattr(module.trees, "norm", lambda tree: calls.append(1) or norm(tree))

    def count(optimizer):
        calls.clear()
        step = functools.partial(module.apply_if_finite, optimizer)
        jax.make_jaxpr(step)((PARAMS, optimizer.init(PARAMS)), LOSS, GRADS)
        return len(calls)

    unbounded = count(make_optimizer(dataclasses.replace(SGD, max_grad_norm=None)))
    assert count(make_optimizer(SGD)) == unbounded < count(optax.chain(make_optimizer(SGD)))


BAD = {
    "loss": {"loss": NAN},
    "infinite loss": {"loss": INF},
    "one gradient": {"grads": GRADS | {"b": jnp.array([[jnp.nan]])}},
    "infinite gradient": {"grads": GRADS | {"a": jnp.array([0.5, -jnp.inf, 0.0])}},
    "gradient too large to square": {"grads": GRADS | {"b": jnp.array([[1e30]])}},
    "scale": {"scale": NAN},
    "method": {"finite": jnp.bool_(False)},
}
OPTIMIZERS = {
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "with a key": optax.chain(
        optax.add_noise(eta=0.1, gamma=0.5, key=jax.random.key(3)), optax.sgd(0.1, momentum=0.9)
    ),
}


def update_of(name):
    """One compiled update, with all that may leave it out."""
    return compiled_update(name, module.jax.default_backend())


@functools.cache
def compiled_update(name, platform):
    plain = {"scale": jnp.float32(1.0), "finite": jnp.bool_(True), "trains": jnp.bool_(True)}
    jitted = jax.jit(functools.partial(module.apply_if_finite, OPTIMIZERS[name]))

    def call(carry, loss=LOSS, grads=GRADS, **changes):
        return jitted(carry, loss, grads, **plain | changes)

    return call


@each_way
@for_each("name", OPTIMIZERS)
def test_what_is_non_finite_changes_no_bit(name, subtests):
    update = update_of(name)
    carry, _ = update((PARAMS, OPTIMIZERS[name].init(PARAMS)))
    better, metrics = update(carry)
    assert bits(better) != bits(carry) and float(metrics["skipped"]) == 0.0
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(better[0]))
    for bad, changes in BAD.items():
        with subtests.test(bad):
            after, metrics = update(carry, **changes)
            assert bits(after) == bits(carry)
            assert float(metrics["skipped"]) == 1.0 and float(metrics["update_norm"]) == 0.0


@each_way
@for_each("name", OPTIMIZERS)
def test_a_scale_of_zero_changes_no_bit_and_counts_as_withheld(name):
    carry = PARAMS, OPTIMIZERS[name].init(PARAMS)

    def numbers(scale, **options):
        after, metrics = update_of(name)(carry, scale=jnp.float32(scale), **options)
        assert (bits(after) == bits(carry)) == (metrics["updates"] == 0)
        return [float(metrics[x]) for x in ("updates", "skipped", "withheld", "update_norm")]

    assert numbers(0.0) == [0.0, 0.0, 1.0, 0.0]
    # What is non-finite is a fault whatever the scale; without anything to learn, no step.
    assert numbers(0.0, loss=NAN) == [0.0, 1.0, 0.0, 0.0]
    assert numbers(0.0, trains=jnp.bool_(False))[:3] == [0.0, 0.0, 0.0]
    assert numbers(1.0)[:3] == [1.0, 0.0, 0.0]


def test_a_state_stays_finite():
    state = {"mean": jnp.array([0.0, 1.0]), "least": jnp.float32(jnp.inf), "n": jnp.int32(2)}
    assert module.stays_finite(state, state)  # what was infinite before may stay so
    assert module.stays_finite(state, state | {"least": jnp.float32(0.5)})
    assert not module.stays_finite(state, state | {"mean": jnp.array([0.0, jnp.nan])})
    assert not module.stays_finite(state, state | {"mean": jnp.array([jnp.inf, 0.0])})
    assert module.stays_finite((), ())


# A method that breaks where the batch tells it to.
PLACES = ("poison", "steep", "spoil", "late")


def fragile_surrogate(logp, old_logp, advantages, mask, poison, steep, late):
    """That of DAPO; NaN where poison, a gradient without bound where steep, NaN once off-policy."""
    loss = jr.surrogates.ppo_clip(logp, old_logp, advantages, mask)
    zero = jnp.where(steep > 0, logp - jax.lax.stop_gradient(logp), 1.0)
    loss = loss + jnp.where(steep > 0, jnp.sqrt(zero), 0.0)
    moved = jnp.any(jnp.where(mask, jnp.abs(logp - old_logp), 0.0) > 1e-6)
    loss = jnp.where((late > 0) & moved, jnp.nan, loss)
    return jnp.where(poison > 0, jnp.nan, loss)


def counted(rewards, state, *, spoil):
    """Rewards, and their mean in a state that also takes in what spoils it."""
    return rewards - rewards.mean(-1, keepdims=True), state + rewards.mean() + spoil.mean()


def latest(reference, params, step):
    return params


FRAGILE = jr.recipes.dapo().replace(
    minibatches=1,
    name="fragile",
    advantage=Transform(lambda: jnp.float32(0.0), counted),
    surrogate=fragile_surrogate,
    regularizers=(jr.bind(jr.regularizers.kl_to_reference, coef=1e-3),),
    reference=latest,
    inputs=PLACES,
)
OPTIMIZER = OPTIMIZERS["adamw"]


def sick(**values):
    """A batch that carries what breaks the method, in its third prompt only."""
    batch = make_batch(prompts=4, group=2)
    extras = {name: np.zeros((4, 1, 1), np.float32) for name in PLACES}
    for name, value in values.items():
        extras[name][2] = value
    return batch.replace(extras={name: jnp.asarray(x) for name, x in extras.items()})


@functools.cache
def fragile_step(updates):
    options = {"microbatches": 2, "epochs": updates, "donate": False}
    step = flat_step(one_layer()[0], FRAGILE, OPTIMIZER, **options)
    state = state_of(FRAGILE, OPTIMIZER, data_cursor=(0, 7))
    return step, step(state, sick())[0]  # one good step first: no part of the state is zero


ILL = {
    "in one microbatch": {"poison": 1.0},
    "in the gradient alone": {"steep": 1.0},
    "in the method's state alone": {"spoil": np.nan},
    "in the method's state, without bound": {"spoil": np.inf},
}


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("where", ILL)
@pytest.mark.parametrize("updates", [1, 2])
def test_a_step_that_is_non_finite_only_counts(where, updates):
    step, state = fragile_step(updates)
    batch = sick(**ILL[where])
    after, metrics = step(state, batch)
    assert float(metrics["skipped"]) == updates and float(metrics["update_norm"]) == 0
    assert bool(jnp.isfinite(metrics["loss"])) == (where != "in one microbatch")
    assert bool(jnp.isfinite(metrics["grad_norm"])) == (where != "in the gradient alone")
    assert bits(after._replace(step=state.step)) == bits(state)
    assert int(after.step) == int(state.step) + 1 == 2 and after.data_cursor == (0, 7)
    healthy, metrics = step(after, sick())
    expected, _ = step(state._replace(step=after.step), sick())
    assert bits(healthy) == bits(expected) and float(metrics["skipped"]) == 0


@pytest.mark.slow
def test_of_several_updates_the_bad_one_alone_is_left_out():
    (one, state), (two, _) = fragile_step(1), fragile_step(2)
    once, _ = one(state, sick())
    after, metrics = two(state, sick(late=1.0))
    assert float(metrics["skipped"]) == 1 and not np.isfinite(metrics["loss"])
    for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(once.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    # The method has taken in the batch, which is sound, and no divergence that is not.
    np.testing.assert_allclose(after.algo_state.advantage, once.algo_state.advantage, rtol=1e-6)
    assert np.isfinite(after.algo_state.last_kl)
    assert bits(after.reference) == bits(after.params) != bits(state.params)

    # What a step prepared can be looked at.
    step, state = fragile_step(1)
    found = step.prepared(state, sick(spoil=np.nan))
    expected = found.rewards - found.rewards.mean(-1, keepdims=True)
    np.testing.assert_allclose(found.advantages, expected, atol=1e-6)
    assert found.weights is not None and int(state.step) == 1


@pytest.mark.slow
def test_a_critic_alone_may_be_left_out():
    plain = jr.recipes.ppo_max(critic_warmup=0)

    def broken(values, old_values, returns, mask):
        loss = plain.critic.loss(values, old_values, returns, mask)
        return jnp.where(jnp.all(mask), jnp.nan, loss)

    critic = dataclasses.replace(plain.critic, loss=broken, target_rate=0.5)
    recipe, options = plain.replace(critic=critic), {"critic_optimizer": OPTIMIZER}
    critic = init_critic(*one_layer(), key=jax.random.key(0))
    state = state_of(recipe, OPTIMIZER, critic=critic, **options)
    step = flat_step(one_layer()[0], recipe, OPTIMIZER, donate=False, **options)
    batch = make_batch(prompts=4, group=2).replace(ref_logp=jnp.zeros((4, 2, 5)))
    good, metrics = step(state, batch)
    assert float(metrics["skipped"]) == float(metrics["critic_skipped"]) == 0
    assert float(metrics["critic_update_norm"]) > 0
    assert bits(good.critic.target) != bits(state.critic.target)
    after, metrics = step(good, batch.replace(mask=jnp.ones_like(batch.mask)))
    assert float(metrics["critic_skipped"]) == 1 and float(metrics["skipped"]) == 0
    assert bits(after.critic) == bits(good.critic) and bits(after.params) != bits(good.params)
    assert np.isfinite(metrics["loss"]) and np.isnan(metrics["critic_loss"])


@each_way
def test_a_state_that_changes_its_dtype_is_refused():
    half = {"a": jnp.ones(3, jnp.bfloat16)}

    def update(updates, state, params=None):
        return updates, jax.tree.map(lambda x: x.astype(jnp.float32), state)

    optimizer = optax.GradientTransformation(lambda params: params, update)
    with pytest.raises(TypeError):
        module.apply_if_finite(optimizer, (half, half), jnp.float32(1.0), half)


@pytest.mark.slow
def test_the_guard_takes_no_second_set_of_parameters(monkeypatch):
    model, params = one_layer()
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    recipe = FRAGILE.replace(reference=None, regularizers=())
    state = state_of(recipe, OPTIMIZER)

    def memory():
        step = make_step(model, recipe, OPTIMIZER, microbatches=2)
        return step.lower(state, sick()).compile().memory_analysis()

    guarded = memory()
    monkeypatch.setattr(module, "keep", lambda made, new, old: new)
    bare = memory()
    # All of the old state is written over: parameters and two moments.
    assert guarded.alias_size_in_bytes == bare.alias_size_in_bytes > 3 * size
    assert guarded.temp_size_in_bytes < bare.temp_size_in_bytes + size


def test_any_transformation_of_optax_is_an_optimizer():
    config = OptimizerConfig(
        transform=jr.bind(optax.lion, b1=0.95), learning_rate=0.5, warmup_steps=2, max_grad_norm=3.0
    )
    assert repr(config.transform) == "lion(b1=0.95)" in repr(config)
    optimizer = make_optimizer(config)
    peer = optax.chain(
        optax.clip_by_global_norm(3.0), optax.lion(lambda n: 0.25 * (n + 1), b1=0.95)
    )
    states, params = [optimizer.init(PARAMS), peer.init(PARAMS)], PARAMS
    for step in range(2):
        moves, states[0] = optimizer.update(GRADS, states[0], params)
        expected, states[1] = peer.update(GRADS, states[1], params)
        jax.tree.map(np.testing.assert_array_equal, moves, expected)
        assert module.learning_rate(config, states[0]) == 0.25 * (step + 1)


def test_a_rate_that_is_bound_is_that_of_the_config():
    config = tiny_run("run", optimizer=jr.bind(optax.lion, learning_rate=0.1))
    assert config.optimizer == OptimizerConfig(transform=jr.bind(optax.lion), learning_rate=0.1)
    assert OptimizerConfig.of(optax.lion) == OptimizerConfig(transform=optax.lion)


@for_each(
    "options, error",
    [
        ({"transform": 3}, "transform must be a function with a learning_rate .*; got 3"),
        ({"transform": lambda x: x}, "transform must be a function with a learning_rate"),
        (
            {"transform": optax.lion, "b1": 0.5},
            "b1 has no effect with transform .*lion",
        ),
        ({"transform": optax.sgd, "name": "sgd"}, "name has no effect with transform"),
    ],
)
def test_options_without_effect_beside_a_transformation(options, error):
    with pytest.raises((TypeError, ValueError), match=f"^optimizer: {error}"):
        OptimizerConfig(**options)


def test_a_function_that_returns_no_transformation_is_named():
    config = OptimizerConfig(transform=lambda learning_rate: learning_rate)
    with pytest.raises(TypeError, match="must return an optax transformation; got float"):
        make_optimizer(config)


@pytest.mark.slow
def test_a_run_with_muon_resumes_bit_for_bit(tmp_path):
    config = tiny_run(
        tmp_path / "whole",
        optimizer=OptimizerConfig(
            transform=jr.bind(optax.contrib.muon, beta=0.9), learning_rate=1e-2, decay_steps=8
        ),
        checkpoint=CheckpointConfig(every=1, keep=3),
        steps=3,
    )
    run = train(config)
    assert_resumes(config, run, tmp_path / "resumed")
    with pytest.raises(ValueError, match="optimizer.transform"):
        changed = OptimizerConfig(learning_rate=1e-2, decay_steps=8)
        train(dataclasses.replace(config, optimizer=changed), resume=True)
