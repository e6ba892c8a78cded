"""Fine-tuning of int8 weights by evolution: float updates move weights by one unit.

``updates`` are the updates of an optax optimizer, floating point, with the structure of the
weights. A weight moves if its update is at least ``tau`` deviations from the mean of its leaf;
``tau`` is not negative. A wrong dtype raises TypeError; shapes or forms that differ, and an option
out of its range, ValueError.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, ArrayTree, checks, masking
from jaxrl_llm.evolution.integer.layers import LIMIT, check_int8, saturate


def quantize_int8(w: Array, *, axis: int = -1, eps: float = 1e-12) -> tuple[Array, Array]:
    """Quantizes a matrix to int8 with one scale per output channel.

        scale_i = max|W_i| / 127,   Q = round(W / scale)

    Args:
      w: Floating point, ``[in, out]``.
      axis: Axis of the output channels; -2 for ``[out, in]``.
      eps: Smallest scale, above 0: the scale of a channel of zeros.

    Returns:
      ``(Q, scale)``: int8 of the shape of ``w``, and float32 that broadcasts with it; ``Q scale``
      is within half a scale of ``w``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> q, scale = jr.evolution.quantize_int8(jnp.array([[1.0, -0.5], [0.25, 2.0]]))
      >>> q.tolist(), (scale * 127).tolist()
      ([[127, -32], [32, 127]], [[1.0, 2.0]])

    References:
      EGGROLL (arXiv:2511.16652), app. K, PAPER reading; taking the scale from the largest weight of
      a channel is our interpretation.
    """
    checks.check_rank("quantize_int8", 2, w=w)
    checks.check_float("quantize_int8", w=w)
    checks.check_option("quantize_int8", "axis", axis, (-1, -2, 0, 1))
    checks.check_positive("quantize_int8", eps=eps)
    w = w.astype(jnp.float32)
    others = 1 - axis % 2
    scale = jnp.maximum(jnp.max(jnp.abs(w), axis=others, keepdims=True) / LIMIT, eps)
    return saturate(jnp.round(w / scale).astype(jnp.int32)), scale


def quantized_step(q: Array, updates: Array, *, tau: float) -> Array:
    """Moves weights with an outlying update by one unit, within +-127.

        z = (u - mean(u)) / (std(u) + 1e-8),   Q <- sat(Q + sign(z) [|z| >= tau])

    Args:
      updates, tau: See the module.
      q: int8 of any shape.

    Returns:
      int8 of the same shape.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> q, u = jnp.array([5, 5, -127, 5], jnp.int8), jnp.array([0.1, 0.2, -0.9, 0.05])
      >>> jr.evolution.quantized_step(q, u, tau=0.5).tolist()
      [6, 6, -127, 5]

    References:
      EGGROLL (arXiv:2511.16652), app. K, PAPER reading; it does not give tau. A tensor without
      updates is unchanged, at any tau.
    """
    check_int8("quantized_step", q=q)
    checks.check_float("quantized_step", updates=updates)
    checks.check_same_shape("quantized_step", q=q, updates=updates)
    checks.check_non_negative("quantized_step", tau=tau)
    u = updates.astype(jnp.float32)
    constant = jnp.max(u) == jnp.min(u)
    z = (u - jnp.mean(u)) / (jnp.std(u) + 1e-8)
    move = jnp.where((jnp.abs(z) >= tau) & ~constant, jnp.sign(z), 0.0)
    return saturate(q.astype(jnp.int32) + move.astype(jnp.int32))


def apply_quantized(params: ArrayTree, updates: ArrayTree, *, tau: float) -> ArrayTree:
    """Applies an update: to int8 leaves by :func:`quantized_step`, to float leaves by addition.

    The gradient is that of :func:`eggroll_grad` with the int8 leaves named ``lowrank``: members
    perturb the integers as numbers, in units of the scale.

    Args:
      updates, tau: See the module.
      params: Pytree of arrays, int8 and floating.

    Returns:
      Pytree of the form and dtypes of ``params``.

    Raises:
      ValueError: If no leaf is int8.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> params = {"q": jnp.array([1, 2, 3], jnp.int8), "scale": jnp.array(0.5)}
      >>> updates = {"q": jnp.array([-3.0, 0.0, 0.5]), "scale": jnp.array(0.25)}
      >>> new = jr.evolution.apply_quantized(params, updates, tau=1.0)
      >>> new["q"].tolist(), new["scale"].item()
      ([0, 2, 3], 0.75)

    References:
      EGGROLL (arXiv:2511.16652), app. K, PAPER reading.
    """
    if jax.tree.structure(params) != jax.tree.structure(updates):
        raise ValueError("apply_quantized: updates must have the form of params.")
    if not any(jnp.result_type(x) == jnp.int8 for x in jax.tree.leaves(params)):
        raise ValueError("apply_quantized: no leaf is int8; optax.apply_updates is enough.")

    def one(x: Array, u: Array) -> Array:
        if jnp.result_type(x) == jnp.int8:
            return quantized_step(x, u, tau=tau)
        checks.check_float("apply_quantized", params=x)
        checks.check_same_shape("apply_quantized", params=x, updates=u)
        return (x + u).astype(x.dtype)

    return jax.tree.map(one, params, updates)


def distillation_fitness(logits: Array, teacher_logits: Array, mask: Array) -> Array:
    """Fitness by similarity to a teacher: minus the sum of the KL divergences of the tokens.

        f = -sum_t KL(teacher_t || member_t)                              nats

    Args:
      logits: ``[..., T, V]``, floating point, of the member.
      teacher_logits: ``[..., T, V]``, floating point: such as those of the float model.
      mask: bool ``[..., T]``, True = keep; masked tokens are not read.

    Returns:
      float32 ``[...]``, at most 0.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logits = jnp.array([[[1.0, 0.0], [3.0, 1.0]]])
      >>> jr.evolution.distillation_fitness(logits, logits, jnp.ones((1, 2), bool)).tolist()
      [0.0]

    References:
      EGGROLL (arXiv:2511.16652), app. K, PAPER reading. It prints the divergence itself as the
      fitness, which would drive the two apart.
    """
    checks.check_mask("distillation_fitness", mask)
    checks.check_min_rank("distillation_fitness", 2, logits=logits)
    checks.check_float("distillation_fitness", logits=logits, teacher_logits=teacher_logits)
    checks.check_same_shape("distillation_fitness", logits=logits, teacher_logits=teacher_logits)
    checks.check_shape("distillation_fitness", "mask", mask, logits.shape[:-1])
    valid = mask[..., None]
    ours, teacher = (
        jax.nn.log_softmax(masking.zero_masked(x, valid), axis=-1) for x in (logits, teacher_logits)
    )
    terms = jnp.where(teacher > -jnp.inf, jnp.exp(teacher) * (teacher - ours), 0.0)
    divergence = jnp.sum(terms, axis=-1)
    return 0.0 - masking.masked_sum(divergence, mask, axis=-1)
