"""Sampling filters: temperature, top-k, top-p and min-p as thresholds on the logits.

Temperature comes first, then top-k, top-p and min-p, the order of Hugging Face transformers;
``order="vllm"`` applies min-p before top-k. The two differ only if min-p is on. Every filter
retains the most likely tokens, so it is a threshold: min-p needs only the largest logit, top-k and
top-p the first few in order, and a large vocabulary is never sorted.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array
from jaxrl_llm.core.kernels.largest import largest

GREEDY_BELOW = 1e-5
# The distribution is uniform long before; a higher temperature is a mistake.
MAX_TEMPERATURE = 1e6
# The number of most likely tokens that are sorted. Where a row needs more, its threshold comes from
# a bisection over all of the vocabulary, which costs several times as much.
_SORTED = 256
# The most tokens that are sorted for a ``top_k`` that is known when compiling.
MAX_SORTED = 1024


def per_row(value, like: Array) -> Array:
    """An option as ``[..., 1]``: a scalar for all rows or one value per row."""
    return jnp.broadcast_to(jnp.asarray(value, jnp.float32), like.shape[:-1])[..., None]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether an option is one number that is known before anything is compiled."""
    return isinstance(value, int | float | np.number)


def is_off(option: str, value, vocab_size: int) -> bool:
    """Whether a filter is known to keep everything."""
    if value is None or not is_number(value):
        return value is None
    if option == "top_k":
        return value <= 0 or value >= vocab_size
    return value >= 1 if option == "top_p" else value == 0


def greatest(logits: Array) -> Array:
    """The index of the greatest logit ``[..., 1]``, the first of equals.

    On a CPU several times as fast as ``argmax``.
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    size = logits.shape[-1]
    index = jnp.min(jnp.where(logits >= best, jnp.arange(size), size), axis=-1, keepdims=True)
    return jnp.minimum(index, size - 1)  # A row with NaN has none.


def filter_logits(
    logits: Array, *, temperature=1.0, top_k=None, top_p=None, min_p=None, order: str = "hf"
) -> Array:
    """Logits of the sampling distribution: tempered, with the dropped tokens at -inf.

    In this order: ``z / temperature``; top-k retains ``z_i >= k-th largest`` (all ties at the
    threshold); top-p retains tokens in descending order (the lower id first where they are equal)
    while the probability before them, renormalized over the survivors, is below ``top_p``; min-p
    retains ``p_i >= min_p max p``. A temperature below 1e-5 keeps only the most likely token. A
    filter that is None costs nothing.

    Args:
      logits: ``[..., V]``, without NaN: the samplers mark a response with one as failed.
      temperature: Scalar or ``[...]``, one per row. Values may be traced: another value does not
        compile again.
      top_k: Number of tokens that survive; 0 or less, or V and more, is off. It costs several times
        as much above 256 if it differs between rows.
      top_p: Mass that survives, in (0, 1]; 1 is off. It costs several times as much if more than
        256 tokens of some row survive.
      min_p: Smallest probability relative to the largest, in [0, 1); 0 is off.
      order: ``"hf"``, or ``"vllm"``: min-p before top-k.

    Returns:
      float32 ``[..., V]``.

    Raises:
      ValueError: If an option is out of range, or ``order`` has no effect (no ``min_p``).

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
      >>> jnp.isfinite(jr.rollout.filter_logits(logits, top_p=0.74)).tolist()
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
    if is_number(temperature) and temperature > MAX_TEMPERATURE:
        raise ValueError(
            f"{name}: temperature must be at most {MAX_TEMPERATURE:g}; got {temperature:g}."
        )
    for option, value in (("top_p", top_p), ("min_p", min_p)):
        if is_number(value) and value > 1:
            raise ValueError(f"{name}: {option} must be at most 1; got {value:g}.")
    logits = jnp.asarray(logits, jnp.float32)
    if is_number(temperature) and temperature < GREEDY_BELOW:
        return _only_best(logits)
    divisor = per_row(temperature, logits)
    greedy = divisor < GREEDY_BELOW
    divisor = jnp.where(greedy, 1.0, divisor)
    tempered = logits / divisor
    size = logits.shape[-1]
    top_k = None if is_off("top_k", top_k, size) else top_k
    top_p = None if is_off("top_p", top_p, size) else top_p
    min_p = None if is_off("min_p", min_p, size) else min_p
    if top_k is not None or top_p is not None or min_p is not None:
        survives = _survives(logits, divisor, order, top_k=top_k, top_p=top_p, min_p=min_p)
        tempered = jnp.where(survives, tempered, -jnp.inf)
    if is_number(temperature):
        return tempered
    return jnp.where(greedy, _only_best(logits), tempered)


def _only_best(logits: Array) -> Array:
    """All mass on the best token; none where there is no token, which is a failure."""
    best = jnp.arange(logits.shape[-1]) == greatest(logits)
    return jnp.where(best & (logits > -jnp.inf), 0.0, -jnp.inf)


