"""Presets pass the battery, and every check of it fails on a recipe made wrong for it.

    microbatches, devices   their sum is that of the whole batch
    junk, permutation       what is masked is not read, and no order of prompts or members counts
    degenerate_groups       equal rewards, one rollout and none give finite numbers
    on_policy               the gradient is that of the policy; jit and precision change nothing
    checkpoint              a restart goes on with the same numbers


Checks of arrays run for every preset; those that compile a model or a sampler, for presets that
together have every feature of a train step.
"""

import dataclasses
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxrl_llm as jr
from jaxrl_llm import train
from jaxrl_llm.models import AttentionContext
from jaxrl_llm.recipes import PRESETS, Computed, Recipe, catalog
from jaxrl_llm.recipes.inputs import EXTRAS
from jaxrl_llm.testing import (
    CHECKS,
    array_checks,
    assert_recipe_ok,
    cases,
    model_checks,
    train_checks,
)

ZERO = jr.core.masking.zero_masked
# With as many rollouts in a set as a group of the case has, there is nothing to compare.
SMALL = {
    "passk_training": jr.recipes.passk_training(k=2),
    "polychromic": jr.recipes.polychromic(size=2),
}


@functools.cache
def preset(name: str) -> Recipe:
    return SMALL.get(name) or catalog.preset(name, length=cases.T, num_prompts=cases.P)


def plain(**changes) -> Recipe:
    """A recipe of one's own; a plain function in the slot of the advantage has no state."""
    advantage = changes.pop("advantage", jr.advantages.dr_grpo)
    stateless = advantage if isinstance(advantage, jr.Transform) else jr.stateless(advantage)
    slots = {"name": "plain", "advantage": stateless, "surrogate": jr.surrogates.ppo_clip}
    return Recipe(**{**slots, **changes})


# These share the programs of one compilation. Each of the other checks of arrays compiles the
# functions once more; the costly ones compile a model and a sampler.
TOGETHER = ("degenerate_groups", "junk", "permutation")
COSTLY = ("train_step", "rollouts", "layouts")
# What these find in a function alone, other checks find in arrays ("devices", "microbatches",
# "on_policy"), and the loop trains every preset: they run for presets that together have every
# combination of so many features.
SAMPLED = {"train_step": 1, "rollouts": 1, "layouts": 2, "checkpoint": 2, "jit": 2}
APART = [check for check in CHECKS if check not in (*TOGETHER, *COSTLY)]

PARTS = 40


@pytest.mark.of_many
@pytest.mark.parametrize("part", range(PARTS))
def test_presets(part, subtests):
    for name in sorted(PRESETS)[part::PARTS]:
        with subtests.test(name):
            assert_recipe_ok(preset(name), only=TOGETHER)


@pytest.mark.slow
@pytest.mark.of_many
@pytest.mark.parametrize("name", PRESETS)
def test_preset_apart(name):
    assert_recipe_ok(preset(name), only=[check for check in APART if check not in SAMPLED])


def features(recipe: Recipe) -> frozenset:
    """What a train step computes, passes on and stores for a recipe, whatever its functions do."""
    # Of these the check's step reads nothing, or what is listed below.
    unread = ["name", "collector", "computed", "inputs", "epochs", "minibatches", "paper"]
    slots = {x.name: getattr(recipe, x.name) for x in dataclasses.fields(recipe)}
    second = recipe.second_model

    def seen(value):
        return value if isinstance(value, str | int | float) else value not in (None, ())

    found = {name: seen(value) for name, value in slots.items() if name not in unread}
    for field in ("old_logp", "ref_logp", "behavior_logp"):  # others are given
        found[field] = field in recipe.required_fields
    found |= {
        "likelihood": type(recipe.likelihood),
        "second model": (type(second), second and second.heads),
        "draws": recipe.draws,
        "reads the last KL": recipe.reads_last_kl,
        "has a state": bool(jax.tree.leaves(recipe.init())),
    }
    sources = frozenset(("computed from", entry.source) for entry in recipe.computed)
    return frozenset(found.items()) | sources


@functools.cache
def with_every_combination(size: int) -> list[str]:
    """Presets that together have every ``size`` features that any preset has together.

    Not a parameter: all presets together take seconds to make, in every process of a run.
    """
    left = {
        name: set(map(frozenset, itertools.combinations(features(preset(name)), size)))
        for name in sorted(PRESETS)
    }
    chosen = []
    while best := left[name := max(left, key=lambda name: len(left[name]))]:
        chosen.append(name)
        left = {name: found - best for name, found in left.items()}
    return chosen


