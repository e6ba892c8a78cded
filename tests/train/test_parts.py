"""The parts of a step: the passes that they read, counted for every preset."""

import jax
import numpy as np
import optax
import pytest
from rows import for_each
from step_makers import flat_step

import jaxrl_llm as jr
from jaxrl_llm.recipes import catalog
from jaxrl_llm.testing.cases import make_case
from jaxrl_llm.train.models import critic
from jaxrl_llm.train.models.score import Scorer
from jaxrl_llm.train.update.cost import describe, forward_passes
from jaxrl_llm.train.update.part import At, Part, Setup, Teacher
from jaxrl_llm.train.update.parts import PARTS, gradient_norms, parts_of
from jaxrl_llm.train.update.parts import critic as critic_part
from jaxrl_llm.train.update.reads import read_batch

OPTIMIZER = optax.sgd(0.1)


@for_each(
    "recipe, passes",
    [
        (jr.recipes.dr_grpo(length=4), {}),
        (jr.recipes.grpo(), {"reference": 1}),
        (jr.recipes.grpo().replace(minibatches=2), {"policy": 1, "reference": 1}),
        (jr.recipes.ppo(), {"policy": 1, "critic": 1}),
        (jr.recipes.kto(), {"reference": 2, "policy": 1}),  # after other prompts too
        (jr.recipes.igpo(), {"reference": 1, "policy": 1}),
    ],
)
def test_worked_costs(recipe, passes):
    options = {"epochs": recipe.epochs, "minibatches": recipe.minibatches}
    assert forward_passes(recipe, **options) == passes
    told = describe(recipe, **options)
    for name, count in passes.items():
        assert f"{name} {count} pass" in told


def test_several_reads_of_one_model_are_one_pass():
    recipe = jr.recipes.grpo(kl_coef=0.0)
    entropy = jr.recipes.Computed("spread", lambda logits, targets: logits.std(-1), "old_policy")
    recipe = recipe.replace(
        advantage=jr.stateless(lambda rewards, old_logp, spread: rewards), computed=(entropy,)
    )
    assert forward_passes(recipe) == forward_passes(recipe, minibatches=2) == {"policy": 1}


def policy_gradients():
    names = sorted(set(catalog.PRESETS) - set(catalog.EVOLUTION_PRESETS))
    recipes = {name: catalog.preset(name, length=6, num_prompts=8) for name in names}
    return [name for name, recipe in recipes.items() if recipe.likelihood is None]


@pytest.fixture
def passes_made(monkeypatch):
    """Each pass of a model that is made: the model and the rows that it reads."""
    made = []

    def note(kind, params, batch):
        weights = jax.tree.leaves(params)[0]
        made.append((kind, id(weights), id(batch.tokens), id(batch.prompt_tokens)))

    def of_scorer(name, kind):
        function = getattr(Scorer, name)

        def noted(self, params, batch, *args, **options):
            note(kind, params, batch)
            return function(self, params, batch, *args, **options)

        monkeypatch.setattr(Scorer, name, noted)

    for name, kind in (("__call__", "policy"), ("teacher", "teacher"), ("answers", "answers")):
        of_scorer(name, kind)
    values = critic.critic_values

    def of_critic(model, params, batch, **options):
        note("critic", params, batch)
        return values(model, params, batch, **options)

    monkeypatch.setattr(critic_part, "critic_values", of_critic)
    return made