def _survives(
    logits: Array, temperature: Array, order: str, *, top_k=None, top_p=None, min_p=None
) -> Array:
    """Which of the logits survive the filters: bool ``[..., V]``.

    All thresholds are on the plain logits, so that no rounding separates a threshold from the logit
    that it was taken from.
    """
    size, best = logits.shape[-1], jnp.max(logits, axis=-1, keepdims=True)
    few = _SORTED if top_k is None or not is_number(top_k) else min(int(top_k), MAX_SORTED)
    few = size if size <= _SORTED else few
    first = ids = None
    if top_p is not None:
        logits = jnp.where(logits == 0, 0.0, logits)  # In order, 0 would come before -0.
    if top_k is not None or top_p is not None:
        first, ids = largest(logits, few)
    floor = jnp.full_like(best, -jnp.inf)
    least = None if min_p is None else best + temperature * jnp.log(per_row(min_p, logits))
    if min_p is not None and order == "vllm":
        floor = least
    if top_k is not None:
        k = per_row(top_k, logits)
        off = (k <= 0) | (k >= size)
        kth, _ = _boundary(logits, first, ids, jnp.ones_like, jnp.where(off, 0.0, k))
        floor = jnp.maximum(floor, jnp.where(off, -jnp.inf, kth))
    survives = logits >= floor
    if top_p is not None:
        limit, survivors = per_row(top_p, logits), floor

        def weigh(x: Array) -> Array:
            return jnp.where(x >= survivors, jnp.exp((x - best) / temperature), 0.0)

        mass = jnp.sum(weigh(logits), axis=-1, keepdims=True)
        off = limit >= 1
        last, id_ = _boundary(logits, first, ids, weigh, jnp.where(off, 0.0, limit * mass))
        survives &= off | (logits > last) | ((logits == last) & (jnp.arange(size) <= id_))
    if min_p is not None and order == "hf":
        survives &= logits >= least
    return survives


def _boundary(
    logits: Array, first: Array, ids: Array, weigh: Callable, target: Array
) -> tuple[Array, Array]:
    """The token, in descending order, at which the running weight first reaches the target.

    ``first`` and ``ids`` ``[..., S]`` are the greatest logits in descending order, the lower id
    first of equals; ``weigh`` maps logits to weights, none negative; ``target`` is ``[..., 1]``.
    Returns the logit and the id of the last token needed, each ``[..., 1]``.
    """
    total = jnp.cumsum(weigh(first), axis=-1)
    index = jnp.sum(total < target, axis=-1, keepdims=True)
    in_first = index < first.shape[-1]
    index = jnp.minimum(index, first.shape[-1] - 1)
    last, last_id = (jnp.take_along_axis(x, index, axis=-1) for x in (first, ids))
    if first.shape[-1] == logits.shape[-1]:
        return last, last_id

    def far():
        size = logits.shape[-1]

        def up_to(key: Array) -> Array:
            # Weights are recomputed each time, which is faster than reading stored ones.
            return jnp.where(logits >= _from_key(key), weigh(logits), 0.0)

        least = jnp.min(jnp.where(logits > -jnp.inf, logits, jnp.inf), axis=-1, keepdims=True)
        low = jnp.where(in_first, _key(last), _key(first[..., -1:]) - 1)
        key = _bisect(up_to, target, low, jnp.where(in_first, low, _key(least)))
        # Among the tokens at the threshold, the lowest ids pass, until the target is reached.
        edge = _from_key(key)
        ties = logits == edge
        tied = ~in_first & (jnp.sum(ties, axis=-1, keepdims=True) > 1)
        above = jnp.where(logits > edge, weigh(logits), 0.0)
        more = target - jnp.sum(above, axis=-1, keepdims=True)

        def up_to_id(id_: Array) -> Array:
            return jnp.where(ties & (jnp.arange(size) <= id_), weigh(logits), 0.0)

        end = jnp.where(in_first, last_id, size)
        return edge, _bisect(up_to_id, more, jnp.where(tied, -1, end), end)

    return jax.lax.cond(jnp.all(in_first), lambda: (last, last_id), far)


def _key(logits: Array) -> Array:
    """int32 in the order of falling logits."""
    bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
    return ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))


def _from_key(key: Array) -> Array:
    """The inverse of :func:`_key`."""
    bits = ~key
    return jax.lax.bitcast_convert_type(bits ^ ((bits >> 31) & 0x7FFFFFFF), jnp.float32)


def _bisect(up_to: Callable, target: Array, low: Array, high: Array) -> Array:
    """The least integer up to which weights sum to the target, or ``high`` if no sum reaches it.

    ``up_to`` maps integers ``[..., 1]`` to the weights ``[..., V]`` up to them, the others 0.
    ``low`` is below the answer, or equal to ``high`` where that is the answer.
    """

    def middle(low, high):
        return (low & high) + ((low ^ high) >> 1)  # Rounded down, and the sum cannot overflow.

    def unknown(bounds):
        low, high = bounds
        return jnp.any(middle(low, high) > low)

    def halve(bounds):
        low, high = bounds
        between = middle(low, high)
        enough = jnp.sum(up_to(between), axis=-1, keepdims=True) >= target
        return jnp.where(enough, low, between), jnp.where(enough, between, high)

    return jax.lax.while_loop(unknown, halve, (low, high))[1]