@pytest.mark.slow
@pytest.mark.of_many
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("check", SAMPLED)
def test_presets_with_every_combination_of_features(check, part):
    for name in with_every_combination(SAMPLED[check])[part::8]:
        assert_recipe_ok(preset(name), only=[check])


# Slots that no preset fills.


def truncated(old_logp, behavior_logp, mask, *, cap=2.0, veto=4.0):
    """Truncated importance weights; a token far from its sampler is rejected."""
    ratio = jnp.exp(jr.core.masking.safe_log_ratio(old_logp, behavior_logp, mask))
    return jnp.minimum(ratio, cap), mask & (ratio < veto)


def informative(rewards, *, where):
    return jnp.broadcast_to(~jr.core.stats.group_is_constant(rewards, where), rewards.shape)


def baseline(*, decay=0.9, count_dtype=jnp.int32):
    """A running mean of all rewards, and how many steps it saw."""

    def update(rewards, state, *, where, **context):
        mean, steps = state
        now = jr.core.masking.masked_mean(rewards, where)
        return rewards - mean, (decay * mean + (1 - decay) * now, (steps + 1).astype(count_dtype))

    return jr.Transform(lambda: (jnp.float32(0.5), jnp.int32(0)), update)


COMPOSED = {
    "corrected": plain(
        name="corrected",
        correction=truncated,
        regularizers=(
            jr.bind(jr.regularizers.kl_to_reference, estimator="k1", coef=0.1),
            jr.bind(jr.regularizers.entropy_bonus, coef=0.01),
        ),
    ),
    "curated": plain(
        name="curated",
        curation=jr.stateless(informative),
        advantage=jr.advantages.reinforce_pp_baseline,
        surrogate=jr.surrogates.gspo_token,
        weights=jr.aggregate.sequence_mean,
    ),
    "tracked": plain(name="tracked", advantage=baseline(), weights=jr.aggregate.sequence_sum),
    "texts": plain(
        name="texts",
        surrogate=jr.surrogates.gspo,
        weights=jr.aggregate.sequence_mean,
        regularizers=(jr.bind(jr.regularizers.kl_to_reference, estimator="k1", coef=0.1),),
        text_coef=0.5,
    ),
}


# A plain one, one with a critic, one with statistics of the vocabulary, one with a statistic that
# reads what is computed from the batch, and those composed above, which have the other slots.
WHOLE = {
    **{name: preset(name) for name in ("grpo", "ppo_max", "rover")},
    "of the batch": jr.recipes.otr(samples=16),
    **COMPOSED,
}


@pytest.mark.of_many
@pytest.mark.parametrize("name", WHOLE)
def test_recipe(name, subtests):
    for check in (*TOGETHER, *APART):
        with subtests.test(check):
            assert_recipe_ok(WHOLE[name], only=[check])


@pytest.mark.slow
@pytest.mark.of_many
@pytest.mark.parametrize("check", COSTLY)
@pytest.mark.parametrize("name", ["of the batch", "corrected"])
def test_recipe_with_a_model(name, check):
    assert_recipe_ok(WHOLE[name], only=[check])


@pytest.mark.slow
def test_a_train_step_takes_every_slot():
    everything = COMPOSED["corrected"].replace(
        advantage=baseline(), curation=jr.stateless(informative)
    )
    assert_recipe_ok(everything, only=["train_step"])


@pytest.mark.slow
def test_a_train_step_otherwise(monkeypatch):
    sizes = ({"fsdp": 8}, {"tensor": 8}, {"data": 4, "fsdp": 2}, {"data": 2, "context": 4})
    train_checks.check_train_step(preset("grpo"), sizes=sizes)
    train_checks.check_train_step(preset("grpo"), rows=False)
    monkeypatch.setattr(train_checks, "meshes", lambda sizes: [])
    train_checks.check_train_step(preset("grpo"), microbatches=4)


def test_a_train_step_on_one_device(monkeypatch):
    monkeypatch.setattr(train_checks, "meshes", lambda sizes: [])
    train_checks.check_train_step(plain(), rows=False)
    with pytest.raises(AssertionError, match="the update in 2 microbatches"):
        train_checks.check_train_step(plain(surrogate=part_mean), rows=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["the mask id is drawn", "the prompt is shown"])
