"""Which requests start, and when: pure rules for the host, between chunks of decoding.

NumPy in and NumPy out, for a few hundred entries at a time. The requests of one prompt are
siblings; they form a group and share its keys and values.
"""

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.rollout.engine._inputs import counts, flags, numbers


def future_peak(used, remaining, *, active=None) -> np.ndarray:
    """The most tokens that a batch will ever hold, if each row ends when it is expected to.

        b sorted in descending order, u alongside:   peak = max over k of (b_k k + u_1 + ... + u_k)

    A row holds ``u`` tokens now and ``b`` more just before it ends and gives all of them back, so
    the total peaks right before an end. Another row never lowers the peak. No row: 0.

    Args:
      used: int ``[..., N]``, tokens held now: those of the prompt, those sampled, and one for the
        next.
      remaining: int ``[..., N]``, how many more are expected (:func:`predict_remaining`).
      active: bool ``[..., N]``, True for rows that count; None for all.

    Returns:
      int64 ``[...]``.

    Raises:
      TypeError: If counts are not integers or ``active`` is not bool.
      ValueError: If shapes differ or a count is negative.

    Example:
      >>> import jaxrl_llm as jr
      >>> int(jr.rollout.future_peak([10, 20, 5], [8, 2, 4]))
      41

    References:
      Past-Future scheduler (arXiv:2507.10150), the peak as in LightLLM's code.
    """
    function = "future_peak"
    used, remaining = counts(function, used=used, remaining=remaining)
    active = flags(function, used, active=active)
    checks.check_same_shape(function, used=used, remaining=remaining)
    if active is not None:
        # Nothing held and nothing to come: the term of such a row is the sum of the others'.
        used, remaining = np.where(active, used, 0), np.where(active, remaining, 0)
    order = np.argsort(-remaining, axis=-1, kind="stable")
    held = np.cumsum(np.take_along_axis(used, order, axis=-1), axis=-1)
    rows = np.arange(1, used.shape[-1] + 1)
    return np.max(np.take_along_axis(remaining, order, -1) * rows + held, axis=-1, initial=0)


def predict_remaining(history, generated, *, max_new_tokens, quantile: float = 0.8) -> np.ndarray:
    """How many tokens each row has still to come, by the lengths of rows that have ended.

        pred_i = the ceil(quantile n)-th smallest of the n lengths in history above generated_i
        b_i    = max(min(pred_i, max_new_i) - generated_i - 1, 0);   pred_i = max_new_i for n = 0

    One is taken off because the next token is already counted as held (:func:`future_peak`). Give
    it the lengths of the latest rows, 1000 or so, or those of a prompt's own siblings.

    Args:
      history: int ``[H]``, lengths in tokens of responses that have ended; may be empty.
      generated: int ``[N]``, tokens each row has so far; 0 for one that waits.
      max_new_tokens: int or ``[N]``, the most a row may have.
      quantile: In (0, 1]; higher is more careful.

    Returns:
      int64 ``[N]``.

    Raises:
      TypeError: If counts are not integers.
      ValueError: If shapes do not fit, a count is negative or ``quantile`` is out of its range.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rollout.predict_remaining([10, 20, 30, 40], [15, 0], max_new_tokens=100).tolist()
      [24, 39]

    References:
      Past-Future scheduler (arXiv:2507.10150), ABSTRACT reading: it draws from the lengths above
      what a row has; the quantile in place of the draw is ours. LightLLM's code takes 1.1 times
      what was sampled, at least a default.
    """
    function = "predict_remaining"
    history, generated, limit = counts(
        function, history=history, generated=generated, max_new_tokens=max_new_tokens
    )
    checks.check_rank(function, 1, history=history, generated=generated)
    if limit.shape not in ((), generated.shape):
        raise ValueError(
            f"{function}: max_new_tokens must be one number or have the shape of generated "
            f"{generated.shape}; got {limit.shape}."
        )
    checks.check_share(function, quantile=quantile, zero=False)
    ended = np.sort(history)
    first = np.searchsorted(ended, generated, side="right")
    longer = len(ended) - first
    # Rounding in the product must not reach for one length more.
    place = first + np.maximum(np.ceil(quantile * longer - 1e-9).astype(np.int64), 1) - 1
    known = np.append(ended, 0)[np.minimum(place, len(ended))]
    predicted = np.where(longer > 0, np.minimum(known, limit), limit)
    return np.maximum(predicted - generated - 1, 0)


