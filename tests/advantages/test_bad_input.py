"""Bad options and arrays raise one sentence that names function and argument."""

import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

import jaxrl_llm.advantages as adv
from jaxrl_llm import aggregate, curation, regularizers

REWARDS, INTS, WHERE = jnp.ones((2, 3)), jnp.ones((2, 3), int), jnp.ones((2, 3), bool)
TOKENS, MASK, WIDE = jnp.ones((2, 3, 4)), jnp.ones((2, 3, 4), bool), jnp.ones((2, 4), bool)
TWO, THREE, IDS, NAN = jnp.ones(2), jnp.ones(3), jnp.array([0, 1]), float("nan")
A, AB = {"a": REWARDS}, {"a": REWARDS, "b": REWARDS}
TRACKER = adv.BetaTracker(THREE, THREE)
SPO, SMOOTH = adv.spo_tracker(num_prompts=2), adv.smooth_standardization(num_prompts=2)
ADAPTIVE = adv.spo_tracker(num_prompts=2, rho=None)
TEMPERED = {"old_logp": TOKENS, "hot_logp": TOKENS, "cold_logp": TOKENS}
DCPO = {"rewards": REWARDS, "policy_entropy": jnp.float32(0.5)} | TEMPERED
ONE_GROUP = {"rewards": THREE} | {name: TOKENS[0] for name in TEMPERED}
PASSES = jnp.ones((2, 3, 4, 5), bool)
STATES = {"turn_rewards": TOKENS, "state_ids": MASK.astype(int)}
FORKS = {"node_ids": MASK.astype(int), "mask": MASK, "turn_ids": MASK.astype(int)}
FORKS |= {"turn_where": MASK}
PRM = {"prm_logp": TOKENS, "old_logp": TOKENS, "mask": MASK, "turn_ids": MASK.astype(int)}
PRM |= {"turn_where": MASK}
TOKEN_PRM = {"prm_logp": TOKENS, "ref_logp": TOKENS, "mask": MASK}
PENALTY = {"old_logp": TOKENS, "ref_logp": TOKENS, "kl_coef": 0.1}
OTB = {"old_logp": TOKENS, "sum_pi_sq": TOKENS}
VCPO = {"old_logp": TOKENS, "behavior_logp": TOKENS, "mask": MASK, "grad_sq_norms": REWARDS}

