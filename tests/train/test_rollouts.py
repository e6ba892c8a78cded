"""Batches of rollouts: in turns or ahead of their step, in slots, from checkpoints, with errors.

    batch n may start with weights of version v only if  n <= v + max_staleness

Batches come in order, none lost and none twice. One depends on its number and its weights alone, so
slots, threads, and a checkpoint that holds finished batches change nothing but the time.
"""

import contextlib
import dataclasses
import functools
import random
import signal
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_makers import first_batch
from rows import for_each
from test_checkpoint import assert_same
from tiny_run import CONFIG, low_bytes, tiny_run

import jaxrl_llm as jr
from jaxrl_llm.cli.options import parse_config
from jaxrl_llm.data import Cursor, take
from jaxrl_llm.recipes.needs import RunNeeds
from jaxrl_llm.rewards import RewardError, Scores
from jaxrl_llm.rewards.scoring import join_scores
from jaxrl_llm.rollout import Generation
from jaxrl_llm.train import (
    AsyncConfig,
    CheckpointConfig,
    Checkpoints,
    LoRAConfig,
    MeshConfig,
    SamplingConfig,
    TrainingError,
    TrainState,
    train,
)
from jaxrl_llm.train.experiment import rollouts as rollouts_module
from jaxrl_llm.train.experiment import samplers
from jaxrl_llm.train.experiment.rollouts import (
    AsyncRollouts,
    collect_rollouts,
    make_rollouts,
    may_start,
    pack_pending,
    restore_pending,
    unpack_pending,
)
from jaxrl_llm.train.experiment.samplers import _check_mixture
from jaxrl_llm.train.experiment.setup import init_experiment, load_experiment
from jaxrl_llm.train.logging.results import JsonLines, read_jsonl

pytestmark = pytest.mark.usefixtures("shared_programs")

STEPS, SHOWN = 6, 4 * 2  # every completion of a step goes to samples.jsonl


def ahead_run(run_dir, most=2, **changes):
    changes = {"asynchrony": AsyncConfig(max_staleness=most), "samples_shown": SHOWN} | changes
    return tiny_run(run_dir, **changes)


