"""Every preset's whole loss and gradient against the paper's formula in float64, row by row."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preset_cases import MASK, REWARDS, batch_of, expect_loss, near, one_by_one
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import PRESETS, Batch, catalog

P, G, T = 3, 4, 5


def make_batch() -> tuple[np.ndarray, Batch]:
    """Ratios far from 1; a group that agrees, an empty response, a rollout left out."""
    rng = np.random.default_rng(3)
    logp = rng.normal(-1.5, 0.5, (P, G, T)).astype(np.float32)
    batch = batch_of(MASK[:P], REWARDS, old_logp=near(rng, logp), ref_logp=near(rng, logp))
    return logp, batch


def clip(ratio, a, low, high, dual=np.inf):
    loss = -np.minimum(ratio * a, np.clip(ratio, low, high) * a)
    return np.minimum(loss, -a * dual) if a < 0 else loss


# Token losses of one response: log-probabilities new, old and of the reference; its advantage.
TOKEN_LOSS = {
    "grpo": lambda x, old, ref, a: (
        clip(np.exp(x - old), a, 0.8, 1.2) + 1e-3 * (np.exp(ref - x) - 1 - (ref - x))
    ),
    "dr_grpo": lambda x, old, ref, a: clip(np.exp(x - old), a, 0.8, 1.2),
    "rloo": lambda x, old, ref, a: -a * x,
    "dapo": lambda x, old, ref, a: clip(np.exp(x - old), a, 0.8, 1.28, 10.0),
    "m_grpo": lambda x, old, ref, a: clip(np.exp(x - old), a, 0.8, 1.28),
    "gspo": lambda x, old, ref, a: np.full(
        x.shape, clip(np.exp((x - old).mean()), a, 1 - 3e-4, 1 + 4e-4)
    ),
    "sapo": lambda x, old, ref, a: (
        -a * 4 / (t := 1.0 if a > 0 else 1.05) / (1 + np.exp(-t * (np.exp(x - old) - 1)))
    ),
    "cispo": lambda x, old, ref, a: -np.minimum(np.exp(x - old), 5.0) * a * x,
}


def test_every_preset_has_a_reference_in_one_of_these_files():
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    texts = [p.read_text() for p in files if p.name != "test_preset_options.py"]
    missing = [n for n in PRESETS if not any(f'"{n}"' in t or f".{n}(" in t for t in texts)]
    assert not missing, f"no test of these compares the loss with NumPy: {', '.join(missing)}"


def group_advantages(name, r):
    if name == "rloo":
        return np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])
    centered = r - r.mean()
    if name == "dr_grpo" or r.max() == r.min():
        return centered
    return centered / (r.std(ddof=1) + 1e-6)


def overlong(lengths, share):
    """Of a budget of T tokens, over its last share."""
    return np.clip((T * (1 - share) - lengths) / (T * share), -1.0, 0.0)


def reference(name, logp, batch) -> float:
    rows = []
    for p in range(P):
        members = np.flatnonzero(batch.where[p])
        r = np.asarray(batch.rewards[p], float)[members]
        if name == "dapo" and r.max() == r.min():
            continue  # dynamic sampling
        if name in ("cispo", "dapo"):
            r = r + overlong(np.asarray(batch.mask[p]).sum(-1)[members], 0.2)
        for g, a in zip(members, group_advantages(name, r), strict=True):
            m = np.asarray(batch.mask[p, g])
            if m.any():
                arrays = (logp, batch.old_logp, batch.ref_logp)
                x, old, ref = (np.asarray(v[p, g], np.float64)[m] for v in arrays)
                rows.append(TOKEN_LOSS[name](x, old, ref, a))
    if name in ("dapo", "cispo"):
        return np.concatenate(rows).mean()
    if name == "dr_grpo":
        return np.concatenate(rows).sum() / (P * G * T)
    if name == "rloo":
        return np.mean([row.sum() for row in rows])
    return np.mean([row.mean() for row in rows])


@for_each("name", TOKEN_LOSS)
def test_the_loss_and_its_gradient_are_the_papers(name):
    """Of cispo not the gradient: its weight is a constant."""
    logp, batch = make_batch()
    recipe = catalog.preset(name, length=T)
    ready, _ = recipe.prepare(batch, recipe.init())
    least = None if name == "cispo" else 1e-3
    formula = functools.partial(reference, name, batch=batch)
    expect_loss(recipe, logp, ready, formula, rel=2e-6, atol=1e-7, least=least)


def test_the_subagent_of_m_grpo_has_the_same_loss_with_given_advantages():
    """Of each answer, a row of its own."""
    logp, batch = make_batch()
    recipe = jr.recipes.m_grpo().subagent.recipe
    given = np.random.default_rng(4).normal(size=(P, G)).astype(np.float32)
    extras = {"call_advantages": jnp.asarray(given)}
    ready, _ = recipe.prepare(dataclasses.replace(batch, extras=extras), recipe.init())
    rows = []
    for p, g in np.argwhere(np.asarray(batch.where)):
        m = np.asarray(batch.mask[p, g])
        x, old = (np.asarray(v[p, g], np.float64)[m] for v in (logp, batch.old_logp))
        rows += [TOKEN_LOSS["m_grpo"](x, old, None, given[p, g]).mean()] if m.any() else []
    assert float(recipe.loss(logp, ready)) == pytest.approx(np.mean(rows), rel=2e-6)


def test_cispo_weighs_the_policy_gradient():
    logp, batch = make_batch()
    recipe = jr.recipes.cispo(w_max=1.3, w_min=0.7)
    ready, _ = recipe.prepare(batch, recipe.init())
    grad = np.asarray(jax.grad(recipe.loss)(jnp.asarray(logp), ready))
    ratio = np.clip(np.exp(logp - np.asarray(batch.old_logp, np.float64)), 0.7, 1.3)
    expected = -ratio * np.asarray(ready.advantages)[..., None] * np.asarray(ready.weights)
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-8)


CHANGES = {
    "grpo": {"eps_low": 0.05, "eps_high": 0.05, "dual_clip": 1.01, "ddof": 0, "scale_eps": 0.5}
    | {"kl_coef": 0.0, "kl_estimator": "k2"},
    "dr_grpo": {"length": 7, "eps_low": 0.05, "eps_high": 0.05},
    "dapo": {"eps_low": 0.05, "eps_high": 0.05, "dual_clip": 1.01},
    "gspo": {"eps_low": 0.05, "eps_high": 0.05},
    "sapo": {"tau_pos": 2.0, "tau_neg": 2.0},
    "m_grpo": {"eps_low": 0.05, "eps_high": 0.05},
    "cispo": {"w_min": 0.9, "w_max": 1.1, "length": None, "buffer_share": 0.6}
    | {"overlong_factor": 0.5},
}


@functools.cache
def loss_with(name, **options):
    logp, batch = make_batch()
    needed = {"length": T} if name in ("dr_grpo", "cispo") else {}
    recipe = PRESETS[name](**{**needed, **options})
    ready, _ = recipe.prepare(batch, recipe.init())
    return float(recipe.loss(logp, ready))


CHANGED = [*one_by_one(CHANGES)]


@pytest.mark.of_many
@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_the_loss(name):
    rows = [options for each, options in CHANGED if each == name]
    assert not [options for options in rows if loss_with(name, **options) == loss_with(name)]


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