BAD_VALUES = {
    # baselines
    r"remax: greedy_rewards must have shape \(2,\); got \(3,": lambda: adv.remax(
        REWARDS, greedy_rewards=THREE
    ),
    r"remax_token: greedy_rewards must have shape \(2,\)": lambda: adv.remax_token(
        TOKENS, MASK, greedy_rewards=REWARDS
    ),
    r"remax_token: where must have shape \(2, 3\); got \(2,": lambda: adv.remax_token(
        TOKENS, MASK, greedy_rewards=TWO, where=WIDE
    ),
    "remax_token: token_rewards must have at least 2 axes": lambda: adv.remax_token(
        TOKENS[0, 0], MASK[0, 0], greedy_rewards=jnp.float32(0.0)
    ),
    r"opo: mask .* rewards \(2,\) and mask \(2, 3, 4\)": lambda: adv.opo(TWO, MASK),
    "opo: singleton must be one of 'zero', 'raw'": lambda: adv.opo(REWARDS, MASK, singleton="keep"),
    r"opob: .*rewards \(3,\), log_weights \(2,\)": lambda: adv.opob(THREE, TWO, THREE),
    "vcpo_advantage: scale must be one of 'group', 'none'": lambda: adv.vcpo_advantage(
        REWARDS, **VCPO, scale="batch"
    ),
    r"vcpo_advantage: .*behavior_logp \(3, 4\)": lambda: adv.vcpo_advantage(
        REWARDS, **VCPO | {"behavior_logp": TOKENS[0]}
    ),
    r"vcpo_advantage: grad_sq_norms must have shape \(2, 3\); got \(": lambda: adv.vcpo_advantage(
        REWARDS, **VCPO | {"grad_sq_norms": TOKENS}
    ),
    "mc_grpo: scale must be one of .* got 'mean'": lambda: adv.mc_grpo(REWARDS, scale="mean"),
    "mc_grpo: eps=0.1 has no effect with scale='none'": lambda: adv.mc_grpo(
        REWARDS, scale="none", eps=0.1
    ),
    "mc_grpo: eps must be above 0; got 0": lambda: adv.mc_grpo(REWARDS, eps=0.0),
    r"mc_grpo_pivot: .*rewards \(2, 3\), where \(2, 4\)": lambda: adv.mc_grpo_pivot(
        REWARDS, where=WIDE
    ),
    r"mc_grpo_keep: mask must .* \(2, 3\) and mask \(2, 4\)": lambda: adv.mc_grpo_keep(
        REWARDS, WIDE, rewards=REWARDS
    ),
    r"jspo: .*rewards \(2, 3\), where \(2, 4\)": lambda: adv.jspo(REWARDS, where=WIDE),
    "jspo: eps must be above 0; got 0": lambda: adv.jspo(REWARDS, eps=0.0),
    # batch
    "clip: bound must be above 0; got 0": lambda: adv.clip(REWARDS, bound=0.0),
    "whiten: eps must be above 0; got 0": lambda: adv.whiten(TWO, WHERE, eps=0.0),
    r"whiten: x must have .*\(2, 3\).*got \(4,\)": lambda: adv.whiten(jnp.ones(4), WHERE),
    r"batch_normalize: .*x \(2,\), where \(2, 3\)": lambda: adv.batch_normalize(TWO, where=WHERE),
    r"scale_scores: score_std must .*\(2, 1, 1\); got \(2,\)": lambda: adv.scale_scores(
        REWARDS, score_std=TWO
    ),
    "scale_scores: score_std must be above 0; got 0": lambda: adv.scale_scores(
        REWARDS, score_std=0.0
    ),
    "score_scaler: clip must be above 0; got 0": lambda: adv.score_scaler(clip=0.0),
    r"update_moments: .*x \(3,\), where \(2,\)": lambda: adv.update_moments(
        adv.score_scaler().init(), THREE, where=jnp.ones(2, bool)
    ),
    r"reinforce_pp_baseline: mask .* rewards \(2, 3\) and mask \(2, 4\)": lambda: (
        adv.reinforce_pp_baseline(REWARDS, WIDE)
    ),
    "reinforce_pp_baseline: mask must have the shape of rewards": lambda: adv.reinforce_pp_baseline(
        REWARDS, jnp.array(True)
    ),
    "reinforce_pp_baseline: norm must be one of .* Did you mean 'token'": lambda: (
        adv.reinforce_pp_baseline(REWARDS, MASK, norm="tokens")
    ),
    "reinforce_pp_baseline: eps must be above 0; got 0": lambda: adv.reinforce_pp_baseline(
        REWARDS, MASK, eps=0.0
    ),
    r"reinforce_pp: mask .* rewards \(2,\) and mask \(2, 3, 4\)": lambda: adv.reinforce_pp(
        TWO, MASK
    ),
    r"reinforce_pp: gamma must be in \[0, 1\]; got 2": lambda: adv.reinforce_pp(
        REWARDS, MASK, gamma=2.0
    ),
    "reinforce_pp: eps must be above 0; got 0": lambda: adv.reinforce_pp(REWARDS, MASK, eps=0.0),
    "reinforce_pp: kl_coef must not be negative": lambda: adv.reinforce_pp(
        REWARDS, MASK, kl_coef=-0.1
    ),
    r"reinforce_pp: .*old_logp \(3, 4\), mask \(2, 3, 4\)": lambda: adv.reinforce_pp(
        REWARDS, MASK, old_logp=TOKENS[0]
    ),
    r"reinforce_pp: kl_coef must be .*\(2, 3, 4\); got \(5,\)": lambda: adv.reinforce_pp(
        REWARDS, MASK, **PENALTY | {"kl_coef": jnp.ones(5)}
    ),
    "reinforce_pp: ref_logp is None; the KL penalty": lambda: adv.reinforce_pp(
        REWARDS, MASK, old_logp=TOKENS, kl_coef=0.1
    ),
    "reinforce_pp: old_logp is None": lambda: adv.reinforce_pp(
        REWARDS, MASK, ref_logp=TOKENS, kl_coef=jnp.float32(0.1)
    ),
    # group
    r"grpo: scale must be one of .* Did you mean 'group'\?": lambda: adv.grpo(
        REWARDS, scale="groups"
    ),
    "grpo: ddof must be one of 0, 1; got 2": lambda: adv.grpo(REWARDS, ddof=2),
    "grpo: eps must be above 0; got 0": lambda: adv.grpo(REWARDS, eps=0.0),
    "grpo: eps must be above 0; got -1e-06": lambda: adv.grpo(REWARDS, eps=-1e-6),
    "grpo: eps must be above 0; got nan": lambda: adv.grpo(REWARDS, eps=NAN),
    "grpo: ddof=1 has no effect with scale='none'": lambda: adv.grpo(REWARDS, scale="none", ddof=1),
    "grpo: eps=1e-06 has no effect with scale='none'": lambda: adv.grpo(
        REWARDS, scale="none", eps=1e-6
    ),
    "grpo: ddof=0 has no effect with scale='none'": lambda: adv.grpo(
        REWARDS, scale="none", ddof=0, eps=1e-4
    ),
    "grpo: baseline='zero' takes scale='group' or 'batch'.*'none'": lambda: adv.grpo(
        THREE, baseline="zero", scale="none"
    ),
    "grpo: baseline must be one of 'group'.*'batch'": lambda: adv.grpo(THREE, baseline="bach"),
    "gpg: mode must be one of .* Did you mean 'informative'": lambda: adv.gpg(
        REWARDS, mode="informatve"
    ),
    "gpg: scale must be one of 'none', 'group'; got 'batch'": lambda: adv.gpg(
        REWARDS, scale="batch"
    ),
    "gpg: eps=1e-06 has no effect with scale='none'": lambda: adv.gpg(REWARDS, eps=1e-06),
    "gpg: singleton='raw' needs mode='nonzero_reward'": lambda: adv.gpg(REWARDS, singleton="raw"),
    "gpg: eps must be above 0": lambda: adv.gpg(REWARDS, scale="group", eps=0.0),
    r"grpo_split: .*steered \(3,\)": lambda: adv.grpo_split(REWARDS, steered=jnp.zeros(3, bool)),
    r"hbpo: .*rewards \(2, 3\), budgets \(3,\)": lambda: adv.hbpo(REWARDS, budgets=THREE),
    "hbpo: intra_weight must not be negative": lambda: adv.hbpo(
        REWARDS, budgets=REWARDS, intra_weight=-1.0
    ),
    "hbpo: max_length must be above 0": lambda: adv.hbpo(REWARDS, budgets=REWARDS, max_length=0),
    "hbpo: singleton must be one of": lambda: adv.hbpo(REWARDS, budgets=REWARDS, singleton="keep"),
    # modulators
    r"novelty_sharpening: advantages must have shape \(2, 3": lambda: adv.novelty_sharpening(
        TOKENS, MASK, old_logp=TOKENS
    ),
    "novelty_sharpening: old_logp is None": lambda: adv.novelty_sharpening(
        REWARDS, MASK, old_logp=None
    ),
    "novelty_sharpening: cap must not be negative": lambda: adv.novelty_sharpening(
        REWARDS, MASK, old_logp=TOKENS, cap=-1.0
    ),
    "ace: advantages must have the shape of mask": lambda: adv.ace(
        THREE, MASK, old_logp=TOKENS, ref_logp=TOKENS
    ),
    "ace: ref_logp is None": lambda: adv.ace(REWARDS, MASK, old_logp=TOKENS, ref_logp=None),
    r"ace: where must have shape \(2, 3\)": lambda: adv.ace(
        REWARDS, MASK, old_logp=TOKENS, ref_logp=TOKENS, where=jnp.ones(3, bool)
    ),
    "entropy_shaping: cap must be above 0": lambda: adv.entropy_shaping(
        REWARDS, MASK, old_entropy=TOKENS, cap=0.0
    ),
    r"these must have the same shape: old_logp \(3, 4\), mask \(2, 3, 4\)": lambda: (
        adv.sampled_entropy_shaping(REWARDS, MASK, old_logp=TOKENS[0])
    ),
    "dcpo_distribution: hot_logp is None": lambda: adv.dcpo_distribution(
        REWARDS, MASK, **DCPO | {"hot_logp": None}
    ),
    r"dcpo_distribution: rewards must have shape \(2, 3\)": lambda: adv.dcpo_distribution(
        REWARDS, MASK, **DCPO | {"rewards": THREE}
    ),
    r"policy_entropy must be a scalar or of shape \(2, 1, 1": lambda: adv.dcpo_distribution(
        REWARDS, MASK, **DCPO | {"policy_entropy": TWO}
    ),
    r"policy_entropy must be a scalar or of shape \(1, 1\)": lambda: adv.dcpo_distribution(
        THREE, MASK[0], **ONE_GROUP, policy_entropy=jnp.ones((3, 1, 1))
    ),
    "dcpo_distribution: max_gap must not be negative": lambda: adv.dcpo_distribution(
        REWARDS, MASK, **DCPO, max_gap=-0.1
    ),
    "temperature_logp: temperature must be above 0": lambda: adv.temperature_logp(
        REWARDS, IDS, temperature=0.0
    ),
    r"temperature_logp: targets must have shape \(2,\)": lambda: adv.temperature_logp(
        REWARDS, jnp.array([0]), temperature=1.0
    ),
    "sampled_entropy: start must not be negative": lambda: adv.sampled_entropy(start=-1.0),
    # ospo
    "ospo: rewards must have at least 2 axes": lambda: adv.ospo(THREE),
    "ospo: fairness must not be negative": lambda: adv.ospo(REWARDS, fairness=-1.0),
    r"fleet_fairness: .*rewards \(2, 3\), where \(4,\)": lambda: adv.fleet_fairness(
        REWARDS, where=jnp.ones(4, bool)
    ),
    "fleet_grpo: punishment must be one of": lambda: adv.fleet_grpo(REWARDS, punishment="both"),
    "fleet_grpo: norm must be one of": lambda: adv.fleet_grpo(REWARDS, norm="batch"),
    r"fleet_grpo: gamma must be in \[0, 1\]": lambda: adv.fleet_grpo(REWARDS, gamma=2.0),
    # otb
    r"otb: .*sum_pi_sq \(3, 4\), .*mask \(2, 3, 4\)": lambda: adv.otb(
        REWARDS, MASK, **OTB | {"sum_pi_sq": TOKENS[0]}
    ),
    "otb: sum_pi_sq is None": lambda: adv.otb(REWARDS, MASK, **OTB | {"sum_pi_sq": None}),
    "otb: eps must be above 0; got 0": lambda: adv.otb(REWARDS, MASK, **OTB, eps=0.0),
    "otb_token: token_rewards must have at least 2 axes": lambda: adv.otb_token(
        TOKENS[0, 0], MASK[0, 0], old_logp=TOKENS[0, 0], sum_pi_sq=TOKENS[0, 0]
    ),
    # passk
    r"passk_training: .*rewards \(2, 3\), where \(2, 4\)": lambda: adv.passk_training(
        REWARDS, where=WIDE
    ),
    "passk_training: k must be at least 1; got 0": lambda: adv.passk_training(REWARDS, k=0),
    "passk_training: threshold must be finite; got nan": lambda: adv.passk_training(
        REWARDS, threshold=NAN
    ),
    "passk_training: eps must be above 0": lambda: adv.passk_training(REWARDS, eps=0.0),
    r"pkpo: .*rewards \(2, 3\), where \(2, 4\)": lambda: adv.pkpo(REWARDS, where=WIDE),
    "pkpo: k must be at least 1; got 0": lambda: adv.pkpo(REWARDS, k=0),
    "pkpo: threshold must be finite; got nan": lambda: adv.pkpo(REWARDS, threshold=NAN),
    "pkpo: loo must be one of False, True": lambda: adv.pkpo(REWARDS, loo="yes"),
    "grpo_passk: scale must be one of 'group', 'none'": lambda: adv.grpo_passk(
        REWARDS, scale="batch"
    ),
    "grpo_passk: ddof=1 has no effect with scale='none'": lambda: adv.grpo_passk(
        REWARDS, scale="none", ddof=1
    ),
    r"maxrl: .*rewards \(2, 3\), where \(2, 4\)": lambda: adv.maxrl(REWARDS, where=WIDE),
    "maxrl: scale must be one of 'mean', 'root'; got 'std'": lambda: adv.maxrl(
        REWARDS, scale="std"
    ),
    "maxrl: eps must be above 0": lambda: adv.maxrl(REWARDS, eps=-1.0),
    "maclaurin_weights: order must be at least 1; got 0": lambda: adv.maclaurin_weights(
        TWO, TWO, order=0
    ),
    r"maclaurin_weights: .*right \(2,\), total \(3,\)": lambda: adv.maclaurin_weights(
        TWO, THREE, order=1
    ),
    # prompt_stats
    "prompt_stats_init: num_prompts must be an integer": lambda: adv.prompt_stats_init(0),
    "smooth_standardization: num_prompts must be an int": lambda: adv.smooth_standardization(
        num_prompts=2.5
    ),
    r"prompt_stats_update: prompt_ids must have shape \(2,\)": lambda: adv.prompt_stats_update(
        adv.prompt_stats_init(2), jnp.arange(3), REWARDS
    ),
    "smooth_advantage: these must have the same shape": lambda: adv.smooth_advantage(TWO, THREE, 1),
    # returns
    r"terminal_rewards: mask .* rewards \(3,\) and mask \(2": lambda: adv.terminal_rewards(
        THREE, WHERE
    ),
    r"reward_to_go: .*token_rewards \(2, 3\), mask \(2, 4\)": lambda: adv.reward_to_go(
        REWARDS, WIDE
    ),
    "reward_to_go: gamma must be in .*; got 1.5": lambda: adv.reward_to_go(TOKENS, MASK, gamma=1.5),
    "reward_to_go: gamma must be in .*; got -0.1": lambda: adv.reward_to_go(
        TOKENS, MASK, gamma=-0.1
    ),
    r"reward_to_go: gamma must be in \[0, 1\]; got 2": lambda: adv.reward_to_go(
        TOKENS, MASK, gamma=jnp.float32(2.0)
    ),
    r"gamma must be .* mask \(2, 3\); got \(4, 2, 3\)": lambda: adv.reward_to_go(
        REWARDS, WHERE, gamma=jnp.ones((4, 2, 3))
    ),
    "kl_shaped_rewards: .* Did you mean 'k3'": lambda: adv.kl_shaped_rewards(
        REWARDS, MASK, **PENALTY, estimator="k33"
    ),
    "kl_shaped_rewards: ref_logp is None": lambda: adv.kl_shaped_rewards(
        REWARDS, MASK, **PENALTY | {"ref_logp": None}
    ),
    "kl_shaped_rewards: kl_coef must not be negative": lambda: adv.kl_shaped_rewards(
        REWARDS, MASK, **PENALTY | {"kl_coef": -1.0}
    ),
    r"kl_coef must be .* mask \(2, 3, 4\); got \(2,\)": lambda: adv.kl_shaped_rewards(
        REWARDS, MASK, **PENALTY | {"kl_coef": TWO}
    ),
    r"kl_coef must be .* mask \(2, 3, 4\); got \(4,\)": lambda: adv.kl_shaped_rewards(
        REWARDS, MASK, **PENALTY | {"kl_coef": jnp.ones(4)}
    ),
    r"kl_shaped_rewards: .*ref_logp \(3, 4\)": lambda: adv.kl_shaped_rewards(
        REWARDS, MASK, **PENALTY | {"ref_logp": TOKENS[0]}
    ),
    # reward_components
    "gdpo: rewards has no component": lambda: adv.gdpo({}),
    r"gdpo: .*rewards\['a'\] \(2, 3\), rewards\['b'\] \(2,\)": lambda: adv.gdpo(A | {"b": TWO}),
    r"rewards\['a'\] must have at least 1 axis": lambda: adv.gdpo({"a": jnp.float32(1.0)}),
    r"gdpo: .*where \(2, 4\)": lambda: adv.gdpo(A, where=WIDE),
    "weights names 'c', which is no reward.* 'a', 'b'": lambda: adv.gdpo(
        AB, weights={"a": 1.0, "b": 1.0, "c": 2.0}
    ),
    "sum_components: weights has none for 'b'": lambda: adv.sum_components(AB, weights={"a": 1.0}),
    "gdpo: batch_norm must be one of 'sequence', 'none'": lambda: adv.gdpo(A, batch_norm="token"),
    "gdpo: eps must be above 0": lambda: adv.gdpo(A, eps=0.0),
    r"gdpo_token: mask must .*\(2, 3\) and mask \(2, 4, 1\)": lambda: adv.gdpo_token(
        A, WIDE[..., None]
    ),
    "gate_rewards: by must be one of 'a', 'b'; got 'c'": lambda: adv.gate_rewards(
        AB, by="c", threshold=1.0
    ),
    r"gdpo: gate\[0\] must be one of 'a', 'b'; got 'd'": lambda: adv.gdpo(AB, gate=("d", 0.5)),
    "gate_rewards: components must not hold 'a'": lambda: adv.gate_rewards(
        AB, by="a", threshold=1.0, components=("a",)
    ),
    "gate_rewards: by='a' has no effect without a reward": lambda: adv.gate_rewards(
        A, by="a", threshold=1.0
    ),
    r"gdpo: gate=\('a', 1.0\) has no effect without another": lambda: adv.gdpo(A, gate=("a", 1.0)),
    r"verpo: rewards must have shape \(2, 3\); got \(2, 2\)": lambda: adv.verpo(
        REWARDS[:, :2], test_passes=PASSES
    ),
    r"verpo: test_where must have shape \(2, 5\)": lambda: adv.verpo(
        REWARDS, test_passes=PASSES, test_where=WHERE
    ),
    "verpo: turn_weight must not be negative": lambda: adv.verpo(
        REWARDS, test_passes=PASSES, turn_weight=-1.0
    ),
    r"verpo: gamma must be in \[0, 1\]": lambda: adv.verpo(REWARDS, test_passes=PASSES, gamma=1.5),
    "density_weights: sigma must be above 0": lambda: adv.density_weights(THREE, sigma=0.0),
    r"pass_rates \(3,\), test_where \(2,\)": lambda: adv.density_weights(
        THREE, test_where=jnp.ones(2, bool)
    ),
    # shrinkage
    r"shrinkage_baseline: prior must .*\(2,\); got \(2, 3\)": lambda: adv.shrinkage_baseline(
        REWARDS, prior=REWARDS
    ),
    r"shrinkage_baseline: .*rewards \(2, 3\), where \(2, 4\)": lambda: adv.shrinkage_baseline(
        REWARDS, prior=TWO, where=WIDE
    ),
    "shrinkage_baseline: var must be one of 'prior', 'sample'": lambda: adv.shrinkage_baseline(
        REWARDS, prior=TWO, var="mean"
    ),
    r"v05_baseline: prior must .*\(2,\); got \(2, 3\)": lambda: adv.v05_baseline(
        REWARDS, prior=REWARDS
    ),
    r"v05_baseline: .*rewards \(2, 3\), where \(2, 4\)": lambda: adv.v05_baseline(
        REWARDS, prior=TWO, where=WIDE
    ),
    "v05_baseline: var must be one of 'prior', 'sample'": lambda: adv.v05_baseline(
        REWARDS, prior=TWO, var="mean"
    ),
    "v05_baseline: eps=0.1 has no effect with scale='none'": lambda: adv.v05_baseline(
        REWARDS, prior=TWO, eps=0.1
    ),
    "v05_baseline: scale must be one of 'none', 'group'": lambda: adv.v05_baseline(
        REWARDS, prior=TWO, scale="batch"
    ),
    "v05_baseline: ddof must be one of 0, 1; got 2": lambda: adv.v05_baseline(
        REWARDS, prior=TWO, scale="group", ddof=2
    ),
    "osla_continue: most must not be below least; got 2 and 4": lambda: adv.osla_continue(
        TWO, IDS, prior=TWO, most=2
    ),
    "osla_continue: cost must not be negative": lambda: adv.osla_continue(
        TWO, IDS, prior=TWO, cost=-1.0
    ),
    r"osla_continue: .*mean \(3,\), count \(2,\)": lambda: adv.osla_continue(
        THREE, IDS, prior=THREE
    ),
    # single_rollout
    "spo_tracker: low=0.8 has no effect with rho=0.875": lambda: adv.spo_tracker(
        num_prompts=2, low=0.8
    ),
    r"spo_tracker: rho must be in \[0, 1\)": lambda: adv.spo_tracker(num_prompts=2, rho=1.0),
    "spo_tracker: num_prompts must be an integer of 1 or mo": lambda: adv.spo_tracker(
        num_prompts=0
    ),
    "spo_tracker: prior must be a pair": lambda: adv.spo_tracker(num_prompts=2, prior=0.5),
    r"spo_tracker: prompt_ids must have shape \(2,\)": lambda: SPO.update(
        REWARDS, SPO.init(), prompt_ids=jnp.arange(3)
    ),
    r"mssr_tracker: prior\[1\] must be above 0": lambda: adv.mssr_tracker(
        num_prompts=2, prior=(1.0, 0.0)
    ),
    "mssr_tracker: window must be an integer of 1 or more": lambda: adv.mssr_tracker(
        num_prompts=2, window=0
    ),
    "mssr_tracker: rule must be one of": lambda: adv.mssr_tracker(num_prompts=2, rule="both"),
    "spo: ddof must be one of 0, 1": lambda: adv.spo(REWARDS, TWO, ddof=2),
    r"spo: values must have shape \(2,\); got \(2, 3\)": lambda: adv.spo(REWARDS, REWARDS),
    # tracker
    r"beta_tracker_update: prompt_ids must have shape \(2,\)": lambda: adv.beta_tracker_update(
        TRACKER, jnp.array([0]), REWARDS, 0.9
    ),
    r"beta_tracker_update: rho must have shape \(2,\)": lambda: adv.beta_tracker_update(
        TRACKER, IDS, REWARDS, THREE
    ),
    "beta_tracker_update: rewards must have 2 axes": lambda: adv.beta_tracker_update(
        TRACKER, IDS, THREE, 0.9
    ),
    r"beta_tracker_init: rho_min must be in \[0, 1\); got 1": lambda: adv.beta_tracker_init(
        TWO, 8, rho_min=1.0
    ),
    r"beta_tracker_init: .*successes \(2,\), samples \(3,\)": lambda: adv.beta_tracker_init(
        TWO, jnp.arange(3)
    ),
    "beta_tracker_init: smoothing must not be negative": lambda: adv.beta_tracker_init(
        TWO, 8, smoothing=-1.0
    ),
    "kl_forgetting: low must not be above high": lambda: adv.kl_forgetting(TWO, low=0.9, high=0.8),
    "kl_forgetting: half_shift must be above 0": lambda: adv.kl_forgetting(TWO, half_shift=0.0),
    "window_kl_discount: rule must be one of": lambda: adv.window_kl_discount(TWO, rule="linear"),
    "window_kl_discount: kl_window must have 1 axis": lambda: adv.window_kl_discount(
        jnp.float32(0.1)
    ),
    "uncertainty_sampling_weights: explore must not be neg": lambda: (
        adv.uncertainty_sampling_weights(TWO, explore=-0.1)
    ),
    # turns
    "trloo: rewards must have at least 2 axes": lambda: adv.trloo(THREE),
    r"trloo: where must have shape \(2, 3\)": lambda: adv.trloo(TOKENS, where=WIDE),
    r"trloo: .*rewards \(2, 3, 4\), turn_where \(2, 3\)": lambda: adv.trloo(
        TOKENS, turn_where=WHERE
    ),
    "trloo: singleton must be one of 'zero', 'raw'": lambda: adv.trloo(TOKENS, singleton="keep"),
    r"turn_returns: gamma must be in \[0, 1\]": lambda: adv.turn_returns(TOKENS, gamma=1.5),
    r"trloo: gamma must be in \[0, 1\]": lambda: adv.trloo(TOKENS, gamma=1.5),
    r"mc_turns: gamma must be in \[0, 1\]": lambda: adv.mc_turns(TOKENS, gamma=1.5),
    r"turn_grpo: gamma must be in \[0, 1\]": lambda: adv.turn_grpo(TOKENS, gamma=1.5),
    "turn_grpo: eps=0.1 has no effect": lambda: adv.turn_grpo(TOKENS, scale="none", eps=0.1),
    r"ui_s1: gamma must be in \[0, 1\]": lambda: adv.ui_s1(TOKENS, matches=MASK, gamma=1.5),
    "ui_s1: singleton must be one of": lambda: adv.ui_s1(TOKENS, matches=MASK, singleton="keep"),
    r"gigpo: gamma must be in \[0, 1\]": lambda: adv.gigpo(REWARDS, **STATES, gamma=1.5),
    "gigpo: eps=0.1 has no effect": lambda: adv.gigpo(REWARDS, **STATES, scale="none", eps=0.1),
    r"gigpo: .*turn_rewards \(2, 3, 4\), turn_where \(2, 3\)": lambda: adv.gigpo(
        REWARDS, **STATES, turn_where=WHERE
    ),
    r"hgpo: gamma must be in \[0, 1\]": lambda: adv.hgpo(REWARDS, **STATES, gamma=1.5),
    "two_level: turn_rewards must have at least 2 axes": lambda: adv.two_level(
        REWARDS, turn_rewards=THREE
    ),
    "oprl: beta must be above 0": lambda: adv.oprl(REWARDS, **PRM, beta=0.0),
    "prime: beta must be above 0": lambda: adv.prime(REWARDS, **TOKEN_PRM, beta=0.0),
    "prime: alpha must not be negative": lambda: adv.prime(REWARDS, **TOKEN_PRM, alpha=-1.0),
    r"prime: rewards must have shape \(2, 3\)": lambda: adv.prime(TWO, **TOKEN_PRM),
    "oprl: alpha must not be negative": lambda: adv.oprl(REWARDS, **PRM, alpha=-1.0),
    r"turn_gae: lam must be in \[0, 1\]": lambda: adv.turn_gae(
        TOKENS, TOKENS, MASK, turn_ids=MASK.astype(int), lam=1.5
    ),
    # trees
    r"sibling_advantages: parents must have 1 axis": lambda: adv.sibling_advantages(TWO, REWARDS),
    r"portool: gamma must be in \[0, 1\]": lambda: adv.portool(REWARDS, **FORKS, gamma=1.5),
    "portool: scale must be one of 'std', None; got 'none'. Did you mean None": lambda: adv.portool(
        REWARDS, **FORKS, scale="none"
    ),
    "spo_tree: scale must be one of": lambda: adv.spo_tree(
        REWARDS, FORKS["node_ids"], MASK, scale="mean"
    ),
    "branch_advantages: bound must be above 0": lambda: adv.branch_advantages(
        REWARDS, FORKS["node_ids"], MASK, bound=0.0
    ),
    r"step_rewards: .*turn_formats \(2, 3\)": lambda: adv.step_rewards(
        REWARDS, FORKS["node_ids"], turn_where=MASK, turn_formats=REWARDS
    ),
    r"set_advantages: .* scores \(2, 3\), set_where \(2, 4\)": lambda: adv.set_advantages(
        REWARDS, MASK.astype(int), group_size=4, set_where=WIDE
    ),
    r"turns_to_tokens: .* at least one turn .*\(2, 3, 4\); got \(3, 4\)": lambda: (
        adv.turns_to_tokens(TOKENS[0], MASK, turn_ids=MASK.astype(int))
    ),
    r"turns_to_tokens: .* at least one turn .*\(2, 3, 4\); got \(2, 3, 0\)": lambda: (
        adv.turns_to_tokens(TOKENS[..., :0], MASK, turn_ids=MASK.astype(int))
    ),
}

