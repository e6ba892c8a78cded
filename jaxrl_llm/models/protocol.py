"""The interface of a model to the rest of the library: functions and a configuration.

Sampling, scoring, training and evolution use a model only through :class:`Model`, a record of pure
functions of a pytree. Any model that provides them can be trained, such as the decoder in
``transformer.py``. Below, ``model`` is a :class:`Model` and ``params`` its parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.quantize import RoundedWeights, check_quantization, round_weights
from jaxrl_llm.models.sharding import RULES, ShardingRules

# Of the experts that tokens took: it holds any expert's index, at half of int32's memory.
EXPERT_DTYPE = jnp.int16


class KV(NamedTuple):
    """Keys and values of one layer, over S positions.

    The two layouts differ so that both products of attention read memory in order: scores contract
    over ``head_dim`` with S last, outputs contract over S with ``head_dim`` last.

    Attributes:
      keys: ``[..., num_kv_heads, head_dim, S]``, rotary embedding applied.
      values: ``[..., num_kv_heads, S, head_dim]``.
    """

    keys: Array
    values: Array


class DeltaState(NamedTuple):
    """The state of one layer of linear attention after some tokens, whatever their number.

    Attributes:
      memory: float32 ``[..., value_heads, key_dim, value_dim]``, from keys to values.
      query, key, value: ``[..., heads, K - 1, dim]``, the last inputs of the convolutions.
    """

    memory: Array
    query: Array
    key: Array
    value: Array


# What a layer keeps of the tokens that it has read.
Cache = KV | DeltaState


class PromptTree(NamedTuple):
    """Where the prompts of one row end, if it holds several and stores what they begin with once.

    Attributes:
      ends: int32 ``[P, Lp]``, the position after the last token of a prompt that follows this one:
        token i of the prompts attends to tokens ``j <= i < ends[j]``.
      leaves: int32 ``[P, G, T]``, the last token of its prompt that each response token attends to;
        it also attends to those which that token attends to. -1 for a response without a prefix.
    """

    ends: Array
    leaves: Array


class AttentionContext(NamedTuple):
    """Everything the tokens of one call may attend to, besides each other.

    A token attends to the unmasked prefix of its prompt, to the cache, and to the unmasked tokens
    before it in the same call. Any of them may be absent.

    ``experts`` says in addition which experts a token takes.

    A layer of linear attention has a :class:`DeltaState` in the place of its :class:`KV`: its
    tokens begin with the state of the prefix, or go on from that of the cache.

    Attributes:
      mask: bool ``[P, G, T]``, which tokens of this call exist. Attention to a cache does not read
        it; linear attention does: tokens that do not exist leave its state as it is, and those
        that do lie behind one another.
      prefix: One :class:`KV` per layer, ``[P, Hk, d, Lp]`` and ``[P, Hk, Lp, d]``: computed once
        per prompt and shared by its G rollouts.
      prefix_mask: bool ``[P, Lp]``. Without a prefix, the prompts are in this call themselves: its
        tokens are ``[P, 1, Lp + G T]``, each row a prompt and the responses to it, while ``mask``,
        ``segments`` and ``ends`` are those of the responses. See :attr:`Model.takes_prompts`.
      cache: One :class:`KV` per layer with leading axes ``[P, G]`` and C positions, into which the
        keys and values of this call are written.
      index: int32 ``[]``, or ``[P, G]`` where rows differ: where in the cache the first token of
        this call goes. Positions below it are read, positions after it are not.
      segments: int32 ``[P, G, T]``, if a row holds several responses to one prompt, one after the
        other; a token attends to the prefix and to the tokens before it in its segment. None if a
        row is one response, and always with a cache.
      ends: int32 ``[P, G, T]``, if a row is a tree of responses, depth first, which stores common
        prefixes once: the position after the last token that follows this one. Token i attends to
        the prefix and to tokens ``j <= i < ends[j]``. None if rows are not trees, and always with a
        cache or segments.
      ahead: int32 ``[T]`` or ``[P, G, T]``: number of later tokens that each token of this call
        sees. None if a token sees only earlier tokens. A model that is not causal sets it where its
        caller does not.
      prompt_tree: If a row of this call begins with several prompts, whose responses follow in any
        order; None if all responses of a row attend to all its prompt tokens.
      experts: int16 ``[P, G, T, L, k]``, for a model of L layers with experts, of which a token
        takes k: those that the tokens of ``mask`` take, counted from 1, instead of those that the
        router would choose. Zeros choose, and so do the prompts of the rows. None if all choose.
    """

    mask: Array
    prefix: tuple[Cache, ...] | None = None
    prefix_mask: Array | None = None
    cache: tuple[Cache, ...] | None = None
    index: Array | None = None
    segments: Array | None = None
    ends: Array | None = None
    ahead: Array | None = None
    prompt_tree: PromptTree | None = None
    experts: Array | None = None

    def of_layer(self, layer: int) -> "AttentionContext":
        """The context with the prefix and the cache of one layer alone."""
        prefix = None if self.prefix is None else self.prefix[layer : layer + 1]
        cache = None if self.cache is None else self.cache[layer : layer + 1]
        return self._replace(prefix=prefix, cache=cache)

    @property
    def prompt_mask(self) -> Array | None:
        """``prefix_mask`` if the rows of this call begin with their prompts, else None."""
        return self.prefix_mask if self.prefix is None else None


class Model(NamedTuple):
    """A language model as pure functions of ``params``.

    Attributes:
      config: Its configuration, with at least ``vocab_size``, ``max_length``, ``num_layers``,
        ``num_kv_heads``, ``head_dim`` and ``dtype``.
      init: ``init(key) -> params``.
      apply: ``apply(params, tokens, positions, context, *, delta=None, remat="none") -> (hidden,
        kv)`` with ``tokens`` and ``positions`` int32 ``[P, G, T]`` and ``hidden`` ``[P, G, T, D]``
        after the last norm. ``kv`` holds one :class:`KV` per layer: the updated cache if there was
        one, else the keys and values of this call. A layer may have a :class:`DeltaState` instead.
      output_matrix: ``output_matrix(params) -> [V, D]``; the logits are ``hidden @ matrix.T``, with
        the soft cap of ``logit_cap``, if any.
      reads_segments: Whether ``apply`` separates the segments of a context. If not, responses are
        never packed.
      reads_trees: Whether ``apply`` reads the ends of a context. If not, responses never share
        cells.
      takes_prompts: Whether ``apply`` takes prompts in the rows of the responses to them, so that
        training makes one pass over the layers instead of two.
      reads_prompt_trees: Whether ``apply`` reads the prompt tree of a context. If not, different
        prompts never share a row.
      sharding_rules: Which mesh axis ("fsdp", "tensor", or "expert" for an axis of experts) splits
        each axis of a parameter, by the end of the parameter's path, such as ``(("up/kernel",
        ("fsdp", "tensor")),)``. A tuple of mesh axes splits an axis by all of them. Parameters that
        no rule names are replicated. Those of the built-in decoder by default.
      values: ``values(params, hidden) -> float32 [..., C]``, of a model with a head in the place of
        its output matrix, such as a reward model (:func:`~jaxrl_llm.models.with_head`); None for a
        language model.
      velocity: ``velocity(params, x, sigma, prompts, prompt_mask) -> float32 [P, ..., D]``, of a
        model that denoises latents ``x`` ``[P, ..., D]`` at the levels ``sigma`` ``[P, ...]``
        (:func:`~jaxrl_llm.models.make_flow_model`); None for a language model.
      logits: ``logits(params, hidden) -> float32 [..., V]``, of a model that only samples and whose
        logits are no product with one matrix (:func:`~jaxrl_llm.models.mix_models`); None for
        ``hidden @ matrix.T``.
      logit_cap: Soft cap of the logits, as in Gemma 2: they are ``cap tanh(hidden @ matrix.T /
        cap)``, which a temperature then divides. None for logits without a cap.
      apply_routed: Like ``apply``, with the experts that each token took as a third result, as
        :attr:`AttentionContext.experts` has them, which this model reads; its ``config`` has
        ``expert_layers``, L, and ``experts.active``, k. None for a model without experts, or one
        that does not record them.
      empty_cache: ``empty_cache(leading, length)``, as the function :func:`empty_cache` gives it,
        of a model whose layers do not all keep the same keys and values. None for those of
        ``config`` in every layer.
    """

    config: Any
    init: Callable[[Array], ArrayTree]
    apply: Callable[..., tuple[Array, tuple[Cache, ...]]]
    output_matrix: Callable[[ArrayTree], Array]
    reads_segments: bool = False
    reads_trees: bool = False
    takes_prompts: bool = False
    reads_prompt_trees: bool = False
    sharding_rules: ShardingRules = RULES
    values: Callable[[ArrayTree, Array], Array] | None = None
    velocity: Callable[..., Array] | None = None
    logits: Callable[[ArrayTree, Array], Array] | None = None
    logit_cap: float | None = None
    apply_routed: Callable[..., tuple[Array, tuple[Cache, ...], Array]] | None = None
    empty_cache: Callable[[tuple[int, ...], int], tuple[Cache, ...]] | None = None


def expert_shape(model: Model) -> tuple[int, int] | None:
    """``(L, k)`` of the experts that a token takes; None for a model that does not record them."""
    if model.apply_routed is None:
        return None
    return model.config.expert_layers, model.config.experts.active


def prefill(
    model: Model,
    params: ArrayTree,
    tokens: Array,
    mask: Array,
    *,
    shared_prefix_len: int = 0,
    delta=None,
    remat: str = "none",
) -> tuple[Cache, ...]:
    """Keys and values of prompts, computed once and shared by the rollouts of each.

    Args:
      model, params: See the module.
      tokens: int32 ``[P, Lp]``, right padded.
      mask: bool ``[P, Lp]``, True for the tokens that rollouts may attend to.
      shared_prefix_len: Number of first tokens that all prompts share, none masked; below Lp. They
        are computed once, and the rest of each prompt attends to them.
      delta: Low-rank delta that is shared by all rows, if any.
      remat: As ``model.apply`` takes it.

    Returns:
      One :class:`KV` or :class:`DeltaState` per layer, without a group axis: the ``prefix`` of an
      :class:`AttentionContext`.

    Raises:
      ValueError: If ``shared_prefix_len`` is not below Lp. The caller must check that the prompts
        share these tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> tokens = jnp.array([[1, 2, 3], [4, 0, 0]])
      >>> (layer,) = jr.models.prefill(model, params, tokens, tokens > 0)
      >>> layer.keys.shape, layer.values.shape  # two heads of width 8, three positions
      ((2, 2, 8, 3), (2, 2, 3, 8))
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens.shape)
    if not shared_prefix_len:
        context = AttentionContext(mask=mask[:, None])
        _, kv = model.apply(
            params, tokens[:, None], positions[:, None], context, delta=delta, remat=remat
        )
        return jax.tree.map(lambda x: x[:, 0], kv)
    if shared_prefix_len >= tokens.shape[-1]:
        raise ValueError(
            f"prefill: shared_prefix_len must be below the {tokens.shape[-1]} tokens of a prompt; "
            f"got {shared_prefix_len}."
        )
    n = shared_prefix_len
    shared = prefill(model, params, tokens[:1, :n], mask[:1, :n], delta=delta, remat=remat)
    # To what they have in common, prompts are what rollouts are to a prompt: a group of one row.
    context = AttentionContext(mask[None, :, n:], prefix=shared, prefix_mask=mask[:1, :n])
    rest, positions = tokens[None, :, n:], positions[None, :, n:]
    _, kv = model.apply(params, rest, positions, context, delta=delta, remat=remat)

    def joined(before: Array, rest: Array, axis: int) -> Array:
        before = jnp.broadcast_to(before, (tokens.shape[0], *before.shape[1:]))
        return jnp.concatenate([before, rest[0]], axis=axis)

    def of_layer(before: Cache, rest: Cache) -> Cache:
        if isinstance(before, DeltaState) or isinstance(rest, DeltaState):
            return jax.tree.map(lambda x: x[0], rest)  # it has read what is before it
        return KV(joined(before.keys, rest.keys, -1), joined(before.values, rest.values, -2))

    return tuple(of_layer(before, rest) for before, rest in zip(shared, kv, strict=True))


