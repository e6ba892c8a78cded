"""The step of policy gradients: its gradient, its parts, and all that it computes besides.

    params' = params - rate * grad loss(logp(params), recipe.prepare(batch))

Microbatches and devices add up to the gradient of the batch. Minibatches are disjoint groups, a
step each, with advantages of the whole batch, weights of their own, and one old policy: the one at
the start of the step. What has no token to train on makes no step.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_batch
from rows import for_each
from step_makers import (
    OPTIMIZER,
    arrays_of,
    assert_close,
    flat_step,
    one_layer,
    run,
    sgd,
    shared_scorer,
    state_of,
)

import jaxrl_llm as jr
from jaxrl_llm.recipes import Computed, Critic, Recipe
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.testing.cases import compiled, make_case
from jaxrl_llm.testing.model_checks import model_case
from jaxrl_llm.train import (
    apply_gradients,
    critic_values,
    init_critic,
    init_state,
    make_gradients,
    make_mesh,
    make_step,
)
from jaxrl_llm.train.mesh import place_batch
from jaxrl_llm.train.metrics import no_signal
from jaxrl_llm.train.models.score import Scorer, score_hidden
from jaxrl_llm.train.update.part import prepare_key
from jaxrl_llm.train.update.parts.turn_by_turn import order_key
from jaxrl_llm.train.update.score_batch import score_batch

SEED = 3


def update_numbers(metrics):
    return [float(metrics[x]) for x in ("updates", "withheld", "skipped")]


def test_one_step_is_the_gradient_of_the_recipe():
    model, params = one_layer()
    recipe, batch = jr.recipes.rloo(), make_batch(prompts=2)
    state, metrics, _ = run(recipe, batch, optimizer=sgd(1.0))

    def loss(params):
        logp, _ = jr.train.score(model, params, *arrays_of(batch))
        return recipe.loss(logp, recipe.prepare(batch, recipe.init())[0])

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert_close(state.params, jax.tree.map(lambda p, g: p - g, params, gradient))
    norm = optax.tree.norm(gradient)
    want = {"loss": value, "grad_norm": norm, "update_norm": norm, "reward": batch.rewards.mean()}
    want["length"] = batch.mask.sum(-1).mean()
    for name, number in want.items():
        np.testing.assert_allclose(metrics[name], number, rtol=1e-5, atol=1e-6, err_msg=name)
    assert int(state.step) == 1


@pytest.mark.slow
def test_microbatches_add_up():
    recipe, batch = jr.recipes.dapo(), make_batch()
    plain = sgd(1.0)  # Adam would blow rounding up where a gradient is nearly zero
    whole, metrics, _ = run(recipe, batch, optimizer=plain)
    parts, part_metrics, _ = run(recipe, batch, optimizer=plain, microbatches=4)
    assert_close(whole.params, parts.params)
    assert_close(metrics, part_metrics)


@pytest.mark.slow
def test_a_mesh_changes_nothing():
    recipe, batch = jr.recipes.dapo(), make_batch(prompts=16)
    options, mesh = {"optimizer": sgd(1.0), "minibatches": 4}, make_mesh(data=2, fsdp=2, tensor=2)
    one, metrics, _ = run(recipe, batch, **options)
    many, mesh_metrics, step = run(recipe, batch, mesh=mesh, **options)
    assert_close(one.params, jax.device_get(many.params))
    # A norm of 14 after three updates: some processors round it differently by twenty ulp.
    assert_close(metrics, jax.device_get(mesh_metrics), rtol=5e-6)
    step(many, place_batch(batch, mesh))
    assert step.compiled._cache_size() <= 1  # none where a long session evicted it


def test_what_a_step_draws_has_a_key_of_its_own():
    """Apart from those of other steps, of its rollouts, and of each other."""
    key, functions = jax.random.key(SEED), (prepare_key, order_key, jax.random.fold_in)
    keys = [key] + [function(key, step) for step in range(3) for function in functions]
    assert len({tuple(jax.random.key_data(x).tolist()) for x in keys}) == len(keys)


@pytest.mark.slow
def test_second_call_does_not_compile_and_state_is_donated():
    recipe, batch = jr.recipes.dr_grpo(length=5), make_batch(prompts=2)
    model, params = one_layer()
    state = state_of(recipe, data_cursor=(0, 3))
    step = make_step(model, recipe, OPTIMIZER)
    after, _ = step(state, batch)
    last, _ = step(after, batch)
    assert step.compiled._cache_size() <= 1  # none where a long session evicted it
    assert state.params["norm"]["scale"].is_deleted()
    assert not params["norm"]["scale"].is_deleted()  # what the caller gave is still theirs
    assert last.data_cursor == (0, 3) and int(last.step) == 2
    np.testing.assert_array_equal(jax.random.key_data(last.key), jax.random.key_data(state.key))


@pytest.mark.slow
def test_epochs_hold_old_logp_fixed():
    recipe, batch = jr.recipes.grpo(kl_coef=0.0), make_batch(prompts=4)
    model, params = one_layer()
    scored = batch.replace(old_logp=shared_scorer(model, microbatches=2)(params, batch))
    computed, metrics, _ = run(recipe, batch, epochs=3, optimizer=sgd(1.0))
    state = state_of(recipe, sgd(1.0))
    step, rows = make_step(model, recipe, sgd(1.0)), []
    for _ in range(3):
        state, row = step(state, scored)
        rows.append(row)
    assert_close(computed.params, state.params, atol=1e-4)
    values = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    first = {"entropy", "reward", "reward_std", "informative", "length", "tokens"}
    expected = {name: x[0] if name in first else x.mean() for name, x in values.items()}
    expected |= {"approx_kl": values["approx_kl"][-1], "ratio_max": values["ratio_max"].max()}
    assert_close(metrics, expected | {"skipped": 0.0, "updates": 3.0}, atol=1e-3)
    assert float(metrics["approx_kl"]) > 0
    assert int(computed.step) == 1 and int(state.step) == 3


@pytest.mark.slow
def test_minibatches_are_optimizer_steps_on_disjoint_groups():
    """Advantages of the whole batch, weights of each minibatch, one old policy."""
    recipe, batch = jr.recipes.dapo(dynamic_sampling=False), make_batch(prompts=8)
    model, params = one_layer()
    options = {"epochs": 2, "minibatches": 4, "microbatches": 2}
    after, metrics, _ = run(recipe, batch, optimizer=sgd(1.0), **options)

    scored = batch.replace(old_logp=shared_scorer(model)(params, batch))
    whole, _ = recipe.prepare(scored, recipe.init())
    state, gradients, rows = state_of(recipe, sgd(1.0)), make_gradients(model, recipe), []
    for p in (0, 1, 2, 3) * 2:
        part = recipe.weigh(jax.tree.map(lambda x, p=p: x[jnp.array([p, p + 4])], whole))
        np.testing.assert_allclose(part.weights.sum(), 1.0, rtol=1e-6)
        state, row = apply_gradients(sgd(1.0), state, gradients(state, part))
        rows.append(row)
    assert_close(after.params, state.params)
    np.testing.assert_allclose(metrics["loss"], np.mean([r["loss"] for r in rows]), atol=1e-5)
    np.testing.assert_allclose(metrics["tokens"], batch.mask.sum())
    np.testing.assert_allclose(metrics["reward"], batch.rewards.mean(), rtol=1e-6)
    assert int(after.step) == 1 and float(metrics["skipped"]) == 0


@pytest.mark.slow
def test_a_minibatch_without_a_token_to_train_on_makes_no_step():
    """Its groups were dropped; AdamW would move by its momentum and its decay."""
    recipe, batch = jr.recipes.dapo(dynamic_sampling=False), make_batch(prompts=4)
    batch = batch.replace(where=batch.where & jnp.array([True, False, True, False])[:, None])
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    after, metrics, _ = run(recipe, batch, optimizer=optimizer, minibatches=2, epochs=2)
    _, alone, _ = run(recipe, jax.tree.map(lambda x: x[::2], batch), optimizer=optimizer, epochs=2)
    assert float(metrics["updates"]) == 2 and float(metrics["skipped"]) == 0
    counts = [x for x in jax.tree.leaves(after.opt_state) if x.dtype == jnp.int32]
    assert set(map(int, counts)) == {2}
    for name in alone:
        np.testing.assert_allclose(metrics[name], alone[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_pairs_count_alike_in_any_minibatches():
    """The second minibatch has a group of equal rewards, which trains and has no pair."""
    recipe, rewards = jr.recipes.brain(), jnp.array([[1.0, 0.0], [1.0, 1.0]])
    batch = make_batch(prompts=2, group=2, rewards=rewards)
    model, params = one_layer()
    logp = shared_scorer(model)(params, batch)
    # The policy prefers the better response.
    ref_logp = logp - jnp.array([1.0, -1.0])[:, None]
    batch = batch.replace(ref_logp=ref_logp, behavior_logp=logp)
    found = [run(recipe, batch, optimizer=sgd(1e-3), minibatches=m)[1] for m in (1, 2)]
    for name in ("pairs", "pair_accuracy", "pair_margin", "pair_chosen", "pair_rejected"):
        values = [float(metrics[name]) for metrics in found]
        np.testing.assert_allclose(*values, rtol=1e-4, err_msg=name)
    assert found[1]["pairs"] == found[1]["pair_accuracy"] == 1


@pytest.mark.slow
def test_gap_to_the_sampler_is_of_the_policy_before_its_first_update():
    recipe, batch = jr.recipes.grpo(kl_coef=0.0), make_batch(prompts=4)
    model, params = one_layer()
    batch = batch.replace(behavior_logp=shared_scorer(model)(params, batch))
    for options in ({"epochs": 3}, {"minibatches": 2}, {}):
        _, metrics, _ = run(recipe, batch, optimizer=sgd(1.0), **options)
        assert float(metrics["sampler_gap_max"]) < 1e-5
        np.testing.assert_allclose(metrics["sampler_ess"], 1.0, atol=1e-4)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"minibatches": 2}])
def test_the_kl_of_an_update_is_measured_after_it(options):
    """Also where there is one: a method that reads it would otherwise see 0 for ever."""
    barrier = jr.stateless(jr.connect(jr.bind(jr.surrogates.kl_barrier), kl="last_kl"))
    term = jr.connect(jr.surrogates.kl_from_old, coef="kl_coef")
    recipe, batch = jr.recipes.drpo_len(length=5), make_batch(prompts=4)
    recipe = recipe.replace(
        computed=(jr.recipes.Computed("kl_coef", barrier, "controller"),), regularizers=(term,)
    )
    model, params = one_layer()
    before = shared_scorer(model)(params, batch)

    def measured(batch, **more):
        state, *_ = run(recipe, batch, optimizer=sgd(1.0), **options | more)
        after = shared_scorer(model)(state.params, batch)
        want = jr.diagnostics.approx_kl(after, before, batch.mask, estimator="k3")
        np.testing.assert_allclose(state.algo_state.last_kl, want, rtol=1e-3)
        return want

    assert measured(batch) > 1e-4
    # Older weights may have sampled: the update is measured all the same.
    older = before - 0.5 * batch.mask
    stale = batch.replace(old_logp=older) if not options else batch.replace(behavior_logp=older)
    measured(stale, stale=bool(options))
    unread, *_ = run(jr.recipes.dapo(), batch, optimizer=sgd(1.0), **options)
    assert float(unread.algo_state.last_kl) == 0


EIGHT = {"mesh": make_mesh(data=8)}


@for_each(
    "recipe, options, message",
    [
        (jr.recipes.dapo(), {"microbatches": 0}, "make_step: microbatches must be above 0"),
        (jr.recipes.dapo(), {"epochs": 0}, "make_step: epochs must be above 0"),
        (jr.recipes.dapo(), {"minibatches": 0}, "make_step: minibatches must be above 0"),
        (jr.recipes.dapo(), {"temperature": 0.0}, "make_step: temperature must be above 0"),
        (jr.recipes.rloo(), {"epochs": 2}, "'rloo' has a surrogate without a ratio to old_logp"),
        (jr.recipes.dapo(), {"microbatches": 3}, "8 prompts do not split into 3 microbatches"),
        (jr.recipes.dapo(), {"minibatches": 3}, "8 prompts do not split into 3 minibatches"),
        (jr.recipes.dapo(), {"minibatches": 4} | EIGHT, "a minibatch of 2 prompts .* over 8 devi"),
        (jr.recipes.dapo(), {"microbatches": 2} | EIGHT, "a microbatch of 4 prompts .* over 8 dev"),
        (jr.recipes.grpo(kl_coef=0.1), {}, "the batch has no ref_logp"),
    ],
)
def test_bad_numbers_are_named(recipe, options, message):
    with pytest.raises(ValueError, match=message):
        run(recipe, make_batch(), **options)


@for_each(
    "recipe, optimizer, message",
    [
        ("grpo", OPTIMIZER, "recipe must be a Recipe, such as jr.recipes.grpo\\(\\); got 'grpo'"),
        (jr.recipes.grpo, OPTIMIZER, "recipe must be a Recipe, .* got <function grpo"),
        (jr.recipes.dapo(), None, "optimizer must be .*optax.adamw.* got None"),
        (jr.recipes.dapo(), 1e-3, "optimizer must be .*optax.adamw.* got 0.001"),
    ],
)
def test_what_is_no_recipe_optimizer_or_key_is_named(recipe, optimizer, message):
    model, params = one_layer()
    with pytest.raises(TypeError, match=f"make_step: {message}"):
        make_step(model, recipe, optimizer)
    with pytest.raises(TypeError, match=f"init_state: {message}"):
        init_state(params, optimizer, recipe, key=jax.random.key(0))
    with pytest.raises(TypeError, match="init_state: key must be one typed key"):
        init_state(params, OPTIMIZER, jr.recipes.dapo(), key=jnp.zeros(2, jnp.uint32))


@pytest.mark.slow
def test_gradients_and_an_optimizer_are_float32_beside_bfloat16_parameters():
    recipe, batch, seen = jr.recipes.dr_grpo(length=5), make_batch(), set()
    model, params = tiny_model(dtype="bfloat16", num_layers=1)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def spy(updates, state, params=None):
        seen.update(x.dtype.name for x in jax.tree.leaves(updates))
        return updates, state

    optimizer = optax.chain(optax.GradientTransformation(lambda p: (), spy), optax.adamw(1e-2))
    state = init_state(params, optimizer, recipe, key=jax.random.key(0))
    after, metrics = make_step(model, recipe, optimizer, microbatches=2)(state, batch)
    assert seen == {"float32"}
    assert {x.dtype for x in jax.tree.leaves(after.params)} == {jnp.dtype("bfloat16")}
    assert {x.dtype.name for x in jax.tree.leaves(after.opt_state)} == {"float32", "int32"}
    assert {x.dtype.name for x in jax.tree.leaves(metrics)} == {"float32"}


def top(logits, targets):
    return jax.nn.log_softmax(logits).max(-1)


def nothing(logp, old_logp, advantages, mask):
    """A surrogate that leaves the loss to the regularizers."""
    return jnp.where(mask, 0.0 * logp, 0.0)


def plain(**changes) -> Recipe:
    slots = {"name": "plain", "advantage": jr.stateless(jr.advantages.dr_grpo)}
    return Recipe(**slots | {"surrogate": jr.surrogates.ppo_clip} | changes)


def batch_of(recipe, *, without=(), **changes):
    batch = model_case(recipe).batch
    extras = {k: x for k, x in batch.extras.items() if k not in without}
    return batch.replace(extras=extras, **changes)


def run_steps(recipe, batch, *, optimizer=None, **options):
    """The state and the metrics after steps of plain descent, with a run's key of its own."""
    first = {name: options.pop(name, None) for name in ("critic", "reference")}
    first["critic_optimizer"] = options.get("critic_optimizer")
    optimizer, key = optimizer or sgd(1.0), jax.random.key(SEED)
    state = init_state(one_layer()[1], optimizer, recipe, key=key, **first)
    return run(recipe, batch, optimizer=optimizer, state=state, **options)[:2]


