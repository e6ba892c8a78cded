"""Any advantage with any surrogate, correction and weighting keeps the laws, or is refused at once.

Without a meaning is what weighs the same mismatch twice, or gives each token a number of its own
where the surrogate has one ratio a response.
"""

import collections
import itertools
import random

import pytest

import jaxrl_llm as jr
from jaxrl_llm.core import traits_of
from jaxrl_llm.recipes import PRESETS, Recipe, catalog, wiring
from jaxrl_llm.testing import assert_recipe_ok, cases

A, S, C, W = jr.advantages, jr.surrogates, jr.corrections, jr.aggregate

COMBINATIONS = 70

ADVANTAGES = {
    "grpo": jr.stateless(A.grpo),
    "grpo_batch": jr.stateless(A.grpo, scale="batch", ddof=0),
    "dr_grpo": jr.stateless(A.dr_grpo),
    "rloo": jr.stateless(A.rloo, singleton="raw"),
    "remax": jr.stateless(A.remax),
    "reinforce_pp": jr.stateless(A.reinforce_pp, old_logp=None, ref_logp=None, gamma=0.9),
    "reinforce_pp_kl": jr.stateless(A.reinforce_pp, kl_coef=0.1),
    "reinforce_pp_baseline": jr.stateless(A.reinforce_pp_baseline),
    "opo": jr.stateless(A.opo),
    "otb": jr.stateless(A.otb, zero_tail=True),
    "gpg": jr.stateless(A.gpg),
    "mc_grpo": jr.stateless(A.mc_grpo, scale="std"),
    "gdpo": jr.stateless(jr.connect(A.gdpo, rewards="reward_components")),
    "grpo_passk": jr.stateless(A.grpo_passk),
    "passk_training": jr.stateless(A.passk_training, k=2, threshold=0.5),
    "pkpo": jr.stateless(A.pkpo, k=2, threshold=0.5),
    "maxrl": jr.stateless(A.maxrl),
    "v05_baseline": jr.stateless(A.v05_baseline),
    "jspo": jr.stateless(A.jspo),
    "hbpo": jr.stateless(A.hbpo, max_length=8),
    "vcpo": jr.stateless(A.vcpo_advantage),
    "asymre": jr.stateless(A.asymre),
    "spo_tracker": A.spo_tracker(num_prompts=cases.P),
    "smooth": A.smooth_standardization(num_prompts=cases.P),
    "xrpo": jr.chain(jr.stateless(A.grpo), jr.stateless(A.novelty_sharpening)),
    "ace": jr.chain(jr.stateless(A.grpo), jr.stateless(A.ace)),
    "mssr": jr.chain(jr.stateless(A.rloo), jr.stateless(A.entropy_shaping)),
}
SURROGATES = {
    "reinforce": S.reinforce,
    "ppo_clip": S.ppo_clip,
    "ppo_dual_clip": jr.bind(S.ppo_clip, dual_clip=3.0),
    "dapo_clip": S.dapo_clip,
    "gspo": S.gspo,
    "gspo_token": S.gspo_token,
    "luspo": S.luspo,
    "gmpo": S.gmpo,
    "sapo": S.sapo,
    "fipo": S.fipo,
    "cispo": S.cispo,
    "dispo": S.dispo,
    "topr": S.topr,
    "minpro": S.minpro,
    "gbpo": jr.bind(S.gbpo),
    "decoupled_ppo": S.decoupled_ppo,
    "mix_ppg": S.mix_ppg,
    "vespo": S.vespo,
    "dcpo_dynamic_clip": S.dcpo_dynamic_clip,
    "kl_cov": jr.connect(S.kl_cov, selected="selected"),
    "clip_cov": jr.connect(S.clip_cov, selected="selected"),
    "luffy": S.luffy_shaping,
    "chord": S.chord,
}
TIS = jr.bind(C.importance_weights, cap=2.0)
CORRECTIONS = {
    "none": None,
    "tis": jr.bind(C.rollout_correction, weights=TIS),
    "icepop": jr.bind(C.rollout_correction, weights=C.masked_importance_weights),
    "m2": jr.bind(C.rollout_correction, weights=TIS, reject=(C.m2_mask,)),
    "veto": jr.bind(C.rollout_correction, reject=(jr.bind(C.veto_mask, threshold=0.5),)),
    "sequence": jr.bind(
        C.sequence_rollout_correction, weights=jr.bind(C.importance_weights, level="sequence")
    ),
    "geometric": jr.bind(
        C.sequence_rollout_correction, weights=jr.bind(C.importance_weights, level="geometric")
    ),
}
WEIGHTS = {
    "token_mean": W.token_mean,
    "sequence_mean": W.sequence_mean,
    "sequence_sum": W.sequence_sum,
    "sequence_sum_norm": jr.bind(W.sequence_sum_norm, length=cases.T),
    "fixed_length": jr.bind(W.fixed_length, length=cases.T),
}
Slots = tuple[str, str, str, str]


