"""The first steps of a run, in which the critic alone trains: steps, and whole runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exact_resume import assert_resumes
from helpers import make_batch
from step_makers import flat_step
from tiny_run import CONFIG, tiny_run

import jaxrl_llm as jr
from jaxrl_llm.models.sharding import param_shardings, shard
from jaxrl_llm.recipes import Computed
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import (
    CheckpointConfig,
    OptimizerConfig,
    init_critic,
    init_state,
    train,
)

pytestmark = pytest.mark.usefixtures("shared_programs")

CRITIC = OptimizerConfig(learning_rate=1e-2)
ADAM = optax.adamw(1e-2, weight_decay=0.1)


def batch_of(seed=0):
    """Rewards that differ, and a reference that is not the policy."""
    rng = np.random.default_rng(seed)
    batch = make_batch(rewards=rng.normal(size=(8, 3)).astype(np.float32), seed=seed)
    ref_logp = -rng.uniform(1.0, 9.0, batch.mask.shape)
    return batch.replace(ref_logp=jnp.asarray(ref_logp, jnp.float32))


def first_state(recipe, *, reference=None, mesh=None):
    model, params = tiny_model(num_layers=1)
    if mesh is not None:
        params = shard(params, param_shardings(params, mesh))
    critic = init_critic(model, params, key=jax.random.key(1))
    return init_state(
        params,
        ADAM,
        recipe,
        key=jax.random.key(0),
        critic=critic,
        critic_optimizer=ADAM,
        reference=reference,
        mesh=mesh,
    )


def step_of(recipe, **options):
    model = tiny_model(num_layers=1)[0]
    options = {"remat": "none", "donate": False, "epochs": 1, "minibatches": 1} | options
    return flat_step(model, recipe, ADAM, critic_optimizer=ADAM, **options)


def stepped(recipe, state, steps=1, **options):
    """The states and the metrics after each of some steps."""
    step, seen = step_of(recipe, **options), []
    for seed in range(steps):
        state, metrics = step(state, batch_of(seed))
        seen.append((state, metrics))
    return seen


def same(a, b):
    """Whether all leaves are equal, bit for bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def assert_close(a, b, **tolerances):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerances), a, b)


@pytest.mark.slow
def test_only_the_critic_moves_and_then_both_do_as_without_a_warmup():
    options, updates = {"epochs": 2, "minibatches": 2, "microbatches": 4}, 4
    waiting, plain = (jr.recipes.ppo_max(critic_warmup=n, kl_coef=0.1) for n in (2, 0))
    start = first_state(waiting)
    one, two, three = stepped(waiting, start, 3, **options)
    for state, metrics in (one, two):
        assert same((state.params, state.opt_state), (start.params, start.opt_state))
        made = [float(metrics[x]) for x in ("updates", "withheld", "skipped", "critic_updates")]
        assert made == [0, updates, 0, updates]
        assert float(metrics["grad_norm"]) == float(metrics["update_norm"]) == 0
    assert not same(one[0].critic.params, start.critic.params)
    assert not same(two[0].critic.params, one[0].critic.params)
    # The critic learns as beside a policy that trains: from the same values, targets and scores.
    step = step_of(plain, **options)
    want, expected = step(start, batch_of(0))
    assert_close(one[0].critic, want.critic, atol=1e-6)
    assert_close(one[0].algo_state, want.algo_state, rtol=1e-6)
    assert one[1].keys() == expected.keys() | {"withheld"}
    for name in ("reward", "ref_kl", "tokens", "critic_loss", "critic_grad_norm"):
        np.testing.assert_allclose(one[1][name], expected[name], rtol=1e-4, err_msg=name)
    # Then a step is one without a warmup from there, with the optimizer at its start.
    want, expected = step(two[0], batch_of(2))
    assert not same(three[0].params, two[0].params)
    assert_close(three[0].params, want.params, atol=2e-5)
    counts = [x for x in jax.tree.leaves(three[0].opt_state) if x.dtype == jnp.int32]
    assert set(map(int, counts)) == {updates}
    assert_close({**three[1], "withheld": 0.0}, {**expected, "withheld": 0.0}, rtol=1e-3, atol=1e-5)
    assert float(three[1]["withheld"]) == 0 and int(three[0].step) == 3


