"""Slots, refusals, and what prepare and loss compute, against float64 NumPy.

    loss = sum over kept tokens of  weight (correction surrogate + regularizers)

A rollout that takes no part leaves mask, weights and baseline; a token that a correction rejects
leaves mask and weights, and no baseline. A recipe is a value: equal options make equal recipes.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from own_recipes import LOGP, make_batch, plain, prepare
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.core import traits, traits_of
from jaxrl_llm.recipes.recipe import AlgoState

# Construction


def test_replace_suggests_the_field():
    with pytest.raises(TypeError, match="no field 'weigths'. Did you mean 'weights'"):
        plain().replace(weigths=jr.aggregate.sequence_mean)


def ratio_without_mask(logp, old_logp, advantages):
    return logp


def tempered(logp, old_logp, advantages, mask, temperature):
    return logp


@jr.core.traits(level="sequence")
def one_weight(old_logp, behavior_logp, mask):
    return jnp.ones(mask.shape), mask


def by_token(old_logp, behavior_logp, mask):
    return jnp.exp(old_logp - behavior_logp), mask


def mine(mask):
    return jr.aggregate.sequence_mean(mask)


def term(logp, temperature):
    return logp * temperature


def past_critic(rewards, critic):
    return rewards - critic


FIXED = jr.bind(jr.aggregate.fixed_length, length=4)
GSPO = {"surrogate": jr.surrogates.gspo, "weights": jr.aggregate.sequence_mean}
BOUND_GSPO = jr.bind(jr.surrogates.gspo, eps_low=1e-3)


WRONG_SLOTS_ARE_REFUSED = r"""
ValueError:
plain(**GSPO | {"weights": FIXED})  # !.*fixed_length
plain(**GSPO | {"weights": mine})  # !.*mine
plain(**GSPO, correction=by_token)
    # !.*gspo is one value.*correction by_token.*level='sequence'
plain(regularizers=(term,))  # !.*regularizer term needs 'temperature'.*bind
plain(advantage=jr.stateless(past_critic))  # !.*advantage past_critic needs 'critic'.*mask.*where
plain(advantage=jr.chain(jr.stateless(jr.advantages.rloo), jr.stateless(past_critic)))
    # !.*advantage past_critic needs 'critic'
plain(surrogate=jr.surrogates.gspo)  # !.*gspo is one value per sequence.*token_mean.*long sequen
plain(surrogate=BOUND_GSPO)  # !.*sequence_mean
TypeError:
plain(advantage=jr.advantages.dr_grpo)  # !.*advantage must be a Transform
plain(curation=jnp.isfinite)  # !.*curation must be a Transform
plain(surrogate=None)  # !.*surrogate must be a function
plain(weights=1.0)  # !.*weights must be a function
plain(correction=2.0)  # !.*correction must be a function
plain(regularizers=jr.regularizers.entropy_bonus)  # !.*such as \(term,\)
plain(name="")  # !.*name must be a string
ValueError:
plain(weights=jr.aggregate.fixed_length)  # !.*weights fixed_length needs 'length'.*has mask
plain(surrogate=tempered)  # !.*surrogate tempered needs 'temperature'.*bind
plain(surrogate=ratio_without_mask)
    # !.*ratio_without_mask takes 3 arrays by position; its slot passes 4: logp, old_logp
plain(curation=jr.stateless(lambda mask: mask))
    # !.*curation <lambda> names its first array mask, but its slot passes rewards first
plain(weights=lambda: 1.0)  # !.*takes 0 arrays by position; its slot passes 1: mask
plain(correction=lambda logp, mask: (logp, mask))  # !.*takes 2 arrays.*passes 3: old_logp
plain(correction=lambda old_logp, behavior_logp, mask, *, cap: (old_logp, mask))
    # !.*correction <lambda> needs 'cap'
