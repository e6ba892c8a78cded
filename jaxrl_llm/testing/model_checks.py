"""Checks of a recipe together with a model and the sampler.

Each check raises an AssertionError that names the check, the recipe and the number that differs.
``extras`` are arrays that the recipe reads under names of its own, see ``cases.make_case``.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import logprobs
from jaxrl_llm.core import Array, ArrayTree, bind
from jaxrl_llm.core.packing import plan_packing
from jaxrl_llm.models import AttentionContext, Model
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.rollout import make_sampler
from jaxrl_llm.testing import cases
from jaxrl_llm.testing.array_checks import expect_policy_gradient
from jaxrl_llm.testing.cases import (
    Case,
    Extras,
    compiled,
    evaluate,
    expect_close,
    expect_close_loss,
    fail,
    far_shifts,
    make_case,
    own_names,
    with_computed,
)
from jaxrl_llm.testing.model import tiny_model
from jaxrl_llm.train.models.score import ModelScores, Scorer

# Temperatures and truncations of the sampler.
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20},
    {"temperature": 1.4, "top_p": 0.8},
    {"temperature": 0.8, "min_p": 0.5},
)


@functools.lru_cache(maxsize=1)
def model() -> tuple[Model, ArrayTree]:
    """The model of these checks. It has one layer, so it compiles fast.

    It is traced once for programs that call it on the same shapes, whose text remains the same.
    """
    network, params = tiny_model(num_layers=1)
    apply = jax.jit(network.apply, static_argnames="remat", inline=True)
    return network._replace(apply=apply), params


def score_batch(
    params: ArrayTree, batch: Batch, *, temperature: float = 1.0, statistics=()
) -> ModelScores:
    """The scores that training computes for a batch, with each prompt shared by its group.

    ``statistics`` are the pairs of name and function of a recipe.
    """
    network = model()[0]
    scorer = Scorer(network, temperature, teacher_matrix=_teacher_matrix(network, params))
    return scorer(params, batch, dict(statistics))


def _teacher_matrix(network: Model, params: ArrayTree) -> Array:
    """The output matrix of a policy that is its own teacher, as a constant."""
    return jax.lax.stop_gradient(network.output_matrix(params))


def score_rows(
    params: ArrayTree, batch: Batch, *, statistics=(), network: Model | None = None
) -> ModelScores:
    """The same scores from one padded row per rollout: the response directly after the prompt."""
    network, (P, G, T) = network or model()[0], batch.tokens.shape
    length = batch.prompt_tokens.shape[1] + T
    prompt_length = jnp.sum(batch.prompt_mask, axis=-1)[:, None, None]
    place = jnp.arange(length) - prompt_length
    prompts = jnp.pad(batch.prompt_tokens, ((0, 0), (0, T)))[:, None]
    responses = jnp.take_along_axis(
        batch.tokens, jnp.broadcast_to(jnp.clip(place, 0, T - 1), (P, G, length)), axis=-1
    )
    lengths = jnp.sum(batch.mask, axis=-1)[..., None]
    tokens = jnp.where(place < 0, prompts, responses)
    mask = jnp.broadcast_to(place, tokens.shape) < lengths
    rows = jnp.where(mask, tokens, 0).reshape(P * G, 1, length)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), rows.shape)
    context = AttentionContext(mask=mask.reshape(rows.shape))
    hidden, _ = network.apply(params, rows, positions, context)
    hidden = hidden.reshape(P, G, length, -1)
    before = jnp.broadcast_to(prompt_length - 1 + jnp.arange(T), (P, G, T))
    hidden = jnp.take_along_axis(hidden, before[..., None], axis=2)
    matrix = network.output_matrix(params)
    rows = {k: x for k, x in batch.extras.items() if x.shape[:3] == batch.mask.shape}
    cap = network.logit_cap
    taught = "teacher_hidden" in batch.extras
    values = logprobs.vocabulary_statistics(
        dict(statistics),
        hidden,
        matrix,
        batch.tokens,
        mask=batch.mask,
        logit_cap=cap,
        rows=rows,
        teacher=(batch.extras["teacher_hidden"], _teacher_matrix(network, params))
        if taught
        else None,
        teacher_logit_cap=cap if taught else None,
    )
    logp, entropy = logprobs.token_logprobs(
        hidden, matrix, batch.tokens, mask=batch.mask, logit_cap=cap
    )
    return ModelScores(logp, entropy, values)


class Layout(NamedTuple):
    """One way to compute scores, and its gradient, compiled for all recipes.

    ``score`` is ``(params, batch) -> ModelScores``, ``pull`` is ``(params, batch, gradients in what
    ModelScores holds) -> d params``.
    """

    score: Callable
    pull: Callable


def layout(function: Callable, recipe: Recipe) -> Layout:
    """The compiled forms of :func:`score_batch` or :func:`score_rows` with a recipe's statistics.

    Recipes without statistics share one layout.
    """
    return compiled_layout(bind(function, statistics=tuple(recipe.computed_from("policy").items())))


@functools.lru_cache(maxsize=16)  # seven without statistics, and those of one recipe with some
def compiled_layout(function: Callable) -> Layout:
    """The compiled forms of a function of parameters and a batch."""

    def pull(params, batch, cotangents):
        return jax.vjp(lambda p: function(p, batch), params)[1](ModelScores._make(cotangents))[0]

    return Layout(jax.jit(function), jax.jit(pull))


def model_case(recipe: Recipe, extras: Extras = None) -> Case:
    """The case of :func:`make_case` with log-probabilities near those of the model."""
    network, params = model()
    size = network.config.vocab_size
    batch = make_case(vocab_size=size, recipe=recipe, extras=extras).batch
    scored = layout(score_batch, recipe).score(params, with_computed(recipe, batch))
    rng = np.random.default_rng(1)

    def near(shift: float | np.ndarray = 0.0) -> Array:
        logp = scored.logp
        return logp + jnp.asarray(shift + rng.normal(0.0, 0.3, logp.shape), jnp.float32)

    there = np.asarray(batch.where & batch.mask.any(-1))
    old, behavior = far_shifts(np.asarray(batch.rewards), there)
    batch = batch.replace(old_logp=near(old), behavior_logp=near(behavior), ref_logp=near())
    return Case(batch, scored.logp, scored.entropy, scored.statistics)


def widened(batch: Batch, more: int) -> Batch:
    """The batch with ``more`` columns of padding after prompts and responses."""

    def pad(x, fill):
        return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, more),), constant_values=fill)

    def pad_extra(x):
        if x.shape[:3] != batch.mask.shape:
            return x
        fill = np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0
        widths = [(0, more if axis == 2 else 0) for axis in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=fill)

    return batch.replace(
        mask=pad(batch.mask, False),
        prompt_mask=pad(batch.prompt_mask, False),
        tokens=pad(batch.tokens, 1),
        prompt_tokens=pad(batch.prompt_tokens, 1),
        old_logp=pad(batch.old_logp, np.nan),
        behavior_logp=pad(batch.behavior_logp, np.nan),
        ref_logp=pad(batch.ref_logp, np.nan),
        extras={k: pad_extra(x) for k, x in batch.extras.items()},
    )


def packed(batch: Batch) -> Batch:
    """The batch packed into rows of twice the length, with two or more responses in a row."""
    plan = plan_packing(np.asarray(batch.mask), size=2 * batch.mask.shape[-1], most=2.0)
    return batch.replace(packing=jax.tree.map(jnp.asarray, plan))


def with_strange_ids(batch: Batch) -> Batch:
    """The batch with token ids that alternate between -1 and a million in its padding."""

    def fill(tokens, mask):
        strange = jnp.where(jnp.arange(tokens.shape[-1]) % 2, -1, 10**6)
        return jnp.where(mask, tokens, strange.astype(tokens.dtype))

    return batch.replace(
        tokens=fill(batch.tokens, batch.mask),
        prompt_tokens=fill(batch.prompt_tokens, batch.prompt_mask),
    )


def check_layouts(recipe: Recipe, *, extras: Extras = None) -> None:
    """The loss and its gradient in the parameters do not depend on the layout of the batch.

    The layouts are: a prompt shared by its group, more padding after prompts and responses, padding
    ids outside the vocabulary, several responses packed in a row, and one padded row per rollout
    that repeats the prompt.
    """
    params, case = model()[1], model_case(recipe, extras)
    functions, results = compiled(recipe), {}
    wide = widened(case.batch, 2)
    layouts = {
        "shared": (score_batch, case.batch),
        "more padding": (score_batch, wide),
        "ids that do not exist": (score_batch, with_strange_ids(case.batch)),
        "packed": (score_batch, packed(case.batch)),
        "rows": (score_rows, wide),
    }
    for name, (function, batch) in layouts.items():
        way = layout(function, recipe)
        prepared, _ = functions.prepare(batch.replace(packing=None), recipe.init())
        batch = with_computed(recipe, batch, prepared)
        loss, grads = functions.loss_and_grad(*way.score(params, batch), prepared)
        results[name] = (loss, way.pull(params, batch, grads))
    want_loss, want = results.pop("shared")
    for name, (loss, got) in results.items():
        where = f"with the layout {name!r}"
        expect_close_loss("check_layouts", recipe, f"loss {where}", loss, want_loss, tolerance=1e-4)
        expect_close("check_layouts", recipe, f"gradient {where}", got, want, tolerance=1e-4)


@functools.lru_cache(maxsize=1)
def sampled_batches() -> list[tuple[dict, Batch]]:
    """Pairs of sampler options and a batch of rollouts sampled with them.

    ``old_logp`` and ``behavior_logp`` are what the sampler reports: log-probabilities over the
    truncated support, as in the training loop.
    """
    (network, params), template = model(), make_case()
    prompts = [
        np.asarray(row)[np.asarray(mask)].tolist()
        for row, mask in zip(template.batch.prompt_tokens, template.batch.prompt_mask, strict=True)
    ]
    batches = []
    for options in SAMPLING:
        sample = make_sampler(
            network,
            max_new_tokens=cases.T,
            group_size=cases.G,
            stop_ids=(0, 1, 2),
            temperature=options["temperature"],
            top_k=options.get("top_k"),
            top_p=options.get("top_p"),
            min_p=options.get("min_p"),
            buckets=(template.batch.prompt_tokens.shape[1],),
        )
        rollout = sample(params, jax.random.key(0), prompts)
        batch = template.batch.replace(
            tokens=rollout.tokens,
            mask=rollout.mask,
            prompt_tokens=rollout.prompt_tokens,
            prompt_mask=rollout.prompt_mask,
            old_logp=rollout.behavior_logp,
            behavior_logp=rollout.behavior_logp,
            support=rollout.support,
        )
        batches.append((options, batch))
    return batches


def rollout_cases(recipe: Recipe, extras: Extras = None) -> list[tuple[dict, Case]]:
    """Rollouts sampled from the model, with the scores that training computes for them."""
    pairs = []
    for options, batch in sampled_batches():
        # The values of a critic have one entry per head.
        if recipe.critic is not None or own_names(recipe):
            batch = batch.replace(extras=make_case(recipe=recipe, extras=extras).batch.extras)
        way = layout(bind(score_batch, temperature=options["temperature"]), recipe)
        scored = way.score(model()[1], with_computed(recipe, batch))
        # Only the scores need the support; without it, the recipe compiles for one kind of batch.
        batch = batch.replace(ref_logp=scored.logp, support=None)
        pairs.append((options, Case(batch, scored.logp, scored.entropy, scored.statistics)))
    return pairs


def check_rollouts(recipe: Recipe, *, extras: Extras = None) -> None:
    """The ratio is 1 on rollouts of the model itself, at any temperature and truncation.

    ``old_logp`` is that of the sampler, at its temperature and over the truncated support. The
    gradient must be the plain policy gradient.
    """
    for options, case in rollout_cases(recipe, extras):
        mask = np.asarray(case.batch.mask)
        gap = np.abs(np.asarray(case.logp - case.batch.old_logp))[mask].max()
        if gap > 1e-4:
            fail("check_rollouts", recipe, f"sampler and trainer differ by {gap:.2g} at {options}.")
        expect_policy_gradient("check_rollouts", recipe, case, 1e-3)


@functools.lru_cache(maxsize=8)
def bfloat16_scores(statistics: tuple[tuple[str, Callable], ...]) -> Callable[[Batch], ModelScores]:
    """``batch -> ModelScores`` of a bfloat16 model, compiled once for all these statistics."""
    network, params = tiny_model(num_layers=1, dtype="bfloat16")
    scorer = Scorer(network, teacher_matrix=_teacher_matrix(network, params))
    score = jax.jit(lambda params, batch: scorer(params, batch, dict(statistics)))
    return lambda batch: score(params, batch)


def check_model_precision(recipe: Recipe, *, extras: Extras = None) -> None:
    """With a bfloat16 model, logp, loss, advantages and weights are float32."""
    batch = model_case(recipe, extras).batch
    score = bfloat16_scores(tuple(recipe.computed_from("policy").items()))
    scored = score(with_computed(recipe, batch))
    case = Case(batch, scored.logp, scored.entropy, scored.statistics)
    prepared, loss, *_ = evaluate(recipe, case)
    values = {
        "logp": scored.logp,
        "loss": loss,
        "advantages": prepared.advantages,
        "weights": prepared.weights,
    }
    for what, value in values.items():
        if (dtype := jnp.result_type(value)) != jnp.float32:
            fail("check_model_precision", recipe, f"{what} is {dtype}, not float32.")
    if not np.isfinite(loss):
        fail("check_model_precision", recipe, f"the loss is {loss}.")
