"""Slots that not every method fills: what they take, when they run, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jr
from jaxrl_llm.core import traits
from jaxrl_llm.recipes import Batch, Critic, Recipe
from jaxrl_llm.recipes.validity import tried

P, G, T = 2, 3, 4
LENGTHS = np.array([[4, 2, 3], [1, 4, 2]])
LOGP = np.random.default_rng(1).normal(-1.5, 0.3, (P, G, T)).astype(np.float32)


def make_batch(**changes) -> Batch:
    """Two prompts, three rollouts, four tokens; rollout [1, 2] takes no part."""
    rng = np.random.default_rng(0)
    where = np.array([[True, True, True], [True, True, False]])
    batch = Batch(
        tokens=jnp.asarray(rng.integers(0, 9, (P, G, T)), jnp.int32),
        mask=jnp.asarray(np.arange(T) < LENGTHS[..., None]),
        rewards=jnp.asarray([[1.0, 0.0, 0.0], [0.5, 0.25, np.nan]], jnp.float32),
        where=jnp.asarray(where),
        prompt_tokens=jnp.ones((P, 5), jnp.int32),
        prompt_mask=jnp.ones((P, 5), bool),
        old_logp=jnp.asarray(rng.normal(-1.5, 0.3, (P, G, T)), jnp.float32),
        behavior_logp=jnp.asarray(rng.normal(-1.5, 0.3, (P, G, T)), jnp.float32),
        ref_logp=jnp.asarray(rng.normal(-1.5, 0.3, (P, G, T)), jnp.float32),
    )
    return batch.replace(**changes)


def plain(**changes) -> Recipe:
    slots = {
        "name": "plain",
        "advantage": jr.stateless(jr.advantages.dr_grpo),
        "surrogate": jr.surrogates.reinforce,
    }
    return Recipe(**{**slots, **changes})


def anything(mask, **context):
    """A regularizer that may read whatever there is."""
    return jnp.where(mask, 0.0, 0.0)


def loose(**changes) -> Recipe:
    """A recipe in which nothing counts as unread."""
    return plain(regularizers=(anything, *changes.pop("regularizers", ())), **changes)


def prepare(recipe, batch, state=None, **options):
    return recipe.prepare(batch, recipe.init() if state is None else state, **options)


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


# Kinds


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"selection": True}, "selection must be a function; got True"),
        ({"reference": 0.1}, "reference must be a function; got 0.1"),
        ({"critic": returns_of}, "critic must be a Critic; got <function returns_of"),
        ({"inputs": "values"}, "inputs must be a tuple of names; got 'values'"),
        ({"inputs": (1,)}, "inputs must be a tuple of names"),
        ({"derived": mean_logit}, r"derived must be a tuple of \(name, function\) pairs"),
        ({"derived": ("a", mean_logit)}, r"derived must be a tuple of \(name, function\) pairs"),
        ({"derived": (("a", 1.0),)}, r"derived must be a tuple of \(name, function\) pairs"),
        ({"controllers": (("a", mean_logit),)}, r"controllers must be .*\(name, Transform\) pairs"),
        ({"statistics": ((1, mean_logit),)}, r"statistics must be a tuple of \(name, function\)"),
        ({"scored": {"a": mean_logit}}, r"scored must be a tuple of \(name, function\) pairs"),
        ({"taught": [("a", mean_logit)]}, r"taught must be a tuple of \(name, function\) pairs"),
    ],
)
def test_wrong_kinds_are_refused(changes, words):
    with pytest.raises(TypeError, match=f"Recipe 'plain': {words}"):
        plain(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"loss": None}, TypeError, "loss must be a function; got None"),
        ({"combine": 1}, TypeError, "combine must be a function; got 1"),
        ({"heads": 1.5}, TypeError, "heads must be an integer; got 1.5"),
        ({"heads": 0}, ValueError, "heads must be above 0"),
        ({"target_rate": 0.0}, ValueError, r"target_rate is a share in \(0, 1\]; got 0"),
        ({"target_rate": 1.5}, ValueError, r"target_rate is a share in \(0, 1\]; got 1.5"),
    ],
)
def test_wrong_critics_are_refused(changes, error, words):
    with pytest.raises(error, match=f"Critic: {words}"):
        critic(**changes)


def term_of(name):
    """A function of the context entry ``name`` alone."""
    return jr.given(lambda mask, *, x: jnp.where(mask, x, 0.0), x=name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"derived": (("advantages", mean_logit),)}, "derived has the name 'advantages', .*batch"),
        ({"controllers": (("mask", counter()),)}, "controllers has the name 'mask'"),
        ({"inputs": ("last_kl",)}, "inputs has the name 'last_kl', which already comes from the"),
        (
            {"controllers": (("a", counter()), ("a", counter()))},
            "controllers has the name 'a', which already comes from controllers",
        ),
        (
            {"controllers": (("a", counter()),), "statistics": (("a", mean_logit),)},
            "statistics has the name 'a', which already comes from controllers",
        ),
        (
            {"scored": (("a", mean_logit),), "taught": (("a", mean_logit),)},
            "taught has the name 'a', which already comes from scored",
        ),
        (
            {"controllers": (("a", counter()),), "inputs": ("a",)},
            "inputs has the name 'a', which already comes from controllers",
        ),
        (
            {"derived": (("returns", lambda advantages: advantages),), "critic": critic()},
            "derived has the name 'returns', which already comes from the critic",
        ),
    ],
)
def test_one_name_for_two_things_is_refused(changes, words):
    with pytest.raises(ValueError, match=f"Recipe 'plain': {words}"):
        plain(**changes)


def test_what_is_scored_may_be_brought():
    loose(scored=(("a", mean_logit),), inputs=("a",))


# What a slot may name


def of_late(advantages, *, late):
    return advantages * late


def same(rewards, *, where, late):
    return jnp.where(where, rewards, 0.0)


LATE = (("late", lambda advantages: jnp.float32(1.0)),)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"selection": lambda advantages, mask, *, mine: mask}, "selection <lambda> needs 'mine'"),
        (
            {"selection": lambda advantages: advantages},
            "selection <lambda> takes 1 arrays by position; it is given 2: advantages, mask",
        ),
        ({"derived": (("a", of_late),)}, "derived 'a' of_late needs 'late'"),
        # What comes later in a step is not there yet.
        ({"advantage": jr.stateless(same), "derived": LATE}, "advantage same needs 'late'"),
        ({"derived": (("a", of_late), *LATE)}, "derived 'a' of_late needs 'late'"),
        (
            {"controllers": (("a", jr.stateless(same)), ("late", counter()))},
            "controller 'a' same needs 'late'",
        ),
        (
            {"advantage": jr.stateless(same), "statistics": (("late", mean_logit),)},
            "advantage same needs 'late'",
        ),
        # Rows of tokens reach a function of logits, and nothing else does.
        (
            {"statistics": (("a", lambda logits, targets, mask: logits),)},
            "statistics 'a' <lambda> needs 'mask'.* given logits, targets, and the extras .* that "
            "have a value a token",
        ),
        (
            {"scored": (("a", lambda logits, targets, *, prompt_ids: logits),)},
            "scored 'a' <lambda> needs 'prompt_ids'",
        ),
        (
            {
                "scored": (
                    ("late", mean_logit),
                    ("a", lambda logits, targets, *, late: logits[:, 0]),
                )
            },
            "scored 'a' <lambda> needs 'late'",
        ),
        ({"statistics": (("a", lambda logits: logits),)}, "takes 1 arrays.*given 2: logits, tar"),
        ({"reference": lambda reference, params: params}, "takes 2 arrays .*given 3: reference"),
        ({"critic": critic(combine=lambda: 0.0)}, "critic's combine <lambda> takes 0 arrays"),
        (
            {"critic": critic(loss=jr.surrogates.ppo_clip), "regularizers": (term_of("nothing"),)},
            "regularizer <lambda> needs 'nothing'",
        ),
        (
            {"critic": critic(weights=jr.aggregate.fixed_length)},
            "critic's weights fixed_length needs 'length'",
        ),
        (
            {"critic": critic(returns=lambda rewards, *, mine: rewards)},
            "critic's returns <lambda> needs 'mine'",
        ),
    ],
)
def test_what_a_slot_is_not_given_is_refused_when_it_is_filled(changes, words):
    with pytest.raises(ValueError, match=f"Recipe 'plain': .*{words}"):
        plain(**changes)


def test_what_a_slot_may_name():
    loose(derived=(*LATE, ("a", of_late)))
    loose(controllers=(("late", counter()),), advantage=jr.stateless(same))
    loose(controllers=(("late", counter()), ("a", jr.stateless(same))))
    loose(inputs=("late",), advantage=jr.stateless(same))
    loose(scored=(("late", mean_logit),), advantage=jr.stateless(same))
    loose(critic=critic(returns=jr.given(returns_of, values="late")), derived=LATE)

    def row(logits, targets, *, late):
        return logits[:, 0] + late

    loose(scored=(("late", mean_logit),), taught=(("a", row),))
    loose(scored=(("late", mean_logit),), statistics=(("a", row),))
    loose(inputs=("late",), statistics=(("a", row),))
    loose(derived=LATE, regularizers=(term_of("late"),))
    loose(statistics=(("late", mean_logit),), regularizers=(term_of("late"),))


def test_needs_computed_and_draws():
    late = jr.stateless(same)
    assert plain(inputs=("late",)).needs == frozenset()  # nobody names it
    assert plain(inputs=("late",), advantage=late).needs == {"late"}
    assert plain(controllers=(("late", counter()),), advantage=late).needs == frozenset()
    assert plain(derived=LATE, regularizers=(term_of("late"),)).needs == frozenset()
    assert plain(statistics=(("late", mean_logit),), regularizers=(term_of("late"),)).needs == set()
    scored = plain(scored=(("late", mean_logit),), advantage=late)
    assert scored.needs == {"late"} and "late" in scored.computed
    assert "late" not in plain(inputs=("late",), advantage=late).computed
    # Optional inputs are used where they are and not asked for.
    optional = plain(selection=lambda advantages, mask, *, flawed=None, truncated: mask)
    assert optional.needs == {"truncated"}
    kept = plain(critic=critic())
    assert kept.needs == {"values", "old_values"} <= kept.computed
    assert not kept.draws
    assert plain(selection=lambda advantages, mask, *, key: mask).draws
    assert loose(derived=(("a", lambda advantages, *, key: advantages),)).draws


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
        return note("derived", jnp.max(jnp.abs(advantages)), advantages, mask)

    recipe = plain(
        controllers=(("dial", jr.Transform(tuple, control)),),
        curation=jr.stateless(curate),
        correction=correct,
        advantage=jr.stateless(advantage),
        selection=select,
        weights=weigh,
        derived=(("peak", derive),),
        regularizers=(term_of("peak"),),
    )
    batch = make_batch()
    ready, _ = prepare(recipe, batch)
    assert list(seen) == [
        *("controller", "curation", "correction"),
        *("advantage", "selection", "weights", "derived"),
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
    np.testing.assert_array_equal(seen["derived"][1], mask)
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


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"selection": lambda advantages, mask: mask.astype(jnp.float32)},
            TypeError,
            "selection of recipe 'plain': keep must be bool",
        ),
        (
            {"selection": lambda advantages, mask: mask[..., 0]},
            ValueError,
            r"selection of recipe 'plain': keep must have shape \(2, 3, 4\); got \(2, 3\)",
        ),
        (
            {"controllers": (("dial", jr.stateless(lambda rewards: rewards)),)},
            ValueError,
            r"Recipe 'plain': controller 'dial' must have shape \(\); got \(2, 3\)",
        ),
        (
            {"derived": (("mine", lambda advantages: advantages.mean(0)),)},
            ValueError,
            r"extras\['mine'\] must have shape \[P=2, ...\]; got \(3,\)",
        ),
        (
            {"derived": (("selected", lambda advantages: advantages > 0),)},
            ValueError,
            r"extras\['selected'\] must have shape \[P=2, G=3, T=4\]; got \(2, 3\)",
        ),
        (
            {"critic": critic(returns=lambda rewards: rewards)},
            ValueError,
            r"the critic's returns must have shape \(2, 3, 4\); got \(2, 3\)",
        ),
    ],
)
def test_what_a_slot_returns_is_checked(changes, error, words):
    values = {"values": jnp.zeros((P, G, T)), "old_values": jnp.zeros((P, G, T, 1))}
    with pytest.raises(error, match=words):
        prepare(loose(**changes), make_batch(extras=values))


def test_controllers_carry_their_state():
    recipe = plain(
        controllers=(("dial", counter(2.0)),),
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

    recipe = loose(controllers=(("dial", jr.Transform(tuple, update)),))
    state = recipe.init()._replace(last_kl=jnp.float32(0.25))
    ready, after = recipe.prepare(make_batch(), state)
    assert (np.asarray(ready.extras["dial"]) == 0.25).all() and float(after.last_kl) == 0.25


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
    columns = plain(advantage=jr.stateless(lambda rewards, *, columns: columns["a"]))
    with pytest.raises(ValueError, match="Recipe 'plain'.prepare: the batch has no columns"):
        prepare(columns, make_batch())
    ready, _ = prepare(columns, make_batch(columns={"a": jnp.full((P, G), 7.0)}))
    np.testing.assert_array_equal(ready.advantages, 7.0 * np.asarray(make_batch().where))


def test_statistics_must_be_given_to_the_loss():
    recipe = plain(statistics=(("level", mean_logit),), regularizers=(term_of("level"),))
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
        np.asarray(ready.extras["returns"])[mask], (rewards + values[..., 0])[mask], rtol=1e-6
    )
    per_sequence = mask / np.maximum(mask.sum(-1, keepdims=True), 1) / 5
    np.testing.assert_allclose(ready.extras["critic_weights"], per_sequence, rtol=1e-6)
    new = values + 0.1
    gap = (new - np.asarray(ready.extras["returns"])[..., None]) ** 2 / 2
    want = (gap.sum(-1) * per_sequence)[mask].sum()
    assert float(kept.total_loss(jnp.asarray(new), ready)) == pytest.approx(want, rel=1e-5)
    with pytest.raises(ValueError, match="prepare: the batch has no old_values"):
        prepare(plain(critic=kept), make_batch())


# Combinations without a meaning


def test_the_same_mismatch_is_not_weighed_twice():
    correction = jr.bind(jr.corrections.rollout_correction)
    with pytest.raises(
        ValueError,
        match="surrogate decoupled_ppo already weighs by behavior_logp, so correction "
        "rollout_correction would count the same mismatch twice; leave one of them out",
    ):
        plain(surrogate=jr.surrogates.decoupled_ppo, correction=correction)
    plain(surrogate=jr.surrogates.decoupled_ppo)
    plain(correction=correction)


def test_values_come_from_a_critic_or_the_batch():
    gae = jr.stateless(jr.advantages.gae, old_logp=None, ref_logp=None)
    with pytest.raises(
        ValueError, match="the advantage reads values, and there is no critic; give"
    ):
        plain(advantage=gae)
    plain(advantage=gae, critic=critic())
    assert plain(advantage=gae, inputs=("values",)).needs == {"values"}


def test_token_advantages_are_not_for_a_sequence_level_surrogate():
    tokens = jr.stateless(jr.advantages.reinforce_pp_baseline)
    slots = {"surrogate": jr.surrogates.gspo, "weights": jr.aggregate.sequence_mean}
    with pytest.raises(
        ValueError,
        match="gspo is one value per sequence, and advantage reinforce_pp_baseline gives each "
        "token a value of its own, .* take a token-level surrogate",
    ):
        plain(advantage=tokens, **slots)
    with pytest.raises(ValueError, match="advantage reinforce_pp_baseline gives each token"):
        plain(advantage=jr.chain(jr.stateless(jnp.negative), tokens), **slots)
    plain(advantage=tokens, **slots | {"surrogate": jr.surrogates.gspo_token})
    plain(advantage=tokens, weights=traits(level="sequence")(jr.aggregate.token_mean))


def test_a_reference_that_nobody_reads_is_refused():
    rule = jr.bind(jr.regularizers.ema_reference, rate=0.1)
    with pytest.raises(ValueError, match="reference ema_reference moves a model that nothing uses"):
        plain(reference=rule)
    loose(reference=rule, taught=(("a", mean_logit),))
    kl = jr.bind(jr.regularizers.kl_to_reference, coef=0.1)
    plain(reference=rule, regularizers=(kl,))


# What it looks like


def test_all_slots_are_printed_by_name():
    rule = jr.bind(jr.regularizers.ema_reference, rate=0.1)
    recipe = loose(
        selection=jr.surrogates.keep_taught,
        derived=LATE,
        controllers=(("dial", counter()),),
        statistics=(("level", mean_logit),),
        scored=(("before", mean_logit), ("beside", mean_logit)),
        taught=(("theirs", mean_logit),),
        critic=critic(heads=2, combine=jr.surrogates.soft_min),
        reference=rule,
        inputs=("mine",),
    )
    assert repr(recipe) == (
        "Recipe(name='plain', advantage=stateless(dr_grpo), surrogate=reinforce, "
        "regularizers=(anything,), "
        "selection=keep_taught, derived=(('late', <lambda>),), "
        "controllers=(('dial', Transform(...)),), statistics=(('level', mean_logit),), "
        "scored=(('before', mean_logit), ('beside', mean_logit)), "
        "taught=(('theirs', mean_logit),), "
        "critic=Critic(returns=returns_of, loss=value_loss, heads=2, combine=soft_min), "
        "reference=ema_reference(rate=0.1), inputs=('mine',))"
    )


def test_a_dry_run_tells_what_a_slot_would_say_later():
    with pytest.raises(ValueError, match=r"controller 'dial' must have shape \(\)"):
        tried(loose(controllers=(("dial", jr.stateless(lambda rewards: rewards)),)))
    with pytest.raises(ValueError, match="regularizer <lambda> must have shape"):
        bad = jr.bind(lambda level: level[..., 0])
        tried(plain(statistics=(("level", mean_logit),), regularizers=(bad,)))
    # With names that no table knows, the arrays are not known here.
    own = plain(scored=(("mine", mean_logit),), advantage=jr.stateless(same_mine))
    assert tried(own) is own


def same_mine(rewards, *, mine):
    return rewards


def test_what_nobody_reads_is_refused():
    controller = jr.regularizers.adaptive_kl()
    kl = jr.regularizers.kl_to_reference
    with pytest.raises(ValueError, match="controllers computes 'kl_coef', which no function reads"):
        plain(controllers=(("kl_coef", controller),), regularizers=(kl,))
    plain(controllers=(("kl_coef", controller),), regularizers=(jr.given(kl, coef="kl_coef"),))
    for slot in ("statistics", "scored", "taught", "derived"):
        function = LATE[0][1] if slot == "derived" else mean_logit
        with pytest.raises(ValueError, match=f"{slot} computes 'late', which no function reads"):
            plain(**{slot: (("late", function),)})
    plain(derived=(("update_scale", lambda advantages: jnp.float32(0.5)),))