def seen_by(recipe_of, *, without, **options):
    """What a probe in a slot of a recipe got in one step of two microbatches."""
    seen = []
    recipe = recipe_of(lambda *x: jax.debug.callback(lambda *y: seen.append(y), *x))
    batch = batch_of(recipe, without=without, **options.pop("changes", {}))
    run_steps(recipe, batch, microbatches=2, **options)
    jax.effects_barrier()
    return batch, seen


@jax.jit
def whole_hidden(params, batch, prompts=None):
    places = prompts or (batch.prompt_tokens, batch.prompt_mask)
    return score_hidden(one_layer()[0], params, *places, batch.tokens, batch.mask)


@jax.jit
def whole_logits(params, batch, prompts=None):
    """Logits ``[P, G, T, V]`` of all tokens at once."""
    return whole_hidden(params, batch, prompts) @ one_layer()[0].output_matrix(params).T


@jax.jit
def values_of(critic, batch):
    return critic_values(one_layer()[0], critic, batch)


def expect_same(a, b, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1.0, np.abs(y).max()))


@pytest.mark.slow
def test_a_statistic_reaches_the_loss_and_its_gradient():
    def lower_the_top(top, mask):
        return jnp.where(mask, top, 0.0)

    terms = {"computed": (Computed("top", top, "policy"),), "regularizers": (lower_the_top,)}
    recipe = plain(surrogate=nothing, **terms)
    batch, params = batch_of(recipe), one_layer()[1]
    ready, _ = compiled(recipe).prepare(batch, recipe.init())

    @jax.jit
    @jax.value_and_grad
    def want(p):
        best = jax.nn.log_softmax(whole_logits(p, batch)).max(-1)
        return jnp.sum(jnp.where(batch.mask, best, 0.0) * ready.weights)

    loss, grads = want(params)
    after, metrics = run_steps(recipe, batch, microbatches=2)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    expect_same(jax.tree.map(lambda a, b: a - b, params, after.params), grads)


