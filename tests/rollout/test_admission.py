"""Peaks, predicted lengths, admission and order: the worked numbers, then their laws."""

import numpy as np
import pytest
from bad_calls import bad_calls, raises
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import for_each

from jaxrl_llm.rollout import admit, future_peak, longest_first, predict_remaining

quick = settings(max_examples=60, deadline=None, database=None, derandomize=True)
ROWS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=8)


def columns(rows):
    return [np.array([row[i] for row in rows], np.int64) for i in (0, 1)]


def counted(rows) -> int:
    """The tokens that are held after every number of further steps, the greatest of them."""
    steps = range(max((b for _, b in rows), default=0) + 1)
    return max((sum(u + t for u, b in rows if b >= t) for t in steps), default=0)


def test_peak_worked_numbers():
    used, remaining = [10, 20, 5], [8, 2, 4]
    assert future_peak(used, remaining) == 41
    assert [int(future_peak(used[i:], remaining[i:])) for i in (1, 2)] == [29, 9]
    # After one, two and three rows by what remains: 18, 23, 41.
    assert future_peak([10], [8]) == 18
    assert future_peak([10, 5], [8, 4]) == 23
    assert future_peak([3, 4, 5], [6, 6, 6]) == 3 + 4 + 5 + 3 * 6
    assert future_peak([], []) == 0


def test_peak_of_several_batches_and_of_some_rows():
    used, remaining = np.array([[10, 20, 5], [1, 2, 3]]), np.array([[8, 2, 4], [0, 0, 0]])
    assert future_peak(used, remaining).tolist() == [41, 6]
    active = np.array([[True, False, True], [False, False, False]])
    assert future_peak(used, remaining, active=active).tolist() == [23, 0]


@quick
@given(ROWS)
def test_peak_equals_a_count_at_every_step(rows):
    assert future_peak(*columns(rows)) == counted(rows)


def test_a_quantile_of_each_row_draws_from_what_is_longer():
    history, rng = [10, 20, 30, 40, 40], np.random.default_rng(0)
    options = {"max_new_tokens": 99}
    each = predict_remaining(history, [15, 15], **options, quantile=np.array([0.2, 1.0]))
    assert each.tolist() == [20 - 16, 40 - 16]
    draws = 1.0 - rng.random(4000)
    drawn = predict_remaining(history, np.full(4000, 15), **options, quantile=draws) + 16
    lengths, counts = np.unique(drawn, return_counts=True)
    assert lengths.tolist() == [20, 30, 40]
    np.testing.assert_allclose(counts / 4000, [0.25, 0.25, 0.5], atol=0.03)
    with pytest.raises(ValueError, match=r"predict_remaining: quantile must have shape \(1,\)"):
        predict_remaining(history, [15], **options, quantile=np.array([0.5, 0.5]))


def test_prediction_worked_numbers():
    history = [10, 20, 30, 40]
    assert predict_remaining(history, [15], max_new_tokens=40).tolist() == [24]
    assert predict_remaining(history, [15], max_new_tokens=200).tolist() == [24]
    # Nothing that long was seen, or nothing at all: the limit.
    assert predict_remaining(history, [40, 45], max_new_tokens=50).tolist() == [9, 4]
    assert predict_remaining([], [0], max_new_tokens=50).tolist() == [49]
    # The limit may be of each row, and is never passed.
    assert predict_remaining(history, [15, 15], max_new_tokens=[20, 16]).tolist() == [4, 0]
    assert predict_remaining(history, [60], max_new_tokens=50).tolist() == [0]


def test_prediction_is_a_length_of_the_history():
    # 0.14 of fifty lengths are seven, though the product in floats is a little more.
    assert predict_remaining(range(1, 51), [0], max_new_tokens=99, quantile=0.14).tolist() == [6]
    assert predict_remaining([5, 9], [0], max_new_tokens=99, quantile=1e-6).tolist() == [4]
    assert predict_remaining([5, 9], [0], max_new_tokens=99, quantile=1.0).tolist() == [8]


