"""Numbers of a step: over the tokens that train, in the units in which a method compares.

A policy of 3/4 and 1/4 beside a reference of 1/2 and 1/2, where each token is there as often as it
is sampled, has the divergence sum p log(p / q). A ratio of 1.5 is above the bound of 1.28 wherever
the advantage is positive.
"""

import inspect
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_batch
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.core import traits, traits_of
from jaxrl_llm.curation import TEXT
from jaxrl_llm.recipes import catalog
from jaxrl_llm.rewards import Scores
from jaxrl_llm.rollout.types import LENGTH, STOP
from jaxrl_llm.train.metrics import (
    batch_metrics,
    clip_metrics,
    rejection_metrics,
    rollout_metrics,
    scored_items,
)


def batch_with(mask, rewards, **fields):
    """Responses with a mask, whose tokens and prompts do not matter."""
    ones = jnp.ones((len(mask), 1), jnp.int32)
    given = {"tokens": jnp.zeros(mask.shape, jnp.int32), "mask": mask, "rewards": rewards}
    given |= {"where": jnp.ones(rewards.shape, bool), "prompt_tokens": ones}
    return jr.recipes.Batch(**given | {"prompt_mask": ones > 0} | fields)


def prepared_by(recipe, batch, **fields):
    return recipe.prepare(batch.replace(**fields), recipe.init())[0]


def test_divergence_from_the_reference_is_that_of_the_policy():
    """With each token as often as the policy samples it, the estimate is exact."""
    policy, reference = np.array([0.75, 0.25]), np.array([0.5, 0.5])
    tokens = np.array([[[0, 0, 0, 1]]])
    mask, ref_logp = jnp.ones((1, 1, 4), bool), jnp.log(reference[tokens])
    batch = batch_with(mask, jnp.ones((1, 1)), ref_logp=ref_logp)
    logp = jnp.log(policy[tokens])
    found = batch_metrics(jr.recipes.grpo(), logp, jnp.zeros_like(logp), batch)
    divergence = np.sum(policy * np.log(policy / reference))
    np.testing.assert_allclose(found["ref_kl"], divergence, rtol=1e-5)


