"""Bad options and arrays raise one sentence that names function and argument."""

import jax
import jax.numpy as jnp
import pytest
from rows import for_each

import jaxrl_llm.curation as cur

REWARDS, WHERE, SCORES = jnp.ones((2, 3)), jnp.ones((2, 3), bool), jnp.ones((2, 4))
TOKENS, MASK = jnp.ones((2, 3, 4)), jnp.ones((2, 3, 4), bool)
TWO, THREE, INTS, KEY = jnp.ones(2), jnp.ones(3), jnp.ones(3, int), jax.random.key(0)
DARS, ENTROPY = {"rollouts": 8, "max_rollouts": 8}, {"old_entropy": TOKENS}
CAPO = (TOKENS, jnp.ones((2, 3, 5)), jnp.zeros((2, 3), int), REWARDS, WHERE)
SUMS = {"old_logp": TOKENS, "sum_pi_sq": TOKENS, "sum_pi_cubed": TOKENS, "hidden_sq": 1.0}

BAD_VALUES = {
    # budgets
    "max_rollouts must be at least rollouts; got 4 and 8": lambda: cur.dars_extra_rollouts(
        TWO, rollouts=8, max_rollouts=4
    ),
    "schedule must be one of 'equal', 'hardness'": lambda: cur.dars_extra_rollouts(
        TWO, **DARS, schedule="hw"
    ),
    "cumulative_advantage: rollouts must be above 0": lambda: cur.cumulative_advantage(
        TWO, rollouts=0
    ),
    "greedy_allocate: gains must have 2 axes": lambda: cur.greedy_allocate(THREE, total=1),
    "greedy_allocate: start=1 .* must be within": lambda: cur.greedy_allocate(
        REWARDS, total=1, start=1
    ),
    "greedy_allocate: start=4 .* must be within": lambda: cur.greedy_allocate(
        REWARDS, total=99, start=4
    ),
    "greedy_allocate: start=-1 .* must be within": lambda: cur.greedy_allocate(
        REWARDS, total=9, start=-1
    ),
    r"greedy_allocate: start must have shape \(2,\)": lambda: cur.greedy_allocate(
        REWARDS, total=3, start=INTS
    ),
    r"rollout_priority: level must be in \(0, 1\); got 0": lambda: cur.rollout_priority(
        THREE, INTS, 3, level=0.0
    ),
    "dars_keep: upper must be in": lambda: cur.dars_keep(REWARDS, upper=0.0),
    "best_allocate: low=3 for each of 2 prompts must be within": lambda: cur.best_allocate(
        REWARDS, total=9, low=3
    ),
    "best_allocate: low=2 .* and total=3": lambda: cur.best_allocate(REWARDS, total=3, low=2),
    "best_allocate: no allocation of total=4": lambda: cur.best_allocate(
        REWARDS * jnp.nan, total=4
    ),
    "sqrt_allocation: these must have the same shape": lambda: cur.sqrt_allocation(
        TWO, THREE, mean_rollouts=4.0
    ),
    "round_to_budget: low must be from 0 to high; got 5 and 2": lambda: cur.round_to_budget(
        THREE, total=9, low=5, high=2
    ),
    "round_to_budget: low=4 for each of 3 prompts exceeds total=9": lambda: cur.round_to_budget(
        THREE, total=9, low=4, high=5
    ),
    "round_to_budget: .* rollouts must be finite": lambda: cur.round_to_budget(
        THREE * jnp.inf, total=9, low=1, high=5
    ),
    "xrpo_extra_rollouts: max_rollouts must be an integer above 0": lambda: cur.xrpo_extra_rollouts(
        REWARDS, budget=3, max_rollouts=0
    ),
    # curvature
    r"capo_scores: hidden must have shape \(2, 3, 4\)": lambda: cur.capo_scores(
        TOKENS[:1], *CAPO[1:], learning_rate=0.1
    ),
    "fisher must be one of 'sample', 'full'": lambda: cur.capo_scores(
        *CAPO, learning_rate=0.1, fisher="exact"
    ),
    "eps has no effect without moments": lambda: cur.capo_scores(
        *CAPO, learning_rate=0.1, eps=1e-6
    ),
    "betas has no effect without moments": lambda: cur.capo_scores(
        *CAPO, learning_rate=0.1, betas=(0.8, 0.9)
    ),
    "support has no effect without moments": lambda: cur.capo_scores(
        *CAPO, learning_rate=0.1, support=jnp.zeros((2, 3, 5), int)
    ),
    "capo_mask: tau_f must be above 0": lambda: cur.capo_mask(
        cur.CapoScores(REWARDS, REWARDS), WHERE, tau_h=1.0, tau_f=0.0
    ),
    "capo_selection: these must have the same shape: old_logp": lambda: cur.capo_selection(
        REWARDS, MASK, **SUMS | {"old_logp": TOKENS[0]}, learning_rate=0.1
    ),
    "capo_selection: learning_rate must not be negative": lambda: cur.capo_selection(
        REWARDS, MASK, **SUMS, learning_rate=-1.0
    ),
    "capo_selection: hidden_sq must not be negative": lambda: cur.capo_selection(
        REWARDS, MASK, **SUMS | {"hidden_sq": -1.0}, learning_rate=0.1
    ),
    # groups
    r"rewards \(2, 3\), metric \(3,\)": lambda: cur.informative_groups(REWARDS, metric=THREE),
    "name must be one of 'a', 'b'; got None": lambda: cur.informative_groups(
        REWARDS, metric={"b": REWARDS, "a": REWARDS}
    ),
    "name='a' has no effect": lambda: cur.informative_groups(REWARDS, metric=REWARDS, name="a"),
    "compact_groups: n_target must be from 1 to 3; got 0": lambda: cur.compact_groups(
        THREE, THREE > 0, n_target=0
    ),
    "compact_groups: n_target must be from 1 to 3; got 4": lambda: cur.compact_groups(
        THREE, THREE > 0, n_target=4
    ),
    r"the 3 rows of keep; got shape \(2,\)": lambda: cur.compact_groups(
        {"x": TWO}, THREE > 0, n_target=1
    ),
    r"truncated must have shape \(2, 3\); got \(3,\)": lambda: cur.truncation_mask(
        REWARDS, MASK, truncated=THREE > 0
    ),
    "prs_keep_prob: width must be above 0": lambda: cur.prs_keep_prob(REWARDS, WHERE, width=0.0),
    # mixing
    r"mix_source_mask: probability must be in \[0, 1\]; got 1.5": lambda: cur.mix_source_mask(
        KEY, prompts=5, probability=1.5
    ),
    r"mix_source_mask: probability must be in \[0, 1\]; got -0.5": lambda: cur.mix_source_mask(
        KEY, prompts=5, probability=-0.5
    ),
    "comprehension_score: these must have the same shape": lambda: cur.comprehension_score(
        REWARDS, WHERE[:1]
    ),
    "ampo_select: k_max must be from 1 to 3; got 0": lambda: cur.ampo_select(
        REWARDS, SCORES, k_max=0
    ),
    "ampo_select: k_max must be from 1 to 3; got 4": lambda: cur.ampo_select(
        REWARDS, SCORES, k_max=4
    ),
    "hybrid' alone draws; this call needs a key": lambda: cur.ampo_select(
        REWARDS, SCORES, mode="hybrid"
    ),
    "has no use for a key, mode='adaptive'": lambda: cur.ampo_select(REWARDS, SCORES, key=KEY),
    r"ampo_select: scores must have shape \(2, 4\)": lambda: cur.ampo_select(REWARDS, SCORES[:1]),
    "mode must be one of 'adaptive', 'hybrid', 'always'": lambda: cur.ampo_select(
        REWARDS, SCORES, mode="adapt"
    ),
    "probability has no effect with mode='always'": lambda: cur.ampo_select(
        REWARDS, SCORES, mode="always", probability=0.3
    ),
    r"ampo_select: probability must be in \[0, 1\]; got 3": lambda: cur.ampo_select(
        REWARDS, SCORES, mode="hybrid", key=KEY, probability=3.0
    ),
    "icpo_merge: these must have the same shape": lambda: cur.icpo_merge(
        REWARDS, steered=THREE > 0, key=KEY
    ),
    # schedules
    "training_progress: steps must be above 0": lambda: cur.training_progress(1, steps=0),
    "icpo_bonus: beta must not be negative": lambda: cur.icpo_bonus(0, beta=-1.0),
    "icpo_bonus: anneal must be above 0": lambda: cur.icpo_bonus(0, anneal=0),
    "sqrt_lr: old_size must be above 0": lambda: cur.sqrt_lr(1e-6, old_size=0, new_size=1),
    # subsets
    "max_variance_subset: n must not be negative": lambda: cur.max_variance_subset(THREE, -1),
    r"max_variance_subset: .*x \(3,\), where \(2,\)": lambda: cur.max_variance_subset(
        THREE, 1, where=TWO > 0
    ),
    r"n must be one number or have shape \(2, 1\).* got \(3,\)": lambda: cur.max_variance_subset(
        REWARDS, INTS
    ),
    r"n must be one number or have shape \(2, 1\).* got \(1,\)": lambda: cur.max_variance_subset(
        REWARDS, INTS[:1]
    ),
    r"fraction must be in \[0, 1\]; got 1.5": lambda: cur.top_fraction_token_mask(
        REWARDS, WHERE, 1.5
    ),
    "d3s_selection: scope must be one of 'batch', 'group'": lambda: cur.d3s_selection(
        REWARDS, MASK, **ENTROPY, scope="prompt"
    ),
    r"rollouts must be in \[0, 1\]; got 2": lambda: cur.d3s_selection(
        REWARDS, MASK, **ENTROPY, rollouts=(0.5, 2)
    ),
    "d3s_selection: these must have the same shape: old_entropy": lambda: cur.d3s_selection(
        REWARDS, MASK, old_entropy=TOKENS[:1]
    ),
    "mpt_advantages: advantages must have the shape of logp": lambda: cur.mpt_advantages(
        TWO, MASK, rewards=REWARDS, old_logp=TOKENS, old_entropy=TOKENS
    ),
}

