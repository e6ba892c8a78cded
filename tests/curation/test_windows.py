"""A window of the latest numbers."""

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.curation import Window, window_push


def test_windows():
    # A window holds the latest.
    window, expected = Window(jnp.zeros(4, jnp.int32), jnp.int32(0)), deque(maxlen=4)
    rng = np.random.default_rng(0)
    push = jax.jit(window_push)
    for size in (2, 3, 7, 1):
        values, where = rng.integers(0, 99, 7), (np.arange(7) < size) & (rng.random(7) < 0.8)
        window = push(window, jnp.asarray(values, jnp.int32), where=jnp.asarray(where))
        expected.extend(values[where].tolist())
        seen = min(int(window.count), 4)
        latest = [(int(window.count) - seen + i) % 4 for i in range(seen)]
        assert [int(window.values[i]) for i in latest] == list(expected)

    # A window takes its dtype.
    words = "window_push: values must be int32 as the window; got float32"
    with pytest.raises(TypeError, match=words):
        window_push(Window(jnp.zeros(2, jnp.int32), jnp.int32(0)), jnp.zeros(2))
