"""The built-in decoder: one flax.nnx module whose configuration chooses the parts of a family.

The module exists only inside this file. :func:`make_model` splits it at the boundary, so everything
else sees pure functions of a plain dict of arrays.
"""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.core import checks, trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.kernels.barriers import keep_calls, once
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.context import (
    Window,
    check_context,
    collect_rows,
    context_attention,
    look_ahead,
    spread_rows,
    take_experts,
)
from jaxrl_llm.models.delta import check_delta, delta_of, row_embedding, row_product
from jaxrl_llm.models.experts import Mixture
from jaxrl_llm.models.gated_delta import GatedDelta, empty_state
from jaxrl_llm.models.layers import LayerKind
from jaxrl_llm.models.linear import Linear, RMSNorm, drawn
from jaxrl_llm.models.protocol import (
    EXPERT_DTYPE,
    KV,
    AttentionContext,
    Cache,
    Model,
    empty_kv,
)
from jaxrl_llm.models.remat import POLICIES, all_gather_after, recomputed, rematerialized
from jaxrl_llm.models.rope import rotary_tables, rotate
from jaxrl_llm.models.scanned import run_layers
from jaxrl_llm.models.sharding import context_size, keep_apart, keep_tokens


class Attention(nnx.Module):
    """Grouped-query attention, with rotary positions, norms and a window as a layer has them."""

    def __init__(self, config: ModelConfig, rngs, kind: LayerKind):
        c = config
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q = Linear(c.width, queries, c, rngs, bias=c.attention_bias)
        self.k = Linear(c.width, keys, c, rngs, bias=c.attention_bias)
        self.v = Linear(c.width, keys, c, rngs, bias=c.attention_bias)
        self.o = Linear(queries, c.width, c, rngs, bias=c.output_bias)
        self.gate = Linear(c.width, queries, c, rngs) if c.output_gate else None
        self.sinks = nnx.Param(jnp.zeros((c.num_heads,))) if c.sinks else None
        self.by_head = c.qk_norm_over == "head"
        sizes = (c.head_dim, c.head_dim) if self.by_head else (queries, keys)
        self.q_norm = RMSNorm(sizes[0], c) if c.qk_norm else None
        self.k_norm = RMSNorm(sizes[1], c) if c.qk_norm else None
        self.head_dim, self.window = c.head_dim, kind.window
        self.scale, self.cap = c.query_scale, c.attention_cap
        self.keep_masked = c.linear_attention is not None

    def __call__(self, x: Array, rotary, positions, context, delta=None):
        """``[P, G, T, D] -> [P, G, T, D]``, and the KV of this layer."""

        def heads(y: Array) -> Array:
            return y.reshape(*y.shape[:-1], -1, self.head_dim)

        split = heads if self.by_head else lambda y: y
        query = split(self.q(x, delta_of(delta, "q")))
        key = split(self.k(x, delta_of(delta, "k")))
        value = heads(self.v(x, delta_of(delta, "v")))
        if self.q_norm is not None and self.k_norm is not None:
            query = self.q_norm(query, delta_of(delta, "q_norm"))
            key = self.k_norm(key, delta_of(delta, "k_norm"))
        if not self.by_head:
            query, key = heads(query), heads(key)
        if rotary is not None:
            cos, sin = rotary
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        new = KV(jnp.moveaxis(key, -3, -1), jnp.swapaxes(value, -3, -2))
        window = None if self.window is None else Window(self.window, positions)
        output, kv = context_attention(
            query,
            new,
            context,
            keep_masked=self.keep_masked,
            window=window,
            scale=self.scale,
            cap=self.cap,
            sinks=None if self.sinks is None else self.sinks[...],
        )
        output = keep_tokens(output.reshape(*output.shape[:-2], -1))
        if self.gate is not None:
            gate = self.gate(x, delta_of(delta, "gate"))
            output = recomputed(lambda y, gate: y * jax.nn.sigmoid(gate))(output, gate)
        return self.o(output, delta_of(delta, "o")), kv


_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


class MLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, rngs, hidden: int):
        c = config
        self.gate = Linear(c.width, hidden, c, rngs, bias=c.mlp_bias)
        self.up = Linear(c.width, hidden, c, rngs, bias=c.mlp_bias)
        self.down = Linear(hidden, c.width, c, rngs, bias=c.mlp_bias)
        self.activation = c.activation

    def __call__(self, x: Array, delta=None) -> Array:
        """``[..., D] -> [..., D]``."""
        gate, up = self.gate(x, delta_of(delta, "gate")), self.up(x, delta_of(delta, "up"))
        activation = _ACTIVATIONS[self.activation]

        @recomputed
        def gated(gate: Array, up: Array) -> Array:
            """In float32: XLA for CPUs would round the result of each bfloat16 operation."""
            wide = activation(gate.astype(jnp.float32)) * up.astype(jnp.float32)
            return wide.astype(gate.dtype)

        hidden = gated(gate, up)
        return self.down(hidden, delta_of(delta, "down"))


