"""Self-supervised preferences: which of several degraded responses lost how much.

Of M copies of a response the k-th loses the share k / M of its most salient tokens; a head tells
the copies apart by their last hidden states, and :func:`degree_loss` is added to a loss of
preferences. All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out
of range.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking


def degrade_mask(key: Array, salience: Array, mask: Array, *, fraction: float | Array) -> Array:
    """The tokens that remain of a response that loses its most salient ones.

        floor(fraction length) tokens of the greatest salience are removed, ties at random

    Args:
      key: Typed PRNG key.
      salience: ``[..., T]``, floating point, such as how much a token tells of the content.
      mask: bool ``[..., T]``, True for tokens of the response.
      fraction: A number or ``[...]``, in [0, 1]; 0 removes none.

    Returns:
      bool ``[..., T]``. :func:`compact_left` closes the holes.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> salience, mask = jnp.array([3.0, 1.0, 2.0, 9.0]), jnp.array([True, True, True, False])
      >>> jr.preferences.degrade_mask(jax.random.key(0), salience, mask, fraction=0.4).tolist()
      [False, True, True, False]

    References:
      Self-supervised preference optimization (arXiv:2409.17791). Confidence: ABSTRACT, the rule is
      ours.
    """
    function = "degrade_mask"
    masking.check_tokens(function, mask, salience=salience)
    checks.check_share(function, fraction=fraction)
    if jnp.ndim(fraction):
        checks.check_shape(function, "fraction", fraction, jnp.shape(mask)[:-1])
        fraction = jnp.asarray(fraction)[..., None]
    removed = jnp.floor(fraction * masking.lengths(mask)[..., None] + 1e-4)
    # By salience, then by a random number, with masked tokens last.
    noise = jax.random.uniform(key, jnp.shape(mask))
    salience = jnp.where(mask, jnp.asarray(salience, jnp.float32), -jnp.inf)
    order = jnp.lexsort((noise, -salience, ~jnp.asarray(mask)), axis=-1)
    ranks = jnp.argsort(order, axis=-1)
    return mask & (ranks >= removed)


def compact_left(values: Array, keep: Array, *, fill: float = 0) -> Array:
    """Moves what remains of each row to its left, in order.

    Args:
      values: ``[..., T]``, such as tokens.
      keep: bool ``[..., T]``, True for what remains.
      fill: What follows.

    Returns:
      ``[..., T]`` of the dtype of ``values``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.preferences.compact_left(jnp.array([5, 6, 7]), jnp.array([False, True, True])).tolist()
      [6, 7, 0]

    References:
      None; the copies of :func:`degrade_mask` as responses.
    """
    function = "compact_left"
    checks.check_mask(function, keep)
    checks.check_min_rank(function, 1, values=values, keep=keep)
    checks.check_same_shape(function, values=values, keep=keep)
    order = jnp.argsort(~jnp.asarray(keep), axis=-1)
    moved = jnp.take_along_axis(jnp.asarray(values), order, axis=-1)
    there = jnp.arange(jnp.shape(keep)[-1]) < jnp.sum(keep, axis=-1, keepdims=True)
    return jnp.where(there, moved, jnp.asarray(fill, moved.dtype))


def degree_loss(logits: Array, *, where: Array | None = None) -> Array:
    """Cross-entropy of the degree of degradation, over the copies of a response.

        loss = mean over k of -log softmax(logits_k)_k

    Args:
      logits: ``[..., M, M]``, floating point: of copy k, for each of the M degrees.
      where: bool ``[..., M]``, True for the copies that there are; None for all.

    Returns:
      ``[...]`` float32, one number a response; log M for equal logits, 0 without a copy.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> float(jr.preferences.degree_loss(jnp.zeros((4, 4))))
      1.386...

    References:
      Self-supervised preference optimization (arXiv:2409.17791). Confidence: ABSTRACT, the loss is
      ours.
    """
    function = "degree_loss"
    checks.check_min_rank(function, 2, logits=logits)
    checks.check_float(function, logits=logits)
    checks.check_bool(function, where=where)
    count = jnp.shape(logits)[-1]
    checks.check_shape(function, "logits", logits, (*jnp.shape(logits)[:-2], count, count))
    if where is not None:
        checks.check_shape(function, "where", where, jnp.shape(logits)[:-1])
    valid = jnp.ones(jnp.shape(logits)[:-1], bool) if where is None else jnp.asarray(where)
    logits = masking.zero_masked(logits, valid[..., None])
    right = jnp.diagonal(jax.nn.log_softmax(logits, axis=-1), axis1=-2, axis2=-1)
    return masking.masked_mean(-right, valid, axis=-1)
