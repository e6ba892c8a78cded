"""Linear attention: its rule, its states in caches and slots, and released checkpoints of it."""

import json
import shutil
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.forwards import scores_of
from rows import for_each
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models import (
    AttentionContext,
    LayerKind,
    LinearAttentionConfig,
    ModelConfig,
    empty_cache,
    load_model,
    prefill,
)
from jaxrl_llm.models.gated_delta import gated_delta_rule
from jaxrl_llm.models.sharding import on_mesh
from jaxrl_llm.rollout import Generation, Group, NextTurn, make_engine, make_sampler
from jaxrl_llm.testing import tiny_config, tiny_model
from jaxrl_llm.train.mesh import make_mesh
from jaxrl_llm.train.models.score import score

GOLDEN = Path(__file__).parents[1] / "golden" / "logits"
SIZES = LinearAttentionConfig(key_heads=2, value_heads=4, key_dim=6, value_dim=10, conv_size=3)
CHANGES = {
    "layers": (LayerKind(linear=True), LayerKind()),
    "num_layers": 2,
    "linear_attention": SIZES,
    "output_gate": True,
    "rotary_dim": 4,
}


@pytest.fixture(scope="module")
def hybrid():
    model, params = tiny_model(**CHANGES)
    rng = np.random.default_rng(7)
    # Larger than at the start of training, so that a wrong state shows.
    return model, jax.tree.map(lambda x: x + jnp.float32(0.3 * rng.normal(size=x.shape)), params)


def by_token(query, key, value, log_decay, beta, state):
    """The rule, token by token, in NumPy."""
    repeat = value.shape[0] // key.shape[0]
    query, key = np.repeat(query, repeat, 0), np.repeat(key, repeat, 0)
    state, out = state.copy(), np.zeros_like(value)
    for head in range(len(value)):
        for t in range(value.shape[1]):
            k, v = key[head, t], value[head, t]
            state[head] *= np.exp(log_decay[head, t])
            state[head] += beta[head, t] * np.outer(k, v - state[head].T @ k)
            out[head, t] = state[head].T @ query[head, t]
    return out, state


def rule_inputs(length):
    rng = np.random.default_rng(length)
    query, key = rng.normal(size=(2, 2, length, 6))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value, state = rng.normal(size=(4, length, 5)), rng.normal(size=(4, 6, 5))
    log_decay = -rng.exponential(0.2, size=(4, length))
    beta = rng.uniform(size=(4, length))
    beta[:, length // 2] = log_decay[:, length // 2] = 0  # a token that does not exist
    return query, key, value, log_decay, beta, state


@for_each("length", [1, 7, 64, 65, 150])
def test_chunks_equal_the_rule_token_by_token(length):
    inputs = rule_inputs(length)
    out, state = jax.jit(gated_delta_rule)(*map(jnp.float32, inputs))
    expected, after = by_token(*inputs)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_allclose(state, after, atol=2e-5)


def test_gradients_of_chunks_equal_those_token_by_token():
    inputs = tuple(map(jnp.float32, rule_inputs(70)))
    weights = jax.random.normal(jax.random.key(0), (4, 70, 5))

    def in_chunks(*inputs):
        out, state = gated_delta_rule(*inputs)
        return jnp.sum(out * weights) + jnp.sum(state**2)

    def one_by_one(*inputs):
        *of_tokens, state = inputs

        def take(state, of_token):
            out, state = gated_delta_rule(*(x[:, None] for x in of_token), state)
            return state, out[:, 0]

        state, outs = jax.lax.scan(take, state, [jnp.moveaxis(x, 1, 0) for x in of_tokens])
        return jnp.sum(jnp.moveaxis(outs, 0, 1) * weights) + jnp.sum(state**2)

    grads = jax.jit(jax.grad(in_chunks, argnums=range(6)))(*inputs)
    expected = jax.jit(jax.grad(one_by_one, argnums=range(6)))(*inputs)
    for grad, want in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad, want, atol=2e-4, rtol=2e-4)


