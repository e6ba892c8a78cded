"""Filters, draws and log-probabilities of one token: the worked numbers and their laws."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.core.support import keep_mask
from jaxrl_llm.rollout.sampling.draw import draw_tokens, sample_from, sampled_logprobs
from jaxrl_llm.rollout.sampling.filters import filter_logits
from jaxrl_llm.rollout.sampling.penalties import seen_tokens

FOUR = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
SIX = jnp.log(jnp.array([0.45, 0.25, 0.12, 0.1, 0.05, 0.03]))


def _kept(logits, **options):
    return int(jnp.isfinite(filter_logits(logits, **options)).sum())


@for_each(
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


def _reference(logits, temperature, top_k, top_p, min_p, order="hf"):
    """Which tokens are kept, one after the other in float64 NumPy."""
    x = np.asarray(logits, np.float64) / temperature
    p = np.exp(x - x.max())
    likely = p >= min_p
    keep = np.isfinite(x)
    if 0 < top_k < len(x):
        keep &= x >= np.sort(x)[::-1][int(top_k) - 1]
    if order == "vllm":
        keep &= likely
    p = np.where(keep, p, 0.0)
    places = np.argsort(-p, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(p[places])[:-1]]) / p.sum()
    inside = np.zeros(len(x), bool)
    inside[places[before < top_p]] = True
    return keep & (inside | (top_p >= 1)) & likely


def _options(rng, rows, most):
    """Options of each row; some are off."""
    on = rng.random((3, rows)) < 0.7
    return {
        "temperature": rng.uniform(0.3, 2, rows),
        "top_k": np.where(on[0], rng.integers(1, most, rows), 0),
        "top_p": np.where(on[1], rng.uniform(0.1, 0.99, rows), 1.0),
        "min_p": np.where(on[2], rng.uniform(0.0, 0.3, rows), 0.0),
    }


# In the larger vocabularies only the first tokens are put in order; what needs more is found by
# bisection. Logits in steps have many ties.
@for_each("order", ["hf", "vllm"])
@for_each(("size", "spread", "step"), [(30, 2, 0), (1500, 4, 0), (1500, 1, 0.5)])
def test_filters_against_numpy(size, spread, step, order):
    rng = np.random.default_rng(size)
    logits = rng.normal(size=(24, size)).astype(np.float32) * spread
    logits = np.round(logits / step) * np.float32(step) if step else logits
    logits[:, 3] = -np.inf
    options = {k: x.astype(np.float32) for k, x in _options(rng, 24, size).items()}
    filtered = jax.jit(lambda x, o: filter_logits(x, **o, order=order))  # not of constants
    got = np.isfinite(filtered(logits, options))
    for i, row in enumerate(logits):
        one = {k: float(x[i]) for k, x in options.items()}
        np.testing.assert_array_equal(got[i], _reference(row, **one, order=order), err_msg=str(one))


@for_each("options", [{"top_k": 300}, {"top_k": 1200, "top_p": 0.9}])
def test_top_k_that_is_known_when_compiling(options):
    logits = np.random.default_rng(0).normal(size=(3, 1500)).astype(np.float32)
    got = np.isfinite(jax.jit(lambda x: filter_logits(x, **options))(logits))
    rest = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
    expected = [_reference(row, **(rest | options)) for row in logits]
    np.testing.assert_array_equal(got, expected)


def test_ties_are_broken_by_ids():
    kept = jnp.isfinite(filter_logits(jnp.zeros(1000), top_p=0.2995))
    assert kept.tolist() == [True] * 300 + [False] * 700


def test_draws_follow_the_distribution():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=700).astype(np.float32) * 2
    logits[rng.integers(0, 700, 300)] = -np.inf
    uniform = (np.arange(20_000) + 0.5) / 20_000
    tokens = jax.jit(sample_from)(
        jnp.broadcast_to(logits, (20_000, 700)), jnp.asarray(uniform, jnp.float32)
    )
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
    tokens = jax.jit(sample_from)(
        jnp.broadcast_to(logits, (near.size, logits.size)), jnp.asarray(near)
    )
    assert np.isfinite(logits[np.asarray(tokens)]).all()


@for_each(
    ("options", "message"),
    [
        ({"order": "sglang"}, "order must be one of 'hf', 'vllm'"),
        ({"order": "vllm"}, "has no effect without min_p"),
        ({"temperature": -1.0}, "temperature must not be negative"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must be at most 1; got 1.5"),
        ({"min_p": 2.0}, "min_p must be at most 1; got 2"),
        ({"temperature": np.inf}, r"temperature must be at most 1e\+06; got inf"),
        ({"min_p": -0.1}, "min_p must not be negative"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        filter_logits(FOUR, **options)


# One draw with all that is recorded of it


def test_a_draw_records_the_distribution_it_was_drawn_from():
    drawn = draw_tokens(FOUR, jnp.float32(0.0), temperature=0.5, top_k=2)
    p = np.array([0.5, 0.25]) ** 2 / (0.5**2 + 0.25**2)
    numbers = (drawn.model_logp, drawn.behavior_logp, drawn.log_kept, drawn.entropy)
    expected = [-0.693147, -0.223144, -0.098940, -(p * np.log(p)).sum()]
    np.testing.assert_allclose(numbers, expected, atol=2e-6)
    assert int(drawn.tokens) == 0 and drawn.support.ids.tolist() == [0, 1]
    assert int(draw_tokens(FOUR, jnp.float32(0.85), temperature=0.5, top_k=2).tokens) == 1


def _many(size=700, count=64):
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, size)).astype(np.float32) * 3, rng.random(count).astype("f4")


MIXED = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05}


@for_each("name", [None, "temperature", "top_p"])
def test_statistics_of_a_draw_equal_those_of_its_steps(name):
    logits, uniform = _many()
    options = MIXED if name is None else {name: MIXED[name]}
    temperature = options.get("temperature", 1.0)

    @jax.jit
    def both(logits, uniform):
        drawn, kept = draw_tokens(logits, uniform, **options), filter_logits(logits, **options)
        return drawn, kept, sampled_logprobs(logits, kept, drawn.tokens, temperature=temperature)

    drawn, kept, result = both(logits, uniform)
    numbers = (drawn.behavior_logp, drawn.model_logp, drawn.log_kept)
    for got, want in zip(numbers, result, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)
    p = np.exp(np.asarray(kept) - np.max(kept, axis=-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
    np.testing.assert_allclose(drawn.entropy, entropy, atol=1e-5)
    if name == "temperature":
        assert drawn.support is None
    else:
        assert (drawn.support.bits is None) == ("top_k" in options)
        np.testing.assert_array_equal(keep_mask(drawn.support, 700), np.isfinite(kept))


@pytest.mark.slow
def test_options_of_rows_and_their_bound():
    logits, uniform = _many()
    rows = {k: np.full(64, x, np.float32) for k, x in MIXED.items()}
    one = draw_tokens(logits, uniform, **MIXED)
    bound = jax.jit(lambda o: draw_tokens(logits, uniform, **o, max_top_k=32))
    free = jax.jit(lambda o: draw_tokens(logits, uniform, **o))
    for many in (bound(rows), free(rows)):
        kept = keep_mask(many.support, 700)
        np.testing.assert_array_equal(kept, keep_mask(one.support, 700))
        np.testing.assert_allclose(many.log_kept, one.log_kept, atol=2e-6)
    off = bound({k: np.full(64, x, np.float32) for k, x in zip(rows, (1, 0, 1, 0), strict=True)})
    assert off.support.ids.shape == (64, 32) and (np.asarray(off.support.ids) >= 0).all()
    cold = free(rows | {"temperature": np.where(np.arange(64) < 2, 0, 0.7).astype(np.float32)})
    assert cold.tokens[:2].tolist() == logits[:2].argmax(-1).tolist()
    assert not np.asarray(cold.behavior_logp[:2]).any() and cold.behavior_logp[2:].any()


def test_a_bound_on_the_number_of_tokens_holds_for_ties():
    drawn = draw_tokens(jnp.zeros(6), jnp.float32(0.99), top_k=2)
    assert drawn.support.ids.tolist() == [0, 1] and int(drawn.tokens) == 1
    np.testing.assert_allclose(drawn.behavior_logp, np.log(0.5), rtol=1e-6)


def test_samples_follow_the_recorded_distribution():
    logits = np.random.default_rng(3).normal(size=40).astype(np.float32) * 2
    uniform = jnp.asarray((np.arange(4000) + 0.5) / 4000, jnp.float32)
    seen = jnp.broadcast_to(
        seen_tokens(logits[:3].argsort(), np.ones(3, bool), vocab_size=40), (4000, 2)
    )
    draw = partial(
        draw_tokens,
        **MIXED,
        repetition_penalty=1.5,
        allowed=np.arange(40) % 3 > 0,
        stop_ids=(int(logits.argmax()),),
    )
    rows, short = jnp.broadcast_to(logits, (4000, 40)), jnp.ones(4000, bool)
    drawn = jax.jit(draw)(rows, uniform, seen=seen, too_short=short)
    tokens, logp = np.asarray(drawn.tokens), np.asarray(drawn.behavior_logp)
    for token in np.unique(tokens):
        assert abs((tokens == token).mean() - np.exp(logp[tokens == token][0])) < 1e-3
    mass = sum(np.exp(logp[tokens == token][0]) for token in np.unique(tokens))
    np.testing.assert_allclose(mass, 1, atol=1e-5)
    ids = np.asarray(drawn.support.ids[0])
    assert set(tokens) == set(ids[ids >= 0]) and all(ids[ids >= 0] % 3 > 0)
    assert logits.argmax() not in tokens
    np.testing.assert_allclose(drawn.model_logp, jax.nn.log_softmax(logits)[tokens], atol=1e-6)


def test_penalty_comes_before_temperature_and_is_no_truncation():
    seen = seen_tokens(np.array([0]), np.ones(1, bool), vocab_size=4)
    drawn = draw_tokens(FOUR, jnp.float32(0.0), temperature=2.0, seen=seen, repetition_penalty=2.0)
    penalized = np.array(FOUR)
    penalized[0] *= 2
    expected = jax.nn.log_softmax(penalized / 2)[0]
    np.testing.assert_allclose(drawn.behavior_logp, expected, atol=1e-6)
    assert drawn.support is None and float(drawn.log_kept) == 0


@for_each("temperature", [0.0, 1.0, jnp.float32(0.0)])
def test_an_empty_set_of_tokens_is_a_failure(temperature):
    drawn = draw_tokens(
        FOUR,
        jnp.float32(0.5),
        temperature=temperature,
        allowed=jnp.arange(4) == 2,
        stop_ids=(2,),
        too_short=jnp.array(True),
    )
    assert not np.isfinite(drawn.behavior_logp)


@for_each("options", [{}, {"top_k": 2, "top_p": 0.9}, {"temperature": 0.0}])
def test_a_nonfinite_row_shows_and_changes_no_other(options):
    logits = jnp.stack([FOUR, FOUR.at[2].set(jnp.nan), FOUR.at[1].set(jnp.inf)])
    draw = jax.jit(partial(draw_tokens, **options))
    drawn, alone = draw(logits, jnp.full(3, 0.3)), draw(FOUR[None], jnp.full(1, 0.3))
    assert jnp.isfinite(drawn.model_logp).tolist() == [True, False, False]
    assert ((drawn.tokens >= 0) & (drawn.tokens < 4)).all()
    assert int(drawn.tokens[0]) == int(alone.tokens[0])
    np.testing.assert_allclose(drawn.behavior_logp[0], alone.behavior_logp[0])


def test_a_row_without_any_token_left_shows():
    drawn = draw_tokens(FOUR, jnp.float32(0.3), allowed=jnp.zeros(4, bool))
    assert not jnp.isfinite(drawn.behavior_logp)


@for_each(
    ("options", "message"),
    [
        ({"repetition_penalty": 1.2}, "seen and repetition_penalty go together"),
        ({"stop_ids": (1,)}, "stop_ids has no effect without too_short"),
        ({"max_top_k": 2}, "max_top_k has no effect without an array of top_k"),
        ({"max_top_k": 2, "top_k": 2}, "max_top_k has no effect without an array of top_k"),
        ({"order": "vllm", "top_p": 0.5}, "has no effect without min_p"),
    ],
)
def test_bad_options_of_a_draw_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        draw_tokens(FOUR, jnp.float32(0.5), **options)
