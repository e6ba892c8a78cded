"""The order of prompts: each once an epoch, alike from a seed, and resumed from a cursor."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import for_each

from jaxrl_llm.data import Cursor, take


def walk(counts, *, size, seed, cursor=None):
    """Indices of successive takes, and the cursor at the end."""
    cursor, seen = cursor or Cursor(), []
    for n in counts:
        indices, cursor = take(cursor, n, size=size, seed=seed)
        assert len(indices) == n
        seen += indices
    return seen, cursor


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 30),
    seed=st.integers(0, 2**40),
    counts=st.lists(st.integers(1, 70), min_size=1, max_size=8),
)
def test_each_epoch_visits_each_prompt_once(size, seed, counts):
    seen, cursor = walk(counts, size=size, seed=seed)
    epochs, rest = divmod(len(seen), size)
    assert cursor == Cursor(epochs, rest)
    for epoch in range(epochs):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert len(set(seen[epochs * size :])) == rest


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 30),
    seed=st.integers(0, 99),
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    cut=st.integers(0, 8),
)
def test_resuming_and_other_batch_sizes_change_nothing(size, seed, counts, cut):
    whole, end = walk([sum(counts)], size=size, seed=seed)
    first, saved = walk(counts[:cut], size=size, seed=seed)
    rest, cursor = walk(counts[cut:], size=size, seed=seed, cursor=Cursor(*map(int, saved)))
    assert first + rest == whole and cursor == end


def test_the_order_is_fixed_for_good():
    """A checkpoint of an older version must go on in the same order."""
    expected = np.random.Generator(np.random.PCG64(np.random.SeedSequence([3, 0]))).permutation(8)
    assert take(Cursor(), 8, size=8, seed=3)[0] == expected.tolist() == ORDER


ORDER = [6, 7, 2, 1, 4, 5, 3, 0]


def test_plain_integers_come_back():
    indices, cursor = take(Cursor(np.int64(0), np.int64(1)), np.int64(2), size=4, seed=0)
    assert all(type(number) is int for number in (*indices, *cursor))


@for_each(
    ("arguments", "told"),
    [
        ((Cursor(), 1, 0, 0), "no prompts to take; got 0"),
        ((Cursor(), 0, 4, 0), "n must be an integer above 0; got 0"),
        ((Cursor(), -1, 4, 0), "n must be an integer above 0; got -1"),
        ((Cursor(), 1, 4, -1), "seed must be from 0 to .*; got -1"),
        ((Cursor(), 1, 4, 2**64), "seed must be from 0 to "),
        ((Cursor(-1, 0), 1, 4, 0), "epoch must not be negative, got -1"),
        ((Cursor(0, 4), 1, 4, 0), "at prompt 4 of 4; it belongs to another prompt set"),
        ((Cursor(0, -1), 1, 4, 0), "at prompt -1 of 4"),
    ],
)
def test_bad_input(arguments, told):
    cursor, n, size, seed = arguments
    with pytest.raises(ValueError, match=f"take: .*{told}"):
        take(cursor, n, size=size, seed=seed)


def test_epochs_and_seeds_differ():
    seen, _ = walk([300], size=100, seed=0)
    orders = [tuple(seen[i : i + 100]) for i in (0, 100, 200)]
    orders.append(tuple(take(Cursor(), 100, size=100, seed=1)[0]))
    assert len(set(orders)) == 4
