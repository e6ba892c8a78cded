"""CGPO: its three losses and their gradients in float64 NumPy, groups that do not train, tasks."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from preset_cases import batch_of, near
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.core import traits_of
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.recipes import Batch, CgpoTask, cgpo
from jaxrl_llm.testing import assert_recipe_ok, loop_checks
from jaxrl_llm.train import EvaluationConfig, train
from jaxrl_llm.train.experiment.run_data import check_data

G, T = 4, 5
OPTIMIZERS = ("crpg", "codpo", "crraft")


def make_batch(groups=6) -> tuple[np.ndarray, Batch]:
    """Rewards without ties, rollouts far from the reference, an empty one and a dropped one."""
    rng = np.random.default_rng(0)
    shape = (groups, G, T)
    logp = rng.normal(-1.5, 0.5, shape).astype(np.float32)
    lengths = rng.integers(1, T + 1, shape[:2])
    lengths[1, 0] = 0
    where = np.ones(shape[:2], bool)
    where[2, 1] = False
    rewards = rng.normal(size=shape[:2]).astype(np.float32)
    satisfied = rng.random(shape[:2]) < 0.6
    satisfied[0], satisfied[3], satisfied[4] = [True, False, True, True], False, True
    ref_logp = near(rng, logp - 0.3, 1.5)
    extras = {
        "greedy_rewards": rng.normal(size=groups),
        "satisfied": satisfied,
        "task_ids": np.arange(groups) % 3,
        "imitated": np.zeros(shape[:2], bool),
    }
    batch = batch_of(
        np.arange(T) < lengths[..., None],
        np.where(where, rewards, np.nan),
        old_logp=logp,
        ref_logp=ref_logp,
        extras=extras,
    )
    return logp, batch


def worked(judges=(True, False, True, True), rewards=(1.0, 2.0, -1.0, 0.0), shift=0.0):
    """The group of the specification: rewards (1, 2, -1, 0), divergences (1, 0, 2, 6)."""
    lengths, far = np.array([2, 1, 4, 3]), np.array([1.0, 0.0, 2.0, 6.0])
    mask = np.arange(T) < lengths[:, None]
    logp = np.where(mask, -1.0 - np.arange(T) / 8, 0.0).astype(np.float32)
    ref = logp - (far / lengths)[:, None] * mask
    extras = {
        "greedy_rewards": np.full(1, shift),
        "satisfied": np.array([judges]),
        "imitated": np.zeros((1, G), bool),
    }
    rewards = np.float32([rewards]) + np.float32(shift)
    return logp[None], batch_of(
        mask[None], rewards, old_logp=logp[None], ref_logp=ref[None], extras=extras
    )


@functools.cache
def compiled(recipe):
    """Prepares a batch, and gives the loss with its gradient."""

    def run(logp, batch):
        ready, _ = recipe.prepare(batch, recipe.init())
        return *jax.value_and_grad(recipe.loss)(logp, ready), ready

    return jax.jit(run)


def loss_and_grad(recipe, logp, batch):
    value, grad, ready = compiled(recipe)(jnp.asarray(logp), batch)
    return float(value), np.asarray(grad), ready


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_crpg_of_the_specification():
    logp, batch = worked()
    value, grad, ready = loss_and_grad(cgpo(), logp, batch)
    a = np.array([0.398294, -0.186553, -0.025188, -0.186553])
    np.testing.assert_allclose(ready.advantages[0], a, atol=1e-6)
    mask = np.asarray(batch.mask[0])
    assert value == pytest.approx(-(a @ logp[0].sum(-1)) / 10, rel=1e-5)  # of ten tokens
    np.testing.assert_allclose(grad[0], -a[:, None] * mask / 10, atol=1e-6)


def test_crraft_of_the_specification():
    logp, batch = worked()
    value, grad, ready = loss_and_grad(cgpo(optimizer="crraft"), logp, batch)
    np.testing.assert_allclose(ready.advantages[0], [0.731059, 0, 0, 0], atol=1e-6)
    assert value == pytest.approx(-0.731059 * logp[0, 0].sum() / 2, rel=1e-5)  # of its two tokens
    expected = np.zeros((G, T))
    expected[0, :2] = -0.731059 / 2
    np.testing.assert_allclose(grad[0], expected, atol=1e-6)


def test_codpo_of_the_specification():
    """Rollouts 0 and 1 are the pair: d = 1 and 0 at the start, lengths 2 and 1."""
    logp, batch = worked()
    value, grad, ready = loss_and_grad(cgpo(optimizer="codpo"), logp, batch)
    assert ready.advantages[0].tolist() == [1, -1, 0, 0]
    z = 0.1 * (1.0 - 0.0)
    assert value == pytest.approx(np.log1p(np.exp(-z)) - 5 / 2 * logp[0, 0].sum(), rel=1e-5)
    expected = np.zeros((G, T))
    expected[0, :2] = -0.1 * sigmoid(-z) - 5 / 2
    expected[1, 0] = 0.1 * sigmoid(-z)
    np.testing.assert_allclose(grad[0], expected, atol=1e-5)


def in_numpy(optimizer, logp, batch, groups=None, budget=5.0, beta=0.1, likelihood=5.0):
    """The loss of some groups, one rollout after another."""
    x, ref = np.float64(logp), np.float64(batch.ref_logp)
    old, mask = np.float64(batch.old_logp), np.asarray(batch.mask)
    satisfied, where = np.asarray(batch.extras["satisfied"]), np.asarray(batch.where)
    sums = {k: np.where(mask, v, 0).sum(-1) for k, v in (("x", x), ("old", old), ("ref", ref))}
    d, rewards = sums["old"] - sums["ref"], np.float64(batch.rewards)
    calibrated = sigmoid(rewards - np.float64(batch.extras["greedy_rewards"])[:, None])
    tokens = mask.sum(-1)
    groups = range(len(x)) if groups is None else groups
    rows = [(p, g) for p in groups for g in range(G) if where[p, g]]
    if optimizer == "crpg":
        r = [satisfied[i] * calibrated[i] * max(0, 1 - d[i] / budget) for i in rows]
        terms = [-(a - np.mean(r)) * sums["x"][i] for a, i in zip(r, rows, strict=True)]
        return sum(terms) / sum(tokens[i] for i in rows)
    losses, used = [], 0
    for p in groups:
        own = [i for i in rows if i[0] == p]
        if optimizer == "crraft":
            good = [i for i in own if satisfied[i] and d[i] <= budget]
            best = [i for i in good if rewards[i] == max(rewards[j] for j in good)]
            losses += [-calibrated[i] * sums["x"][i] / len(best) for i in best]
            used += sum(tokens[i] for i in best) / max(len(best), 1)
            continue
        own = [i for i in own if tokens[i]]
        good, bad = ([i for i in own if satisfied[i] == v] for v in (True, False))
        if not good:
            continue
        best = [i for i in good if rewards[i] == max(rewards[j] for j in good)]
        worst = [i for i in bad or own if rewards[i] == min(rewards[j] for j in bad or own)]
        if best != worst:
            used += 1
            for w, other in itertools.product(best, worst):
                z = beta * (sums["x"][w] - sums["ref"][w] - sums["x"][other] + sums["ref"][other])
                loss = np.log1p(np.exp(-z)) - likelihood / tokens[w] * sums["x"][w]
                losses.append(loss / len(best) / len(worst))
    return sum(losses) / used


@for_each("ties", [False, True])
@for_each("optimizer", OPTIMIZERS)
def test_the_loss_of_a_batch(optimizer, ties):
    logp, batch = make_batch()
    batch = batch.replace(rewards=jnp.sign(batch.rewards)) if ties else batch
    options = {"beta": 0.3, "likelihood": 0.5} if optimizer == "codpo" else {"budget": 2.0}
    for given in ({}, options):
        recipe = cgpo(optimizer=optimizer, **given)
        value, grad, _ = loss_and_grad(recipe, logp, batch)
        assert value == pytest.approx(in_numpy(optimizer, logp, batch, **given), rel=1e-5)
        assert np.isfinite(grad).all() and grad.any()


@for_each("optimizer", OPTIMIZERS)
def test_adding_a_constant_to_all_rewards_changes_nothing(optimizer):
    recipe = cgpo(optimizer=optimizer)
    for shift in (8.0, -8.0):  # below 0 too, where the verdict times the reward would choose others
        value, grad, _ = loss_and_grad(recipe, *worked(shift=shift))
        expected = loss_and_grad(recipe, *worked())
        assert value == pytest.approx(expected[0], rel=1e-4)
        np.testing.assert_allclose(grad, expected[1], rtol=1e-4, atol=1e-6)


@for_each("optimizer", OPTIMIZERS)
def test_without_a_satisfied_rollout_nothing_trains(optimizer):
    value, grad, ready = loss_and_grad(cgpo(optimizer=optimizer), *worked(judges=[False] * 4))
    assert value == 0 and not grad.any()
    # In CRPG such rollouts are in the mean of the batch, so their tokens count.
    assert bool(ready.weights.any()) is (optimizer == "crpg")


def test_codpo_without_a_pair():
    recipe = cgpo(optimizer="codpo")
    agree = worked(judges=[True] * 4, rewards=[1.0] * 4)
    assert not loss_and_grad(recipe, *agree)[2].weights.any()  # the chosen is the rejected
    logp, batch = worked(judges=[True] * 4)
    one = batch.replace(where=jnp.array([[True, False, False, False]]))
    assert not loss_and_grad(recipe, logp, one)[2].weights.any()
    # All are satisfied, so the worst of all is rejected.
    assert loss_and_grad(recipe, logp, batch)[2].advantages[0].tolist() == [0, 1, -1, 0]
    for pairs in (recipe, mixture()):
        with pytest.raises(ValueError, match="group_size must be at least 2"):
            pairs.check_group_size(1)


def test_rollouts_that_tie_share_the_place_of_one():
    logp, batch = worked(rewards=[1.0, 0.0, 1.0, 0.0])
    ready = loss_and_grad(cgpo(optimizer="codpo"), logp, batch)[2]
    assert ready.advantages[0].tolist() == [1, -1, 1, 0]  # the last is satisfied
    # Beside a group with one best rollout, of two tokens.
    both = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), batch, worked()[1])
    sums = logp[0].sum(-1)
    value, grad, ready = loss_and_grad(cgpo(optimizer="crraft"), np.concatenate([logp] * 2), both)
    assert ready.weights.sum() == pytest.approx(1.0)
    expected = -0.731059 * ((sums[0] + sums[2]) / 2 + sums[0]) / ((2 + 4) / 2 + 2)
    assert value == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(grad[:, 0, 0], [-0.731059 / 2 / 5, -0.731059 / 5], rtol=1e-5)


def test_the_best_of_rewards_that_are_all_calibrated_to_one():
    """A sigmoid in float32 is 1 from about 17 on."""
    logp, batch = worked(judges=[True] * 4, rewards=[20.0, 30.0, 0.0, 40.0])
    alone = cgpo(optimizer="crraft")
    tasks = cgpo(tasks={"a": CgpoTask(optimizer="crraft"), "b": CgpoTask()})
    batch = batch.with_extras({"task_ids": jnp.zeros(1, jnp.int32)})
    for recipe in (alone, tasks):  # the last rollout is beyond the budget
        assert loss_and_grad(recipe, logp, batch)[2].advantages[0].tolist() == [0, 1, 0, 0]


# Answers of the data


def with_answer(optimizer, *, judges, rewards=(1.0, 2.0, -1.0, 0.0)):
    """The last rollout is an answer of the data; the greedy reward is not read."""
    logp, batch = worked(judges=judges, rewards=rewards)
    ref = batch.ref_logp.at[0, 3].set(batch.old_logp[0, 3])  # near the reference
    extras = {
        "satisfied": batch.extras["satisfied"],
        "imitated": jnp.array([[False, False, False, True]]),
    }
    batch = batch.replace(ref_logp=ref, extras=extras)
    return loss_and_grad(cgpo(optimizer=optimizer, answers="demonstration"), logp, batch)


def test_crpg_against_an_answer_of_the_data():
    _, grad, ready = with_answer("crpg", judges=[True, False, True, True], rewards=[2, 3, 0, 1])
    r = np.array([0.584847, 0.0, 0.161365])  # as against 0
    a = np.append(r - r.mean(), 0.0)
    np.testing.assert_allclose(ready.advantages[0], a, atol=1e-6)
    assert not ready.mask[0, 3].any()
    mask = np.asarray(ready.mask[0])
    np.testing.assert_allclose(grad[0], -a[:, None] * mask / 7, atol=1e-6)  # seven are sampled


def test_crraft_imitates_the_answer_if_no_rollout_counts():
    _, grad, ready = with_answer("crraft", judges=[False, False, False, True])
    np.testing.assert_allclose(ready.advantages[0], [0, 0, 0, 0.5])
    np.testing.assert_allclose(grad[0, 3, :3], -0.5 / 3, rtol=1e-5)
    assert not grad[0, :3].any()
    # A rollout that counts comes first, and an answer that violates a constraint is not imitated.
    _, _, ready = with_answer("crraft", judges=[False, False, True, True])
    np.testing.assert_allclose(ready.advantages[0], [0, 0, sigmoid(-1.0), 0], rtol=1e-5)
    assert not with_answer("crraft", judges=[False] * 4)[2].weights.any()


@for_each("optimizer", ["crpg", "crraft"])
def test_a_group_whose_answer_failed_does_not_train(optimizer):
    logp, batch = make_batch()
    imitated = jnp.zeros((6, G), bool).at[:, 1].set(True)  # group 2 has dropped this one
    recipe = cgpo(optimizer=optimizer, answers="demonstration")
    ready = recipe.prepare(batch.with_extras({"imitated": imitated}), recipe.init())[0]
    assert ready.where.any(-1).tolist() == [True, True, False, True, True, True]


# Tasks


def mixture(**changes):
    tasks = {
        "a": CgpoTask(weight=2.0, budget=3.0),
        "b": CgpoTask(optimizer="codpo", likelihood=1.0),
        "c": CgpoTask(optimizer="crraft", weight=0.5),
    }
    return cgpo(tasks=tasks, **changes)


def test_tasks_add_their_losses():
    logp, batch = make_batch(groups=9)
    value, grad, _ = loss_and_grad(mixture(), logp, batch)
    terms = [
        2.0 * in_numpy("crpg", logp, batch, (0, 3, 6), budget=3.0),
        in_numpy("codpo", logp, batch, (1, 4, 7), likelihood=1.0),
        0.5 * in_numpy("crraft", logp, batch, (2, 5, 8)),
    ]
    assert value == pytest.approx(sum(terms), rel=1e-5)
    singles = (
        (2.0, cgpo(budget=3.0)),
        (1.0, cgpo(optimizer="codpo", likelihood=1.0)),
        (0.5, cgpo(optimizer="crraft")),
    )
    for task, (weight, recipe) in enumerate(singles):
        part = jax.tree.map(lambda x, task=task: x[task::3], batch)
        expected = weight * loss_and_grad(recipe, logp[task::3], part)[1]
        np.testing.assert_allclose(grad[task::3], expected, rtol=1e-5, atol=1e-8)


def test_a_task_without_groups_adds_nothing():
    logp, batch = make_batch()
    for task, recipe in enumerate((cgpo(budget=3.0), cgpo(optimizer="codpo", likelihood=1.0))):
        ids = jnp.full(6, task, jnp.int32)
        value, grad, _ = loss_and_grad(mixture(), logp, batch.with_extras({"task_ids": ids}))
        expected, of_task, _ = loss_and_grad(recipe, logp, batch)
        assert value == pytest.approx((2.0, 1.0)[task] * expected, rel=1e-5)
        np.testing.assert_allclose(grad, (2.0, 1.0)[task] * of_task, rtol=1e-5, atol=1e-8)


def test_tasks_with_answers_train_the_policys_pairs():
    logp, batch = make_batch()
    imitated = jnp.zeros((6, G), bool).at[:, 3].set(True)
    batch = batch.with_extras({"imitated": imitated})
    recipe = mixture(answers="demonstration")
    collector = jr.curation.demonstrations(column="demonstration", least_sampled=2)
    assert recipe.collector == collector
    ready = recipe.prepare(batch, recipe.init())[0]
    assert not ready.mask[jnp.array([0, 1, 3, 4]), 3].any()  # the tasks of CRPG and CODPO
    sampled = batch.replace(where=batch.where & ~imitated)
    single = cgpo(optimizer="codpo", likelihood=1.0)
    part = jax.tree.map(lambda x: x[1::3], sampled)
    expected = single.prepare(part, single.init())[0]
    np.testing.assert_array_equal(ready.advantages[1::3], expected.advantages)


def test_tasks_that_are_alike_have_the_traits_of_one():
    """The metrics of pairs are made for a surrogate that says that it orders responses."""
    for optimizer in OPTIMIZERS:
        single = cgpo(optimizer=optimizer)
        both = cgpo(tasks=dict.fromkeys("ab", CgpoTask(optimizer=optimizer)))
        for slot in ("surrogate", "weights"):
            assert traits_of(getattr(both, slot)) == traits_of(getattr(single, slot))
    mixed = traits_of(mixture().surrogate)
    assert (mixed.level, mixed.has_ratio, mixed.orders_responses) == ("sequence", False, False)


CHEAP = ["microbatches", "junk", "permutation", "degenerate_groups", "on_policy"]
PAIR = {"x": CgpoTask(optimizer="codpo"), "y": CgpoTask(optimizer="crraft", weight=2.0)}
MADE = {
    "codpo": cgpo(optimizer="codpo"),
    "crraft": cgpo(optimizer="crraft"),
    "tasks": cgpo(tasks=PAIR),
    "tasks of crpg": cgpo(tasks={"x": CgpoTask(budget=2.0), "y": CgpoTask(weight=3.0)}),
}


@pytest.mark.of_many
@pytest.mark.parametrize("name", MADE)
def test_they_pass_the_battery_of_arrays(name):
    assert_recipe_ok(MADE[name], only=CHEAP)


@pytest.mark.slow
def test_tasks_pass_the_costly_checks():
    assert_recipe_ok(MADE["tasks"], only=["train_step", "devices", "checkpoint"])


# In the loop


def prompts(task=lambda n: ("math", "chat", "code")[n % 3]):
    """Ten prompts of three tasks; the answers of the data are digits."""
    rows = ({"task": task(n), "demonstration": "0123"[: 2 + n % 3]} for n in range(10))
    every = (Prompt(f"q{n:02}", metadata=row, id=f"q{n:02}") for n, row in enumerate(rows))
    return PromptSet(every, source="tiny")


def judged(prompt, completion, metadata):
    """Each task has a judge of its own, which reads the task."""
    low = sum(ord(c) < 64 for c in completion)
    satisfied = {
        "math": low % 2 == 0,
        "chat": len(set(completion)) > 1,
        "code": completion[:1] != "z",
    }
    return {"reward": low / 3 - 1, "satisfied": satisfied[metadata["task"]]}


THREE = {
    "math": CgpoTask(budget=20.0),
    "chat": CgpoTask(optimizer="codpo", weight=2.0),
    "code": CgpoTask(optimizer="crraft", budget=20.0),
}
RUNS = {
    "crraft with answers": cgpo(optimizer="crraft", answers="demonstration"),
    "tasks": cgpo(tasks=THREE),
    "tasks with answers": cgpo(tasks=THREE, answers="demonstration"),
}


@pytest.fixture
def config():
    data = dataclasses.replace(loop_checks._CONFIG.data, prompts=prompts)
    return dataclasses.replace(loop_checks._CONFIG, data=data, reward=judged)


@pytest.mark.slow
@pytest.mark.of_many
@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("name", RUNS)
def test_the_loop_runs_it_whole(name, config):
    jr.testing.assert_loop_runs_whole(RUNS[name], config=config)


def test_a_prompt_of_another_task_ends_before_the_run(config, tmp_path):
    wrong = dataclasses.replace(
        config.data, prompts=lambda: prompts(lambda n: "art" if n == 7 else "math")
    )
    graded = []

    def counted(prompt, completion, metadata):
        graded.append(prompt)
        return judged(prompt, completion, metadata)

    run = dataclasses.replace(config, recipe=RUNS["tasks"], run_dir=str(tmp_path))
    run = dataclasses.replace(run, data=wrong, reward=counted)
    with pytest.raises(ValueError, match="'q07' has the task 'art' in column 'task'; the recipe"):
        train(run)
    elsewhere = dataclasses.replace(run, recipe=cgpo(tasks=THREE, column="domain"))
    with pytest.raises(ValueError, match="cgpo: prompt 'q00' has no 'domain' in its row"):
        train(dataclasses.replace(elsewhere, data=config.data))
    assert not graded


def test_a_task_without_a_prompt_ends_before_the_run(config, tmp_path):
    two = dataclasses.replace(
        config.data, prompts=lambda: prompts(lambda n: ("math", "chat")[n % 2])
    )
    run = dataclasses.replace(config, recipe=RUNS["tasks"], run_dir=str(tmp_path), data=two)
    with pytest.raises(ValueError, match="'cgpo' has the task 'code', but no prompt to") as error:
        train(dataclasses.replace(run, reward=never))
    assert "\n" not in str(error.value)
    check_data(run, RUNS["tasks"], two.prompts(), trains=False)  # a policy can be evaluated on them


def never(prompt, completion, metadata):
    raise AssertionError("graded")


def test_pairs_beside_an_answer_take_three_of_a_group(config, tmp_path):
    sampling = dataclasses.replace(config.sampling, group_size=2)
    run = dataclasses.replace(
        config, run_dir=str(tmp_path), sampling=sampling, reward=never, steps=1
    )
    told = (
        "recipe 'cgpo': .* 1 of the data and at least 2 of the policy, so group_size must be at "
        "least 3; got 2"
    )
    with pytest.raises(ValueError, match=told) as error:
        train(dataclasses.replace(run, recipe=RUNS["tasks with answers"]))
    assert "\n" not in str(error.value)
    # A loss of single rollouts needs no other, and without answers both are the policy's.
    one = {"math": THREE["math"], "chat": CgpoTask(), "code": THREE["code"]}
    for recipe in (cgpo(tasks=one, answers="demonstration"), RUNS["tasks"]):
        check_data(run, recipe, prompts())
    three = dataclasses.replace(run, sampling=dataclasses.replace(sampling, group_size=3))
    check_data(three, RUNS["tasks with answers"], prompts())


def test_each_task_has_metrics_of_its_rollouts(config, tmp_path):
    """Of those that the policy sampled: the last of each group is an answer of the data."""
    seen = []

    def noted(prompt, completion, metadata):
        graded = judged(prompt, completion, metadata)
        seen.append((metadata["task"], completion, graded, metadata["demonstration"]))
        return graded

    off = EvaluationConfig(enabled=False)  # so that all that is graded is in the batch
    run = dataclasses.replace(config, reward=noted, steps=1, evaluation=off)
    run = dataclasses.replace(run, recipe=RUNS["tasks with answers"], run_dir=str(tmp_path))
    (row,) = train(run).history
    for task in THREE:
        own = [x for name, text, x, answer in seen if name == task and text != answer]
        for name in ("reward", "satisfied"):
            want = np.mean([x[name] for x in own]) if own else None  # as a file has what is NaN
            found = row[f"task_{name}/{task}"]
            assert found == want if want is None else found == pytest.approx(want, rel=1e-5)
    assert len({name for name, *_ in seen}) > 1 and len(seen) == 4 * 6


BAD_OPTIONS = r"""
ValueError:
cgpo(optimizer="ppo")  # !.*CgpoTask: optimizer must be one of
cgpo(optimizer="codpo", budget=3.0)  # !.*budget=3.0 has no effect with
cgpo(beta=0.2)  # !.*beta=0.2 has no effect with optimizer='crpg'
cgpo(optimizer="crraft", likelihood=1.0)  # !.*likelihood=1.0 has no effect with optimizer='crraft'
cgpo(optimizer="codpo", answers="demonstration")
    # !.*answers='demonstration' has no effect with optimizer='codpo'
cgpo(column="domain")  # !.*column='domain' has no effect without tasks
cgpo(tasks=PAIR, budget=2.0)  # !.*cgpo: budget=2.0 has no effect with t
cgpo(tasks=PAIR, optimizer="codpo")  # !.*optimizer='codpo' has no effec
cgpo(tasks={})  # !.*cgpo: tasks must name at least one task
cgpo(tasks={"a": PAIR["x"]}, answers="demonstration")
    # !.*no effect if all tasks have optimizer='codpo'
CgpoTask(weight=0.0)  # !.*CgpoTask: weight must be above 0
CgpoTask(budget=-1.0)  # !.*CgpoTask: budget must be above 0
TypeError:
cgpo(tasks={"a": "crpg"})  # !.*tasks\['a'\] must be a CgpoTask; got
"""


@for_each("error, call, message", bad_calls(BAD_OPTIONS))
def test_bad_options(error, call, message):
    raises(error, call, message, globals())
