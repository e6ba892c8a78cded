"""Presets that choose prompts: GRPO's loss, and the prompts that each of them asks for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.curation import Collection, PromptBelief
from jaxrl_llm.curation.collectors.protocol import width_of
from jaxrl_llm.testing.cases import make_case

RATES = np.linspace(0.02, 0.98, 49)  # 0.5 is prompt 24, 0.34 is prompt 16
PRESETS = {
    "vade": (jr.recipes.vade, {13, 14, 15, 16, 17, 18, 19, 20}),
    "mopps": (jr.recipes.mopps, {22, 23, 24, 25, 26}),
    "insight": (jr.recipes.insight, {16, 17, 18, 19, 20, 21, 22}),
}


def known(count):
    """Beliefs of these rates after ``count`` rollouts of each prompt."""
    return PromptBelief(np.float32(count * RATES), np.float32(count * (1 - RATES)))


def asked(collector, belief, seed=0, count=3):
    collection = Collection(count, 8)
    requests, _ = collector.propose(belief, jax.random.key(seed), collection, count)
    assert all(request.rollouts == 8 for request in requests)
    return [request.prompt for request in requests]


@for_each("name", PRESETS)
def test_the_prompts_of_well_known_rates(name):
    make, expected = PRESETS[name]
    for seed in range(3):
        assert set(asked(make().collector, known(1e5), seed)) <= expected


def test_a_draw_by_learnability_prefers_what_is_half_solved():
    collector = jr.recipes.learnability().collector
    drawn = [i for seed in range(60) for i in asked(collector, known(1e5), seed)]
    variance = RATES * (1 - RATES)
    assert np.mean(variance[drawn]) == pytest.approx((variance**2).sum() / variance.sum(), rel=0.1)
    sharp = jr.recipes.learnability(power=8.0).collector
    drawn = [i for seed in range(20) for i in asked(sharp, known(1e5), seed)]
    assert np.mean(variance[drawn]) > 0.235


def test_thompson_sampling_asks_for_what_is_little_known():
    belief = known(1e5)
    alpha, beta = belief.alpha.copy(), belief.beta.copy()
    alpha[40:], beta[40:] = 1.0, 1.0
    for make in (jr.recipes.vade, jr.recipes.mopps):
        collector = make(candidates=None).collector
        seen = {i for s in range(40) for i in asked(collector, PromptBelief(alpha, beta), s)}
        assert len(seen & set(range(40, 49))) >= 5


def test_insight_leaves_what_it_knows():
    belief = known(1e4)
    belief.alpha[30], belief.beta[30] = 2.0, 3.0
    assert asked(jr.recipes.insight().collector, belief)[0] == 30


@for_each("name", ["vade", "mopps", "insight", "learnability", "v0_budget", "rollout_gdro"])
def test_the_loss_is_that_of_grpo(name):
    options = {"dual_clip": None, "entropy_coef": 0.0} if name == "mopps" else {}
    recipe = getattr(jr.recipes, name)(eps_high=0.2, **options).replace(regularizers=())
    plain = jr.recipes.grpo(kl_coef=0.0).replace(weights=jr.aggregate.token_mean)
    case = make_case()
    losses = [r.loss(case.logp, r.prepare(case.batch, r.init())[0]) for r in (recipe, plain)]
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6)
    assert (width_of(recipe.collector, 8) > 8) == (name in ("v0_budget", "rollout_gdro"))


@for_each(
    ("make", "visited", "rest"),
    [
        (jr.recipes.vade, (1 + 0.2 * 4 + 1, 1 + 0.2 * 8 + 3), (4.996, 8.992)),
        (jr.recipes.mopps, (6.0, 12.0), (5.0, 9.0)),
        (jr.recipes.insight, (6.0, 12.0), (5.0, 9.0)),
        (jr.recipes.learnability, (1 + 0.9 * 4 + 1, 1 + 0.9 * 8 + 3), (5.0, 9.0)),
    ],
)
def test_how_beliefs_forget(make, visited, rest):
    belief = PromptBelief(np.full(3, 5.0, np.float32), np.full(3, 9.0, np.float32))
    rewards = np.float32([0, 1, 0, 0])
    outcome = jr.curation.Outcome(
        1, rewards, rewards >= 0, np.ones(4, np.int32), np.zeros(4, bool), {}
    )
    request = jr.curation.Request(4, 1)
    collection = Collection(1, 4, 0, (request,), (outcome,))
    decision, state = make().collector.observe(belief, collection)
    assert len(decision.rows) == 1
    np.testing.assert_allclose([state.alpha[1], state.beta[1]], visited, rtol=1e-6)
    np.testing.assert_allclose([state.alpha[0], state.beta[2]], rest, rtol=1e-6)
    assert isinstance(state.alpha, np.ndarray) and jnp.shape(state.beta) == (3,)


def test_the_majority_stands_in_for_the_label():
    case = make_case()
    ids = jnp.array([[3, 3, 5, 7], [1, 2, 2, -1], [4, 4, 4, 4], [-1, -1, -1, -1]] * 2)
    rewards = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]] * 2, np.float32)
    batch = case.batch.replace(where=jnp.ones((8, 4), bool), extras={"answer_ids": ids})
    recipe = jr.recipes.ttrl_majority(votes=1)
    got = recipe.prepare(batch, recipe.init())[0].advantages
    np.testing.assert_allclose(got, jr.advantages.grpo(jnp.asarray(rewards)), atol=1e-6)
    assert "answer_ids" in recipe.required_fields
