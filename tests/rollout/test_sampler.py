"""The sampler against token-by-token decoding without a cache, and the laws of its rollouts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.forwards import logits_of
from rows import for_each

import jaxrl_llm as jr
from jaxrl_llm.rollout import filter_logits, make_sampler
from jaxrl_llm.train.mesh import make_mesh

T, G = 6, 3
PROMPTS = [[7, 3, 9, 200, 41], [5], [100, 101, 102]]


@pytest.fixture(scope="module")
def tiny():
    return jr.testing.tiny_model()


_plain = jax.jit(logits_of, static_argnums=0)


def _logits(model, params, sequence):
    """Logits after every token of one sequence, by one plain forward pass."""
    # Padded to one length, so that it compiles once.
    tokens = np.zeros((1, 1, 16), np.int32)
    tokens[0, 0, : len(sequence)] = sequence
    return np.asarray(_plain(model, params, tokens))[0, 0, : len(sequence)]


def test_greedy_equals_decoding_without_a_cache(tiny):
    model, params = tiny
    sample = make_sampler(model, max_new_tokens=T, group_size=2, temperature=0)
    rollout = sample(params, jax.random.key(0), PROMPTS)
    for p, prompt in enumerate(PROMPTS):
        sequence = list(prompt)
        for _ in range(T):
            sequence.append(int(_logits(model, params, sequence)[-1].argmax()))
        for g in range(2):
            assert rollout.tokens[p, g].tolist() == sequence[len(prompt) :]
    assert not np.asarray(rollout.behavior_logp).any()
    assert rollout.mask.all() and not np.asarray(rollout.finish).any()


@for_each(
    "options",
    [{"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05}],
)
def test_log_probabilities_are_those_of_the_sampled_tokens(tiny, options):
    model, params = tiny
    sample = make_sampler(model, max_new_tokens=T, group_size=G, **options)
    rollout = sample(params, jax.random.key(1), PROMPTS)
    temperature, filtered = options["temperature"], jax.jit(partial(filter_logits, **options))
    for p, prompt in enumerate(PROMPTS):
        for g in range(G):
            tokens = np.asarray(rollout.tokens[p, g])
            logits = _logits(model, params, [*prompt, *tokens])[len(prompt) - 1 : -1]
            at = np.arange(T), tokens
            plain, tempered = jax.nn.log_softmax(logits), jax.nn.log_softmax(logits / temperature)
            np.testing.assert_allclose(rollout.model_logp[p, g], plain[at], atol=2e-5)
            np.testing.assert_allclose(rollout.tempered_logp[p, g], tempered[at], atol=2e-5)
            kept = jax.nn.log_softmax(filtered(logits))[at]
            np.testing.assert_allclose(rollout.behavior_logp[p, g], kept, atol=2e-5)
    if "top_p" not in options:
        assert not np.asarray(rollout.log_kept).any()
    else:
        assert (np.asarray(rollout.log_kept) < 0).any()


def test_a_request_does_not_depend_on_its_neighbors(tiny):
    model, params = tiny
    sample = make_sampler(model, max_new_tokens=T, group_size=G, temperature=1e3)
    key = jax.random.key(2)
    together = sample(params, key, PROMPTS)
    moved = sample(
        params,
        key,
        [PROMPTS[2], [9, 9, 9], PROMPTS[0]],
        request_ids=[[8, 7, 6], [9, 9, 9], [0, 1, 2]],
    )
    np.testing.assert_array_equal(moved.tokens[2], together.tokens[0])
    np.testing.assert_array_equal(moved.tokens[0], together.tokens[2][::-1])
    rows = {tuple(row.tolist()) for row in np.asarray(together.tokens).reshape(-1, T)}
    assert len(rows) == len(PROMPTS) * G  # Siblings differ.
    again = sample(params, jax.random.key(3), PROMPTS)
    assert (np.asarray(again.tokens) != np.asarray(together.tokens)).any()
    # Nor on the places before: of flat logits, the same number would draw the same token again.
    assert (np.ptp(together.tokens, axis=-1) > 40).all()


def test_a_stop_token_ends_a_response_and_belongs_to_it(tiny):
    model, params = tiny
    free = make_sampler(model, max_new_tokens=T, group_size=G)(params, jax.random.key(4), PROMPTS)
    stops = (int(free.tokens[0, 0, 2]), int(free.tokens[1, 1, 0]))
    sample = make_sampler(model, max_new_tokens=T, group_size=G, stop_ids=stops, pad_id=258)
    rollout = sample(params, jax.random.key(4), PROMPTS)
    for p in range(len(PROMPTS)):
        for g in range(G):
            tokens = free.tokens[p, g].tolist()
            hits = [i for i, t in enumerate(tokens) if t in stops]
            length = hits[0] + 1 if hits else T
            assert rollout.tokens[p, g].tolist() == tokens[:length] + [258] * (T - length)
            assert rollout.mask[p, g].tolist() == [True] * length + [False] * (T - length)
            assert int(rollout.finish[p, g]) == bool(hits)
    off = ~np.asarray(rollout.mask)
    for logp in (rollout.behavior_logp, rollout.model_logp, rollout.log_kept):
        assert not np.asarray(logp)[off].any()


def test_other_prompts_of_a_bucket_do_not_compile_again():
    model, params = jr.testing.tiny_model(num_layers=1)
    traced = []

    def apply(*args, **options):
        traced.append(args)
        return model.apply(*args, **options)

    sample = make_sampler(model._replace(apply=apply), max_new_tokens=2, group_size=2)
    counts = []
    for prompts in ([[1], [2, 3]], [[4] * 16, [5, 6]], [[7] * 9, [8] * 12], [[1] * 17, [2]]):
        sample(params, jax.random.key(0), prompts)
        counts.append(len(traced))
    assert 0 < counts[0] == counts[1] == counts[2] < counts[3]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_a_mesh_samples_the_same_tokens(tiny, shape):
    model, params = tiny
    prompts = [[i + 1, 2 * i + 5, 9] for i in range(8)]
    options = {"max_new_tokens": 4, "group_size": 2}
    alone = make_sampler(model, **options)(params, jax.random.key(5), prompts)
    mesh = make_mesh(**dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))
    placed = jax.device_put(params, jr.models.param_shardings(params, mesh))
    spread = make_sampler(model, **options, mesh=mesh)(placed, jax.random.key(5), prompts)
    np.testing.assert_array_equal(alone.tokens, spread.tokens)
    np.testing.assert_allclose(alone.behavior_logp, spread.behavior_logp, atol=1e-5)


@for_each(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be above 0"),
        ({"group_size": 0}, "group_size must be above 0"),
        ({"max_new_tokens": 10**6}, "leaves no room for a prompt"),
        ({"temperature": 0, "top_p": 0.9}, "top_p has no effect at temperature 0"),
        ({"top_k": 260}, "top_k must be at most the vocabulary of 259; got 260"),
        ({"max_new_tokens": 2**40}, r"max_new_tokens must be below 2\*\*31"),
        ({"top_p": 1.0}, "top_p must be below 1; got 1. None is off"),
    ],
)
def test_bad_options_are_named(tiny, options, message):
    with pytest.raises(ValueError, match=message):
        make_sampler(tiny[0], **{"max_new_tokens": 2, "group_size": 2, **options})


@for_each("value", [True, 2.0, np.inf, "2"])
def test_sizes_are_integers(tiny, value):
    for option in ("max_new_tokens", "group_size", "shared_prefix_len"):
        with pytest.raises(TypeError, match=f"make_sampler: {option} must be an? \\w+; got"):
            make_sampler(tiny[0], **{"max_new_tokens": 2, "group_size": 2, option: value})


@for_each(
    ("prompts", "options", "error", "message"),
    [
        ([], {}, ValueError, "there are no prompts"),
        ([[1], []], {}, ValueError, "prompt 1 is empty"),
        ([[1], [2, 999_999]], {}, ValueError, "prompt 1 holds token 999999, outside the vocab"),
        ([[1], [-3]], {}, ValueError, "prompt 1 holds token -3"),
        ([[1], [1] * 5000], {}, ValueError, "prompt 1 has 5000 tokens, but the model's context"),
        ([[1], [1.5]], {}, TypeError, r"prompt 1 must be a list of token ids; got \[1.5\]"),
        ([[True]], {}, TypeError, "prompt 0 must be a list of token ids"),
        (["ab"], {}, TypeError, "prompt 0 must be a list of token ids; got ab"),
        ([1, 2], {}, TypeError, "prompt 0 must be a list of token ids; got 1"),
        ([[[1], [2, 3]]], {}, TypeError, "prompt 0 must be a list of token ids"),
        ([[1]], {"request_ids": [[-1, 0]]}, ValueError, "request_ids must be from 0 to"),
        ([[1]], {"request_ids": [[0, 2**31]]}, ValueError, "request_ids must be from 0 to"),
        ([[1]], {"request_ids": [[0, 0.5]]}, TypeError, "request_ids must hold integers"),
        ([[1]], {"version": -1}, ValueError, "version must be from 0 to"),
        (
            PROMPTS,
            {"request_ids": [[1, 2]]},
            ValueError,
            r"request_ids must have shape \(3, 2\); got \(1, 2\)",
        ),
        (PROMPTS, {"mesh": {"data": 8}}, ValueError, "3 prompts cannot be spread over the 8"),
    ],
)
def test_bad_inputs_are_named(tiny, prompts, options, error, message):
    options = dict(options)
    mesh = make_mesh(**options.pop("mesh")) if "mesh" in options else None
    sample = make_sampler(tiny[0], max_new_tokens=2, group_size=2, mesh=mesh)
    with pytest.raises(error, match=f"sample: {message}"):
        sample(tiny[1], jax.random.key(0), prompts, **options)


def test_a_key_or_a_stop_token_of_another_kind_is_named(tiny):
    sample = make_sampler(tiny[0], max_new_tokens=2, group_size=2)
    for key in (0, jnp.zeros(2, jnp.uint32)):
        with pytest.raises(TypeError, match="sample: key must be one typed key, made by"):
            sample(tiny[1], key, PROMPTS)
    with pytest.raises(TypeError, match="make_sampler: stop_ids must be a list of .*; got 2"):
        make_sampler(tiny[0], max_new_tokens=2, group_size=2, stop_ids=2)


def test_a_program_compiled_for_a_call_is_that_of_the_call():
    model, params = jr.testing.tiny_model(num_layers=1)
    sample = make_sampler(model, max_new_tokens=3, group_size=2, temperature=0.5, top_k=7)
    args = params, jax.random.key(0), [[1, 2, 3], [4]]
    compiled = []

    def listen(event, seconds, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration" and "decode" in fun_name:
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args[:2])
        programs = [sample.compile_for(*shapes, args[2]) for _ in range(2)]
        sample(*args)  # waits for it
        assert all(program.done() and program.result() is None for program in programs)
        assert len(compiled) == 1
        sample(*args[:2], [[1, 2, 3]])
        assert len(compiled) == 2
        with pytest.raises(ValueError, match="prompt 1 is empty"):
            sample.compile_for(*args[:2], [[1], []])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