def admit(
    used, remaining, queue_used, queue_remaining, *, capacity: int, free_slots: int, active=None
) -> int:
    """How many requests at the head of the queue may start, so that the peak will fit.

        the largest n with future_peak(rows under way and the first n of the queue) < capacity,
        n <= free_slots, and n <= the length of the queue

    First in, first out: it stops at the first that does not fit, however short those behind it are.
    A paged cache needs this; where each slot has room for its longest row, free slots are enough.

    Args:
      used: int ``[N]``, tokens held by the rows under way (see :func:`future_peak`).
      remaining: int ``[N]``, how many more they are expected to take.
      queue_used: int ``[Q]``, tokens that each waiting request would hold at its start.
      queue_remaining: int ``[Q]``, how many more it is expected to take.
      capacity: Tokens that the cache holds.
      free_slots: How many may start at all.
      active: bool ``[N]``, True for rows that are under way; None for all.

    Returns:
      A count.

    Raises:
      TypeError: If counts are not integers or ``active`` is not bool.
      ValueError: If shapes do not fit or a count is negative.

    Example:
      >>> import jaxrl_llm as jr
      >>> rows, queue = ([10, 20], [8, 2]), ([5, 5], [4, 4])
      >>> jr.rollout.admit(*rows, *queue, capacity=42, free_slots=2)
      1

    References:
      Past-Future scheduler (arXiv:2507.10150), with the peak as in LightLLM's code.
    """
    function = "admit"
    rows = counts(function, used=used, remaining=remaining)
    queue = counts(function, queue_used=queue_used, queue_remaining=queue_remaining)
    checks.check_rank(function, 1, used=rows[0], queue_used=queue[0])
    checks.check_same_shape(function, used=rows[0], remaining=rows[1])
    checks.check_same_shape(function, queue_used=queue[0], queue_remaining=queue[1])
    checks.check_non_negative(function, capacity=capacity, free_slots=free_slots)
    if (active := flags(function, rows[0], active=active)) is not None:
        rows = [x[active] for x in rows]

    def fits(n: int) -> bool:
        together = (np.concatenate([x, q[:n]]) for x, q in zip(rows, queue, strict=True))
        return int(future_peak(*together)) < capacity

    # The peak grows with every row, so the largest n that fits is found by halving.
    low, high = 0, min(free_slots, len(queue[0]))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def longest_first(expected, group) -> np.ndarray:
    """The order in which requests should start, when all of them are known in advance.

        groups by the longest expected sibling, descending; equal ones, and siblings, as they came

    A long row that starts last keeps the other slots waiting for it, and siblings that are
    neighbors share one pass over their prompt.

    Args:
      expected: ``[N]``, how long each response is expected to be, in tokens.
      group: int ``[N]``, which prompt each request belongs to.

    Returns:
      int64 ``[N]``: the places of the requests in the order of their start.

    Raises:
      TypeError: If ``group`` does not hold integers.
      ValueError: If shapes do not fit or an expected length is NaN.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rollout.longest_first([5, 9, 30, 7], [0, 1, 0, 1]).tolist()
      [0, 2, 1, 3]

    References:
      None; longest processing time first (Graham, 1969), over whole groups.
    """
    function = "longest_first"
    expected, group = numbers(function, expected=expected), np.asarray(group)
    checks.check_rank(function, 1, expected=expected, group=group)
    checks.check_same_shape(function, expected=expected, group=group)
    if not group.size:
        return np.zeros(0, np.int64)
    checks.check_integer(function, group=group)
    _, first, of_group = np.unique(group, return_index=True, return_inverse=True)
    longest = np.full(len(first), -np.inf)
    np.maximum.at(longest, of_group, expected)
    return np.lexsort((np.arange(len(group)), first[of_group], -longest[of_group]))
