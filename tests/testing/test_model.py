"""The tiny model is a real one, only small."""

import jax
import numpy as np
import pytest

import jaxrl_llm as jr
from jaxrl_llm.core import trees


def test_it_is_tiny_and_fits_the_byte_tokenizer():
    model, params = jr.testing.tiny_model()
    assert model.config.vocab_size == jr.testing.ByteTokenizer.vocab_size
    assert trees.size(params) < 30_000


def test_the_seed_decides():
    (_, one), (_, same), (_, other) = (jr.testing.tiny_model(seed=s) for s in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, same)
    assert not np.array_equal(one["embed"]["embedding"], other["embed"]["embedding"])


def test_overrides_are_fields_of_the_config():
    model, params = jr.testing.tiny_model(
        architecture="qwen3", qk_norm=True, num_layers=1, tied=False
    )
    assert list(params["layers"]) == ["0"]
    assert "q_norm" in params["layers"]["0"]["attention"] and "head" in params
    with pytest.raises(TypeError, match="num_layer"):
        jr.testing.tiny_config(num_layer=1)


def test_names_load_on_first_use():
    assert set(jr.testing.__all__) <= set(dir(jr.testing))
    with pytest.raises(AttributeError, match="no attribute 'tiny'"):
        _ = jr.testing.tiny