BAD_TYPES = {
    "center: x must be floating point": lambda: adv.center(INTS),
    "shared_prefix_advantages: advantages must be flo": lambda: adv.shared_prefix_advantages(
        INTS, MASK.astype(int), MASK
    ),
    "set_advantages: scores must be floating": lambda: adv.set_advantages(
        INTS, MASK.astype(int), group_size=4
    ),
    "node_rewards: parents must hold integers": lambda: adv.node_rewards(
        THREE, jnp.zeros(3, int), THREE, max_depth=1
    ),
    "depth_advantages: tree_ids must hold integers": lambda: adv.depth_advantages(
        THREE, jnp.zeros(3, int), THREE, trees=1, max_depth=1
    ),
    "remax: greedy_rewards must be floating point": lambda: adv.remax(REWARDS, greedy_rewards=IDS),
    "remax: where must be bool": lambda: adv.remax(REWARDS, greedy_rewards=TWO, where=REWARDS),
    "opo: mask must be bool": lambda: adv.opo(REWARDS, TOKENS),
    "opob: grad_sq_norms must be floating point": lambda: adv.opob(REWARDS, REWARDS, INTS),
    "opob: grad_sq_norms must be an array; got NoneType": lambda: adv.opob(REWARDS, REWARDS, None),
    "vcpo_advantage: old_logp must be an array; got NoneType": lambda: adv.vcpo_advantage(
        REWARDS, **VCPO | {"old_logp": None}
    ),
    "mc_grpo: rewards must be floating point; got int32": lambda: adv.mc_grpo(INTS),
    "scale_scores: score_std must be an array; got NoneType": lambda: adv.scale_scores(
        REWARDS, score_std=None
    ),
    "update_moments: x must be floating point": lambda: adv.update_moments(
        adv.score_scaler().init(), INTS
    ),
    "reinforce_pp_baseline: mask must be bool": lambda: adv.reinforce_pp_baseline(REWARDS, TOKENS),
    "reinforce_pp: mask must be bool": lambda: adv.reinforce_pp(REWARDS, TOKENS),
    "informative_share: where must be bool": lambda: adv.informative_share(REWARDS, where=REWARDS),
    "grpo_split: steered must be bool": lambda: adv.grpo_split(REWARDS, steered=REWARDS),
    "grpo_split: steered must be an array; got NoneType": lambda: adv.grpo_split(
        REWARDS, steered=None
    ),
    "grpo_split: rewards must be floating": lambda: adv.grpo_split(INTS, steered=WHERE),
    "hbpo: budgets must be floating point": lambda: adv.hbpo(REWARDS, budgets=INTS),
    "hbpo: budgets must be an array; got NoneType": lambda: adv.hbpo(REWARDS, budgets=None),
    "ace: wrong must be bool": lambda: adv.ace(
        REWARDS, MASK, old_logp=TOKENS, ref_logp=TOKENS, wrong=REWARDS
    ),
    "entropy_shaping: mask must be bool": lambda: adv.entropy_shaping(
        REWARDS, TOKENS, old_entropy=TOKENS
    ),
    "dcpo_distribution: policy_entropy must be an array": lambda: adv.dcpo_distribution(
        REWARDS, MASK, **DCPO | {"policy_entropy": None}
    ),
    "otb_token: mask must be bool": lambda: adv.otb_token(TOKENS, TOKENS, **OTB),
    "sum_pi_squared: logits must be floating point": lambda: adv.sum_pi_squared(INTS),
    "passk_training: rewards must be floating point": lambda: adv.passk_training(INTS),
    "passk_training: k must be an integer; got 2.0": lambda: adv.passk_training(REWARDS, k=2.0),
    "pkpo: rewards must be floating point": lambda: adv.pkpo(INTS),
    "pkpo: k must be an integer; got 2.0": lambda: adv.pkpo(REWARDS, k=2.0),
    "log_comb: n must be an array; got str": lambda: adv.log_comb("4", 2),
    "maxrl: rewards must be floating point": lambda: adv.maxrl(INTS),
    "maclaurin: order must be an integer; got 2.5": lambda: adv.maclaurin(REWARDS, order=2.5),
    "smooth_standardization: where must be bool": lambda: SMOOTH.update(
        REWARDS, SMOOTH.init(), prompt_ids=IDS, where=TWO
    ),
    "_VisitsUpdate.* 'prompt_ids'": lambda: SMOOTH.update(REWARDS, SMOOTH.init()),
    "terminal_rewards: mask must be bool": lambda: adv.terminal_rewards(TWO, REWARDS),
    "gdpo: rewards must map the name of each.*ArrayImpl": lambda: adv.gdpo(REWARDS),
    r"gdpo: rewards\['b'\] must be floating point; got int32": lambda: adv.gdpo(A | {"b": INTS}),
    "gdpo: the weight of 'a' must be a number; got Array": lambda: adv.gdpo(A, weights={"a": TWO}),
    "gdpo: the weight of 'a' must be a number; got 'half'": lambda: adv.gdpo(
        A, weights={"a": "half"}
    ),
    "verpo: test_passes must be bool": lambda: adv.verpo(
        REWARDS, test_passes=PASSES.astype(jnp.float32)
    ),
    "positive_part: error_sq must be floating": lambda: adv.positive_part(TWO, jnp.array(1)),
    "shrinkage_baseline: rewards must be floating point": lambda: adv.shrinkage_baseline(
        INTS, prior=TWO
    ),
    "shrinkage_baseline: prior must be floating point": lambda: adv.shrinkage_baseline(
        REWARDS, prior=IDS
    ),
    "v05_baseline: rewards must be floating point": lambda: adv.v05_baseline(INTS, prior=TWO),
    "v05_baseline: prior must be floating point": lambda: adv.v05_baseline(REWARDS, prior=IDS),
    "_SpoUpdate.* 'prompt_ids'": lambda: SPO.update(REWARDS, SPO.init()),
    "policy_shift": lambda: ADAPTIVE.update(REWARDS, ADAPTIVE.init(), prompt_ids=IDS),
    "spo_tracker: prompt_ids must hold integers": lambda: SPO.update(
        REWARDS, SPO.init(), prompt_ids=TWO
    ),
    "spo: rewards must be floating point": lambda: adv.spo(INTS, TWO),
    "beta_tracker_value: prompt_ids must hold integers": lambda: adv.beta_tracker_value(
        TRACKER, TWO
    ),
    "beta_tracker_update: where must be bool": lambda: adv.beta_tracker_update(
        TRACKER, IDS, REWARDS, 0.9, where=REWARDS
    ),
    "turn_returns: turn_where must be bool": lambda: adv.turn_returns(TOKENS, turn_where=TOKENS),
    "turns_to_tokens: turn_ids must hold integers": lambda: adv.turns_to_tokens(
        TOKENS, MASK, turn_ids=TOKENS
    ),
}