def test_a_wrong_score_of_a_denoiser_fails(name, monkeypatch):
    monkeypatch.setattr(train_checks, "meshes", lambda sizes: [])
    recipe = jr.recipes.diffu_grpo(p=0.5)
    if name == "the mask id is drawn":
        monkeypatch.setattr(train.models.denoising, "_without", lambda *args: args[5:7])
    else:
        of_draw = train.DenoisingScorer._of_draw

        def shown(self, params, batch, masked, prompt):
            return of_draw(self, params, batch, masked, jnp.zeros_like(prompt))

        monkeypatch.setattr(train.DenoisingScorer, "_of_draw", shown)
    with pytest.raises(AssertionError, match="the update in 4 microbatches"):
        train_checks.check_train_step(recipe)


def max_logp(logits, targets):
    return jnp.max(jax.nn.log_softmax(logits), axis=-1)


def by_gap(logp, old_logp, advantages, mask, *, gap):
    """The loss of PPO by a number of its own, per token or not."""
    loss = jr.surrogates.ppo_clip(logp, old_logp, advantages, mask)
    gap = gap.reshape(gap.shape + (1,) * (mask.ndim - gap.ndim))
    return loss * jnp.exp(jnp.where(mask, gap, 0.0))


def by_share_of_gap(logp, old_logp, advantages, mask, *, gap):
    return by_gap(logp, old_logp, advantages, mask, gap=gap) / jnp.sum(jnp.where(mask, gap, 0.0))


QUICK_LAWS = ["junk", "microbatches", "permutation"]


@pytest.mark.of_many
@pytest.mark.parametrize("source", ["old_policy", "reference", "teacher"])
def test_statistics_of_ones_own_are_made_up(source):
    computed = (Computed("gap", max_logp, source),)
    assert_recipe_ok(plain(surrogate=by_gap, computed=computed), only=QUICK_LAWS)
    with pytest.raises(AssertionError, match="check_microbatches: recipe 'plain': gradient in 2"):
        assert_recipe_ok(plain(surrogate=by_share_of_gap, computed=computed), only=QUICK_LAWS)


def test_a_statistic_of_ones_own_may_read_an_earlier_one_and_an_input():
    def below(logits, targets, *, first, mine):
        return jnp.where(first, max_logp(logits, targets), mine)

    computed = (
        Computed("gap", below, "teacher"),
        Computed("first", lambda logits, targets: targets > 3, "old_policy"),
    )
    recipe = plain(surrogate=by_gap, computed=computed, inputs=("mine",))
    mine = np.full((cases.P, cases.G, cases.T), 0.5)
    extras = cases.make_case(recipe=recipe, extras={"mine": mine}).batch.extras
    assert extras["first"].dtype == bool and 0 < extras["first"].mean() < 1
    assert extras["gap"].shape == extras["mine"].shape == mine.shape
    assert_recipe_ok(recipe, only=["junk"], extras={"mine": mine})


OWN = {
    "inputs": plain(surrogate=by_gap, inputs=("gap",)),
    "responses": plain(
        surrogate=by_gap,
        computed=(Computed("gap", lambda texts: np.zeros(len(texts)), "responses"),),
    ),
}


@pytest.mark.of_many
@pytest.mark.parametrize("name", OWN)
def test_what_cannot_be_made_up_is_an_argument(name):
    random = np.random.default_rng(0)
    for shape in ((cases.P,), (cases.P, cases.G), (cases.P, cases.G, cases.T)):
        assert_recipe_ok(OWN[name], only=QUICK_LAWS, extras={"gap": random.uniform(size=shape)})
    with pytest.raises(ValueError, match=r"'plain' reads 'gap', .* pass extras=\{'gap': array\}"):
        assert_recipe_ok(OWN[name], only=["junk"])
    with pytest.raises(ValueError, match=r"extras\['gap'\] must have shape \[P=8, ...\]"):
        assert_recipe_ok(OWN[name], only=["junk"], extras={"gap": np.zeros(3)})
    with pytest.raises(ValueError, match=r"has 'gpa', which is not .* it has \['gap'\]"):
        assert_recipe_ok(OWN[name], only=["junk"], extras={"gpa": np.zeros(cases.P)})


