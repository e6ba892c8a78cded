"""An evolution strategy as a record: its presets, refusals, and what fitness and gradient are."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.recipes import EVOLUTION_PRESETS, EvolutionRecipe
from jaxrl_llm.recipes.needs import RunNeeds, is_recipe
from jaxrl_llm.train import OptimizerConfig

KEY = jax.random.key(2)
S = jnp.array([[1.0, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1]])
PARAMS = {
    "embed": {"embedding": jnp.ones((5, 4))},
    "up": {"kernel": jnp.full((4, 6), 0.5), "bias": jnp.zeros(6)},
}


def close(found, expected, atol=2e-6):
    np.testing.assert_allclose(found, expected, atol=atol)


def plain(**changes) -> EvolutionRecipe:
    return EvolutionRecipe(**{"name": "plain", "sigma": 0.1, **changes})


# Presets


def test_eggroll_hands_on_its_options():
    given = {"sigma": 0.3, "rank": 4, "fitness": jr.evolution.zscore, "shared": False}
    given |= {"noise_reuse": 2, "sign": True, "temperature": 0.7}
    recipe = jr.recipes.eggroll(**given)
    assert {name: getattr(recipe, name) for name in given} == given
    plain_steps = OptimizerConfig(name="sgd", learning_rate=0.125, b1=0.0, max_grad_norm=None)
    assert jr.recipes.eggroll() == EvolutionRecipe(
        name="eggroll", sigma=1e-3, optimizer=plain_steps, paper="arXiv:2511.16652"
    )


def test_full_rank_presets():
    ranks, plainly = jr.recipes.open_es(sigma=0.1), jr.recipes.es_qiu(sigma=0.1)
    # Of equal means the two sides of a pair have the same rank.
    close(ranks.shape(S)[0], [1 / 2, -1 / 6, -1 / 6, -1 / 6])
    close(plainly.shape(jnp.array([[0.2, 0.4, 0.9]]))[0], [-1.019049, -0.339683, 1.358732])
    for recipe in (ranks, plainly):
        assert jax.tree.leaves(recipe.classes(PARAMS)) == ["full"] * 3
    assert (ranks.scale, ranks.pairs) == ("gradient", True)
    assert (plainly.scale, plainly.pairs) == ("mean", False)


@for_each("name", EVOLUTION_PRESETS)
def test_a_preset_is_a_value(name):
    make = EVOLUTION_PRESETS[name]
    recipe = make()
    assert recipe == make() and hash(recipe) == hash(make())
    assert recipe != make(sigma=recipe.sigma * 2)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    with pytest.raises(ValueError, match="sigma must be above 0"):
        make(sigma=0.0)


def test_repr_shows_what_is_not_the_default():
    assert repr(jr.recipes.eggroll(sigma=2e-3, rank=4)) == (
        "EvolutionRecipe(name='eggroll', sigma=0.002, rank=4, optimizer=OptimizerConfig("
        "name='sgd', learning_rate=0.125, b1=0.0, max_grad_norm=None), paper='arXiv:2511.16652')"
    )
    assert repr(plain(fitness=jr.evolution.zscore, shared=False)) == (
        "EvolutionRecipe(name='plain', sigma=0.1, fitness=zscore, shared=False)"
    )
    assert "ties='mean'" in repr(jr.recipes.open_es())


# Refusals


def test_replace_checks_anew_and_suggests_the_field():
    assert plain().replace(rank=2) == plain(rank=2)
    message = "EvolutionRecipe.replace: there is no field 'siggma'. Did you mean 'sigma'"
    with pytest.raises(TypeError, match=message):
        plain().replace(siggma=0.1)
    with pytest.raises(ValueError, match="sigma must be above 0; got -1"):
        plain().replace(sigma=-1.0)


WHAT_MAKES_NO_SENSE_IS_REFUSED = r"""
ValueError:
plain(sigma=0.0)  # !.*EvolutionRecipe 'plain': sigma must be above 0; got 0
plain(sigma=float("nan"))  # !.*sigma must be above 0
plain(rank=0)  # !.*rank must be above 0
plain(tries=0)  # !.*tries must be above 0
plain(chunk=0)  # !.*chunk must be above 0
plain(temperature=-0.1)  # !.*temperature must not be negative
plain(baseline=-2)  # !.*baseline must not be negative
plain(noise_reuse=-1)  # !.*noise_reuse must not be negative
plain(noise="dense")  # !.*noise must be one of 'lowrank', 'full'; got 'dense'
plain(others="lowrank")  # !.*others must be one of 'frozen', 'full'
plain(scale="steps")  # !.*scale must be one of .* Did you mean 'step'
plain(dtype="int8")  # !.*dtype must be one of 'float32', 'bfloat16', 'float16'
plain(noise="full", rank=2)  # !.*rank and sign have no effect where noise is
plain(noise="full", sign=True)  # !.*rank and sign have no effect where noise
plain(tries=2)  # !.*tries has no effect at temperature 0, where all tries are
plain(outcome=jnp.mean)  # !.*outcome has no effect with one try
TypeError:
plain(optimizer="sgd")  # !.*optimizer must be of type OptimizerConfig
plain(fitness=None)  # !.*fitness must be a function
plain(fitness=lambda s: s)  # !.*must take where, the scores that count
plain(outcome=3)  # !.*outcome must be a function
"""


@for_each("error, call, message", bad_calls(WHAT_MAKES_NO_SENSE_IS_REFUSED))
def test_what_makes_no_sense_is_refused(error, call, message):
    raises(error, call, message, globals())


def test_how_many_members_there_are():
    assert plain().population(5, 6) == 6
    assert plain(shared=False).population(5, 6) == 30
    assert plain(pairs=False).population(5, 3) == 3
    assert plain(baseline=2).population(5, 4) == 4
    plain().check_group_size(2)


def group_of(size, **changes):
    return plain(**changes).check_group_size(size)


def population(size, **changes):
    return plain(**changes).population(3, size)


MEMBERS_THAT_CANNOT_BE = r"""
ValueError:
population(3)  # !.*recipe 'plain' has pairs .* group_size must be even; got 3
group_of(3)  # !.*recipe 'plain' has pairs .* group_size must be even; got 3
group_of(1, pairs=False)  # !.*group_size must be at least 2; got 1
population(4, baseline=1)  # !.*baseline must be even with pairs; got 1
population(4, baseline=4)  # !.*baseline 4 leaves none of the 4 members
group_of(4, baseline=4, shared=False)  # !.*baseline 4 leaves none of the 4 members
"""


@for_each("error, call, message", bad_calls(MEMBERS_THAT_CANNOT_BE))
def test_members_that_cannot_be(error, call, message):
    raises(error, call, message, globals())


def test_scores_serve_one_update_of_the_weights_they_are_of():
    recipe = plain()
    recipe.check_passes(1, 1)
    recipe.check_staleness(0)
    with pytest.raises(ValueError, match="recipe 'plain': the scores .* one update; got epochs 2"):
        recipe.check_passes(2, 1)
    with pytest.raises(ValueError, match="older rollouts cannot be used; got max_staleness 1"):
        recipe.check_staleness(1)


def test_a_run_samples_from_members_and_does_nothing_else_for_them():
    expected = RunNeeds(
        samples_members=True,
        shares_prefix=False,
        tries=2,
        keeps_places=True,
        drops_failed=True,
        sums_gradients=False,
        reads_logp=False,
        reads_extras=False,
        freezes_leaves=True,
    )
    recipe = plain(shared=False, tries=2, temperature=1.0)
    assert recipe.needs == pickle.loads(pickle.dumps(recipe)).needs == expected
    assert recipe.moving({"scale": jnp.ones(2)}) == {"scale": False}
    assert is_recipe(plain()) and not is_recipe(jr.curation.in_order())


# Fitness


def test_fitness_of_shared_members():
    fitness, missing = plain().shape(S)
    close(fitness, [1.731635, -0.577212, -0.577212, -0.577212])
    assert missing == 0 and fitness.dtype == jnp.float32
    questions = plain(fitness=jr.evolution.question_fitness)
    close(questions.shape(S)[0], [0.507093, -0.169031, -0.169031, -0.169031])


def test_members_with_equal_means_are_tied_in_any_order_of_their_scores():
    """Float32 sums depend on the order, and on how one number is divided."""
    solved = jnp.full((8, 8), 0.1).at[jnp.arange(8), jnp.arange(8)].set(1.0)
    rng = np.random.default_rng(0)
    rewards = rng.uniform(size=8)
    shuffled = jnp.array([rng.permutation(rewards) for _ in range(40)], jnp.float32).T
    divided = jnp.array([[0.1, 0.3], [0.6, 0.4], [0.7, 0.7], [0.2, 0.2]])
    for recipe in (jr.recipes.open_es(), jr.recipes.es_qiu()):
        for scores in (solved, shuffled, divided, 1000 * divided):
            assert not jax.jit(recipe.shape)(scores)[0].any()
        better = recipe.shape(solved.at[0, 3].add(1e-3))[0]
        assert better[3] > 0 and len(set(np.delete(better, 3).tolist())) == 1


def test_fitness_of_members_that_are_dealt_out():
    grouped = plain(shared=False, fitness=jr.evolution.zscore)
    expected = jr.evolution.zscore(S).reshape(-1)
    close(grouped.shape(S)[0], expected)
    flat = plain(shared=False, fitness=lambda s, where: jr.evolution.zscore(s).reshape(-1))
    close(flat.shape(S)[0], expected)
    for row, values in zip(S, expected.reshape(3, 4), strict=True):
        mean = row.mean()
        assert all((v > 0) == (s > mean) for s, v in zip(row, values, strict=True))


def test_members_without_a_score_have_no_weight_with_their_partners():
    where = jnp.ones((3, 6), bool).at[0, 0].set(False)
    broken = jnp.concatenate([S, S[:, :2] + 0.5], axis=1).at[0, 0].set(7).at[2, 3].set(jnp.inf)
    counted = jnp.isfinite(broken) & where
    counted = counted.at[0, 1].set(False).at[2, 2].set(False)
    expected = jr.evolution.mean_fitness(jnp.where(counted, broken, 0.0), where=counted)
    fitness, missing = jax.jit(lambda s, w: plain().shape(s, where=w))(broken, where)
    close(fitness, expected)
    assert missing == 2
    alone = plain(pairs=False)
    assert alone.outcomes(broken, where=where)[1].sum() == 16
    nothing, missing = plain().shape(jnp.full(S.shape, jnp.nan))
    assert nothing.tolist() == [0.0] * 4 and missing == 12


@pytest.mark.of_many
@pytest.mark.parametrize("name", ["eggroll", "open_es", "es_qiu"])
def test_the_gradient_is_that_of_the_population_without_them(name):
    recipe = getattr(jr.recipes, name)(sigma=0.3)
    classes = recipe.classes(PARAMS)
    scores = jnp.array(np.random.default_rng(2).normal(size=(2, 8)), jnp.float32)
    broken = scores.at[:, 6].set(jnp.nan)  # the last pair; without pairs, one member
    fitness, _ = recipe.shape(broken)
    where = recipe.outcomes(broken)[1]
    found = recipe.gradient(PARAMS, classes, KEY, 3, fitness, where=where)
    stay = np.flatnonzero(where[0])
    grad = jr.evolution.eggroll_grad
    options = {"draws": jnp.array([0, 1, 2, 3, 4, 5, 7])} if name == "es_qiu" else {}
    options |= {} if name == "es_qiu" else {"sigma": 0.3}
    expected = grad(
        PARAMS,
        classes,
        KEY,
        3,
        recipe.fitness(scores[:, stay]),
        pairs=recipe.pairs,
        scale=recipe.scale,
        **options,
    )
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        close(a, b, atol=1e-5)


def test_tries_of_a_member_become_one_score():
    tried = plain(tries=2, temperature=1.0)
    scores = jnp.array([[0.0, 1, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0]])
    close(tried.shape(scores)[0], plain().shape(jnp.array([[1.0, 0, 1, 0], [0, 1, 0, 0]]))[0])
    mean = tried.replace(outcome=jr.bind(jr.evolution.best_of, k=1))
    close(mean.shape(scores)[0], plain().shape(jnp.array([[0.5, 0, 1, 0], [0, 0.5, 0, 0]]))[0])
    # A member with a try that was not graded has no outcome, and so has no partner to be compared.
    broken = scores.at[0, 0].set(jnp.nan)
    fitness, missing = tried.shape(broken)
    where = jnp.array([[False, False, True, True], [True] * 4])
    assert tried.outcomes(broken)[1].tolist() == where.tolist() and missing == 1
    known = jnp.array([[0.0, 0, 1, 0], [0, 1, 0, 0]])
    close(fitness, jr.evolution.mean_fitness(known, where=where))


TRIED, GROUPED = {"tries": 2, "temperature": 1.0}, {"fitness": jr.evolution.zscore}
SCORES_THAT_DO_NOT_FIT = r"""
ValueError:
plain().shape(S[0])  # !.*shape: scores must have 2 axes
plain(**TRIED).shape(jnp.ones((2, 7)))
    # !.*7 scores per prompt are not a multiple of its 2 tries per member
