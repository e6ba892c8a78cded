"""Success rates from embeddings (DOTS), and the nearest solved problems (XRPO)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_curation import (
    attention_rates,
    calibrate_rates,
    hashed_magnitudes,
    hashed_words,
    linear_recalibration,
    nearest_solved,
)
from rows import for_each

from jaxrl_llm.curation import RateCalibration

RNG = np.random.default_rng(0)
KEYS = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
RATES = jnp.array([0.2, 0.8, 0.5])


def test_attention():
    # Attention worked numbers.
    query = jnp.array([1.0, 0.0])
    np.testing.assert_allclose(attention_rates(query, KEYS, RATES), 0.438999, atol=1e-6)
    for index, weight in enumerate((0.401112, 0.197776, 0.401112)):
        out = attention_rates(query, KEYS, jnp.eye(3)[index])
        np.testing.assert_allclose(out, weight, atol=1e-6)
    same = attention_rates(query, jnp.ones((3, 2)), RATES)
    np.testing.assert_allclose(same, RATES.mean(), rtol=1e-6)
    assert attention_rates(jnp.array([0.0, 1.0]), KEYS[:2], RATES[:2], top=1) == RATES[1]

    # Attention without a reference is zero.
    assert attention_rates(jnp.ones(2), KEYS, RATES, where=jnp.zeros(3, bool)) == 0


@for_each("top", [None, 2])
def test_attention_equals_the_float64_reference_and_never_reads_what_is_left_out(top):
    queries, keys, rates = RNG.normal(size=(5, 4)), RNG.normal(size=(6, 4)), RNG.random(6)
    where = np.array([True, False, True, True, True, False])
    scores = queries @ keys.T / 2 / 0.7
    scores[:, ~where] = -np.inf
    if top:
        scores[scores < np.sort(scores, axis=-1)[:, [-top]]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ np.where(where, rates, 0)
    keys[~where], rates[~where] = np.nan, np.inf
    call = jax.jit(lambda q, k, r, w: attention_rates(q, k, r, temperature=0.7, top=top, where=w))
    arrays = (jnp.asarray(x, jnp.float32) for x in (queries, keys, rates))
    np.testing.assert_allclose(call(*arrays, where), expected, rtol=1e-5)


def test_calibration():
    # Calibration equals the float64 reference.
    params = RateCalibration(*(RNG.normal(size=s) for s in ((2, 10), 10, (10, 2), 2)))
    rates, where = np.array([0.0, 0.3, 0.99, 1.0]), np.array([True, True, True, False])
    references = np.array([0.1, 0.9, 0.4, np.nan])
    x = np.array([references[:3].mean(), references[:3].std(ddof=1)])
    t, b = np.maximum(x @ params.hidden + params.hidden_bias, 0) @ params.out + params.out_bias
    clipped = np.clip(rates, 1e-4, 1 - 1e-4)
    logits = np.log(clipped / (1 - clipped)) / np.clip(np.log1p(np.exp(t)), 0.01, 10) + np.tanh(b)
    out = calibrate_rates(
        jnp.asarray(rates, jnp.float32),
        jnp.asarray(references, jnp.float32),
        jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params),
        where=jnp.asarray(where),
    )
    np.testing.assert_allclose(out, 1 / (1 + np.exp(-logits)), rtol=2e-4)

    # The line is that of least squares.
    rates = RNG.random(9)
    ids, where = np.array([3, 1, 7, 8, -1, 40]), np.array([True, True, True, False, True, True])
    measured = RNG.random(6)
    slope, intercept = np.polyfit(rates[ids[:3]], measured[:3], 1)
    measured[3:] = np.nan
    out = linear_recalibration(
        *(jnp.asarray(x) for x in (rates.astype(np.float32), ids, measured.astype(np.float32))),
        where=jnp.asarray(where),
    )
    np.testing.assert_allclose(out, slope * rates + intercept, rtol=1e-4)

    # A line through one prediction is level.
    rates, ids = jnp.array([0.1, 0.1, 0.1, 0.9]), jnp.array([0, 1, 2])
    np.testing.assert_allclose(linear_recalibration(rates, ids, RATES), RATES.mean(), rtol=1e-6)
    none = linear_recalibration(rates, ids, RATES, where=jnp.zeros(3, bool))
    np.testing.assert_array_equal(none, rates)

    # The nearest by cosine.
    corpus, queries = RNG.normal(size=(7, 3)), RNG.normal(size=(2, 4, 3))
    where = np.arange(7) % 3 != 1
    unit = corpus / np.linalg.norm(corpus, axis=-1, keepdims=True)
    cosines = queries / np.linalg.norm(queries, axis=-1, keepdims=True) @ unit.T
    cosines[..., ~where] = -2
    order = np.argsort(-cosines, axis=-1)[..., :5]
    ranked = np.take_along_axis(cosines, order, -1)
    corpus[~where] = np.nan
    call = jax.jit(lambda q, c, w: nearest_solved(q, c, count=5, where=w, threshold=0.1))
    ids = call(jnp.asarray(queries, jnp.float32), jnp.asarray(corpus, jnp.float32), where)
    np.testing.assert_array_equal(ids, np.where(ranked >= 0.1, order, -1))
    few = nearest_solved(jnp.ones(2), KEYS, count=3, where=jnp.array([True, False, False]))
    assert few.tolist() == [0, -1, -1]


OPERATORS = {"+": 0.9, "-": 0.7, "*": 0.25, "/": 0.1}
TOPICS = {"triangle angle": 0.9, "polynomial root": 0.6, "prime divisor": 0.3, "dice urn": 0.1}


def questions(kind, count=400):
    """Prompts and their success rates, by the size of two numbers or by what the words say."""
    rng = np.random.default_rng(0)
    for n in range(count):
        a, b = rng.integers(1, 1000, 2)
        operator, topic = list(OPERATORS)[n % 4], list(TOPICS)[n % 4]
        if kind == "sums":
            yield f"What is {a} + {b}?", 1 / (1 + np.exp(3 * (np.log10(a * b) - 4)))
        elif kind == "operators":
            yield f"Compute {a} {operator} {b} and give the number.", OPERATORS[operator]
        else:
            yield f"A problem of {topic}: case {a} with {b}.", TOPICS[topic]


@for_each(
    ("embed", "kind", "least", "most"),
    [
        (hashed_words, "sums", 0.0, 0.2),
        (hashed_words, "operators", 0.95, 1.0),
        (hashed_words, "topics", 0.98, 1.0),
        (hashed_magnitudes, "sums", 0.8, 0.95),
        (hashed_magnitudes, "operators", 0.9, 0.95),
        (hashed_magnitudes, "topics", 0.97, 1.0),
    ],
)
def test_what_embeddings_without_a_model_know_of_a_prompt(embed, kind, least, most):
    """What the documentation of ``targeted`` says of its default predictor."""
    texts, rates = map(np.array, zip(*questions(kind), strict=True))
    embedded = np.stack([embed(text) for text in texts])
    embedded *= np.sqrt(embedded.shape[1]) / np.linalg.norm(embedded, axis=1, keepdims=True)
    correlations = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        chosen = rng.permutation(len(texts))[:64]
        seen = np.float32(rng.binomial(8, rates[chosen]) / 8)
        predicted = attention_rates(embedded, embedded[chosen], seen)
        predicted = np.asarray(linear_recalibration(predicted, chosen, seen))
        rest = np.setdiff1d(np.arange(len(texts)), chosen)
        correlations.append(np.corrcoef(predicted[rest], rates[rest])[0, 1])
    assert least < np.mean(correlations) < most


CALIBRATION = RateCalibration(jnp.zeros(2), jnp.zeros(1), jnp.zeros((1, 2)), jnp.zeros(2))
BAD = {
    "attention_rates: queries and references must have vectors of one length; got (3,) and (3, 2)":
        lambda: attention_rates(jnp.ones(3), KEYS, RATES),
    "attention_rates: reference_rates must have shape (3,)":
        lambda: attention_rates(jnp.ones(2), KEYS, RATES[:2]),
    "attention_rates: top must be an integer from 1 to 3; got 4":
        lambda: attention_rates(jnp.ones(2), KEYS, RATES, top=4),
    "attention_rates: temperature must be above 0":
        lambda: attention_rates(jnp.ones(2), KEYS, RATES, temperature=0.0),
    "calibrate_rates: params.hidden must have 2 axes":
        lambda: calibrate_rates(RATES, RATES, CALIBRATION),
    "linear_recalibration: reference_ids must hold integers":
        lambda: linear_recalibration(RATES, RATES, RATES),
    "linear_recalibration: where must be bool":
        lambda: linear_recalibration(RATES, jnp.arange(3), RATES, where=RATES),
    "nearest_solved: count must be an integer from 1 to 3; got 0":
        lambda: nearest_solved(jnp.ones(2), KEYS, count=0),
    "nearest_solved: threshold must be in [-1, 1]; got 2.0":
        lambda: nearest_solved(jnp.ones(2), KEYS, count=1, threshold=2.0),
}  # fmt: skip


@for_each("words", BAD)
def test_bad_input(words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        BAD[words]()