@pytest.mark.slow
def test_what_is_scored_is_of_the_policy_at_the_start_of_the_step():
    def squares(logits, targets):
        return jnp.sum(jax.nn.softmax(logits) ** 2, -1)

    def recipe_of(note):
        def probe(rewards, *, where, old_entropy, sum_pi_sq, old_logp, hidden_sq):
            note(old_entropy, sum_pi_sq, old_logp, hidden_sq)
            return jr.advantages.dr_grpo(rewards, where=where)

        computed = (Computed("sum_pi_sq", squares, "old_policy"),)
        return plain(advantage=jr.stateless(probe), computed=computed)

    without = ("old_entropy", "sum_pi_sq", "hidden_sq")
    changes = {"old_logp": None}
    batch, seen = seen_by(recipe_of, without=without, changes=changes, temperature=0.7)
    log_p = np.asarray(jax.nn.log_softmax(whole_logits(one_layer()[1], batch) / 0.7), np.float64)
    kept = np.asarray(batch.mask)
    ids = np.clip(np.asarray(batch.tokens), 0, log_p.shape[-1] - 1)
    taken = np.take_along_axis(log_p, ids[..., None], -1)[..., 0]
    hidden = np.asarray(whole_hidden(one_layer()[1], batch), np.float64) / 0.7  # of those logits
    want = (-(np.exp(log_p) * log_p).sum(-1), np.exp(2 * log_p).sum(-1), taken)
    for found, expected in zip(seen[0], (*want, (hidden**2).sum(-1)), strict=True):
        np.testing.assert_allclose(found[kept], expected[kept], rtol=2e-5)


