"""Every preset's whole loss and gradient against the paper's formula in float64, row by row.

A row is a response that takes part: ``x``, ``old`` and ``ref`` are the log-probabilities of its
tokens, ``a`` is its advantage. Here are GRPO and what differs from it in one place. For rewards
(1, 0, 0, 0.5), (1, 1, 1, 1) and (0, 1, 0.25) with ``z`` the score of a group over its deviation,

    grpo     mean over sequences of  clip(e^(x-old), z, 0.8, 1.2) + 0.001 (e^(ref-x) - 1 - ref + x)
    dr_grpo  sum over  P G T  of     clip(e^(x-old), r - mean, 0.8, 1.2)
    rloo     mean over sequences of  -sum x (r - mean of the others)
    dapo     mean over tokens of     clip(e^(x-old), z, 0.8, 1.28), without groups that agree

The other files of presets say the same of their methods; below are also the numbers of a preset
that are no part of its loss: optimizer steps, the weight of the KL, the age of rollouts.
"""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import G, P, Rows, T, center, clip, example, expect_loss, k3, mean, prepared, z
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import PRESETS, catalog
from jaxrl_llm.testing.cases import make_case


def pessimist(high=1.2, dual=1e9):
    return lambda x, old, ref, a: clip(np.exp(x - old), a, high=high, dual=dual)


def sapo(x, old, ref, a):
    t = 1.0 if a > 0 else 1.05
    return -a * 4 / t / (1 + np.exp(-t * (np.exp(x - old) - 1)))


def of_sequence(x, old, ref, a):
    return np.full(x.shape, clip(np.exp((x - old).mean()), a, 1 - 3e-4, 1 + 4e-4))


DAPO = (pessimist(1.28, 10.0), z, "token")
PLAIN = {"dynamic_sampling": False}
OVERLONG = {**PLAIN, "length": T, "buffer_share": 0.6, "overlong_factor": 0.5}
# The preset and its options; losses of tokens, advantages of a group, and what the mean is over.
CASES = {
    "grpo": ({}, lambda *row: pessimist()(*row) + 1e-3 * k3(row[0], row[2]), z, "sequence"),
    "dr_grpo": ({"length": T}, pessimist(), center, "budget"),
    "rloo": ({}, lambda x, old, ref, a: -a * x, lambda r: center(r) * len(r) / (len(r) - 1), "sum"),
    "dapo": ({"length": T}, *DAPO),
    "dapo plain": (PLAIN, *DAPO),
    "dapo by a column": ({"metric": "accuracy"}, *DAPO),
    "dapo overlong": (OVERLONG, *DAPO),
    "dapo filter": ({**PLAIN, "overlong_filter": True}, *DAPO),
    "m_grpo": ({}, pessimist(1.28), z, "sequence"),
    "gspo": ({}, of_sequence, z, "sequence"),
    "sapo": ({}, sapo, z, "sequence"),
    "cispo": (
        {"length": T},
        lambda x, old, ref, a: -np.minimum(np.exp(x - old), 5.0) * a * x,
        z,
        "token",
    ),
}


def overlong(lengths, share=0.2, factor=1.0):
    """Of a budget of T tokens, over its last share."""
    return factor * np.clip((T * (1 - share) - lengths) / (T * share), -1.0, 0.0)


def reference(name, logp, batch) -> float:
    options, token, scale, of = CASES[name]
    rows = Rows(logp, batch)
    r, keep = rows.r, np.ones(len(rows.r), bool)
    if "length" in options and name != "dr_grpo":
        r = r + overlong(rows.lengths, *((0.6, 0.5) if options == OVERLONG else ()))
    if name.startswith("dapo") and options.get("dynamic_sampling", True):
        keep = rows.each(np.ptp) > 0
    if "filter" in name:
        keep = rows.lengths < T
    numbers = zip(rows.x, rows.old, rows.ref, rows.each(scale, r), strict=True)
    losses = [
        token(*each) for each, kept in zip(numbers, keep, strict=True) if kept and len(each[0])
    ]
    return np.concatenate(losses).sum() / (P * G * T) if of == "budget" else mean(losses, of)


@for_each("name", CASES)
def test_the_loss_and_its_gradient_are_the_papers(name):
    """Of cispo not the gradient: its weight is a constant."""
    logp, batch = example(3)
    recipe = PRESETS[name.split()[0]](**CASES[name][0])
    columns = {"accuracy": jnp.sign(batch.rewards)}
    columns["accuracy"] = columns["accuracy"].at[1, 0].set(1.0)
    truncated = jnp.asarray(batch.mask).all(-1)
    batch = batch.replace(reward_components=columns, extras={"truncated": truncated})
    formula = functools.partial(reference, name, batch=batch)
    least = None if name == "cispo" else 1e-3
    expect_loss(recipe, logp, prepared(recipe, batch), formula, rel=5e-6, least=least)