@pytest.mark.slow
def test_after_the_warmup_a_scale_of_the_recipe_is_the_scale():
    def half(advantages):
        return jnp.float32(0.5)

    scaled = jr.recipes.ppo_max(critic_warmup=1)
    scaled = scaled.replace(computed=(*scaled.computed, Computed("update_scale", half, "batch")))
    state = first_state(scaled)._replace(step=jnp.int32(1))
    plain = jr.recipes.ppo_max(critic_warmup=0)
    (whole, _), *_ = stepped(plain, first_state(plain))
    (moved, metrics), *_ = stepped(scaled, state)
    want = jax.tree.map(lambda a, b: a + 0.5 * (b - a), state.params, whole.params)
    assert_close(moved.params, want, atol=1e-6)
    (still, metrics), *_ = stepped(scaled, first_state(scaled))
    assert same(still.params, state.params) and float(metrics["withheld"]) == 1


def same_but_critic(a, b):
    """Whether two states differ in the critic and what counts steps alone."""
    return same((a.params, a.opt_state, a.reference), (b.params, b.opt_state, b.reference))


def test_the_critic_moves_alone_and_what_follows_the_policy_waits():
    """One step of the warmup and two after it, of a recipe with all that could move."""
    recipe = jr.recipes.adaptive_kl(initial=0.5, target=1e-3, horizon=10.0)
    others = (Computed("learner", learner(), "controller"), Computed("kl", watcher(), "controller"))
    read = [jr.connect(jr.regularizers.kl_to_reference, coef=name) for name in ("learner", "kl")]
    recipe = recipe.replace(
        critic=dataclasses.replace(recipe.critic, warmup=1),
        computed=(*recipe.computed, *others),
        regularizers=tuple(read),
        reference=jr.bind(jr.regularizers.reset_reference, every=2),
    )
    assert recipe.policy_controllers == {"kl_coef", "kl"}
    other = tiny_model(num_layers=1, seed=3)[1]
    start = first_state(recipe, reference=other)
    (one, waits), (two, trains), (three, _) = stepped(recipe, start, 3)
    assert same_but_critic(one, start) and not same(one.critic.params, start.critic.params)
    made = [float(waits[x]) for x in ("updates", "withheld", "skipped", "critic_updates")]
    assert made == [0, 1, 0, 1] and float(waits["grad_norm"]) == float(waits["update_norm"]) == 0
    assert not same(two.params, one.params) and not same(two.critic.params, one.critic.params)
    assert (float(trains["updates"]), float(trains["withheld"])) == (1, 0)
    counts = [x for x in jax.tree.leaves(two.opt_state) if x.dtype == jnp.int32]
    assert set(map(int, counts)) == {1} and int(two.step) == 2
    # The reference counts the steps after the warmup.
    assert same(two.reference, other) and same(three.reference, three.params)
    # Also where a step has no batch to train on.
    passed, waited = (step_of(recipe).pass_over(x) for x in (two, start))
    assert same(passed.reference, two.params) and same(passed.params, two.params)
    assert same(waited.reference, other) and (int(passed.step), int(waited.step)) == (3, 1)
    first, second = (state.algo_state.controllers for state in (one, two))
    assert first["kl_coef"] == 0.5 != second["kl_coef"]
    assert [first["learner"].tolist(), second["learner"].tolist()] == [[1, 0], [2, 1]]
    assert (float(first["kl"]), float(second["kl"])) == (0, 1)
    assert float(one.algo_state.last_kl) == 0 < float(two.algo_state.last_kl)


def learner():
    """A controller that counts its batches, and apart from them what it learned from updates."""

    def update(rewards, state):
        return jnp.float32(1.0), state + jnp.array([1.0, 0.0])

    def learn(state, logp):
        return state + jnp.array([0.0, 1.0])

    return jr.Transform(lambda: jnp.zeros(2), update, learn)


def watcher():
    """A controller that remembers the KL of the last update."""

    def update(rewards, state, *, last_kl):
        return jnp.float32(1.0), state + 1 + last_kl

    return jr.Transform(lambda: jnp.float32(0.0), update)


def test_a_controller_of_a_statistic_of_the_policy_follows_it():
    def least(logits, targets):
        return jnp.min(logits, axis=-1)

    def update(rewards, state, *, least):
        return jnp.float32(1.0), state + 1

    def plain(rewards, state):
        return jnp.float32(1.0), state + 1

    kl = jr.regularizers.kl_to_reference
    controllers = [jr.Transform(lambda: jnp.float32(0.0), each) for each in (update, plain)]
    recipe = jr.recipes.ppo(critic_warmup=1).replace(
        computed=(
            Computed("least", least, "old_policy"),
            *(Computed(n, x, "controller") for n, x in zip("ab", controllers, strict=True)),
        ),
        regularizers=tuple(jr.connect(kl, coef=name) for name in "ab"),
    )
    assert recipe.policy_controllers == {"a"}  # of which alone the updates wait


def above_earlier(logp, earlier_logp):
    return 0.1 * (logp - earlier_logp)