def empty_kv(config: Any, leading: tuple[int, ...], length: int) -> KV:
    """Keys and values of zeros for ``length`` positions of each row, of one layer."""
    c = config
    keys = (*leading, c.num_kv_heads, c.head_dim, length)
    values = (*leading, c.num_kv_heads, length, c.head_dim)
    return KV(jnp.zeros(keys, c.dtype), jnp.zeros(values, c.dtype))


def empty_cache(model: Model, leading: tuple[int, ...], length: int) -> tuple[Cache, ...]:
    """A cache of zeros for ``length`` positions of each row.

    Args:
      model: The model.
      leading: The axes of the rows, such as ``(P, G)``.
      length: L, number of positions.

    Returns:
      One entry per layer: a :class:`KV` with keys ``[*leading, Hk, D, L]`` and values ``[*leading,
      Hk, L, D]`` for Hk heads of width D, in the model's dtype; for a layer of linear attention, a
      :class:`DeltaState`, whose size does not depend on ``length``.

    Example:
      >>> import jaxrl_llm as jr
      >>> model, _ = jr.testing.tiny_model(num_layers=1)
      >>> (layer,) = jr.models.empty_cache(model, (2, 4), 16)
      >>> layer.keys.shape, layer.values.shape
      ((2, 4, 2, 8, 16), (2, 4, 2, 16, 8))
    """
    if model.empty_cache is not None:
        return model.empty_cache(leading, length)
    return tuple(empty_kv(model.config, leading, length) for _ in range(model.config.num_layers))