def compose(choice: Slots) -> Recipe:
    a, s, c, w = choice
    return Recipe(
        name=" x ".join(choice),
        advantage=ADVANTAGES[a],
        surrogate=SURROGATES[s],
        correction=CORRECTIONS[c],
        weights=WEIGHTS[w],
        group_relative=False,
    )


def reason(choice: Slots) -> str | None:
    """Why a combination has no meaning, in words of the message; None if it has one."""
    a, s, c, w = choice
    surrogate, correction = SURROGATES[s], CORRECTIONS[c]
    if correction is not None and s in ("decoupled_ppo", "mix_ppg", "vespo"):
        return "count the same mismatch twice"
    if traits_of(surrogate).level == "token":
        return None
    if traits_of(WEIGHTS[w]).level == "token":
        return "count it once per token"
    if correction is not None and traits_of(correction).level == "token":
        return "weighs its tokens one by one"
    functions = [r.function for r in wiring.transform_readers("advantage", ADVANTAGES[a])]
    by_token = any(traits_of(function).token_values for function in functions)
    if by_token and not traits_of(surrogate).takes_token_advantages:
        return "average away"
    return None


def draw() -> tuple[list[Slots], list[Slots]]:
    """Combinations that have a meaning, with every function among them, and those that do not."""
    advantages, surrogates, corrections, weights = (
        sorted(pool) for pool in (ADVANTAGES, SURROGATES, CORRECTIONS, WEIGHTS)
    )
    rng, good = random.Random(0), []
    while len(good) < COMBINATIONS:
        # In turn, since a sequence-level surrogate goes with few of the others.
        surrogate = surrogates[len(good) % len(surrogates)]
        # Of three the one in fewest combinations: chance alone would leave some out.
        used = collections.Counter(choice[0] for choice in good)
        advantage = min(rng.sample(advantages, 3), key=used.__getitem__)
        choice = (advantage, surrogate, rng.choice(corrections), rng.choice(weights))
        if choice not in good and reason(choice) is None:
            good.append(choice)
    bad = collections.defaultdict(list)
    for choice in itertools.product(advantages, surrogates, corrections, weights):
        bad[reason(choice)].append(choice)
    del bad[None]
    return good, [choice for each in bad.values() for choice in rng.sample(each, 20)]


GOOD, BAD = draw()


@pytest.mark.slow
@pytest.mark.of_many
@pytest.mark.parametrize("choice", GOOD, ids=" x ".join)
def test_a_combination_keeps_the_laws(choice):
    laws = ["microbatches", "junk", "permutation", "degenerate_groups", "on_policy"]
    assert_recipe_ok(compose(choice), only=laws)


@pytest.mark.of_many
@pytest.mark.parametrize("choice", GOOD[:8], ids=" x ".join)
def test_some_combinations_keep_the_laws(choice):
    """A few of the above, for those who do not run the slow tests."""
    assert_recipe_ok(compose(choice), only=["microbatches", "junk"])


def test_combinations_without_a_meaning_are_refused_with_the_reason():
    found = set()
    for choice in BAD:
        found.add(reason(choice))
        with pytest.raises(ValueError, match=reason(choice)):
            compose(choice)
    assert len(found) == 4


def test_the_combinations_hold_every_function():
    for place, pool in enumerate((ADVANTAGES, SURROGATES, CORRECTIONS, WEIGHTS)):
        assert {choice[place] for choice in GOOD} == set(pool)


def test_a_preset_prints_the_same_in_every_process():
    """A resumed run tells by it whether the rollouts of a checkpoint are its own."""
    assert not [
        name for name in PRESETS if " at 0x" in repr(catalog.preset(name, length=8, num_prompts=4))
    ]
