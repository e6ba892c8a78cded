"""Whole runs of methods that need more than rollouts and rewards, and their exact resume."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exact_resume import assert_resumes
from helpers import refuses
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
from jaxrl_llm.train.experiment.experiment import Experiment
from jaxrl_llm.train.experiment.rollouts import collect_rollouts
from jaxrl_llm.train.experiment.setup import load_experiment
from jaxrl_llm.train.update.init import init_state

pytestmark = pytest.mark.usefixtures("shared_programs")

CRITIC = OptimizerConfig(learning_rate=1e-2)


def parts_of_reward(prompt, completion, metadata):
    """Two rewards, told apart."""
    return {"low": low_bytes(prompt, completion, metadata), "short": len(completion) < 4}


def moving_reference():
    """GRPO with a reference that follows the policy."""
    rule = jr.bind(jr.regularizers.ema_reference, rate=0.25)
    return jr.recipes.grpo(kl_coef=0.1).replace(name="moving", reference=rule)


def of_tracker(result):
    tracker, belief = result.state.algo_state.advantage, result.state.collector_state
    recipe = catalog.preset("spo_tracker", length=4, num_prompts=10)
    pairs = zip(jax.tree.leaves(tracker), jax.tree.leaves(recipe.advantage.init()), strict=True)
    moved = [np.asarray(a != b) for a, b in pairs]
    # One of each prompt of the data set; the collector draws prompts by its own belief.
    seen = max(x.sum() for x in moved if x.shape == (10,))
    assert 4 <= seen <= 8 and (belief.alpha + belief.beta != 1).sum() == seen


def of_critic(result):
    state, first = result.state, tiny_parameters()
    (deviation,) = state.algo_state.controllers.values()
    assert any(float(x.sum()) > 0 for x in jax.tree.leaves(deviation))
    assert {"critic_loss", "critic_grad_norm"} <= set(result.history[0])
    body = state.critic.params["model"]
    assert distance(body, first) > 0 and distance(body, state.params) > 0
    assert state.critic.target == () == state.reference


def of_reference(result):
    state, first = result.state, tiny_parameters()
    assert 0 < distance(state.reference, first) < distance(state.params, first)
    assert state.critic == ()


def of_controller(result):
    algo = result.state.algo_state
    assert list(algo.controllers) == ["kl_coef"]
    assert float(algo.controllers["kl_coef"]) not in (0.0, 1e-3)
    assert float(algo.last_kl) == 0  # this controller reads the KL to the reference


def of_rule(result):
    moments = result.state.algo_state.rules["step_effects"]
    assert int(moments.count) == 2 and moments.mu.shape == (259, 32)
    assert all(np.abs(x).max() > 0 for x in moments[:2])


def of_earlier_policies(result):
    state = result.state
    latest, before = state.earlier.policies
    assert distance(latest, state.params) == 0 < distance(before, tiny_parameters())
    assert int(state.earlier.count) == 2


RUNS = {
    of_tracker: {"recipe": "spo_tracker"},
    of_critic: {"recipe": jr.recipes.ppo_max(critic_warmup=1), "critic": CRITIC},
    of_reference: {"recipe": moving_reference()},
    of_controller: {"recipe": "adaptive_kl", "critic": CRITIC, "epochs": 2},
    of_rule: {"recipe": "capo", "optimizer": OptimizerConfig(learning_rate=1e-5)},
    of_earlier_policies: {"recipe": jr.recipes.mnpo(weights=(2.0, 1.0), every=1)},
}


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("check", RUNS, ids=lambda x: x.__name__)
def test_resume_is_exact_whatever_a_method_remembers(check, tmp_path):
    options = {"steps": 2, "checkpoint": CheckpointConfig(every=1), **RUNS[check]}
    config = tiny_run(tmp_path / "whole", **options)
    whole = train(config)
    again = assert_resumes(config, whole, tmp_path / "again")
    assert [row["step"] for row in again.history] == [1, 2]
    assert np.isfinite([row["loss"] for row in whole.history]).all()
    check(whole)


def tiny_parameters():
    return CONFIG.model()[1]


def distance(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(float(np.abs(np.asarray(x) - np.asarray(y)).sum()) for x, y in pairs)


def on_one_and_eight(folder, **changes):
    """A run on one device, and on a mesh of eight."""
    return [
        train(tiny_run(folder / str(mesh.data), steps=2, mesh=mesh, **changes))
        for mesh in (MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2))
    ]


def shardings(tree):
    return [x.sharding for x in jax.tree.leaves(tree)]


@pytest.mark.slow
def test_a_mesh_carries_a_critic_and_a_moving_reference(tmp_path):
    rule = jr.bind(jr.regularizers.ema_reference, rate=0.25)
    recipe = jr.recipes.ppo_max(critic_warmup=1).replace(reference=rule)
    one, eight = on_one_and_eight(tmp_path, recipe=recipe, critic=CRITIC)
    for key in ("reward", "loss", "critic_loss", "critic_grad_norm", "tokens"):
        rows = [[row[key] for row in run.history] for run in (one, eight)]
        np.testing.assert_allclose(*rows, rtol=1e-4, atol=1e-5)
    assert [row["withheld"] for row in eight.history] == [1, 0]
    state = eight.state
    assert any(not x.is_fully_replicated for x in shardings(state.critic.params))
    assert shardings(state.reference) == shardings(state.params)


@pytest.mark.slow
def test_a_mesh_carries_earlier_policies_beside_an_adapter(tmp_path):
    """They are adapters then, and laid out as what trains."""
    recipe = jr.recipes.mnpo(weights=(2.0, 1.0), every=1)
    one, eight = on_one_and_eight(tmp_path, recipe=recipe, lora=LoRAConfig(rank=2))
    losses = [[row["loss"] for row in run.history] for run in (one, eight)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    state = eight.state
    assert all(shardings(x) == shardings(state.params) for x in state.earlier.policies)
    assert_same(state.earlier.policies[0], state.params)


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
    refuses(told, tiny_run, tmp_path, recipe="gdpo", reward=total)
    with pytest.raises(ValueError, match=told):  # another option of it does not weigh them
        tiny_run(tmp_path, recipe=jr.recipes.gdpo(eps_low=0.1), reward=total)
    tiny_run(tmp_path, recipe=jr.recipes.gdpo(weights=(("low", 1), ("short", -0.5))), reward=total)
    recipe = jr.recipes.gdpo().replace(name="own")
    experiment, params = load_experiment(tiny_run(tmp_path, recipe=recipe, reward=total))
    found = collect_rollouts(experiment, params, jax.random.key(0), Cursor(), number=0, version=0)
    assert sorted(found.batch.reward_components) == ["low", "short"]


@for_each(
    "recipe, message, staleness",
    [
        (jr.recipes.fapo(), "recipe 'fapo' needs 'flawed'", 0),
        (jr.recipes.trloo(), "recipe 'trloo' needs 'turn_", 1),
        (jr.recipes.gdpo(), "recipe 'gdpo' keeps several rewards apart", 0),
    ],
)
def test_what_a_reward_does_not_return_is_told_before_the_evaluation(
    tmp_path, monkeypatch, recipe, message, staleness
):
    monkeypatch.setattr(Experiment, "evaluate", lambda *args, **options: pytest.fail("evaluated"))
    changes = {"evaluation": EvaluationConfig(), "asynchrony": AsyncConfig(max_staleness=staleness)}
    with pytest.raises(ValueError, match=message):
        train(tiny_run(tmp_path, recipe=recipe, **changes))


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


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        (jr.recipes.dr_grpo(length=4), "1 to 3"),
        pytest.param(jr.recipes.ppo(critic_warmup=2), "3 to 5", marks=pytest.mark.slow),
    ],
    ids=["never", "after the warmup"],
)
def test_a_run_whose_updates_are_all_withheld_says_so_once(tmp_path, recipe, steps):
    recipe = recipe.replace(computed=CLOSED, epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = train(tiny_run(tmp_path, recipe=recipe, critic=recipe.critic and CRITIC)).history
    (said,) = [str(w.message) for w in caught if "withheld" in str(w.message)]
    assert said.startswith(f"All updates of steps {steps} are withheld")
    assert f"of recipe {recipe.name!r}, closed, is 0" in said
    assert all(row["updates"] == 0 for row in rows) and len(rows) == 6


SOME = jr.recipes.dr_grpo(length=4).replace(
    surrogate=jr.surrogates.ppo_clip,
    computed=(Computed("update_scale", only_first, "update"),),
    epochs=2,
)
BY_METHOD = (Computed("update_scale", jr.curation.no_update, "batch"),)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("recipe", [SOME, jr.recipes.dr_grpo(length=4).replace(computed=BY_METHOD)])
def test_updates_that_are_withheld_as_the_method_says_are_not_warned_of(tmp_path, recipe, recwarn):
    rows = train(tiny_run(tmp_path, recipe=recipe)).history
    assert all(row["withheld"] == 1 for row in rows)
    assert not [w for w in recwarn if "withheld" in str(w.message)]


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

    # With the whole share it is fine-tuning, whatever the rollouts.
    first = run("first", recipe=recipe, steps=1).state.params
    one = SamplingConfig(group_size=1, max_new_tokens=4)
    tuned = run("sft", recipe="sft", steps=1, sampling=one).state.params
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), first, tuned)
    assert distance(tuned, tiny_parameters()) > 1e-3


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
    with pytest.raises(ValueError, match="prompt 'q00' has no 'demonstration'"):
        train(tiny_run(tmp_path / "bare", recipe="rlsd"))


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
    assert distance(last, first) > 0


def test_a_first_iteration_leads_away_from_the_policy_and_not_from_another_reference():
    recipe, (_, params) = jr.recipes.accelerated_po(every=1), tiny_model(num_layers=1)
    reference = jax.tree.map(lambda x: x + 1, params)
    key = jax.random.key(0)
    state = init_state(params, optax.sgd(0.1), recipe, key=key, reference=reference)
    assert_same(state.reference_policy, reference)
    assert_same(state.reference.previous, params)


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


@pytest.mark.slow
def test_a_bound_below_the_divergence_of_a_rounded_sampler_is_warned_of(tmp_path):
    recipe = jr.recipes.poad(max_kl=1e-9)
    sampling = SamplingConfig(group_size=2, max_new_tokens=4, quantization="int8")
    options = {"reward": turn_graded, "critic": CRITIC, "minibatches": 2, "steps": 3}
    with pytest.warns(UserWarning, match=r"'poad', kl_gate\(max_kl=1e-09\), is 0: the policy"):
        train(tiny_run(tmp_path, recipe=recipe, sampling=sampling, **options))
