"""Whole runs of methods that need more than rollouts and rewards, and their exact resume."""

import dataclasses
import functools
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rows import for_each
from test_checkpoint import assert_same
from tiny_run import CONFIG, low_bytes, tiny_run
from tiny_run import prompts as tiny_prompts

import jaxrl_llm as jr
from jaxrl_llm.data import Cursor, PromptSet
from jaxrl_llm.recipes import Computed, catalog
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import (
    AsyncConfig,
    CheckpointConfig,
    EvaluationConfig,
    LoRAConfig,
    MeshConfig,
    OptimizerConfig,
    SamplingConfig,
    TrainingError,
    train,
)
from jaxrl_llm.train.experiment import Experiment
from jaxrl_llm.train.rollouts import collect_rollouts
from jaxrl_llm.train.setup import load_experiment
from jaxrl_llm.train.state import init_state

pytestmark = pytest.mark.usefixtures("shared_programs")

SLOW = [pytest.mark.slow, pytest.mark.of_many]
CRITIC = OptimizerConfig(learning_rate=1e-2)


def parts_of_reward(prompt, completion, metadata):
    """Two rewards, told apart."""
    return {"low": low_bytes(prompt, completion, metadata), "short": len(completion) < 4}


def with_prior(prior):
    """The prompts, with what somebody expects of each."""
    prompts = (dataclasses.replace(p, metadata={"prior": prior}) for p in tiny_prompts())
    return dataclasses.replace(CONFIG.data, prompts=lambda: PromptSet(prompts, source="tiny"))


def texts_too():
    """The prompts, with a text of the pretraining beside each."""
    rows = (dataclasses.replace(p, metadata={"pretraining": p.id * 3}) for p in tiny_prompts())
    prompts = PromptSet(rows, source="tiny")
    return dataclasses.replace(CONFIG.data, prompts=lambda: prompts)


def moving_reference():
    """GRPO with a reference that follows the policy."""
    rule = jr.bind(jr.regularizers.ema_reference, rate=0.25)
    return jr.recipes.grpo(kl_coef=0.1).replace(name="moving", reference=rule)


RUNS = {
    "spo_tracker": {"recipe": "spo_tracker"},
    "mssr": {"recipe": "mssr"},
    "ppo_max": {"recipe": jr.recipes.ppo_max(critic_warmup=1), "critic": CRITIC},
    "texts": {
        "recipe": jr.recipes.ppo_max(critic_warmup=0, text_coef=1.0),
        "critic": CRITIC,
        "data": texts_too(),
    },
    "moving reference": {"recipe": moving_reference()},
    "controller": {"recipe": "adaptive_kl", "critic": CRITIC, "epochs": 2},
    "capo": {"recipe": "capo", "optimizer": OptimizerConfig(learning_rate=1e-5)},
    "prompt_gdro": {"recipe": "prompt_gdro"},
    "mnpo": {"recipe": jr.recipes.mnpo(weights=(2.0, 1.0), every=1)},
}