@pytest.mark.slow
def test_a_statistic_of_a_recipe_may_have_the_name_of_a_known_number():
    def half(logits, targets):
        return jnp.full(targets.shape, 0.5)

    names = ("old_entropy", "hidden_sq")
    recipe = plain(
        advantage=jr.stateless(lambda rewards, *, old_entropy, hidden_sq: rewards),
        computed=tuple(Computed(name, half, "old_policy") for name in names),
    )
    batch = batch_of(recipe, without=names, old_logp=None)
    scored = score_batch(batch, recipe, Scorer(one_layer()[0]), state=state_of(recipe))
    for name in names:
        assert (scored.extras[name][batch.mask] == 0.5).all()


@pytest.mark.slow
def test_what_the_batch_brings_is_not_computed_again():
    def missing(logits, targets):
        return jnp.full(targets.shape, jnp.nan)

    recipe = plain(
        advantage=jr.stateless(lambda rewards, *, sum_pi_sq: rewards + sum_pi_sq.sum(-1)),
        computed=(Computed("sum_pi_sq", missing, "old_policy"),),
    )
    _, metrics = run_steps(recipe, batch_of(recipe))
    assert np.isfinite(metrics["loss"])
    _, metrics = run_steps(recipe, batch_of(recipe, without=("sum_pi_sq",)))
    assert not np.isfinite(metrics["loss"])


@pytest.mark.slow
def test_a_teacher_reads_prompts_of_its_own():
    def recipe_of(note):
        def probe(advantages, *, teacher_top):
            note(teacher_top)
            return teacher_top

        return plain(
            computed=(Computed("teacher_top", top, "teacher"), Computed("again", probe, "batch")),
            inputs=("teacher_top",),
            regularizers=(lambda again, mask: jnp.where(mask, 0.0, 0.0),),
        )

    batch, seen = seen_by(recipe_of, without=("teacher_top",))
    P, G, T = batch.tokens.shape
    rows = batch.replace(
        tokens=batch.tokens.reshape(P * G, 1, T), mask=batch.mask.reshape(P * G, 1, T)
    )
    prompts = [batch.extras[f"teacher_prompt_{x}"].reshape(P * G, -1) for x in ("tokens", "mask")]
    want = jax.nn.log_softmax(whole_logits(one_layer()[1], rows, prompts)).max(-1)
    np.testing.assert_allclose(
        seen[0][0], np.where(batch.mask, want.reshape(P, G, T), 0.0), atol=2e-5
    )
    with pytest.raises(ValueError, match="the batch needs teacher_prompt_tokens"):
        seen_by(recipe_of, without=("teacher_top", "teacher_prompt_tokens"))


@pytest.mark.slow
def test_the_policy_reads_the_answer_after_each_turn():
    recipe, (network, params) = jr.recipes.igpo(), one_layer()
    batch = batch_of(recipe, without=("answer_logp",))
    state = state_of(recipe, sgd(1.0))
    step = make_step(network, recipe, sgd(1.0), remat="none", microbatches=2)
    prepared = step.prepared(state, batch).extras["answer_logp"]
    answers = jax.jit(Scorer(network).answers)(params, batch)
    np.testing.assert_allclose(prepared, answers, atol=2e-5)
    assert np.ptp(prepared, axis=-1).max() > 1e-3
    brought = batch_of(recipe)
    given = step.prepared(state, brought).extras["answer_logp"]
    np.testing.assert_array_equal(given, brought.extras["answer_logp"])
    missing = batch_of(recipe, without=("answer_logp", "ground_truth_mask", "ground_truth"))
    with pytest.raises(ValueError, match="'igpo': the batch has no ground_truth and no ground_tr"):
        run_steps(recipe, missing)


CRITIC = Critic(
    returns=jr.pipe(jr.advantages.terminal_rewards, jr.advantages.gae_returns),
    loss=jr.bind(jr.surrogates.value_loss, eps=0.2),
    heads=2,
    combine=jr.surrogates.soft_min,
    target_rate=0.25,
)


def advantages_of_values(*more):
    """As of PPO; they read the values of a critic."""
    functions = (jr.advantages.terminal_rewards, jr.advantages.gae, *more)
    return jr.chain(*map(jr.stateless, functions))


def with_critic(**changes) -> Recipe:
    return plain(advantage=advantages_of_values(jr.advantages.whiten), critic=CRITIC, **changes)


def new_critic(heads=2):
    return init_critic(*one_layer(), heads=heads, key=jax.random.key(1))


@pytest.mark.slow
def test_a_step_of_a_critic_is_the_gradient_of_its_loss_and_the_policy_uses_its_values():
    recipe, critic = with_critic(), new_critic()
    batch = batch_of(recipe, without=("values", "old_values"))
    options = {"critic": critic, "critic_optimizer": sgd(1.0)}
    after, _ = run_steps(recipe, batch, microbatches=2, **options)
    values = values_of(critic, batch)
    assert values.shape == (*batch.mask.shape, 2)
    assert not np.asarray(values)[~np.asarray(batch.mask)].any()
    extras = {**batch.extras, "old_values": values, "values": jr.surrogates.soft_min(values)}
    ready, _ = compiled(recipe).prepare(batch.replace(extras=extras), recipe.init())
    grads = jax.grad(lambda p: recipe.critic.total_loss(values_of(p, batch), ready))
    want = jax.tree.map(lambda a, g: a - g, critic, jax.jit(grads)(critic))
    expect_same(after.critic.params, want)
    average = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, critic, after.critic.params)
    expect_same(after.critic.target, average, 1e-6)
    params, scorer = one_layer()[1], Scorer(one_layer()[0])
    grads = jax.grad(lambda p: recipe.loss(scorer(p, batch).logp, ready))
    expect_same(after.params, jax.tree.map(lambda a, g: a - g, params, jax.jit(grads)(params)))