"""


@for_each(
    "error, call, message",
    bad_calls(WRONG_SLOTS_ARE_REFUSED),
)
def test_functions_that_a_slot_cannot_call_are_refused_when_it_is_filled(error, call, message):
    raises(error, call, message, globals())


def test_functions_that_a_slot_can_call():
    plain(weights=FIXED)
    plain(surrogate=jr.bind(tempered, temperature=1.0))
    plain(surrogate=lambda *arrays, **options: arrays[0])
    plain(regularizers=(jr.bind(term, temperature=0.5),))
    bound = plain(surrogate=BOUND_GSPO, weights=jr.aggregate.sequence_mean)
    assert bound.surrogate == BOUND_GSPO
    plain(**{**GSPO, "weights": traits(level="sequence")(mine)})
    jr.recipes.gspo().replace(correction=one_weight)
    jr.recipes.dapo().replace(correction=by_token)


@for_each("recipe", [jr.recipes.drpo_len(length=8), jr.recipes.otr()])
def test_a_surrogate_that_is_no_mean_over_samples_takes_no_correction(recipe):
    weights = jr.bind(jr.corrections.importance_weights, level="sequence")
    correction = jr.bind(jr.corrections.sequence_rollout_correction, weights=weights)
    with pytest.raises(ValueError, match="is not a mean over samples, so correction sequence"):
        recipe.replace(correction=correction)


def test_which_recipes_use_a_ratio():
    assert not jr.recipes.rloo().uses_ratio
    assert jr.recipes.dapo().uses_ratio
    assert not plain(surrogate=jr.bind(jr.surrogates.reinforce, weight=None)).uses_ratio


def test_recipes_are_values():
    assert jr.recipes.dapo() == jr.recipes.dapo()
    assert jr.recipes.dapo() != jr.recipes.dapo(eps_high=0.3)
    assert hash(jr.recipes.grpo()) == hash(jr.recipes.grpo())
    with pytest.raises(dataclasses.FrozenInstanceError):
        jr.recipes.dapo().name = "other"


def test_a_recipe_prints_its_slots_by_name():
    assert repr(jr.recipes.grpo(ddof=0)) == (
        "Recipe(name='grpo', advantage=stateless(grpo(ddof=0, eps=1e-06)), "
        "surrogate=ppo_clip(dual_clip=None, eps_high=0.2, eps_low=0.2), weights=sequence_mean, "
        "regularizers=(kl_to_reference(coef=0.001, estimator='k3'),), paper='arXiv:2402.03300')"
    )
    tracked = plain(curation=jr.Transform(tuple, lambda x, s, **c: (x > 0, s)))
    assert repr(tracked).endswith("surrogate=reinforce, curation=Transform(<lambda>))")
    both = jr.chain(jr.stateless(jr.advantages.rloo), tracked.curation)
    assert "advantage=chain(stateless(rloo), Transform(<lambda>))" in repr(plain(advantage=both))


def test_a_transform_prints_as_the_call_that_made_it():
    tracker = jr.advantages.spo_tracker(num_prompts=3, rho=0.5)
    assert repr(plain(advantage=tracker)).endswith(
        "advantage=spo_tracker(num_prompts=3, rho=0.5), surrogate=reinforce)"
    )
    assert jr.advantages.spo_tracker(num_prompts=3, rho=0.5) == tracker
    assert jr.regularizers.fixed(0.2).call == "fixed(coef=0.2)"  # also positional arguments
    schedule = jr.curation.scheduled(jr.curation.training_progress, steps=4)
    assert schedule.call == "scheduled(function=training_progress, steps=4)"
    assert jr.advantages.rank_shaping(cap=3.0) == jr.advantages.rank_shaping(cap=3.0)
    assert "rank_shaping(cap=3.0)" in repr(jr.recipes.verl_erank(cap=3.0))


def test_needs_come_from_signatures():
    entropy = jr.bind(jr.regularizers.entropy_bonus, coef=1e-3)
    assert plain().required_fields == frozenset()
    assert plain(regularizers=(entropy,)).required_fields == {"entropy"}
    assert jr.recipes.grpo().replace(regularizers=(entropy,)).required_fields == {"entropy"}
    assert jr.recipes.grpo().required_fields == {"ref_logp"}
    both = plain(correction=lambda old_logp, behavior_logp, mask: (old_logp, mask))
    assert both.required_fields == {"old_logp", "behavior_logp"}

    def kl_in_reward(rewards, ref_logp):
        return rewards

    def drift(rewards, old_logp):
        return rewards

    assert plain(advantage=jr.stateless(kl_in_reward)).required_fields == {"ref_logp"}
    both = jr.chain(jr.stateless(kl_in_reward), jr.chain(jr.stateless(drift)))
    assert plain(advantage=both).required_fields == {"ref_logp", "old_logp"}
    assert plain(curation=jr.chain(jr.stateless(drift))).required_fields == {"old_logp"}
    # In the loss the policy being trained stands in for it.
    kl = jr.bind(jr.regularizers.kl_unbiased, coef=0.1)
    assert plain(regularizers=(kl,)).required_fields == {"ref_logp"}


def test_group_size_one_is_refused_by_name():
    one = jax.tree.map(lambda x: x[:, :1] if x.shape[1:2] == (3,) else x, make_batch())
    grpo = jr.recipes.grpo()
    for refused in (lambda: grpo.check_group_size(1), lambda: prepare(grpo, one)):
        with pytest.raises(ValueError, match="recipe 'grpo' compares.*at least 2; got 1"):
            refused()
    jr.recipes.grpo().check_group_size(2)
    jr.recipes.grpo().replace(group_relative=False).check_group_size(1)


# prepare


def test_rollouts_that_take_no_part_leave_mask_weights_and_baseline():
    batch, _ = prepare(plain(), make_batch())
    assert not batch.mask[1, 2].any()
    np.testing.assert_allclose(
        batch.advantages, [[2 / 3, -1 / 3, -1 / 3], [0.125, -0.125, 0.0]], rtol=1e-6
    )
    kept = 4 + 2 + 3 + 1 + 4
    np.testing.assert_allclose(batch.weights, np.asarray(batch.mask) / kept, rtol=1e-6)


def test_token_advantages_get_the_mask():
    recipe = plain(advantage=jr.stateless(jr.advantages.reinforce_pp_baseline))
    batch, _ = prepare(recipe, make_batch())
    assert batch.advantages.shape == (2, 3, 4)
    values = np.asarray(batch.advantages)[np.asarray(batch.mask)]
    assert abs(values.mean()) < 1e-6 and abs(values.std(ddof=1) - 1) < 1e-5
    assert not np.asarray(batch.advantages)[~np.asarray(batch.mask)].any()


def drop_uniform(rewards, *, where):
    kept = ~jr.core.stats.group_is_constant(rewards, where)
    return jnp.broadcast_to(kept, rewards.shape)


def test_curation_comes_before_everything():
    recipe = plain(curation=jr.stateless(drop_uniform))
    rewards = jnp.array([[1.0, 1.0, 1.0], [0.5, 0.25, jnp.nan]])
    batch, _ = prepare(recipe, make_batch(rewards=rewards))
    assert batch.where.tolist() == [[False] * 3, [True, True, False]]
    assert not batch.mask[0].any()
    assert float(batch.weights.sum()) == pytest.approx(1.0)
    np.testing.assert_allclose(batch.weights[1, 1], 1 / 5)


def capped(old_logp, behavior_logp, mask, *, cap, veto):
    ratio = jnp.exp(jr.core.masking.safe_log_ratio(old_logp, behavior_logp, mask))
    return jnp.minimum(ratio, cap), ratio < veto


def drift(rewards, old_logp):
    return rewards


def prepared_with(absent=None, **slots):
    batch = make_batch()
    batch = batch.replace(behavior_logp=batch.old_logp)
    return prepare(plain(**slots), batch.replace(**{absent: None} if absent else {}))


def loss_with(recipe=None, logp=LOGP, changes=(), **slots):
    recipe = recipe or plain(**slots)
    return recipe.loss(logp, prepare(recipe, make_batch())[0].replace(**dict(changes)))


def wide(*arrays):
    return jr.surrogates.ppo_clip(*arrays).mean(-1, keepdims=True)


BONUS = jr.bind(jr.regularizers.entropy_bonus, coef=0.1)
IN_A_STEP = r"""
ValueError:
prepared_with(curation=jr.stateless(lambda rewards: rewards[:, 0] > 0))
    # !.*where must have shape \(2, 3\); got \(2,\)