@pytest.mark.slow
@pytest.mark.parametrize("check", ["layouts", "checkpoint"])
def test_costly_checks_of_names_of_ones_own(check):
    def weighed(logp, old_logp, advantages, mask, *, gap, mine):
        return by_gap(logp, old_logp, advantages, mask, gap=gap * mine[..., None])

    weighed = jr.core.traits(policy_gradient=False)(weighed)
    computed = (Computed("gap", max_logp, "old_policy"),)
    recipe = plain(surrogate=weighed, computed=computed, inputs=("mine",))
    mine = np.random.default_rng(0).uniform(size=(cases.P, cases.G))
    assert_recipe_ok(recipe, only=[check], extras={"mine": mine})


def test_unknown_check():
    with pytest.raises(ValueError, match="Did you mean 'junk'"):
        assert_recipe_ok(plain(), only=["jnk"])


def test_too_few_devices_warn_and_do_not_fail(monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    with pytest.warns(UserWarning, match="JAX_NUM_CPU_DEVICES=8"):
        array_checks.check_devices(plain())


# Mutants: each is wrong in one way, and the check named for it must say so.


def part_mean(logp, old_logp, advantages, mask):
    loss = jr.surrogates.ppo_clip(logp, old_logp, advantages, mask)
    return loss / jnp.maximum(mask.sum(), 1)


def mesh_mean(mask):
    """A token mean over the tokens of one device, where there are several."""

    def mean(m):
        return m / jnp.maximum(m.sum(), 1)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return mean(mask)
    split = PartitionSpec(("data", "fsdp"))
    return jax.shard_map(mean, in_specs=split, out_specs=split)(mask) / mesh.size


def masked_afterwards(logp, old_logp, advantages, mask):
    loss = -jnp.exp(logp - jax.lax.stop_gradient(old_logp)) * advantages[..., None]
    return loss * mask


def first_is_worth_more(rewards, *, where):
    advantages = jr.advantages.dr_grpo(rewards, where=where)
    return advantages * (1.0 + jnp.arange(rewards.shape[-1]))


def later_prompts_count_more(logp, old_logp, advantages, mask):
    loss = jr.surrogates.ppo_clip(logp, old_logp, advantages, mask)
    return loss * (1.0 + jnp.arange(logp.shape[0]))[:, None, None]


def agrees_with_the_first(rewards, *, similarity, where):
    return ZERO(similarity[..., 0], where)


def agrees_with_the_first_of_each(rewards, *, similarity, where):
    each = similarity.reshape(*rewards.shape, -1, rewards.shape[-1])
    return ZERO(each[..., 0].mean(-1), where)


def flawed_seeds(advantages, *, key, mask):
    return jax.random.bits(key, mask.shape, jnp.uint32)


def drawn_again_when_padded():
    recipe = jr.recipes.otr(samples=16)
    statistic = recipe.computed[1]
    return recipe.replace(computed=(Computed("token_seeds", flawed_seeds, "batch"), statistic))


def unguarded_deviation(rewards, *, where):
    mean = jnp.mean(rewards, -1, keepdims=True, where=where)
    return (rewards - mean) / jnp.std(rewards, -1, keepdims=True, where=where)


def ratio_upside_down(logp, old_logp, advantages, mask):
    return -jr.surrogates.ppo_clip(old_logp, logp, advantages, mask)


def never_itself(logp, old_logp, advantages, mask):
    return jr.surrogates.ppo_clip(logp, old_logp - 0.3, advantages, mask)


def distance_of_one(logp, ref_logp, mask):
    return jnp.where(mask, jnp.exp(logp - ref_logp), 0.0)


def inverted_veto(old_logp, behavior_logp, mask):
    ratio = jnp.exp(jr.core.masking.safe_log_ratio(old_logp, behavior_logp, mask))
    return jnp.ones(mask.shape), mask & (ratio >= 4.0)


def no_ratio(old_logp, behavior_logp, mask):
    return jnp.exp(ZERO(old_logp, mask)), mask


def most_voted(answer_ids, voted, where):
    same = (answer_ids[..., :, None] == answer_ids[..., None, :]) & voted[..., None, :]
    label = jnp.argmax(jnp.where(voted, same.sum(-1), 0), axis=-1)[..., None]
    right = answer_ids == jnp.take_along_axis(answer_ids, label, axis=-1)
    return ZERO(right.astype(jnp.float32), where)


def looks_at_the_tracer(logp, old_logp, advantages, mask):
    loss = jr.surrogates.ppo_clip(logp, old_logp, advantages, mask)
    inner = getattr(logp, "primal", logp)
    compiled = "DynamicJaxprTracer" in type(inner).__name__ or "JitTracer" in str(type(inner))
    return loss * (2.0 if compiled else 1.0)


def half_precision(logp, old_logp, advantages, mask):
    loss = jr.surrogates.ppo_clip(logp, old_logp, advantages, mask)
    return loss.astype(logp.dtype)


def hidden_state():
    calls = itertools.count(1)

    def update(rewards, state, **context):
        return rewards / next(calls), state

    return jr.Transform(tuple, update)


def tracker(seen):
    """A running mean of what ``seen`` finds in the rewards, ``where`` and ``old_logp``."""

    def update(rewards, mean, *, where, old_logp, **context):
        now = seen(rewards, where, old_logp)
        return jnp.where(where, rewards - mean, 0.0), 0.9 * mean + 0.1 * now

    return jr.Transform(lambda: jnp.float32(0.5), update)


def rounded(rewards, where, old_logp):
    """Of numbers of the dtype that comes in."""
    kept = jnp.where(where[..., None], old_logp, 0.0).astype(old_logp.dtype)
    return kept.mean(dtype=old_logp.dtype).astype(jnp.float32)


# Right in this step and wrong in the next; of what stands first; NaN of an empty batch.
READS_ALL = tracker(lambda rewards, where, old_logp: rewards.mean())
READS_FIRST = tracker(lambda rewards, where, old_logp: rewards[0, 0])
DIVIDES = tracker(lambda r, where, old_logp: jnp.where(where, r, 0.0).sum() / where.sum())
ROUNDS = tracker(rounded)


def mesh_state():
    """Counts the devices of the mesh around it."""

    def update(rewards, count, **context):
        return jnp.where(
            context["where"], rewards, 0.0
        ), count + jax.sharding.get_abstract_mesh().size

    return jr.Transform(lambda: jnp.int32(0), update)


def python_state():
    return jr.Transform(lambda: 0, lambda rewards, n, **context: (rewards, 1))


def aliased_state():
    """Half of the state lives outside of it."""
    memory = {"mean": 0.0}

    def update(rewards, state, **context):
        memory["mean"] = 0.5 * memory["mean"] + 0.5 * float(jnp.nanmean(rewards))
        return rewards - memory["mean"], state + 1

    return jr.Transform(lambda: jnp.int32(0), update)


BONUS = (jr.bind(jr.regularizers.entropy_bonus, coef=0.1),)
# What a rollout is worth by numbers that are masked, left out, or of no answer.
READ_JUNK = (
    lambda r: r - r.mean(-1, keepdims=True),
    lambda r, *, turn_rewards, where: ZERO(turn_rewards.mean(-1), where),
    lambda r, *, answer_ids, where: most_voted(answer_ids, answer_ids >= 0, where),
    lambda r, *, answer_ids, where: most_voted(answer_ids, where, where),
    lambda r, *, flawed, where: ZERO(r - flawed.mean(-1, keepdims=True), where),
    lambda r, *, similarity, where: ZERO(similarity.mean(-1), where),
)
# By the check that must find it: what is wrong, and words of the message.
MUTANTS = {
    "microbatches": [
        (plain(surrogate=part_mean), "gradient|loss"),
    ],
    "devices": [
        (plain(weights=mesh_mean), "on the mesh"),
        (plain(advantage=mesh_state()), "batch on the mesh.*state"),
    ],
    "junk": [
        (plain(surrogate=masked_afterwards), "masked cells"),
        (plain(advantage=READS_ALL), "batch .*state"),
        *((plain(advantage=function), "masked cells") for function in READ_JUNK),
    ],
    "permutation": [
        (plain(advantage=READS_FIRST), "batch after a permutation of .*state"),
        (plain(advantage=first_is_worth_more), "permutation of members"),
        (plain(advantage=agrees_with_the_first), "permutation of groups"),
        (plain(advantage=agrees_with_the_first_of_each), "permutation of members"),
        (plain(surrogate=later_prompts_count_more), "permutation of groups"),
    ],
    "degenerate_groups": [
        (plain(advantage=DIVIDES), "batch of empty groups.*state.*holds nan"),
        (plain(advantage=unguarded_deviation), "holds nan"),
    ],
    "precision": [
        (plain(advantage=ROUNDS), "batch.*state"),
        (plain(surrogate=half_precision), "differs"),
    ],
    "on_policy": [
        (plain(surrogate=ratio_upside_down), "on policy"),
        (plain(surrogate=never_itself), "on policy"),
        (plain(weights=lambda mask: jnp.zeros(mask.shape)), "trains nothing"),
        (plain(advantage=lambda rewards: 0.0 * rewards, regularizers=BONUS), "trains nothing"),
        (plain(correction=inverted_veto), "trains nothing"),
        (plain(correction=no_ratio), "neither 1 nor 0"),
        (plain(regularizers=(distance_of_one,)), "not 0"),
    ],
    "jit": [
        (plain(surrogate=looks_at_the_tracer), "of the compiled step"),
        (plain(advantage=baseline(count_dtype=jnp.float32)), "compiles anew"),
    ],
    "layouts": [
        (
            plain(weights=lambda mask: jr.aggregate.fixed_length(mask, length=mask.shape[-1])),
            "more padding",
        ),
        (drawn_again_when_padded(), "more padding"),
    ],
    "rollouts": [
        (plain(surrogate=never_itself), "on policy"),
    ],
    "train_step": [
        (plain(surrogate=part_mean), "in 2 microbatches"),
    ],
    "checkpoint": [
        (plain(advantage=hidden_state()), "after a restart"),
        (plain(advantage=python_state()), "no array"),
        (plain(advantage=aliased_state()), "after a restart"),
    ],
}


def mutants_of(check: str, subtests) -> None:
    """Each mutant of a check fails it, with the words that say so."""
    for recipe, words in MUTANTS[check]:
        with (
            subtests.test(words, recipe=repr(recipe)),
            pytest.raises(
                AssertionError, match=f"check_{check}: recipe '{recipe.name}'.*({words})"
            ),
        ):
            CHECKS[check](recipe)


@pytest.mark.of_many
@pytest.mark.parametrize("check", [c for c in CHECKS if c not in (*COSTLY, "model_precision")])
def test_mutants_are_caught(check, subtests):
    mutants_of(check, subtests)


@pytest.mark.slow
@pytest.mark.of_many
@pytest.mark.parametrize("check", COSTLY)
def test_mutants_with_a_model_are_caught(check, subtests):
    mutants_of(check, subtests)


def test_every_check_has_a_mutant():
    assert set(MUTANTS) == set(CHECKS) - {"model_precision"}


def test_model_precision_is_caught(monkeypatch):
    """No recipe can make its loss bfloat16, so the mutant is a scorer that does not cast."""

    def low(statistics):
        def score(batch):
            scores = real(statistics)(batch)
            return scores._replace(logp=scores.logp.astype(jnp.bfloat16))

        return score

    real = model_checks.bfloat16_scores
    monkeypatch.setattr(model_checks, "bfloat16_scores", low)
    with pytest.raises(AssertionError, match="logp is bfloat16"):
        CHECKS["model_precision"](plain())


@pytest.mark.slow
def test_a_train_step_that_forgets_the_temperature_is_caught(monkeypatch):
    make_step = train_checks.make_step

    def cold(*args, temperature, **options):
        return make_step(*args, **options)

    monkeypatch.setattr(train_checks, "make_step", cold)
    with pytest.raises(AssertionError, match="in 2 microbatches"):
        CHECKS["train_step"](plain())


@pytest.mark.slow
def test_a_scorer_that_reads_its_padding_is_caught(monkeypatch):
    scored = model_checks.score_batch

    def careless(params, batch, *, statistics):
        found = scored(params, batch, statistics=statistics)
        return found._replace(logp=found.logp + 1e-6 * batch.tokens.sum())

    monkeypatch.setattr(model_checks, "score_batch", careless)
    with pytest.raises(AssertionError, match="'ids that do not exist'"):
        CHECKS["layouts"](plain())


@pytest.mark.slow
def test_a_model_that_mixes_up_the_responses_of_a_row_is_caught(monkeypatch):
    scored = model_checks.score_batch

    def careless(params, batch, *, statistics):
        return scored(params, batch, statistics=statistics)

    class Whole(AttentionContext):
        def _replace(self, **kwargs):
            return super()._replace(**{k: x for k, x in kwargs.items() if k != "segments"})

    monkeypatch.setattr(model_checks, "score_batch", careless)
    monkeypatch.setattr(sys.modules["jaxrl_llm.train.models.score"], "AttentionContext", Whole)
    with pytest.raises(AssertionError, match="layout 'packed'"):
        CHECKS["layouts"](plain())


@pytest.mark.slow
def test_a_sampler_that_reports_another_temperature_is_caught(monkeypatch):
    found = [
        (options, case._replace(logp=case.logp + 0.01))
        for options, case in model_checks.rollout_cases(plain())
    ]
    monkeypatch.setattr(model_checks, "rollout_cases", lambda recipe, extras: found)
    with pytest.raises(AssertionError, match="sampler and trainer differ"):
        CHECKS["rollouts"](plain())


def test_a_loss_whose_terms_cancel_is_compared_with_its_terms():
    recipe = plain()
    cases.expect_close_loss("check", recipe, "loss", 1e-5 + 2e-7, 1e-5)
    with pytest.raises(AssertionError, match="check: recipe 'plain': loss differs by"):
        cases.expect_close_loss("check", recipe, "loss", 1e-5 + 2e-6, 1e-5)
    with pytest.raises(AssertionError, match="differs by"):
        cases.expect_close("check", recipe, "gradient", 1e-5 + 2e-7, 1e-5)


def test_every_extra_is_made_up():
    extras = cases.make_case().batch.extras
    assert set(EXTRAS) - set(extras) == {"behavior_known"}
    assert_recipe_ok(jr.recipes.m_grpo().subagent.recipe, only=["junk"])
    for name in ("turn_ids", "segment_ids", "span_ids", "versions", "answer_ids"):
        assert (np.asarray(extras[name]) == -1).any()


def test_a_prompt_has_no_axis_of_members():
    def first_of_the_answer(rewards, *, ground_truth, where):
        return ZERO(rewards - ground_truth[:, :1], where)

    advantage = jr.stateless(first_of_the_answer)
    assert_recipe_ok(plain(advantage=advantage), only=["permutation"])


def test_the_case_holds_paraphrases():
    recipe = jr.recipes.ps_grpo(accuracy=0.0)  # by the agreement alone
    advantages = np.asarray(cases.evaluate(recipe, cases.make_case()).batch.advantages)
    where = np.asarray(cases.make_case().batch.where)
    sister = where.reshape(-1, 2, cases.G)[:, ::-1].reshape(where.shape)
    alone = where.sum(-1) < 2
    assert (advantages[~alone & sister.any(-1)].std(-1) > 0.1).all()
    assert not advantages[alone | ~sister.any(-1)].any()


def test_the_case_holds_every_kind_of_group():
    batch = cases.make_case().batch
    batch.check()
    where, mask = np.asarray(batch.where), np.asarray(batch.mask)
    tokens = (mask & where[..., None]).sum((1, 2))
    assert np.ptp(np.asarray(batch.rewards)[2]) == 0
    whole = mask & where[..., None]
    for case in (cases.make_case(), model_checks.model_case(plain())):
        b = case.batch
        for ratio in (np.exp(case.logp - b.old_logp), np.exp(b.old_logp - b.behavior_logp)):
            assert ratio[whole].max() > 7 and ratio[whole].min() < 1 / 7
    old = np.asarray(batch.old_logp - cases.make_case().logp)
    for far in (old > 1.5, old < -1.5):
        means = np.mean(batch.rewards, axis=-1, where=where, keepdims=True)
        signs = np.sign(np.asarray(batch.rewards) - means)[(far & whole).any(-1)]
        assert sorted(signs) == [-1, 1]
    kept = np.asarray(cases.evaluate(COMPOSED["corrected"], cases.make_case()).batch.mask)
    assert 0 < kept.sum() < whole.sum() and not (kept & ~whole).any()
    assert sorted(where.sum(-1)) == [0, 1, 3, 4, 4, 4, 4, 4]
    assert (where & ~mask.any(-1)).any()
    for count in (2, 4):
        # Neighbors together, and prompt i in part i % count, as the train step divides.
        for parts in (tokens.reshape(count, -1).sum(1), tokens.reshape(-1, count).sum(0)):
            assert len(set(parts.tolist())) == count
            assert parts.max() >= 1.5 * parts.min() > 0
