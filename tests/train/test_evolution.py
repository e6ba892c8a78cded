"""Evolution in the training loop: the step's laws, whole runs, exact resume, and devices."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exact_resume import assert_resumes
from helpers import batch_with, refuses
from rows import for_each
from test_checkpoint import assert_same
from tiny_run import tiny_run

import jaxrl_llm as jr
import jaxrl_llm.train.evolution
from jaxrl_llm.models.sharding import param_shardings, shard
from jaxrl_llm.train import (
    CheckpointConfig,
    EvaluationConfig,
    LoRAConfig,
    MeshConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainingError,
    init_state,
    make_evolution_step,
    make_mesh,
    train,
)
from jaxrl_llm.train.evolution import population_metrics
from jaxrl_llm.train.experiment.rollouts import _check_members
from jaxrl_llm.train.optimizer import describe_optimizer

RECIPE = jr.recipes.eggroll(sigma=0.05)
SGD = OptimizerConfig(name="sgd", learning_rate=0.5, b1=0.0, max_grad_norm=None)
pytestmark = pytest.mark.usefixtures("shared_programs")


def evolving(folder, recipe=RECIPE, **options):
    sampling = SamplingConfig(group_size=8, max_new_tokens=6)
    more = {"optimizer": SGD, "sampling": sampling, "remat": "full"} | options
    return tiny_run(folder, recipe=recipe, **more)


def batch_of(rewards, where=None):
    """A batch whose rewards ``[P, G]`` are all that matters."""
    P, G = rewards.shape
    batch = batch_with(
        np.zeros((P, G, 2), np.int32),
        rewards=rewards,
        where=np.ones((P, G), bool) if where is None else where,
        behavior_logp=np.zeros((P, G, 2), np.float32),
    )
    return jax.tree.map(jnp.asarray, batch)


@pytest.fixture(scope="module")
def tiny():
    return jr.testing.tiny_model(num_layers=1)


@pytest.fixture(scope="module")
def scores():
    return jnp.array(np.random.default_rng(0).uniform(size=(3, 8)), jnp.float32)


# One step for all tests: what it does besides the gradient shows where it must do nothing.
HALF = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5, momentum=0.9))


def first_step(params, *batch):
    """The first step of ``HALF`` on a batch of these rewards, and its metrics."""
    step = make_evolution_step(RECIPE, HALF, donate=False)
    return step(start(params, RECIPE, HALF), batch_of(*batch))


@jax.jit
def moved_by(params, fitness):
    """What ``HALF`` makes of the gradient of a fitness."""
    classes, key = jr.evolution.leaf_classes(params), jax.random.key(3)
    grads = jr.evolution.eggroll_grad(params, classes, key, 0, fitness, sigma=0.05)
    moves = jr.evolution.moving(classes)  # a decay leaves out what has no noise
    return jax.tree.map(lambda m, w, g: w - 0.5 * (g + 0.1 * w) if m else w, moves, params, grads)


def start(params, recipe, optimizer, **options):
    return init_state(params, optimizer, recipe, key=jax.random.key(3), **options)


def test_step_is_fitness_then_gradient_then_optimizer(tiny, scores):
    _, params = tiny
    state, metrics = first_step(params, scores)
    chex_close(state.params, moved_by(params, jr.evolution.zscore(scores.mean(axis=0))))
    assert int(state.step) == 1
    known = {"reward": scores.mean(), "missing": 0, "flat": 0, "informative": 1, "tokens": 48}
    known |= {"member_std": scores.mean(axis=0).std(), "loss": -scores.mean(), "skipped": 0}
    for name, value in known.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-5), name


def chex_close(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_members_without_a_score_are_left_out_and_counted(tiny, scores):
    _, params = tiny
    where = jnp.ones(scores.shape, bool).at[:, 7].set(False)
    fitness = jr.evolution.zscore(scores[:, :6].mean(axis=0))  # of the pairs that were graded
    expected = moved_by(params, fitness)
    for broken, kept in ((scores.at[:, 7].set(jnp.nan), None), (scores, where)):
        found, metrics = first_step(params, broken, kept)
        assert metrics["missing"] == 3 and metrics["left_out"] == 6
        assert metrics["reward"] == pytest.approx(float(scores[:, :7].mean()))
        chex_close(found.params, expected)
    found, metrics = first_step(params, jnp.full(scores.shape, jnp.nan))
    assert_same(found.params, params)
    assert (metrics["missing"], metrics["updates"], metrics["flat"]) == (24, 0, 1)


def test_metrics_are_of_the_members_as_their_fitness_is():
    def of(recipe, rewards):
        batch = batch_of(jnp.array(rewards))
        fitness, missing = recipe.shape(batch.rewards, where=batch.where)
        found = population_metrics(recipe, batch, fitness, missing)
        return [float(found[x]) for x in ("reward_std", "informative", "member_std", "flat")]

    tries = jr.recipes.eggroll(temperature=1.0).replace(tries=2)  # the better of two
    assert of(tries, [[1.0, 0.0, 1.0, 0.0]]) == [0, 0, 0, 1]
    assert of(tries, [[1.0, 0.0, 0.0, 0.0]]) == pytest.approx([0.5**0.5, 1, 0.5, 0])
    # A score counts with its partner; a prompt without any tells nothing.
    nan = float("nan")
    assert of(RECIPE, [[-10.0, nan]]) == [0, 0, 0, 1]
    found = of(RECIPE, [[3.0, 1.0, nan, 9.0], [nan] * 4, [nan, 4.0, 2.0, 2.0]])
    assert found == pytest.approx([2**0.5 / 2, 0.5, np.std([3.0, 1.0, 2.0, 2.0]), 0])


def test_members_alike_give_a_zero_step_and_it_is_said(tiny):
    _, params = tiny
    state, metrics = first_step(params, jnp.full((3, 8), 0.5))
    assert metrics["flat"] == 1 and metrics["grad_norm"] == 0
    chex_close(state.params, moved_by(params, jnp.zeros(8)))


def test_frozen_leaves_stay_bit_for_bit_under_weight_decay(tiny, scores):
    _, params = tiny
    recipe = RECIPE.replace(rules=(("*/mlp/*", "frozen"),))
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    step = make_evolution_step(recipe, optimizer)
    state, batch = start(params, recipe, optimizer), batch_of(scores)
    for _ in range(3):
        state, _ = step(state, batch)
    moves = jr.evolution.moving(recipe.classes(params))
    for move, new, old in zip(*map(jax.tree.leaves, (moves, state.params, params)), strict=True):
        assert np.array_equal(new, old) != move


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 8}, {"fsdp": 4, "tensor": 2}])
def test_devices_change_nothing_and_exchange_numbers_alone(tiny, scores, sizes):
    _, params = tiny
    optimizer = optax.adamw(1e-2)
    expected, _ = make_evolution_step(RECIPE, optimizer)(
        start(params, RECIPE, optimizer), batch_of(scores)
    )
    mesh = make_mesh(**sizes)
    placed = shard(params, param_shardings(params, mesh))
    step = make_evolution_step(RECIPE, optimizer, mesh=mesh)
    state = start(placed, RECIPE, optimizer, mesh=mesh)
    for kept, own in zip(*map(jax.tree.leaves, (state.opt_state[0].mu, placed)), strict=True):
        assert kept.sharding == own.sharding
    program = step.lower(state, batch_of(scores)).compile().as_text()
    state, _ = step(state, batch_of(scores))
    chex_close(state.params, expected.params)
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    lines = [line for line in program.splitlines() if re.search(rf" (?:{kinds})[\w-]*\(", line)]
    shapes = [re.findall(r"\w+\[([\d,]*)\]", line.split("=", 1)[1]) for line in lines]
    counts = [np.prod([int(n) for n in x.split(",") if n]) for x in sum(shapes, [])]
    assert max(counts, default=0) <= scores.size, lines
    assert bool(lines) == ("fsdp" in sizes)  # of split parameters, the norms are added up


@pytest.mark.slow
def test_resume_is_exact(tmp_path):
    adam = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=None)
    options = {"steps": 2, "checkpoint": CheckpointConfig(every=1), "optimizer": adam}
    tries = jr.recipes.eggroll(sigma=0.05, temperature=1.0).replace(tries=2)
    config = evolving(tmp_path / "whole", tries, **options)
    whole = train(config)
    assert_resumes(config, whole, tmp_path / "again")
    assert {"member_std", "missing", "flat", "update_norm"} <= whole.history[0].keys()
    assert whole.history[0]["update_norm"] > 0 and whole.history[0]["missing"] == 0


def test_a_run_says_which_optimizer_it_has_and_whose():
    bounded = dataclasses.replace(SGD, max_grad_norm=1.0)
    lines = [
        describe_optimizer(evolving("unused", recipe=name, optimizer=optimizer))
        for name, optimizer in (("es_qiu", None), ("open_es", None), ("eggroll", bounded))
    ]
    assert lines == [
        "sgd of es_qiu, learning rate 0.0005, no bound of the gradient",
        "adamw of open_es, learning rate 0.01, no bound of the gradient",
        "sgd of the config, not that of eggroll, learning rate 0.5, "
        "the gradient cut to a norm of 1 (optimizer.max_grad_norm)",
    ]
    assert describe_optimizer(evolving("unused", recipe=RECIPE.replace(optimizer=None))) == ""


def in_paper(name, rewards, noise, sigma):
    """The change of the weights by a step of the paper, in float64; ``noise`` is ``[N, ...]``."""
    scores, members = rewards.mean(axis=0), rewards.shape[1]
    if name == "es_qiu":  # theta += alpha / N sum_n Z_n eps_n
        weights = (scores - scores.mean()) / scores.std()
        return 5e-4 / members * np.tensordot(weights, noise, 1)
    if name == "eggroll":  # plain steps at the rate 0.125 of the authors' code
        weights = (scores - scores.mean()) / np.sqrt(scores.var() + 1e-5)
        return 0.125 * sigma / np.sqrt(members) * np.tensordot(weights, noise, 1)
    below, upto = (
        np.array([np.sum(op(scores, x)) for x in scores]) for op in (np.less, np.less_equal)
    )
    ranks = (below + upto - 1) / 2 / (members - 1) - 0.5
    grad = -np.tensordot(ranks, noise, 1) / (members * sigma)
    return -0.01 * grad / (np.abs(grad) + 1e-8)  # the first step of Adam


@pytest.mark.slow
@pytest.mark.of_many
@pytest.mark.parametrize("name", ["eggroll", "open_es", "es_qiu"])
def test_a_step_of_a_preset_by_its_name_is_that_of_its_paper(name, tmp_path, monkeypatch):
    """A whole run of one step that names only the method: no optimizer, no bound."""
    steps = []

    def recorded(*args, **options):
        step = make_evolution_step(*args, **options)

        def one(state, batch):
            steps.append(jax.device_get((state.params, batch.rewards)) + (state.key,))
            return step(state, batch)

        return one

    monkeypatch.setattr(jaxrl_llm.train.evolution, "make_evolution_step", recorded)

    def reward(prompt, completion, metadata):
        return sum(completion.encode()) % 97 / 97

    off = {"evaluation": EvaluationConfig(enabled=False), "reward": reward}
    result = train(evolving(tmp_path, recipe=name, optimizer=None, steps=1, **off))
    (before, rewards, key), recipe = steps[0], getattr(jr.recipes, name)()
    assert len(np.unique(rewards.mean(axis=0))) > 1
    # Noise of scale 1 around 0, from the keys of the members alone.
    zeros, classes = jax.tree.map(jnp.zeros_like, before), recipe.classes(before)
    member = jax.jit(lambda n: recipe.replace(sigma=1.0).member(zeros, classes, key, 0, n))
    noise = [jax.device_get(member(n)) for n in range(rewards.shape[1])]
    found, expected = [], []
    for path, *leaves in zip(
        jax.tree_util.tree_leaves_with_path(before),
        jax.tree.leaves(result.state.params),
        *map(jax.tree.leaves, noise),
        strict=True,
    ):
        drawn = np.stack(leaves[1:]).astype(np.float64)
        # EGGROLL leaves embeddings, norms and biases; the others have noise everywhere.
        assert drawn.any() or name == "eggroll", path[0]
        if not drawn.any():
            assert np.array_equal(leaves[0], path[1])
            continue
        found.append(np.ravel(np.asarray(leaves[0], np.float64) - path[1]))
        expected.append(np.ravel(in_paper(name, np.float64(rewards), drawn, recipe.sigma)))
    found, expected = np.concatenate(found), np.concatenate(expected)
    cosine = found @ expected / np.linalg.norm(found) / np.linalg.norm(expected)
    assert cosine == pytest.approx(1.0, abs=1e-4)
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)


ALONE = jr.recipes.open_es().replace(shared=False, fitness=jr.evolution.zscore)


@for_each(
    "options, message",
    [
        ({"sampling": SamplingConfig(group_size=7)}, "group_size must be even; got 7"),
        ({"remat": "dots"}, "remat has no effect with 'eggroll'.*at its default, 'full'"),
        ({"microbatches": 2}, "microbatches has no effect with 'eggroll'"),
        ({"epochs": 2}, "serve one update; got epochs 2"),
        ({"sampling": SamplingConfig(slots=8)}, "slots has no effect with 'eggroll'"),
        ({"lora": LoRAConfig(rank=2)}, "leave out the rank"),
        (
            {"mesh": MeshConfig(data=16), "prompts_per_step": 16},
            "8 members cannot be divided evenly",
        ),
        (
            {"recipe": ALONE, "mesh": MeshConfig(data=2)},
            "members with full noise that are not shared answer one prompt at a time, .* 2 devices",
        ),
        (
            {"recipe": jr.recipes.eggroll(fitness=jr.evolution.zscore)},
            r"one value for each of 8 members, which are shared; got \(4, 8\)",
        ),
        (
            {"recipe": jr.recipes.eggroll(shared=False)},
            r"one value for each of 32 members, which are not shared; got \(8,\)",
        ),
    ],
)
def test_what_has_no_part_in_evolution_is_refused(tmp_path, options, message):
    refuses(message, evolving, tmp_path, **options)


def broken_model():
    model, params = jr.testing.tiny_model(num_layers=1)
    return model, jax.tree.map(lambda x: x * jnp.nan, params), jr.testing.ByteTokenizer()


APART = jr.recipes.eggroll(sigma=0.05, shared=False, fitness=jr.evolution.zscore)


def test_column_j_of_a_batch_is_member_j():
    """Its noise is drawn again; where members are shared, the prompts may come in any order."""
    members = np.stack(np.broadcast_arrays([[0], [4]], np.arange(4)), axis=-1)

    def check(recipe, members):
        experiment = SimpleNamespace(recipe=recipe, collector="c")
        _check_members(experiment, SimpleNamespace(members=members), 4)

    for recipe, fits in ((RECIPE, members), (RECIPE, members[::-1]), (APART, members)):
        check(recipe, fits)
    bad = [members[:, ::-1], members[:, :3], members[:, [0, 0, 2, 3]]]
    for recipe, each in [(RECIPE, x) for x in bad] + [(APART, x) for x in (*bad, members[::-1])]:
        refuses("'c' drops, repeats or rearranges members", check, recipe, each)


class Reversed(type(jr.curation.in_order())):
    """Turns the members of each row around."""

    def observe(self, state, collection):
        decision, state = super().observe(state, collection)
        rows = [row._replace(members=row.members[::-1]) for row in decision.rows or ()]
        return decision._replace(rows=tuple(rows) or None), state


@pytest.mark.slow
def test_a_collector_that_rearranges_members_is_refused(tmp_path):
    recipe = RECIPE.replace(collector=Reversed())
    sampling = SamplingConfig(group_size=4, max_new_tokens=2)
    with pytest.raises(ValueError, match="'eggroll' draws the noise .* rearranges members"):
        train(evolving(tmp_path, recipe, sampling=sampling))


def test_a_population_without_any_score_makes_no_update(tiny, scores):
    """Also where the optimizer has a momentum and a decay that would go on."""
    step = make_evolution_step(RECIPE, HALF, donate=False)
    state, _ = first_step(tiny[1], scores)
    none = jnp.zeros(scores.shape, bool)
    found, metrics = step(state, batch_of(scores, none))
    assert (metrics["updates"], metrics["skipped"]) == (0, 0)
    assert_same((found.params, found.opt_state), (state.params, state.opt_state))


@pytest.mark.slow
def test_a_run_without_any_score_ends_and_its_evaluation_warns(tmp_path):
    held_out = EvaluationConfig()
    run = evolving(tmp_path, model=broken_model, steps=5, max_skipped=2, evaluation=held_out)
    with (
        pytest.warns(UserWarning, match="evaluate: the logits of a response to prompt .* are non"),
        pytest.raises(TrainingError, match="Step 2 makes no update: none of the 4 groups that"),
    ):
        train(run)