def _mixture_or_mlp(config: ModelConfig, rngs) -> MLP | Mixture:
    """The MLP of a layer that is not dense."""
    c, experts = config, config.experts
    if experts is None:
        return MLP(c, rngs, c.mlp_width)
    router = Linear(c.width, experts.count, c, rngs, bias=experts.bias)
    shared = None
    if experts.shared is not None:
        shared = MLP(c, rngs, experts.shared), Linear(c.width, 1, c, rngs)
    activation = _ACTIVATIONS[c.activation]
    return Mixture(c, experts, rngs, router=router, activation=activation, shared=shared)


def _attention(config: ModelConfig, rngs, kind: LayerKind) -> Attention | GatedDelta:
    """The attention of a layer."""
    if kind.linear and config.linear_attention is not None:
        return GatedDelta(config, config.linear_attention, rngs)
    return Attention(config, rngs, kind)


class Block(nnx.Module):
    """One layer: attention and MLP, added to the residual stream, with norms before or after."""

    def __init__(self, config: ModelConfig, rngs, kind: LayerKind):
        before, after = (config.norm_placement in (x, "both") for x in ("before", "after"))
        self.attention_norm = RMSNorm(config.width, config) if before else None
        self.attention = _attention(config, rngs, kind)
        self.attention_output_norm = RMSNorm(config.width, config) if after else None
        self.mlp_norm = RMSNorm(config.width, config) if before else None
        plain = partial(MLP, config, rngs, config.mlp_width)
        self.mlp = plain() if kind.dense else _mixture_or_mlp(config, rngs)
        self.mlp_output_norm = RMSNorm(config.width, config) if after else None

    def __call__(self, x: Array, rotary, positions, context, delta=None, given=None):
        """``[P, G, T, D] -> [P, G, T, D]``, the cache of this layer, and each token's experts.

        Tokens take the ``given`` experts, if any. A layer without experts has None.
        """

        def normed(y: Array, name: str) -> Array:
            norm = getattr(self, name)
            return y if norm is None else norm(y, delta_of(delta, name))

        inputs, of_attention = normed(x, "attention_norm"), delta_of(delta, "attention")
        attended, kv = self.attention(inputs, rotary, positions, context, of_attention)
        x = x + normed(attended, "attention_output_norm")
        inputs, chosen = normed(x, "mlp_norm"), None
        if isinstance(self.mlp, Mixture):
            y, chosen = self.mlp(inputs, delta_of(delta, "mlp"), given)
        else:
            y = self.mlp(inputs, delta_of(delta, "mlp"))
        return x + normed(y, "mlp_output_norm"), kv, chosen


class Embedding(nnx.Module):
    """Token embedding ``[V, D]``; also the output matrix of a tied model.

    A delta is that of a :class:`Linear` with one row of ``A`` a token; only rows that are read are
    made.
    """

    def __init__(self, config: ModelConfig, rngs):
        init = nnx.initializers.normal(config.width**-0.5)
        self.embedding = drawn(init, rngs, config.vocab_size, config.width)
        self.dtype, self.scale = config.dtype, config.embedding_scale

    def __call__(self, tokens: Array, delta=None) -> Array:
        """``[P, G, T] -> [P, G, T, D]``."""
        x = self.embedding[...][tokens].astype(self.dtype)
        if delta is not None:
            a, b, scale = delta
            change = row_product(row_embedding(a, tokens).astype(self.dtype), b.astype(self.dtype))
            x = (x + scale * change).astype(self.dtype)
        # A factor in the dtype of the model, as Gemma was trained.
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, self.dtype)


class Head(nnx.Module):
    """Output matrix ``[V, D]`` of an untied model."""

    def __init__(self, config: ModelConfig, rngs):
        init = nnx.initializers.normal(config.width**-0.5)
        self.kernel = drawn(init, rngs, config.vocab_size, config.width)


