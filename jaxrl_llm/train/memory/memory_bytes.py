"""Bytes of single quantities on one device, from shapes: parameters, activations, logits, caches.

The formulas read a model's ``ModelConfig``.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm import logprobs
from jaxrl_llm.core import checks, trees
from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.core.kernels.vocabulary import block_words
from jaxrl_llm.models.attention import block_sizes
from jaxrl_llm.models.gated_delta import empty_state
from jaxrl_llm.models.sharding import AXES, BATCH_AXES, RULES, ShardingRules, param_spec
from jaxrl_llm.rollout.sampling.options import DrawOptions, make_draw
from jaxrl_llm.train.state import device_bytes


class BatchShape(NamedTuple):
    """The part of a batch that a device works on at one time."""

    prompts: int  # P
    group_size: int  # G
    prompt_length: int  # Lp, padding included
    length: int  # T


class LayerPlacement(NamedTuple):
    """How layers are computed on a device."""

    itemsize: int = 4  # bytes of a number; attention scores are always float32
    tensor: int = 1  # the size of this mesh axis, which divides H, K and M
    context: int = 1  # the size of this mesh axis
    expert: int = 1  # the size of this mesh axis: experts get the tokens of so many devices
    accelerator: bool = False  # whether the device is a TPU or GPU


ONE_CPU = LayerPlacement()


def tree_bytes(
    tree: ArrayTree,
    mesh: Mapping[str, int] | None = None,
    *,
    spec: Callable = param_spec,
    rules: ShardingRules = RULES,
) -> int:
    """Bytes of arrays, or of their shapes, on one device of a mesh.

    Args:
      tree: Parameters, or an optimizer state whose paths end in those of the parameters.
      mesh: Sizes of the mesh axes; this machine need not have these devices.
      spec: How a leaf is split: ``param_spec``, or ``update_spec`` for gradients and optimizers.
      rules: Sharding rules of the model.

    Example:
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.train.memory.memory_bytes import tree_bytes
      >>> params = jr.testing.tiny_model()[1]
      >>> tree_bytes(params), tree_bytes(params, {"fsdp": 2})
      (107520, 54080)
    """
    sizes = {axis: (mesh or {}).get(axis, 1) for axis in AXES}
    abstract = jax.sharding.AbstractMesh(tuple(sizes.values()), AXES)

    def one(path: str, x) -> int:
        # One axis of an array may be split over two mesh axes.
        axes = jax.tree.leaves(tuple(spec(path, x.shape, abstract, rules)))
        return x.size * x.dtype.itemsize // math.prod(sizes[axis] for axis in axes)

    arrays = [x for x in jax.tree_util.tree_leaves_with_path(tree) if hasattr(x[1], "shape")]
    return sum(one(trees.path_str(path), x) for path, x in arrays)


def activation_bytes(
    config: Any,
    batch: BatchShape,
    *,
    remat: str,
    adapter: bool = False,
    on: LayerPlacement = ONE_CPU,
) -> int:
    """Maximum bytes that the forward pass stores for the backward pass.

    With N = P (Lp + G T) tokens, S = P (Lp^2 + G T (Lp + T)) pairs of them, width D, H query and K
    key heads of size d, and M hidden units, a layer stores

        full   N D + 2 P Lp K d
        dots   N (2 D + (H + 2 K) d + 2 M) + 2 P Lp K d
        none   N (4 D + 2 (H + K) d + 3 M) + H S + P (Lp + 2 G T) H (d + 1)

    numbers. "full" stores the input, and the prompt's keys and values, since prompts go through the
    layers first; "dots" also stores the matrix products; "none" stores everything. While the
    backward pass recomputes a layer, all numbers of that layer exist. Of attention these are the
    scores, and for each query and set of keys, prompt or row, an output and a log-sum-exp; all are
    float32. On accelerators, where XLA derives the gradients of attention, ``H S`` counts twice,
    and with a soft cap three times. An adapter adds ``2 N M``, for its additions to the hidden
    units. The last norm stores ``P G T D`` once.

    With k of E experts of M hidden units, ``M`` is ``k M`` above, and a layer adds the router's
    logits and what enters and leaves the experts: ``N (E + k D)`` to "dots" and ``N (2 E + 2 k D)``
    to "none".

    Where attention goes in blocks, one block of scores exists at one time, in place of ``H S``.

    A mesh axis ``context`` divides N and the queries of S by its size. Then all keys and values of
    one layer exist too, of every layer with "none".

    Args:
      config: A ``ModelConfig``.
      batch: What a device works on at one time.
      remat: "none", "dots" or "full".
      adapter: Whether linear layers have a low-rank adapter.
      on: Precision, mesh axes and kind of the device.

    Example:
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.train.memory.memory_bytes import BatchShape, activation_bytes
      >>> config, batch = jr.testing.tiny_config(), BatchShape(1, 2, 8, 4)
      >>> activation_bytes(config, batch, remat="none")
      66304

    References:
      None; ours. Tests compare it with compiled programs on CPUs and with traced residuals.
    """
    checks.check_option("activation_bytes", "remat", remat, ("none", "dots", "full"))
    sizes = _layer_sizes(config, batch, on, adapter=adapter)
    if remat == "none":
        return sum(sizes.layers) + sizes.ends + len(sizes.layers) * sizes.gathered
    stored = sizes.products if remat == "dots" else [sizes.inputs] * len(sizes.layers)
    shared = len(sizes.layers) * sizes.prompt_keys
    return sum(stored) + shared + max(sizes.layers) + sizes.ends + sizes.gathered


def largest_layer_bytes(config: Any, batch: BatchShape, *, on: LayerPlacement = ONE_CPU) -> int:
    """Bytes of all numbers of the layer that has the most, and of the last norm.

    A forward pass without gradients holds this much, since it computes one layer at a time.

    Args:
      config: A ``ModelConfig``.
      batch: What a device works on at one time.
      on: Precision, mesh axes and kind of the device.

    Example:
      >>> import jaxrl_llm as jr
      >>> from jaxrl_llm.train.memory.memory_bytes import BatchShape, largest_layer_bytes
      >>> config, batch = jr.testing.tiny_config(), BatchShape(1, 2, 8, 4)
      >>> largest_layer_bytes(config, batch)
      33664

    References:
      None; ours.
    """
    sizes = _layer_sizes(config, batch, on)
    return max(sizes.layers) + sizes.ends + sizes.gathered


class _LayerSizes(NamedTuple):
    """Bytes of the forward pass on one device, by layer."""

    layers: list[int]  # all numbers of each layer
    products: list[int]  # the input and the matrix products of each layer
    inputs: int  # the input of a layer
    prompt_keys: int  # keys and values of the prompts in a layer
    gathered: int  # keys and values of a layer from all devices of the axis `context`
    ends: int  # arrays that exist once, not once a layer


def _layer_sizes(
    config: Any, batch: BatchShape, on: LayerPlacement, *, adapter: bool = False
) -> _LayerSizes:
    """The terms of :func:`activation_bytes`."""
    c, (P, G, Lp, T) = config, batch
    Lp_here, T_here = (-(-size // on.context) for size in (Lp, T))
    tokens = P * (Lp_here + G * T_here)
    heads, key_heads = (max(size // on.tensor, 1) for size in (c.num_heads, c.num_kv_heads))
    width, queries, keys = c.width, heads * c.head_dim, key_heads * c.head_dim

    def of_token(experts: Any) -> tuple[int, int]:
        """Numbers of a token in a layer: all of them, and the matrix products."""
        size, more = c.mlp_width, 0
        if experts is not None:
            size = on.expert * experts.active * experts.width
            more = experts.count + on.expert * experts.active * width
        hidden = max(size // on.tensor, 1)
        every = 4 * width + 2 * (queries + keys) + 3 * hidden + 2 * more
        every += queries + keys if getattr(c, "qk_norm", False) else 0
        every += 2 * width if getattr(c, "norm_placement", "before") == "both" else 0
        every += 2 * hidden if adapter else 0
        return every, 2 * width + queries + 2 * keys + 2 * hidden + more

    experts = getattr(c, "experts", None)
    dense = [experts is None or c.kind_of(i).dense for i in range(c.num_layers)]
    each = [of_token(None if x else experts) for x in dense]
    # A soft cap's result, whose slope depends on it.
    scores = 2 if getattr(c, "attention_cap", None) is None else 3
    attention, block = 0, 0
    of_prompts, of_responses = (P, Lp_here, Lp), (P * G, T_here, T)
    for rows, asking, length in (of_prompts, of_responses, (P, G * T_here, Lp)):
        rows, asking = rows * key_heads, asking * heads // key_heads
        attention += 4 * rows * asking * (c.head_dim + 1)
        if (sizes := block_sizes(rows, asking, length)) is None:
            attention += 4 * (scores if on.accelerator else 1) * rows * asking * length
        else:
            # The backward pass has the scores and their gradient, and gradients of all queries.
            pairs = rows * sizes.queries * sizes.keys
            block = max(block, 4 * (2 * scores * pairs + 2 * rows * asking * c.head_dim))
    return _LayerSizes(
        layers=[attention + on.itemsize * tokens * every for every, _ in each],
        products=[on.itemsize * tokens * products for _, products in each],
        inputs=on.itemsize * tokens * width,
        prompt_keys=on.itemsize * 2 * P * Lp_here * keys,
        gathered=on.itemsize * 2 * P * (Lp + G * T) * keys if on.context > 1 else 0,
        ends=block + on.itemsize * P * G * T_here * width,
    )


def logits_bytes(
    vocab_size: int,
    tokens: int,
    width: int,
    *,
    mesh: Mapping[str, int] | None = None,
    statistics: bool = False,
) -> int:
    """Bytes on one device of the three blocks of logits that exist at one time.

    Args:
      vocab_size: V.
      tokens: Tokens of the responses of a microbatch, on all devices.
      width: Width of hidden states.
      mesh: Sizes by axis; None is one device.
      statistics: Whether statistics over the vocabulary are computed, in chunks of tokens.
    """
    mesh = dict.fromkeys(AXES, 1) | dict(mesh or {})
    shards = 1 if vocab_size % mesh["tensor"] else mesh["tensor"]
    tokens = -(-tokens // mesh["context"])
    local = -(-tokens // math.prod(mesh[axis] for axis in BATCH_AXES))
    words = block_words(vocab_size, tokens, width, _chunk_of(logprobs.token_logprobs))
    elements = local * -(-words // shards)
    if statistics:  # computed along with the log-probabilities
        chunk = min(_chunk_of(logprobs.vocabulary_statistics), local)
        elements = max(elements, chunk * vocab_size // shards)
    return 3 * 4 * elements


def _chunk_of(scorer: Callable) -> int:
    return inspect.signature(scorer).parameters["chunk_size"].default


def recorded_bytes(vocab_size: int, options: DrawOptions, *, experts: int = 0) -> tuple[int, int]:
    """Bytes that a sampler records per token, and how many of them are the token's support.

    ``experts`` are the bytes of the experts of a token, if they are recorded.

    Example:
      >>> from jaxrl_llm.rollout.sampling.options import DrawOptions
      >>> from jaxrl_llm.train.memory.memory_bytes import recorded_bytes
      >>> recorded_bytes(320, DrawOptions()), recorded_bytes(320, DrawOptions(top_k=5))
      ((20, 0), (40, 20))
    """
    blank = make_draw("recorded_bytes", options, vocab_size=vocab_size).blank
    return device_bytes(blank) + experts, device_bytes(blank.support)


def cache_bytes(
    config: Any,
    *,
    prompts: int,
    prompt_length: int,
    slots: int,
    length: int,
    recorded: int = 20,
    split: int = 1,
) -> int:
    """Bytes of a sampler's keys, values and outputs.

    Args:
      config: The configuration of the model.
      prompts: Number of prompts; keys and values of each are stored once.
      prompt_length: Room for a prompt.
      slots: Responses that decode at one time.
      length: Room for a response.
      recorded: Bytes of the outputs of one token, from :func:`recorded_bytes`.
      split: Number of devices that the weights of a layer are split over. If it divides the number
        of key heads, keys and values are split too; states of linear attention by their own heads.
    """
    heads, states = config.num_kv_heads, 0
    linear = [getattr(kind, "linear", False) for kind in getattr(config, "layers", None) or ()]
    if any(linear):
        states = sum(linear) * _state_bytes(config, split) * (prompts + slots)
    layers = config.num_layers - sum(linear)
    each = 2 * layers * config.head_dim * (heads if heads % split else heads // split)
    each *= np.dtype(jax.numpy.dtype(config.dtype)).itemsize
    cells = prompts * prompt_length + slots * length
    return each * cells + states + recorded * slots * length


def _state_bytes(config: Any, split: int) -> int:
    """Bytes of the state of one layer of linear attention after a prompt or a response."""
    state = jax.eval_shape(lambda: empty_state(config.linear_attention, (), config.dtype))
    return sum(
        x.size * x.dtype.itemsize // (1 if x.shape[-3] % split else split)
        for x in jax.tree.leaves(state)
    )
