"""Logits equal those of transformers, for every family, from golden data."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import forwards
from safetensors.numpy import load_file

from jaxrl_llm.logprobs import token_logprobs
from jaxrl_llm.models.loading import load_model
from jaxrl_llm.models.lora import Adapted, LoRAConfig, adapted_model, init_lora
from jaxrl_llm.models.protocol import AttentionContext, prefill
from jaxrl_llm.models.transformer import make_model
from jaxrl_llm.rollout import make_sampler
from jaxrl_llm.testing import tiny_model
from jaxrl_llm.train.mesh import make_mesh

GOLDEN = Path(__file__).parents[1] / "golden" / "logits"
BEFORE = ("llama", "llama3", "llama_mlp_bias", "qwen2", "qwen3", "smollm2")
NAMES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())
# Here sampler and gradient are compared too.
NEW = [name for name in NAMES if name not in BEFORE]
# All with -m slow.
FEW_OF_NEW = [
    name if name in ("gemma3", "olmo3") else pytest.param(name, marks=pytest.mark.slow)
    for name in NEW
]
LONG = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # to compile


def logits_of(model, params, tokens):
    run = jax.jit(partial(forwards.logits_of, model))
    return np.asarray(run(params, tokens[:, None, :]))[:, 0]


def test_every_family_is_here():
    assert len(NAMES) == 22 and set(BEFORE) < set(NAMES)


@pytest.mark.of_many
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow) if x in LONG else x for x in NAMES],
)
def test_logits_equal_transformers(name, optimized):
    model, params = load_model(GOLDEN / name)
    expected = load_file(GOLDEN / name / "expected.safetensors")
    with jax.default_matmul_precision("highest"):
        logits = logits_of(model, params, expected["tokens"])
    assert expected["logits"].std() > 0.5
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-5, rtol=1e-5)


@pytest.mark.of_many
@pytest.mark.parametrize("name", FEW_OF_NEW)
def test_greedy_tokens_equal_transformers(name):
    """By the sampler: the prompt's keys once a group, then one token at a time from the cache."""
    model, params = load_model(GOLDEN / name)
    expected = load_file(GOLDEN / name / "expected.safetensors")
    count = expected["greedy"].shape[1]
    sample = make_sampler(model, max_new_tokens=count, group_size=1, temperature=0.0)
    with jax.default_matmul_precision("highest"):
        rollout = sample(params, jax.random.key(0), expected["tokens"][:, :24].tolist())
    np.testing.assert_array_equal(rollout.tokens[:, 0], expected["greedy"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW)
def test_gradient_norm_equals_torch(name):
    """The first 16 tokens are a prompt, whose keys the rest of the row attends to."""
    model, params = load_model(GOLDEN / name)
    expected = load_file(GOLDEN / name / "expected.safetensors")
    tokens = expected["tokens"]
    inputs, prompt_mask = tokens[:, None, 16:-1], jnp.ones((len(tokens), 16), bool)

    def loss(params):
        prefix = prefill(model, params, tokens[:, :16], prompt_mask)
        positions = jnp.broadcast_to(16 + jnp.arange(inputs.shape[-1]), inputs.shape)
        context = AttentionContext(jnp.ones(inputs.shape, bool), prefix, prompt_mask)
        hidden, _ = model.apply(params, inputs, positions, context, remat="full")
        matrix = model.output_matrix(params)
        targets = tokens[:, None, 17:]
        return -jnp.mean(token_logprobs(hidden, matrix, targets, logit_cap=model.logit_cap)[0])

    with jax.default_matmul_precision("highest"):
        grads = jax.jit(jax.grad(loss))(params)
    norm = optax.tree.norm(grads)
    np.testing.assert_allclose(norm, expected["grad_norm"], rtol=1e-3)


# Biases; soft caps; norms around each block and of each head; norms of all heads at once; layers
# without rope.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "qwen2", "gemma2", "gemma3", "olmo2", "smollm3"])
def test_logits_of_parameters_loaded_onto_a_mesh(name):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    model, params = load_model(GOLDEN / name, mesh=mesh)
    expected = load_file(GOLDEN / name / "expected.safetensors")
    kernel = params["layers"]["0"]["mlp"]["up"]["kernel"]
    assert not kernel.sharding.is_fully_replicated
    assert len(kernel.sharding.device_set) == len(jax.devices())
    logits = logits_of(model, params, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=1e-4)


def test_capped_logits_are_those_of_sampler_and_training():
    """At a temperature, which divides what is capped, and with an adapter."""
    model, params = tiny_model(num_layers=1, attention_cap=1.0, logit_cap=0.5)
    config = LoRAConfig(rank=2)
    adapter = jax.tree.map(lambda x: x + 0.05, init_lora(params, config))
    policy, adapted = adapted_model(model, config), Adapted(params, adapter)
    prompts = np.arange(8, dtype=np.int32).reshape(2, 4)
    sample = make_sampler(policy, max_new_tokens=3, group_size=2, temperature=0.7)
    rollout = sample(adapted, jax.random.key(0), prompts.tolist())
    logp = forwards.scores_of(policy, adapted, rollout, temperature=0.7)
    np.testing.assert_allclose(rollout.behavior_logp, logp, atol=2e-5)
    # One row a rollout, without a prefix or a cache, and all logits at once.
    rows = np.concatenate([np.repeat(prompts, 2, 0), np.asarray(rollout.tokens).reshape(4, 3)], 1)
    log_probs = jax.nn.log_softmax(logits_of(policy, adapted, rows)[:, 3:-1] / 0.7)
    want = np.take_along_axis(np.asarray(log_probs), rows[:, 4:, None], -1).reshape(2, 2, 3)
    np.testing.assert_allclose(logp, want, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part", "value"),
    [
        ("llama3", "rope_scaling", None),
        ("gemma2", "attention_cap", None),
        ("gemma2", "logit_cap", None),
        ("gpt_oss", "sinks", False),
        ("gpt_oss", "experts", {"limit": 7.0}),
        ("qwen3_moe_steps", "experts", {"normalized": True}),
    ],
)
def test_a_part_shows_in_the_golden_data(name, part, value):
    """Without it the logits are far off: the data can tell."""
    model, params = load_model(GOLDEN / name)
    if part == "experts":
        value = dataclasses.replace(model.config.experts, **value)
    if part == "sinks":
        for layer in params["layers"].values():
            del layer["attention"]["sinks"]
    plain = make_model(dataclasses.replace(model.config, **{part: value}))
    expected = load_file(GOLDEN / name / "expected.safetensors")
    logits = logits_of(plain, params, expected["tokens"])
    assert np.abs(logits - expected["logits"]).max() > 0.1