@functools.lru_cache(maxsize=64)
def _compiled_block(graphdef: nnx.GraphDef, remat: str, backend: str, reads: bool) -> Callable:
    """One block, recomputed in the backward pass by the policy of ``remat``.

    Layers that differ in their arrays alone are traced, differentiated and lowered once for all.
    ``backend`` is the one that a trace is for. ``reads`` says whether the block reads keys of
    earlier calls of the model, which XLA would copy for a function that is not inlined.
    """

    def run(weights, x, tables, positions, context, delta, given):
        block = nnx.merge(graphdef, all_gather_after(weights, after=x))
        return block(x, tables, positions, context, delta, given)

    policy = POLICIES[remat]
    run = run if policy is None else rematerialized(run, policy)
    return jax.jit(run) if reads or backend != "cpu" else keep_calls(run)


def _check_linear(context: AttentionContext) -> None:
    """Raises ValueError for what a state after each token cannot serve."""
    for field in ("segments", "ends", "prompt_tree", "prompt_mask"):
        if getattr(context, field) is not None:
            what = "prefix_mask without context.prefix" if field == "prompt_mask" else field
            raise ValueError(
                f"Model.apply: context.{what} needs attention in every layer, and this model has "
                "linear attention."
            )
    if context_size() > 1:
        raise ValueError(
            "Model.apply: the mesh axis 'context' splits the tokens of a row, which linear "
            "attention reads one after the other; use the other axes."
        )


class Decoder(nnx.Module):
    """Embedding, blocks and the last norm; projecting to the vocabulary is the caller's."""

    def __init__(self, config: ModelConfig, rngs):
        self.embed = Embedding(config, rngs)
        self.layers = nnx.Dict(
            {str(i): Block(config, rngs, config.kind_of(i)) for i in range(config.num_layers)}
        )
        self.norm = RMSNorm(config.width, config)
        self.head = None if config.tied else Head(config, rngs)
        self.config = config

    def __call__(self, tokens, positions, context: AttentionContext, delta=None, remat="none"):
        """Tokens ``[P, G, T]`` -> hidden states ``[P, G, T, D]``, a cache a layer, and the experts.

        These are ``[P, G, T, k]`` for each layer that has some, counted from 0.
        """
        if self.config.linear_attention is not None:
            _check_linear(context)
        if not self.config.causal:
            context = look_ahead(positions, context, self.config.block_length)
        of_call = context
        tokens, positions, context = spread_rows(tokens, positions, context)
        x = keep_apart(self.embed(tokens, delta_of(delta, "embed")), tokens=True)
        ropes = [self.config.rope_of(i) for i in range(self.config.num_layers)]
        rotary = {
            rope: once(
                partial(rotary_tables, size=self.config.rotated, rope=rope), positions, after=x
            )
            for rope in dict.fromkeys(ropes)
            if rope is not None
        }
        layer_deltas = delta_of(delta, "layers")
        given, of_layers = take_experts(context)
        reads = context.prefix is not None or context.cache is not None
        layers = [nnx.split(self.layers[str(i)]) for i in range(self.config.num_layers)]

        def layer(i: int, x: Array, arrays: tuple) -> tuple[Array, tuple]:
            weights, prefix, cache, delta, given = arrays
            run = _compiled_block(layers[i][0], remat, jax.default_backend(), reads)
            tables = None if (rope := ropes[i]) is None else rotary[rope]
            places = None if self.config.kind_of(i).window is None else positions
            read = context._replace(prefix=prefix, cache=cache, experts=None)
            x, kv, chosen = run(weights, x, tables, places, read, delta, given)
            return keep_apart(x, tokens=True), (kv, chosen)

        mixing = [i for i in range(self.config.num_layers) if self.config.has_experts(i)]
        arrays = []
        for i, (_, weights) in enumerate(layers):
            of_layer = of_layers.of_layer(i)
            taken = None
            if given is not None and i in mixing:
                taken = given[..., mixing.index(i), :]
            here = delta_of(layer_deltas, str(i))
            arrays.append((weights, of_layer.prefix, of_layer.cache, here, taken))
        # A cache that a scan stacks would be copied in every call.
        scanned = self.config.scan_layers and context.cache is None
        period = self.config.layer_period if scanned else None
        x, outputs = run_layers(layer, x, arrays, period=period)
        kv, chosen = [kv for kv, _ in outputs], [outputs[i][1] for i in mixing]
        x = self.norm(x, delta_of(delta, "norm"))
        collect = partial(collect_rows, context=of_call, padded=context)
        if context is not of_call:
            x = collect(x, 2)
            kv = [KV(collect(layer.keys, -1), collect(layer.values, -2)) for layer in kv]
            chosen = [collect(experts, 2) for experts in chosen]
        return x, tuple(kv), chosen