def until(condition, seconds=60.0):
    """Waits for what another thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.001)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "rollouts"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    until(lambda: not threads())


@pytest.fixture
def source(monkeypatch):
    """Where the runs of a test got their batches, the last run last."""
    made = []
    monkeypatch.setattr(
        "jaxrl_llm.train.run.make_rollouts",
        lambda *args: made.append(make_rollouts(*args)) or made[-1],
    )
    return made


def steps_of(run_dir):
    """The prompts and completions of each step."""
    rows = read_jsonl(run_dir / "samples.jsonl")
    steps = {}
    for row in rows:
        steps.setdefault(row["step"], []).append((row["prompt"], row["completion"]))
    return steps


def in_cursors_order():
    """The prompts of each step, as the cursor visits them."""
    cursor, steps = Cursor(), {}
    for step in range(1, STEPS + 1):
        indices, cursor = take(cursor, 4, size=10, seed=0)
        steps[step] = [f"q{i:02}" for i in indices for _ in range(2)]
    return steps


def prompts_of(steps):
    return {step: [prompt for prompt, _ in rows] for step, rows in steps.items()}


# The rules, with batches that cost nothing.


@for_each("most", [0, 1, 2, 8])
def test_a_batch_may_start_where_areals_capacity_says(most):
    for version in range(4):
        for number in range(version, version + 12):
            options = {"batch_size": 4, "max_staleness": most, "max_concurrent": 4}
            left = jr.corrections.staleness_capacity(version, 4 * number, 0, **options)
            assert may_start(number, version, max_staleness=most) == (left > 0)


class Fake(SimpleNamespace):
    """A batch that says which weights it was made with."""


def ahead(monkeypatch, most, make, pending=(), steps=40, start=0, follows=None):
    """Batches from ``make(number, version, params)``."""

    def fake(experiment, params, key, cursor, collector_state, *, number, version, learned):
        assert cursor == number
        make(number, version, params)
        fields = {"number": number, "cursor": number + 1, "version": version, "learned": learned}
        return Fake(**fields, collector_state=())

    monkeypatch.setattr(rollouts_module, "collect_rollouts", fake)
    config = SimpleNamespace(steps=steps, asynchrony=AsyncConfig(max_staleness=most))
    return AsyncRollouts(
        SimpleNamespace(
            config=config,
            sampler_mesh=None,
            collector=SimpleNamespace(follows=follows),
            recipe=SimpleNamespace(needs=RunNeeds()),
            behavior=lambda params: params,
        ),
        state_of(start),
        pending,
    )


def state_of(step):
    params, algo_state = {"w": jnp.full(2, float(step))}, {"rates": jnp.full(3, float(step))}
    return TrainState(params, (), algo_state, jax.random.key(0), jnp.int32(step), step)


@for_each("most", [0, 1, 2, 3])
def test_batches_come_in_order_and_are_never_too_old(monkeypatch, most):
    draw = random.Random(most)
    seen = []

    def make(number, version, params):
        time.sleep(draw.random() * 2e-3)
        seen.append((number, version, float(params["w"][0])))

    ages = []
    with ahead(monkeypatch, most, make) as rollouts:
        until(lambda: len(rollouts.pending(0)) == most + 1)  # all that the first weights may make
        for step in range(40):
            batch = rollouts.next()
            assert batch.number == step
            ages.append(step - batch.version)
            time.sleep(draw.random() * 2e-3)
            rollouts.publish(state_of(step + 1))
    assert [number for number, *_ in seen] == list(range(40))  # none lost, none twice
    assert all(value == version for _, version, value in seen)
    assert ages[0] == 0 and min(ages) >= 0 and max(ages) == most


def test_what_a_step_gives_away_is_kept(monkeypatch):
    # The sampler keeps its weights when a step gives them away.
    released, found = threading.Event(), []

    def make(number, version, params):
        released.wait(60)
        found.append(params["w"].tolist())

    state = state_of(0)
    with ahead(monkeypatch, 1, make, steps=1) as rollouts:
        rollouts.publish(state)
        state.params["w"].delete()  # as donation does
        released.set()
        rollouts.next()
    assert found == [[0.0, 0.0]]

    # A collector follows the state that came with the weights.
    options = {"steps": 3, "follows": lambda algo_state: algo_state["rates"]}
    with ahead(monkeypatch, 1, lambda number, version, params: None, **options) as rollouts:
        for step in range(3):
            batch = rollouts.next()
            assert batch.learned.tolist() == [float(batch.version)] * 3
            state = state_of(step + 1)
            rollouts.publish(state)
            state.algo_state["rates"].delete()  # as donation does
    assert batch.number == 2


def test_errors_end_the_thread_behind_what_is_finished(monkeypatch):
    # An error is raised behind the batches before it.
    def make(number, version, params):
        if number == 2:
            raise RewardError("the judge is away")

    with (
        pytest.raises(RewardError, match="the judge is away"),
        ahead(monkeypatch, 3, make) as rollouts,
    ):
        until(lambda: not threads())  # it has failed before anything is taken
        for step in range(3):
            assert rollouts.next().number == step < 2
            rollouts.publish(state_of(step + 1))
    assert rollouts.pending(2) == []

    # An error of the loop ends the thread.
    begun = threading.Event()

    def make(number, version, params):
        begun.set()
        time.sleep(0.05)

    with pytest.raises(TrainingError), ahead(monkeypatch, 3, make) as rollouts:
        begun.wait(60)
        raise TrainingError("the disk is full")
    assert not threads() and rollouts.pending(0)  # the one under way is finished


def endless():
    """What makes a batch only once it is released; and events for its beginning and that."""
    begun, released = threading.Event(), threading.Event()

    def make(number, version, params):
        begun.set()
        released.wait(60)

    return make, begun, released


def test_a_run_waits_for_a_batch_that_an_earlier_one_left(monkeypatch):
    monkeypatch.setattr(rollouts_module, "_AT_ONCE", 0.01)
    monkeypatch.setattr(rollouts_module, "SyncRollouts", lambda experiment, state: threads())
    make, begun, released = endless()
    with pytest.raises(KeyboardInterrupt), ahead(monkeypatch, 1, make):
        begun.wait(60)
        raise KeyboardInterrupt
    assert threads()
    threading.Timer(0.1, released.set).start()
    experiment = SimpleNamespace(config=SimpleNamespace(asynchrony=AsyncConfig()))
    assert not make_rollouts(experiment, state_of(0))


@for_each("error", [None, TrainingError("the disk is full")])
def test_a_run_that_ends_early_waits_only_a_while_until_all_is_told(monkeypatch, error):
    monkeypatch.setattr(rollouts_module, "_PATIENCE", 0.01)
    make, begun, released = endless()
    at_exit = []
    monkeypatch.setattr(rollouts_module.atexit, "register", at_exit.append)
    with contextlib.suppress(TrainingError), ahead(monkeypatch, 1, make):
        begun.wait(60)
        if error is not None:
            raise error
    assert threads()  # the batch is not done
    released.set()
    (join,) = at_exit  # the process itself does not end in the middle of a batch
    join()
    assert not threads()


def test_ctrl_c_reaches_a_loop_that_waits_for_a_batch(monkeypatch):
    main, released = threading.main_thread().ident, threading.Event()

    def make(number, version, params):
        if number == 2:
            signal.pthread_kill(main, signal.SIGINT)
            released.wait(60)

    monkeypatch.setattr(rollouts_module, "_AT_ONCE", 0.01)
    with pytest.raises(KeyboardInterrupt), ahead(monkeypatch, 1, make) as rollouts:
        for step in range(3):
            assert rollouts.next().number == step < 2
            rollouts.publish(state_of(step + 1))
    released.set()


def test_a_batch_waits_until_a_step_has_trained_on_it(monkeypatch):
    old = [Fake(number=n, cursor=n + 1, version=2, collector_state=()) for n in (3, 4)]
    made = []
    with ahead(monkeypatch, 2, lambda n, v, p: made.append((n, v)), old, start=3) as rollouts:
        until(lambda: len(rollouts.pending(3)) == 3)
        assert rollouts.next() is old[0] and rollouts.next() is old[0]
        assert [batch.number for batch in rollouts.pending(3)] == [3, 4, 5]
        assert [batch.number for batch in rollouts.pending(4)] == [4, 5]
        rollouts.publish(state_of(4))
        assert rollouts.next() is old[1]
        until(lambda: len(rollouts.pending(4)) == 3)
    assert made == [(5, 3), (6, 4)]


# Whole runs.


@pytest.fixture(scope="module")
def experiment_and_params():
    return load_experiment(ahead_run("unused"))


@pytest.fixture(scope="module")
def two_behind(tmp_path_factory):
    """A run whose first three batches are all made by the first weights.

    Its first step waits for two more batches: without a thread beside it, it would never end.
    """
    folder, made = tmp_path_factory.mktemp("two_behind"), []
    place = "jaxrl_llm.train.run."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            place + "make_rollouts", lambda *args: made.append(make_rollouts(*args)) or made[-1]
        )
        put = jr.train.policy_gradient.place_batch

        def wait_and_put(batch, mesh):
            if made[0].pending(0)[0].number == 0:
                until(lambda: len(made[0].pending(0)) == 3)
            return put(batch, mesh)

        patch.setattr("jaxrl_llm.train.policy_gradient.place_batch", wait_and_put)
        checkpoint = CheckpointConfig(every=1, keep=STEPS)
        return train(ahead_run(folder, checkpoint=checkpoint))


def test_ages_are_bounded_and_told(two_behind):
    # Ages are bounded and every question is used once.
    rows = two_behind.history
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    ages = [row["staleness_max"] for row in rows]
    assert ages[:3] == [0, 1, 2] and max(ages) == 2
    assert [row["staleness"] for row in rows] == ages
    assert prompts_of(steps_of(two_behind.run_dir)) == in_cursors_order()
    assert two_behind.state.data_cursor == (2, 4)
    for row in rows:
        assert row["seconds_wait"] >= 0 and row["seconds_sample"] > 0
        assert row["seconds_reward"] > 0 and row["tokens_per_second"] > 0

    # The ratio is that of the policy to what sampled.
    new, *_, old = two_behind.history[:3]
    assert new["ratio_max"] == pytest.approx(1, abs=1e-4) and abs(new["sampler_gap"]) < 1e-4
    assert new["loss"] == pytest.approx(0, abs=1e-6)
    assert old["ratio_max"] > 1.1 and old["sampler_gap"] > 0.05 and old["sampler_ess"] < 0.95
    assert old["approx_kl"] > 0 and old["sampler_kl"] != 0


def test_a_batch_depends_on_its_number_and_its_weights_alone(two_behind, experiment_and_params):
    experiment, first = experiment_and_params
    checkpoints = Checkpoints(two_behind.run_dir / "checkpoints", model=experiment.model)
    expected, cursor = steps_of(two_behind.run_dir), Cursor()
    for number, row in enumerate(two_behind.history):
        version = number - int(row["staleness"])
        params = checkpoints.restore_params(first, step=version) if version else first
        key = jax.random.key(0)
        batch = collect_rollouts(experiment, params, key, cursor, number=number, version=version)
        cursor = batch.cursor
        assert [(r["prompt"], r["completion"]) for r in batch.rows] == expected[number + 1]


def configured(experiment, **changes):
    config = dataclasses.replace(experiment.config, **changes)
    return dataclasses.replace(experiment, config=config)


def collected(experiment, params, recipe, number=5, version=3):
    experiment = dataclasses.replace(experiment, recipe=recipe)
    start = jax.random.key(0), Cursor()
    return collect_rollouts(experiment, params, *start, number=number, version=version)


@pytest.mark.slow
def test_what_a_recipe_reads_of_the_sampler_is_brought(experiment_and_params):
    # A recipe that reads what sampled does so in its own way.
    for recipe in (jr.recipes.areal(), jr.recipes.vespo(), jr.recipes.minpro()):
        assert recipe.reads_behavior
    experiment, params = experiment_and_params
    batch = collected(experiment, params, jr.recipes.dapo()).batch
    assert batch.old_logp is None and batch.behavior_logp is not None
    scorer = jr.train.Scorer(experiment.model)
    state = state_of(0)._replace(params=params)

    def old_logp(recipe, stale):
        return jr.train.score_batch(batch, recipe, scorer, state=state, stale=stale).old_logp

    np.testing.assert_array_equal(old_logp(jr.recipes.dapo(), True), batch.behavior_logp)
    assert old_logp(jr.recipes.dapo(), False) is None
    scored = jr.train.make_scorer(experiment.model)(params, batch)
    np.testing.assert_allclose(old_logp(jr.recipes.areal(), True), scored, atol=1e-5)

    # Versions are brought to a recipe that names them.
    young = jr.bind(jr.corrections.staleness_mask, max_staleness=1)
    recipe = jr.recipes.dapo().replace(name="young", selection=young)
    found = collected(*experiment_and_params, recipe)
    mask = np.asarray(found.batch.mask)
    assert (found.batch.extras["versions"][mask] == 3).all()
    assert found.batch.extras["current_version"].tolist() == [5] * 4
    assert found.metrics["staleness"] == found.metrics["staleness_max"] == 2


@pytest.mark.slow
def test_a_resumed_run_trains_on_what_was_waiting_first(tmp_path, monkeypatch, source):
    graded = []

    def reward(prompt, completion, metadata):
        graded.append((prompt, completion))
        return {"reward": low_bytes(prompt, completion, metadata), "length": len(completion)}

    write, stopped = JsonLines.write, []

    def wait_and_write(self, row):  # Ctrl-C once two finished batches wait for the next steps
        if row["step"] == 2 and "loss" in row and not stopped:
            until(lambda: len(source[-1].pending(2)) == 2)
            stopped.append(signal.raise_signal(signal.SIGINT))
        write(self, row)

    monkeypatch.setattr(JsonLines, "write", wait_and_write)
    config = ahead_run(tmp_path, reward=reward)
    half = train(config)
    assert half.interrupted == signal.SIGINT and int(half.state.step) == 2
    folder = tmp_path / "checkpoints" / "step_00000002"
    assert (folder / "extras").is_dir()
    pending, before = source[0].pending(2)[:2], len(graded)
    assert [batch.number for batch in pending] == [2, 3]
    done = train(config, resume=True)
    assert int(done.state.step) == STEPS and done.state.data_cursor == (2, 4)
    steps = steps_of(tmp_path)
    assert prompts_of(steps) == in_cursors_order()
    for batch in pending:
        rows = [(row["prompt"], row["completion"]) for row in batch.rows]
        assert steps[batch.number + 1] == rows
    assert [row["staleness_max"] for row in done.history[2:4]] == [
        batch.metrics["staleness_max"] for batch in pending
    ]
    assert done.history[2]["reward/length"] == pending[0].metrics["reward/length"]
    # What is left is sampled and graded, and nothing that was pending; batch 4 may have been.
    assert graded[before:] in (steps[5] + steps[6], steps[6])
    last = tmp_path / "checkpoints" / "step_00000006"
    assert last.is_dir() and not (last / "extras").exists()


@pytest.mark.slow
def test_a_run_ahead_resumes_exactly(tmp_path, monkeypatch, source):
    """Each batch is of the version before its own, and the one that waited is trained on."""
    write, stopped = JsonLines.write, []

    def wait_and_write(self, row):  # weights are published after this
        if "loss" in row and row["step"] < 4:
            until(lambda: len(source[-1].pending(row["step"])) == 1)
            if len(source) == 2 and row["step"] == 2 and not stopped:
                stopped.append(signal.raise_signal(signal.SIGINT))
        write(self, row)

    monkeypatch.setattr(JsonLines, "write", wait_and_write)
    options = {
        "recipe": "areal",
        "sampling": dataclasses.replace(CONFIG.sampling, quantization="int8", slots=4),
        "lora": LoRAConfig(rank=2),
        "steps": 4,
    }
    whole = train(ahead_run(tmp_path / "whole", 1, **options))
    cut = ahead_run(tmp_path / "cut", 1, **options)
    assert train(cut).interrupted == signal.SIGINT
    assert (tmp_path / "cut" / "checkpoints" / "step_00000002" / "extras").is_dir()
    done = train(cut, resume=True)
    assert_same(whole.state.params, done.state.params)
    names = ("reward", "loss", "sampler_gap", "staleness")
    rows, again = ([[row[x] for x in names] for row in y.history] for y in (whole, done))
    assert rows == again and [row[-1] for row in rows] == [0, 1, 1, 1]
    assert min(row[-2] for row in rows) > 1e-3


def test_what_does_not_fit_a_resumed_run_is_sampled_anew(tmp_path, experiment_and_params):
    experiment, params = experiment_and_params
    key, cursor, kept = jax.random.key(0), Cursor(), []
    for number, version in ((2, 2), (3, 2), (4, 2)):
        batch = collect_rollouts(experiment, params, key, cursor, number=number, version=version)
        kept.append(batch)
        cursor = batch.cursor
    state = TrainState(params, (), (), key, jnp.int32(2), Cursor())
    checkpoints = Checkpoints(tmp_path, model=experiment.model)
    checkpoints.save(state, extras=pack_pending(experiment, kept))
    checkpoints.wait()
    lines = []

    def back(experiment, state=state):
        return [b.number for b in restore_pending(checkpoints, experiment, state, lines.append)]

    with_config = functools.partial(configured, experiment)
    assert back(experiment) == [2, 3, 4] and lines == []
    again = restore_pending(checkpoints, experiment, state, lines.append)[2]
    assert_same(jax.tree.map(np.asarray, again.batch), jax.tree.map(np.asarray, kept[2].batch))
    assert again._replace(batch=None) == kept[2]._replace(batch=None)
    others = {
        "recipe": with_config(recipe=jr.recipes.grpo(kl_coef=0.0)),
        "sampling": with_config(sampling=dataclasses.replace(CONFIG.sampling, temperature=0.5)),
        "reward": with_config(reward=lambda prompt, completion, metadata: 0.0),
        "size": with_config(prompts_per_step=2),
        "data": with_config(data=dataclasses.replace(CONFIG.data, chat=True)),
        "in turns": with_config(asynchrony=AsyncConfig()),
    }
    for name, other in others.items():
        assert back(other) == [], name
    assert "3 of 3 batches of rollouts in the checkpoint do not fit" in lines[0]
    slower = dataclasses.replace(CONFIG.optimizer, learning_rate=1e-9)
    assert back(with_config(optimizer=slower, steps=9)) == [2, 3, 4]
    assert back(with_config(asynchrony=AsyncConfig(max_staleness=1))) == [2, 3]  # 4 is too old
    assert "1 of 3 batches" in lines[-1]
    assert back(experiment, state._replace(data_cursor=Cursor(0, 4))) == []  # others would be next
    assert pack_pending(experiment, []) is None
    stored = pack_pending(experiment, kept)
    with pytest.raises(ValueError, match="Batch: mask must have shape"):
        unpack_pending(
            stored.arrays[0] | {"mask": np.ones((1, 1, 1), bool)}, stored.notes["batches"][0]
        )


@pytest.mark.slow
@for_each("form", ["ids", "bits"])
def test_the_support_of_a_truncated_sampler_waits_too(tmp_path, form):
    filters = {"ids": {"top_k": 5}, "bits": {"top_p": 0.8}}[form]
    sampling = dataclasses.replace(CONFIG.sampling, **filters)
    experiment, params = load_experiment(ahead_run("unused", sampling=sampling))
    batch = collect_rollouts(experiment, params, jax.random.key(0), Cursor(), number=2, version=1)
    assert getattr(batch.batch.support, form) is not None
    state = TrainState(params, (), (), jax.random.key(0), jnp.int32(2), Cursor())
    checkpoints = Checkpoints(tmp_path, model=experiment.model)
    checkpoints.save(state, extras=pack_pending(experiment, [batch]))
    checkpoints.wait()
    (found,) = restore_pending(checkpoints, experiment, state, pytest.fail)
    assert_same(found.batch, batch.batch)


# Devices.


APART = AsyncConfig(max_staleness=1, sampler_devices=4, sampler_mesh=MeshConfig(data=2, tensor=2))


@pytest.mark.slow
def test_devices_that_only_sample(two_behind, tmp_path):
    lines = []
    config = ahead_run(tmp_path, asynchrony=APART, mesh=MeshConfig(fsdp=2, tensor=2), steps=3)
    result = train(config, log=lines.append)
    assert any("4 of 8 cpu device(s) and 4 more that sample" in line for line in lines)
    used = {x for leaf in jax.tree.leaves(result.state.params) for x in leaf.sharding.device_set}
    assert used == set(jax.devices()[:4])
    ages = [row["staleness_max"] for row in result.history]
    assert ages[:2] == [0, 1] and max(ages) == 1
    for row, other in zip(result.history[:2], two_behind.history, strict=False):
        for name in ("reward", "loss", "entropy", "tokens", "ratio_max", "sampler_gap"):
            np.testing.assert_allclose(row[name], other[name], atol=1e-4)


@pytest.mark.slow
def test_a_baseline_is_sampled_where_the_rollouts_are(experiment_and_params):
    experiment, params = load_experiment(ahead_run("unused", asynchrony=APART))
    assert {d for x in jax.tree.leaves(params) for d in x.devices()} == set(jax.devices()[:1])
    state = TrainState(params, (), (), jax.random.key(0), jnp.int32(0), Cursor())
    remax = dataclasses.replace(experiment, recipe=jr.recipes.remax())
    with AsyncRollouts(remax, state) as rollouts:
        found = rollouts.next()
    expected = collected(*experiment_and_params, jr.recipes.remax(), number=0, version=0)
    for name in ("tokens", "rewards"):
        np.testing.assert_array_equal(getattr(found.batch, name), getattr(expected.batch, name))
    greedy = found.batch.extras["greedy_rewards"]
    np.testing.assert_array_equal(greedy, expected.batch.extras["greedy_rewards"])


@pytest.mark.slow
def test_a_baseline_counts_as_sampled(experiment_and_params, monkeypatch):
    experiment, params = experiment_and_params
    samplers, spent, now, hour = experiment.samplers, [], time.perf_counter, 3600
    monkeypatch.setattr(time, "perf_counter", lambda: now() + hour * len(spent))

    def slow(*arguments):  # it takes an hour
        rollout = samplers.baseline(*arguments)
        spent.append(int(rollout.mask.sum()))
        return rollout

    experiment = dataclasses.replace(experiment, samplers=samplers._replace(baseline=slow))
    plain = collected(experiment, params, jr.recipes.dr_grpo(length=4), number=0, version=0)
    assert not spent
    found = collected(experiment, params, jr.recipes.remax(), number=0, version=0)
    [tokens] = spent
    assert 4 <= tokens <= 4 * 4  # of four prompts
    assert found.metrics["tokens_sampled"] == plain.metrics["tokens_sampled"] + tokens
    assert 0 <= found.seconds["reward"] < hour < found.seconds["sample"]


def first_byte(text):
    return text[:1] or None


def test_votes_train_questions_without_answers(experiment_and_params):
    # Votes of any extractor train questions without answers.
    experiment, params = experiment_and_params
    vote = jr.rewards.majority_vote(answer=first_byte)
    experiment = configured(experiment, reward=vote)
    assert all(question.prompt.answer is None for question in experiment.train)
    recipe = jr.recipes.ttrl_majority(votes=1)
    batch = collected(experiment, params, recipe, number=0, version=0).batch
    answers = batch.extras["answer_ids"]
    shaped = jr.rewards.majority_rewards(batch.rewards, answer_ids=answers, where=batch.where)
    assert answers.dtype == np.int32 and not np.any(batch.rewards)
    np.testing.assert_array_equal(np.any(np.asarray(shaped) > 0, -1), np.any(answers >= 0, -1))
    # Of twice as many votes: the first half trains, with the agreement as its reward.
    recipe = jr.recipes.ttrl_majority(votes=2)
    experiment = dataclasses.replace(experiment, recipe=recipe)
    found = first_batch(experiment, params)
    assert found.batch.rewards.shape == batch.rewards.shape
    assert found.metrics["rollouts_sampled"] == 2 * batch.rewards.size
    assert set(np.unique(found.batch.rewards)) <= {0.0, 1.0} and np.any(found.batch.rewards)

    # A failed call has no vote.
    experiment, params = experiment_and_params
    experiment = configured(experiment, reward=HalfFails(), reward_on_error="zero")
    recipe = jr.recipes.ttrl_majority(votes=1)
    with pytest.warns(jr.rewards.VerifierWarning, match="failed on 4 of 8 completions"):
        batch = collected(experiment, params, recipe, number=0, version=0).batch
    answers = np.asarray(batch.extras["answer_ids"]).reshape(-1)
    np.testing.assert_array_equal(answers[::2], 3)
    np.testing.assert_array_equal(answers[1::2], -1)
    assert np.asarray(batch.where).all()


class HalfFails:
    """Every second call fails, and counts as 0."""

    answer = staticmethod(first_byte)

    def __call__(self, prompt, completion, metadata):
        return {"reward": 0.0, "answer_ids": 3}

    def score_batch(self, prompts, completions, metadata):
        values = [self(*row) for row in zip(prompts, completions, metadata, strict=True)]
        return [jr.rewards.FAILED if i % 2 else x for i, x in enumerate(values)]


@for_each(
    "options, message",
    [
        ({"max_staleness": -1}, "max_staleness must not be negative"),
        ({"max_staleness": 1, "sampler_devices": 0}, "sampler_devices must be above 0"),
        ({"sampler_devices": 4}, "sampler_devices has no effect with max_staleness 0"),
        ({"max_staleness": 1, "sampler_mesh": MeshConfig()}, "sampler_mesh has no effect without"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AsyncConfig(**options)


@for_each(
    "options, mesh, message",
    [
        ({}, MeshConfig(data=4, tensor=2), "share several devices would deadlock"),
        ({"sampler_devices": 8}, MeshConfig(), "8 leaves none of the 8 device"),
        ({"sampler_devices": 3}, MeshConfig(), "asynchrony: .* 4 prompts .* over 3 devices"),
        ({"sampler_devices": 4}, MeshConfig(data=4, tensor=2), "8 devices, but there are 4"),
        (
            {"sampler_devices": 4, "sampler_mesh": MeshConfig()},
            MeshConfig(),
            "s 1 devices, but .* 4",
        ),
    ],
)
def test_devices_that_do_not_fit_are_refused(tmp_path, options, mesh, message):
    asynchrony = AsyncConfig(max_staleness=1, **options)
    with pytest.raises(ValueError, match=message):
        train(tiny_run(tmp_path, asynchrony=asynchrony, mesh=mesh))


def test_who_may_train_behind_the_sampler(tmp_path):
    # A recipe that older weights would bias is refused.
    with pytest.raises(ValueError, match=r"'rloo' has no correction .*max_staleness 1"):
        ahead_run("unused", 1, recipe="rloo")
    corrected = jr.recipes.rloo().replace(correction=jr.recipes.areal().correction)
    assert ahead_run("unused", 1, recipe=corrected).asynchrony.max_staleness == 1

    # Devices apart from a teacher that samples are left out.
    config = tiny_run(tmp_path, asynchrony=AsyncConfig(max_staleness=1, sampler_devices=4))
    with pytest.raises(ValueError, match=r"a second copy of the teacher.*; leave it out \(None\)"):
        _check_mixture(config)

    # The command line has it.
    words = ["--asynchrony.max-staleness", "2", "--asynchrony.sampler-devices", "4"]
    words += ["--asynchrony.sampler-mesh.tensor", "2"]
    given = parse_config(CONFIG, words).asynchrony
    layout = MeshConfig(data=-1, tensor=2)
    assert given == AsyncConfig(max_staleness=2, sampler_devices=4, sampler_mesh=layout)


SAMPLING = SamplingConfig(group_size=2, max_new_tokens=8)


def with_slots(slots):
    return dataclasses.replace(SAMPLING, slots=slots)


def collected_in(tmp_path, slots, **changes):
    config = tiny_run(tmp_path / str(slots), sampling=with_slots(slots), **changes)
    experiment, _, _, state = init_experiment(config, tmp_path, resume=False)
    return first_batch(experiment, state.params, version=3)


@for_each("slots", [2, 8])
def test_slots_change_nothing_but_the_time(tmp_path, slots):
    whole, found = collected_in(tmp_path, None), collected_in(tmp_path, slots)
    assert found.rows == whole.rows and found.cursor == whole.cursor
    for name in ("tokens", "mask", "rewards", "where"):
        np.testing.assert_array_equal(getattr(found.batch, name), getattr(whole.batch, name))
    np.testing.assert_allclose(found.batch.behavior_logp, whole.batch.behavior_logp, atol=1e-5)
    assert found.metrics == whole.metrics


def test_a_group_is_graded_while_others_decode(tmp_path, monkeypatch):
    graded, seen = threading.Event(), []

    def reward(prompt, completion, metadata):
        graded.set()
        return 1.0

    step = Generation.step

    def slow_step(self):
        step(self)
        if (
            self._scheduler.finished
        ):  # the first group is on its way to the reward, others are not done
            seen.append(bool(self._scheduler.has_work))

    def waits(self):
        for number, done in enumerate(iterate(self)):
            yield done
            if not number:
                assert graded.wait(60), "nothing is graded before all have ended"

    iterate = Generation.__iter__
    monkeypatch.setattr(Generation, "__iter__", waits)
    monkeypatch.setattr(Generation, "step", slow_step)
    collected_in(tmp_path, 2, reward=reward)
    assert seen[0]


def test_columns_and_failures_of_groups_come_through(tmp_path):
    # A group whose verifiers all failed counts zero.
    good = Scores(np.ones(2, np.float32), {"a": np.array([1, 2], np.float32)}, np.zeros(2, bool))
    dead = Scores(np.zeros(2, np.float32), {}, np.ones(2, bool))
    for order in ([good, dead], [dead, good]):
        found = join_scores(order)
        at = slice(0, 2) if order[0] is good else slice(2, 4)
        assert found.failures == 2 and found.reward_components["a"][at].tolist() == [1, 2]
        assert found.reward_components["a"].sum() == 3 and found.rewards.sum() == 2
    assert join_scores([dead, dead]).reward_components == {}
    with pytest.raises(RewardError, match="names"):
        join_scores([good, Scores(np.ones(2, np.float32), {}, np.zeros(2, bool))])

    # Columns and errors come through.
    found = collected_in(tmp_path, 2, reward=lambda p, c, m: {"reward": 1.0, "a": float(len(c))})
    assert (found.batch.rewards == 1.0).all()
    assert found.metrics["reward/a"] > 0

    def fails(prompt, completion, metadata):
        raise OSError("no")

    with pytest.raises(Exception, match="q0"):
        collected_in(tmp_path, 2, reward=fails)


@for_each("slots", [6, 16, 12])
def test_slots_that_make_no_grid_are_refused(slots):
    with pytest.raises(ValueError, match="slots must be below the 4 prompts"):
        dataclasses.replace(CONFIG, sampling=with_slots(slots))
    with pytest.raises(ValueError, match="slots"):
        SamplingConfig(slots=0)


class OtherEnd(jr.testing.ByteTokenizer):
    """Ends turns with a token that it does not name as EOS, as many base models do."""

    eos_ids = (258,)


@for_each("recipe", [jr.recipes.grpo(), jr.recipes.eggroll(sigma=0.05)])
def test_responses_end_where_the_template_ends_a_turn(tmp_path, monkeypatch, recipe):
    made = []
    for name in ("make_sampler", "make_engine", "make_population", "make_denoising_sampler"):
        made_by = lambda *args, stop_ids, **options: made.append(stop_ids)  # noqa: E731
        monkeypatch.setattr(samplers, name, made_by)
    causal = jr.testing.tiny_model(num_layers=1)[0]
    masked = jr.testing.tiny_model(num_layers=1, causal=False, vocab_size=260, mask_id=259)[0]
    for chat, ends in ((True, (258, 257)), (False, (258,))):
        data = dataclasses.replace(CONFIG.data, chat=chat)
        sampling = SAMPLING if recipe.needs.samples_members else with_slots(4)
        config = tiny_run(tmp_path, recipe=recipe, data=data, sampling=sampling, remat="full")
        sizes = {"longest": 8, "shared_prefix_len": 0}
        samplers.make_samplers(config, recipe, causal, OtherEnd(), None, None, **sizes)
        samplers.policy_sampler(SAMPLING, recipe, masked, OtherEnd(), None, chat=chat, group_size=2)
        assert len(made) == 4 and set(made) == {ends}
        made.clear()
