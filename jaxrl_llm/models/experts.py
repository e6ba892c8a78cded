"""Mixtures of experts: a router chooses a few of many small MLPs for each token.

With router logits ``l`` of E experts and the k largest of them, S,

    y = sum over e in S of w_e f_e(x),   w = softmax of l over S       (normalized)
                                         w = softmax of l over all     (otherwise)

A shared expert, if any, adds ``sigmoid(v x) f(x)`` for every token.

Tokens are sorted by expert, so that each expert is one product of its tokens, and nothing is
computed for experts that a token did not choose. No token is dropped, whatever the load of an
expert, and there is no loss that balances loads.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.grouped import grouped_product
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.delta import delta_of, over_axes, row_experts
from jaxrl_llm.models.layers import ExpertsConfig
from jaxrl_llm.models.linear import drawn
from jaxrl_llm.models.remat import product, recomputed
from jaxrl_llm.models.sharding import on_each_device_in_slices

# How the mesh axes split the arrays of a matrix: ``expert`` the experts, ``tensor`` hidden units.
_LAST, _SECOND_LAST = P("expert", None, "tensor"), P("expert", "tensor", None)
_COLUMNS = {"kernel": _LAST, "bias": P("expert", "tensor"), "a": P("expert"), "b": _LAST}
_SPECS = {
    "gate": _COLUMNS,
    "up": _COLUMNS,
    "down": {"kernel": _SECOND_LAST, "a": _SECOND_LAST, "b": P("expert")},
}
# The same for the k experts of a token: factors ``[k, in, r]`` and ``[k, r, out]``, scales ``[k]``.
_TOKEN_SPECS = {
    "gate": (P(), P(None, None, "tensor"), P()),
    "up": (P(), P(None, None, "tensor"), P()),
    "down": (P(None, "tensor"), P(), P()),
}


def choose_experts(
    logits: Array, active: int, *, normalized: bool = True, given: Array | None = None
) -> tuple[Array, Array]:
    """The experts of each token and their weights.

    Args:
      logits: Of the router, float32 ``[..., E]``.
      active: k, number of experts of a token.
      normalized: Whether the weights of the chosen experts sum to one.
      given: int ``[..., k]``, the experts that a token takes, counted from 1, whatever its logits;
        tokens of zeros choose. Their weights are those of the logits. None if all choose.

    Returns:
      int32 ``[..., k]`` from the largest logit on, or as given, and float32 weights ``[..., k]``.
      The gradient goes through the weights only. Within ``jit``, the weights of a token with an id
      above E or with two equal experts are NaN.

    Raises:
      ValueError: If ``given``, as a concrete array, has an id above E or a token with two equal
        experts.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxrl_llm.models.experts import choose_experts
      >>> chosen, weights = choose_experts(jnp.log(jnp.array([4.0, 1.0, 3.0, 2.0])), 2)
      >>> chosen.tolist(), [round(w, 3) for w in weights.tolist()]
      ([0, 2], [0.571, 0.429])

    References:
      Mixtral (arXiv:2401.04088), sec. 2.1; Qwen3 (arXiv:2505.09388). ``given`` is the replay of
      R3 (arXiv:2510.11370): the mask of the rollout, the logits of training.
    """
    top, chosen = jax.lax.top_k(logits, active)
    if given is not None:
        chosen = jnp.where(given > 0, given.astype(chosen.dtype) - 1, chosen)
        ordered = jnp.sort(chosen, axis=-1)
        wrong = jnp.any(chosen >= logits.shape[-1], axis=-1)
        wrong |= jnp.any(ordered[..., 1:] == ordered[..., :-1], axis=-1)
        if not isinstance(wrong, jax.core.Tracer) and wrong.any():
            raise ValueError(
                f"choose_experts: given must hold different experts from 1 to {logits.shape[-1]} "
                f"for a token; got {given[wrong][0].tolist()}."
            )
        top = jnp.take_along_axis(logits, chosen, axis=-1)
        top = jnp.where(wrong[..., None], jnp.nan, top)
    if normalized:
        return chosen, jax.nn.softmax(top, axis=-1)
    return chosen, jnp.exp(top - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def clamped_swiglu(gate: Array, up: Array, *, limit: float, alpha: float) -> Array:
    """``(u + 1) g sigmoid(alpha g)`` with ``g = min(gate, limit)`` and ``|u| <= limit``.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxrl_llm.models.experts import clamped_swiglu
      >>> y = clamped_swiglu(jnp.array(9.0), jnp.array(-9.0), limit=7.0, alpha=1.702)
      >>> round(y.item(), 3)
      -42.0

    References:
      gpt-oss (arXiv:2508.10925), sec. 2.
    """
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


class ExpertLinear(nnx.Module):
    """The same linear layer of E experts: ``kernel`` ``[E, in, out]`` and ``bias`` ``[E, out]``.

    A delta is ``(A, B, scale)`` with ``A`` ``[..., E, in, r]`` and ``B`` ``[..., E, r, out]``: one
    for all rows, or with the axes ``[P, G]`` in front one for each row.
    """

    def __init__(self, inputs: int, outputs: int, config: ExpertsConfig, rngs):
        init = nnx.initializers.normal(inputs**-0.5)
        self.kernel = drawn(init, rngs, config.count, inputs, outputs)
        self.bias = nnx.Param(jnp.zeros((config.count, outputs))) if config.bias else None

    def arrays(self, dtype, delta) -> dict[str, Array]:
        """Kernel, bias, and the factors of a delta, in the dtype of the products."""
        arrays = {"kernel": self.kernel[...]}
        if self.bias is not None:
            arrays["bias"] = self.bias[...]
        if delta is not None and delta[0].ndim == 3:
            a, b, scale = delta
            # Cast first: a sampler has cast both factors before, and a trainer has not.
            arrays |= {"a": a, "b": scale * b.astype(dtype)}
        return {name: x.astype(dtype) for name, x in arrays.items()}

    def of_tokens(self, dtype, delta, chosen: Array) -> tuple[Array, Array, Array] | None:
        """Factors and scales of the experts ``[P, G, T, k]`` of each token, of a delta by rows."""
        if delta is None or delta[0].ndim == 3:
            return None
        # Cast before they are gathered, for each token and expert.
        a, b = (row_experts(x.astype(dtype), chosen) for x in delta[:2])
        scale = jnp.asarray(delta[2], jnp.float32)
        scale = over_axes(scale, chosen) if scale.ndim else scale
        return a, b, jnp.broadcast_to(scale, chosen.shape)


class Experts(nnx.Module):
    """``sum of w_e down_e(activation(gate_e(x)) * up_e(x))`` over the chosen experts."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, rngs, *, activation):
        self.gate = ExpertLinear(config.width, experts.width, experts, rngs)
        self.up = ExpertLinear(config.width, experts.width, experts, rngs)
        self.down = ExpertLinear(experts.width, config.width, experts, rngs)
        self.activation, self.experts, self.dtype = activation, experts, config.dtype

    def __call__(self, x: Array, chosen: Array, weights: Array, delta=None) -> Array:
        """``[P, ..., D]`` with experts and weights ``[P, ..., k]``: ``[P, ..., D]``."""
        arrays = {
            name: getattr(self, name).arrays(self.dtype, delta_of(delta, name)) for name in _SPECS
        }
        # Added once, not by each device that has some of the hidden units.
        bias = arrays["down"].pop("bias", None)
        specs = {name: {k: _SPECS[name][k] for k in of} for name, of in arrays.items()}
        by_token = {
            name: getattr(self, name).of_tokens(self.dtype, delta_of(delta, name), chosen)
            for name in _SPECS
        }
        token_specs = {n: None if of is None else _TOKEN_SPECS[n] for n, of in by_token.items()}
        batch, batch_specs = (x, chosen, weights, by_token), (P(), P(), P(), token_specs)
        y = on_each_device_in_slices(self._compute, batch, arrays, specs, batch_specs=batch_specs)
        if bias is not None:
            # A product, whose gradient is one too: that of an index would be a scatter, which adds
            # in any order on a GPU.
            of_experts = jax.nn.one_hot(chosen, self.experts.count)
            shares = jnp.einsum("...k,...ke->...e", weights, of_experts)
            y = y + shares @ bias.astype(jnp.float32)
        return product(y.astype(self.dtype))

    def _activate(self, gate: Array, up: Array) -> Array:
        e = self.experts
        if e.limit is None:
            return self.activation(gate) * up
        return clamped_swiglu(gate, up, limit=e.limit, alpha=e.alpha)

    def _compute(
        self,
        batch: tuple[Array, Array, Array, dict[str, tuple[Array, Array, Array] | None]],
        arrays: dict[str, Any],
        index: Array | int,
    ) -> Array:
        """What the experts of ``arrays`` add to the outputs ``[P, ..., D]`` of some rows, float32.

        They are all experts, or the part ``index`` of as many parts as there are.
        """
        x, chosen, weights, by_token = batch
        k, width = chosen.shape[-1], x.shape[-1]
        of_pairs, count = chosen.reshape(-1), arrays["up"]["kernel"].shape[0]
        some = count < self.experts.count
        if some:  # pairs of other experts come last
            of_pairs = of_pairs - index * count
            of_pairs = jnp.where((of_pairs < 0) | (of_pairs >= count), count, of_pairs)
        order = jnp.argsort(of_pairs, stable=True)
        inverse = jnp.argsort(order)
        sizes = jnp.bincount(of_pairs, length=count + 1)[:count]
        one_hot = jax.nn.one_hot(of_pairs[order], count, dtype=x.dtype)

        def kept(rows: Array) -> Array:
            """Rows of which those of other experts, which no product writes, are 0."""
            return jnp.where(of_pairs[order][:, None] < count, rows, 0) if some else rows

        def linear(x: Array, name: str) -> Array:
            of = arrays[name]
            y = grouped_product(x, of["kernel"], sizes)
            if "a" in of:
                low = grouped_product(x, of["a"], sizes)
                y = y + grouped_product(low, of["b"], sizes)
            if (delta := by_token[name]) is not None:
                a, b, scale = (each.reshape(len(order), *each.shape[4:])[order] for each in delta)
                change = jnp.einsum("nr,nro->no", jnp.einsum("ni,nir->nr", x, a), b)
                y = (y + scale[:, None] * change).astype(x.dtype)
            if "bias" in of:
                y = y + one_hot @ of["bias"]
            return product(kept(y))

        rows = kept(_to_experts(x.reshape(-1, width), order, inverse, k))
        # With the axes of other activations, by which `recomputed` knows them from weights.
        gate, up = (linear(rows, name)[None, None] for name in ("gate", "up"))
        hidden = recomputed(self._activate)(gate, up)[0, 0]
        pairs = _from_experts(linear(hidden, "down"), order, inverse)
        pairs = pairs.reshape(*chosen.shape, width).astype(jnp.float32)
        return jnp.einsum("...k,...kd->...d", weights, pairs)


