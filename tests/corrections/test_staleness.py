"""Versions of the weights: masks, the interpolated proximal policy and admission."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, put, value_and_grad
from rows import for_each

from jaxrl_llm import corrections
from jaxrl_llm.corrections import loglinear_prox, staleness_capacity, version_lags

VERSIONS = np.array([[[5, 6, 7], [3, 7, 7]], [[7, 7, 7], [6, 6, 99]]])
MASK = put(np.ones((2, 2, 3), bool), np.s_[1, 1, 2], False)


def staleness_mask(versions, mask, **options):
    advantages = np.zeros(mask.shape[:-1])
    return corrections.staleness_mask(advantages, mask, versions=versions, **options)


def test_mask_by_token_and_by_sequence():
    options = {"current_version": 7, "max_staleness": 2}
    tokens = staleness_mask(VERSIONS, MASK, level="token", **options)
    assert tokens.tolist() == [[[1, 1, 1], [0, 1, 1]], [[1, 1, 1], [1, 1, 0]]]
    whole = staleness_mask(VERSIONS, MASK, **options)
    assert whole.tolist() == [[[1, 1, 1], [0, 0, 0]], [[1, 1, 1], [1, 1, 0]]]


def test_the_current_version_may_come_with_the_prompts():
    one = staleness_mask(VERSIONS, MASK, current_version=7, max_staleness=1)
    per_prompt = staleness_mask(VERSIONS, MASK, current_version=np.array([7, 7]), max_staleness=1)
    equal(one, per_prompt)
    later = staleness_mask(VERSIONS, MASK, current_version=np.array([7, 10]), max_staleness=1)
    assert not later[1].any()


def test_tokens_of_unknown_version_have_no_age():
    """As of a demonstration: a bound on the age drops none of them, at whatever step."""
    versions = np.array([[-1, -1], [2, 6], [-1, 6], [-1, 2]])
    mask = np.ones((4, 2), bool)
    options = {"current_version": 6, "max_staleness": 1}
    whole = staleness_mask(versions, mask, **options)
    assert whole.tolist() == [[1, 1], [0, 0], [1, 1], [0, 0]]
    tokens = staleness_mask(versions, mask, level="token", **options)
    assert tokens.tolist() == [[1, 1], [0, 1], [1, 1], [1, 0]]
    head, tail = version_lags(versions, mask, current_version=7)
    assert head.tolist() == [0, 5, 1, 5] and tail.tolist() == [0, 1, 1, 5]


def test_loglinear_worked_numbers():
    logp, behavior = np.full(5, -1.0), np.full(5, -2.0)
    versions = np.array([3, 4, 5, 9, -1])
    prox = loglinear_prox(logp, behavior, versions, np.ones(5, bool), current_version=5)
    close(prox, [-1.5, -2.0, -2.0, -2.0, -2.0])


def test_loglinear_equals_the_reference():
    rng = np.random.default_rng(0)
    logp, behavior = rng.normal(-2, 1, (2, 3, 4)), rng.normal(-2, 1, (2, 3, 4))
    versions, mask = rng.integers(-1, 9, (2, 3, 4)), rng.random((2, 3, 4)) < 0.7
    expected = np.zeros(mask.shape)
    for i in np.ndindex(mask.shape):
        v = versions[i]
        a = 0.0 if v >= 6 or v < 0 else min(max((5 - v) / (6 - v), 0.0), 1.0)
        expected[i] = mask[i] * ((1 - a) * behavior[i] + a * logp[i])
    prox = loglinear_prox(logp, behavior, versions, mask, current_version=np.array([6, 6]))
    close(prox, expected, rtol=1e-5, atol=1e-6)


def test_loglinear_reads_no_masked_cell_and_gives_no_gradient():
    mask = np.array([True, False])
    logp, behavior = np.array([-1.0, np.nan]), np.array([-2.0, np.inf])
    versions = np.array([3, -7])

    def total(logp, behavior):
        return loglinear_prox(logp, behavior, versions, mask, current_version=5).sum()

    value, gradients = value_and_grad(total, argnums=(0, 1))(logp, behavior)
    assert value == -1.5
    assert not np.any(gradients)


@for_each(
    ("staleness", "version", "accepted", "running", "expected"),
    [(0, 0, 0, 4, 0), (1, 0, 0, 4, 4), (0, 3, 12, 0, 4), (8, 0, 0, 60, -24), (99, 0, 0, 60, 4)],
)
def test_capacity(staleness, version, accepted, running, expected):
    options = {"batch_size": 4, "max_staleness": staleness, "max_concurrent": 64}
    capacity = staleness_capacity(version, accepted, running, **options)
    assert capacity.dtype == jnp.int32
    assert int(capacity) == expected
    assert int(
        jax.jit(lambda *a: staleness_capacity(*a, **options))(version, accepted, running)
    ) == (expected)


def test_no_rollout_that_was_admitted_is_used_too_late():
    # One batch a version; whatever finishes is accepted in order of its start.
    options = {"batch_size": 3, "max_staleness": 2, "max_concurrent": 100}
    accepted, started = 0, []
    for version in range(6):
        while int(staleness_capacity(version, accepted, len(started) - accepted, **options)) > 0:
            started.append(version)
        accepted = (version + 1) * 3
        used = started[version * 3 : accepted]
        assert len(used) == 3
        assert max(version - start for start in used) <= 2


def test_lags_of_head_and_tail():
    versions = np.array([[3, 4, 4, 9], [5, 5, 5, 5], [0, 0, 0, 0]])
    mask = np.array([[True, True, True, False], [True] * 4, [False] * 4])
    head, tail = version_lags(versions, mask, current_version=6)
    assert head.tolist() == [3, 1, 0] and tail.tolist() == [2, 1, 0]
    per_row = version_lags(versions, mask, current_version=np.array([6, 7, 8]))
    assert [x.tolist() for x in per_row] == [[3, 2, 0], [2, 2, 0]]
