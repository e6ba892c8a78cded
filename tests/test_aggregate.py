"""Weightings: the worked numbers, what they add up to, and that masked cells are never read."""

import functools
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from bad_calls import bad_calls, raises
from cheap import close, equal, grad, normal, one_program_a_call, put, quick, value_and_grad  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rows import for_each

from jaxrl_llm import aggregate, bind
from jaxrl_llm.core import traits_of

LOSS = np.array([[1.0, 2.0, 3.0, 4.0], [10.0, 0.0, 0.0, 0.0]])
MASK = np.array([[True, True, True, True], [True, False, False, False]])
ALL = {
    "token_mean": aggregate.token_mean,
    "token_sum": aggregate.token_sum,
    "sequence_mean": aggregate.sequence_mean,
    "sequence_sum": aggregate.sequence_sum,
    "sequence_sum_norm": partial(aggregate.sequence_sum_norm, length=4),
    "fixed_length": partial(aggregate.fixed_length, length=4),
}
every = for_each("name", ALL)


def reference(name, loss, mask, length=4):
    """Float64, sequence by sequence."""
    loss, mask = np.asarray(loss, np.float64), np.asarray(mask)
    rows = [row[keep] for row, keep in zip(loss, mask, strict=True) if keep.any()]
    if not rows:
        return 0.0
    return {
        "token_mean": lambda: np.concatenate(rows).mean(),
        "token_sum": lambda: np.concatenate(rows).sum(),
        "sequence_mean": lambda: np.mean([row.mean() for row in rows]),
        "sequence_sum": lambda: np.mean([row.sum() for row in rows]),
        "sequence_sum_norm": lambda: np.mean([row.sum() for row in rows]) / length,
        "fixed_length": lambda: sum(row.sum() for row in rows) / (len(loss) * length),
    }[name]()


def total(name, loss, mask):
    return float(aggregate.weighted_sum(loss, ALL[name](mask)))


@for_each(
    ("name", "expected", "with_empty_row"),
    [
        ("token_mean", 4.0, 4.0),
        ("token_sum", 20.0, 20.0),
        ("sequence_mean", 6.25, 6.25),
        ("sequence_sum", 10.0, 10.0),
        ("sequence_sum_norm", 2.5, 2.5),
        ("fixed_length", 2.5, 20.0 / 12.0),
    ],
)
def test_worked_numbers(name, expected, with_empty_row):
    assert total(name, LOSS, MASK) == expected
    loss = np.concatenate([LOSS, np.full((1, 4), 7.0)])
    mask = np.concatenate([MASK, np.zeros((1, 4), bool)])
    assert total(name, loss, mask) == pytest.approx(with_empty_row, rel=1e-6)


@every
@quick
@given(
    loss=hnp.arrays(np.float32, (3, 4), elements=st.integers(-80, 80).map(lambda i: i / 8)),
    mask=hnp.arrays(np.bool_, (3, 4)),
)
def test_equals_the_float64_reference(name, loss, mask):
    close(
        total(name, np.asarray(loss), np.asarray(mask)),
        reference(name, loss, mask),
        rtol=1e-5,
        atol=1e-5,
    )


@every
def test_weights_are_float32_of_the_masks_shape_and_zero_where_masked(name):
    weights = ALL[name](MASK)
    assert weights.dtype == jnp.float32
    assert weights.shape == MASK.shape
    assert (np.asarray(weights > 0) == np.asarray(MASK)).all()


def test_the_two_means_of_a_guide_and_the_policy():
    steered = np.array([False, True])
    loss = lambda mask, mu: float(  # noqa: E731
        aggregate.weighted_sum(LOSS, aggregate.guided_token_mean(mask, steered=steered, mu=mu))
    )
    assert [loss(MASK, mu) for mu in (0.0, 0.5, 1.0)] == [2.5, 6.25, 10.0]
    # However few tokens the policy has; and without one, nothing of its share goes to the guide.
    assert loss(put(MASK, np.s_[0, 1:], False), 0.5) == 5.5
    assert loss(put(MASK, 0, False), 0.25) == 2.5
    scheduled = np.full((1, 1), 0.5)  # as an extra of a batch
    weights = aggregate.guided_token_mean(MASK, steered=steered, mu=scheduled)
    assert float(aggregate.weighted_sum(LOSS, weights)) == 6.25


@every
def test_leading_axes_are_free_and_every_row_counts(name):
    mask = np.arange(5) < np.random.default_rng(1).integers(0, 6, (2, 3, 1))
    equal(ALL[name](mask).reshape(6, 5), ALL[name](mask.reshape(6, 5)))
    assert ALL[name](mask[0, 0]).shape == (5,)


@every
def test_an_empty_batch_weighs_nothing_and_has_a_finite_gradient(name):
    mask = np.zeros((2, 4), bool)

    def loss(x):
        return aggregate.weighted_sum(x, ALL[name](mask))

    value, gradient = value_and_grad(loss)(np.full((2, 4), np.nan))
    assert value == 0.0
    assert not gradient.any()
    assert ALL[name](np.zeros((0, 4), bool)).shape == (0, 4)


@every
@for_each("junk", [1e4, np.nan, np.inf])
def test_masked_losses_are_never_read_in_value_or_gradient(name, junk):
    weights = ALL[name](MASK)
    dirty = np.where(MASK, LOSS, junk)
    value, gradient = value_and_grad(aggregate.weighted_sum)(dirty, weights)
    assert value == aggregate.weighted_sum(LOSS, weights)
    equal(gradient, weights)
    equal(grad(aggregate.weighted_sum, argnums=1)(dirty, weights), np.where(MASK, LOSS, 0.0))


