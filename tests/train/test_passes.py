"""What a step computes besides the policy's gradient: statistics, teacher, critic, references."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl_llm as jr
from jaxrl_llm.recipes import Computed, Critic, Recipe
from jaxrl_llm.testing.cases import compiled
from jaxrl_llm.testing.model_checks import model, model_case
from jaxrl_llm.train import critic_values, init_critic, init_state, make_step
from jaxrl_llm.train.policy_gradient import prepare_key
from jaxrl_llm.train.score import score_hidden

SEED = 3


def top(logits, targets):
    return jax.nn.log_softmax(logits).max(-1)


def nothing(logp, old_logp, advantages, mask):
    """A surrogate that leaves the loss to the regularizers."""
    return jnp.where(mask, 0.0 * logp, 0.0)


def plain(**changes) -> Recipe:
    slots = {
        "name": "plain",
        "advantage": jr.stateless(jr.advantages.dr_grpo),
        "surrogate": jr.surrogates.ppo_clip,
    }
    return Recipe(**{**slots, **changes})


def batch_of(recipe, *, without=(), **changes):
    batch = model_case(recipe).batch
    extras = {k: x for k, x in batch.extras.items() if k not in without}
    return batch.replace(extras=extras, **changes)


def run(recipe, batch, *, steps=1, optimizer=None, critic=None, reference=None, **options):
    """The state and the metrics after some steps on one batch."""
    network, params = model()
    optimizer = optimizer or optax.sgd(1.0)
    first = {"critic": critic, "critic_optimizer": options.get("critic_optimizer")}
    key = jax.random.key(SEED)
    state = init_state(params, optimizer, recipe, key=key, reference=reference, **first)
    step = make_step(network, recipe, optimizer, remat="none", **options)
    for _ in range(steps):
        state, metrics = step(state, batch)
    return state, metrics


@jax.jit
def whole_hidden(params, batch, prompts=None):
    places = prompts or (batch.prompt_tokens, batch.prompt_mask)
    return score_hidden(model()[0], params, *places, batch.tokens, batch.mask)


@jax.jit
def whole_logits(params, batch, prompts=None):
    """Logits ``[P, G, T, V]`` of all tokens at once."""
    return whole_hidden(params, batch, prompts) @ model()[0].output_matrix(params).T


@jax.jit
def values_of(critic, batch):
    return critic_values(model()[0], critic, batch)


def expect_same(a, b, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1.0, np.abs(y).max()))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_statistic_reaches_the_loss_and_its_gradient(microbatches):
    def lower_the_top(top, mask):
        return jnp.where(mask, top, 0.0)

    terms = {"computed": (Computed("top", top, "policy"),), "regularizers": (lower_the_top,)}
    recipe = plain(surrogate=nothing, **terms)
    batch, params = batch_of(recipe), model()[1]
    ready, _ = compiled(recipe).prepare(batch, recipe.init())

    @jax.jit
    @jax.value_and_grad
    def want(p):
        best = jax.nn.log_softmax(whole_logits(p, batch)).max(-1)
        return jnp.sum(jnp.where(batch.mask, best, 0.0) * ready.weights)

    loss, grads = want(params)
    after, metrics = run(recipe, batch, microbatches=microbatches)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    expect_same(jax.tree.map(lambda a, b: a - b, params, after.params), grads)


def test_what_is_scored_is_of_the_policy_at_the_start_of_the_step():
    seen = []

    def probe(rewards, *, where, old_entropy, sum_pi_sq, old_logp, hidden_sq):
        jax.debug.callback(lambda *x: seen.append(x), old_entropy, sum_pi_sq, old_logp, hidden_sq)
        return jr.advantages.dr_grpo(rewards, where=where)

    def squares(logits, targets):
        return jnp.sum(jax.nn.softmax(logits) ** 2, -1)

    recipe = plain(
        advantage=jr.stateless(probe), computed=(Computed("sum_pi_sq", squares, "old_policy"),)
    )
    batch = batch_of(recipe, without=("old_entropy", "sum_pi_sq", "hidden_sq"), old_logp=None)
    run(recipe, batch, microbatches=2, temperature=0.7)
    jax.effects_barrier()
    logits = whole_logits(model()[1], batch) / 0.7
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    kept = np.asarray(batch.mask)
    ids = np.clip(np.asarray(batch.tokens), 0, log_p.shape[-1] - 1)
    taken = np.take_along_axis(log_p, ids[..., None], -1)[..., 0]
    hidden = np.asarray(whole_hidden(model()[1], batch), np.float64)
    want = (-(np.exp(log_p) * log_p).sum(-1), np.exp(2 * log_p).sum(-1), taken)
    want = (*want, (hidden**2).sum(-1))
    for found, expected in zip(seen[0], want, strict=True):
        np.testing.assert_allclose(found[kept], expected[kept], rtol=2e-5)


def test_what_the_batch_brings_is_not_computed_again():
    def missing(logits, targets):
        return jnp.full(targets.shape, jnp.nan)

    recipe = plain(
        advantage=jr.stateless(lambda rewards, *, sum_pi_sq: rewards + sum_pi_sq.sum(-1)),
        computed=(Computed("sum_pi_sq", missing, "old_policy"),),
    )
    _, metrics = run(recipe, batch_of(recipe))
    assert np.isfinite(metrics["loss"])
    _, metrics = run(recipe, batch_of(recipe, without=("sum_pi_sq",)))
    assert not np.isfinite(metrics["loss"])


def test_a_teacher_reads_prompts_of_its_own():
    seen = []

    def probe(advantages, *, teacher_top):
        jax.debug.callback(seen.append, teacher_top)
        return teacher_top

    recipe = plain(
        computed=(Computed("teacher_top", top, "teacher"), Computed("again", probe, "batch")),
        inputs=("teacher_top",),
        regularizers=(lambda again, mask: jnp.where(mask, 0.0, 0.0),),
    )
    batch = batch_of(recipe)
    run(recipe, batch, microbatches=2)
    jax.effects_barrier()
    P, G, T = batch.tokens.shape
    rows = batch.replace(
        tokens=batch.tokens.reshape(P * G, 1, T), mask=batch.mask.reshape(P * G, 1, T)
    )
    prompts = [batch.extras[f"teacher_prompt_{x}"].reshape(P * G, -1) for x in ("tokens", "mask")]
    want = jax.nn.log_softmax(whole_logits(model()[1], rows, prompts)).max(-1).reshape(P, G, T)
    np.testing.assert_allclose(seen[0], np.where(batch.mask, want, 0.0), atol=2e-5)
    missing = batch_of(recipe, without=("teacher_prompt_tokens",))
    with pytest.raises(ValueError, match="no teacher_prompt_tokens"):
        run(recipe, missing)


CRITIC = Critic(
    returns=jr.pipe(jr.advantages.terminal_rewards, jr.advantages.gae_returns),
    loss=jr.bind(jr.surrogates.value_loss, eps=0.2),
    heads=2,
    combine=jr.surrogates.soft_min,
)


def with_critic(**changes) -> Recipe:
    advantage = jr.chain(
        jr.stateless(jr.advantages.terminal_rewards),
        jr.stateless(jr.advantages.gae),
        jr.stateless(jr.advantages.whiten),
    )
    return plain(advantage=advantage, critic=CRITIC, **changes)


def test_a_critic_learns_its_returns_and_the_policy_uses_its_values():
    recipe, network, params = with_critic(), *model()
    critic = init_critic(network, params, heads=2, key=jax.random.key(1))
    batch = batch_of(recipe, without=("values", "old_values"))
    options = {"critic": critic, "critic_optimizer": optax.adam(1e-2)}
    _, first = run(recipe, batch, **options)
    state, last = run(recipe, batch, steps=30, optimizer=optax.sgd(0.0), **options)
    assert float(last["critic_loss"]) < 0.3 * float(first["critic_loss"])
    values = values_of(state.critic.params, batch)
    assert values.shape == (*batch.mask.shape, 2)
    assert not np.asarray(values)[~np.asarray(batch.mask)].any()


def test_a_critics_step_is_the_gradient_of_its_loss():
    recipe, network, params = with_critic(), *model()
    critic = init_critic(network, params, heads=2, key=jax.random.key(1))
    batch = batch_of(recipe, without=("values", "old_values"))
    options = {"critic": critic, "critic_optimizer": optax.sgd(1.0)}
    after, _ = run(recipe, batch, microbatches=2, **options)
    values = values_of(critic, batch)
    extras = {**batch.extras, "old_values": values, "values": jr.surrogates.soft_min(values)}
    ready, _ = compiled(recipe).prepare(batch.replace(extras=extras), recipe.init())
    grads = jax.grad(lambda p: recipe.critic.total_loss(values_of(p, batch), ready))
    want = jax.tree.map(lambda a, g: a - g, critic, jax.jit(grads)(critic))
    expect_same(after.critic.params, want)


def test_a_critic_must_be_given_where_the_recipe_has_one():
    network, params = model()
    critic = init_critic(network, params, key=jax.random.key(1))
    options = {"key": jax.random.key(0)}
    with pytest.raises(ValueError, match="has a critic; give critic=init_critic"):
        init_state(params, optax.sgd(1.0), with_critic(), **options)
    with pytest.raises(ValueError, match="has no critic, but one is given"):
        init_state(params, optax.sgd(1.0), plain(), critic=critic, **options)
    with pytest.raises(ValueError, match="a critic but no critic_optimizer"):
        make_step(network, with_critic(), optax.sgd(1.0))
    with pytest.raises(ValueError, match="no critic but a critic_optimizer"):
        make_step(network, plain(), optax.sgd(1.0), critic_optimizer=optax.sgd(1.0))
    with pytest.raises(ValueError, match="the advantage reads values, and there is no critic"):
        plain(
            advantage=jr.chain(
                jr.stateless(jr.advantages.terminal_rewards),
                jr.stateless(jr.advantages.gae),
                jr.stateless(jr.advantages.whiten),
            )
        )
    with pytest.raises(ValueError, match="heads must be above 0"):
        init_critic(network, params, heads=0, key=jax.random.key(0))


@pytest.mark.parametrize("copy", [True, False])
def test_no_more_of_a_critic_is_copied_than_must_be(copy):
    recipe = with_critic().replace(critic=dataclasses.replace(CRITIC, target_rate=0.25))
    network, params = model()
    critic = init_critic(network, params, heads=2, key=jax.random.key(1))
    made = []

    def init(params):
        made.append(jax.tree.map(jnp.zeros_like, params))
        return made[-1]

    optimizer = optax.sgd(1.0)
    given = {"critic": critic, "critic_optimizer": optimizer._replace(init=init), "copy": copy}
    state = init_state(params, optimizer, recipe, key=jax.random.key(0), **given)

    def same(a, b):
        return {x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)}

    assert same(state.critic.opt_state, made[0]) == {True}
    assert same(state.critic.params, critic) == {not copy}
    # A step gives away the buffers of both.
    assert same(state.critic.target, critic) == same(*state.critic[::2]) == {False}


def test_a_critics_target_is_an_average():
    slow = dataclasses.replace(CRITIC, target_rate=0.25)
    recipe = with_critic().replace(critic=slow)
    network, params = model()
    critic = init_critic(network, params, heads=2, key=jax.random.key(1))
    batch = batch_of(recipe, without=("values", "old_values"))
    after, _ = run(recipe, batch, critic=critic, critic_optimizer=optax.sgd(1.0))
    want = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, critic, after.critic.params)
    expect_same(after.critic.target, want, 1e-6)


def test_a_reference_moves_after_each_step_and_is_what_ref_logp_is_of():
    term = jr.bind(jr.regularizers.kl_to_reference, estimator="k1", coef=1.0)
    rule = jr.bind(jr.regularizers.ema_reference, rate=0.5)
    recipe = plain(surrogate=nothing, regularizers=(term,), reference=rule)
    network, params = model()
    start = jax.tree.map(lambda x: 0.9 * x, params)
    batch = batch_of(recipe, ref_logp=None)
    after, metrics = run(recipe, batch, reference=start)
    score = jr.train.make_scorer(network)
    ready, _ = compiled(recipe).prepare(batch.replace(ref_logp=score(start, batch)), recipe.init())
    logp = score(params, batch)
    np.testing.assert_allclose(metrics["loss"], recipe.loss(logp, ready), rtol=1e-4, atol=1e-6)
    expect_same(after.reference, jax.tree.map(lambda a, b: (a + b) / 2, start, after.params), 1e-6)
    with pytest.raises(ValueError, match="keeps its reference frozen"):
        run(plain(), batch_of(plain()), reference=start)


def test_the_update_is_scaled_where_the_recipe_says_so():
    def half(advantages):
        return jnp.float32(0.5)

    batch, params = batch_of(plain()), model()[1]
    whole, _ = run(plain(), batch)
    scaled, _ = run(plain(computed=(Computed("update_scale", half, "batch"),)), batch)
    want = jax.tree.map(lambda a, b: a + 0.5 * (b - a), params, whole.params)
    expect_same(scaled.params, want, 1e-6)


def test_a_recipe_draws_anew_in_each_step_from_the_runs_key():
    seen = []

    def drop(advantages, mask, *, key):
        keep = jax.random.bernoulli(key, 0.5, mask.shape)
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), keep)
        return keep

    recipe = plain(selection=drop)
    batch = batch_of(recipe)
    run(recipe, batch, steps=2)
    jax.effects_barrier()
    assert (seen[0] != seen[1]).any()
    for step, keep in enumerate(seen):
        key = prepare_key(jax.random.key(SEED), step)
        want = jax.random.bernoulli(key, 0.5, batch.mask.shape)
        np.testing.assert_array_equal(keep, want)
    with pytest.raises(ValueError, match="draws random numbers; give it a key"):
        recipe.prepare(batch, recipe.init())


def test_a_controller_sees_how_far_the_last_update_went():
    def watch():
        def update(rewards, state, *, last_kl, **context):
            return last_kl, state + 1

        return jr.Transform(lambda: jnp.int32(0), update)

    def term(watched, mask):
        return jnp.where(mask, watched, 0.0)

    recipe = plain(computed=(Computed("watched", watch(), "controller"),), regularizers=(term,))
    state, metrics = run(recipe, batch_of(recipe, old_logp=None), epochs=3)
    # Measured after the last of the three, so beyond what the last saw before it.
    assert float(state.algo_state.last_kl) > float(metrics["approx_kl"]) > 0
    assert int(state.algo_state.controllers["watched"]) == 1
