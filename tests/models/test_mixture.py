"""A model that draws each token from the mixture of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.forwards import logits_of

import jaxrl_llm as jr
from jaxrl_llm.testing import tiny_model

WEIGHT = 0.2


full_logits = jax.jit(logits_of, static_argnums=0)


def log_probs(model, params, row):
    """Of all tokens after each place of a row, by the full logits in float64."""
    logits = np.asarray(full_logits(model, params, np.asarray(row)[None, None])[0, 0], np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def pair():
    first, params = tiny_model(num_layers=1)
    second, others = tiny_model(seed=7, width=48, logit_cap=1.0)
    model = jr.models.mix_models(first, second, weight=WEIGHT)
    return first, second, model, {"first": params, "second": others}


def test_what_is_drawn_has_the_probability_of_the_mixture(pair):
    first, second, model, params = pair
    sample = jr.rollout.make_sampler(model, max_new_tokens=6, group_size=3)
    prompts = [[5, 6, 7], [9]]
    rollout = jax.device_get(sample(params, jax.random.key(0), prompts))
    tokens = np.asarray(rollout.tokens)
    for p, g in np.ndindex(2, 3):
        row = [*prompts[p], *tokens[p, g]]
        places = np.arange(6) + len(prompts[p]) - 1
        of_first, of_second = (
            np.exp(log_probs(part, params[name], row)[places, tokens[p, g]])
            for part, name in ((first, "first"), (second, "second"))
        )
        expected = np.log((1 - WEIGHT) * of_first + WEIGHT * of_second)
        np.testing.assert_allclose(rollout.behavior_logp[p, g], expected, atol=1e-4)


@pytest.mark.slow
def test_slots_draw_the_same_tokens_as_the_sampler(pair):
    _, _, model, params = pair
    prompts, key = [[5, 6, 7], [9]], jax.random.key(3)
    sample = jr.rollout.make_sampler(model, max_new_tokens=6, group_size=3)
    engine = jr.rollout.make_engine(model, rows=1, width=3, prompt_length=4, max_new_tokens=6)
    generation = jr.rollout.Generation(engine, params, key=key)
    groups = [jr.rollout.Group(i, x, tuple(range(3 * i, 3 * i + 3))) for i, x in enumerate(prompts)]
    generation.submit(*groups)
    tokens = np.asarray(sample(params, key, prompts).tokens)
    for finished in generation:
        for g, completion in enumerate(finished.completions):
            assert completion.tokens.tolist() == tokens[finished.group.id, g].tolist()
    assert not generation.has_work


def test_logits_of_two_known_distributions():
    """0.8 (0.7, 0.2, 0.1) + 0.2 (0.1, 0.1, 0.8) = (0.58, 0.18, 0.24)."""

    def of(probabilities):
        model, _ = tiny_model(vocab_size=3, num_layers=1)
        matrix = jnp.log(jnp.array(probabilities))[:, None]
        return model._replace(output_matrix=lambda params: matrix)

    model = jr.models.mix_models(of([0.7, 0.2, 0.1]), of([0.1, 0.1, 0.8]), weight=0.2)
    logits = model.logits({"first": (), "second": ()}, jnp.ones((1, 2)))
    np.testing.assert_allclose(jnp.exp(logits[0]), [0.58, 0.18, 0.24], rtol=1e-6)


def test_each_model_keeps_the_precision_of_its_weights():
    first, _ = tiny_model(num_layers=1, dtype="bfloat16")
    second, params = tiny_model(num_layers=1)
    mixed = jr.models.mix_models(first, second, weight=0.5)
    assert mixed.config.dtype == "float32"
    cast = jr.models.cast_params(mixed, {"first": params, "second": params})["second"]
    for left, right in zip(jax.tree.leaves(cast), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(left, right)


def test_what_cannot_be_mixed():
    model, _ = tiny_model(num_layers=1)
    other, _ = tiny_model(num_layers=1, vocab_size=300)
    with pytest.raises(ValueError, match=r"must have the same vocabulary; got \[259, 300\]"):
        jr.models.mix_models(model, other, weight=0.5)
    with pytest.raises(ValueError, match=r"weight must be in \(0, 1\)"):
        jr.models.mix_models(model, model, weight=1.0)
    mixed = jr.models.mix_models(model, model, weight=0.5)
    with pytest.raises(ValueError, match="has no output matrix"):
        mixed.output_matrix({})