prepared_with("behavior_logp", correction=jr.bind(capped, cap=2.0, veto=100.0))
    # !Recipe 'plain'.prepare: the batch has no behavior_logp
prepared_with("old_logp", advantage=jr.chain(jr.stateless(drift)))  # !.*the batch has no old_logp
prepared_with("old_logp", curation=jr.chain(jr.stateless(drift)))  # !.*the batch has no old_logp
prepared_with(advantage=jr.stateless(lambda rewards: rewards[:, :1]))
    # !.*'plain': advantages must have shape \(2, 3\) or \(2, 3, 4\); got \(2, 1\)
prepared_with(advantage=jr.stateless(lambda rewards: rewards[..., None]))
    # !.*'plain': advantages must have shape \(2, 3\) or \(2, 3, 4\); got \(2, 3, 1\)
prepared_with(weights=lambda mask: 1.0 / mask.sum())
    # !.*'plain': weights must have shape \(2, 3, 4\); got \(\)
loss_with(surrogate=wide)  # !.*loss of surrogate wide must have shape \(2, 3, 4\); got \(2, 3, 1\)
loss_with(regularizers=(lambda logp, mask: jnp.mean(logp),))
    # !.*loss of regularizer <lambda> must have shape \(2, 3, 4\); got \(\)
loss_with(jr.recipes.grpo(), changes={"advantages": None})
    # !Recipe 'grpo'.loss: the batch has no advantages; call prep
