"""Models that are not causal: logits of released architectures, names, and what they refuse."""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rows import for_each
from safetensors.numpy import load_file

import jaxrl_llm as jr
from jaxrl_llm.models import AttentionContext, make_model
from jaxrl_llm.models.export import hf_config
from jaxrl_llm.models.loading import load_model, read_config
from jaxrl_llm.models.protocol import empty_cache

GOLDEN = Path(__file__).parents[1] / "golden"
QWEN3 = GOLDEN / "logits" / "qwen3"
RELEASED = {
    "bidirectional": {"architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3"},
    "block_4": {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "block_size": 4},
    "block_5": {"model_type": "sdar", "architectures": None, "block_size": 5},
}


def forward(model, params, tokens, mask, start=0, **context):
    positions = start + jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
    context = AttentionContext(mask, **context)
    return model.apply(params, tokens, positions, context)


@for_each("name", RELEASED)
def test_logits_of_released_architectures(name, new_folder):
    tmp_path = new_folder()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(QWEN3 / file, tmp_path / file)
    values = json.loads((tmp_path / "config.json").read_text())
    values |= RELEASED[name] | {"mask_token_id": 63}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model, params = load_model(tmp_path)
    config = model.config
    assert not config.causal and config.mask_id == 63
    assert config.block_length == values.get("block_size")
    assert jr.models.ModelConfig.from_hf(hf_config(config)) == config

    golden = load_file(GOLDEN / "denoisers" / f"{values['model_type'].split('-')[0]}.safetensors")
    tokens, mask = golden["tokens"][:, None], golden["mask"][:, None]
    with jax.default_matmul_precision("highest"):
        hidden, _ = jax.jit(lambda *args: forward(model, *args))(params, tokens, mask)
        logits = np.asarray(hidden @ model.output_matrix(params).T)[:, 0]
    np.testing.assert_allclose(
        logits[golden["mask"]], golden[name][golden["mask"]], atol=3e-5, rtol=1e-5
    )


def test_the_mask_id_is_that_of_the_tokenizer(tmp_path):
    values = json.loads((QWEN3 / "config.json").read_text()) | RELEASED["bidirectional"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    settings = tmp_path / "tokenizer_config.json"

    def mask_id(**tokenizer):
        settings.write_text(json.dumps(tokenizer))
        return read_config(tmp_path / "config.json").mask_id

    decoder = {"61": {"content": "<|mask|>"}}
    assert mask_id(mask_token="<|mask|>", added_tokens_decoder=decoder) == 61
    tokenizer = {"model": {"vocab": {"<m>": 7}}, "added_tokens": [{"id": 62, "content": "<n>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert mask_id(mask_token={"content": "<n>"}, added_tokens_decoder=decoder) == 62
    assert mask_id(mask_token="<m>") == 7
    with pytest.raises(ValueError, match="names the mask token '<o>', which has no id"):
        mask_id(mask_token="<o>")
    assert mask_id(mask_token=None) is None
    model = make_model(read_config(tmp_path / "config.json"))
    with pytest.raises(
        ValueError, match="this one has no mask_id: `mask_token_id` of config.json, or"
    ):
        jr.rollout.make_denoising_sampler(model, max_new_tokens=2, group_size=1)
    (tmp_path / "config.json").write_text(json.dumps(values | {"mask_token_id": 63}))
    assert mask_id(mask_token="<m>") == 63


def tiny(**changes):
    config = jr.testing.tiny_config(num_layers=1, causal=False, **changes)
    model = make_model(config)
    return model, model.init(jax.random.key(0))


def test_blocks_decode_against_the_cache_of_those_before():
    model, params = tiny(block_length=3)
    tokens = jax.random.randint(jax.random.key(1), (2, 1, 9), 0, 259)
    mask = jnp.ones(tokens.shape, bool)
    whole = jax.jit(partial(forward, model))
    expected, _ = whole(params, tokens, mask)
    cache, rows = empty_cache(model, (2, 1), 9), []
    for start in map(jnp.int32, (0, 3, 6)):
        part = tokens[..., start : start + 3]
        hidden, cache = whole(params, part, mask[..., :3], start, cache=cache, index=start)
        rows.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(rows, 2), expected, atol=1e-5)
    # The last token of a block moves the first, and none of the block before.
    other, _ = whole(params, tokens.at[..., 5].add(1), mask)
    moved = jnp.any(jnp.abs(other - expected) > 1e-6, axis=-1)[0, 0]
    assert moved.tolist() == [False] * 3 + [True] * 6


def test_what_a_denoiser_refuses():
    model, _ = jr.testing.tiny_model(num_layers=1, causal=False, mask_id=0, logit_cap=30.0)
    with pytest.raises(ValueError, match="have no soft cap of logits; the model has logit_cap 30"):
        jr.models.denoise(model, {}, *(jnp.ones((1, 1), bool),) * 2, jnp.ones((1, 1, 1), int))
    model, params = tiny()
    assert not (model.takes_prompts or model.reads_segments or model.reads_trees)
    tokens = jnp.ones((1, 1, 4), int)
    mask, zeros = tokens > 0, jnp.zeros((1, 1, 4), int)
    with pytest.raises(ValueError, match=r"context\.segments needs a causal model"):
        forward(model, params, tokens, mask, segments=zeros)
    with pytest.raises(ValueError, match=r"context\.cache needs keys that do not depend"):
        forward(
            model, params, tokens, mask, cache=empty_cache(model, (1, 1), 4), index=jnp.int32(0)
        )
    with pytest.raises(ValueError, match="`block_length` 4 must be positive, and has no effect"):
        dataclasses.replace(model.config, causal=True, block_length=4)
    with pytest.raises(ValueError, match="`mask_id` 259 is outside the vocabulary of 259"):
        dataclasses.replace(model.config, mask_id=259)
