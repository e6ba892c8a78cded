"""Slots that not every method fills: what they take, when they run, what is refused.

A step runs controllers, curation, correction, advantage, selection, what the batch gives,
and the weights, in this order. Each function names what it reads: fields of the batch, inputs that
the recipe declares, and what ran before it. What comes later, has two sources, or is read by nobody
is refused when the recipe is made; what a function returns is checked when it runs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from own_recipes import LOGP, G, P, T, make_batch, plain, prepare
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.core import traits
from jaxrl_llm.recipes import Computed, Critic, Recipe
from jaxrl_llm.recipes.wiring import validate


def anything(mask, **context):
    """A regularizer that may read whatever there is."""
    return jnp.where(mask, 0.0, 0.0)


def loose(**changes) -> Recipe:
    """A recipe in which nothing counts as unread."""
    return plain(regularizers=(anything, *changes.pop("regularizers", ())), **changes)


def counter(value=2.0):
    """A controller that counts its updates and says a number of them."""

    def update(rewards, state, **context):
        return value * (state + 1), state + 1

    return jr.Transform(lambda: jnp.float32(0.0), update)


def mean_logit(logits, targets):
    return logits.mean(-1)


def critic(**changes) -> Critic:
    options = {"returns": returns_of, "loss": jr.surrogates.value_loss}
    return Critic(**{**options, **changes})


def returns_of(rewards, mask, *, values):
    return jnp.where(mask, jnp.nan_to_num(rewards)[..., None] + values, 0.0)


def of(name, function, source="batch") -> Computed:
    return Computed(name, function, source)


# Kinds


WRONG_KINDS_ARE_REFUSED = r"""
TypeError:
plain(selection=True)  # !.*selection must be a function; got True
plain(reference=0.1)  # !.*reference must be a function; got 0.1
plain(critic=returns_of)  # !.*critic must be a Critic; got <function returns_of
plain(inputs="values")  # !.*inputs must be a tuple of names; got 'values'
plain(inputs=(1,))  # !.*inputs must be a tuple of names
plain(computed=mean_logit)  # !.*computed must be a tuple of Computed\(name, function, source\)
plain(computed=[of("a", mean_logit)])  # !.*computed must be a tuple of Computed
plain(computed=(("a", mean_logit, "batch"),))  # !.*computed must be a tuple of Computed
plain(computed=of("a", mean_logit))  # !.*computed must be a tuple of Computed
plain(computed=(of(1, mean_logit),))  # !.*the name of Computed\(.* must be a string
plain(computed=(of("a", 1.0),))  # !.*computed 'a' \(batch\) must be a function; got 1.0
plain(computed=(of("a", mean_logit, "controller"),))
    # !.*computed 'a' \(controller\) must be a Transform; got .*Lift a function
plain(computed=(of("a", jr.stateless(mean_logit)),))
    # !.*computed 'a' \(batch\) must be a function; got stateless
plain(epochs=1.5)  # !.*epochs must be an integer; got 1.5
plain(minibatches=True)  # !.*minibatches must be an integer; got True
ValueError:
plain(computed=(of("a", mean_logit, "scored"),))
    # !.*computed 'a': source must be one of .*old_policy.*; got 'scored'
plain(epochs=0)  # !.*epochs must be above 0; got 0
plain(minibatches=-2)  # !.*minibatches must be above 0; got -2
ValueError:
critic(heads=0)  # !.*heads must be above 0
critic(warmup=-1)  # !.*warmup must not be negative; got -1
critic(target_rate=0.0)  # !.*target_rate is a share in \(0, 1\]; got 0
critic(target_rate=1.5)  # !.*target_rate is a share in \(0, 1\]; got 1.5
TypeError:
critic(loss=None)  # !.*loss must be a function; got None
critic(combine=1)  # !.*combine must be a function; got 1
critic(heads=1.5)  # !.*heads must be an integer; got 1.5
critic(warmup=2.5)  # !.*warmup must be an integer; got 2.5
critic(warmup=True)  # !.*warmup must be an integer; got True
"""


@for_each("error, call, message", bad_calls(WRONG_KINDS_ARE_REFUSED))
def test_wrong_kinds_are_refused(error, call, message):
    raises(error, call, message, globals())


def term_of(name):
    """A function of the context entry ``name`` alone."""
    return jr.connect(lambda mask, *, x: jnp.where(mask, x, 0.0), x=name)


ONE_NAME_FOR_TWO_THINGS_IS_REFUSED = r"""
ValueError:
plain(computed=(of("advantages", mean_logit),))
    # !.*computed \(batch\) has the name 'advantages', .*from the batch