@pytest.mark.slow
def test_a_cache_that_is_read_in_parts_equals_one_pass(hybrid):
    """Of rows of several lengths, behind a prompt, with tokens that a part has again."""
    model, params = hybrid
    tokens = jax.random.randint(jax.random.key(1), (2, 2, 11), 0, 250)
    prompts = jax.random.randint(jax.random.key(2), (2, 5), 0, 250)
    prompt_mask = jnp.arange(5) < jnp.array([[5], [3]])
    ends = jnp.sum(prompt_mask, axis=-1)[:, None, None]
    prefix = prefill(model, params, prompts, prompt_mask)
    places = jnp.arange(11)
    length = jnp.array([[11, 4], [7, 9]])[..., None]
    context = AttentionContext(places < length, prefix, prompt_mask)
    hidden, _ = model.apply(params, tokens, ends + jnp.broadcast_to(places, (2, 2, 11)), context)
    cache, found = empty_cache(model, (2, 2), 11), []
    for begin, new in ((0, 0), (3, 4), (5, 7), (7, 9)):  # all but the first have some again
        part = begin + jnp.arange(4)
        exists = (part >= new) & (part < length)
        context = AttentionContext(exists, prefix, prompt_mask, cache, jnp.int32(begin))
        here, cache = model.apply(
            params,
            tokens[..., begin : begin + 4],
            ends + jnp.broadcast_to(part, (2, 2, 4)),
            context,
        )
        found.append(here[:, :, new - begin :])
    found = jnp.concatenate(found, axis=2)
    exists = np.asarray(places < length)
    np.testing.assert_allclose(np.asarray(found)[exists], np.asarray(hidden)[exists], atol=1e-4)


@pytest.mark.slow
def test_prompts_that_share_their_beginning(hybrid):
    model, params = hybrid
    tokens = jax.random.randint(jax.random.key(3), (3, 12), 0, 250).at[:, :6].set(jnp.arange(6))
    mask = jnp.arange(12) < jnp.array([[12], [8], [10]])
    whole = prefill(model, params, tokens, mask)
    shared = prefill(model, params, tokens, mask, shared_prefix_len=6)
    for a, b in zip(whole[0], shared[0], strict=True):  # that of linear attention
        np.testing.assert_allclose(a, b, atol=1e-4)


class Dialog:
    """Three turns; the second drops the last token before it."""

    def __init__(self):
        self.turns = {}

    def __call__(self, completion):
        turn = self.turns[completion.request] = self.turns.get(completion.request, 0) + 1
        length, following = len(completion), Future()
        tokens = [20 + (7 * completion.request + length + i) % 200 for i in range(1 + turn * 2)]
        keep = length - 1 if turn == 2 and length > 1 else None
        fits = turn < 3 and length + len(tokens) + 1 <= 23
        following.set_result(NextTurn(tokens, keep=keep) if fits else None)
        return following


def check_completions(model, params, groups, finished, least, *, version=0):
    """What the engine records of the tokens of a version is what scoring finds."""
    prompts, count = {g.id: list(g.prompt) for g in groups}, 0
    scored = jax.jit(partial(score, model))
    for group in finished:
        prompt = prompts[group.id]
        for done in group.completions:
            tokens = np.asarray(done.out.tokens)[None, None]
            pad = ((0, 0), (0, 0), (0, 24 - tokens.shape[-1]))
            row = np.zeros((1, 5), np.int32)
            row[0, : len(prompt)] = prompt
            logp, _ = scored(
                params,
                row,
                np.arange(5)[None] < len(prompt),
                np.pad(tokens, pad),
                np.pad(np.ones(tokens.shape, bool), pad),
            )
            sampled = np.asarray(done.out.version) == version
            found = np.asarray(done.out.behavior_logp)[sampled]
            want = np.asarray(logp)[0, 0, : tokens.shape[-1]][sampled]
            np.testing.assert_allclose(found, want, atol=5e-4)
            count += sampled.sum()
    assert count > least


@pytest.mark.slow
def test_slots_with_turns_equal_scoring(hybrid):
    """Rows that wait, end and begin again beside others, and a turn that goes back."""
    model, params = hybrid
    dialog = Dialog()
    groups = [
        Group(
            i, [30 + i, 40, 50 + i, 9][: 1 + i % 4], (2 * i, 2 * i + 1), follow=dialog, turn_limit=5
        )
        for i in range(6)
    ]
    engine = make_engine(
        model, rows=2, width=2, prompt_length=5, max_new_tokens=23, chunk=3, block=3
    )
    assert engine.has_states
    generation = Generation(engine, params, key=jax.random.key(0))
    generation.submit(*groups)
    finished = list(generation)
    assert max(dialog.turns.values()) == 3
    check_completions(model, params, groups, finished, 60)


@pytest.mark.slow
def test_slots_with_new_weights_read_all_again(hybrid):
    """In the middle of responses, of which the last block has some tokens twice."""
    model, params = hybrid
    other = jax.tree.map(lambda x: x * 1.5, params)
    groups = [Group(i, [5, 6 + i], (2 * i, 2 * i + 1), (21, 24)[i]) for i in range(2)]
    engine = make_engine(
        model, rows=2, width=2, prompt_length=4, max_new_tokens=24, chunk=3, block=5
    )
    generation = Generation(engine, params, key=jax.random.key(0))
    generation.submit(*groups)
    finished = iter(generation)
    first = next(finished)
    generation.update(other, version=1)
    second = next(finished)
    check_completions(model, params, groups, [first, second], 80)
    check_completions(model, other, groups, [second], 5, version=1)


