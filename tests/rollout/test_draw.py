"""What a decode step draws with: options of requests, their defaults, what is recorded."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each

from jaxrl_llm.core.support import keep_mask
from jaxrl_llm.rollout.sampling.options import DrawOptions, make_draw

V, R, W = 40, 2, 3
LOGITS = np.random.default_rng(0).normal(size=(R, W, V)).astype(np.float32) * 3
UNIFORM = np.full((R, W), 0.4, np.float32)
BEST = LOGITS.argmax(-1)


def make(**options):
    return make_draw("f", DrawOptions(**options), vocab_size=V)


def slots(length=0, *, active=True, **settings):
    """The fields of slots that a draw reads."""
    length = np.broadcast_to(length, (R, W))
    prompts = SimpleNamespace(tokens=np.array([[5, 6, 7], [8, 9, 0]]), length=np.array([3, 2]))
    full = {k: jnp.broadcast_to(jnp.float32(x), (R, W)) for k, x in settings.items()}
    own = np.broadcast_to(np.arange(20, 24), (R, W, 4))
    return SimpleNamespace(
        prompts=prompts,
        length=length,
        active=np.broadcast_to(active, (R, W)),
        out=SimpleNamespace(tokens=own),
        requests=SimpleNamespace(settings=full),
    )


def test_a_plain_draw_records_neither_entropy_nor_support():
    drawn = make()
    out = drawn.next_token(LOGITS, UNIFORM, slots())
    assert out.entropy is None and out.support is None and drawn.settings == {}
    np.testing.assert_array_equal(out.behavior_logp, out.model_logp)
    assert not np.asarray(out.log_kept).any()


@for_each(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 3, "entropy": True},
        {"top_p": 0.9, "vary": ("temperature",)},
        {"top_k": 4, "vary": ("top_k", "repetition_penalty", "min_new_tokens"), "stop_ids": (1,)},
    ],
)
def test_blank_has_the_shapes_of_a_draw(options):
    made = make(**options)
    out = jax.eval_shape(lambda: made.next_token(LOGITS, UNIFORM, slots(**made.settings)))
    blank = jax.tree.map(lambda x: ((R, W, *x.shape), x.dtype), made.blank)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), out) == blank


def test_requests_set_their_own_options():
    made = make_draw(
        "f", DrawOptions(temperature=0.8, top_k=4, vary=("temperature", "top_k")), vocab_size=V
    )
    assert made.settings == {"temperature": 0.8, "top_k": 4.0}
    asked = slots(temperature=0.8, top_k=4)
    asked.requests.settings["temperature"] = asked.requests.settings["temperature"].at[0, 0].set(0)
    asked.requests.settings["top_k"] = asked.requests.settings["top_k"].at[0, 1].set(2)
    out = made.next_token(LOGITS, UNIFORM, asked)
    assert out.support.ids.shape == (R, W, 4)
    assert (np.asarray(out.support.ids) >= 0).sum(-1).tolist() == [[1, 2, 4], [4, 4, 4]]
    assert int(out.tokens[0, 0]) == BEST[0, 0] and float(out.behavior_logp[0, 0]) == 0


def test_idle_slots_are_not_filtered():
    made = make(top_p=0.3)
    out = made.next_token(LOGITS, UNIFORM, slots(active=[[True, False, True]] * 2))
    kept = keep_mask(out.support, V).all(-1)
    assert kept.tolist() == [[False, True, False]] * 2


def test_a_response_that_is_too_short_does_not_end():
    stops = tuple(np.unique(BEST).tolist())
    made = make_draw(
        "f", DrawOptions(temperature=0.0, stop_ids=stops, min_new_tokens=2), vocab_size=V
    )
    early, late = (np.asarray(made.next_token(LOGITS, UNIFORM, slots(n)).tokens) for n in (1, 2))
    assert not np.isin(early, stops).any()
    np.testing.assert_array_equal(late, BEST)
    vary = make_draw(
        "f", DrawOptions(temperature=0.0, stop_ids=stops, vary=("min_new_tokens",)), vocab_size=V
    )
    mixed = slots(1, min_new_tokens=[[0, 1, 2], [0, 1, 2]])
    is_stop = np.isin(vary.next_token(LOGITS, UNIFORM, mixed).tokens, stops)
    assert is_stop.tolist() == [[True, True, False]] * 2


def test_tokens_of_the_prompt_and_the_response_so_far_are_penalized():
    made = make(repetition_penalty=1.5, temperature=1.0)
    length = np.array([[0, 1, 4], [0, 0, 0]])
    out = made.next_token(LOGITS, UNIFORM, slots(length))
    for r, w in np.ndindex(R, W):
        seen = [[5, 6, 7], [8, 9]][r] + list(range(20, 20 + length[r, w]))
        z = LOGITS[r, w].copy()
        z[seen] = np.where(z[seen] > 0, z[seen] / 1.5, z[seen] * 1.5)
        expected = jax.nn.log_softmax(z)[out.tokens[r, w]]
        np.testing.assert_allclose(out.behavior_logp[r, w], expected, atol=1e-5)


@for_each("options", [{}, {"temperature": 0.0}, {"top_k": 3}, {"temperature": 2.0}])
def test_the_runner_up_is_the_most_likely_other_token_of_the_plain_model(options):
    out = make(runner_up=True, **options).next_token(LOGITS, UNIFORM, slots())
    logp = np.asarray(jax.nn.log_softmax(LOGITS))
    for place in np.ndindex(R, W):
        order = np.argsort(-LOGITS[place])
        second = order[1] if out.tokens[place] == order[0] else order[0]
        assert out.runner_up[place] == second and out.runner_up.dtype == jnp.int32
        np.testing.assert_allclose(out.runner_up_logp[place], logp[place][second], atol=1e-5)
    if not options:
        assert make().next_token(LOGITS, UNIFORM, slots()).runner_up is None


def test_allowed_tokens_are_the_support():
    allowed = np.arange(V) % 2 == 0
    made = make(allowed=allowed, entropy=True)
    out = made.next_token(LOGITS, UNIFORM, slots())
    assert not (np.asarray(out.tokens) % 2).any()
    np.testing.assert_array_equal(keep_mask(out.support, V), np.broadcast_to(allowed, LOGITS.shape))
    p = np.asarray(jax.nn.softmax(LOGITS[..., allowed]))
    np.testing.assert_allclose(out.entropy, -(p * np.log(p)).sum(-1), atol=1e-5)


@for_each(
    ("options", "message"),
    [
        ({"vary": ("topk",)}, "f: vary must be one of .* got 'topk'. Did you mean 'top_k'"),
        ({"repetition_penalty": 0.0}, "f: repetition_penalty must be above 0"),
        ({"min_new_tokens": -1, "stop_ids": (1,)}, "min_new_tokens must not be negative"),
        ({"min_new_tokens": 2}, "min_new_tokens has no effect without stop_ids"),
        ({"vary": ("min_new_tokens",)}, "min_new_tokens has no effect without stop_ids"),
        ({"allowed": np.zeros(V, bool)}, "f: allowed has no token"),
        ({"allowed": np.ones(3, bool)}, r"allowed must have shape \(40,\)"),
        ({"order": "vllm", "vary": ("top_p",)}, "order='vllm' has no effect without min_p"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@for_each("option", ["temperature", "repetition_penalty", "top_p", "min_p"])
@for_each(
    ("value", "error", "message"),
    [
        (np.inf, ValueError, "must be finite"),
        (np.nan, ValueError, "must be finite"),
        (1e39, ValueError, "must be finite"),
        (1e30, ValueError, "must be at most 1e\\+18; got 1e\\+30"),
        (1e7, ValueError, "must be (at most 1e\\+06|below 1); got 1e\\+07"),
        (True, TypeError, "must be a number; got True"),
        ("1", TypeError, "must be a number; got '1'"),
    ],
)
def test_values_that_are_not_sensible_numbers_are_refused(option, value, error, message):
    with pytest.raises(error, match=f"f: {option} {message}"):
        make(**{option: value})


@for_each(
    ("options", "error", "message"),
    [
        ({"top_k": V + 1}, ValueError, "top_k must be at most the vocabulary of 40; got 41"),
        ({"top_k": 2.0}, TypeError, "top_k must be an integer; got 2.0"),
        ({"top_k": True}, TypeError, "top_k must be an integer; got True"),
        ({"min_new_tokens": 1.5}, TypeError, "min_new_tokens must be an integer; got 1.5"),
        ({"stop_ids": (-1,)}, ValueError, r"stop_ids must be from 0 to 2\*\*31 - 1; got -1"),
        ({"stop_ids": (2**31,)}, ValueError, "stop_ids must be from 0 to"),
        ({"stop_ids": (0.5,)}, TypeError, "stop_ids must hold integers"),
        ({"stop_ids": (2, True)}, TypeError, "stop_ids must hold integers of 32 bits; got True"),
        ({"vary": "top_k"}, TypeError, "vary must be a list of options; got 'top_k'"),
    ],
)
def test_counts_and_ids_out_of_range_are_refused(options, error, message):
    with pytest.raises(error, match=f"f: {message}"):
        make(**options)


def test_stop_ids_beyond_the_vocabulary_are_never_drawn():
    stops = (int(BEST[0, 0]), V + 5)
    drawn = make(temperature=0.0, stop_ids=stops, min_new_tokens=2).next_token(
        LOGITS, UNIFORM, slots(1)
    )
    assert not np.isin(drawn.tokens, stops).any()


@for_each(
    ("asked", "message"),
    [
        ({"temperature": -1}, "group 7 sets temperature to -1; it must be at least 0 and at most"),
        ({"temperature": np.nan}, "sets temperature to nan; it must be at least 0"),
        ({"temperature": np.inf}, r"sets temperature to inf; it must be .* at most 1e\+06"),
        ({"top_k": 2.5}, "sets top_k to 2.5; it must be an integer"),
        ({"top_k": 5}, "sets top_k to 5; it must be above 0 and at most 4"),
        ({"top_k": 0}, "sets top_k to 0; it must be above 0 and at most 4"),
        ({"top_p": 0}, "sets top_p to 0; it must be above 0 and at most 1"),
        ({"min_p": 2}, "sets min_p to 2; it must be at least 0 and at most 1"),
    ],
)
def test_settings_out_of_range_are_named(asked, message):
    vary = ("temperature", "top_k", "top_p", "min_p")
    made = make(top_k=4, vary=vary)
    made.check("group 7", {"temperature": 0, "top_k": 4, "top_p": 1, "min_p": 0})
    with pytest.raises(ValueError, match=message):
        made.check("group 7", asked)
