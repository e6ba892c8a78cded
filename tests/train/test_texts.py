"""Steps and runs with texts beside the rollouts of a batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_batch
from tiny_run import CONFIG, tiny_run

import jaxrl_llm as jr
from jaxrl_llm.data import Prompt, PromptSet
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train import OptimizerConfig, init_critic, init_state, make_step, train

pytestmark = pytest.mark.usefixtures("shared_programs")

COEF = 0.5
# Of eight groups the last four, as the collector has them.
TEXTS = np.arange(8)[:, None] >= np.array([4, 4, 4])


def stepped(recipe, batch, **options):
    """The state after a step of plain gradient descent, with a critic, and the metrics."""
    model, params = tiny_model(num_layers=1)
    optimizer = optax.sgd(0.1)
    step = make_step(model, recipe, optimizer, critic_optimizer=optimizer, donate=False, **options)
    critic = init_critic(model, params, key=jax.random.key(1))
    state = init_state(
        params,
        optimizer,
        recipe,
        key=jax.random.key(0),
        critic=critic,
        critic_optimizer=optimizer,
    )
    return step(state, batch)


def assert_alike(a, b, **tolerances):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **tolerances)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_with_texts_is_one_without_them_and_that_of_their_likelihood(minibatches):
    """The critic, the memory of scores and the metrics of rollouts are those without texts."""
    rng = np.random.default_rng(2)
    batch = make_batch(rewards=rng.normal(size=(8, 3)).astype(np.float32))
    ref_logp = jnp.asarray(-rng.uniform(1.0, 9.0, batch.mask.shape), jnp.float32)
    batch = batch.replace(ref_logp=ref_logp, extras={"texts": jnp.asarray(TEXTS)})
    absent = batch.replace(
        where=batch.where & ~TEXTS, mask=batch.mask & ~TEXTS[..., None], extras={}
    )
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


def with_texts():
    """The prompts of tiny runs with a text each, shorter than a response may be."""
    rows = (Prompt(f"q{n:02}", id=f"q{n:02}", metadata={"pretraining": "ab"}) for n in range(10))
    return PromptSet(rows, source="tiny")


def test_a_run_of_ppo_max_learns_texts_and_trains_its_critic_on_rollouts(tmp_path):
    config = tiny_run(
        tmp_path,
        recipe=jr.recipes.ppo_max(critic_warmup=0, text_coef=1.0),
        critic=OptimizerConfig(learning_rate=1e-2),
        data=dataclasses.replace(CONFIG.data, prompts=with_texts),
        steps=3,
    )
    result = train(config)
    state, rows = result.state, result.history
    for row in rows:
        assert (row["rollouts/text"], row["rollouts_sampled"], row["text_tokens"]) == (4, 4, 12)
        assert row["reward"] == pytest.approx(row["sampled_reward"], rel=1e-6)
        assert row["skipped"] == row["critic_skipped"] == 0 and row["tokens"] <= 16
        assert row["truncated"] == 1  # of rollouts; the texts end
    assert rows[2]["text_loss"] < rows[1]["text_loss"] < rows[0]["text_loss"]
    assert int(state.algo_state.controllers["score_std"].count) == 3 * 4
    assert int(state.collector_state[1]) == 3 * 4 % 10  # the next text
    first = CONFIG.model()[1]
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.critic.params["model"], first)
    assert max(jax.tree.leaves(moved)) > 0


def test_data_without_the_column_are_refused_in_one_sentence(tmp_path):
    config = tiny_run(
        tmp_path,
        recipe=jr.recipes.ppo_max(critic_warmup=0, text_coef=1.0),
        critic=OptimizerConfig(learning_rate=1e-2),
    )
    with pytest.raises(ValueError, match="plain_texts: prompt 'q00' .*'pretraining'") as error:
        train(config)
    assert "\n" not in str(error.value)
