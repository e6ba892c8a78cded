"""A conditional whose outcome the compiler cannot know changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
from rows import for_each

from jaxrl_llm.core.kernels.barriers import once


@for_each("first", [0.0, np.nan, np.inf, -1.0])
def test_what_is_computed_once_is_what_the_function_gives(first):
    after, x = jnp.full((2, 3), first), jnp.arange(4)
    found = jax.jit(lambda x, after: once(lambda x: (jnp.sin(x), x + 1), x, after=after))(x, after)
    np.testing.assert_allclose(found[0], np.sin(np.arange(4)), rtol=1e-6)
    np.testing.assert_array_equal(found[1], [1, 2, 3, 4])
    assert [a.dtype for a in found] == [jnp.float32, jnp.int32]
