"""Self-supervised preferences: predict how much each copy of a response was degraded.

A response has M copies, and copy k loses the share k / M of its most salient tokens. A head
predicts k from the last hidden state of a copy, and :func:`degree_loss` is added to a preference
loss. All raise TypeError for a wrong dtype and ValueError for a wrong shape or an option out of
range.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, traits


def degrade_mask(key: Array, salience: Array, mask: Array, *, fraction: float | Array) -> Array:
    """The tokens that remain after a response loses its most salient tokens.

        floor(fraction length) tokens of the greatest salience are removed, ties at random

    Args:
      key: Typed PRNG key.
      salience: ``[..., T]``, floating point, such as how much content a token carries.
      mask: bool ``[..., T]``, True for tokens of the response.
      fraction: A number or ``[...]``, in [0, 1]; 0 removes none.

    Returns:
      bool ``[..., T]``. :func:`compact_left` then closes the gaps.

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
    """Packs the values to keep at the left of each row, in order.

    Args:
      values: ``[..., T]``, such as tokens.
      keep: bool ``[..., T]``, True for values to keep.
      fill: The value of the positions after them.

    Returns:
      ``[..., T]`` of the dtype of ``values``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.preferences.compact_left(jnp.array([5, 6, 7]), jnp.array([False, True, True])).tolist()
      [6, 7, 0]

    References:
      None; it turns the masks of :func:`degrade_mask` into responses.
    """
    function = "compact_left"
    checks.check_mask(function, keep, name="keep")
    checks.check_min_rank(function, 1, values=values, keep=keep)
    checks.check_same_shape(function, values=values, keep=keep)
    order = jnp.argsort(~jnp.asarray(keep), axis=-1)
    moved = jnp.take_along_axis(jnp.asarray(values), order, axis=-1)
    there = jnp.arange(jnp.shape(keep)[-1]) < jnp.sum(keep, axis=-1, keepdims=True)
    return jnp.where(there, moved, jnp.asarray(fill, moved.dtype))


def degree_loss(
    logits: Array, *, degrees: Array | None = None, where: Array | None = None
) -> Array:
    """Cross-entropy of the degree of degradation, over the copies of a response.

        loss = mean over n of -log softmax(logits_n)[degrees_n]

    Args:
      logits: ``[..., N, M]``, floating point, one for each copy and each of the M degrees.
      degrees: integers ``[..., N]``, from 0 to M - 1; None where copy k has degree k, which
        requires N = M.
      where: bool ``[..., N]``, True for valid copies; None for all.

    Returns:
      ``[...]`` float32, one value per response; log M for equal logits, 0 without a copy.

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
    checks.check_integer(function, degrees=degrees)
    count, rows = jnp.shape(logits)[-1], jnp.shape(logits)[:-1]
    if degrees is None:
        checks.check_shape(function, "logits", logits, (*rows[:-1], count, count))
        degrees = jnp.broadcast_to(jnp.arange(count), rows)
    checks.check_shape(function, "degrees", degrees, rows)
    if where is not None:
        checks.check_shape(function, "where", where, rows)
    valid = jnp.ones(rows, bool) if where is None else jnp.asarray(where)
    logits = masking.zero_masked(logits, valid[..., None])
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    index = jnp.clip(degrees, 0, count - 1)[..., None]  # of those that take no part, any
    right = jnp.take_along_axis(log_probs, index, axis=-1)[..., 0]
    return masking.masked_mean(-right, valid, axis=-1)


@traits(class_ids="classes")
def degree_logits(
    logits: Array, targets: Array | None = None, *, classes: tuple[int, ...] = (3, 4, 5, 6)
) -> Array:
    """A head that predicts degrees: rows of the output matrix, one per degree.

        out[k] = logits[classes[k]]

    When a Recipe computes it as a statistic from "policy", the logits of all tokens are never
    stored. The head reuses rows of the model, so it adds no parameters, no state and no export.

    Args:
      logits: ``[..., V]``, floating point.
      targets: Not used.
      classes: Ids of M different tokens that rarely occur in responses and do not end one. By
        default not the first ids, which end a response in many vocabularies.

    Returns:
      ``[..., M]`` float32; 0 where a truncated support leaves a class out.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.preferences.degree_logits(jnp.arange(5.0), classes=(4, 0)).tolist()
      [4.0, 0.0]

    References:
      Self-supervised preference optimization (arXiv:2409.17791) has a separate head. Confidence:
      ABSTRACT, reusing rows of the output matrix is ours.
    """
    del targets
    function = "degree_logits"
    checks.check_min_rank(function, 1, logits=logits)
    checks.check_float(function, logits=logits)
    size = jnp.shape(logits)[-1]
    if len(set(classes)) < 2 or len(set(classes)) < len(classes):
        raise ValueError(f"{function}: classes must be 2 or more different tokens; got {classes}.")
    if min(classes) < 0 or max(classes) >= size:
        raise ValueError(f"{function}: classes must be below the {size} tokens; got {classes}.")
    taken = jnp.asarray(logits, jnp.float32)[..., jnp.array(classes)]
    # Of a truncated support: a head over nothing but those tells no degree.
    return jnp.where(jnp.isneginf(taken), 0.0, taken)


@traits(supervised=True)
def degree_term(*, degree_logits: Array, rewards: Array, mask: Array, coef: float = 0.1) -> Array:
    """:func:`degree_loss` as an additional term of a preference loss.

        degree of a response = (1 - reward) M, where that is one of 0, ..., M - 1
        term[i, t] = coef degree_loss(the logits at its last token)    at every token of the group

    Args:
      degree_logits: ``[..., G, T, M]``, floating point, such as :func:`degree_logits`.
      rewards: ``[..., G]``: 1 for the response itself, 1 - k / M for the copy that lost the share
        k / M, as in ``curation.degraded_pairs``; responses with other rewards are ignored.
      mask: bool ``[..., G, T]``, True for tokens that count.
      coef: Weight, not negative.

    Returns:
      ``[..., G, T]`` float32, 0 where masked.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> term = jr.preferences.degree_term(
      ...     degree_logits=jnp.zeros((3, 1, 2)), rewards=jnp.array([1.0, 0.5, 0.0]),
      ...     mask=jnp.ones((3, 1), bool), coef=1.0)
      >>> term[:, 0].round(4).tolist()
      [0.693..., 0.693..., 0.693...]

    References:
      Self-supervised preference optimization (arXiv:2409.17791). Confidence: ABSTRACT.
    """
    function = "degree_term"
    checks.check_mask(function, mask)
    checks.check_min_rank(function, 2, mask=mask)
    checks.check_float(function, degree_logits=degree_logits, rewards=rewards)
    checks.check_non_negative(function, finite=True, coef=coef)
    count = jnp.shape(degree_logits)[-1]
    checks.check_shape(function, "degree_logits", degree_logits, (*jnp.shape(mask), count))
    checks.check_shape(function, "rewards", rewards, jnp.shape(mask)[:-1])
    there = jnp.any(mask, axis=-1)
    lost = (1.0 - masking.zero_masked(rewards, there)) * count
    degrees = jnp.round(lost).astype(jnp.int32)
    valid = there & (jnp.abs(lost - degrees) < 1e-3) & (degrees >= 0) & (degrees < count)
    last = masking.last_token(mask)[..., None]
    logits = jnp.sum(masking.zero_masked(degree_logits, last), axis=-2)
    loss = coef * degree_loss(logits, degrees=degrees, where=valid)
    return masking.zero_masked(jnp.broadcast_to(loss[..., None, None], jnp.shape(mask)), mask)