plain(computed=(of("mask", counter(), "controller"),))
    # !.*computed \(controller\) has the name 'mask'
plain(inputs=("last_kl",))  # !.*inputs has the name 'last_kl', which already comes from the
plain(computed=(of("a", counter(), "controller"), of("a", counter(), "controller")))
    # !.*computed \(controller\) has the name 'a', .* from computed \(controller\)
plain(computed=(of("a", counter(), "controller"), of("a", mean_logit, "policy")))
    # !.*computed \(policy\) has the name 'a', .* from computed \(controller\)
plain(computed=(of("a", mean_logit, "old_policy"), of("a", mean_logit, "teacher")))
    # !.*computed \(teacher\) has the name 'a', .* from computed \(old_policy\)
plain(computed=(of("a", counter(), "controller"),), inputs=("a",))
    # !.*inputs has the name 'a', which already comes from computed \(controller\)
plain(computed=(of("returns", lambda advantages: advantages),), critic=critic())
    # !.*computed \(batch\) has the name 'returns', which already comes from a critic
"""


@for_each("error, call, message", bad_calls(ONE_NAME_FOR_TWO_THINGS_IS_REFUSED))
def test_one_name_for_two_things_is_refused(error, call, message):
    raises(error, call, message, globals())


@for_each("source", ["old_policy", "reference", "teacher"])
def test_a_batch_may_hold_what_would_be_computed(source):
    loose(computed=(of("a", mean_logit, source),), inputs=("a",))


# What a slot may name


def of_late(advantages, *, late):
    return advantages * late


def same(rewards, *, where, late):
    return jnp.where(where, rewards, 0.0)


LATE = (Computed("late", lambda advantages: jnp.float32(1.0), "batch"),)


def rows_of_masks(logits, targets, mask):
    return logits


def reads_late(logits, targets, *, late):
    return logits[:, 0]


A_FUNCTION_THAT_ITS_SLOT_CANNOT_CALL_IS_REFUSED = r"""
ValueError:
plain(computed=(of("a", rows_of_masks, "policy"),))
    # !.*computed 'a' \(policy\) rows_of_masks needs 'mask'.* has logits, targets, teacher_logits
plain(computed=(of("late", mean_logit, "old_policy"), of("a", reads_late, "old_policy")))
    # !.*computed 'a' .* reads_late needs 'late'
plain(selection=lambda advantages, mask, *, mine: mask)  # !.*selection <lambda> needs 'mine'
plain(selection=lambda advantages: advantages)
    # !.*selection <lambda> takes 1 arrays by position; its slot passes 2: advantages, mask
plain(computed=(of("a", of_late),))  # !.*computed 'a' \(batch\) of_late needs 'late'
plain(advantage=jr.stateless(same), computed=LATE)  # !.*advantage same needs 'late'
plain(computed=(of("a", of_late), *LATE))  # !.*computed 'a' .* of_late needs 'late'
plain(computed=(of("a", jr.stateless(same), "controller"), of("late", counter(), "controller")))
    # !.*computed 'a' \(controller\) same needs 'late'
plain(advantage=jr.stateless(same), computed=(of("late", mean_logit, "policy"),))
    # !.*advantage same needs 'late'
plain(computed=(of("a", lambda logits, targets, *, prompt_ids: logits, "old_policy"),))
    # !.*computed 'a' .* <lambda> needs 'prompt_ids'
plain(computed=(of("a", lambda logits: logits, "policy"),))
    # !.*takes 1 arrays.*passes 2: logits, tar
plain(reference=lambda reference, params: params)  # !.*takes 2 arrays .*passes 3: reference
plain(critic=critic(combine=lambda: 0.0))  # !.*critic's combine <lambda> takes 0 arrays
plain(critic=critic(loss=jr.surrogates.ppo_clip), regularizers=(term_of("nothing"),))
    # !.*regularizer <lambda> needs 'nothing'
plain(critic=critic(weights=jr.aggregate.fixed_length))
    # !.*critic's weights fixed_length needs 'length'
plain(critic=critic(returns=lambda rewards, *, mine: rewards))
    # !.*critic's returns <lambda> needs 'mine'