BAD_TYPES = {
    "first_bad_step: scores must be floating point": lambda: cur.first_bad_step(INTS),
    "align_calls: where must be a bool array": lambda: cur.align_calls(None, KEY, count=2),
    "comprehension_score: answer_mask must be bool": lambda: cur.comprehension_score(TWO, TWO),
    "dars_extra_rollouts: accuracy must be floating point": lambda: cur.dars_extra_rollouts(
        INTS, **DARS
    ),
    "rollout_priority: count must hold integers": lambda: cur.rollout_priority(THREE, THREE, 3),
    "capo_scores: actions must hold integers": lambda: cur.capo_scores(
        *CAPO[:2], REWARDS, *CAPO[3:], learning_rate=0.1
    ),
    "capo_selection: old_logp must be an array; got NoneType": lambda: cur.capo_selection(
        REWARDS, MASK, **SUMS | {"old_logp": None}, learning_rate=0.1
    ),
    "informative_groups: rewards must be floating point": lambda: cur.informative_groups(INTS),
    "compact_groups: keep must be bool": lambda: cur.compact_groups(THREE, THREE, n_target=1),
    "truncated must be bool": lambda: cur.truncation_mask(REWARDS, MASK, truncated=REWARDS),
    "prs_keep_prob: correct must be bool": lambda: cur.prs_keep_prob(REWARDS, REWARDS),
    "prs_where: coverage must be an array; got NoneType": lambda: cur.prs_where(
        REWARDS, coverage=None, key=KEY
    ),
    "icpo_merge: steered must be an array; got NoneType": lambda: cur.icpo_merge(
        REWARDS, steered=None, key=KEY
    ),
    "icpo_merge: steered must be bool": lambda: cur.icpo_merge(REWARDS, steered=REWARDS, key=KEY),
    "icpo_bonus has no option 'anneall'": lambda: cur.scheduled(cur.icpo_bonus, anneall=3),
    "max_variance_subset: n must hold integers": lambda: cur.max_variance_subset(THREE, 1.5),
    "d3s_selection: old_entropy must be an array": lambda: cur.d3s_selection(
        REWARDS, MASK, old_entropy=None
    ),
    "top_fraction_token_mask: mask must be bool": lambda: cur.top_fraction_token_mask(
        REWARDS, REWARDS, 0.5
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
