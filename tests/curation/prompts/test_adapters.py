"""The adapter of DOTS: its forward pass, its fit, and what it knows of other prompts."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, equal
from compiled_curation import questions
from rows import for_each

from jaxrl_llm import curation as cur

SMALL = cur.rate_adapter_init(jax.random.key(0), size=3, hidden=4)


def projected(params, x):
    """The released code's projection in float64: norm, linear, GELU, ..., linear, norm."""

    def norm(x, scale, shift):
        centered = x - x.mean(-1, keepdims=True)
        return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * scale + shift

    x = norm(x, params.scale_in, params.shift_in)
    for layer, (weight, bias) in enumerate(zip(params.weights, params.biases, strict=True)):
        x = x @ weight + bias
        if layer < len(params.weights) - 1:
            x = x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    return norm(x, params.scale_out, params.shift_out)


def test_rates_equal_the_float64_reference_and_nothing_left_out_is_read():
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: leaf + rng.normal(0, 0.3, leaf.shape), SMALL)
    queries, references, rates = rng.normal(size=(5, 3)), rng.normal(size=(6, 3)), rng.random(6)
    stay = np.array([0, 2, 3, 5])
    exact = jax.tree.map(np.float64, params)
    scores = projected(exact.queries, queries) @ projected(exact.references, references[stay]).T / 2
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    rate = np.clip(weights @ rates[stay] / weights.sum(-1), 1e-4, 1 - 1e-4)
    net = exact.calibration
    hidden = np.array([rates[stay].mean(), rates[stay].std(ddof=1)]) @ net.hidden + net.hidden_bias
    heat, shift = np.maximum(hidden, 0) @ net.out + net.out_bias
    heat = np.clip(np.log1p(np.exp(heat)), 0.01, 10)
    expected = 1 / (1 + np.exp(-np.log(rate / (1 - rate)) / heat - np.tanh(shift)))
    where = np.isin(np.arange(6), stay)
    references[~where], rates[~where] = np.nan, np.inf
    out = cur.adapted_rates(*map(np.float32, (queries, references, rates)), params, where=where)
    close(out, expected, rtol=1e-5)
    assert np.ptp(expected) > 0.005


def test_a_fit_is_deterministic_and_learns_from_what_was_measured_alone():
    rng = np.random.default_rng(0)
    embeddings = np.float32(np.repeat(np.eye(3), 8, axis=0))
    easy = np.repeat([0.9, 0.5, 0.1], 8)
    rates = np.float32([easy, easy**2, easy**0.5])
    where = rng.random(rates.shape) < 0.8
    where[:, 5] = False
    embeddings[5], rates[~where] = np.nan, np.nan
    fit = jax.jit(
        lambda embeddings, rates, where: cur.rate_adapter_fit(
            SMALL, jax.random.key(1), embeddings, rates,
            references=12, batch=12, steps=150, lr=1e-2, where=where,
        )
    )  # fmt: skip
    params = fit(embeddings, rates, where)
    again = fit(np.nan_to_num(embeddings, nan=7.0), np.nan_to_num(rates, nan=0.3), where)
    jax.tree.map(equal, params, again)
    # A fourth policy: easy, middle and hard prompts are told from one reference of each.
    kinds, seen = np.eye(3, dtype=np.float32), np.float32([0.95, 0.7, 0.3])
    before, after = (cur.adapted_rates(kinds, kinds, seen, each) - seen for each in (SMALL, params))
    assert np.abs(after).max() < 0.2 < np.abs(before).max()


@jax.jit
def fitted(embeddings, rates):
    start_key, fit_key = jax.random.split(jax.random.key(0))
    params = cur.rate_adapter_init(start_key, size=embeddings.shape[1], hidden=32)
    return cur.rate_adapter_fit(
        params, fit_key, embeddings, rates, references=64, batch=136, steps=200
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("embed", "kind", "least", "most"),
    [
        (cur.hashed_magnitudes, "sums", 0.95, 1.0),
        (cur.hashed_magnitudes, "operators", 0.98, 1.0),
        (cur.hashed_magnitudes, "topics", 0.98, 1.0),
        (cur.hashed_words, "sums", -0.2, 0.3),  # what an embedding does not hold, no fit adds
    ],
)
def test_an_adapter_fitted_on_other_prompts_and_policies(embed, kind, least, most):
    """What the documentation of ``targeted`` says of a fitted adapter."""
    texts, rates = map(np.array, zip(*questions(kind), strict=True))
    embedded = np.stack([embed(text) for text in texts])
    # Another hash would give as many parts: both embeddings take one program.
    embedded = np.pad(embedded, ((0, 0), (0, 281 - embedded.shape[1])))
    rng = np.random.default_rng(0)
    known, fresh = np.split(rng.permutation(400), 2)
    logits = np.log(rates / (1 - rates)) + np.array([-1.5, -0.5, 0.5, 1.5])[:, None]
    measured = rng.binomial(8, 1 / (1 + np.exp(-logits[:, known]))) / 8
    params = fitted(embedded[known], np.float32(measured))
    references, rest = fresh[:64], fresh[64:]
    seen = np.float32(rng.binomial(8, rates[references]) / 8)
    predicted = cur.adapted_rates(embedded, embedded[references], seen, params)
    predicted = np.asarray(cur.linear_recalibration(predicted, references, seen))
    assert least < np.corrcoef(predicted[rest], rates[rest])[0, 1] < most


KEY, X, Y = jax.random.key(0), jnp.ones((6, 3)), jnp.full((2, 6), 0.5)


def fit(*, embeddings=X, rates=Y, key=KEY, references=3, batch=3, dropout=0.1):
    options = {"references": references, "batch": batch, "dropout": dropout, "steps": 1}
    return cur.rate_adapter_fit(SMALL, key, embeddings, rates, **options)


BAD = {
    "rate_adapter_fit: rates must be in [0, 1]; rates[1, 2] is 1.5":
        lambda: fit(rates=jnp.zeros((2, 6)).at[1, 2].set(1.5)),
    "rate_adapter_fit: rates must be in [0, 1]; rates[0, 0] is nan":
        lambda: fit(rates=jnp.full((2, 6), jnp.nan)),
}  # fmt: skip


@for_each("words", BAD)
def test_bad_input(words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        BAD[words]()