"""


@for_each("error, call, message", bad_calls(A_FUNCTION_THAT_ITS_SLOT_CANNOT_CALL_IS_REFUSED))
def test_a_function_that_its_slot_cannot_call_is_refused(error, call, message):
    raises(error, call, message, globals())


def test_what_a_slot_may_name():
    controller, scored = of("late", counter(), "controller"), of("late", mean_logit, "old_policy")
    loose(computed=(*LATE, of("a", of_late)))
    loose(computed=(controller,), advantage=jr.stateless(same))
    loose(computed=(controller, of("a", jr.stateless(same), "controller")))
    loose(inputs=("late",), advantage=jr.stateless(same))
    loose(computed=(scored,), advantage=jr.stateless(same))
    loose(critic=critic(returns=jr.connect(returns_of, values="late")), computed=LATE)

    def row(logits, targets, *, late):
        return logits[:, 0] + late

    for source in ("teacher", "reference", "policy"):
        loose(computed=(scored, of("a", row, source)))
    loose(inputs=("late",), computed=(of("a", row, "policy"),))
    loose(computed=LATE, regularizers=(term_of("late"),))
    loose(computed=(of("late", mean_logit, "policy"),), regularizers=(term_of("late"),))


def test_the_fields_that_a_recipe_requires():
    late = jr.stateless(same)
    assert plain(inputs=("late",)).required_fields == frozenset()  # no function names it
    assert plain(inputs=("late",), advantage=late).required_fields == {"late"}
    controller, policy = of("late", counter(), "controller"), of("late", mean_logit, "policy")
    assert plain(computed=(controller,), advantage=late).required_fields == frozenset()
    for entry in (*LATE, policy):
        recipe = plain(computed=(entry,), regularizers=(term_of("late"),))
        assert recipe.required_fields == frozenset()
    for source in ("old_policy", "reference", "teacher"):
        before = plain(computed=(of("late", mean_logit, source),), advantage=late)
        assert before.required_fields == {"late"} and "late" in before.step_fields
        assert before.uses_reference == (source == "reference")
    assert "late" not in plain(inputs=("late",), advantage=late).step_fields
    # Optional inputs are used where the batch holds them, and not required.
    optional = plain(selection=lambda advantages, mask, *, flawed=None, truncated: mask)
    assert optional.required_fields == {"truncated"}
    with_critic = plain(critic=critic())
    assert with_critic.required_fields == {"values", "old_values"} <= with_critic.step_fields
    kl = jr.bind(jr.regularizers.kl_to_reference, coef=0.1)
    assert plain(regularizers=(kl,)).uses_reference and not plain().uses_reference


def test_what_prepare_names_is_known_before_it_runs():
    def keyed(advantages, *, key):
        return advantages

    def measured(advantages, *, last_kl):
        return last_kl

    assert not plain(critic=critic()).draws
    assert plain(selection=lambda advantages, mask, *, key: mask).draws
    assert loose(computed=(of("a", keyed),)).draws
    assert not plain().reads_last_kl
    assert loose(computed=(of("a", measured),)).reads_last_kl
    barrier = jr.stateless(jr.connect(jr.bind(jr.surrogates.kl_barrier, beta=1.0), kl="last_kl"))
    assert loose(computed=(of("a", barrier, "controller"),)).reads_last_kl
    expected = {"mssr"}
    for name in ("drpo_len", "mssr", "grpo", "adaptive_kl", "ppo_max"):
        options = {"drpo_len": {"length": 8}, "mssr": {"num_prompts": 4}}.get(name, {})
        assert getattr(jr.recipes, name)(**options).reads_last_kl == (name in expected)


@for_each("passes", [(2, 1), (1, 2), (3, 4)])
def test_several_optimizer_steps_on_a_batch_take_a_ratio(passes):
    with_ratio = plain(surrogate=jr.surrogates.ppo_clip)
    with_ratio.check_passes(*passes)
    without = jr.recipes.vcpo()
    without.check_passes(1, 1)
    with pytest.raises(ValueError, match="without a ratio to old_logp, .* epochs .* minibatches"):
        without.check_passes(*passes)


@traits(has_ratio=False, reuses_samples=True)
def weighted(logp, old_logp, advantages, mask):
    return jr.surrogates.reinforce(logp, old_logp, advantages, mask)


def anchored(logp, old_logp, mask):
    """A regularizer that compares with the old policy."""
    return jnp.where(mask, (logp - old_logp) ** 2, 0.0)


def test_a_surrogate_that_reuses_samples_takes_several_steps():
    """By its trait alone; the old policy is then compared only if another function reads it."""
    reused = plain(surrogate=weighted)
    assert not reused.uses_ratio and not reused.compares_old
    reused.check_passes(3, 4)
    with pytest.raises(ValueError, match="a surrogate without a ratio, so rollouts of older"):
        reused.check_staleness(1)  # its method reuses what its latest weights sampled
    for surrogate in (jr.surrogates.reinforce, jr.surrogates.ppo_clip):
        assert plain(surrogate=surrogate).compares_old
    assert jr.recipes.sft().compares_old  # for the metrics
    with_ratio = traits(reuses_samples=True)(jr.surrogates.ppo_clip)
    assert plain(surrogate=with_ratio).compares_old

    def prepared(advantages, mask, *, old_logp):
        return mask & (old_logp < 0)

    moved = (of("distance", distance, "update"),)
    for changes in (
        {"regularizers": (anchored,)},
        {"regularizers": (anything,)},
        {"computed": moved, "regularizers": (read_distance,)},
        {"selection": prepared},
    ):
        assert plain(surrogate=weighted, **changes).compares_old


def test_a_surrogate_for_samples_of_any_policy_takes_older_ones():
    """By its trait alone; the old policy is compared, for the metrics."""
    recipe = jr.recipes.asymre()
    assert not recipe.uses_ratio and recipe.compares_old and not recipe.reads_behavior
    recipe.check_passes(3, 4)
    recipe.check_staleness(20)
    recipe.check_quantization("int8")
    assert recipe == jr.recipes.asymre()
    plainly = recipe.replace(surrogate=jr.surrogates.reinforce)
    for refused in (
        lambda: plainly.check_passes(3, 4),
        lambda: plainly.check_staleness(20),
        lambda: plainly.check_quantization("int8"),
    ):
        with pytest.raises(ValueError, match="a surrogate without a ratio"):
            refused()


def distance(logp, old_logp, mask):
    return jnp.mean(logp - old_logp)


def read_distance(mask, *, distance):
    return jnp.where(mask, distance, 0.0)


def test_a_bound_that_depends_on_the_advantages_is_not_compared():
    """Several passes without a ratio take it, if no other function reads the old policy."""
    likelihood = jr.diffusion.sandwiched_likelihood(passes=3)
    reused = plain(surrogate=weighted, likelihood=likelihood)
    reused.check_passes(3, 2)
    drawn = {"masked", "masked_prompt", "noise", "written"}
    assert reused.required_fields == drawn
    compared = reused.replace(regularizers=(anchored,))
    assert compared.required_fields == {*drawn, "old_draw_logp"}
    for recipe in (compared, reused.replace(surrogate=jr.surrogates.ppo_clip)):
        with pytest.raises(ValueError, match="a likelihood that depends on the advantages"):
            recipe.check_passes(3, 1)
    with pytest.raises(ValueError, match="without a ratio to old_logp"):
        reused.replace(surrogate=jr.surrogates.reinforce).check_passes(3, 1)


def test_responses_of_the_data_take_several_steps_at_any_age():
    """No policy sampled them, so a surrogate without a ratio is as right at the last step."""
    shown = jr.curation.only_demonstrations(reward=1.0)
    other = jr.curation.only_demonstrations(column="other", reward=1.0)
    both = jr.curation.mixed((shown, 0.5), (other, 0.5))
    for recipe in (jr.recipes.sft(), jr.recipes.otr(), jr.recipes.sft().replace(collector=both)):
        assert not recipe.uses_ratio
        recipe.check_passes(2, 4)
        recipe.check_staleness(1)
    jr.recipes.otb().replace(collector=shown).check_staleness(1)
    half = jr.curation.mixed((shown, 0.5), (jr.curation.in_order(), 0.5))
    guided = jr.curation.hinted(jr.curation.ladder(jr.curation.tier_messages), source=shown)
    for collector in (None, half, guided, jr.curation.demonstrations(count=1)):
        sampled = jr.recipes.sft().replace(collector=collector)
        with pytest.raises(ValueError, match="without a ratio to old_logp"):
            sampled.check_passes(2, 4)
        with pytest.raises(ValueError, match="a surrogate without a ratio, so rollouts of older"):
            sampled.check_staleness(1)


# The order of things in prepare


def test_each_slot_sees_what_was_decided_before_it():
    seen = {}

    def note(name, value, *arrays):
        seen[name] = [np.asarray(x) for x in arrays]
        return value

    def control(rewards, state, *, where, mask, last_kl):
        return note("controller", jnp.float32(0.5), where, mask, last_kl), state

    def curate(rewards, *, where, mask, dial):
        return note("curation", where.at[0, 1].set(False), where, mask, dial)

    def correct(old_logp, behavior_logp, mask):
        return note("correction", (jnp.full(mask.shape, 3.0), mask.at[0, 0, 3].set(False)), mask)

    def advantage(rewards, *, where, mask, dial):
        return note("advantage", jr.advantages.dr_grpo(rewards, where=where), where, mask)

    def select(advantages, mask, *, where, dial):
        return note("selection", mask.at[0, 2].set(False), advantages, mask)

    def weigh(mask):
        return note("weights", jr.aggregate.token_mean(mask), mask)

    def derive(advantages, *, mask, dial):
        return note("batch", jnp.max(jnp.abs(advantages)), advantages, mask)

    recipe = plain(
        computed=(of("peak", derive), of("dial", jr.Transform(tuple, control), "controller")),
        curation=jr.stateless(curate),
        correction=correct,
        advantage=jr.stateless(advantage),
        selection=select,
        weights=weigh,
        regularizers=(term_of("peak"),),
    )
    batch = make_batch()
    ready, _ = prepare(recipe, batch)
    assert list(seen) == [
        *("controller", "curation", "correction"),
        *("advantage", "selection", "batch", "weights"),
    ]
    whole, where = np.asarray(batch.mask), np.asarray(batch.where)
    np.testing.assert_array_equal(seen["controller"][1], whole)
    assert seen["controller"][2] == 0.0
    assert seen["curation"][2].shape == (P, 1, 1) and (seen["curation"][2] == 0.5).all()
    where = where & ~np.eye(P, G, 1, dtype=bool)
    mask = whole & where[..., None]
    np.testing.assert_array_equal(seen["correction"][0], mask)
    mask[0, 0, 3] = False
    np.testing.assert_array_equal(seen["advantage"][0], where)
    np.testing.assert_array_equal(seen["advantage"][1], mask)
    # The group's mean holds the rollout that the selection leaves out, without the curated one.
    np.testing.assert_allclose(seen["selection"][0], [[0.5, 0, -0.5], [0.125, -0.125, 0]])
    np.testing.assert_array_equal(seen["selection"][1], mask)
    mask[0, 2] = False
    np.testing.assert_array_equal(seen["weights"][0], mask)
    np.testing.assert_array_equal(seen["batch"][1], mask)
    np.testing.assert_array_equal(ready.mask, mask)
    np.testing.assert_array_equal(ready.where, where)
    np.testing.assert_allclose(ready.correction, 3.0 * mask)
    np.testing.assert_allclose(ready.weights, mask / mask.sum(), rtol=1e-6)
    assert ready.extras["peak"].shape == (P, 1, 1) and float(ready.extras["peak"][1, 0, 0]) == 0.5
    a = np.asarray(ready.advantages, float)[..., None]
    want = ((-3.0 * a * LOGP + 0.5)[mask] / mask.sum()).sum()
    assert float(recipe.loss(LOGP, ready)) == pytest.approx(want, rel=1e-5)


def test_a_selection_leaves_baselines_alone_and_no_value_behind():
    @traits(token_values=True)
    def by_token(rewards, *, mask, where):
        values = jnp.where(where, rewards, 0.0)[..., None] * jnp.ones(mask.shape)
        return jnp.where(mask, values, jnp.nan)  # junk where nothing is kept

    seen = []

    def select(advantages, mask):
        seen.append(np.asarray(advantages))
        return advantages > 0.3

    ready, _ = prepare(plain(advantage=jr.stateless(by_token), selection=select), make_batch())
    assert np.isfinite(seen[0]).all()
    kept = np.asarray(make_batch().mask) & (np.array([[1, 0, 0], [1, 0, 0]]) > 0)[..., None]
    np.testing.assert_array_equal(ready.mask, kept)
    assert not np.asarray(ready.advantages)[~kept].any()
    np.testing.assert_allclose(ready.weights, kept / kept.sum(), rtol=1e-6)
    assert np.asarray(ready.where).sum() == 5


def prepared_with(**changes):
    values = {"values": jnp.zeros((P, G, T)), "old_values": jnp.zeros((P, G, T, 1))}
    return prepare(loose(**changes), make_batch(extras=values))


WHAT_A_SLOT_RETURNS = r"""
ValueError:
prepared_with(selection=lambda advantages, mask: mask[..., 0])
    # !selection of recipe 'plain': keep must have shape \(2, 3, 4\); got \(2, 3\)