def has_states(model: Model) -> bool:
    """Whether a layer has linear attention, whose state cannot go back to an earlier token."""
    layers = jax.eval_shape(lambda: empty_cache(model, (1,), 1))
    return any(isinstance(layer, DeltaState) for layer in layers)


def cast_params(model: Model, params: ArrayTree, *, rounded: bool = True) -> ArrayTree:
    """Casts matrices to the model's dtype for matrix products; other parameters are unchanged.

    A model casts its matrices where it uses them, so that training can keep them in float32. A loop
    over tokens would cast all of them at every token; casting them before gives the same result.
    The weights of linear layers that the model rounds to 8 bits are rounded here too, unless
    ``rounded`` is False.

    Example:
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(dtype="bfloat16")
      >>> cast = jr.models.cast_params(model, params)
      >>> cast["embed"]["embedding"].dtype.name, cast["norm"]["scale"].dtype.name
      ('bfloat16', 'float32')
    """
    quantization = getattr(model.config, "quantization", None) if rounded else None
    return _cast(params, jnp.dtype(model.config.dtype), quantization)


def round_params(model: Model, params: ArrayTree, *, mode: str) -> ArrayTree:
    """Parameters by which a model in full precision samples as one that rounds to 8 bits.

    The weights of linear layers become 8-bit ones, and a layer that has them also rounds
    its inputs, as if ``model.config.quantization`` were ``mode``; all other matrices are cast as
    :func:`cast_params` casts them. A sampler that gets the result reads 8-bit weights in every
    step, while the same model scores and trains with ``params``. The result has no gradient.

    Args:
      model: Its configuration has a ``quantization``, which is None.
      params: Its parameters, a part of them, or parameters with an adapter, which is not rounded.
      mode: "fp8" or "int8", see :func:`~jaxrl_llm.models.quantized_matmul`.

    Returns:
      The parameters, with ``RoundedWeights`` in the place of the kernel of each linear layer.

    Raises:
      ValueError: If the mode is unknown, or the model rounds already, has experts, does not take
        rounded weights, or has no parameter whose path ends in ``/kernel``, which is rounded.
      ImportError: If qwix is missing.

    Example:
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> rounded = jr.models.round_params(model, params, mode="int8")
      >>> rounded["layers"]["0"]["mlp"]["up"]["kernel"].q.dtype.name
      'int8'

    References:
      FlashRL (Liu et al., 2025), NOTES: 8-bit rollouts beside a trainer in bfloat16, and weights
      that correct the difference.
    """
    check_rounds("round_params", model, mode)
    return _cast(params, jnp.dtype(model.config.dtype), mode)