@for_each(
    "call, message",
    [
        (lambda: state_of(with_critic()), "has a critic; give critic=init_critic"),
        (lambda: state_of(plain(), critic=one_layer()[1]), "has no critic, but one is passed"),
        (lambda: made(with_critic()), "a critic but no critic_optimizer"),
        (lambda: made(plain(), critic_optimizer=sgd(1.0)), "no critic but a critic_optimizer"),
        (lambda: plain(advantage=advantages_of_values()), "reads values, and there is no critic"),
        (lambda: new_critic(heads=-1), "heads must not be neg"),
    ],
)
def test_a_critic_must_be_given_where_the_recipe_has_one(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def made(recipe, **options):
    return flat_step(one_layer()[0], recipe, sgd(1.0), **options)


def test_options_by_themselves_work_for_one_version():
    model, _ = one_layer()
    with pytest.warns(DeprecationWarning, match=r"pass epochs= as options=jr.train.StepOptions"):
        step = make_step(model, plain(), sgd(1.0), epochs=2, donate=False)
    batch = make_batch(prompts=2)
    assert step(state_of(plain(), sgd(1.0)), batch)[1]["updates"] == 2
    told = "make_step: there is no argument 'microbatch'; did you mean 'microbatches'"
    with pytest.raises(TypeError, match=told):
        make_step(model, plain(), sgd(1.0), microbatch=2)


@for_each("copy", [True, False])
def test_no_more_of_a_critic_is_copied_than_must_be(copy):
    recipe, critic, made = with_critic(), new_critic(), []

    def init(params):
        made.append(jax.tree.map(jnp.zeros_like, params))
        return made[-1]

    optimizer = sgd(1.0)
    given = {"critic": critic, "critic_optimizer": optimizer._replace(init=init), "copy": copy}
    state = state_of(recipe, optimizer, **given)

    def same(a, b):
        return {x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)}

    assert same(state.critic.opt_state, made[0]) == {True}
    assert same(state.critic.params, critic) == {not copy}
    # A step gives away the buffers of both.
    assert same(state.critic.target, critic) == same(*state.critic[::2]) == {False}


@pytest.mark.slow
def test_a_minibatch_that_no_loss_reads_is_as_one_without_a_token():
    """Its tokens have weight 0, as those of earlier windows; AdamW would move by its decay."""

    def weights(mask, rewards):
        return jr.aggregate.token_mean(mask & (rewards >= 0)[..., None])

    critic = dataclasses.replace(CRITIC, weights=weights)
    recipe = plain(advantage=advantages_of_values(), critic=critic, weights=weights)
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    options = {"critic_optimizer": optimizer}
    state = state_of(recipe, optimizer, critic=new_critic(), **options)
    options |= {"minibatches": 2, "remat": "none", "donate": False}
    step, batch = flat_step(one_layer()[0], recipe, optimizer, **options), make_batch(prompts=4)
    second = jnp.array([False, True, False, True])[:, None]
    after, metrics = step(state, batch.replace(rewards=jnp.where(second, -1.0, batch.rewards)))
    want, numbers = step(state, batch.replace(where=batch.where & ~second))
    for name in ("params", "opt_state", "critic"):
        assert_close(getattr(after, name), getattr(want, name))
    assert metrics["updates"] == metrics["critic_updates"] == 1
    assert metrics["skipped"] == metrics["critic_skipped"] == 0
    for name in numbers.keys() - {"reward", "reward_std", "informative"}:
        np.testing.assert_allclose(metrics[name], numbers[name], rtol=1e-5, err_msg=name)
    # Of a batch of such minibatches, neither the policy nor the critic or its target learns.
    still, metrics = step(after, batch.replace(rewards=jnp.full_like(batch.rewards, -1.0)))
    assert metrics["updates"] == metrics["critic_updates"] == 0
    assert_close((still.params, still.critic), (after.params, after.critic), atol=0, rtol=0)


@pytest.mark.slow
def test_a_reference_moves_after_each_step_and_is_what_ref_logp_is_of():
    term = jr.bind(jr.regularizers.kl_to_reference, estimator="k1", coef=1.0)
    rule = jr.bind(jr.regularizers.ema_reference, rate=0.5)
    recipe = plain(surrogate=nothing, regularizers=(term,), reference=rule)
    network, params = one_layer()
    start = jax.tree.map(lambda x: 0.9 * x, params)
    batch = batch_of(recipe, ref_logp=None)
    after, metrics = run_steps(recipe, batch, reference=start)
    score = shared_scorer(network)
    ready, _ = compiled(recipe).prepare(batch.replace(ref_logp=score(start, batch)), recipe.init())
    logp = score(params, batch)
    np.testing.assert_allclose(metrics["loss"], recipe.loss(logp, ready), rtol=1e-4, atol=1e-6)
    expect_same(after.reference, jax.tree.map(lambda a, b: (a + b) / 2, start, after.params), 1e-6)
    with pytest.raises(ValueError, match="has a frozen reference, which is not part of the state"):
        run_steps(plain(), batch_of(plain()), reference=start)


@pytest.mark.slow
def test_the_update_is_scaled_where_the_recipe_says_so():
    def half(advantages):
        return jnp.float32(0.5)

    def halved(change):
        return jax.tree.map(lambda a, b: a + 0.5 * (b - a), params, change)

    batch, params = batch_of(plain()), one_layer()[1]
    recipe = plain(computed=(Computed("update_scale", half, "batch"),))
    whole, scaled = (run_steps(x, batch)[0] for x in (plain(), recipe))
    expect_same(scaled.params, halved(whole.params), 1e-6)
    # And where a loop of one's own calls the parts of the step.
    state = state_of(recipe, sgd(0.1))
    ready, _ = recipe.prepare(batch, state.algo_state)
    gradients = jr.train.make_gradients(one_layer()[0], recipe)(state, ready)
    moved, full = (
        apply_gradients(sgd(0.1), state, x)[0] for x in (gradients, gradients._replace(scale=None))
    )
    expect_same(moved.params, halved(full.params), 1e-6)