loss_with(jr.recipes.grpo(), changes={"ref_logp": None})  # !Recipe 'grpo'.loss: .*no ref_logp
loss_with(jr.recipes.grpo(), LOGP[..., :3])  # !.*logp \(2, 3, 3\), mask \(2, 3, 4\)
loss_with(regularizers=(BONUS,))  # !Recipe 'plain'.loss: .*needs entropy
TypeError:
prepared_with(curation=jr.stateless(lambda rewards: rewards))
    # !curation of recipe 'plain': where must be bool
prepared_with(advantage=jr.stateless(lambda rewards: rewards > 0))
    # !.*advantages must be floating point
prepared_with(weights=lambda mask: mask)  # !.*weights must be floating point
prepared_with(correction=jr.corrections.importance_weights)
    # !correction of recipe 'plain' must return \(weights, keep\); got .*rollout_correction
"""


@for_each("error, call, message", bad_calls(IN_A_STEP))
def test_what_a_slot_returns_is_checked_and_never_broadcast(error, call, message):
    raises(error, call, message, globals())


def test_a_correction_of_another_recipe_is_not_kept():
    batch = make_batch()
    batch = batch.replace(behavior_logp=batch.old_logp - 0.5)
    corrected = plain(correction=jr.bind(capped, cap=2.0, veto=100.0))
    once, _ = prepare(corrected, batch)
    assert once.correction is not None
    again, _ = prepare(plain(), once)
    assert again.correction is None
    assert float(plain().loss(LOGP, again)) == float(plain().loss(LOGP, prepare(plain(), batch)[0]))


def test_state_goes_through_both_transforms():
    def mean_tracker(rewards, state, *, where, **context):
        mean = jr.core.masking.masked_mean(rewards, where)
        return rewards - state, 0.5 * state + 0.5 * mean

    tracker = jr.Transform(lambda: jnp.float32(0.0), mean_tracker)
    counter = jr.Transform(
        lambda: jnp.int32(0), lambda rewards, n, **context: (jnp.isfinite(rewards), n + 1)
    )
    recipe = plain(advantage=tracker, curation=counter)
    batch, state = prepare(recipe, make_batch())
    assert isinstance(state, AlgoState)
    assert float(state.advantage) == pytest.approx(0.5 * 1.75 / 5)
    batch, state = recipe.prepare(make_batch(), state)
    np.testing.assert_allclose(batch.advantages[0, 0], 1 - 0.175, rtol=1e-6)
    assert int(state.curation) == 2


def test_a_correction_weighs_the_surrogate_and_rejected_tokens_leave_the_denominator():
    gap = np.zeros((2, 3, 4), np.float32)
    gap[0, 0] = [0.1, -0.3, 0.9, 5.0]
    batch = make_batch()
    batch = batch.replace(behavior_logp=batch.old_logp - gap)
    term = jr.bind(jr.regularizers.kl_to_reference, coef=0.5)
    recipe = plain(correction=jr.bind(capped, cap=2.0, veto=100.0), regularizers=(term,))
    ready, _ = prepare(recipe, batch)
    mask = np.asarray(batch.mask & batch.where[..., None])
    keep = mask & (gap < np.log(100.0))
    assert keep.sum() == mask.sum() - 1
    assert np.array_equal(ready.mask, keep)
    # Rejection changes neither who takes part nor the baseline of the group.
    np.testing.assert_allclose(ready.advantages[0], [2 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    weight = np.where(keep, np.minimum(np.exp(np.where(keep, gap, 0.0).astype(float)), 2.0), 0.0)
    np.testing.assert_allclose(ready.correction, weight, rtol=1e-5)
    d = LOGP.astype(float) - np.asarray(batch.ref_logp, float)
    token = -weight * np.asarray(ready.advantages, float)[..., None] * LOGP
    token += 0.5 * (np.exp(-d) - 1 + d)
    assert float(recipe.loss(LOGP, ready)) == pytest.approx(
        token[keep].sum() / keep.sum(), rel=1e-5
    )


def first_token_and_response(old_logp, behavior_logp, mask):
    """Rejects all of response [0, 0] and the first token of every other."""
    keep = mask & (jnp.arange(mask.shape[-1]) > 0)
    return jnp.ones(mask.shape), keep.at[0, 0].set(False)


LENGTH_RULES = {
    "group": (jr.rewards.group_length_rewards, {}),
    "overlong": (jr.rewards.overlong_rewards, {"max_length": 4, "buffer": 3}),
    "cosine": (jr.rewards.cosine_length_rewards, {"max_length": 5}),
    "budget": (jr.connect(jr.rewards.budget_rewards, budgets="budgets"), {"coef": 0.2}),
    "hbpo": (jr.connect(jr.rewards.hbpo_rewards, budgets="budgets"), {"max_length": 9}),
    "repetition": (jr.rewards.repetition_rewards, {"ngram": 1}),
    "opo": (jr.advantages.opo, {}),
    "vcpo": (jr.advantages.vcpo_advantage, {"grad_sq_norms": None}),
}


@for_each("rule", LENGTH_RULES)
def test_a_length_is_of_the_response_whatever_a_correction_rejects(rule):
    function, options = LENGTH_RULES[rule]
    budgets = jnp.array([[2.0, 3.0, 1.0], [4.0, 2.0, 3.0]])
    batch = make_batch(behavior_logp=make_batch().old_logp + 0.1, extras={"budgets": budgets})
    recipe = plain(advantage=jr.stateless(function, **options))
    expected, _ = prepare(recipe, batch)
    ready, _ = prepare(recipe.replace(correction=first_token_and_response), batch)
    assert not ready.mask[0, 0].any() and not ready.mask[..., 0].any()
    assert np.asarray(expected.advantages).any()
    np.testing.assert_array_equal(ready.advantages, expected.advantages)


# loss


def test_without_old_logp_the_policy_is_its_own():
    recipe = jr.recipes.dapo()
    batch, _ = prepare(recipe, make_batch(old_logp=None))
    explicit = batch.replace(old_logp=jnp.asarray(LOGP))
    loss, grad = jax.value_and_grad(recipe.loss)(LOGP, batch)
    again, same = jax.value_and_grad(recipe.loss)(LOGP, explicit)
    assert float(loss) == pytest.approx(float(again))
    np.testing.assert_allclose(grad, same, rtol=1e-6)
    assert np.abs(grad).sum() > 0


def test_entropy_reaches_the_bonus():
    bonus = plain(regularizers=(BONUS,))
    batch, _ = prepare(bonus, make_batch())
    difference = bonus.loss(LOGP, batch, entropy=jnp.full((2, 3, 4), 2.0)) - plain().loss(
        LOGP, batch
    )
    assert float(difference) == pytest.approx(-0.2, rel=1e-5)


# Which rewards a recipe is defined for

ANY = (-math.inf, math.inf)


@for_each(
    ("advantage", "expected"),
    [
        (jr.stateless(jr.advantages.grpo), ANY),
        (jr.stateless(jr.advantages.maxrl, scale="root"), (0.0, math.inf)),
        (jr.stateless(jr.advantages.v05_baseline), (0.0, 1.0)),
        (jr.advantages.spo_tracker(num_prompts=2), (0.0, 1.0)),
        (jr.advantages.spo_tracker(num_prompts=2, rho=None), (0.0, 1.0)),
        (jr.advantages.mssr_tracker(num_prompts=2), (0.0, 1.0)),
        (
            jr.chain(
                jr.advantages.mssr_tracker(num_prompts=2),
                jr.stateless(jr.advantages.positive_part, error_sq=1.0),
            ),
            (0.0, 1.0),
        ),
        (jr.chain(), ANY),
    ],
)
def test_the_advantage_says_which_rewards_it_is_defined_for(advantage, expected):
    recipe = jr.recipes.grpo(kl_coef=0.0).replace(advantage=advantage, inputs=("prior",))
    assert recipe.reward_range == expected


def test_what_comes_first_in_a_chain_may_bring_rewards_into_range():
    def right(rewards):
        return (rewards > 0).astype("float32")

    maxrl = jr.stateless(jr.advantages.maxrl)
    recipe = jr.recipes.maxrl()
    assert recipe.replace(advantage=jr.chain(jr.stateless(right), maxrl)).reward_range == ANY
    inner = jr.chain(jr.chain(maxrl, jr.stateless(abs)))
    assert recipe.replace(advantage=inner).reward_range == (0.0, math.inf)


def test_the_mark_is_seen_through_wrappings_and_leaves_the_function_as_it_was():
    def unmarked(rewards, *, where=None):
        return rewards

    marked = traits(reward_range=(-1.0, 1.0))(unmarked)
    assert traits_of(jr.bind(marked, where=None)).reward_range == (-1.0, 1.0)
    assert traits_of(unmarked).reward_range == ANY
    assert jr.recipes.maxrl().replace(advantage=jr.stateless(marked)).reward_range == (-1.0, 1.0)