def test_numbers_of_a_batch():
    recipe, batch = jr.recipes.dapo(), make_batch(prompts=3, seed=1)
    logp = jnp.where(batch.mask, -1.0, jnp.nan)
    entropy = jnp.where(batch.mask, 0.5, jnp.nan)
    shifted = batch.replace(
        old_logp=jnp.full(batch.mask.shape, -1.0 - np.log(1.5)),
        behavior_logp=jnp.full(batch.mask.shape, -1.25).at[-1, -1, 0].set(-1.5),
        where=batch.where.at[0].set(False),
        rewards=batch.rewards.at[0].set(jnp.nan).at[1:].set(jnp.array([0.0, 1.0, 1.0])),
    )
    prepared, _ = recipe.prepare(shifted, recipe.init())
    found = batch_metrics(recipe, logp, entropy, prepared)
    assert all(x.dtype == jnp.float32 and x.shape == () for x in found.values())
    expected = {
        "reward": 2 / 3,
        "reward_std": 3**-0.5,
        "informative": 1.0,
        "length": float(batch.mask[1:].sum(-1).mean()),
        "tokens": float(batch.mask[1:].sum()),
        "entropy": 0.5,
        "approx_kl": 1.5 - 1 - np.log(1.5),
        "ratio_max": 1.5,
        "sampler_gap": 0.25 + 0.25 / float(batch.mask[1:].sum()),
        "sampler_gap_max": 0.5,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    # Ratio 1.5 is above 1.28 wherever the advantage is positive: two thirds of the rollouts.
    positive = np.asarray(prepared.advantages > 0)[..., None] & np.asarray(prepared.mask)
    share = positive.sum() / np.asarray(prepared.mask).sum()
    np.testing.assert_allclose(found["clip_fraction"], share, rtol=1e-5)


def test_the_gap_to_the_sampler_is_over_tokens_with_known_behavior():
    """Elsewhere ``behavior_logp`` is that of the policy itself, a gap of 0."""
    batch = make_batch(prompts=2, group=2, length=4)
    mask, recipe = jnp.ones((2, 2, 4), bool), jr.recipes.rollout_correction()
    known = mask.at[:, 1].set(False).at[1, 0, 2:].set(False)
    logp = jnp.full(mask.shape, -1.0)
    batch = batch.replace(
        mask=mask, behavior_logp=jnp.where(known, -1.5, -1.0), extras={"behavior_known": known}
    )
    prepared, _ = recipe.prepare(batch.replace(old_logp=logp), recipe.init())
    found = batch_metrics(recipe, logp, jnp.zeros(mask.shape), prepared)
    assert found["sampler_gap"] == found["sampler_gap_max"] == 0.5
    assert found["sampler_kl"] == -0.5
    # Of the two sequences with known tokens, the weights are exp(4 / 2) and exp(2 / 2).
    weights = np.exp([2.0, 1.0])
    share = weights.sum() ** 2 / (2 * (weights**2).sum())
    np.testing.assert_allclose(found["sampler_ess"], share, rtol=1e-6)
    none = prepared.replace(extras={"behavior_known": jnp.zeros_like(mask)})
    found = batch_metrics(recipe, logp, jnp.zeros(mask.shape), none)
    assert found["sampler_gap"] == found["sampler_ess"] == 0


def test_a_bound_is_compared_as_the_ratio_of_a_response():
    """One token's part of a bound is divided by its noise level: its exponential says nothing."""
    mask = jnp.arange(120) < jnp.array([[[100], [50]]])
    logp = jnp.where(mask, -1.0, jnp.nan)
    batch = batch_with(
        mask,
        jnp.array([[1.0, 0.0]]),
        advantages=jnp.array([[1.0, -1.0]]),
        old_logp=logp.at[0, 1, 3].add(-20.0),
        ref_logp=logp.at[0, 0, 7].add(25.0),
    )
    for recipe in (jr.recipes.espo(), jr.recipes.dpo().replace(likelihood=espo_bound())):
        found = batch_metrics(recipe, logp, jnp.zeros(mask.shape), batch)
        k3 = {d: np.exp(d) - 1 - d for d in (0.25, 0.4)}
        np.testing.assert_allclose(found["ref_kl"], k3[0.25] * 100 / 150, rtol=1e-4)
        np.testing.assert_allclose(found["approx_kl"], k3[0.4] * 50 / 150, rtol=1e-4)
        np.testing.assert_allclose(found["ratio_max"], np.exp(0.4), rtol=1e-5)
    # A ratio of tokens is compared by tokens, and so is that of a causal model.
    for recipe in (jr.recipes.coupled_grpo(), jr.recipes.gspo()):
        found = batch_metrics(recipe, logp, jnp.zeros(mask.shape), batch)
        assert found["ref_kl"] > 1e6 and found["ratio_max"] > 1e6


def espo_bound():
    return jr.diffusion.elbo_likelihood(samples=1, masks="complementary")


def of_rollouts(where, failed, finish, versions, aged=True, roles=(0, 0, 0, 0)):
    """Metrics of four rollouts of one prompt, of two tokens each, in batch 5."""
    scores = Scores(
        np.array([1, 0, 1, 0], np.float32),
        {"right": np.array([1, 0, 1, 0], np.float32)},
        np.array(failed),
    )
    collected = SimpleNamespace(
        where=np.array([where]), scores=scores, failures=0, roles=np.array([roles], np.int32),
        continued=0, groups=1, rollouts=4, tokens=8, reward=0.5,
    )  # fmt: skip
    version = np.broadcast_to(np.array(versions)[None, :, None], (1, 4, 2))
    mask = np.ones((1, 4, 2), bool)
    rollout = SimpleNamespace(finish=np.array([finish]), mask=mask, version=version)
    return rollout_metrics(collected, rollout, ages=5 - version if aged else None)


def test_numbers_of_rollouts_are_of_those_that_take_part():
    # The age of the weights is over the rollouts that take part.
    where = [True, True, False, False]
    found = of_rollouts(where, [False] * 4, [STOP] * 4, [5, 4, 1, 0])
    assert (found["staleness"], found["staleness_max"]) == (0.5, 1)
    none = of_rollouts([False] * 4, [False] * 4, [STOP] * 4, [5, 4, 1, 0])
    assert none["staleness"] == none["staleness_max"] == 0 and none["no_signal"] == 1

    # An unknown age of the weights is no metric.
    options = {"where": [True] * 4, "failed": [False] * 4, "finish": [STOP] * 4}
    known, unknown = (of_rollouts(versions=[5] * 4, aged=x, **options) for x in (True, False))
    assert known.keys() - unknown.keys() == {"staleness", "staleness_max"}

    # A batch without signal describes the rollouts that have a reward. A call that failed and a
    # cell without a rollout have none: their components are 0.
    options = {"where": [False] * 4, "finish": [STOP, LENGTH, STOP, LENGTH], "versions": [5] * 4}
    found = of_rollouts(failed=[False, True, False, True], **options)
    assert (found["reward/right"], found["truncated"]) == (1, 0)
    found = of_rollouts(failed=[True] * 4, **options)
    assert (found["reward/right"], found["truncated"]) == (0.5, 0.5)
    options["where"] = [False, False, False, True]
    found = of_rollouts(failed=[False] * 4, **options)
    assert (found["reward/right"], found["truncated"]) == (0, 1)

    # Texts are no responses of a batch.
    roles, finish = (0, 0, TEXT, TEXT), [STOP, LENGTH, LENGTH, LENGTH]
    found = of_rollouts([True] * 4, [False] * 4, finish, [5, 5, -1, -1], roles=roles)
    assert (found["reward/right"], found["truncated"], found["rollouts/text"]) == (0.5, 0.5, 2)


def test_responses_to_which_a_component_does_not_apply_are_counted():
    nan = np.nan
    scores = Scores(
        np.float32([1, 0, 1, 0, 1, 0]),
        {
            "reward": np.float32([1, 0, 1, 0, nan, 1]),
            "right": np.float32([1, 0, 1, 0, nan, 1]),
            # None of three, a call that failed, of no component, and one that takes no part.
            "vowels": np.float32([nan, nan, 0.5, 0, nan, nan]),
        },
        np.array([False, False, False, True, False, False]),
    )
    collected = SimpleNamespace(
        where=np.array([[True] * 5 + [False]]), scores=scores, failures=1, continued=0, groups=1,
        roles=np.zeros((1, 6), np.int32), rollouts=6, tokens=8, reward=0.5,
    )  # fmt: skip
    cells = {"mask": np.ones((1, 6, 2), bool), "version": np.zeros((1, 6, 2), np.int32)}
    rollout = SimpleNamespace(finish=np.full((1, 6), STOP), **cells)
    reward = SimpleNamespace(weights_of_sum={"right": 1.0, "vowels": 1.0}, told_absent=set())
    with pytest.warns(UserWarning, match="term 'vowels' did not apply to 2 of 3 responses"):
        found = rollout_metrics(collected, rollout, ages=None, reward=reward)
    assert {k: v for k, v in found.items() if "absent" in k} == {"reward_absent/vowels": 2.0}


def test_numbers_that_need_an_old_policy_or_a_clip_are_left_out():
    batch, gspo = make_batch(), jr.recipes.gspo()
    zeros = jnp.zeros(batch.mask.shape)
    found = batch_metrics(jr.recipes.rloo(), zeros, zeros, prepared_by(jr.recipes.rloo(), batch))
    assert not {"approx_kl", "clip_fraction", "ratio_max", "sampler_gap"} & set(found)
    prepared = prepared_by(gspo, batch, old_logp=zeros)
    found = batch_metrics(gspo, zeros, zeros, prepared)
    assert float(found["clip_fraction"]) == 0.0 and "dual_clip_fraction" not in found
    # A log ratio of 1 a token is far above GSPO's bound for every sequence of positive advantage.
    found = batch_metrics(gspo, zeros + 1.0, zeros, prepared)
    share = np.mean(np.asarray(prepared.advantages > 0)[np.asarray(prepared.mask).any(-1)])
    np.testing.assert_allclose(found["clip_fraction"], share, rtol=1e-5)


def test_clips_are_of_the_ratio_that_a_surrogate_bounds():
    batch, recipe = make_batch(), jr.recipes.grpo()
    zeros = jnp.zeros(batch.mask.shape)
    positive = batch.replace(old_logp=zeros, advantages=jnp.ones(batch.where.shape))
    prepared = prepared_by(recipe, batch, old_logp=zeros)
    plain = jr.bind(jr.surrogates.ppo_clip, eps_low=0.2, eps_high=0.2)
    want = clip_metrics(plain, zeros + 1.0, prepared)["clip_fraction"]
    # Below other names: the ratio is to what sampled, wherever the step began.
    renamed = jr.connect(plain, old_logp="behavior_logp")
    stale = prepared.replace(behavior_logp=zeros, old_logp=zeros + 9.0)
    assert clip_metrics(renamed, zeros + 1.0, stale)["clip_fraction"] == want > 0
    of_batch = jr.connect(jr.surrogates.ppo_clip, eps_low="lows", eps_high="highs")
    assert not clip_metrics(of_batch, zeros + 1.0, prepared)

    # A custom surrogate states its clip.
    def mine(logp, old_logp, advantages, mask, *, eps_low=0.2, eps_high=0.2):
        return plain(logp, old_logp, advantages, mask)

    assert not clip_metrics(mine, zeros + 1.0, positive)
    stated = traits(clip="ratio")(mine)
    assert clip_metrics(stated, zeros + 1.0, positive) == {"clip_fraction": 1.0}

    # GMPO clips log ratios of tokens: of 0.6, -0.1 and 0.2 one is above the bound.
    mask = jnp.zeros((1, 1, 5), bool).at[..., :3].set(True)
    logp = jnp.zeros(mask.shape).at[..., :3].set(jnp.array([0.6, -0.1, 0.2]))
    ones = jnp.ones((1, 1))
    one = batch_with(mask, ones, old_logp=0 * logp, advantages=ones)
    for moved, sign, share in ((logp, 1, 1 / 3), (logp, -1, 0.0), (logp - 0.5, -1, 1 / 3)):
        found = clip_metrics(
            jr.recipes.gmpo().surrogate, moved, one.replace(advantages=sign * ones)
        )
        assert float(found["clip_fraction"]) == np.float32(share)

    # A dual clip is reported.
    recipe = jr.recipes.dapo(dual_clip=2.0)
    prepared = prepared_by(recipe, batch, old_logp=zeros)
    found = batch_metrics(recipe, zeros + 1.0, zeros, prepared)
    negative = np.asarray(prepared.advantages < 0)[..., None] & np.asarray(prepared.mask)
    share = negative.sum() / np.asarray(prepared.mask).sum()
    assert share > 0
    np.testing.assert_allclose(found["dual_clip_fraction"], share, rtol=1e-5)


@for_each("surrogate", [jr.surrogates.gspo, jr.surrogates.gspo_token])
def test_a_dual_clip_of_sequences_bounds_their_ratio(surrogate):
    batch = make_batch(prompts=1, group=2)
    mask = jnp.zeros(batch.mask.shape, bool).at[..., :2].set(True)
    # The ratios of the sequences are e and e^2, those of the tokens 1, e^2, e^2 and e^2.
    logp = jnp.zeros(mask.shape).at[0, :, :2].set(jnp.array([[0.0, 2.0], [2.0, 2.0]]))
    prepared = batch.replace(mask=mask, old_logp=0 * logp, advantages=-jnp.ones((1, 2)))
    found = clip_metrics(jr.bind(surrogate, dual_clip=3.0), logp, prepared)
    assert float(found["dual_clip_fraction"]) == 0.5


# Surrogates whose eps_low and eps_high are no bounds of the ratio at 1 - eps_low and 1 + eps_high,
# and those of them whose dual clip still is one of a token's ratio.
OTHER_BOUNDS = {
    "ampo": set(),
    "chord": set(),
    "dcpo_dynamic_clip": {"dual_clip_fraction"},
    "eapo": set(),
    "gbpo": set(),
    "hapo": {"dual_clip_fraction"},
    "icpo": set(),
    "luffy_shaping": set(),
    "remix": set(),
    "scope": set(),
    "srpo": set(),
}


@for_each("name", OTHER_BOUNDS)
def test_bounds_with_another_meaning_are_no_clip_of_the_ratio(name):
    batch = make_batch()
    zeros = jnp.zeros(batch.mask.shape)
    prepared = batch.replace(old_logp=zeros, advantages=jnp.ones(batch.where.shape))
    surrogate = catalog.preset(name, length=8).surrogate
    assert set(clip_metrics(surrogate, zeros, prepared)) == OTHER_BOUNDS[name]


@pytest.mark.slow
def test_every_surrogate_with_such_bounds_says_what_they_mean():
    """Of the presets: the clip of the ratio, that of gmpo, or one of the others above."""
    others = set()
    for name in catalog.PRESETS:
        needs_k = name in ("passk_training", "pkpo")
        recipe = catalog.PRESETS[name](k=2) if needs_k else catalog.preset(name, length=8)
        surrogate = inner = recipe.surrogate
        while (function := getattr(inner, "function", None)) is not None:
            inner = function
        bounded = {"eps_low", "eps_high", "dual_clip"} & set(inspect.signature(inner).parameters)
        if bounded and traits_of(surrogate).clip not in ("ratio", "log_ratio"):
            others.add(name)
    assert others == set(OTHER_BOUNDS)


def test_pairs_are_those_that_a_loss_compares():
    batch = make_batch(prompts=2, group=3)
    lengths = batch.mask.sum(-1, keepdims=True)
    entropy = jnp.zeros(batch.mask.shape)

    def same(*values):
        return jnp.tile(jnp.array(values), (2, 1))

    def of(recipe, logp, **fields):
        found = batch_metrics(recipe, logp, entropy, prepared_by(recipe, batch, **fields))
        return [float(found[x]) for x in ("pairs", "pair_accuracy", "pair_margin")]

    scores = jnp.array([[-1.0, -2.0, -9.0], [-2.0, -1.0, -9.0]])  # a mean for each token
    logp = jnp.where(batch.mask, scores[..., None], jnp.nan)
    # The gold response, the best of each group and the least likely here, is in no pair.
    found = of(jr.recipes.tpo(), logp, rewards=same(1.0, 0.0, 2.0))
    np.testing.assert_allclose(found, [2.0, 0.5, 0.0], atol=1e-6)
    # The response of the data, here the second, is the better one whatever the rewards are.
    ref_logp = jnp.where(batch.mask, logp, 0.0) - jnp.array([0.0, 1.0, 0.0])[:, None]
    fields = {"ref_logp": ref_logp, "extras": {"steered": same(False, True, False)}}
    found = of(jr.recipes.seppo(), logp, rewards=same(5.0, 0.0, 1.0), **fields)
    np.testing.assert_allclose(found, [4.0, 1.0, lengths[:, 1].mean()], rtol=1e-5)

    # Each rollout of the policy is compared with the response of the reference, and no other:
    # right, right; and wrong, wrong.
    scores = jnp.array([[0.0, -1.0, 2.0], [0.0, 1.0, -3.0]])
    logp = jnp.where(batch.mask, scores[..., None] / lengths - 1.0, 0.0)
    fields = {"ref_logp": jnp.where(batch.mask, -1.0, 0.0), "rewards": same(0.5, 0.0, 1.0)}
    fields["extras"] = {"steered": same(True, False, False)}
    recipe = jr.recipes.xpo()
    outer = jr.bind(recipe.surrogate, excess=0.5)  # the name is that of a function within
    for surrogate in (recipe.surrogate, outer):
        found = of(recipe.replace(surrogate=surrogate), logp, **fields)
        np.testing.assert_allclose(found, [4.0, 0.5, (1 + 2 - 1 - 3) / 4], atol=1e-5)


def test_two_rules_of_one_function_have_numbers():
    batch = make_batch()
    zeros = jnp.zeros(batch.mask.shape)
    tight, wide = (jr.bind(jr.corrections.veto_mask, threshold=x) for x in (0.5, 0.1))
    recipe = jr.recipes.rollout_correction(reject=(tight, wide))
    batch = batch.replace(old_logp=zeros - 1.0, behavior_logp=zeros)
    shares = rejection_metrics(recipe, batch, batch.mask)
    assert shares["rejected_tokens/veto_mask_1"] == shares["rejected_tokens"] == 1
    assert shares["rejected_tokens/veto_mask_2"] == shares["rejected_sequences/veto_mask_2"] == 0


def test_a_step_without_a_token_is_not_put_in_order():
    """It begins and ends within a token, so that a process reward model has no value of it."""
    extras = {
        "turn_ids": jnp.array([[[0, 0, 2]]]),
        "turn_rewards": jnp.array([[[1.0, 0.0, 1.0]]]),
        "turn_where": jnp.ones((1, 1, 3), bool),
    }
    batch = batch_with(jnp.ones((1, 1, 3), bool), jnp.zeros((1, 1)), extras=extras)
    values = jnp.array([[[9.0, -1.0, -2.0]]])
    items = scored_items(jr.recipes.process_reward_model(), values, None, batch)
    assert items.where.tolist() == [[True, False, True]]
    assert items.scores[0, ::2].tolist() == [-1.0, -2.0]