prepared_with(computed=(of("dial", jr.stateless(lambda rewards: rewards), "controller"),))
    # !Recipe 'plain': computed 'dial' must have shape \(\) or \(2, 3, 4\); got \(2, 3\)
prepared_with(computed=(of("mine", lambda advantages: advantages.mean(0)),))
    # !.*extras\['mine'\] must have shape \[P=2, ...\]; got \(3,\)
prepared_with(computed=(of("selected", lambda advantages: advantages > 0),))
    # !.*extras\['selected'\] must have shape \[P=2, G=3, T=4\]; got \(2, 3\)
prepared_with(critic=critic(returns=lambda rewards: rewards))
    # !.*critic's returns must have shape \(2, 3, 4\) or \(2, 3, 4, 1\); got \(2, 3\)
TypeError:
prepared_with(selection=lambda advantages, mask: mask.astype(jnp.float32))
    # !selection of recipe 'plain': keep must be bool
"""


@for_each("error, call, message", bad_calls(WHAT_A_SLOT_RETURNS))
def test_what_a_slot_returns_is_checked(error, call, message):
    raises(error, call, message, globals())


def test_controllers_carry_their_state():
    recipe = plain(
        computed=(of("dial", counter(2.0), "controller"),),
        regularizers=(term_of("dial"),),
    )
    state = recipe.init()
    assert float(state.controllers["dial"]) == 0.0 == float(state.last_kl)
    for count in (1, 2, 3):
        ready, state = recipe.prepare(make_batch(), state)
        np.testing.assert_array_equal(ready.extras["dial"], np.full((P, 1, 1), 2.0 * count))
        assert float(state.controllers["dial"]) == count
    # A number of the whole batch divides with it and adds up again.
    whole = recipe.loss(LOGP, ready)
    halves = [
        recipe.loss(LOGP[i : i + 1], jax.tree.map(lambda x, i=i: x[i : i + 1], ready))
        for i in range(P)
    ]
    assert float(sum(halves)) == pytest.approx(float(whole), rel=1e-5)


def test_last_kl_goes_from_the_state_to_who_names_it():
    def update(rewards, state, *, last_kl):
        return last_kl, state

    recipe = loose(computed=(of("dial", jr.Transform(tuple, update), "controller"),))
    state = recipe.init()._replace(last_kl=jnp.float32(0.25))
    ready, after = recipe.prepare(make_batch(), state)
    assert (np.asarray(ready.extras["dial"]) == 0.25).all() and float(after.last_kl) == 0.25


def test_a_function_that_takes_the_whole_context_has_no_last_kl_that_is_never_measured():
    def update(rewards, state, **context):
        return context["last_kl"], state

    opaque = of("dial", jr.Transform(tuple, update), "controller")
    with pytest.raises(KeyError, match="last_kl"):
        prepare(loose(computed=(opaque,)), make_batch())

    def named(advantages, *, last_kl):
        return last_kl

    prepare(loose(computed=(opaque, of("again", named))), make_batch())  # since this one names it


def test_random_choices_take_the_key():
    def drop(advantages, mask, *, key):
        return jax.random.bernoulli(key, 0.5, mask.shape)

    recipe = plain(selection=drop)
    with pytest.raises(ValueError, match="Recipe 'plain'.prepare draws random numbers; give it a"):
        prepare(recipe, make_batch())
    first, _ = prepare(recipe, make_batch(), key=jax.random.key(0))
    again, _ = prepare(recipe, make_batch(), key=jax.random.key(0))
    other, _ = prepare(recipe, make_batch(), key=jax.random.key(3))
    np.testing.assert_array_equal(first.mask, again.mask)
    assert (np.asarray(first.mask) != np.asarray(other.mask)).any()
    prepare(plain(), make_batch(), key=jax.random.key(0))  # no use for it, and no harm


def test_inputs_that_are_not_there_are_named():
    late = plain(inputs=("late",), advantage=jr.stateless(same))
    with pytest.raises(ValueError, match="Recipe 'plain'.prepare: the batch has no late"):
        prepare(late, make_batch())
    in_loss = plain(inputs=("late",), regularizers=(term_of("late"),))
    ready, _ = prepare(in_loss, make_batch())
    with pytest.raises(ValueError, match="Recipe 'plain'.loss: the batch has no late"):
        in_loss.loss(LOGP, ready)
    ready, _ = prepare(in_loss, make_batch(extras={"late": jnp.full((P, 1, 1), 2.0)}))
    without, _ = prepare(plain(), make_batch())
    difference = in_loss.loss(LOGP, ready) - plain().loss(LOGP, without)
    assert float(difference) == pytest.approx(2.0, rel=1e-5)
    one = plain(
        advantage=jr.stateless(lambda rewards, *, reward_components: reward_components["a"])
    )
    with pytest.raises(ValueError, match="'plain'.prepare: the batch has no reward_components"):
        prepare(one, make_batch())
    ready, _ = prepare(one, make_batch(reward_components={"a": jnp.full((P, G), 7.0)}))
    np.testing.assert_array_equal(ready.advantages, 7.0 * np.asarray(make_batch().where))


def test_statistics_must_be_given_to_the_loss():
    recipe = plain(computed=(of("level", mean_logit, "policy"),), regularizers=(term_of("level"),))
    ready, _ = prepare(recipe, make_batch())
    with pytest.raises(ValueError, match="Recipe 'plain'.loss: statistics has no 'level'"):
        recipe.loss(LOGP, ready)
    level = np.random.default_rng(3).normal(size=(P, G, T)).astype(np.float32)
    loss = recipe.loss(LOGP, ready, statistics={"level": level})
    mask = np.asarray(ready.mask)
    want = plain().loss(LOGP, ready) + level[mask].mean()
    assert float(loss) == pytest.approx(float(want), rel=1e-5)


def test_a_critic_gets_its_returns_and_weights():
    values = np.random.default_rng(2).normal(size=(P, G, T, 2)).astype(np.float32)
    extras = {"old_values": jnp.asarray(values), "values": jnp.asarray(values[..., 0])}
    kept = critic(heads=2, weights=jr.aggregate.sequence_mean)
    ready, _ = prepare(plain(critic=kept), make_batch(extras=extras))
    mask = np.asarray(ready.mask)
    rewards = np.nan_to_num(np.asarray(make_batch().rewards, float))[..., None]
    np.testing.assert_allclose(
        np.asarray(ready.extras["returns"])[mask, 1], (rewards + values[..., 0])[mask], rtol=1e-6
    )
    per_sequence = mask / np.maximum(mask.sum(-1, keepdims=True), 1) / 5
    np.testing.assert_allclose(ready.extras["critic_weights"], per_sequence, rtol=1e-6)
    new = values + 0.1
    gap = (new - np.asarray(ready.extras["returns"])) ** 2 / 2
    want = (gap.sum(-1) * per_sequence)[mask].sum()
    assert float(kept.total_loss(jnp.asarray(new), ready)) == pytest.approx(want, rel=1e-5)
    with pytest.raises(ValueError, match="prepare: the batch has no old_values"):
        prepare(plain(critic=kept), make_batch())


def test_a_minibatch_has_the_weights_of_its_own_mask():
    values = {"values": jnp.zeros((P, G, T)), "old_values": jnp.zeros((P, G, T, 1))}
    recipe = plain(critic=critic(weights=jr.aggregate.sequence_mean))
    whole, _ = prepare(recipe, make_batch(extras=values))
    part = recipe.weigh(jax.tree.map(lambda x: x[:1], whole))
    mask = np.asarray(whole.mask[:1])
    np.testing.assert_allclose(part.weights, mask / mask.sum(), rtol=1e-6)
    per_sequence = mask / mask.sum(-1, keepdims=True) / G
    np.testing.assert_allclose(part.extras["critic_weights"], per_sequence, rtol=1e-6)
    np.testing.assert_array_equal(part.advantages, whole.advantages[:1])
    again = recipe.weigh(whole)
    np.testing.assert_array_equal(again.weights, whole.weights)


# Combinations without a meaning


def test_values_come_from_a_critic_or_the_batch():
    gae = jr.chain(
        jr.stateless(jr.advantages.terminal_rewards),
        jr.stateless(jr.advantages.gae),
        jr.stateless(jr.advantages.whiten),
    )
    with pytest.raises(
        ValueError, match="the advantage reads values, and there is no critic; give"
    ):
        plain(advantage=gae)
    plain(advantage=gae, critic=critic())
    assert plain(advantage=gae, inputs=("values",)).required_fields == {"values"}


def test_a_reference_that_nobody_reads_is_refused():
    rule = jr.bind(jr.regularizers.ema_reference, rate=0.1)
    with pytest.raises(ValueError, match="reference ema_reference moves a model that nothing uses"):
        plain(reference=rule)
    loose(reference=rule, computed=(of("a", mean_logit, "teacher"),))
    loose(reference=rule, computed=(of("a", mean_logit, "reference"),))
    kl = jr.bind(jr.regularizers.kl_to_reference, coef=0.1)
    plain(reference=rule, regularizers=(kl,))
    with pytest.raises(ValueError, match=r"anchored\(.*stores a policy that nothing uses"):
        plain(reference=jr.regularizers.anchored(rule), regularizers=(kl,))
    nft = jr.recipes.diffusion_nft()
    with pytest.raises(ValueError, match="reads anchor_velocity, of the policy that a moving"):
        nft.replace(reference=rule)
    nft.replace(reference=jr.regularizers.anchored(rule))


# What it looks like


def test_a_dry_run_tells_what_a_slot_would_say_later():
    with pytest.raises(ValueError, match=r"computed 'dial' must have shape \(\)"):
        scalar = jr.stateless(lambda rewards: rewards)
        validate(loose(computed=(of("dial", scalar, "controller"),)))
    with pytest.raises(ValueError, match="regularizer <lambda> must have shape"):
        bad = jr.bind(lambda level: level[..., 0])
        validate(plain(computed=(of("level", mean_logit, "policy"),), regularizers=(bad,)))
    # With names that no table knows, the arrays are not known here.
    own = plain(computed=(of("mine", mean_logit, "old_policy"),), advantage=jr.stateless(same_mine))
    assert validate(own) is own


def same_mine(rewards, *, mine):
    return rewards


def test_what_nobody_reads_is_refused():
    controller = jr.regularizers.adaptive_kl()
    kl = jr.regularizers.kl_to_reference
    entry = of("kl_coef", controller, "controller")
    with pytest.raises(ValueError, match=r"no function reads computed 'kl_coef' \(contr"):
        plain(computed=(entry,), regularizers=(kl,))
    plain(computed=(entry,), regularizers=(jr.connect(kl, coef="kl_coef"),))
    for source in ("policy", "old_policy", "reference", "teacher", "batch"):
        function = LATE[0].function if source == "batch" else mean_logit
        with pytest.raises(ValueError, match=rf"no function reads computed 'late' \({source}\)"):
            plain(computed=(of("late", function, source),))
    plain(computed=(of("update_scale", lambda advantages: jnp.float32(0.5)),))
    plain(computed=(of("update_scale", distance, "update"),))
    for source, function in (("controller", controller), ("policy", mean_logit)):
        with pytest.raises(
            ValueError, match=rf"no function reads computed 'update_scale' \({source}\)"
        ):
            plain(computed=(of("update_scale", function, source),))


def test_what_scales_the_update_is_a_scalar():
    def per_prompt(logp, old_logp, mask):
        return jnp.ones(logp.shape[0])

    for recipe in (
        plain(computed=(of("update_scale", lambda advantages: advantages[:, 0]),)),
        plain(computed=(of("update_scale", per_prompt, "update"),)),
    ):
        with pytest.raises(ValueError, match=r"'update_scale' must have shape \(\); got \(2,\)"):
            prepare(recipe, make_batch())


def test_a_subagent_does_not_train_beside_a_critic_that_trains_alone():
    subagent, waiting = jr.recipes.m_grpo().subagent, jr.recipes.ppo(critic_warmup=2)
    with pytest.raises(ValueError, match="'ppo': the critic trains alone in the first 2 steps"):
        waiting.replace(subagent=subagent)
    jr.recipes.ppo().replace(subagent=subagent)


def test_a_distance_from_the_old_policy_takes_several_updates_of_all_turns():
    """With one, and in turns that are scored one by one, the two policies are always equal."""
    recipe = plain(computed=(of("update_scale", distance, "update"),))
    assert recipe.needs_updates and not plain().needs_updates
    with pytest.raises(
        ValueError, match=r"'update_scale' \(update\) .* turn_updates scores before"
    ):
        recipe.replace(turn_updates=jr.recipes.seeupo().turn_updates)
