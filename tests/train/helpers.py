"""Small batches for the tiny model, and calls that must fail."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.recipes import Batch


def make_batch(prompts=8, group=3, length=5, prompt_length=6, *, seed=0, **fields) -> Batch:
    """Random tokens of unequal lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, (prompts, group, 1))
    prompt_lengths = rng.integers(1, prompt_length + 1, (prompts, 1))
    prompt_lengths[0] = 1  # no shared prefix at all
    values = {
        "tokens": rng.integers(0, 256, (prompts, group, length), dtype=np.int32),
        "mask": np.arange(length) < lengths,
        "rewards": rng.integers(0, 2, (prompts, group)).astype(np.float32),
        "where": np.ones((prompts, group), bool),
        "prompt_tokens": rng.integers(0, 256, (prompts, prompt_length), dtype=np.int32),
        "prompt_mask": np.arange(prompt_length) < prompt_lengths,
    }
    return Batch(**{k: jnp.asarray(v) for k, v in (values | fields).items()})


def batch_with(tokens, prompts=None, **fields) -> Batch:
    """These tokens ``[P, G, T]``, all of which train, behind prompts ``[P, S]``."""
    P, G, _ = np.shape(tokens)
    prompts = np.ones((P, 1), np.int32) if prompts is None else np.asarray(prompts)
    values = {
        "tokens": tokens,
        "mask": np.ones(np.shape(tokens), bool),
        "rewards": np.zeros((P, G), np.float32),
        "where": np.ones((P, G), bool),
        "prompt_tokens": prompts,
        "prompt_mask": np.ones(prompts.shape, bool),
    }
    return Batch(**(values | fields))


def refuses(message, function, *args, error=ValueError, **options):
    """``function`` raises an error with this message."""
    with pytest.raises(error, match=message):
        function(*args, **options)