@quick
@given(
    st.lists(st.integers(0, 40), max_size=12),
    st.lists(st.integers(0, 45), max_size=5),
    st.sampled_from([0.25, 0.5, 0.8, 1.0]),
)
def test_prediction_equals_the_loop(history, generated, q):
    expected = []
    for g in generated:
        longer = sorted(x for x in history if x > g)
        # In hundredths, so that the ceiling is exact.
        at = -(-round(100 * q) * len(longer) // 100) - 1
        pred = min(longer[at], 42) if longer else 42
        expected.append(max(pred - g - 1, 0))
    assert predict_remaining(history, generated, max_new_tokens=42, quantile=q).tolist() == expected


def one_by_one(rows, queue, capacity, free_slots) -> int:
    rows, count = list(rows), 0
    for request in queue:
        if count == free_slots or counted([*rows, request]) >= capacity:
            break
        rows.append(request)
        count += 1
    return count


@quick
@given(ROWS, ROWS, st.integers(0, 150), st.integers(0, 9))
def test_admission_is_first_in_first_out_and_stops_at_the_first_refusal(rows, queue, cap, free):
    result = admit(*columns(rows), *columns(queue), capacity=cap, free_slots=free)
    assert result == one_by_one(rows, queue, cap, free)


def test_admission_below_capacity_and_of_active_rows():
    rows, queue = ([10, 20], [8, 2]), ([5], [4])
    assert admit(*rows, *queue, capacity=41, free_slots=1) == 0  # The peak is 41, not below it.
    assert admit(*rows, *queue, capacity=42, free_slots=1) == 1
    active = np.array([True, False])
    assert admit(*rows, *queue, capacity=24, free_slots=1, active=active) == 1
    assert admit(*rows, *queue, capacity=42, free_slots=0) == 0
    assert admit([], [], [], [], capacity=1, free_slots=3) == 0


def test_order_of_groups():
    # Groups 7, 2, 9 have 5, 8 and 8 as their longest; 2 came before 9.
    expected, group = [5, 8, 1, 3, 8], [7, 2, 9, 7, 9]
    assert longest_first(expected, group).tolist() == [1, 2, 4, 0, 3]
    assert longest_first([], []).tolist() == []


@quick
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=12))
def test_order_keeps_siblings_together_and_falls(requests):
    expected, group = columns(requests)
    order = longest_first(expected, group)
    assert sorted(order) == list(range(len(requests)))
    starts = [g for i, g in enumerate(group[order]) if i == 0 or group[order][i - 1] != g]
    assert len(starts) == len(set(group.tolist()))
    longest = [expected[group == g].max() for g in starts]
    assert longest == sorted(longest, reverse=True)
    for g in starts:
        assert (np.diff(order[group[order] == g]) > 0).all()


BAD = r"""
ValueError:
future_peak([1], [-1])  # remaining must not be negative; got -1
future_peak([1], [1, 2])  # must have the same shape
future_peak([1], [1], active=[])  # active must have shape \(1,\)
predict_remaining([1], [1], max_new_tokens=9, quantile=0.0)  # quantile must be in \(0, 1\]; got 0
predict_remaining([1], [1], max_new_tokens=[9, 9])  # max_new_tokens must be one number .* \(2,\)
admit([1], [1], [1], [], capacity=9, free_slots=1)  # queue_used \(1,\), queue_remaining \(0,\)
admit([1], [1], [1], [1], capacity=9, free_slots=-1)  # free_slots must not be negative; got -1
longest_first([1.0, np.nan], [0, 0])  # it is NaN at \(1,\)
TypeError:
future_peak([1.5], [1])  # used must hold integers
future_peak([1], [1], active=[1])  # active must be bool
longest_first([1.0], [0.5])  # group must hold integers
"""


@for_each(("error", "call", "message"), bad_calls(BAD))
def test_bad_input(error, call, message):
    raises(error, call, message, globals())


def test_slots_reserve_so_much_that_the_rule_admits_whatever_has_one():
    """Rows hold a prompt of L tokens, and each of their slots a response of T."""
    rng, (rows, width, prompt, longest) = np.random.default_rng(0), (3, 4, 20, 50)
    capacity = rows * prompt + rows * width * longest
    most = 0
    for _ in range(50):
        free = rng.random((rows, width)) < 0.4
        history = rng.integers(1, longest + 1, 30)
        generated = np.where(free, 0, rng.integers(0, longest, (rows, width)))
        remaining = predict_remaining(
            history, generated.reshape(-1), max_new_tokens=longest, quantile=1.0
        )
        used = generated + 1
        used[:, 0] += rng.integers(1, prompt + 1, rows)  # a prompt lies once in its row
        used, free = used.reshape(-1), free.reshape(-1)
        waiting = int(free.sum())
        running = (used[~free], remaining[~free])
        started = admit(
            *running, used[free], remaining[free], capacity=capacity + 1, free_slots=waiting
        )
        assert started == waiting
        most = max(most, int(future_peak(used, remaining)))
    assert 0.5 * capacity < most <= capacity
