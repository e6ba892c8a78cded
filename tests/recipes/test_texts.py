"""Texts beside the rollouts of a batch: their loss, and that nothing else sees them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from preset_cases import batch_of
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.testing import make_case

P, G, T = 4, 2, 3
TEXTS = np.array([[False, False], [True, True], [False, False], [True, True]])
LENGTHS = np.array([[3, 2], [3, 1], [1, 3], [2, 2]])
MASK = np.arange(T) < LENGTHS[..., None]
COEF = 0.25


def made(seed=0):
    """Log-probabilities ``[P, G, T]`` and a batch in which groups 1 and 3 are texts."""
    rng = np.random.default_rng(seed)
    logp, old, ref = -rng.uniform(0.2, 2.0, (3, P, G, T))
    values = rng.uniform(0.0, 1.0, (P, G, T))
    batch = batch_of(
        MASK,
        np.where(TEXTS, 0.0, rng.uniform(-1.0, 2.0, (P, G))),
        prompt_tokens=np.ones((P, 1), int),
        prompt_mask=np.ones((P, 1), bool),
        old_logp=old,
        ref_logp=ref,
        extras={"texts": TEXTS, "values": values, "old_values": values[..., None]},
    )
    return logp, old, ref, values, batch


def test_worked_numbers_of_the_loss_and_of_the_critic():
    """PPO-max of the rollouts, and a quarter of the mean likelihood of eight tokens of texts."""
    logp, old, ref, values, batch = made()
    recipe = jr.recipes.ppo_max(text_coef=COEF, lam=0.8, kl_coef=0.1)
    prepared, state = recipe.prepare(batch, recipe.init())
    std = np.asarray(batch.rewards, np.float64)[~TEXTS].std(ddof=1)
    advantages, returns, losses, errors = {}, {}, [], []
    for p, g in np.argwhere(~TEXTS):
        n, gained = LENGTHS[p, g], 0.0
        v = values[p, g]
        for t in reversed(range(n)):
            reward = -0.1 * (old[p, g, t] - ref[p, g, t])
            reward += float(batch.rewards[p, g]) / std if t == n - 1 else 0.0
            delta = reward + (v[t + 1] if t < n - 1 else 0.0) - v[t]
            gained = delta + 0.8 * gained
            advantages[p, g, t], returns[p, g, t] = gained, gained + v[t]
            ratio = np.exp(logp[p, g, t] - old[p, g, t])
            losses.append(-min(ratio * gained, np.clip(ratio, 0.8, 1.2) * gained))
            errors.append(0.5 * gained**2)
    for cell, value in advantages.items():
        assert float(prepared.advantages[cell]) == pytest.approx(value, abs=1e-5)
        assert float(prepared.extras["returns"][cell][0]) == pytest.approx(returns[cell], abs=1e-5)
    assert not np.any(np.asarray(prepared.advantages)[TEXTS])
    assert int(state.controllers["score_std"].count) == 4  # rollouts, not rows
    expected = np.mean(losses) - COEF * logp[MASK & TEXTS[..., None]].mean()
    got = recipe.loss(jnp.asarray(logp, jnp.float32), prepared)
    assert float(got) == pytest.approx(expected, rel=1e-5)
    critic = recipe.critic.total_loss(jnp.asarray(values, jnp.float32)[..., None], prepared)
    assert float(critic) == pytest.approx(np.mean(errors), rel=1e-5)
    assert not np.any(np.asarray(prepared.extras["critic_weights"])[TEXTS])


BESIDE = {
    "ppo_max": jr.recipes.ppo_max(text_coef=COEF, whiten=True, advantage_clip=0.5),
    "safe": jr.recipes.safe().replace(text_coef=COEF),
    "gspo": jr.recipes.gspo().replace(text_coef=COEF),
    "dr_grpo": jr.recipes.dr_grpo(length=6).replace(text_coef=COEF),
    "rollout_correction": jr.recipes.rollout_correction().replace(text_coef=COEF),
    "dpo": jr.recipes.dpo().replace(text_coef=COEF),
    "minillm": jr.recipes.minillm(text_coef=COEF),
    "prompt_gdro": jr.recipes.prompt_gdro(num_prompts=8).replace(text_coef=COEF),
}


@pytest.mark.of_many
@pytest.mark.parametrize("name", BESIDE)
def test_all_else_is_as_in_a_batch_without_the_texts(name):
    """Whatever the surrogate, the weights or the correction is; texts may hold anything."""
    recipe = BESIDE[name]
    case = make_case(recipe=recipe)
    texts = case.batch.extras["texts"]
    assert texts.any() and not texts.all()
    junk = jnp.where(texts, jnp.nan, case.batch.rewards)
    batch = case.batch.replace(rewards=junk)
    absent = case.batch.replace(where=batch.where & ~texts, mask=batch.mask & ~texts[..., None])
    plain = recipe.replace(text_coef=0.0)
    prepared, state = recipe.prepare(batch, recipe.init())
    want, plain_state = plain.prepare(absent, plain.init())
    trained = np.asarray(batch.mask & (batch.where & texts)[..., None])
    np.testing.assert_array_equal(prepared.mask, np.asarray(want.mask) | trained)
    np.testing.assert_array_equal(prepared.where, want.where)
    np.testing.assert_array_equal(prepared.advantages, want.advantages)
    if recipe.learns:
        state = recipe.learn(prepared, state, logp=case.logp)
        plain_state = plain.learn(want, plain_state, logp=case.logp)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(plain_state), strict=True):
        np.testing.assert_array_equal(a, b)
    for key in ("returns", "critic_weights"):
        if recipe.critic is not None:
            np.testing.assert_array_equal(prepared.extras[key], want.extras[key])

    def loss(recipe, batch):
        return jax.value_and_grad(
            lambda x: recipe.loss(x, batch, entropy=case.entropy, statistics=case.statistics)
        )(case.logp)

    (got, grad), (expected, plain_grad) = loss(recipe, prepared), loss(plain, want)
    mean = np.asarray(case.logp, np.float64)[trained].mean()
    np.testing.assert_allclose(got, expected - COEF * mean, rtol=1e-5)
    expected = np.where(trained, -COEF / trained.sum(), plain_grad)
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-8)


def test_each_optimizer_step_has_the_means_of_its_own_rows():
    """A minibatch has every second group: one of rollouts only, and one of texts only."""
    logp, *_, batch = made()
    recipe = jr.recipes.ppo_max(text_coef=COEF)
    prepared, _ = recipe.prepare(batch, recipe.init())
    halves = [jax.tree.map(lambda x, k=k: x[k::2], prepared) for k in (0, 1)]
    rollouts, texts = (recipe.weigh(half) for half in halves)
    np.testing.assert_allclose(rollouts.weights, MASK[::2] / MASK[::2].sum(), rtol=1e-6)
    np.testing.assert_allclose(texts.weights, COEF * MASK[1::2] / MASK[1::2].sum(), rtol=1e-6)
    assert rollouts.extras["critic_weights"].any() and not texts.extras["critic_weights"].any()
    loss = recipe.loss(jnp.asarray(logp[1::2], jnp.float32), texts)
    assert float(loss) == pytest.approx(-COEF * logp[1::2][MASK[1::2]].mean(), rel=1e-5)


WHAT_TEXTS_DO_NOT_GO_WITH = r"""
ValueError:
jr.recipes.ppo_max(text_share=0.25)  # !.*ppo_max: text_share and column have no eff
jr.recipes.ppo_max(column="page")  # !.*have no effect with text_coef 0
jr.recipes.ppo_max(text_coef=1.0, text_share=1.0)  # !.*ppo_max: text_share must be
jr.recipes.ppo_max(text_coef=-1.0)  # !.*text_coef must not be negative; got -1
jr.recipes.ppo_max(text_coef=float("nan"))  # !.*text_coef must not be negative; got nan
jr.recipes.oprl().replace(text_coef=1.0)  # !.*and a process reward model
jr.recipes.seeupo().replace(text_coef=1.0)  # !.*and turn_updates, which would
jr.recipes.m_grpo().replace(text_coef=1.0)  # !.*and a subagent, which would
jr.recipes.diffu_grpo().replace(text_coef=1.0)  # !.*and a likelihood of a denois
jr.recipes.reward_model().replace(text_coef=1.0)  # !.*that trains a reward model
jr.recipes.spo_tracker(num_prompts=4, length=4).replace(text_coef=1.0)
    # !.*text_coef 1 and numbers computed from the last visit, which would read texts as
"""


@for_each("error, call, message", bad_calls(WHAT_TEXTS_DO_NOT_GO_WITH))
def test_what_texts_do_not_go_with(error, call, message):
    raises(error, call, message, globals())


def test_a_batch_says_which_rows_are_texts():
    *_, batch = made()
    recipe, extras = jr.recipes.ppo_max(text_coef=1.0), dict(batch.extras)
    del extras["texts"]
    with pytest.raises(ValueError, match="ppo_max'.prepare: the batch has no texts"):
        recipe.prepare(batch.replace(extras=extras), recipe.init())