@pytest.mark.slow
def test_a_policy_too_far_from_that_of_the_batch_makes_no_further_step():
    gate = jr.bind(jr.regularizers.kl_gate, max_kl=1e-4)
    plain, batch = jr.recipes.dapo(dynamic_sampling=False), make_batch(prompts=2)
    batch = batch.replace(rewards=jnp.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]))
    gated = plain.replace(computed=(Computed("update_scale", gate, "update"),))
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    options = {"optimizer": optimizer, "microbatches": 2}
    once, _, _ = run(plain, batch, **options)
    after, metrics, _ = run(gated, batch, epochs=3, **options)
    assert update_numbers(metrics) == [1.0, 2.0, 0.0]
    assert_close(after.params, once.params, atol=1e-6)
    counts = [x for x in jax.tree.leaves(after.opt_state) if x.dtype == jnp.int32]
    assert set(map(int, counts)) == {1}
    # The metrics are of all three: the last one measured what kept the policy where it is.
    score = shared_scorer(one_layer()[0])
    old_logp, logp = (score(x, batch) for x in (one_layer()[1], after.params))
    divergence = jr.diagnostics.approx_kl(logp, old_logp, batch.mask, estimator="k3")
    np.testing.assert_allclose(metrics["approx_kl"], divergence, rtol=1e-3)
    assert float(divergence) > 1e-4
    # A loop of one's own measures it too.
    ready, _ = gated.prepare(batch.replace(old_logp=old_logp), gated.init())
    gradients = make_gradients(one_layer()[0], gated, microbatches=2)
    states = (once, after, state_of(gated, optimizer))
    assert [float(gradients(x, ready).scale) for x in states] == [0.0, 0.0, 1.0]
    # Each minibatch has a divergence of its own.
    _, metrics, _ = run(gated, batch, minibatches=2, **options)
    assert float(metrics["updates"] + metrics["withheld"]) == 2.0 and metrics["updates"] >= 1.0


@pytest.mark.slow
def test_a_batch_with_withheld_and_skipped_steps_still_moves_the_recipes_state():
    """As the batch itself is sound: a minibatch alone had a loss that is non-finite."""

    def of_good(logp, old_logp, advantages, mask, *, rewards):
        loss = jr.surrogates.ppo_clip(logp, old_logp, advantages, mask)
        return jnp.where(jnp.any(rewards > 5), jnp.nan, loss)

    def count(rewards, state):
        return rewards, state + 1

    gate = jr.bind(jr.regularizers.kl_gate, max_kl=1e-4)
    recipe = plain(
        advantage=jr.Transform(lambda: jnp.int32(0), count),
        surrogate=of_good,
        computed=(Computed("update_scale", gate, "update"),),
    )
    fresh = make_batch(prompts=2, rewards=jnp.array([[9.0, 0.0, 0.0], [0.0, 1.0, 1.0]]))
    stale = fresh.replace(old_logp=jnp.where(fresh.mask, -1.0, 0.0))
    for batch, numbers in ((stale, [0.0, 1.0, 1.0]), (fresh, [1.0, 0.0, 1.0])):
        state, metrics, _ = run(recipe, batch, minibatches=2)
        assert update_numbers(metrics) == numbers and int(state.algo_state.advantage) == 1
    bad = stale.replace(rewards=stale.rewards + 9.0)
    assert int(run(recipe, bad, minibatches=2)[0].algo_state.advantage) == 0


@pytest.mark.slow
def test_a_recipe_draws_anew_in_each_step_from_the_runs_key():
    seen = []

    def drop(advantages, mask, *, key):
        keep = jax.random.bernoulli(key, 0.5, mask.shape)
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), keep)
        return keep

    recipe = plain(selection=drop)
    batch = batch_of(recipe)
    run_steps(recipe, batch, steps=2)
    jax.effects_barrier()
    assert (seen[0] != seen[1]).any()
    for step, keep in enumerate(seen):
        key = prepare_key(jax.random.key(SEED), step)
        want = jax.random.bernoulli(key, 0.5, batch.mask.shape)
        np.testing.assert_array_equal(keep, want)
    with pytest.raises(ValueError, match="draws random numbers; give it a key"):
        recipe.prepare(batch, recipe.init())


def with_dial(dial):
    def term(dial, mask):
        return jnp.where(mask, dial, 0.0)

    return plain(computed=(Computed("dial", dial, "controller"),), regularizers=(term,))


@for_each("learns", [False, True])
@for_each(
    "first, then, message",
    [
        (jnp.int32(1), lambda x: x * 1.5, "/dial is int32 in the state of a Transform's init and"),
        (jnp.zeros(()), lambda x: jnp.zeros(2), r"shapes; controllers/dial has \(\) and \(2,\)"),
        ({"a": jnp.zeros(())}, lambda x: {"b": x["a"]}, "'controllers/dial/a' is only in the fir"),
    ],
)
def test_a_transform_that_changes_the_type_of_its_state_is_refused(learns, first, then, message):
    def update(rewards, state, **context):
        return 1.0, state if learns else then(state)

    def learn(state, **context):
        return then(state)

    recipe = with_dial(jr.Transform(lambda: first, update, learn if learns else None))
    with pytest.raises(ValueError, match=f"Recipe 'plain': .*{message}"):
        run_steps(recipe, batch_of(recipe, old_logp=None))


@pytest.mark.slow
def test_integers_that_a_state_of_floats_holds_are_no_other_type():
    def update(rewards, state, mask, **context):
        return rewards, {"count": jnp.sum(mask), "last": 0.5}

    def recipe(last):
        return plain(advantage=jr.Transform(lambda: {"count": np.zeros(()), "last": last}, update))

    batch = batch_of(recipe(0.0), old_logp=None)
    state, _ = run_steps(recipe(0.0), batch)
    assert {x.dtype for x in state.algo_state.advantage.values()} == {jnp.dtype("float32")}
    with pytest.raises(ValueError, match="advantage/last is int32 in the state of .* and float32"):
        run_steps(recipe(0), batch)


