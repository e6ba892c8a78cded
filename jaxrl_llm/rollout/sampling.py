"""One token from logits: which are kept, which one is drawn, and how likely it was.

Temperature comes first, then top-k, top-p and min-p, the order of Hugging Face transformers;
``order="vllm"`` applies min-p before top-k. The two differ only where min-p is on. Every filter
keeps some of the most likely tokens, so a filter is one number: how many.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array

GREEDY_BELOW = 1e-5
_BLOCK = 256


def _per_row(value, like: Array) -> Array:
    """An option as ``[..., 1]``: a scalar for all rows or one value a row."""
    return jnp.broadcast_to(jnp.asarray(value, jnp.float32), like.shape[:-1])[..., None]


def _kept_count(logits: Array, top_k, top_p, min_p, order: str) -> Array:
    """How many of the descending ``logits`` survive the filters: ``[..., 1]``."""
    size = logits.shape[-1]
    rank = jnp.arange(size)

    def by_top_k() -> Array:
        k = _per_row(top_k, logits).astype(jnp.int32)
        k = jnp.where((k <= 0) | (k > size), size, k)
        threshold = jnp.take_along_axis(logits, k - 1, axis=-1)
        return jnp.sum(logits >= threshold, axis=-1, keepdims=True)  # Ties are all kept.

    def by_min_p() -> Array:
        least = jnp.log(_per_row(min_p, logits))  # log 0 = -inf: off.
        return jnp.sum(logits - logits[..., :1] >= least, axis=-1, keepdims=True)

    def by_top_p(count: Array) -> Array:
        p = jax.nn.softmax(jnp.where(rank < count, logits, -jnp.inf), axis=-1)
        before = jnp.cumsum(p, axis=-1) - p
        limit = _per_row(top_p, logits)
        kept = jnp.sum((before < limit) & (rank < count), axis=-1, keepdims=True)
        return jnp.where(limit >= 1, count, jnp.maximum(kept, 1))

    count = jnp.full((*logits.shape[:-1], 1), size)
    if min_p is not None and order == "vllm":
        count = jnp.minimum(count, by_min_p())
    if top_k is not None:
        count = jnp.minimum(count, by_top_k())
    if top_p is not None:
        count = by_top_p(count)
    if min_p is not None and order == "hf":
        count = jnp.minimum(count, by_min_p())
    return count


def filter_logits(
    logits: Array, *, temperature=1.0, top_k=None, top_p=None, min_p=None, order: str = "hf"
) -> Array:
    """Logits of the distribution that is really sampled: tempered, with the dropped tokens at -inf.

    In this order: ``z / temperature``; top-k keeps ``z_i >= k-th largest`` (all ties at the
    threshold); top-p keeps tokens in descending order while the probability before them,
    renormalized over the survivors, is below ``top_p``; min-p keeps ``p_i >= min_p max p``. A
    temperature below 1e-5 keeps the most likely token alone.

    Args:
      logits: ``[..., V]``.
      temperature: Scalar or ``[...]``, one a row. Values may be traced: another value does not
        compile again. None of the filters costs anything where it is None.
      top_k: How many to keep; 0 or less, or V and more, is off.
      top_p: Mass to keep, in (0, 1]; 1 is off.
      min_p: Least probability relative to the greatest, in [0, 1); 0 is off.
      order: ``"hf"``, or ``"vllm"``: min-p before top-k.

    Returns:
      float32 ``[..., V]``.

    Raises:
      ValueError: If ``order`` is unknown, or is given where it has no effect (no ``min_p``).

    Example:
      >>> import jax.numpy as jnp
      >>> logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
      >>> jnp.isfinite(filter_logits(logits, top_p=0.74)).tolist()
      [True, True, False, False]

    References:
      Order and tie rules as in transformers' logits processors and vLLM's V1 sampler.
    """
    name = "filter_logits"
    checks.check_min_rank(name, 1, logits=logits)
    checks.check_option(name, "order", order, ("hf", "vllm"))
    if order != "hf" and min_p is None:
        raise ValueError(f"{name}: order={order!r} has no effect without min_p.")
    checks.check_non_negative(name, temperature=temperature, min_p=min_p)
    checks.check_positive(name, top_p=top_p)
    logits = jnp.asarray(logits, jnp.float32)
    temperature = _per_row(temperature, logits)
    greedy = temperature < GREEDY_BELOW
    tempered = logits / jnp.where(greedy, 1.0, temperature)
    if top_k is not None or top_p is not None or min_p is not None:
        ids = jnp.broadcast_to(jnp.arange(logits.shape[-1]), logits.shape)
        descending, order_ids = jax.lax.sort((-tempered, ids), num_keys=1)
        count = _kept_count(-descending, top_k, top_p, min_p, order)
        rank = jnp.put_along_axis(jnp.zeros_like(ids), order_ids, ids, axis=-1, inplace=False)
        tempered = jnp.where(rank < count, tempered, -jnp.inf)
    best = jnp.argmax(logits, axis=-1, keepdims=True)
    only_best = jnp.where(jnp.arange(logits.shape[-1]) == best, 0.0, -jnp.inf)
    return jnp.where(greedy, only_best, tempered)


def sample_from(logits: Array, uniform: Array) -> Array:
    """Draws a token from ``softmax(logits)`` by inverting its cumulative distribution.

    One uniform number a row and two levels of sums (blocks of 256, then inside one block) instead
    of random noise for every entry of the vocabulary. A token at -inf is never drawn.

    Args:
      logits: ``[..., V]``, at least one finite a row.
      uniform: ``[...]`` in [0, 1).

    Returns:
      int32 ``[...]``.

    Example:
      >>> import jax.numpy as jnp
      >>> logits = jnp.log(jnp.array([0.5, 0.25, 0.25]))
      >>> [int(sample_from(logits, jnp.float32(u))) for u in (0.0, 0.4, 0.6, 0.99)]
      [0, 0, 1, 2]
    """
    checks.check_min_rank("sample_from", 1, logits=logits)
    checks.check_shape("sample_from", "uniform", uniform, jnp.shape(logits)[:-1])
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    pad = -weights.shape[-1] % _BLOCK
    weights = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, pad)])
    weights = weights.reshape(*weights.shape[:-1], -1, _BLOCK)

    def first_above(mass: Array, target: Array) -> Array:
        """Where the running sum first exceeds the target, at the latest the last with mass."""
        index = jnp.sum(jnp.cumsum(mass, axis=-1) <= target[..., None], axis=-1)
        last = mass.shape[-1] - 1 - jnp.argmax(mass[..., ::-1] > 0, axis=-1)
        return jnp.minimum(index, last)

    blocks = jnp.sum(weights, axis=-1)
    target = uniform * jnp.sum(blocks, axis=-1)
    block = first_above(blocks, target)
    before = jnp.sum(jnp.where(jnp.arange(blocks.shape[-1]) < block[..., None], blocks, 0.0), -1)
    inside = jnp.take_along_axis(weights, block[..., None, None], axis=-2)[..., 0, :]
    # Rounding may leave the target just below the block's own mass; below 0 it would draw a token
    # without any.
    within = first_above(inside, jnp.maximum(target - before, 0.0))
    return (block * _BLOCK + within).astype(jnp.int32)


def sampled_logprobs(
    logits: Array, filtered: Array, tokens: Array, *, temperature=1.0
) -> tuple[Array, Array, Array]:
    """The log-probabilities of drawn tokens, under the names a :class:`Rollout` gives them.

    Args:
      logits: ``[..., V]`` of the plain model.
      filtered: ``[..., V]`` from :func:`filter_logits` of the same logits.
      tokens: Integers ``[...]``.
      temperature: The one given to :func:`filter_logits`.

    Returns:
      ``(behavior_logp, model_logp, log_kept)``, each ``[...]``: under the distribution really
      sampled, under the plain model, and the log of the tempered mass that truncation kept.
      ``behavior_logp + log_kept`` is the tempered log-probability. Greedy rows have ``behavior_logp
      = log_kept = 0``.
    """

    def at_token(values: Array) -> Array:
        return jnp.take_along_axis(values, tokens[..., None], axis=-1)[..., 0]

    logits = jnp.asarray(logits, jnp.float32)
    temperature = _per_row(temperature, logits)
    greedy = temperature < GREEDY_BELOW
    tempered_sum = jax.nn.logsumexp(logits / jnp.where(greedy, 1.0, temperature), axis=-1)
    kept_sum = jax.nn.logsumexp(filtered, axis=-1)
    model_logp = at_token(logits) - jax.nn.logsumexp(logits, axis=-1)
    log_kept = jnp.where(greedy[..., 0], 0.0, kept_sum - tempered_sum)
    return at_token(filtered) - kept_sum, model_logp, log_kept
