"""What the protocol adds to a model."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import AttentionContext, cast_params
from jaxrl_llm.testing import tiny_model


def test_casting_before_gives_what_casting_at_every_use_gives():
    model, params = tiny_model(
        dtype="bfloat16", architecture="qwen3", qk_norm=True, attention_bias=True, tied=False
    )
    # Norms start at one and biases at zero, which half precision holds exactly.
    params = jax.tree.map(lambda x: x + 0.001 if x.ndim == 1 else x, params)
    cast = cast_params(model, params)
    tokens = jnp.arange(4).reshape(1, 1, 4)
    context = AttentionContext(mask=jnp.ones(tokens.shape, bool))

    @jax.jit
    def forward(params):
        hidden, _ = model.apply(params, tokens, tokens, context)
        return hidden, model.output_matrix(params)

    for a, b in zip(forward(params), forward(cast), strict=True):
        np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))
    # A kernel of this shape is in float32 before, and nowhere after.
    assert "f32[32,64]" in str(jax.make_jaxpr(forward)(params))
    assert "f32[32,64]" not in str(jax.make_jaxpr(forward)(cast))


def test_casting_to_the_same_dtype_changes_nothing():
    model, params = tiny_model()
    assert all(
        jax.tree.leaves(jax.tree.map(lambda a, b: a is b, params, cast_params(model, params)))
    )