@pytest.mark.slow
def test_what_a_correction_rejects_is_reported_of_all_that_was_sampled():
    """Two rules: one takes out a sequence, the other tokens, and neither counts the padding."""
    model, params = one_layer()
    batch = make_batch(prompts=2)
    shift = jnp.zeros(batch.mask.shape).at[0, 0, 0].set(12.0).at[1, 1, 0].set(-1.0)
    batch = batch.replace(behavior_logp=shared_scorer(model)(params, batch) + shift)
    token = jr.bind(jr.corrections.rejection_mask, statistic="k1", level="token", upper=2.0)

    def rejected(recipe):
        _, metrics, _ = run(recipe, batch)
        return {k: x for k, x in metrics.items() if k.startswith("rejected")}

    mask = np.asarray(batch.mask)
    expected = {
        "rejected_tokens": (mask[0, 0].sum() + 1) / mask.sum(),
        "rejected_sequences": 2 / 6,
        "rejected_tokens/veto_mask": mask[0, 0].sum() / mask.sum(),
        "rejected_sequences/veto_mask": 1 / 6,
        "rejected_tokens/rejection_mask": 2 / mask.sum(),
        "rejected_sequences/rejection_mask": 2 / 6,
    }
    both = rejected(jr.recipes.rollout_correction(reject=(jr.corrections.veto_mask, token)))
    assert both.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(both[name], value, rtol=1e-6, err_msg=name)
    once = rejected(jr.recipes.rollout_correction(reject=(token,)))
    assert set(once) == {"rejected_tokens", "rejected_sequences"}
    assert rejected(jr.recipes.rloo()) == {}


@pytest.mark.slow
@for_each("stale", [False, True])
def test_tokens_of_unknown_behavior_have_ratio_one(stale):
    """Whatever stands in behavior_logp there, nothing reads it."""
    model, params = one_layer()
    batch = make_batch(prompts=4)
    known = jnp.asarray(np.random.default_rng(0).random(batch.mask.shape) < 0.5)
    behavior = jnp.where(known, -5.0, 1e4)
    batch = batch.replace(behavior_logp=behavior, extras={"behavior_known": known})
    recipe = jr.recipes.rollout_correction() if not stale else jr.recipes.grpo()
    state, scorer = state_of(recipe, sgd(0.1)), Scorer(model)
    scored = score_batch(batch, recipe, scorer, state=state, stale=stale)
    want = np.where(known, -5.0, scorer(params, batch).logp)
    found = np.where(batch.mask, scored.behavior_logp - want, 0)
    np.testing.assert_allclose(found, 0, atol=1e-5)
    if stale:
        np.testing.assert_array_equal(scored.old_logp, scored.behavior_logp)
        return
    prepared, _ = recipe.prepare(scored, state.algo_state)
    unknown = np.asarray(batch.mask & ~known)
    np.testing.assert_allclose(np.asarray(prepared.correction)[unknown], 1.0, atol=1e-5)


@pytest.mark.slow
def test_a_state_learns_of_the_update_by_the_policy_before_each_minibatch():
    batch, recipe = make_batch(prompts=4, rewards=jnp.eye(4)[:, :3]), jr.recipes.dr_grpo(length=5)

    def update(advantages, state):
        return 2 * advantages, state

    def learn(state, *, logp, old_logp, advantages, mask):
        return {"gap": logp - old_logp, "advantages": advantages, "tokens": mask.sum()}

    def first():
        zeros = jnp.zeros(batch.mask.shape)
        return {"gap": zeros, "advantages": zeros[..., 0], "tokens": jnp.int32(0)}

    memory = jr.core.Transform(first, update, learn)
    recipe = recipe.replace(advantage=jr.chain(recipe.advantage, memory))
    assert recipe.learns and not jr.recipes.dr_grpo(length=5).learns
    state, _, _ = run(recipe, batch, minibatches=2, microbatches=2, epochs=2)
    _, learned = state.algo_state.advantage
    moved = np.abs(learned["gap"]).max(axis=(1, 2))
    assert (moved[::2] < 1e-5).all() and (moved[1::2] > 1e-4).all()
    plain = jr.recipes.dr_grpo(length=5).prepare(batch, jr.recipes.dr_grpo(length=5).init())[0]
    assert_close(learned["advantages"], 2 * plain.advantages)
    assert int(learned["tokens"]) == int(batch.mask.sum())
    skipped = batch.replace(rewards=batch.rewards.at[0].set(jnp.nan))
    state, metrics, _ = run(recipe, skipped)
    assert metrics["skipped"] == 1 and int(state.algo_state.advantage[1]["tokens"]) == 0


