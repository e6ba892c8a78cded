"""Logits equal those of transformers, for every family, from golden data."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file

from jaxrl_llm.models.loading import load_model
from jaxrl_llm.models.protocol import AttentionContext

GOLDEN = Path(__file__).parents[1] / "golden" / "logits"
NAMES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())


def logits_of(model, params, tokens):
    @jax.jit
    def forward(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        context = AttentionContext(mask=jnp.ones(tokens.shape, bool))
        hidden, _ = model.apply(params, tokens, positions, context)
        return hidden @ model.output_matrix(params).T

    return np.asarray(forward(params, tokens[:, None, :]))[:, 0]


def test_every_family_is_here():
    assert NAMES == ["llama", "llama3", "llama_mlp_bias", "qwen2", "qwen3", "smollm2"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name):
    model, params = load_model(GOLDEN / name)
    expected = load_file(GOLDEN / name / "expected.safetensors")
    with jax.default_matmul_precision("highest"):
        logits = logits_of(model, params, expected["tokens"])
    assert expected["logits"].std() > 0.5
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama3", "qwen2"])
def test_logits_of_parameters_loaded_onto_a_mesh(name):
    devices = np.array(jax.devices())
    parts = 2 if devices.size % 2 == 0 else 1
    mesh = Mesh(devices.reshape(-1, parts, 1), ("data", "fsdp", "tensor"))
    model, params = load_model(GOLDEN / name, mesh=mesh)
    expected = load_file(GOLDEN / name / "expected.safetensors")
    kernel = params["layers"]["0"]["mlp"]["up"]["kernel"]
    assert len(kernel.sharding.device_set) == devices.size
    logits = logits_of(model, params, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=1e-4)


def test_rope_scaling_shows_in_the_golden_data():
    """Without the Llama 3 stretching the logits are far off: the data can tell."""
    import dataclasses

    from jaxrl_llm.models.transformer import make_model

    model, params = load_model(GOLDEN / "llama3")
    plain = make_model(dataclasses.replace(model.config, rope_scaling=None))
    expected = load_file(GOLDEN / "llama3" / "expected.safetensors")
    logits = logits_of(plain, params, expected["tokens"])
    assert np.abs(logits - expected["logits"]).max() > 0.1
