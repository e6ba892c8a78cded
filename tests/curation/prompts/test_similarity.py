"""Success rates from embeddings (DOTS), and the nearest solved problems (XRPO)."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from compiled_curation import (
    attention_rates,
    calibrate_rates,
    hashed_magnitudes,
    hashed_words,
    linear_recalibration,
    nearest_solved,
    questions,
)
from rows import for_each

from jaxrl_llm.curation import RateCalibration

RNG = np.random.default_rng(0)
KEYS = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
RATES = jnp.array([0.2, 0.8, 0.5])


def test_attention():
    # Attention worked numbers.
    query = jnp.array([1.0, 0.0])
    close(attention_rates(query, KEYS, RATES), 0.438999, atol=1e-6)
    for index, weight in enumerate((0.401112, 0.197776, 0.401112)):
        out = attention_rates(query, KEYS, jnp.eye(3)[index])
        close(out, weight, atol=1e-6)
    same = attention_rates(query, jnp.ones((3, 2)), RATES)
    close(same, RATES.mean(), rtol=1e-6)
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
    close(call(*arrays, where), expected, rtol=1e-5)


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
    close(out, 1 / (1 + np.exp(-logits)), rtol=2e-4)

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
    close(out, slope * rates + intercept, rtol=1e-4)

    # A line through one prediction is level.
    rates, ids = jnp.array([0.1, 0.1, 0.1, 0.9]), jnp.array([0, 1, 2])
    close(linear_recalibration(rates, ids, RATES), RATES.mean(), rtol=1e-6)
    none = linear_recalibration(rates, ids, RATES, where=jnp.zeros(3, bool))
    equal(none, rates)

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
    equal(ids, np.where(ranked >= 0.1, order, -1))
    few = nearest_solved(jnp.ones(2), KEYS, count=3, where=jnp.array([True, False, False]))
    assert few.tolist() == [0, -1, -1]


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