def test_the_sampler_equals_scoring(hybrid):
    model, params = hybrid
    sample = make_sampler(model, max_new_tokens=8, group_size=3)
    rollout = sample(params, jax.random.key(0), [[1, 2, 3, 4], [5]])
    np.testing.assert_allclose(rollout.behavior_logp, scores_of(model, params, rollout), atol=2e-4)


@for_each("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_released_model_of_images_and_text(name, new_folder):
    """Its decoder is the one of texts; the encoder of images and mtp heads are not read."""
    tmp_path = new_folder()
    config = json.loads((GOLDEN / name / "config.json").read_text())
    composite = {"qwen3_5": "Qwen3_5ForConditionalGeneration"}.get(
        name, "Qwen3_5MoeForConditionalGeneration"
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": [composite], "text_config": config})
    )
    tensors = load_file(GOLDEN / name / "model.safetensors")
    held = {"mtp.norm.weight": np.zeros(3), "model.visual.patch.weight": np.zeros((2, 2))}
    fused: dict[str, dict] = {}
    for key, value in tensors.items():
        new = key.replace("model.", "model.language_model.", 1)
        before, found, after = new.partition(".mlp.experts.")
        if found:
            expert, part, _ = after.split(".")
            fused.setdefault(before, {})[int(expert), part] = value
        else:
            held[new] = value
    for before, parts in fused.items():
        count = 1 + max(expert for expert, _ in parts)
        gate_up = [
            np.concatenate([parts[i, "gate_proj"], parts[i, "up_proj"]]) for i in range(count)
        ]
        held[f"{before}.mlp.experts.gate_up_proj"] = np.stack(gate_up)
        down = np.stack([parts[i, "down_proj"] for i in range(count)])
        held[f"{before}.mlp.experts.down_proj"] = down
    save_file(held, tmp_path / "model.safetensors")
    (model, params), (expected, of_text) = load_model(tmp_path), load_model(GOLDEN / name)
    assert model.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, params, of_text)


def test_a_mesh_splits_its_parameters(tmp_path):
    mesh = make_mesh(data=-1, fsdp=2, tensor=2)
    folder = GOLDEN / "qwen3_next"
    _, params = load_model(folder, mesh=mesh)
    _, expected = load_model(folder)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    attention = params["layers"]["0"]["attention"]
    for name in ("q", "k", "v", "gate", "beta", "decay", "o"):
        assert not attention[name]["kernel"].sharding.is_fully_replicated
    assert not attention["v_conv"].sharding.is_fully_replicated


def test_what_a_state_cannot_serve_is_refused(hybrid):
    model, params = hybrid
    tokens = jnp.ones((1, 1, 4), int)
    context = AttentionContext(tokens > 0)
    with pytest.raises(ValueError, match="context.segments needs attention in every layer"):
        model.apply(params, tokens, tokens, context._replace(segments=tokens))
    run = on_mesh(partial(model.apply, params, tokens, tokens), make_mesh(data=-1, context=2))
    with pytest.raises(ValueError, match="'context' splits the tokens of a row"):
        run(context)


@for_each(
    ("changes", "message"),
    [
        ({"linear_attention": None}, "need `linear_attention`"),
        ({"layers": None}, "need `linear_attention`"),
        ({"causal": False}, "linear need `causal` True"),
        ({"rotary_dim": 8}, "`rotary_dim` must be even, above 0 and below `head_dim`"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**CHANGES | changes)


@for_each(
    ("changes", "message"),
    [
        ({"key_heads": 3}, "does not divide `value_heads`"),
        ({"conv_size": 1}, "`conv_size` must be at least 2"),
        ({"key_dim": 0}, "key_dim"),
    ],
)
def test_bad_sizes(changes, message):
    with pytest.raises(ValueError, match=message):
        LinearAttentionConfig(**vars(SIZES) | changes)
    with pytest.raises(ValueError, match="no effect with `linear` True"):
        LayerKind(linear=True, window=4)


@for_each("of_text", [{}, {"quantization_config": None}])
def test_quantized_models_of_images_and_text_are_refused(of_text):
    text = json.loads((GOLDEN / "qwen3_5" / "config.json").read_text()) | of_text
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    ModelConfig.from_hf(config | {"quantization_config": None})
    with pytest.raises(ValueError, match="`quantization_config` is not supported"):
        ModelConfig.from_hf(config | {"quantization_config": {"quant_method": "fp8"}})


def test_a_text_config_must_be_there(tmp_path):
    shutil.copytree(GOLDEN / "qwen3_5", tmp_path / "model")
    (tmp_path / "model/config.json").write_text(
        json.dumps({"architectures": ["Qwen3_5ForConditionalGeneration"]})
    )
    with pytest.raises(ValueError, match="`text_config` of 'Qwen3_5ForConditionalGeneration'"):
        load_model(tmp_path / "model")
