"""A process reward model that trains with the policy, and before it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rows import for_each
from step_makers import assert_close, distance, flat_step, moved, one_layer, state_of

import jaxrl_llm as jr
from jaxrl_llm.recipes import ProcessRewardModel
from jaxrl_llm.testing import make_case
from jaxrl_llm.train.models.critic import CriticState
from jaxrl_llm.train.models.score import ModelScores
from jaxrl_llm.train.update.parts.process_reward import update_prm

SGD, ADAMW = optax.sgd(0.3), optax.adamw(0.3, weight_decay=0.1)


@pytest.fixture(scope="module")
def setting():
    """A model, a batch of turns, and a process reward model that has moved from the policy."""
    model, params = one_layer()
    batch = make_case().batch
    T = batch.tokens.shape[-1]
    turn_ids = jnp.broadcast_to(jnp.arange(T) // 2, batch.tokens.shape)
    extras = {"turn_ids": turn_ids, "turn_where": jnp.ones((*batch.where.shape, T // 2 + 1), bool)}
    rewards = jnp.asarray(np.random.default_rng(0).integers(0, 3, batch.rewards.shape), jnp.float32)
    batch = batch.replace(extras=extras, old_logp=None, ref_logp=None, rewards=rewards)
    prm = jr.train.init_critic(model, params, heads=0, key=jax.random.key(1))
    return model, params, batch, moved(prm, size=0.02)


def stepped(setting, recipe=None, *, microbatches=1, of_prm=SGD):
    model, params, batch, prm = setting
    recipe, optimizer = recipe or jr.recipes.oprl(), optax.sgd(0.5)
    critic = {"critic_optimizer": of_prm} if recipe.prm is not None else {}
    given = critic | {"critic": prm} if critic else {}
    state = state_of(recipe, optimizer, **given)
    options = {"microbatches": microbatches, "donate": False} | critic
    return flat_step(model, recipe, optimizer, **options)(state, batch)


def learned(setting, state, metrics, recipe, loss, old):
    """Fails unless the reward model took a step of a loss, and then rewarded the policy's step."""
    model, params, batch, prm = setting
    value, grads = jax.value_and_grad(loss)(prm)
    after = jax.tree.map(lambda x, g: x - 0.3 * g, prm, grads)
    assert float(metrics["critic_loss"]) == pytest.approx(float(value), rel=1e-5)
    assert_close(state.critic.params, after, atol=1e-6)
    # The policy's step is that of the same recipe with the log-probabilities of what has learned.
    extras = {**batch.extras, "prm_logp": jr.train.make_scorer(model)(after["model"], batch)}
    given = model, params, batch.replace(old_logp=old, extras=extras), None
    expected, _ = stepped(given, recipe.replace(prm=None))
    assert_close(state.params, expected.params, atol=1e-5)
    assert distance(state.params, params) > 0


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_it_learns_from_outcomes_before_it_rewards_turns(setting, combine):
    model, params, batch, prm = setting
    recipe = jr.recipes.oprl(combine=combine, alpha=2.0)
    state, metrics = stepped(setting, recipe)
    scorer = jr.train.make_scorer(model)
    old = scorer(params, batch)

    def loss(prm):
        """All pairs of rollouts of a prompt whose rewards differ, by hand."""
        ratio = jnp.where(batch.mask, scorer(prm["model"], batch) - old, 0).sum(-1)
        if combine == "mean":
            ids = jnp.where(batch.mask, batch.extras["turn_ids"], -1)
            counts = [[len(set(row[row >= 0])) for row in group] for group in np.asarray(ids)]
            ratio = ratio / jnp.maximum(np.array(counts), 1)
        total, pairs = 0.0, 0
        P, G = batch.rewards.shape
        there = np.asarray(batch.where & batch.mask.any(-1))
        for p, i, j in np.ndindex(P, G, G):
            if there[p, i] and there[p, j] and batch.rewards[p, i] > batch.rewards[p, j]:
                total -= jax.nn.log_sigmoid(0.05 * (ratio[p, i] - ratio[p, j]))
                pairs += 1
        assert pairs == jr.preferences.count_pairs(batch.rewards, batch.mask, where=batch.where)
        return total / pairs

    learned(setting, state, metrics, recipe, loss, old)


@pytest.mark.slow
def test_without_a_pair_the_reward_model_stays(setting):
    """AdamW would move it by its decay, before it scores the batch."""
    model, params, batch, prm = setting
    alike = model, params, batch.replace(rewards=batch.rewards * 0), prm
    state, metrics = stepped(alike, of_prm=ADAMW)
    jax.tree.map(np.testing.assert_array_equal, state.critic.params, prm)
    assert float(metrics["critic_updates"]) == 0 and float(metrics["critic_skipped"]) == 0


