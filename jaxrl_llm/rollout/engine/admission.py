"""Admission by the expected peak of a cache: pure rules for the host, NumPy in and NumPy out.

They are for a cache that requests share, where a response takes memory as it grows. The engine's
slots reserve memory for the longest response: R rows of W slots hold ``R L + R W T`` tokens, which
the peak never exceeds, so :func:`admit` never rejects a request for which there is a slot.

``used`` are int ``[..., N]``, tokens held now: those of the prompt, those sampled, and one for the
next. ``remaining`` are int ``[..., N]``, how many more are expected (:func:`predict_remaining`).
``active`` is bool ``[..., N]``, True for rows that are running; None for all. Counts are int64.
Every function raises TypeError for counts that are not integers or a mask that is not bool, and
ValueError where shapes do not match, a count is negative or an option is out of its range.
"""

import numpy as np

from jaxrl_llm.core import checks
from jaxrl_llm.rollout._inputs import check_limits, counts, flags


def future_peak(used, remaining, *, active=None) -> np.ndarray:
    """The maximum number of tokens that a batch holds at one time, if each row ends as expected.

        b sorted in descending order, u alongside:   peak = max over k of (b_k k + u_1 + ... + u_k)

    A row holds ``u`` tokens now and ``b`` more just before it ends and frees all of them, so the
    total peaks right before an end. Another row never lowers the peak. Without rows it is 0.

    Args:
      used, remaining, active: See the module.

    Returns:
      The peak, ``[...]``.

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
        # A row with 0 tokens adds a term that is the sum of the others, so it never sets the peak.
        used, remaining = np.where(active, used, 0), np.where(active, remaining, 0)
    order = np.argsort(-remaining, axis=-1, kind="stable")
    held = np.cumsum(np.take_along_axis(used, order, axis=-1), axis=-1)
    rows = np.arange(1, used.shape[-1] + 1)
    return np.max(np.take_along_axis(remaining, order, -1) * rows + held, axis=-1, initial=0)


def predict_remaining(history, generated, *, max_new_tokens, quantile=0.8) -> np.ndarray:
    """The expected remaining tokens of each row, from the lengths of rows that have ended.

        pred_i = the ceil(quantile n)-th smallest of the n lengths in history above generated_i
        b_i    = max(min(pred_i, max_new_i) - generated_i - 1, 0);   pred_i = max_new_i for n = 0

    One is subtracted because :func:`future_peak` already counts the next token. Good histories are
    the lengths of the latest 1,000 rows, or those of the same prompt.

    Args:
      history: int ``[H]``, lengths in tokens of responses that have ended; may be empty.
      generated: int ``[N]``, tokens each row has so far; 0 for one that waits.
      max_new_tokens: int or ``[N]``, the most a row may have.
      quantile: In (0, 1], a number or one per row; higher is more careful. Uniform random numbers
        draw a length from those above the current one.

    Returns:
      Counts ``[N]``.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.rollout.predict_remaining([10, 20, 30, 40], [15, 0], max_new_tokens=100).tolist()
      [24, 39]

    References:
      Past-Future scheduler (arXiv:2507.10150), ABSTRACT reading: it draws from the lengths above
      the current one; one quantile for all in place of the draw is ours. LightLLM's code takes 1.1
      times the current length, at least a default.
    """
    function = "predict_remaining"
    history, generated, limit = counts(
        function, history=history, generated=generated, max_new_tokens=max_new_tokens
    )
    checks.check_rank(function, 1, history=history, generated=generated)
    check_limits(function, limit, generated=generated)
    checks.check_share(function, quantile=quantile, zero=False)
    if np.ndim(quantile):
        checks.check_shape(function, "quantile", quantile, generated.shape)
    ended = np.sort(history)
    first = np.searchsorted(ended, generated, side="right")
    longer = len(ended) - first
    # Rounding in the product must not select one length more.
    index = first + np.maximum(np.ceil(quantile * longer - 1e-9).astype(np.int64), 1) - 1
    quantiles = np.append(ended, 0)[np.minimum(index, len(ended))]
    predicted = np.where(longer > 0, np.minimum(quantiles, limit), limit)
    return np.maximum(predicted - generated - 1, 0)


def admit(
    used, remaining, queue_used, queue_remaining, *, capacity: int, free_slots: int, active=None
) -> int:
    """The number of requests at the head of the queue that may start within the capacity.

        the largest n with future_peak(running rows and the first n of the queue) < capacity,
        n <= free_slots, and n <= the length of the queue

    First in, first out: it stops at the first request without room, however short the later ones.

    Args:
      used, remaining, active: See the module; ``[N]``.
      queue_used: int ``[Q]``, tokens that each waiting request would hold at its start.
      queue_remaining: int ``[Q]``, how many more it is expected to take.
      capacity: Tokens that the cache holds.
      free_slots: How many may start at all.

    Returns:
      A count.

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

    def peak(n: int) -> int:
        used, remaining = (np.concatenate([x, q[:n]]) for x, q in zip(rows, queue, strict=True))
        return int(future_peak(used, remaining))

    # The peak grows with every row, so bisection finds the largest n.
    low, high = 0, min(free_slots, len(queue[0]))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peak(middle) < capacity else (low, middle - 1)
    return low