def check_rounds(function: str, model: Model, mode: str) -> None:
    """Raises unless :func:`round_params` can round the parameters of a model; see there."""
    check_quantization(function, mode)
    if not hasattr(model.config, "quantization"):
        raise ValueError(
            f"{function}: the linear layers of this model take no weights in {mode}; its "
            f"configuration, a {type(model.config).__name__}, has no `quantization`. Use None."
        )
    if model.config.quantization is not None:
        raise ValueError(
            f"{function}: {mode} has no effect on a model that rounds to "
            f"{model.config.quantization} itself, wherever it runs."
        )
    if getattr(model.config, "experts", None) is not None:
        raise ValueError(f"{function}: {mode} does not round `experts`; use None.")
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    paths = [trees.path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    if not any(map(_is_linear, paths)):
        raise ValueError(
            f"{function}: {mode} rounds the weights of linear layers, parameters whose path ends "
            f"in '/kernel', and this model has none; its first is {paths[0]!r}. Use None."
        )


def is_rounded(x: Any) -> bool:
    """Whether a parameter is rounded weights, as the ``is_leaf`` of a tree's functions asks."""
    return isinstance(x, RoundedWeights)


def has_rounded(params: ArrayTree) -> bool:
    """Whether some parameters are rounded."""
    return any(map(is_rounded, jax.tree.leaves(params, is_leaf=is_rounded)))


def _is_linear(path: str) -> bool:
    """Whether a parameter is the weights of a linear layer, by its path."""
    return path.endswith("/kernel") and not path.endswith("head/kernel")


def _cast(params: ArrayTree, dtype: Any, quantization: str | None) -> ArrayTree:
    """Matrices in a dtype, those of linear layers in 8 bits if there is a quantization."""

    def cast(path, x: Array | RoundedWeights) -> Array | RoundedWeights:
        if isinstance(x, RoundedWeights) or x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        x, name = x.astype(dtype), trees.path_str(path)
        return round_weights(x, quantization) if _is_linear(name) and quantization else x

    return jax.tree_util.tree_map_with_path(cast, params, is_leaf=is_rounded)