def test_every_preset_has_a_reference_in_one_of_these_files():
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    texts = [p.read_text() for p in files if p.name != "test_preset_options.py"]
    missing = [n for n in PRESETS if not any(f'"{n}"' in t or f".{n}(" in t for t in texts)]
    assert not missing, f"no test of these compares the loss with NumPy: {', '.join(missing)}"


def test_the_subagent_of_m_grpo_has_the_same_loss_with_given_advantages():
    """Of each answer, a row of its own."""
    logp, batch = example(3)
    given = np.random.default_rng(4).normal(size=(P, G)).astype(np.float32)
    recipe = jr.recipes.m_grpo().subagent.recipe
    ready = prepared(recipe, batch.replace(extras={"call_advantages": jnp.asarray(given)}))
    rows = Rows(logp, batch)
    each = zip(rows.x, rows.old, (given[i] for i in rows.places), strict=True)
    losses = [pessimist(1.28)(x, old, None, a) for x, old, a in each]
    assert float(recipe.loss(logp, ready)) == pytest.approx(mean(losses, "sequence"), rel=2e-6)


def test_dapo_by_its_name_has_the_penalty_of_the_paper():
    """With 4096 of 20480 tokens; groups are still compared by the reward before it."""
    recipe = catalog.preset("dapo", length=20480)
    tokens, where = jnp.array([[1000, 16384, 18432, 20480]]), jnp.ones((1, 4), bool)
    context = {"mask": jnp.arange(20480) < tokens[..., None], "where": where}
    rewards = jnp.array([[1.0, -1.0, 1.0, 1.0]])
    advantages, _ = recipe.advantage.update(rewards, recipe.init().advantage, **context)
    np.testing.assert_allclose(advantages, [z(np.array([1.0, -1.0, 0.5, 0.0]))], rtol=1e-6)
    for values, keeps in ((rewards, True), (jnp.ones((1, 4)), False)):
        keep, _ = recipe.curation.update(values, recipe.init().curation, **context)
        assert keep.all() == keep.any() == keeps


@for_each("length", [None, 6])
def test_hapo_is_its_three_functions_in_a_row(length):
    """With a budget, its last tokens are penalized first."""
    case = make_case()
    batch, rewards = case.batch, case.batch.rewards
    mask = batch.mask & batch.where[..., None]
    options = {"quantile": 0.6, "alpha": 0.5}
    if length:
        options |= {"length": length, "overlong_factor": 2.0}
        start = 0.6 * length
        penalty = -2.0 * jnp.clip((mask.sum(-1) - start) / (length - start), 0.0, 1.0)
        assert np.ptp(penalty) > 0
        rewards = jnp.where(batch.where, rewards + penalty, 0.0)
    recipe = jr.recipes.hapo(**options)
    signal = jr.advantages.entropy_signal(batch.extras["old_entropy"], mask, quantile=0.6).signal
    advantages = jr.advantages.token_grpo(rewards, mask=mask, where=batch.where)
    loss = jr.surrogates.hapo(case.logp, batch.old_logp, advantages, mask, signal=signal, alpha=0.5)
    expected = jr.aggregate.weighted_sum(loss, jr.aggregate.token_mean(mask))
    found = recipe.loss(case.logp, prepared(recipe, batch))
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


# What is no part of the loss.


def each_name(table):
    """Pairs of a name and its value, from names by their value."""
    return [(name, value) for value, names in table.items() for name in names.split()]


# Epochs and minibatches, of presets that make more than one update per batch.
PASSES = {
    (1, 2): "ampo flow_grpo icpo llds luffy_shaping mopps rollout_gdro sage verl_erank",
    (1, 4): "areal dcpo_distribution drpo_len gspo gvpo hbpo pf_ppo poad prompt_gdro real "
    "rover sapo scaf_grpo ui_s1",
    (1, 8): "arpo clip_cov dots dppo_kl dppo_tv fipo gmpo jspo kl_cov rollout_replay spark "
    "spo_tracker ttrl_majority vespo",
    (1, 16): "ace cispo dapo dcpo_dynamic_clip fapo hapo mssr srpo_vla vapo vc_ppo",
    (2, 1): "coupled_grpo mc_grpo remix safe unigrpo",
    (2, 2): "dars",
    (2, 8): "spo_chain vineppo",
    (4, 1): "adaptive_kl igpo_inpainting minillm ppo spg",
    (4, 16): "p3o",
    (8, 1): "espo",
    (12, 1): "diffu_grpo gdpo_elbo wd1",
}
# Weights of the KL to the reference in the loss.
KL = {
    0.0001: "brorl spo_chain spo_tree vineppo",
    0.001: "ettrl grpo icpo igpo llds rollout_gdro spark verl_erank",
    0.002: "seeupo",
    0.01: "coupled_grpo epo gigpo hgpo latr",
    0.04: "diffu_grpo mc_grpo",
    0.1: "dart",
}


