"""Success rates from embeddings (DOTS), and the nearest solved problems (XRPO)."""

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from rows import for_each

KEYS = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
RATES = jnp.array([0.2, 0.8, 0.5])


def test_attention():
    # Attention worked numbers.
    query = jnp.array([1.0, 0.0])
    close(cur.attention_rates(query, KEYS, RATES), 0.438999, atol=1e-6)
    for index, weight in enumerate((0.401112, 0.197776, 0.401112)):
        out = cur.attention_rates(query, KEYS, jnp.eye(3)[index])
        close(out, weight, atol=1e-6)
    same = cur.attention_rates(query, jnp.ones((3, 2)), RATES)
    close(same, RATES.mean(), rtol=1e-6)
    assert cur.attention_rates(jnp.array([0.0, 1.0]), KEYS[:2], RATES[:2], top=1) == RATES[1]

    # Attention without a reference is zero.
    assert cur.attention_rates(jnp.ones(2), KEYS, RATES, where=jnp.zeros(3, bool)) == 0


@for_each("top", [None, 2])
def test_attention_equals_the_float64_reference_and_never_reads_what_is_left_out(top):
    rng = np.random.default_rng(0)
    queries, keys, rates = rng.normal(size=(5, 4)), rng.normal(size=(6, 4)), rng.random(6)
    where = np.array([True, False, True, True, True, False])
    scores = queries @ keys.T / 2 / 0.7
    scores[:, ~where] = -np.inf
    if top:
        scores[scores < np.sort(scores, axis=-1)[:, [-top]]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ np.where(where, rates, 0)
    keys[~where], rates[~where] = np.nan, np.inf
    call = jax.jit(
        lambda q, k, r, w: cur.attention_rates(q, k, r, temperature=0.7, top=top, where=w)
    )
    arrays = (jnp.asarray(x, jnp.float32) for x in (queries, keys, rates))
    close(call(*arrays, where), expected, rtol=1e-5)


def test_calibration():
    rng = np.random.default_rng(0)
    # The line is that of least squares.
    rates = rng.random(9)
    ids, where = np.array([3, 1, 7, 8, -1, 40]), np.array([True, True, True, False, True, True])
    measured = rng.random(6)
    slope, intercept = np.polyfit(rates[ids[:3]], measured[:3], 1)
    measured[3:] = np.nan
    out = cur.linear_recalibration(
        *(jnp.asarray(x) for x in (rates.astype(np.float32), ids, measured.astype(np.float32))),
        where=jnp.asarray(where),
    )
    close(out, slope * rates + intercept, rtol=1e-4)

    # A line through one prediction is level.
    rates, ids = jnp.array([0.1, 0.1, 0.1, 0.9]), jnp.array([0, 1, 2])
    close(cur.linear_recalibration(rates, ids, RATES), RATES.mean(), rtol=1e-6)
    none = cur.linear_recalibration(rates, ids, RATES, where=jnp.zeros(3, bool))
    equal(none, rates)

    # The nearest by cosine.
    corpus, queries = rng.normal(size=(7, 3)), rng.normal(size=(2, 4, 3))
    where = np.arange(7) % 3 != 1
    unit = corpus / np.linalg.norm(corpus, axis=-1, keepdims=True)
    cosines = queries / np.linalg.norm(queries, axis=-1, keepdims=True) @ unit.T
    cosines[..., ~where] = -2
    order = np.argsort(-cosines, axis=-1)[..., :5]
    ranked = np.take_along_axis(cosines, order, -1)
    corpus[~where] = np.nan
    call = jax.jit(lambda q, c, w: cur.nearest_solved(q, c, count=5, where=w, threshold=0.1))
    ids = call(jnp.asarray(queries, jnp.float32), jnp.asarray(corpus, jnp.float32), where)
    equal(ids, np.where(ranked >= 0.1, order, -1))
    few = cur.nearest_solved(jnp.ones(2), KEYS, count=3, where=jnp.array([True, False, False]))
    assert few.tolist() == [0, -1, -1]


@for_each(
    ("embed", "kind", "least", "most"),
    [
        (cur.hashed_words, "sums", 0.0, 0.2),
        (cur.hashed_words, "operators", 0.95, 1.0),
        (cur.hashed_words, "topics", 0.98, 1.0),
        (cur.hashed_magnitudes, "sums", 0.8, 0.95),
        (cur.hashed_magnitudes, "operators", 0.9, 0.95),
        (cur.hashed_magnitudes, "topics", 0.97, 1.0),
    ],
)
def test_what_embeddings_without_a_model_know_of_a_prompt(embed, kind, least, most):
    """What the documentation of ``targeted`` says of its default predictor."""
    texts, rates = map(np.array, zip(*cur.questions(kind), strict=True))
    embedded = np.stack([embed(text) for text in texts])
    embedded *= np.sqrt(embedded.shape[1]) / np.linalg.norm(embedded, axis=1, keepdims=True)
    correlations = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        chosen = rng.permutation(len(texts))[:64]
        seen = np.float32(rng.binomial(8, rates[chosen]) / 8)
        predicted = cur.attention_rates(embedded, embedded[chosen], seen)
        predicted = np.asarray(cur.linear_recalibration(predicted, chosen, seen))
        rest = np.setdiff1d(np.arange(len(texts)), chosen)
        correlations.append(np.corrcoef(predicted[rest], rates[rest])[0, 1])
    assert least < np.mean(correlations) < most