def case_of(recipe):
    """A batch with only the entries that a run brings, the first state, and what else it needs."""
    model, params = jr.testing.tiny_model(num_layers=1)
    batch = make_case(recipe=recipe).batch
    brought = {"teacher_prompt_tokens", "teacher_prompt_mask", "texts"} | recipe.required_fields
    brought -= recipe.step_fields - ({"kl_ref_logp"} if recipe.reference is None else set())
    extras = {key: x for key, x in batch.extras.items() if key in brought}
    if recipe.learns_from_model:
        extras = {key: x for key, x in extras.items() if not key.startswith("teacher_prompt")}
    if "answer_logp" in recipe.required_fields:
        ids = jax.numpy.zeros((batch.mask.shape[0], 2), int)
        extras |= {"ground_truth": ids, "ground_truth_mask": ids == 0}
    moves = recipe.reference is not None
    batch = batch.replace(old_logp=None, ref_logp=None if moves else batch.ref_logp, extras=extras)
    second = {}
    if recipe.second_model is not None:
        heads = recipe.second_model.heads
        body = jr.train.init_critic(model, params, heads=heads, key=jax.random.key(1))
        second = {"critic": body, "critic_optimizer": OPTIMIZER}
    shape = model.output_matrix(params).shape
    shape = shape if recipe.computed_from("optimizer") else None
    optimizer = optax.adam(0.1) if shape else OPTIMIZER
    key = jax.random.key(0)
    state = jr.train.init_state(params, optimizer, recipe, key=key, output_shape=shape, **second)
    other = Teacher(model, jax.tree.map(lambda x: x + 0, params))
    teacher = other if recipe.learns_from_model else None
    return batch, state, optimizer, teacher


@pytest.mark.of_many
@pytest.mark.parametrize("name", policy_gradients())
def test_a_step_reads_each_model_once_for_the_same_rows(name, passes_made):
    recipe = catalog.preset(name, length=6, num_prompts=8)
    model, _ = jr.testing.tiny_model(num_layers=1)
    batch, state, _, teacher = case_of(recipe)
    scored = {"epochs": recipe.epochs, "minibatches": recipe.minibatches}
    setup = Setup(
        recipe=recipe,
        scorer=Scorer(model),
        score_old=recipe.epochs * recipe.minibatches > 1 and recipe.compares_old,
        second_model=model,
        learning_rate=0.1,
    )
    frozen = {"reference"} if recipe.reference is None else set()
    counted = {k: n for k, n in forward_passes(recipe, **scored).items() if k not in frozen}

    def read(state, batch):
        at = At(setup, state, 1, key=jax.random.key(0), teacher=teacher)
        # Norms are a backward pass for each response, which is no read.
        parts = parts_of(setup, without=(gradient_norms.part,))
        return read_batch(parts, state, batch, at)[1]

    static = {"data_cursor": (), "collector_state": ()}
    jax.eval_shape(read, state._replace(**static), batch)
    assert len(passes_made) == len(set(passes_made)) == sum(counted.values())


@pytest.mark.slow
@for_each(
    "recipe",
    [
        jr.recipes.prime(),
        jr.recipes.seeupo(),
        jr.recipes.capo(learning_rate=0.1),
        jr.recipes.minillm(),
        jr.recipes.ppo_max(critic_warmup=1),
    ],
)
def test_a_step_of_pieces_is_make_steps(recipe):
    model, _ = jr.testing.tiny_model(num_layers=1)
    batch, state, optimizer, teacher = case_of(recipe)
    options = {"remat": "none", "learning_rate": 0.1, "teacher": teacher}
    if recipe.second_model is not None:
        options["critic_optimizer"] = OPTIMIZER
    pieces = flat_step(model, recipe, optimizer, make=jr.train.make_pieces, **options)

    @jax.jit
    def step(state, batch):
        begun = pieces.begin(state, batch, None if teacher is None else teacher.params)

        def update(carry, rows, trains):
            gradients = pieces.gradients(begun, carry, rows)
            return pieces.apply(begun, carry, rows, gradients, trains=trains)

        return pieces.finish(begun, update)

    whole = flat_step(model, recipe, optimizer, donate=False, **options)
    mine = state
    for _ in range(2):
        mine, metrics = step(mine, batch)
        state, expected = whole(state, batch)
        assert metrics.keys() == expected.keys()
    pairs = zip(jax.tree.leaves((mine, metrics)), jax.tree.leaves((state, expected)), strict=True)
    for one, other in pairs:
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_every_part_has_one_place_of_passes_at_most():
    recipe = jr.recipes.seeupo()
    parts = parts_of(Setup(recipe=recipe, scorer=None))
    assert [part.name for part in parts if part.passes is not None] == ["turn_by_turn"]
    assert len({make.__module__ for make in PARTS}) == len(PARTS)
    assert all(isinstance(part, Part) for part in parts)