PASSES_OF = dict(each_name(PASSES))


@for_each("name", PRESETS)
def test_the_optimizer_steps_of_a_preset(name):
    recipe = catalog.preset(name, length=8, num_prompts=4)
    assert (recipe.epochs, recipe.minibatches) == PASSES_OF.get(name, (1, 1))
    recipe.check_passes(recipe.epochs, recipe.minibatches)


def test_dynamic_sampling_is_an_option():
    """Of methods that replace groups of equal rewards."""
    refill = jr.curation.refill(jr.curation.informative_groups)
    for make in (jr.recipes.ace, jr.recipes.cispo, jr.recipes.fipo, jr.recipes.srpo_vla):
        assert make().collector == refill
        assert make(dynamic_sampling=False).collector is None


def test_the_schedule_of_latr_belongs_to_its_thresholds():
    collector = jr.recipes.latr().collector
    assert (collector.min_prob, collector.max_gap, collector.max_distance) == (0.25, 0.15, 0.4)
    assert collector.starts == (0, 10, 20, 80, 200)
    assert collector.shares == (1.0, 0.75, 0.5, 0.25, 0.0)


def kl_weights(recipe):
    terms = [dict(getattr(each, "options", ())) for each in recipe.regularizers]
    names = [getattr(each, "__name__", "") for each in recipe.regularizers]
    return [x.get("coef") for n, x in zip(names, terms, strict=True) if n == "kl_to_reference"]


@for_each("name, coef", each_name(KL))
def test_the_weight_of_the_kl_of_a_preset(name, coef):
    recipe = catalog.preset(name, length=8, num_prompts=4)
    assert kl_weights(recipe) == [coef]
    assert kl_weights(PRESETS[name](kl_coef=0.0)) == []
    assert "ref_logp" not in PRESETS[name](kl_coef=0.0).required_fields


def test_the_clip_of_mopps_and_the_kl_of_reinforce_pp_baseline():
    clip = jr.bind(jr.surrogates.ppo_clip, eps_low=0.2, eps_high=0.28, dual_clip=10.0)
    bonus = jr.bind(jr.regularizers.entropy_bonus, coef=1e-3)
    assert jr.recipes.mopps().surrogate == clip
    assert jr.recipes.mopps().regularizers == jr.recipes.prime().regularizers == (bonus,)
    assert jr.recipes.mopps(entropy_coef=0.0).regularizers == ()
    assert jr.recipes.reinforce_pp_baseline().regularizers == ()
    k2 = jr.bind(jr.regularizers.kl_to_reference, estimator="k2", coef=1e-3)
    assert jr.recipes.reinforce_pp_baseline(kl_coef=1e-3).regularizers == (k2,)


@for_each(
    ("name", "statistic"),
    [
        ("rover", "old_mean_log_probs"),
        ("otb", "sum_pi_sq"),
        ("dcpo_distribution", "hot_logp"),
    ],
)
def test_a_statistic_of_the_step_does_not_go_with_older_weights(name, statistic):
    recipe = getattr(jr.recipes, name)()
    recipe.check_staleness(0)
    with pytest.raises(ValueError, match=f"reads '{statistic}' of the policy at the start"):
        recipe.check_staleness(1)
    jr.recipes.sdpo().check_staleness(1)  # which tokens a teacher is asked for is no such number
    jr.recipes.wpo().check_staleness(1)  # no older weights have sampled the pairs of the data


def test_windows_are_known_by_the_weights_that_sampled_them():
    recipe = jr.recipes.t_ppo()
    assert recipe.collector == jr.curation.windowed(segments=3)
    recipe.check_staleness(0)
    with pytest.raises(ValueError, match="'t_ppo' trains each window of a response once"):
        recipe.check_staleness(1)


def test_a_rule_that_only_drops_tokens_is_no_correction_for_older_weights():
    mask = jr.bind(jr.corrections.off_policy_sequence_mask, threshold=0.5)
    recipe = jr.recipes.grpo().replace(selection=mask)
    recipe.check_staleness(0)
    with pytest.raises(ValueError, match="'grpo' reads behavior_logp, but only to drop tokens"):
        recipe.check_staleness(1)
    weights = jr.bind(jr.corrections.importance_weights, level="token", cap=3.0)
    recipe.replace(correction=weights).check_staleness(1)
    rules = (jr.bind(jr.corrections.veto_mask, threshold=1e-4),)
    for base in (jr.recipes.grpo(), jr.recipes.rloo()):
        only = jr.bind(jr.corrections.rollout_correction, reject=rules)
        with pytest.raises(ValueError, match="only to drop tokens.*give its correction weights"):
            base.replace(correction=only).check_staleness(1)
        base.replace(correction=jr.bind(only, weights=weights)).check_staleness(1)
