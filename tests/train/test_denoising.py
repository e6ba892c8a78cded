"""Likelihoods of a model that denoises: against plain forwards, their laws, and the loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exact_resume import assert_resumes
from helpers import batch_with, refuses
from step_makers import flat_step
from tiny_run import tiny_run

import jaxrl_llm as jr
from jaxrl_llm.data.order import Cursor
from jaxrl_llm.diffusion import elbo_likelihood, mean_field_likelihood, sandwiched_likelihood
from jaxrl_llm.models import AttentionContext
from jaxrl_llm.rollout import DenoisingOptions
from jaxrl_llm.train import (
    CheckpointConfig,
    draw_masks,
    init_state,
    make_gradients,
    make_step,
    train,
)
from jaxrl_llm.train.experiment.rollouts import collect_rollouts
from jaxrl_llm.train.experiment.setup import load_experiment
from jaxrl_llm.train.models.denoising import check_unmasked, scorer_of
from jaxrl_llm.train.update.score_batch import score_reference

pytestmark = pytest.mark.usefixtures("shared_programs")

V, MASK, T = 12, 11, 4
KL = jr.bind(jr.regularizers.kl_to_reference, estimator="k3", coef=0.1)
TOKENIZER = jr.testing.ByteTokenizer()
PROMPTS = jnp.array([[3, 4, 5], [6, 0, 0]])
LENGTHS = jnp.array([[4, 2], [3, 4]])


@pytest.fixture(scope="module")
def tiny():
    model, params = jr.testing.tiny_model(
        num_layers=1, width=16, causal=False, tied=False, vocab_size=V, mask_id=MASK
    )
    return model, jax.tree.map(lambda x: 1.4 * x, params)


def batch_of(likelihood, seed=0):
    tokens = jax.random.randint(jax.random.key(5), (2, 2, T), 0, MASK)
    mask = jnp.arange(T) < LENGTHS[..., None]
    batch = batch_with(
        tokens,
        mask=mask,
        rewards=jnp.array([[1.0, 0.0], [0.0, 2.0]]),
        prompt_tokens=PROMPTS,
        prompt_mask=jnp.array([[True, True, True], [True, False, False]]),
    )
    draws = draw_masks(likelihood, jax.random.key(seed), batch)
    return batch.replace(extras=draws)


def recipe_of(likelihood, **changes):
    return jr.recipes.dr_grpo(length=T).replace(
        name="test", weights=jr.aggregate.token_mean, likelihood=likelihood, **changes
    )


@functools.partial(jax.jit, static_argnums=0)
def whole_logits(model, params, row):
    context = AttentionContext(jnp.ones(row.shape, bool))
    hidden, _ = model.apply(params, row, jnp.arange(row.shape[-1])[None, None], context)
    return (hidden @ model.output_matrix(params).T)[0, 0]


def plain(model, params, row):
    """Log-probabilities over the vocabulary without the mask id, of one row without padding."""
    row = np.asarray(row)[None, None]
    logits = np.asarray(whole_logits(model, params, row), np.float64) / 0.8
    logits[:, MASK] = -np.inf
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    "likelihood",
    [
        mean_field_likelihood(p=0.5),
        pytest.param(elbo_likelihood(samples=2, masks="complementary"), marks=pytest.mark.slow),
    ],
    ids=["mean_field", "elbo"],
)
def test_scores_equal_plain_forwards(tiny, likelihood):
    """Cells behind the end hold the mask id, and what they held before counts for nothing."""
    model, params = tiny
    batch = batch_of(likelihood)
    scorer = scorer_of(recipe_of(likelihood), model, temperature=0.8)
    scored = jax.jit(scorer)(params, batch)
    masked, hidden, t = (
        np.asarray(batch.extras[name]) for name in ("masked", "masked_prompt", "noise")
    )
    J = masked.shape[-1]
    logp, entropy = np.zeros(batch.mask.shape), np.zeros(batch.mask.shape)
    for p, g, j in np.ndindex(2, 2, J):
        prompt = np.where(hidden[p, g, :, j], MASK, PROMPTS[p])[np.asarray(batch.prompt_mask[p])]
        shown = ~masked[p, g, :, j] & np.asarray(batch.mask[p, g])
        values = plain(model, params, [*prompt, *np.where(shown, batch.tokens[p, g], MASK)])
        values = values[len(prompt) :]
        at = np.flatnonzero(masked[p, g, :, j])
        logp[p, g, at] += values[at, np.asarray(batch.tokens[p, g])[at]] / t[p, g, j] / J
        each = -(np.exp(values[:, :MASK]) * values[:, :MASK]).sum(-1)
        entropy[p, g, at] += each[at] / masked[p, g].sum(-1)[at]
    np.testing.assert_allclose(scored.logp, logp, atol=1e-4)
    np.testing.assert_allclose(scored.entropy, entropy, atol=1e-4)
    junk = batch.replace(tokens=jnp.where(batch.mask, batch.tokens, 10**6))
    assert (jax.jit(scorer)(params, junk).logp == scored.logp).all()


@pytest.mark.slow
def test_a_block_is_scored_behind_those_before_it_uncovered(tiny):
    """Prompts of 3 and 1 tokens, blocks of 2: one forward scores as one a block does."""
    block = 2
    blocks = jr.models.make_model(dataclasses.replace(tiny[0].config, block_length=block))
    params, likelihood = tiny[1], elbo_likelihood(samples=2)
    batch = batch_of(likelihood)
    recipe = recipe_of(likelihood)
    scored = jax.jit(scorer_of(recipe, blocks, temperature=0.8))(params, batch)
    masked, t = (np.asarray(batch.extras[name]) for name in ("masked", "noise"))
    logp = np.zeros(batch.mask.shape)
    for p, g, j in np.ndindex(2, 2, masked.shape[-1]):
        prompt = np.asarray(PROMPTS[p])[np.asarray(batch.prompt_mask[p])]
        clean = np.where(np.asarray(batch.mask[p, g]), batch.tokens[p, g], MASK)
        shown = np.where(masked[p, g, :, j], MASK, clean)
        of = (len(prompt) + np.arange(T)) // block
        for b in np.unique(of):
            # What lies behind the block is cut off: it does not see that.
            row = np.where(of == b, shown, clean)[of <= b]
            values = plain(blocks, params, [*prompt, *row])[len(prompt) :]
            at = np.flatnonzero((of == b) & masked[p, g, :, j])
            logp[p, g, at] += values[at, np.asarray(batch.tokens[p, g])[at]] / t[p, g, j] / 2
    np.testing.assert_allclose(scored.logp, logp, atol=1e-4)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    "likelihood",
    [elbo_likelihood(samples=2, masks="quadrature"), sandwiched_likelihood(samples=3, block=2)],
    ids=["quadrature", "sandwiched"],
)
def test_microbatches_and_the_ratio_of_one_policy(tiny, likelihood):
    model, params = tiny
    recipe = recipe_of(likelihood)
    scorer = scorer_of(recipe, model)
    batch = batch_of(likelihood)
    old_logp = scorer(params, batch).logp
    state = init_state(params, optax.sgd(0.1), recipe, key=jax.random.key(0))
    prepared, _ = recipe.prepare(batch.replace(old_logp=old_logp), state.algo_state)
    whole = make_gradients(model, recipe)(state, prepared)
    parts = make_gradients(model, recipe, microbatches=2)(state, prepared)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    if likelihood.draw.__name__ != "_draw_blocks":  # else the bound depends on the advantage
        np.testing.assert_allclose(whole.logp, old_logp, atol=1e-5)
    # As many tokens of each row are scored as the masks cover.
    assert (jnp.where(prepared.mask, 0.0, whole.logp) == 0).all()


@pytest.mark.slow
def test_each_pass_has_its_masks_and_its_ratio(tiny):
    """Two passes over a batch are two steps on it, of which each has other tokens hidden."""
    model, params = tiny
    recipe, alone = (
        recipe_of(mean_field_likelihood(p=0.5, passes=passes), regularizers=(KL,))
        for passes in (2, 1)
    )
    batch, optimizer = batch_of(recipe.likelihood), optax.sgd(5.0)
    first, second = (batch.extras["masked_prompt"][..., i] for i in (0, 1))
    assert (first != second).any()
    reference = jax.tree.map(lambda x: 0.8 * x, params)
    batch = score_reference(batch, recipe, scorer_of(recipe, model), reference)
    state = init_state(params, optimizer, recipe, key=jax.random.key(0))
    after, metrics = flat_step(model, recipe, optimizer, epochs=2, donate=False)(state, batch)
    assert metrics["approx_kl"] > 0

    score = scorer_of(alone, model)
    moved = init_state(params, optimizer, alone, key=jax.random.key(0))
    for number in (0, 1):
        extras = {k: batch.extras[k][..., [number]] for k in ("masked", "masked_prompt", "noise")}
        part = batch.replace(extras={**batch.extras, **extras})
        part = part.replace(old_logp=score(params, part).logp, ref_logp=score(reference, part).logp)
        moved, _ = make_step(model, alone, optimizer, donate=False)(moved, part)
    moves = [jax.tree.map(jnp.subtract, x.params, params) for x in (after, moved)]
    for a, b in zip(*map(jax.tree.leaves, moves), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(moves)) > 1e-2


def reads_last_kl(advantages, mask, *, last_kl):
    return mask & (last_kl >= 0)


@pytest.mark.of_many
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "microbatches"),
    [(jr.bind(jr.recipes.wd1, p=0.5), 1), (jr.bind(jr.recipes.spg, block=2, p=0.3), 2)],
    ids=["wd1", "spg"],
)
def test_passes_without_a_ratio_are_steps_on_the_same_samples(tiny, make, microbatches):
    """Of the advantages of the first pass and the masks of each; the old policy is not scored."""
    model, params = tiny
    passes = 3
    recipe, alone = (make(epochs=n).replace(selection=reads_last_kl) for n in (passes, 1))
    batch, optimizer = batch_of(recipe.likelihood), optax.sgd(2.0)
    state = init_state(params, optimizer, recipe, key=jax.random.key(0))
    options = {"microbatches": microbatches, "donate": False}
    whole = flat_step(model, recipe, optimizer, epochs=passes, **options)
    read = whole.prepared(state, batch)
    assert read.old_logp is None and "old_draw_logp" not in read.extras
    after, metrics = whole(state, batch)
    assert metrics["updates"] == passes
    assert not {"approx_kl", "ratio_max", "clip_fraction"} & set(metrics)

    moved = init_state(params, optimizer, alone, key=jax.random.key(0))
    count = batch.extras["noise"].shape[-1] // passes
    step, gone = make_step(model, alone, optimizer, **options), []
    for number in range(passes):
        here = slice(number * count, (number + 1) * count)
        extras = {k: batch.extras[k][..., here] for k in ("masked", "masked_prompt", "noise")}
        part = batch.replace(extras={**batch.extras, **extras})
        moved, _ = step(moved, part)
        gone.append(jax.tree.map(jnp.subtract, moved.params, params))
    for a, b in zip(*map(jax.tree.leaves, (after.params, moved.params)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    steps = [max(float(jnp.abs(x).max()) for x in jax.tree.leaves(g)) for g in gone]
    assert steps[0] > 1e-2 and abs(steps[-1] - steps[0]) > 1e-3

    # The KL of the update is of bounds of the same kinds, before the first pass and after the last.
    prepared, _ = recipe.prepare(batch, recipe.init())
    new, old = (scorer_of(recipe, model)(x, prepared).logp for x in (after.params, params))
    kl = jr.diagnostics.approx_kl(new, old, prepared.mask, estimator="k3")
    np.testing.assert_allclose(after.algo_state.last_kl, kl, rtol=1e-3)
    assert kl > 1e-3
    # An old policy that a batch brings is of the draws of all passes: no metric compares with it.
    brought = batch.replace(old_logp=old)
    assert set(whole(state, brought)[1]) == set(metrics)


@pytest.mark.slow
def test_a_run_of_a_method_without_a_ratio_makes_its_passes(tmp_path):
    config = tiny_run(tmp_path / "run", model=denoiser, recipe="spg", steps=3, microbatches=2)
    rows = train(config).history
    assert [row["updates"] for row in rows] == [4] * 3
    assert all(row["grad_norm"] > 0 and row["skipped"] == 0 for row in rows)
    assert not any("approx_kl" in row for row in rows)


def test_what_does_not_go_together(tiny):
    model, params = tiny
    causal, _ = jr.testing.tiny_model(num_layers=1)
    recipe, spg, optimizer = recipe_of(mean_field_likelihood()), jr.recipes.spg(), optax.sgd(0.1)
    of_grpo = "causal=False does not have; give the recipe a likelihood"
    refuses("with a likelihood needs a denoising model", make_step, causal, recipe, optimizer)
    refuses(of_grpo, make_step, model, jr.recipes.grpo(), optimizer)
    shared = {"shared_prefix_len": 2}
    refuses("responses cannot share a prefix", flat_step, model, recipe, optimizer, **shared)
    told = "draws masks for 8 passes over a batch; got epochs 1"
    refuses(told, flat_step, model, jr.recipes.espo(), optimizer, epochs=1)
    critic = jr.recipes.ppo_max().replace
    refuses("has a likelihood .* and a critic", critic, likelihood=mean_field_likelihood())

    def of_sampler(logp, old_logp, adv, mask, *, behavior_logp):
        return logp

    refuses("reads behavior_logp, which only a causal", recipe.replace, surrogate=of_sampler)
    refuses("rollouts of other weights .* would bias it", recipe.check_staleness, 1)
    # Its estimate is of another bound where the advantage is known.
    terms = {"regularizers": jr.recipes.diffu_grpo().regularizers}
    refuses("reads ref_logp, which cannot be compared with", spg.replace, **terms)
    sandwiched = recipe_of(sandwiched_likelihood())
    refuses("depends on the advantages", sandwiched.check_passes, 2, 1)
    of_tokens = batch_of(spg.likelihood).replace(advantages=jnp.ones((2, 2, T)))
    score = scorer_of(spg, model)
    refuses("one advantage per response", jax.eval_shape, score, params, of_tokens)
    # With blocks the model has a cache, and would sample as if it predicted the next token.
    blocks = jr.models.make_model(dataclasses.replace(model.config, block_length=2))
    told = "{}: the model is a denoising model".format
    sizes = {"max_new_tokens": 4, "group_size": 1}
    refuses(told("make_sampler"), jr.rollout.make_sampler, blocks, **sizes)
    refuses(told("make_engine"), jr.rollout.make_engine, blocks)
    refuses(told("score"), jr.train.make_scorer(blocks), params, of_tokens)
    kind = r"likelihood must be a diffusion\.Likelihood"
    refuses(kind, recipe.replace, likelihood=jr.diffusion.elbo, error=TypeError)
    bare = batch_of(recipe.likelihood).replace(extras={})
    refuses("the batch has no masked in its extras", scorer_of(recipe, model), None, bare)


def test_a_batch_that_holds_the_mask_id_is_refused(tiny):
    held = batch_of(mean_field_likelihood())

    def check(**changes):
        check_unmasked(held.replace(**changes), tiny[0], ["a", "b"])

    tokens = held.tokens.at[1, 0, 3].set(MASK)  # behind the end
    check(tokens=tokens)
    told = "a response to prompt 'b' holds the mask id 11"
    refuses(told, check, tokens=tokens.at[1, 0, 2].set(MASK))
    prompts = held.prompt_tokens.at[0, 1].set(MASK)
    refuses("^prompt 'a' holds the mask id 11", check, prompt_tokens=prompts)


def denoiser():
    model, params = jr.testing.tiny_model(num_layers=1, causal=False, vocab_size=260, mask_id=259)
    return model, params, TOKENIZER


class Undeclared(type(jr.curation.budgeted((3, 40)))):
    needs = jr.curation.Needs(sends_text=True)


@pytest.mark.slow
def test_a_row_of_several_prompts_is_refused_once_it_is_there(tmp_path):
    collector = Undeclared(jr.curation.in_order(), (3, 40))
    recipe = recipe_of(mean_field_likelihood()).replace(collector=collector)
    with pytest.raises(ValueError, match="a response to prompt 'q..' has tokens that are read and"):
        train(tiny_run(tmp_path, model=denoiser, recipe=recipe))


@pytest.mark.slow
def test_a_run_resumes_exactly(tmp_path):
    sampling = jr.train.SamplingConfig(
        group_size=2, max_new_tokens=4, denoising=DenoisingOptions(steps=2, remasking="random")
    )
    options = {"model": denoiser, "recipe": recipe_of(elbo_likelihood(samples=2)), "steps": 3}
    options |= {"sampling": sampling, "checkpoint": CheckpointConfig(every=1, keep=3)}
    config = tiny_run(tmp_path / "whole", **options)
    rows = assert_resumes(config, train(config), tmp_path / "again").history
    # Its own log-probabilities are of an order, which nothing compares with an estimate.
    assert all("entropy" in x and "sampler_gap" not in x for x in rows)


def demonstrated():
    """Prompts whose reference answers end in a final one."""
    prompts = (
        jr.data.Prompt(f"q{n}", "z", metadata={"demonstration": "abcz"}, id=str(n))
        for n in range(8)
    )
    return jr.data.PromptSet(prompts, source="tiny")


def holds_abc(prompt, completion, metadata):
    """What a random model never writes."""
    return float(completion.startswith("abc") and "z" not in completion)


@pytest.mark.slow
def test_groups_that_fail_are_sampled_around_chunks_of_the_reference(tmp_path):
    """All of the reference but its answer stands in its place; half of a group is replaced."""
    recipe = jr.recipes.igpo_inpainting(shortest=2, longest=2, low=1.0, high=1.0, hint_share=0.0)
    options = {
        "model": denoiser,
        "data": jr.train.DataConfig(prompts=demonstrated, chat=False),
        "reward": holds_abc,
        "recipe": recipe,
        "sampling": jr.train.SamplingConfig(group_size=4, max_new_tokens=6),
    }
    experiment, params = load_experiment(tiny_run(tmp_path / "run", **options))
    start = params, jax.random.key(0), Cursor(), experiment.collector.init(8)
    made = collect_rollouts(experiment, *start, number=0, version=0)
    batch = made.batch
    shown = TOKENIZER.encode("abc")
    held = np.asarray(batch.extras["hint_mask"])
    assert (held[:, :2] == (np.arange(held.shape[-1]) < 3)).all() and not held[:, 2:].any()
    assert (np.asarray(batch.tokens)[:, :2, :3] == shown).all()
    assert np.asarray(batch.rewards).tolist() == [[1.0, 1.0, 0.0, 0.0]] * 4
    assert made.metrics["rollouts_sampled"] == 32 and made.metrics["hint_tokens"] == 4 * 2 * 3
    # Hints do not train here, and what was sampled around them does.
    state = init_state(params, optax.sgd(0.1), recipe, key=jax.random.key(0))
    extras = {**batch.extras, "old_entropy": np.ones(held.shape, np.float32)}
    prepared, _ = recipe.prepare(
        batch.replace(
            extras=extras, old_logp=jnp.zeros(held.shape), ref_logp=jnp.zeros(held.shape)
        ),
        state.algo_state,
    )
    # Its ratio is of the whole sequence, so the hints stay in the mask, at weight 0.
    trained = recipe.responses(prepared).mask
    assert (np.asarray(trained) == np.asarray(batch.mask) & ~held).all()
    assert (np.asarray(prepared.mask) == np.asarray(batch.mask)).all()
    result = train(tiny_run(tmp_path / "run", **options, steps=2))
    # No group has a right response of its own.
    assert all(row["grad_norm"] > 0 for row in result.history)
    with pytest.raises(
        ValueError, match="fixes tokens of a response, which needs a denoising model"
    ):
        train(tiny_run(tmp_path / "causal", recipe=recipe, data=options["data"]))
    options["recipe"] = jr.recipes.igpo_inpainting(answer="id")
    with pytest.raises(ValueError, match="'demonstration' of prompt '0' does not hold its 'id'"):
        train(tiny_run(tmp_path / "bad", **options))


def test_what_a_run_refuses(tmp_path):
    sampling, recipe = jr.train.SamplingConfig, recipe_of(mean_field_likelihood())

    def load(**changes):
        load_experiment(tiny_run(tmp_path / "run", **{"recipe": recipe} | changes))

    refuses("needs a denoising model; this one is causal", load)  # before a step is made
    few = sampling(group_size=2, max_new_tokens=4, denoising=DenoisingOptions(steps=2))
    refuses("denoising has no effect with a causal model", load, recipe="dr_grpo", sampling=few)
    top = sampling(group_size=2, max_new_tokens=4, top_k=3)
    refuses("top_k has no effect", load, model=denoiser, sampling=top)
    budgets = recipe.replace(collector=jr.curation.budgeted((3, 40)))
    told = "sends different messages for the members of a row"
    refuses(told, load, model=denoiser, recipe=budgets)
    nine = DenoisingOptions(steps=9)
    refuses("9 steps are more than the 4 tokens", sampling, max_new_tokens=4, denoising=nine)
    # Before anything is sampled.
    rows = jr.data.PromptSet([jr.data.Prompt("a"), jr.data.Prompt("a\x07", id="bell")])
    seven = jr.testing.tiny_model(num_layers=1, causal=False, vocab_size=260, mask_id=7)
    data = jr.train.DataConfig(prompts=lambda: rows, chat=False)
    told = "^data: prompt 'bell' holds the mask id 7"
    refuses(told, load, model=lambda: (*seven, TOKENIZER), data=data)
