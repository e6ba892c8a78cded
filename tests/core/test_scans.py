"""Running minima against a loop."""

import jax
import jax.numpy as jnp
import numpy as np
from rows import for_each

from jaxrl_llm.core.scans import minimum_before


@for_each(
    ("length", "lead"), [(n, (3,)) for n in (0, 1, 2, 7, 8, 9, 65)] + [(65, ()), (200, (2, 3))]
)
def test_it_is_the_least_before(length, lead):
    x = np.random.default_rng(length).normal(size=(*lead, length)).astype(np.float32)
    x[..., length // 2 : length // 2 + 1] = np.inf
    want = np.full_like(x, np.inf)
    for t in range(1, length):
        want[..., t] = x[..., :t].min(-1)
    if length in (9, 200):
        np.testing.assert_array_equal(jax.jit(minimum_before)(x), want)
    np.testing.assert_array_equal(minimum_before(jnp.asarray(x)), want)