class Mixture(nnx.Module):
    """Router and experts, in the place of the MLP of a layer.

    ``shared`` are an MLP for every token and the linear layer of its gate, or None.
    """

    def __init__(
        self, config: ModelConfig, experts: ExpertsConfig, rngs, *, router, activation, shared=None
    ):
        self.router = router
        self.shared, self.shared_gate = shared or (None, None)
        self.experts = Experts(config, experts, rngs, activation=activation)
        self.active, self.normalized = experts.active, experts.normalized

    def __call__(self, x: Array, delta=None, given: Array | None = None) -> tuple[Array, Array]:
        """``[P, G, T, D] -> [P, G, T, D]``, and the experts ``[P, G, T, k]`` of each token."""
        logits = self.router(x, delta_of(delta, "router")).astype(jnp.float32)

        def choose(batch: tuple[Array, Array | None], *_) -> tuple[Array, Array]:
            logits, given = batch
            return choose_experts(logits, self.active, normalized=self.normalized, given=given)

        # By each device, since XLA for CPUs gathers what a `top_k` reads.
        chosen, weights = on_each_device_in_slices(choose, (logits, given), {}, {})
        y = self.experts(x, chosen, weights, delta_of(delta, "experts"))
        if self.shared is not None and self.shared_gate is not None:
            gate = self.shared_gate(x, delta_of(delta, "shared_gate"))
            of_all = self.shared(x, delta_of(delta, "shared"))
            y = y + recomputed(lambda y, gate: jax.nn.sigmoid(gate) * y)(of_all, gate)
        return y, chosen


# Both are permutations, of which jax does not know: it would add up their gradients by scatters.
@jax.custom_vjp
def _from_experts(rows: Array, order: Array, inverse: Array) -> Array:
    """Rows sorted by expert, in the order of tokens."""
    return rows[inverse]


_from_experts.defvjp(
    lambda rows, order, inverse: (rows[inverse], order), lambda order, dy: (dy[order], None, None)
)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _to_experts(tokens: Array, order: Array, inverse: Array, k: int) -> Array:
    """Tokens ``[n, D]``, each k times, sorted by expert ``[n k, D]``."""
    return tokens[order // k]


_to_experts.defvjp(
    lambda tokens, order, inverse, k: (tokens[order // k], inverse),
    lambda k, inverse, dy: (dy[inverse].reshape(-1, k, dy.shape[-1]).sum(axis=1), None, None),
)
