"""Filters, draws and log-probabilities of one token: the worked numbers and their laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rollout.sampling import filter_logits, sample_from, sampled_logprobs

FOUR = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
SIX = jnp.log(jnp.array([0.45, 0.25, 0.12, 0.1, 0.05, 0.03]))


def _kept(logits, **options):
    return int(jnp.isfinite(filter_logits(logits, **options)).sum())


@pytest.mark.parametrize(
    ("logits", "options", "kept"),
    [
        (FOUR, {"top_p": 0.74}, 2),
        (FOUR, {"top_p": 0.76}, 3),
        (FOUR, {"temperature": 2.0, "top_p": 0.75}, 3),
        (FOUR, {"min_p": 0.5}, 2),
        (FOUR, {"temperature": 2.0, "min_p": 0.5}, 3),
        (FOUR, {"top_k": 2, "top_p": 0.6}, 1),
        (SIX, {"top_p": 0.75, "min_p": 0.2}, 3),
        (SIX, {"top_p": 0.75, "min_p": 0.2, "order": "vllm"}, 2),
        (FOUR, {"top_k": 0}, 4),
        (FOUR, {"top_k": 9}, 4),
        (FOUR, {"top_p": 1.0}, 4),
        (FOUR, {"min_p": 0.0}, 4),
        (FOUR, {"top_p": 1e-6}, 1),
        (FOUR, {"temperature": 0.0}, 1),
        (jnp.zeros(4), {"top_k": 2}, 4),  # Ties at the threshold are all kept.
        (jnp.zeros(4), {"top_p": 0.49}, 2),
    ],
)
def test_how_many_survive(logits, options, kept):
    assert _kept(logits, **options) == kept


def test_temperature_two():
    p = jax.nn.softmax(filter_logits(FOUR, temperature=2.0))
    np.testing.assert_allclose(p, [0.370090, 0.261693, 0.202707, 0.165509], atol=1e-6)


def test_the_log_probabilities_of_one_token():
    filtered = filter_logits(FOUR, temperature=0.5, top_k=2)
    behavior, model, kept = sampled_logprobs(FOUR, filtered, jnp.array(0), temperature=0.5)
    np.testing.assert_allclose(
        [model, behavior, kept, behavior + kept],
        [-0.693147, -0.223144, -0.098940, -0.322083],
        atol=2e-6,
    )


def test_greedy_rows_are_certain():
    filtered = filter_logits(FOUR, temperature=0.0)
    behavior, model, kept = sampled_logprobs(FOUR, filtered, jnp.array(0), temperature=0.0)
    assert float(behavior) == 0.0 and float(kept) == 0.0
    np.testing.assert_allclose(model, np.log(0.5), atol=1e-6)


def test_options_may_differ_by_row_and_be_traced():
    rows = jnp.stack([FOUR, FOUR, FOUR])
    traces = []

    @jax.jit
    def kept(temperature, top_k, top_p):
        traces.append(1)
        out = filter_logits(rows, temperature=temperature, top_k=top_k, top_p=top_p)
        return jnp.isfinite(out).sum(-1)

    first = kept(jnp.array([1.0, 1.0, 0.0]), jnp.array([4, 2, 4]), jnp.array([0.76, 1.0, 1.0]))
    assert first.tolist() == [3, 2, 1]
    second = kept(jnp.array([1.0, 2.0, 1.0]), jnp.array([1, 3, 0]), jnp.array([1.0, 1.0, 0.74]))
    assert second.tolist() == [1, 3, 2]
    assert len(traces) == 1


rows_of_logits = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12)


@settings(max_examples=25, deadline=None)
@given(rows_of_logits, st.floats(-50, 50, width=32))
def test_a_shift_of_the_logits_changes_nothing(row, shift):
    # Rounded, so that the shifted row has the same ties.
    logits = np.round(np.array(row, np.float32) * 8) / 8
    shift = np.round(shift)
    plain = filter_logits(logits, temperature=0.7, top_k=5, top_p=0.8, min_p=0.05)
    moved = filter_logits(logits + shift, temperature=0.7, top_k=5, top_p=0.8, min_p=0.05)
    np.testing.assert_allclose(jax.nn.softmax(plain), jax.nn.softmax(moved), atol=1e-4)


def _reference(logits, temperature, top_k, top_p, min_p):
    """Which tokens are kept, one after the other in float64 NumPy."""
    x = np.asarray(logits, np.float64) / temperature
    keep = x >= np.sort(x)[::-1][min(top_k, len(x)) - 1]
    p = np.where(keep, np.exp(x - x.max()), 0.0)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
    inside = np.zeros(len(x), bool)
    inside[order[before < top_p]] = True
    keep &= inside
    return keep & (p >= min_p * p.max())


def test_filters_against_numpy():
    rng = np.random.default_rng(0)
    for _ in range(20):
        logits = rng.normal(size=30).astype(np.float32) * 2
        options = {
            "temperature": float(rng.uniform(0.3, 2)),
            "top_k": int(rng.integers(1, 30)),
            "top_p": float(rng.uniform(0.1, 0.99)),
            "min_p": float(rng.uniform(0.0, 0.3)),
        }
        got = np.isfinite(np.asarray(filter_logits(logits, **options)))
        np.testing.assert_array_equal(got, _reference(logits, **options))


def test_draws_follow_the_distribution():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=700).astype(np.float32) * 2
    logits[rng.integers(0, 700, 300)] = -np.inf
    uniform = (np.arange(20_000) + 0.5) / 20_000
    tokens = sample_from(jnp.broadcast_to(logits, (20_000, 700)), jnp.asarray(uniform, jnp.float32))
    p = np.exp(logits - logits.max())
    p /= p.sum()
    share = np.bincount(np.asarray(tokens), minlength=700) / 20_000
    # Evenly spaced uniforms hit every token as often as its mass says, up to one at each end.
    np.testing.assert_allclose(share, p, atol=1.5 / 20_000)
    assert not share[~np.isfinite(logits)].any()


def test_no_uniform_at_the_edge_of_a_block_draws_a_dropped_token():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=256 * 9).astype(np.float32)
    logits[::256] = -np.inf  # The first token of every block is dropped.
    mass = np.exp(logits - logits.max()).reshape(9, 256).sum(1)
    edges = (np.cumsum(mass) / mass.sum())[:-1].astype(np.float32)
    steps = np.arange(-200, 200, dtype=np.int32)
    near = (edges.view(np.int32)[:, None] + steps).ravel().view(np.float32)
    tokens = sample_from(jnp.broadcast_to(logits, (near.size, logits.size)), jnp.asarray(near))
    assert np.isfinite(logits[np.asarray(tokens)]).all()


@pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))])
def test_a_dropped_token_is_never_drawn(uniform):
    logits = np.full(1000, -np.inf, np.float32)
    logits[[3, 517]] = 0.0
    assert int(sample_from(jnp.asarray(logits), jnp.float32(uniform))) in (3, 517)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "sglang"}, "order must be one of 'hf', 'vllm'"),
        ({"order": "vllm"}, "has no effect without min_p"),
        ({"temperature": -1.0}, "temperature must not be negative"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"min_p": -0.1}, "min_p must not be negative"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        filter_logits(FOUR, **options)