@pytest.mark.slow
def test_a_loss_that_compares_no_pairs_needs_none(setting):
    """One rollout, or rewards that are all equal, are enough for a loss of each outcome."""

    def cross_entropy(logp, old_logp, mask, rewards, *, where):
        ratio = jnp.where(mask, logp - old_logp, 0).sum(-1)
        return -jnp.where(where, jax.nn.log_sigmoid((2 * rewards - 1) * ratio), 0).sum()

    model, params, batch, prm = setting
    batch = batch.replace(rewards=jnp.ones_like(batch.rewards))
    recipe = jr.recipes.oprl().replace(prm=ProcessRewardModel(loss=cross_entropy))
    state, metrics = stepped((model, params, batch, prm), recipe, of_prm=ADAMW)
    assert float(metrics["critic_updates"]) == 1 and float(metrics["critic_loss"]) > 0
    assert distance(state.critic.params, prm) > 0
    batch = batch.replace(where=jnp.zeros_like(batch.where))
    state, metrics = stepped((model, params, batch, prm), recipe, of_prm=ADAMW)
    assert float(metrics["critic_updates"]) == float(metrics["critic_skipped"]) == 0
    jax.tree.map(np.testing.assert_array_equal, state.critic.params, prm)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(("reference", "microbatches"), [("initial", 1), ("policy", 2)])
def test_prime_learns_outcomes_against_its_reference(setting, reference, microbatches):
    model, params, batch, prm = setting
    recipe = jr.recipes.prime(reference=reference)
    scorer = jr.train.make_scorer(model)
    old, rewards = scorer(params, batch), jnp.minimum(batch.rewards, 1.0)
    ref = old - 0.3 * jax.random.uniform(jax.random.key(5), old.shape)
    batch = batch.replace(rewards=rewards, ref_logp=ref if reference == "initial" else None)
    base = ref if reference == "initial" else old

    def loss(prm):
        there = batch.where & batch.mask.any(-1)
        q = 0.05 * jnp.where(batch.mask, scorer(prm["model"], batch) - base, 0).sum(-1)
        right = jax.nn.sigmoid(q)
        each = -(rewards * jnp.log(right) + (1 - rewards) * jnp.log(1 - right))
        return jnp.where(there, each, 0).sum() / there.sum()

    setting = model, params, batch, prm
    state, metrics = stepped(setting, recipe, microbatches=microbatches)
    learned(setting, state, metrics, recipe, loss, old)


@for_each("pairs", [False, True])
def test_a_loss_that_takes_any_context_needs_no_pairs_unless_it_names_them(pairs):
    def of_context(logp, old_logp, mask, rewards, **context):
        return jnp.where(mask & context["where"][..., None], logp, 0).sum()

    def of_pairs(logp, old_logp, mask, rewards, *, pairs, **context):
        return of_context(logp, old_logp, mask, rewards, **context)

    def scorer(params, part):
        return ModelScores(jnp.broadcast_to(params, part.mask.shape), None, {})

    batch = make_case().batch
    batch = batch.replace(rewards=jnp.ones_like(batch.rewards), extras={})
    params = {"model": jnp.float32(1)}
    state, metrics = update_prm(
        ProcessRewardModel(loss=of_pairs if pairs else of_context),
        CriticState(params, SGD.init(params), ()),
        batch,
        scorer=scorer,
        optimizer=SGD,
        microbatches=1,
    )
    assert float(metrics["updates"]) == (0 if pairs else 1)
    assert (state.params["model"] == 1) == pairs


@pytest.mark.slow
def test_microbatches_add_up_and_what_begins_as_the_policy_knows_nothing(setting):
    whole, _ = stepped(setting)
    parts, _ = stepped(setting, microbatches=2)
    assert_close(whole.params, parts.params, atol=1e-6)
    assert_close(whole.critic.params, parts.critic.params, atol=1e-6)
    model, params, batch, _ = setting
    fresh = jr.train.init_critic(model, params, heads=0, key=jax.random.key(1))
    _, metrics = stepped((model, params, batch, fresh))
    assert float(metrics["critic_loss"]) == pytest.approx(math.log(2), rel=1e-6)


OPRL, NEEDY = jr.recipes.oprl(), lambda logp, old_logp, mask, rewards, slack: 0
MOVING = jr.bind(jr.regularizers.ema_reference, rate=0.1)
GAE = jr.recipes.gae_token().critic


@for_each(
    "call, error, message",
    [
        (lambda: OPRL.replace(prm=3), TypeError, "prm must be a ProcessRewardModel"),
        (lambda: ProcessRewardModel(loss=None), TypeError, "loss must be a function"),
        (lambda: OPRL.replace(prm=ProcessRewardModel(loss=NEEDY)), ValueError, "needs 'slack'"),
        (lambda: OPRL.replace(critic=GAE), ValueError, "cannot have both a critic and a process"),
        (
            lambda: jr.recipes.prime().replace(reference=MOVING),
            ValueError,
            "moving reference scores",
        ),
        (lambda: state_of(OPRL), ValueError, "init_critic"),
        (lambda: jr.train.make_step(one_layer()[0], OPRL, SGD), ValueError, "critic_optimizer"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
    assert jr.recipes.prime(reference="policy").replace(reference=None).reference is None
