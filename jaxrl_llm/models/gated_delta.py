"""Linear attention by the gated delta rule: a state of fixed size in the place of keys and values.

A head keeps a matrix ``S`` ``[dk, dv]`` that maps keys to values. At token t it first forgets by
the decay ``a_t`` in (0, 1), then corrects the value that it has for the key ``k_t`` by the share
``beta_t`` in (0, 1), and is read by the query ``q_t``:

    S_t = a_t S_{t-1} + beta_t k_t (v_t - a_t S_{t-1}^T k_t)^T,    o_t = S_t^T q_t

Queries, keys and values first pass a causal convolution over the last K tokens, each channel for
itself, so the state also has the K - 1 inputs before the next token.

Of C tokens in a row, with ``g_i = log a_1 + ... + log a_i``, the corrections ``u_i`` solve

    u_i + sum over j < i of beta_i e^(g_i - g_j) (k_i . k_j) u_j = beta_i (v_i - e^(g_i) S_0^T k_i)

which is one triangular system a chunk, and everything else is products of matrices.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.sizes import power_of_two
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.delta import delta_of, over_axes
from jaxrl_llm.models.layers import LinearAttentionConfig
from jaxrl_llm.models.linear import Linear, drawn
from jaxrl_llm.models.norms import rms_norm
from jaxrl_llm.models.protocol import AttentionContext, DeltaState
from jaxrl_llm.models.sharding import keep_tokens

# Tokens of a chunk: more make the triangular system dearer, fewer the states between chunks.
_CHUNK = 64
# The state sums over all tokens of a row, also where products round float32 by default.
_PRECISION = jax.lax.Precision.HIGHEST
# Added to the squared length of a query or key, which is then 1.
_LENGTH_EPS = 1e-6

_product = partial(jnp.matmul, precision=_PRECISION)


def gated_delta_rule(
    query: Array, key: Array, value: Array, log_decay: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """The gated delta rule over T tokens, see the module.

    Args:
      query, key: ``[..., Hk, T, dk]``; a query is scaled, a key has length 1. Each is shared by
        ``Hv / Hk`` consecutive heads of values.
      value: ``[..., Hv, T, dv]``.
      log_decay: ``log a_t``, at most 0, ``[..., Hv, T]``.
      beta: ``[..., Hv, T]``. A token with ``beta`` and ``log_decay`` 0 leaves the state as it is.
      state: ``S_0``, ``[..., Hv, dk, dv]``.

    Returns:
      ``o`` ``[..., Hv, T, dv]`` and the state after the last token, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxrl_llm.models.gated_delta import gated_delta_rule
      >>> key = jnp.array([[[1.0, 0.0], [1.0, 0.0]]])  # the same key twice
      >>> value, none = jnp.array([[[2.0], [4.0]]]), jnp.zeros((1, 2))
      >>> out, state = gated_delta_rule(key, key, value, none, none + 0.5, jnp.zeros((1, 2, 1)))
      >>> out[0, :, 0].tolist(), state[0, :, 0].tolist()
      ([1.0, 2.5], [2.5, 0.0])

    References:
      Gated DeltaNet (arXiv:2412.06464); its chunks are those of DeltaNet (arXiv:2406.06484).
    """
    repeat = value.shape[-3] // key.shape[-3]
    arrays = (query, key, value, log_decay, beta, state)
    query, key, value, log_decay, beta, state = (x.astype(jnp.float32) for x in arrays)

    def by_keys(x: Array, axis: int) -> Array:
        """Heads of values as ``[Hk, Hv / Hk]``."""
        axis += x.ndim
        return x.reshape(*x.shape[:axis], -1, repeat, *x.shape[axis + 1 :])

    query, key = jnp.expand_dims(query, -3), jnp.expand_dims(key, -3)
    value, memory = by_keys(value, -3), by_keys(state, -3)
    log_decay, beta = by_keys(log_decay, -2), by_keys(beta, -2)
    run = _one_token if value.shape[-2] == 1 else _in_chunks
    out, memory = run(query, key, value, log_decay, beta, memory)
    heads = (*state.shape[:-2],)
    return out.reshape(*heads, *out.shape[-2:]), memory.reshape(state.shape)


def _one_token(query, key, value, log_decay, beta, memory) -> tuple[Array, Array]:
    """The rule itself, for one token."""
    memory = jnp.exp(log_decay)[..., None] * memory
    known = jnp.sum(jnp.swapaxes(key, -1, -2) * memory, axis=-2, keepdims=True)
    memory = memory + jnp.swapaxes(key, -1, -2) * (beta[..., None] * (value - known))
    return jnp.sum(jnp.swapaxes(query, -1, -2) * memory, axis=-2, keepdims=True), memory


def _in_chunks(query, key, value, log_decay, beta, memory) -> tuple[Array, Array]:
    """The rule over chunks of tokens, one after the other."""
    length = value.shape[-2]
    size = min(_CHUNK, power_of_two(length))
    count = -(-length // size)

    def chunks(x: Array, axis: int) -> Array:
        axis += x.ndim
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, count * size - length)
        x = jnp.pad(x, widths)
        return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)

    inputs = [chunks(x, -2) for x in (query, key, value)] + [
        chunks(x, -1) for x in (log_decay, beta)
    ]
    # What a chunk computes is computed again in the backward pass, which stores the states alone.
    step = jax.checkpoint(_chunk, prevent_cse=False)
    memory, out = jax.lax.scan(step, memory, tuple(inputs))
    out = jnp.moveaxis(out, 0, -3)
    return out.reshape(*out.shape[:-3], count * size, out.shape[-1])[..., :length, :], memory


def _chunk(memory: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
    """The state after the C tokens of a chunk, and their outputs."""
    query, key, value, log_decay, beta = inputs
    total = jnp.cumsum(log_decay, axis=-1)
    from_start = jnp.exp(total)[..., None]
    places = jnp.arange(total.shape[-1])
    seen = places[:, None] >= places
    between = jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    keys = jnp.swapaxes(key, -1, -2)
    before = places[:, None] > places
    system = jnp.where(before, beta[..., None] * between * _product(key, keys), 0)
    corrected = beta[..., None] * (value - from_start * _product(key, memory))
    corrected = _product(_inverse(system), corrected)
    out = from_start * _product(query, memory)
    out = out + _product(between * _product(query, keys), corrected)
    to_end = jnp.exp(total[..., -1:] - total)[..., None]
    added = _product(jnp.swapaxes(to_end * key, -1, -2), corrected)
    return from_start[..., -1:, :] * memory + added, out


def _inverse(lower: Array) -> Array:
    """``(I + lower)^-1`` for a strictly lower triangular ``[..., C, C]``, C a power of two.

    From the inverses of two blocks on the diagonal follows that of the block that has both:

        [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]
    """
    *lead, count, _ = lower.shape
    inverse, size = jnp.ones((*lead, count, 1, 1), lower.dtype), 1
    while size < count:
        blocks = lower.reshape(*lead, count // (2 * size), 2, size, count // (2 * size), 2, size)
        corner = jnp.diagonal(blocks[..., :, 1, :, :, 0, :], axis1=-4, axis2=-2)
        corner = jnp.moveaxis(corner, -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_product(second, _product(corner, first))
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def short_convolution(x: Array, before: Array, kernel: Array, mask: Array) -> tuple[Array, Array]:
    """``silu`` of a causal convolution over the last K tokens, each channel for itself.

    Args:
      x: ``[P, G, T, H, d]``.
      before: ``[P, G, H, K - 1, d]``, the inputs before the first token of ``mask``.
      kernel: ``[K, 1, H d]``; the last of K multiplies the token itself.
      mask: bool ``[P, G, T]``: which tokens exist, all behind one another.

    Returns:
      ``[P, G, T, H, d]``, undefined for tokens that do not exist, and the last K - 1 inputs, which
      are ``before`` for the tokens that follow.
    """
    T, K = x.shape[2], kernel.shape[0]
    rows = jnp.moveaxis(before, -2, 2).astype(x.dtype)
    count = jnp.sum(mask, axis=-1, dtype=jnp.int32)
    first = jnp.argmax(mask, axis=-1).astype(jnp.int32)
    padded = jnp.concatenate([jnp.zeros_like(rows), x], axis=2)

    @jax.vmap
    @jax.vmap
    def put(row: Array, new: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, new, start, axis=0)

    @jax.vmap
    @jax.vmap
    def take(row: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(row, start, K - 1, axis=0)

    padded = put(padded, rows, first)
    weights = kernel.astype(x.dtype).reshape(K, *x.shape[3:])
    y = sum(weights[k] * padded[:, :, k : k + T] for k in range(K))
    after = take(padded, first + count)
    return jax.nn.silu(y), jnp.moveaxis(after, 2, -2).astype(before.dtype)


class GatedDelta(nnx.Module):
    """Linear attention in the place of attention: the gated delta rule with its projections."""

    def __init__(self, config: ModelConfig, sizes: LinearAttentionConfig, rngs):
        c, width = config, config.width
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        self.q = Linear(width, keys, c, rngs)
        self.k = Linear(width, keys, c, rngs)
        self.v = Linear(width, values, c, rngs)
        self.gate = Linear(width, values, c, rngs)
        self.beta = Linear(width, sizes.value_heads, c, rngs)
        self.decay = Linear(width, sizes.value_heads, c, rngs)
        self.o = Linear(values, width, c, rngs)
        init = nnx.initializers.normal(sizes.conv_size**-0.5)

        def kernel(channels: int) -> nnx.Param:
            return drawn(init, rngs, sizes.conv_size, 1, channels)

        self.q_conv, self.k_conv, self.v_conv = kernel(keys), kernel(keys), kernel(values)
        # A half-life of a few to a few thousand tokens, as the heads of released models begin.
        rates = partial(jax.random.uniform, minval=1e-3, maxval=1.0)
        self.a_log = drawn(lambda *x: jnp.log(rates(*x)), rngs, sizes.value_heads)
        self.dt_bias = nnx.Param(jnp.zeros((sizes.value_heads,)))
        self.norm = OutputNorm(sizes.value_dim, c)
        self.sizes, self.dtype = sizes, c.dtype

    def __call__(
        self, x: Array, rotary, positions, context: AttentionContext, delta=None
    ) -> tuple[Array, DeltaState]:
        """``[P, G, T, D] -> [P, G, T, D]``, and the state after the tokens of ``context.mask``.

        Called as attention is: the order of tokens is in the state, so a layer needs neither
        ``rotary`` nor ``positions``.
        """
        del rotary, positions
        s = self.sizes
        before = _state_before(x, context, s)

        def heads(y: Array, size: int) -> Array:
            return y.reshape(*y.shape[:-1], -1, size)

        def convolved(name: str, size: int, old: Array) -> tuple[Array, Array]:
            y = heads(getattr(self, name)(x, delta_of(delta, name)), size)
            kernel = getattr(self, f"{name}_conv")[...]
            y, new = short_convolution(y, old, kernel, context.mask)
            return jnp.swapaxes(y, 2, 3).astype(jnp.float32), new

        query, of_query = convolved("q", s.key_dim, before.query)
        key, of_key = convolved("k", s.key_dim, before.key)
        value, of_value = convolved("v", s.value_dim, before.value)
        beta = self.beta(x, delta_of(delta, "beta")).astype(jnp.float32)
        rate = self.decay(x, delta_of(delta, "decay")).astype(jnp.float32)
        rate = jax.nn.softplus(rate + self.dt_bias[...].astype(jnp.float32))
        log_decay = -jnp.exp(self.a_log[...].astype(jnp.float32)) * rate
        exists = context.mask[..., None]
        beta, log_decay = (
            jnp.swapaxes(jnp.where(exists, y, 0), 2, 3) for y in (jax.nn.sigmoid(beta), log_decay)
        )
        out, memory = gated_delta_rule(
            _unit(query) * s.key_dim**-0.5, _unit(key), value, log_decay, beta, before.memory
        )
        gate = heads(self.gate(x, delta_of(delta, "gate")), s.value_dim)
        out = self.norm(jnp.swapaxes(out, 2, 3), gate, delta_of(delta, "norm"))
        out = keep_tokens(out.reshape(*out.shape[:-2], -1))
        state = DeltaState(memory, of_query, of_key, of_value)
        return self.o(out, delta_of(delta, "o")), state


class OutputNorm(nnx.Module):
    """``rms_norm(x) * scale * silu(gate)`` over the last axis, in float32.

    A delta ``[..., 1, size]`` is added to the scale.
    """

    def __init__(self, size: int, config: ModelConfig):
        self.scale = nnx.Param(jnp.ones((size,)))
        self.eps, self.dtype = config.norm_eps, config.dtype

    def __call__(self, x: Array, gate: Array, delta=None) -> Array:
        """``[..., size] -> [..., size]``."""
        scale = self.scale[...].astype(jnp.float32)
        if delta is not None:
            scale = scale + over_axes(delta, x)
        y = rms_norm(x, scale, self.eps) * jax.nn.silu(gate.astype(jnp.float32))
        return y.astype(self.dtype)


def empty_state(sizes: LinearAttentionConfig, leading: tuple[int, ...], dtype: str) -> DeltaState:
    """The state of a layer before the first token."""
    s, before = sizes, sizes.conv_size - 1
    keys = jnp.zeros((*leading, s.key_heads, before, s.key_dim), dtype)
    return DeltaState(
        jnp.zeros((*leading, s.value_heads, s.key_dim, s.value_dim), jnp.float32),
        keys,
        jnp.zeros_like(keys),
        jnp.zeros((*leading, s.value_heads, before, s.value_dim), dtype),
    )


def _state_before(x: Array, context: AttentionContext, sizes: LinearAttentionConfig) -> DeltaState:
    """The state before the first token of each row: that of its prompt, or of the cache."""
    rows = x.shape[:2]
    if context.prefix is None:
        start = empty_state(sizes, rows, x.dtype.name)
    else:
        start = jax.tree.map(
            lambda y: jnp.broadcast_to(y[:, None], (*rows, *y.shape[1:])), context.prefix[0]
        )
    if context.cache is None:
        return start
    # Of the token at place 0, which begins the response.
    begins = context.mask[..., 0] & (jnp.asarray(context.index) == 0)

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(begins.reshape(*rows, *(1,) * (new.ndim - 2)), new, old)

    return jax.tree.map(choose, start, context.cache[0])


def _unit(x: Array) -> Array:
    """Vectors of length 1 along the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _LENGTH_EPS)