@pytest.mark.slow
def test_what_moves_the_policy_by_itself_waits_too():
    recipe = jr.recipes.ppo_max(critic_warmup=1).replace(
        reference=jr.regularizers.extrapolated(every=1, alpha=0.3),
        earlier=jr.regularizers.earlier_policies(weights=(2.0, 1.0), every=1),
        regularizers=(above_earlier,),
    )
    start = first_state(recipe)
    (one, _), (two, _) = stepped(recipe, start, 2)
    assert same((one.params, one.reference), (start.params, start.reference))
    assert not same(two.params, one.params) and not same(two.reference, one.reference)
    assert [int(state.earlier.count) for state in (one, two)] == [1, 2]
    assert same(two.earlier.policies[0], two.params)


@pytest.mark.slow
def test_a_loop_of_ones_own_waits_for_the_critic():
    recipe = jr.recipes.ppo_max(critic_warmup=1, kl_coef=0.0)
    model, state = tiny_model(num_layers=1)[0], first_state(recipe)
    zeros = jnp.zeros(batch_of().mask.shape)
    batch = batch_of().replace(extras={"values": zeros, "old_values": zeros[..., None]})
    ready, _ = recipe.prepare(batch, state.algo_state)
    gradients = jr.train.make_gradients(model, recipe)
    first = state.params
    for withheld in (1, 0):
        state, metrics = jr.train.apply_gradients(ADAM, state, gradients(state, ready))
        assert [metrics["withheld"], metrics["updates"]] == [withheld, 1 - withheld]
        assert same(state.params, first) == bool(withheld)


@pytest.mark.slow
def test_a_run_by_the_name_of_ppo_max_trains_its_critic_first(tmp_path):
    """Also past ``max_skipped``, and without a warning that nothing is learned."""
    config = tiny_run(
        tmp_path,
        recipe="ppo_max",
        critic=CRITIC,
        steps=52,
        max_skipped=2,
        optimizer=OptimizerConfig(learning_rate=1e-2, decay_steps=4),
        checkpoint=CheckpointConfig(every=50, keep=3),
    )
    lines = []
    result = train(config, log=lines.append)
    assert any(", the critic alone in the first 50;" in line for line in lines)
    rows = result.history
    assert [row["updates"] for row in rows] == [0] * 50 + [1, 1]
    assert [row["withheld"] for row in rows] == [1] * 50 + [0, 0]
    assert all(row["update_norm"] == row["grad_norm"] == 0 for row in rows[:50])
    assert max(abs(row["ref_kl"]) for row in rows[:50]) < 1e-6 < rows[51]["ref_kl"]
    assert all(row["critic_update_norm"] > 0 for row in rows)
    assert rows[49]["learning_rate"] == rows[50]["learning_rate"] == pytest.approx(1e-2)
    assert rows[51]["learning_rate"] == pytest.approx(7.5e-3)
    losses = [row["critic_loss"] for row in rows]
    assert np.mean(losses[40:50]) < np.mean(losses[:3])
    assert int(result.state.algo_state.controllers["score_std"].count) == 52 * 8


@pytest.mark.slow
def test_a_resume_in_the_warmup_is_exact(tmp_path):
    config = tiny_run(
        tmp_path / "whole",
        recipe=jr.recipes.ppo_max(critic_warmup=2),
        critic=CRITIC,
        steps=3,
        checkpoint=CheckpointConfig(every=1, keep=3),
    )
    again = assert_resumes(config, train(config), tmp_path / "run")
    assert [row["withheld"] for row in again.history] == [1, 1, 0]
    assert not same(again.state.params, CONFIG.model()[1])


def products(jaxpr):
    """How often a program multiplies matrices, and such numbers of each branch of its choices."""
    count, choices = 0, []
    for equation in jaxpr.eqns:
        count += equation.primitive.name == "dot_general"
        inner = [
            products(getattr(sub, "jaxpr", sub))
            for value in equation.params.values()
            for sub in (value if isinstance(value, (tuple, list)) else (value,))
            if hasattr(getattr(sub, "jaxpr", sub), "eqns")
        ]
        count += sum(x for x, _ in inner)
        choices += [choice for _, below in inner for choice in below]
        if equation.primitive.name == "cond":
            choices.append([x for x, _ in inner])
    return count, choices


@pytest.mark.slow
def test_a_step_of_the_warmup_computes_no_gradient_of_the_policy():
    recipe = jr.recipes.ppo_max(critic_warmup=1)
    step, state = step_of(recipe), first_state(recipe)
    inner, key = step._split(state)
    program = jax.make_jaxpr(step._step)(inner, batch_of(), key, (), ())
    _, choices = products(program.jaxpr)
    (choice,) = [x for x in choices if all(x)]
    trains, waits = choice
    assert 0 < 2 * waits < trains