@for_each("message", BAD_VALUES)
def test_a_bad_value(message):
    with pytest.raises(ValueError, match=message):
        BAD_VALUES[message]()


@for_each("message", BAD_TYPES)
def test_a_bad_type(message):
    with pytest.raises(TypeError, match=message):
        BAD_TYPES[message]()


OPTIONS = {
    "grpo: eps": lambda x: adv.grpo(REWARDS, eps=x),
    "whiten: eps": lambda x: adv.whiten(REWARDS, WHERE, eps=x),
    "clip: bound": lambda x: adv.clip(REWARDS, bound=x),
    "kl_to_reference: coef": lambda x: regularizers.kl_to_reference(-TWO, -TWO, TWO > 0, coef=x),
    "entropy_bonus: coef": lambda x: regularizers.entropy_bonus(REWARDS, WHERE, coef=x),
    "fixed_length: length": lambda x: aggregate.fixed_length(WHERE, length=x),
    "sequence_sum_norm: length": lambda x: aggregate.sequence_sum_norm(WHERE, length=x),
}
ARRAYS = {
    "grpo: rewards": lambda x: adv.grpo(x),
    "whiten: x": lambda x: adv.whiten(x, WHERE),
    "gae: token_rewards": lambda x: adv.gae(x, REWARDS, WHERE),
    "kl_token: logp": lambda x: regularizers.kl_token(x, -REWARDS, WHERE),
    "token_mean: mask": aggregate.token_mean,
    "informative_groups: rewards": curation.informative_groups,
}


@for_each(
    ("value", "error"),
    [(True, TypeError), (1e30, ValueError), (float("inf"), ValueError), ("1", TypeError)],
)
@for_each("name", OPTIONS)
def test_options(name, value, error):
    with pytest.raises(error, match=f"^{name} must "):
        OPTIONS[name](value)


@for_each("dtype", [object, str])
@for_each("name", ARRAYS)
def test_arrays_without_numbers(name, dtype):
    with pytest.raises(TypeError, match=f"^{name} must hold numbers; got an array of"):
        ARRAYS[name](np.ones((2, 3)).astype(dtype))