plain(**TRIED).shape(jnp.ones((2, 6)))  # !.*group_size must be even; got 3
plain().shape(jnp.ones((2, 5)))  # !.*group_size must be even; got 5
plain(**GROUPED).shape(S)  # !.*fitness zscore must return one value .* shared; got \(3, 4\)
plain(**GROUPED).shape(S[:1])  # !.*which are shared; got \(1, 4\)
plain(shared=False).shape(S)  # !.*each of 12 members, which are not shared; got \(4,\)
plain(fitness=jr.evolution.pair_sign).shape(S[:1])  # !.*each of 4 members, .* got \(1, 2\)
"""


@for_each("error, call, message", bad_calls(SCORES_THAT_DO_NOT_FIT))
def test_scores_that_do_not_fit(error, call, message):
    raises(error, call, message, globals())


# Members and gradient


FITNESS = jnp.array([1.0, -0.5, 0.25, -0.75])
MORE = {"rank": 2, "dtype": "bfloat16", "noise_reuse": 2, "others": "full"}


def of_recipe(recipe, fitness=FITNESS):
    return recipe.gradient(PARAMS, recipe.classes(PARAMS), KEY, 3, fitness)


def equal(left, right):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, left, right)))


def test_the_gradient_is_that_of_the_functions():
    evolution, given = jr.evolution, (KEY, 3, FITNESS)
    kernels = evolution.leaf_classes(PARAMS)
    every = evolution.leaf_classes(PARAMS, rules=[("*", "full")])
    expected = evolution.eggroll_grad(PARAMS, kernels, *given, sigma=0.2)
    assert equal(of_recipe(jr.recipes.eggroll(sigma=0.2)), expected)
    expected = evolution.open_es_grad(PARAMS, every, *given, sigma=0.2)
    assert equal(of_recipe(jr.recipes.open_es(sigma=0.2)), expected)
    expected = evolution.es_qiu_grad(PARAMS, every, *given)
    found = of_recipe(jr.recipes.es_qiu(sigma=0.2))
    assert equal(found, expected) and np.all(found["embed"]["embedding"] != 0)
    more = evolution.leaf_classes(PARAMS, others="full")
    options = {"rank": 2, "dtype": jnp.bfloat16, "noise_reuse": 2, "sign": True}
    expected = evolution.eggroll_grad(PARAMS, more, *given, sigma=0.1, **options)
    assert equal(of_recipe(plain(sign=True, **MORE)), expected)
    close(of_recipe(plain(chunk=1))["up"]["kernel"], of_recipe(plain())["up"]["kernel"])


@for_each("more", [{}, MORE, MORE | {"pairs": False}])
def test_members_are_those_of_the_functions(more):
    recipe, evolution = plain(**more), jr.evolution
    classes, members = recipe.classes(PARAMS), jnp.arange(4)
    options = {"sigma": 0.1, "rank": recipe.rank, "pairs": recipe.pairs}
    options |= {"dtype": jnp.dtype(recipe.dtype), "noise_reuse": recipe.noise_reuse}
    given = (PARAMS, classes, KEY, 3)
    delta = recipe.delta(*given, members)
    assert equal(delta, evolution.model_delta(*given, members, **options))
    assert equal(recipe.member(*given, 1), evolution.perturb(*given, 1, **options))


def test_what_draws_and_what_updates_agree():
    """A linear score, estimated without bias by every way to scale and to draw."""
    target = jnp.arange(24.0).reshape(4, 6) / 24
    for recipe in (plain(scale="gradient"), plain(scale="gradient", rank=3, pairs=False)):
        classes = recipe.classes(PARAMS)

        @jax.jit
        def estimate(epoch, recipe=recipe, classes=classes):
            def score(member):
                moved = recipe.member(PARAMS, classes, KEY, epoch, member)
                return jnp.sum(target * (moved["up"]["kernel"] - 0.5))

            fitness = jax.vmap(score)(jnp.arange(4096))
            return recipe.gradient(PARAMS, classes, KEY, epoch, fitness)["up"]["kernel"]

        close(-estimate(7), target, atol=0.25)


def test_members_without_noise_are_the_model_and_do_not_count():
    recipe = plain(baseline=2)
    given = (PARAMS, recipe.classes(PARAMS), KEY, 3)
    scale = recipe.delta(*given, jnp.arange(4))["up"][2].reshape(-1)
    close(scale, [0, 0, 0.1, -0.1])
    assert equal(recipe.member(*given, 1), PARAMS)
    assert not equal(recipe.member(*given, 2), PARAMS)
    assert equal(of_recipe(recipe), of_recipe(plain(), FITNESS.at[:2].set(0.0)))
    none = of_recipe(recipe, FITNESS.at[2:].set(0.0))
    assert not any(np.any(x) for x in jax.tree.leaves(none))
