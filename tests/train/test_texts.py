"""Steps and runs with texts beside the rollouts of a batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_makers import first_batch
from helpers import make_batch
from step_makers import flat_step, state_of
from tiny_run import CONFIG, tiny_run

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import MeshConfig, OptimizerConfig, init_critic, train
from jaxrl_llm.train.experiment.setup import load_experiment

SLOW = [pytest.mark.slow, pytest.mark.of_many]

pytestmark = pytest.mark.usefixtures("shared_programs")

COEF = 0.5
# Of eight groups the last four, as the collector has them.
TEXTS = np.arange(8)[:, None] >= np.array([4, 4, 4])


def stepped(recipe, batch, **options):
    """The state after a step of plain gradient descent, with any critic, and the metrics."""
    model, params = tiny_model(num_layers=1)
    optimizer, critic = optax.sgd(0.1), None
    if recipe.critic is not None:
        critic = init_critic(model, params, key=jax.random.key(1))
    options |= {"critic_optimizer": None if critic is None else optimizer, "donate": False}
    options = {"epochs": 1, "minibatches": 1} | options
    step = flat_step(model, recipe, optimizer, learning_rate=0.1, **options)
    first = {"critic": critic, "critic_optimizer": options["critic_optimizer"]}
    shape = model.output_matrix(params).shape
    return step(state_of(recipe, optimizer, output_shape=shape, **first), batch)


def without_texts(batch, **extras):
    where, mask = batch.where & ~TEXTS, batch.mask & ~TEXTS[..., None]
    return batch.replace(where=where, mask=mask, extras=extras)


def assert_alike(a, b, **tolerances):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerances)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_with_texts_is_one_without_them_and_that_of_their_likelihood(minibatches):
    """The critic, the memory of scores and the metrics of rollouts are those without texts."""
    rng = np.random.default_rng(2)
    batch = make_batch(rewards=rng.normal(size=(8, 3)).astype(np.float32))
    batch = batch.replace(where=batch.where.at[1].set(False))  # so that minibatches differ
    ref_logp = jnp.asarray(-rng.uniform(1.0, 9.0, batch.mask.shape), jnp.float32)
    batch = batch.replace(ref_logp=ref_logp, extras={"texts": jnp.asarray(TEXTS)})
    absent = without_texts(batch)
    options = {"whiten": True, "kl_coef": 0.1, "critic_warmup": 0}
    recipe, plain = jr.recipes.ppo_max(text_coef=COEF, **options), jr.recipes.ppo_max(**options)
    state, metrics = stepped(recipe, batch, minibatches=minibatches, microbatches=2)
    want, expected = stepped(plain, absent, minibatches=minibatches, microbatches=2)
    assert_alike(state.critic, want.critic, rtol=1e-5, atol=1e-7)
    assert_alike(state.algo_state, want.algo_state, rtol=1e-6)
    trained = np.asarray(batch.mask)[TEXTS]
    assert float(metrics.pop("text_tokens")) == trained.sum()
    text_loss = float(metrics.pop("text_loss"))
    assert metrics.keys() == expected.keys()
    for name in ("reward", "reward_std", "informative", "length", "tokens", "critic_loss"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, err_msg=name)
    assert float(metrics["updates"]) == minibatches
    if minibatches > 1:  # of which the second follows another update
        return
    for name in ("entropy", "ref_kl", "approx_kl", "clip_fraction"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, err_msg=name)
    model, params = tiny_model(num_layers=1)
    logp = np.asarray(jr.train.make_scorer(model)(params, batch), np.float64)
    assert text_loss == pytest.approx(-logp[TEXTS][trained].mean(), rel=1e-5)
    np.testing.assert_allclose(metrics["loss"], expected["loss"] + COEF * text_loss, rtol=1e-5)


# What a state or a metric takes from all responses of a batch, or from the updated policy.
TAKEN = {
    "the divergence of the update": jr.recipes.mssr(num_prompts=8),
    "moments of the gradient": jr.recipes.capo(learning_rate=1e-6),
    "rejected tokens": jr.recipes.m2po(threshold=0.02),
    "losses of the update": jr.recipes.prompt_gdro(num_prompts=8),
    "a divergence in each minibatch": jr.recipes.drpo_len(length=5),
    "norms of gradients": jr.recipes.vcpo(),
}


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("name", TAKEN)
def test_all_states_and_metrics_are_those_without_texts(name):
    """The texts weigh almost nothing, so that the policies after the update are equal."""
    recipe, rng = TAKEN[name], np.random.default_rng(3)
    shape = (8, 3, 5)
    ref, behavior = (-rng.uniform(4.0, 7.0, shape).astype(np.float32) for _ in range(2))
    batch = make_batch(
        ref_logp=ref,
        behavior_logp=np.where(TEXTS[..., None], -40.0, behavior).astype(np.float32),
        rewards=np.where(TEXTS, 77.0, rng.integers(0, 2, shape[:2])).astype(np.float32),
    )
    ids = {"prompt_ids": jnp.arange(8) % 4}  # those of the prompts, as texts are in their rows
    absent = without_texts(batch, **ids)
    batch = batch.replace(extras=ids | {"texts": jnp.asarray(TEXTS)})
    options = {"minibatches": min(recipe.minibatches, 4)}
    state, metrics = stepped(recipe.replace(text_coef=1e-9), batch, **options)
    want, expected = stepped(recipe, absent, **options)
    for a, b in zip(*map(jax.tree.leaves, (state.algo_state, want.algo_state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max(initial=0))
    assert all(np.any(x) for x in jax.tree.leaves(state.algo_state.rules))
    assert float(metrics.pop("text_tokens")) == np.asarray(batch.mask)[TEXTS].sum()
    assert float(metrics.pop("text_loss")) > 1
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-3, atol=1e-5, err_msg=key)


def with_texts():
    """The prompts of tiny runs with a text each, shorter than a response may be."""
    rows = (Prompt(f"q{n:02}", id=f"q{n:02}", metadata={"pretraining": "ab"}) for n in range(10))
    return PromptSet(rows, source="tiny")


def texts_beside(path, recipe, **changes):
    """The first batch of a run whose data have texts."""
    data = dataclasses.replace(CONFIG.data, prompts=with_texts)
    experiment, params = load_experiment(tiny_run(path, recipe=recipe, data=data, **changes))
    return first_batch(experiment, params)


def test_texts_are_no_responses(tmp_path):
    # Texts are no responses of unknown policies: which the step would have to score first, and are
    # not shown as answers to prompts.
    made = texts_beside(tmp_path, jr.recipes.ppo_max(text_coef=1.0, critic_warmup=0))
    assert np.array_equal(made.batch.extras["texts"].any(-1), [False, False, True, True])
    assert "behavior_known" not in made.batch.extras
    assert np.isfinite(made.batch.behavior_logp[made.batch.mask]).all()
    assert [row["completion"] == "ab" for row in made.rows] == [False] * 4

    # A batch of texts alone shows nothing.
    recipe = jr.recipes.rloo().replace(text_coef=1.0, collector=jr.curation.plain_texts())
    assert texts_beside(tmp_path, recipe).rows == []


class Counted:
    """A reward that differs with the completion, and remembers what it graded."""

    def __init__(self):
        self.calls = []

    def __call__(self, prompt, completion, metadata):
        return sum(map(ord, completion)) % 7 + 1.0

    def score_batch(self, prompts, completions, metadata):
        self.calls.append(list(prompts))
        return [self(*row) for row in zip(prompts, completions, metadata, strict=True)]


def beside_texts(share):
    collector = jr.curation.plain_texts()
    if share < 1:
        collector = jr.curation.mixed((jr.curation.in_order(), 1 - share), (collector, share))
    return jr.recipes.remax().replace(text_coef=1.0, collector=collector)


@pytest.mark.parametrize(
    ("share", "answered"),
    [pytest.param(0.25, 3, marks=SLOW), (0.5, 2), pytest.param(1.0, 0, marks=SLOW)],
)
def test_texts_have_no_baseline(tmp_path, share, answered):
    """None is sampled or graded, and those of the prompts are as without texts."""
    reward = Counted()
    made = texts_beside(tmp_path / "a", beside_texts(share), reward=reward)
    texts = np.asarray(made.batch.extras["texts"])
    baseline = np.asarray(made.batch.extras["greedy_rewards"])
    assert texts.any(-1).tolist() == [p >= answered for p in range(4)]
    graded = [prompt for call in reward.calls for prompt in call]
    assert len(graded) == (2 + 1) * answered  # rollouts and a baseline each
    plain = texts_beside(tmp_path / "b", jr.recipes.remax(), reward=Counted())
    want = np.asarray(plain.batch.extras["greedy_rewards"])[:answered]
    assert (want > 0).all()
    np.testing.assert_array_equal(baseline, np.append(want, np.zeros(4 - answered)))
    sampled = np.asarray(made.batch.mask)[:answered].sum()
    assert sampled <= made.metrics["tokens_sampled"] <= sampled + 4 * answered
    assert made.batch.where.all() and made.metrics["reward_failures"] == 0


@pytest.mark.slow
def test_baselines_beside_texts_are_spread_over_a_mesh(tmp_path):
    """Three prompts on four devices."""
    options = {"reward": Counted(), "mesh": MeshConfig(data=4, tensor=2)}
    spread = texts_beside(tmp_path / "a", beside_texts(0.25), **options)
    one = texts_beside(tmp_path / "b", beside_texts(0.25), reward=Counted())
    names = ("tokens_sampled", "sampled_reward")
    assert [spread.metrics[x] for x in names] == [one.metrics[x] for x in names]
    baselines = (np.asarray(x.batch.extras["greedy_rewards"]) for x in (spread, one))
    np.testing.assert_array_equal(*baselines)


class NoBaseline(Counted):
    """Fails on the greedy response to the last prompt that has one."""

    def score_batch(self, prompts, completions, metadata):
        values = super().score_batch(prompts, completions, metadata)
        if len(set(prompts)) == len(prompts):
            values[-1] = jr.rewards.FAILED
        return values


def test_a_baseline_that_fails_leaves_out_its_prompt_and_no_text(tmp_path):
    with pytest.warns(jr.rewards.VerifierWarning, match="failed on 1 of"):
        made = texts_beside(tmp_path, beside_texts(0.5), reward=NoBaseline())
    where = np.asarray(made.batch.where).all(-1)
    assert where.tolist() == [True, False, True, True] and made.metrics["reward_failures"] == 1


@pytest.mark.slow
def test_a_batch_whose_rollouts_are_dropped_has_the_reward_that_was_sampled(tmp_path):
    recipe = jr.recipes.rloo().replace(
        text_coef=1.0,
        collector=jr.curation.mixed(
            (jr.curation.refill(jr.curation.informative_groups, max_rounds=1), 0.5),
            (jr.curation.plain_texts(), 0.5),
        ),
    )
    data = dataclasses.replace(CONFIG.data, prompts=with_texts)
    changes = {"reward": lambda prompt, completion, metadata: 0.75, "data": data, "steps": 1}
    (row,) = train(tiny_run(tmp_path, recipe=recipe, **changes)).history
    assert (row["reward"], row["sampled_reward"], row["no_signal"]) == (0.75, 0.75, 0)
    assert (row["tokens"], row["text_tokens"], row["updates"]) == (0, 12, 1)


def test_data_without_the_column_are_refused_in_one_sentence(tmp_path):
    recipe = jr.recipes.ppo_max(critic_warmup=0, text_coef=1.0)
    with pytest.raises(ValueError, match="plain_texts: prompt 'q00' .*'pretraining'") as error:
        train(tiny_run(tmp_path, recipe=recipe, critic=OptimizerConfig(learning_rate=1e-2)))
    assert "\n" not in str(error.value)