@pytest.fixture(scope="module", params=RUNS)
def resumed(request, tmp_path_factory):
    """Two steps without a stop, and again from the checkpoint of the first."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny_run(folder, steps=2, checkpoint=CheckpointConfig(every=1), **RUNS[request.param])
    whole = train(config)
    # As a process leaves it that is killed in the second step.
    shutil.rmtree(folder / "checkpoints" / "step_00000002")
    return request.param, whole, train(config, resume=True)


@pytest.mark.of_many
@pytest.mark.slow
def test_resume_is_exact_whatever_a_method_remembers(resumed):
    name, whole, again = resumed
    assert int(again.state.step) == 2 and [row["step"] for row in again.history] == [1, 2]
    assert_same(again.state, whole.state)
    assert np.isfinite([row["loss"] for row in whole.history]).all()
    check_memory(name, whole)


def check_memory(name, result):
    """What each of them should have at the end."""
    state, first = result.state, tiny_parameters()
    algo = state.algo_state
    if name in ("spo_tracker", "mssr"):
        tracker = algo.advantage if name == "spo_tracker" else algo.advantage[0]
        counts = [x for x in jax.tree.leaves(tracker) if x.shape == (10,)]
        assert counts, tracker  # one of each prompt of the data set, as many as it has
        recipe = catalog.preset(name, length=4, num_prompts=10)
        fresh = jax.tree.leaves(recipe.advantage.init())
        moved = [np.asarray(a != b) for a, b in zip(jax.tree.leaves(tracker), fresh, strict=True)]
        seen = max(x.sum() for x in moved if x.shape == (10,))
        if name == "mssr":
            assert seen == 8  # two batches of four
        else:  # prompts are drawn by what the collector believes of them
            belief = state.collector_state
            assert 4 <= seen <= 8
            assert (belief.alpha + belief.beta != 1).sum() == seen
    elif name == "ppo_max":
        (deviation,) = algo.controllers.values()
        assert any(float(x.sum()) > 0 for x in jax.tree.leaves(deviation))
        assert {"critic_loss", "critic_grad_norm"} <= set(result.history[0])
        body = state.critic.params["model"]
        assert distance(body, first) > 0 and distance(body, state.params) > 0
        assert state.critic.target == () == state.reference
    elif name == "texts":
        assert int(state.collector_state[1]) == 8  # the next text, after two groups a batch
        assert [row["rollouts/text"] for row in result.history] == [4, 4]
        assert int(algo.controllers["score_std"].count) == 8  # rollouts of two batches
        assert distance(state.critic.params["model"], first) > 0
    elif name == "capo":
        moments = algo.rules["step_effects"]
        assert int(moments.count) == 2 and moments.mu.shape == (259, 32)
        assert all(np.abs(x).max() > 0 for x in moments[:2])
    elif name == "prompt_gdro":
        assert int(algo.advantage[1].history.count.sum()) == 8  # two batches of four
    elif name == "mnpo":
        latest, before = state.earlier.policies
        assert distance(latest, state.params) == 0 < distance(before, first)
        assert int(state.earlier.count) == 2
    elif name == "moving reference":
        assert 0 < distance(state.reference, first) < distance(state.params, first)
        assert state.critic == ()
    else:
        assert list(algo.controllers) == ["kl_coef"]
        assert float(algo.controllers["kl_coef"]) not in (0.0, 1e-3)
        assert float(algo.last_kl) == 0  # this controller reads the KL to the reference


def tiny_parameters():
    return CONFIG.model()[1]


def distance(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(float(np.abs(np.asarray(x) - np.asarray(y)).sum()) for x, y in pairs)


@pytest.mark.slow
def test_a_mesh_carries_a_critic_and_a_moving_reference(tmp_path):
    rule = jr.bind(jr.regularizers.ema_reference, rate=0.25)
    recipe = jr.recipes.ppo_max(critic_warmup=0).replace(reference=rule)
    changes = {"recipe": recipe, "critic": CRITIC}
    rows, states = [], []
    for name, mesh in (("one", MeshConfig()), ("eight", MeshConfig(data=2, fsdp=2, tensor=2))):
        result = train(tiny_run(tmp_path / name, steps=1, mesh=mesh, **changes))
        rows.append(result.history[0])
        states.append(result.state)
    for key in ("reward", "loss", "critic_loss", "critic_grad_norm", "tokens"):
        np.testing.assert_allclose(rows[0][key], rows[1][key], rtol=1e-4, atol=1e-5)
    laid_out = [x.sharding for x in jax.tree.leaves(states[1].critic.params)]
    assert any(not sharding.is_fully_replicated for sharding in laid_out)
    of_policy = [x.sharding for x in jax.tree.leaves(states[1].params)]
    assert [x.sharding for x in jax.tree.leaves(states[1].reference)] == of_policy


@pytest.mark.slow
def test_a_mesh_carries_earlier_policies_beside_an_adapter(tmp_path):
    """They are adapters then, and a mesh and a resumed run lay them out as what trains."""
    recipe, lora = jr.recipes.mnpo(weights=(2.0, 1.0), every=1), LoRAConfig(rank=2)
    rows, states = [], []
    for name, mesh in (("one", MeshConfig()), ("eight", MeshConfig(data=2, fsdp=2, tensor=2))):
        config = tiny_run(tmp_path / name, recipe=recipe, lora=lora, mesh=mesh, steps=2)
        train(dataclasses.replace(config, steps=1))
        result = train(config, resume=True)
        rows.append([row["loss"] for row in result.history])
        states.append(result.state)
    np.testing.assert_allclose(*rows, rtol=1e-4)
    of_policy = [x.sharding for x in jax.tree.leaves(states[1].params)]
    for policy in states[1].earlier.policies:
        assert [x.sharding for x in jax.tree.leaves(policy)] == of_policy
    assert_same(states[1].earlier.policies[0], states[1].params)


def test_a_sum_is_no_reward_beside_its_terms(tmp_path, monkeypatch):
    # A recipe is told its own options for the weights of a sum.
    terms = {name: (low_bytes, 2.0) for name in ("task", "history")}
    told = r"'vlm_spo' reads .*to jr.recipes.vlm_spo\(task_weight=2, history_weight=2\), or make"
    with pytest.raises(ValueError, match=told):
        tiny_run(tmp_path, recipe="vlm_spo", reward=jr.rewards.weighted_sum(terms))
    other = jr.rewards.weighted_sum({"style": (low_bytes, 2.0)})
    with pytest.raises(ValueError, match=r"weighted_sum\(2 style\); make them 1") as caught:
        tiny_run(tmp_path, recipe="vlm_spo", reward=other)
    assert "gdpo" not in str(caught.value)

    # A sum is no reward beside its terms: each is normalized on its own: with their sum, a penalty
    # could become a bonus.
    low = functools.partial(parts_of_reward)
    terms = {"low": (lambda *x: low(*x)["low"], 1.0), "short": (lambda *x: low(*x)["short"], -0.5)}
    total = jr.rewards.weighted_sum(terms)
    told = r"recipe 'gdpo' reads each reward apart.*gdpo\(weights=\(\('low', 1\), \('short', -0.5\)"
    with pytest.raises(ValueError, match=told):
        tiny_run(tmp_path, recipe="gdpo", reward=total)
    with pytest.raises(ValueError, match=told):  # another option of it does not weigh them
        tiny_run(tmp_path, recipe=jr.recipes.gdpo(eps_low=0.1), reward=total)
    tiny_run(tmp_path, recipe=jr.recipes.gdpo(weights=(("low", 1), ("short", -0.5))), reward=total)
    seen = []

    def spying(components, *, where):
        seen.append(sorted(components))
        return jr.advantages.gdpo(components, where=where)

    spy = jr.stateless(jr.given(spying, components="reward_components"))
    recipe = jr.recipes.gdpo().replace(name="spying", advantage=spy)
    experiment, params = load_experiment(tiny_run(tmp_path, recipe=recipe, reward=total))
    found = collect_rollouts(experiment, params, jax.random.key(0), Cursor(), number=0, version=0)
    recipe.prepare(found.batch, recipe.init())
    assert seen == [["low", "short"]]


@for_each(
    "recipe, reward, message, staleness",
    [
        (jr.recipes.fapo(), lambda p, c, m: 1.0, "recipe 'fapo' needs 'flawed'", 0),
        (
            jr.recipes.trloo(),
            lambda p, c, m: {"reward": 1.0, "other": 0.0},
            "recipe 'trloo' needs 'turn_",
            1,
        ),
        (jr.recipes.gdpo(), lambda p, c, m: 1.0, "recipe 'gdpo' keeps several rewards apart", 0),
    ],
)
def test_what_a_reward_does_not_return_is_told_before_the_evaluation(
    tmp_path, monkeypatch, recipe, reward, message, staleness
):
    monkeypatch.setattr(Experiment, "evaluate", lambda *args, **options: pytest.fail("evaluated"))
    changes = {"evaluation": EvaluationConfig(), "asynchrony": AsyncConfig(max_staleness=staleness)}
    with pytest.raises(ValueError, match=message):
        train(tiny_run(tmp_path, recipe=recipe, reward=reward, **changes))


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_batch_that_came_before_the_evaluation_is_the_first(tmp_path, monkeypatch, staleness):
    def reward(prompt, completion, metadata):
        return {"reward": float(len(completion)), "flawed": completion > "a"}

    changes = {"recipe": "fapo", "reward": reward, "steps": 2, "evaluation": EvaluationConfig()}
    changes["asynchrony"] = AsyncConfig(max_staleness=staleness)
    result = train(tiny_run(tmp_path / "a", **changes))
    monkeypatch.setattr("jaxrl_llm.train.run.Run._prepare", lambda run: None)
    plain = train(tiny_run(tmp_path / "b", **changes))
    assert str(result.before) == str(plain.before)
    steps = 2 - staleness  # which weights sample a second batch ahead is a matter of timing
    rows, others = ([x for x in run.history if "loss" in x][:steps] for run in (result, plain))
    assert len(rows) == steps
    for row, other in zip(rows, others, strict=True):
        for name in ("reward", "reward/flawed", "loss", "tokens"):
            assert row[name] == other[name]


@pytest.mark.slow
def test_greedy_responses_are_graded_where_a_method_asks(tmp_path):
    log = []

    def reward(prompt, completion, metadata):
        log.append((prompt, completion))
        return low_bytes(prompt, completion, metadata)

    # One rollout a prompt is enough.
    sampling = SamplingConfig(group_size=1, max_new_tokens=4)
    config = tiny_run(tmp_path, recipe="remax", reward=reward, sampling=sampling, steps=1)
    result = train(config)
    assert len(log) == 4 + 4
    sampled, greedy = dict(log[:4]), dict(log[4:])
    assert sampled.keys() == greedy.keys() and len(greedy) == 4
    experiment, params = load_experiment(config)
    questions = [next(q for q in experiment.train if q.prompt.text == text) for text in greedy]
    rollout = experiment.samplers.greedy(params, jax.random.key(0), [q.tokens for q in questions])
    texts = [
        experiment.tokenizer.decode(row[0][kept[0]].tolist())
        for row, kept in zip(np.asarray(rollout.tokens), np.asarray(rollout.mask), strict=True)
    ]
    assert texts == list(greedy.values())
    # The advantage is the reward less that of the greedy response, here summed over tokens.
    gain = [low_bytes(0, sampled[q], 0) - low_bytes(0, greedy[q], 0) for q in sampled]
    assert any(gain) == (result.history[0]["grad_norm"] > 0)


def turn_graded(prompt, completion, metadata):
    value = low_bytes(prompt, completion, metadata)
    return {"reward": value, "turn_rewards": [value]}


@pytest.mark.slow
def test_poad_leaves_out_updates_far_from_the_policy_that_sampled(tmp_path):
    options = {"recipe": "poad", "critic": CRITIC, "steps": 2, "minibatches": 1, "epochs": 3}
    options |= {"reward": turn_graded}
    fast = OptimizerConfig(learning_rate=0.1)
    rows = train(tiny_run(tmp_path, optimizer=fast, **options)).history
    assert len(rows) == 2
    for row in rows:
        assert row["updates"] >= 1 and row["skipped"] == 0
        assert row["updates"] + row["withheld"] == row["critic_updates"] == 3
        assert (row["withheld"] > 0) == (row["approx_kl"] > 0.02)
    assert any(row["withheld"] for row in rows)


def closed(advantages):
    return jnp.float32(0.0)


def only_first(logp, old_logp, mask):
    """Lets the first update of a batch through."""
    return jnp.float32(jnp.all(jnp.abs(logp - old_logp) < 1e-4))


CLOSED = (Computed("update_scale", closed, "batch"),)
WITHHELD = {
    "a gate that never opens": (jr.recipes.dr_grpo(length=4).replace(computed=CLOSED), {}),
    # The metrics of a step are of its two updates.
    "two minibatches": (jr.recipes.dr_grpo(length=4).replace(computed=CLOSED, minibatches=2), {}),
    "from the fourth step on": (
        jr.recipes.ppo(critic_warmup=2).replace(computed=CLOSED, epochs=1),
        {"critic": CRITIC},
    ),
}


@pytest.mark.parametrize(
    "name", [x if not i else pytest.param(x, marks=SLOW) for i, x in enumerate(WITHHELD)]
)
def test_a_run_whose_updates_are_all_withheld_says_so_once(tmp_path, name):
    recipe, options = WITHHELD[name]
    told = f"All updates of steps {3 if options else 1} to {5 if options else 3} are withheld"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = train(tiny_run(tmp_path, recipe=recipe, **options)).history
    (said,) = [str(w.message) for w in caught if "withheld" in str(w.message)]
    assert said.startswith(told) and f"of recipe {recipe.name!r}, closed, is 0" in said
    assert all(row["updates"] == 0 for row in rows) and len(rows) == 6


@pytest.mark.slow
def test_a_bound_below_the_divergence_of_a_rounded_sampler_is_warned_of(tmp_path):
    recipe = jr.recipes.poad(max_kl=1e-9)
    sampling = SamplingConfig(group_size=2, max_new_tokens=4, quantization="int8")
    options = {"reward": turn_graded, "critic": CRITIC, "minibatches": 2, "steps": 3}
    with pytest.warns(UserWarning, match=r"'poad', kl_gate\(max_kl=1e-09\), is 0: the policy"):
        train(tiny_run(tmp_path, recipe=recipe, sampling=sampling, **options))


OPEN = {
    "some updates": jr.recipes.dr_grpo(length=4).replace(
        surrogate=jr.surrogates.ppo_clip,
        computed=(Computed("update_scale", only_first, "update"),),
        epochs=2,
    ),
    "a method that trains no weights": jr.recipes.dr_grpo(length=4).replace(
        computed=(Computed("update_scale", jr.curation.no_update, "batch"),)
    ),
}


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("name", OPEN)
def test_updates_that_are_withheld_as_the_method_says_are_not_warned_of(tmp_path, name, recwarn):
    rows = train(tiny_run(tmp_path, recipe=OPEN[name])).history
    assert all(row["withheld"] == 1 for row in rows)
    assert not [w for w in recwarn if "withheld" in str(w.message)]


@pytest.mark.slow
def test_a_prior_comes_with_the_prompts(tmp_path):
    rows = []
    for prior in (0.0, 1.0):
        config = tiny_run(tmp_path / str(prior), recipe="v05_baseline", steps=1)
        rows.append(train(dataclasses.replace(config, data=with_prior(prior))).history[0])
    # The prior moves the baseline, and with it how many rollouts a prompt gets.
    assert rows[0]["loss"] != rows[1]["loss"]


def with_demonstrations():
    """The prompts of tiny runs with a response of an expert each."""
    rows = tiny_prompts()
    rows = (dataclasses.replace(x, metadata={"demonstration": "ab"}) for x in rows)
    return PromptSet(rows, source="tiny")


@pytest.mark.slow
def test_chord_learns_from_experts_by_the_share_of_the_step(tmp_path):
    options = {"data": dataclasses.replace(CONFIG.data, prompts=with_demonstrations)}
    options |= {"optimizer": OptimizerConfig(name="sgd", b1=0.0, learning_rate=1.0)}
    three = SamplingConfig(group_size=3, max_new_tokens=4)

    def run(name, **changes):
        return train(tiny_run(tmp_path / name, **(options | {"sampling": three} | changes)))

    recipe = jr.recipes.chord(phi=False, peak=1.0, valley=0.0, decay=2)
    result = run("chord", recipe=recipe, steps=3)
    assert [row["rollouts/demonstration"] for row in result.history] == [4.0] * 3
    assert int(result.state.algo_state.controllers["mu"]) == 3
    assert all(np.isfinite(row["loss"]) and row["skipped"] == 0 for row in result.history)

    # With the whole share it is fine-tuning, whatever the rollouts; without, it is GRPO.
    first = run("first", recipe=recipe, steps=1).state.params
    one = SamplingConfig(group_size=1, max_new_tokens=4)
    tuned = run("sft", recipe="sft", steps=1, sampling=one).state.params
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), first, tuned)
    two = SamplingConfig(group_size=2, max_new_tokens=4)
    no_share = jr.recipes.chord(peak=0.0, valley=0.0)
    alone = run("alone", recipe=no_share, steps=1).state.params
    grpo = jr.recipes.grpo(kl_coef=0.0).replace(weights=jr.aggregate.token_mean)
    plain = run("grpo", recipe=grpo, steps=1, sampling=two).state.params
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), alone, plain)
    assert any(
        np.abs(x - y).max() > 1e-3
        for x, y in zip(jax.tree.leaves(alone), jax.tree.leaves(first), strict=True)
    )


@pytest.mark.slow
def test_rlsd_is_taught_by_the_policy_that_reads_the_solution(tmp_path):
    options = {"data": dataclasses.replace(CONFIG.data, prompts=with_demonstrations)}
    options |= {"optimizer": OptimizerConfig(name="sgd", b1=0.0, learning_rate=1.0), "steps": 1}

    def params(name, **changes):
        return train(tiny_run(tmp_path / name, **(options | changes))).state.params

    plain = jr.recipes.grpo(kl_coef=0.0).replace(weights=jr.aggregate.token_mean)
    grpo, none = params("grpo", recipe=plain), params("none", recipe=jr.recipes.rlsd(lam=0.0))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), grpo, none)
    full = params("full", recipe=jr.recipes.rlsd(lam=1.0))
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), grpo, full)
    assert max(jax.tree.leaves(moved)) > 1e-4
    result = train(tiny_run(tmp_path / "decay", **options | {
        "recipe": jr.recipes.rlsd(decay=2), "steps": 3}))  # fmt: skip
    assert int(result.state.algo_state.controllers["teacher_share"]) == 3
    assert all(np.isfinite(row["loss"]) and row["skipped"] == 0 for row in result.history)
    with pytest.raises(ValueError, match="prompt 'q00' has no 'demonstration'"):
        train(tiny_run(tmp_path / "bare", recipe="rlsd"))


REFUSED = {
    "luffy_shaping": r"recipe 'luffy_shaping': .* prompt 'q0\d' has no 'demonstration' in its row",
    "nurl": r"prompt 'q0\d' has no 'hints'",
    "v05_baseline": r"needs 'prior' \(.*\); prompt 'q0\d' has none in its metadata",
}


@for_each("name", REFUSED)
def test_what_a_run_cannot_bring_is_told_before_it_samples(tmp_path, name):
    def reward(prompt, completion, metadata):
        pytest.fail("it has already sampled")

    with pytest.raises(ValueError, match=REFUSED[name]):
        train(tiny_run(tmp_path / "run", recipe=name, reward=reward))
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_a_checkpoint_of_another_method_is_refused(tmp_path):
    config = tiny_run(tmp_path, recipe="spo_tracker", steps=1)
    train(config)
    with pytest.raises(ValueError, match="was made with another optimizer or recipe"):
        train(dataclasses.replace(config, recipe="dr_grpo"), resume=True, allow_changed=True)
    with pytest.raises(ValueError, match="was made with another optimizer or recipe"):
        recipe = jr.recipes.ppo_max(critic_warmup=0)
        train(
            dataclasses.replace(config, recipe=recipe, critic=CRITIC),
            resume=True,
            allow_changed=True,
        )


@pytest.mark.slow
def test_a_critic_that_diverges_ends_the_run(tmp_path):
    plain = jr.recipes.ppo_max(critic_warmup=2)

    def broken(values, old_values, returns, mask):
        return plain.critic.loss(values, old_values, returns, mask) * np.nan

    recipe = plain.replace(critic=dataclasses.replace(plain.critic, loss=broken))
    told = r"Step 1 gave loss -?\d.*, of the critic nan and nan, so the critic's update is skipped"
    with pytest.raises(TrainingError, match=told):
        train(tiny_run(tmp_path, recipe=recipe, critic=CRITIC, max_skipped=1))
    assert (tmp_path / "skipped_step_00000001.npz").is_file()


@pytest.mark.slow
def test_an_iteration_begins_beyond_the_policy_and_has_itself_as_the_reference(tmp_path):
    recipe = jr.recipes.accelerated_po(alpha=0.5, every=2)
    config = tiny_run(tmp_path, recipe=recipe, steps=2)
    state = train(config).state
    assert_same(state.reference_policy, state.params)
    first, last = config.model()[1], state.reference.previous
    beyond = jax.tree.map(lambda x, y: x + 0.5 * (x - y), last, first)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), state.params, beyond)
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (last, first)), strict=True))


def test_a_first_iteration_leads_away_from_the_policy_and_not_from_another_reference():
    recipe, (_, params) = jr.recipes.accelerated_po(every=1), tiny_model(num_layers=1)
    reference = jax.tree.map(lambda x: x + 1, params)
    key = jax.random.key(0)
    state = init_state(params, optax.sgd(0.1), recipe, key=key, reference=reference)
    assert_same(state.reference_policy, reference)
    assert_same(state.reference.previous, params)


@pytest.mark.slow
def test_a_ring_of_earlier_policies_moves(tmp_path):
    """After three steps it has the policies of the last two, each step an iteration."""
    policies = []

    recipe = jr.recipes.mnpo(weights=(2.0, 1.0), every=1)
    one = jr.recipes.mnpo(weights=(1.0,), every=1)
    for steps in (2, 3):
        policies.append(train(tiny_run(tmp_path / f"{steps}", recipe=recipe, steps=steps)).state)
    ring = policies[1].earlier
    assert int(ring.count) == 2 and int(policies[0].earlier.count) == 2
    assert_same(ring.policies[0], policies[1].params)
    assert_same(ring.policies[1], policies[0].params)
    # Of one policy, which is what sampled, it is inpo.
    same = [train(tiny_run(tmp_path / x.name, recipe=x, steps=2)) for x in (one, jr.recipes.inpo())]
    losses = [[row["loss"] for row in x.history] for x in same]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.slow
def test_the_seed_of_a_run_draws_its_random_reference(tmp_path):
    def reference(seed):
        rule = jr.regularizers.random_reference(every=1)
        recipe = jr.recipes.grpo(kl_coef=0.1).replace(reference=rule)
        state = train(tiny_run(tmp_path / f"{seed}", recipe=recipe, steps=2, seed=seed)).state
        same = [
            all(map(np.array_equal, jax.tree.leaves(state.reference_params), jax.tree.leaves(x)))
            for x in (state.params, tiny_parameters())
        ]
        return 2 if same[0] else 0 if same[1] else 1

    assert len({reference(seed) for seed in range(4)}) > 1


@pytest.mark.slow
def test_a_reference_that_moves_may_sample(tmp_path):
    """One that never does samples as a policy that does not learn."""
    seen = []

    def reward(prompt, completion, metadata):
        seen[-1].append(completion)
        return low_bytes(prompt, completion, metadata)

    def never(reference, params, step):
        return reference

    recipe = jr.recipes.grpo(kl_coef=0.1).replace(reference=never)
    by_reference = recipe.replace(sampled_by="reference")
    still = OptimizerConfig(learning_rate=1e-12)
    for name, changes in (
        ("by the reference", {"recipe": by_reference}),
        ("still", {"recipe": recipe, "optimizer": still}),
        ("by the policy", {"recipe": recipe}),
    ):
        seen.append([])
        result = train(tiny_run(tmp_path / name, reward=reward, steps=2, **changes))
        # The second batch is of other weights than those that train, which the ratio tells.
        ratio = result.history[-1].get("ratio_max", 1.0)
        assert (ratio == 1.0) == (name != "by the reference")
        # How old the weights of such a reference are is not known.
        assert all(("staleness" in row) == (name != "by the reference") for row in result.history)
    assert seen[0] == seen[1] != seen[2]
    with pytest.raises(ValueError, match="sampled_by='reference' needs a reference that moves"):
        jr.recipes.grpo().replace(sampled_by="reference")


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("minibatches", [1, 2])
def test_fipo_is_dapo_until_the_policy_has_moved_within_a_batch(minibatches, tmp_path):
    """Its weights compare the policy with that of the batch, so they need a second update."""
    found = {}
    for name in ("fipo", "dapo"):
        recipe = catalog.PRESETS[name](dynamic_sampling=False).replace(minibatches=minibatches)
        found[name] = train(tiny_run(tmp_path / name, recipe=recipe, steps=3))
    rows = {name: [row["loss"] for row in result.history] for name, result in found.items()}
    assert len(rows["fipo"]) == 3 and np.isfinite(rows["fipo"]).all()
    moved = [
        not np.array_equal(x, y)
        for x, y in zip(*(jax.tree.leaves(r.state.policy) for r in found.values()), strict=True)
    ]
    assert any(moved) == (minibatches > 1)
    if minibatches == 1:
        assert rows["fipo"] == rows["dapo"]


def right_or_wrong(prompt, completion, metadata):
    return float(low_bytes(prompt, completion, metadata) > 0.25)


@pytest.mark.of_many
@pytest.mark.slow
def test_real_begins_a_batch_at_the_loss_of_equal_scores(tmp_path):
    """The first update of a batch compares equal policies; the second one learns labels."""
    once = jr.recipes.real().replace(minibatches=1)
    runs = {
        passes: train(
            tiny_run(
                tmp_path / str(passes), recipe=once, reward=right_or_wrong, steps=3, epochs=passes
            )
        )
        for passes in (1, 2)
    }
    equal = 2 * np.log(2)  # one right and one wrong response, each against a logit of 0
    first, later = ([row["loss"] for row in runs[passes].history] for passes in (1, 2))
    groups = np.array(first) * 4 / equal
    np.testing.assert_allclose(groups, np.round(groups), atol=1e-4)
    assert groups[0].round() > 0 and (groups.round() <= 4).all()
    # Of the same batch, as a mean over both passes.
    assert later[0] < first[0] * (1 - 1e-3)