def capo_run(schedule, *, mesh=None, **options):
    network, params = one_layer()
    recipe = jr.recipes.capo(tau_h=0.05, tau_f=3e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    state = state_of(recipe, optimizer, mesh=mesh, output_shape=network.output_matrix(params).shape)
    options |= {"mesh": mesh, "donate": False, "learning_rate": schedule}
    return recipe, state, flat_step(network, recipe, optimizer, **options)


@pytest.mark.slow
def test_capo_takes_adams_curvature_at_the_rate_of_each_update():
    """Its scores, the tokens left and the moments, by the rule on all tokens at once."""
    batch = make_batch(prompts=4, length=4)
    schedule = optax.linear_schedule(2e-3, 1e-3, 2)
    recipe, state, step = capo_run(schedule, microbatches=2, temperature=0.7)
    network, rule = one_layer()[0], recipe.computed_from("optimizer")["step_effects"]
    moments = rule.init(*network.output_matrix(state.params).shape)
    for made in range(2):
        hidden = score_hidden(network, state.params, *arrays_of(batch)).reshape(-1, 32)
        logits = hidden @ network.output_matrix(state.params).T / 0.7
        advantages = recipe.advantage.update(batch.rewards, (), where=batch.where)[0]
        effects, sums = rule(
            moments,
            hidden / 0.7,
            logits,
            batch.tokens.reshape(-1),
            advantages=jnp.repeat(advantages.reshape(-1), 4),
            mask=batch.mask.reshape(-1),
            learning_rate=schedule(made),
        )
        moments = rule.learn(moments, sums)
        prepared = step.prepared(state, batch)
        assert_close(prepared.extras["step_effects"].reshape(-1, 2), effects, atol=1e-6)
        low = (np.abs(effects[:, 0]) < 0.05) & (effects[:, 1] < 3e-4)
        np.testing.assert_array_equal(prepared.mask, batch.mask & low.reshape(batch.mask.shape))
        assert 0 < prepared.mask.sum() < batch.mask.sum()
        state, metrics = step(state, batch)
        assert metrics["skipped"] == 0 and metrics["tokens"] == prepared.mask.sum()
        assert_close(state.algo_state.rules["step_effects"], moments)


@pytest.mark.slow
def test_capo_on_a_mesh_in_packed_rows():
    batch, mesh, results = make_batch(prompts=8, length=4), make_mesh(data=4, fsdp=2), []
    host, model = jax.tree.map(np.asarray, batch), one_layer()[0]
    rows, _ = jr.train.pack_batch(host, "always", model=model, shards=8)
    assert rows.packing is not None
    for data, devices in ((batch, None), (rows, mesh)):
        _, state, step = capo_run(1e-3, mesh=devices)
        state, _ = step(state, place_batch(data, devices))
        results.append(jax.tree.map(np.asarray, state.algo_state.rules["step_effects"]))
    assert np.abs(results[0].mu).max() > 1e-3 and int(results[0].count) == 1
    assert_close(*results)


def test_what_a_rule_of_the_optimizer_needs_is_named():
    (network, params), batch = one_layer(), make_batch(prompts=2)
    recipe, optimizer = jr.recipes.capo(), optax.adamw(1e-3)
    with pytest.raises(ValueError, match="'capo' computes step_effects .* output_shape"):
        flat_step(network, recipe, optimizer, learning_rate=1e-3)(
            state_of(recipe, optimizer), batch
        )
    state = state_of(recipe, optimizer, output_shape=network.output_matrix(params).shape)
    with pytest.raises(ValueError, match="'capo' reads the learning rate"):
        make_step(network, recipe, optimizer)(state, batch)


# What a batch teaches


@pytest.mark.slow
def test_a_step_makes_the_updates_that_its_recipe_asks_for():
    recipe = jr.recipes.grpo(kl_coef=0.0).replace(epochs=2, minibatches=4)
    model, state = one_layer()[0], state_of(recipe)
    step = make_step(model, recipe, OPTIMIZER, remat="none")
    assert int(step(state, make_batch())[1]["updates"]) == 8
    with pytest.raises(ValueError, match="8 prompts do not split into 16 minibatches .* pass min"):
        make_step(model, jr.recipes.dapo(), OPTIMIZER).prepared(state, make_batch())


SHORTENED = jr.recipes.dr_grpo(length=5).replace(
    advantage=jr.chain(
        jr.stateless(jr.rewards.group_length_rewards), jr.stateless(jr.advantages.dr_grpo)
    )
)


def first_tokens(advantages, mask):
    return mask & (jnp.arange(mask.shape[-1]) == 0)


def late_credit(rewards, mask):
    """Advantages that are 0 for the first token of each response."""
    return rewards[..., None] * (mask & (jnp.arange(mask.shape[-1]) > 0))


def listed_advantages(advantage, **slots):
    return plain(advantage=jr.stateless(advantage), group_relative=False, **slots)


@for_each(
    "recipe, rewards, expected",
    [
        (jr.recipes.grpo(), 0.0, 1),  # whose KL term alone has a gradient
        (jr.recipes.grpo(), None, 0),
        (jr.recipes.dr_grpo(length=5), 0.1, 1),
        (jr.recipes.reinforce_pp(), 0.3, 1),  # whitened over the batch
        (jr.recipes.epo(), 1.0, 1),  # a bonus for entropy, and a KL term
        (SHORTENED, 1.0, 0),
        (jr.recipes.sft(), 0.0, 0),
        (jr.recipes.kto(), 1.0, 0),
        (jr.recipes.gkd(), 0.0, 0),
        (listed_advantages(late_credit), 1.0, 0),
        (listed_advantages(late_credit, selection=first_tokens), 1.0, 1),
        (plain(curation=jr.stateless(jr.curation.informative_groups)), 1.0, 1),
    ],
)
def test_a_signal_is_an_advantage_that_is_not_0(recipe, rewards, expected):
    batch = make_case(recipe=recipe).batch
    if rewards is not None:
        batch = batch.replace(rewards=jnp.full(batch.rewards.shape, rewards))
    ready, _ = recipe.prepare(batch, recipe.init())
    assert float(no_signal(recipe, ready)) == expected


@for_each(
    "recipe, passes",
    [
        (jr.recipes.luffy_shaping(length=6), 0),  # reads no log-probability of what sampled
        (jr.recipes.rollout_correction(), 1),  # of the old policy, also where none sampled
        (jr.recipes.topr(), 1),
    ],
)
def test_a_batch_with_demonstrations_is_scored_as_often_as_something_reads_it(recipe, passes):
    calls, batch = [], make_case().batch.replace(old_logp=None)
    known = batch.mask & (jnp.arange(batch.mask.shape[1])[:, None] > 0)
    batch = batch.with_extras({"behavior_known": known})
    model, params = one_layer()

    class Counted(Scorer):
        def __call__(self, *args, **kwargs):
            calls.append(self)
            return super().__call__(*args, **kwargs)

    state = init_state(params, OPTIMIZER, recipe, key=jax.random.key(0))
    jax.eval_shape(lambda x: score_batch(x, recipe, Counted(model), state=state), batch)
    assert len(calls) == passes


def test_a_method_that_trains_no_weights_has_no_backward_pass(monkeypatch):
    def refuse(*_):
        raise AssertionError("a gradient is computed")

    monkeypatch.setattr("jaxrl_llm.train.update.objective.accumulate_gradients", refuse)
    for recipe in (jr.recipes.training_free_grpo(), jr.recipes.grpo(kl_coef=0.0)):
        step = make_step(one_layer()[0], recipe, OPTIMIZER)
        if recipe.trains_weights:
            with pytest.raises(AssertionError, match="a gradient is computed"):
                step.lower(state_of(recipe), make_batch())
        else:
            step.lower(state_of(recipe), make_batch())
