"""The Beta tracker: the worked numbers, a float64 reference in a dictionary, ids, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, grad, quick
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads
from rows import for_each

from jaxrl_llm.advantages import (
    BetaTracker,
    beta_tracker_init,
    beta_tracker_update,
    beta_tracker_value,
    kl_forgetting,
    uncertainty_sampling_weights,
    window_kl_discount,
)


def start(alpha=(3.0, 1.0, 2.0), beta=(1.0, 1.0, 6.0)):
    return BetaTracker(np.array(alpha), np.array(beta))


def reference(alpha, beta, ids, rewards, rho, where):
    """One prompt after the other in float64: decay once, count every kept rollout."""
    alpha, beta = np.array(alpha, np.float64), np.array(beta, np.float64)
    rho = np.broadcast_to(rho, len(ids))
    rows = {}
    for row, q in enumerate(ids):
        if where[row].any():
            rows.setdefault(int(q), []).append(row)
    for q, visits in rows.items():
        if not 0 <= q < len(alpha):
            continue
        kept = np.concatenate([rewards[row][where[row]] for row in visits])
        factor = np.mean([rho[row] for row in visits])
        alpha[q] = factor * alpha[q] + kept.sum()
        beta[q] = factor * beta[q] + (1 - kept).sum()
    return alpha, beta


def test_init_has_the_worked_numbers():
    state = beta_tracker_init(np.array([3.0]), 8)
    close(state.alpha, [3.111111], rtol=1e-6)
    close(state.beta, [4.888889], rtol=1e-6)
    close(beta_tracker_value(state, np.array([0])), [0.388889], rtol=1e-5)
    # The share of the prompt's weight sqrt(v (1 - v)) + 0.05 among two, the other at 0.
    shares = uncertainty_sampling_weights(np.array([0.388889, 0.0]))
    close(shares[0] / shares[1] * 0.05, 0.537498, rtol=1e-5)


def test_init_without_samples():
    # Without samples SPO starts at 1/2 and 1/2; MSSR at a value of 1/2 with the full weight.
    spo = beta_tracker_init(np.array([0.0, 1.0]), np.array([0, 1]))
    close(spo.alpha, [0.5, 8 * 1.5 / 2])
    close(spo.beta, [0.5, 8 * 0.5 / 2])
    mssr = beta_tracker_init(np.array([0, 1]), np.array([0, 1]), smoothing=0.0)
    assert mssr.alpha.tolist() == [4.0, 8.0]
    assert mssr.beta.tolist() == [4.0, 0.0]
    assert all(x.dtype == jnp.float32 for x in (*spo, *mssr))


def test_update_has_the_worked_numbers():
    state = beta_tracker_init(np.array([3.0]), 8)
    ids, right = np.array([0]), np.array([[1.0]])
    still = beta_tracker_update(state, ids, right, kl_forgetting(np.array([0.0])))
    close(still.alpha, [3.986667], rtol=1e-6)
    close(still.beta, [4.693333], rtol=1e-6)
    close(beta_tracker_value(still, ids), [0.459293], rtol=1e-5)
    close(kl_forgetting(np.array([0.01])), [0.890899], rtol=1e-6)
    moved = beta_tracker_update(state, ids, right, kl_forgetting(np.array([0.06])))
    close(beta_tracker_value(moved, ids), [0.465278], rtol=1e-5)
    raw = kl_forgetting(np.array([0.06]), low=0.0)
    close(raw, [0.5], rtol=1e-6)


@quick
@given(
    ids=st.lists(st.integers(-1, 4), min_size=4, max_size=4),
    seed=st.integers(0, 100),
    per_row=st.booleans(),
)
def test_equals_the_reference_with_duplicates_and_foreign_ids(ids, seed, per_row):
    rng = np.random.default_rng(seed)
    rewards = rng.integers(0, 2, (4, 3)).astype(np.float32)
    where = rng.random((4, 3)) < 0.6
    rho = rng.uniform(0.5, 1.0, 4).astype(np.float32) if per_row else np.full(4, 0.875, np.float32)
    state = start()
    new = beta_tracker_update(state, np.array(ids), rewards, rho, where=where)
    alpha, beta = reference(state.alpha, state.beta, ids, rewards, rho, where)
    close(new.alpha, alpha, rtol=1e-5)
    close(new.beta, beta, rtol=1e-5)


def test_a_foreign_id_changes_nothing_and_its_value_is_nan():
    state = start()
    for foreign in (-1, -3, 3, 1000):
        ids = np.array([foreign])
        assert np.isnan(beta_tracker_value(state, ids)).all()
        new = beta_tracker_update(state, ids, np.array([[1.0]]), np.array([0.5]))
        for a, b in zip(new, state, strict=True):
            equal(a, b)


def test_dropped_rollouts_are_never_read_and_a_prompt_without_one_is_not_visited():
    where = np.array([[True, False], [False, False]])
    for junk in (0.0, 1e4, np.nan, np.inf):
        rewards = np.where(where, 1.0, junk).astype(np.float32)
        new = beta_tracker_update(
            start(), np.array([0, 1]), rewards, np.array([0.5, np.nan]), where=where
        )
        assert new.alpha.tolist() == [2.5, 1.0, 2.0]
        assert new.beta.tolist() == [0.5, 1.0, 6.0]


def test_eager_equals_compiled_and_bfloat16_is_counted_in_float32():
    ids, rewards = np.array([1, 1]), np.array([[1.0, 0.0], [1.0, 1.0]])
    eager = beta_tracker_update(start(), ids, rewards.astype(jnp.bfloat16), 0.875)
    compiled = beta_tracker_update(start(), ids, rewards, 0.875)
    for a, b in zip(eager, compiled, strict=True):
        assert a.dtype == jnp.float32
        close(a, b, rtol=1e-6)


@for_each(
    ("kl", "monotone", "two_sided"),
    [
        (0.0, 0.96, 0.875),
        (0.005, 0.9175, 0.9175),
        (0.0099, 0.87585, 0.95915),
        (0.0101, 0.875, 0.875),
        (0.05, 0.875, 0.875),
    ],
)
def test_discount_of_a_window(kl, monotone, two_sided):
    window = np.array([0.5 * kl, 1.5 * kl])
    close(window_kl_discount(window), two_sided, atol=1e-6)
    close(window_kl_discount(window, rule="monotone"), monotone, atol=1e-6)


@for_each("rule", ["two_sided", "monotone"])
def test_only_measured_entries_of_a_window_count(rule):
    window = np.array([0.004, 0.006, np.nan])
    close(window_kl_discount(window, count=2, rule=rule), 0.9175, rtol=1e-6)
    close(window_kl_discount(window, count=0, rule=rule), 0.9175, rtol=1e-6)


def test_sampling_weights_are_probabilities_that_favor_the_unsure():
    values = np.array([[0.0, 0.5, 1.0, 0.9], [0.2, 0.2, 0.2, 0.2]])
    shares = np.asarray(uncertainty_sampling_weights(values))
    close(shares.sum(-1), 1.0, rtol=1e-6)
    assert shares[0].argmax() == 1
    close(shares[1], 0.25, rtol=1e-6)
    equal(uncertainty_sampling_weights(np.ones((1, 4)), explore=0.0), 0.25)


def test_gradients():
    weights = jax.jit(lambda v: uncertainty_sampling_weights(v)[0])
    options = {"order": 1, "modes": ["rev"], "atol": 1e-2, "rtol": 1e-2}
    check_grads(weights, (np.array([0.3, 0.6, 0.8]),), **options)
    # At 0 and 1 the slope of the square root is infinite; ours is 0.
    gradient = grad(lambda v: uncertainty_sampling_weights(v)[1])(np.array([0.0, 0.5, 1.0]))
    assert np.isfinite(gradient).all()
    slope = grad(lambda d: kl_forgetting(d).sum())(np.array([0.0, 0.005, 0.5]))
    assert slope[0] == 0.0 and slope[1] < 0.0 and slope[2] == 0.0