def test_a_kept_nan_is_not_hidden():
    loss = put(LOSS, np.s_[0, 0], np.nan)
    assert np.isnan(aggregate.weighted_sum(loss, aggregate.token_mean(MASK)))


@every
@for_each("parts", [2, 4])
def test_parts_of_a_batch_add_up(name, parts):
    mask = np.arange(6) < np.array([6, 1, 3, 0, 2, 5, 1, 4])[:, None]
    loss = normal(2, mask.shape)
    weights = ALL[name](mask)
    whole = aggregate.weighted_sum(loss, weights)
    pieces = [
        aggregate.weighted_sum(x, w)
        for x, w in zip(np.split(loss, parts), np.split(weights, parts), strict=True)
    ]
    close(sum(pieces), whole, rtol=1e-5, atol=1e-6)


def test_bfloat16_losses_are_added_in_float32():
    # In bfloat16 the sum of 300 ones stops at 256.
    loss = np.ones((1, 300), jnp.bfloat16)
    total = aggregate.weighted_sum(loss, aggregate.sequence_sum(np.ones((1, 300), bool)))
    assert total.dtype == jnp.float32
    assert float(total) == 300.0


def test_of_these_only_sequence_mean_keeps_a_sequence_level_loss():
    value = np.array([[2.0], [6.0]])
    repeated = np.where(MASK, value, 0.0)
    means = {name: total(name, repeated, MASK) for name in ALL}
    assert means["sequence_mean"] == 4.0
    assert all(mean != 4.0 for name, mean in means.items() if name != "sequence_mean")
    assert {name: traits_of(f).level for name, f in ALL.items()} == dict.fromkeys(ALL, "token") | {
        "sequence_mean": "sequence"
    }
    assert traits_of(bind(aggregate.fixed_length, length=4)).level == "token"
    assert traits_of(functools.partial(aggregate.sequence_mean)).level == "sequence"


GROUPS = np.arange(4) < np.array([[4, 1, 2], [3, 0, 0], [0, 0, 0], [2, 2, 0]])[..., None]


def test_a_group_counts_the_same_whatever_it_holds():
    loss = np.asarray(normal(3, GROUPS.shape))
    weights = aggregate.group_mean(GROUPS)
    groups = [
        np.mean([row[keep].mean() for row, keep in zip(rows, kept, strict=True) if keep.any()])
        for rows, kept in zip(loss, np.asarray(GROUPS), strict=True)
        if kept.any()
    ]
    close(aggregate.weighted_sum(np.asarray(loss), weights), np.mean(groups), rtol=1e-5)
    close(weights.sum((1, 2)), [1 / 3, 1 / 3, 0, 1 / 3], rtol=1e-6)
    assert (np.asarray(weights > 0) == np.asarray(GROUPS)).all()
    dirty = np.where(GROUPS, loss, np.nan)
    equal(grad(aggregate.weighted_sum)(dirty, weights), weights)


def test_groups_of_equal_size_make_the_group_mean_the_sequence_mean():
    mask = np.arange(5) < np.random.default_rng(4).integers(1, 6, (3, 4, 1))
    close(aggregate.group_mean(mask), aggregate.sequence_mean(mask), rtol=1e-6)
    close(aggregate.group_mean(mask[0]), aggregate.sequence_mean(mask[0]), rtol=1e-6)
    assert traits_of(aggregate.group_mean).level == "sequence"


def test_groups_of_an_empty_batch_and_with_more_axes():
    assert not aggregate.group_mean(np.zeros((2, 3, 4), bool)).any()
    assert aggregate.group_mean(np.zeros((0, 3, 4), bool)).shape == (0, 3, 4)
    equal(
        aggregate.group_mean(GROUPS.reshape(2, 2, 3, 4)).reshape(GROUPS.shape),
        aggregate.group_mean(GROUPS),
    )


TWO = np.zeros(2, bool)
LENGTHS = "".join(
    f"{name}(MASK, length={length})  # length must be above 0\n"
    for name in ("sequence_sum_norm", "fixed_length")
    for length in ("0", "-1", "np.nan")
)
NAMES = vars(aggregate) | globals()
BAD = rf"""
ValueError:
{LENGTHS}guided_token_mean(MASK, steered=TWO, mu=1.5)  # mu must be in \[0, 1\]; got 1.5
guided_token_mean(MASK, steered=np.zeros(3, bool), mu=0.5)  # steered must have shape \(2,\)
weighted_sum(LOSS, LOSS[:, :3])  # loss \(2, 4\), weights \(2, 3\)
group_mean(np.ones(4, bool))  # mask must have at least 2 axes; got .*\(4,\)
TypeError:
guided_token_mean(MASK, steered=np.zeros(2), mu=0.5)  # steered must be
weighted_sum(LOSS, MASK)  # weights must be floating point; got bool
group_mean(np.ones((2, 4)))  # mask must be bool
fixed_length(MASK)  # !.*length
sequence_sum_norm(MASK)  # !.*length
"""


@for_each("error, call, message", bad_calls(BAD))
def test_bad_input(error, call, message):
    raises(error, call, message, NAMES)


@every
def test_bad_masks(name):
    with pytest.raises(TypeError, match=f"{name}: mask must be bool, True = keep; got float32"):
        ALL[name](MASK.astype(np.float32))
    with pytest.raises(ValueError, match=f"{name}: mask must have at least 1 axis"):
        ALL[name](np.array(True))