def make_model(config: ModelConfig) -> Model:
    """The built-in decoder as pure functions of a dict of arrays.

    Args:
      config: Its shape; read from a ``config.json`` by ``ModelConfig.from_hf``.

    Returns:
      A :class:`~jaxrl_llm.models.protocol.Model`. Its ``params`` are a plain nested dict; kernels
      are ``[in, out]``. ``apply`` takes ``remat`` = ``"none"``, ``"full"`` (the backward pass of a
      block stores only its input) or ``"dots"`` (also its matrix products).

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> tokens = jax.numpy.ones((1, 1, 3), int)
      >>> context = jr.models.AttentionContext(mask=tokens > 0)
      >>> hidden, _ = model.apply(params, tokens, jax.numpy.arange(3)[None, None], context)
      >>> (hidden @ model.output_matrix(params).T).shape == (1, 1, 3, model.config.vocab_size)
      True
    """
    return _decoder(config)


@dataclasses.dataclass(frozen=True, eq=False)
class _Init:
    """``Model.init`` of the decoder, and the shapes of what it returns."""

    config: ModelConfig = dataclasses.field(repr=False)
    shapes: ArrayTree = dataclasses.field(repr=False)

    def __call__(self, key: Array) -> ArrayTree:
        decoder = Decoder(self.config, nnx.Rngs(params=key))
        return nnx.to_pure_dict(nnx.state(decoder, nnx.Param))


# A start of the command line makes a model three times, each of which traces every layer.
@functools.lru_cache(maxsize=16)
def _decoder(config: ModelConfig) -> Model:
    """The functions of :func:`make_model`, the same for equal configurations."""
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, None)))

    def run(params, tokens, positions, context, delta, remat):
        checks.check_rank("Model.apply", 3, tokens=tokens, positions=positions)
        checks.check_same_shape("Model.apply", tokens=tokens, positions=positions)
        check_context(tokens, context)
        if context.experts is not None:
            of_token = (config.expert_layers, config.experts.active) if config.experts else (0, 0)
            shape = (*context.mask.shape, *of_token)
            checks.check_shape("Model.apply", "context.experts", context.experts, shape)
        checks.check_option("Model.apply", "remat", remat, POLICIES)
        if delta is not None:
            check_delta(delta, params)
        return nnx.merge(graphdef, params)(tokens, positions, context, delta, remat)

    def apply(params, tokens, positions, context, *, delta=None, remat="none"):
        hidden, kv, _ = run(params, tokens, positions, context, delta, remat)
        return hidden, kv

    def apply_routed(params, tokens, positions, context, *, delta=None, remat="none"):
        hidden, kv, chosen = run(params, tokens, positions, context, delta, remat)
        return hidden, kv, jnp.stack(chosen, axis=-2).astype(EXPERT_DTYPE) + 1

    def output_matrix(params: ArrayTree) -> Array:
        table = params["embed"]["embedding"] if config.tied else params["head"]["kernel"]
        return table.astype(config.dtype)

    def cache(leading: tuple[int, ...], length: int) -> tuple[Cache, ...]:
        linear = config.linear_attention
        return tuple(
            empty_state(linear, leading, config.dtype)
            if linear is not None and config.kind_of(i).linear
            else empty_kv(config, leading, length)
            for i in range(config.num_layers)
        )

    # A row of several responses has no order in which a state could read them.
    in_one_row = config.causal and config.linear_attention is None
    return Model(
        config,
        _Init(config, nnx.to_pure_dict(shapes)),
        apply,
        output_matrix,
        reads_segments=in_one_row,
        reads_trees=in_one_row,
        takes_prompts=in_one_row,
        reads_prompt_trees=in_one_row,
        logit_cap=config.logit_cap,
        empty_cache=None if config.linear_attention is None else cache,
        apply_routed=apply_routed if config.expert_layers else None,
    )


def param_shapes(model: Model) -> ArrayTree:
    """The shapes and dtypes of a model's parameters, without allocating them.

    Args:
      model: The model.

    Returns:
      The tree of ``model.init``, with a ``jax.ShapeDtypeStruct`` in place of each array.

    Example:
      >>> import jaxrl_llm as jr
      >>> model = jr.models.make_model(jr.testing.tiny_config())
      >>> jr.models.param_shapes(model)["embed"]["embedding"]
      ShapeDtypeStruct(shape=(259, 32), dtype=float32)
    """
    if isinstance(model.init, _Init):
        return jax.tree.map(lambda x: x, model.init.shapes)  # its own dicts
    return jax.eval_shape(model.init, jax.random.key(0))


def count_params(model: Model) -> int:
    """How many parameters a model has, without allocating them.

    Args:
      model: The model. A matrix that embeds tokens and also predicts them counts once.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.models.count_params(jr.models.make_model(jr.testing.tiny_config()))
      26880
    """
    return trees.size(param_shapes(model))
