"""Speculative acceptance keeps the distribution: by enumeration, for one draft and for two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import for_each

from jaxrl_llm.rollout import spec_accept
from jaxrl_llm.rollout.sampling.speculative import decide

quick = settings(max_examples=25, deadline=None, database=None, derandomize=True)
P = np.array([[0.5, 0.3, 0.2], [0.1, 0.0, 0.9]], np.float32)
Q = np.array([[0.2, 0.7, 0.1], [0.6, 0.4, 0.0]], np.float32)
N = 40
GRID = (np.arange(N) + 0.5) / N

run = jax.jit(decide)


def marginal(p, q):
    """How often each token comes out at the first place, over all drafts and uniform numbers."""
    accepting, drawing = (x.reshape(-1) for x in np.meshgrid(GRID, GRID))
    out = np.zeros(3)
    for x in range(3):
        size = accepting.size
        draft = np.full((size, 1), x)
        after = np.full((size, 1, 3), 1 / 3, np.float32)
        rows = np.concatenate([np.broadcast_to(p, (size, 1, 3)), after], axis=1)
        n, token = run(rows, np.broadcast_to(q, (size, 1, 3)), draft, accepting[:, None], drawing)
        first = np.where(np.asarray(n) == 1, x, token)
        out += q[x] * np.bincount(first, minlength=3) / size
    return out


@for_each(("p", "q"), [(P[0], Q[0]), (P[1], Q[1]), (P[0], Q[1]), (P[1], Q[0]), (P[0], P[0])])
def test_the_marginal_is_p(p, q):
    # Each of the two grids misses a mass by less than half a step at every boundary.
    np.testing.assert_allclose(marginal(p, q), p, atol=2.0 / N)


def test_the_share_accepted_is_the_overlap():
    n = np.concatenate(
        [
            np.asarray(run(P, Q[:1], np.array([x]), np.array([u]), np.array(0.5))[0])[None]
            for x in range(3)
            for u in GRID
        ]
    ).reshape(3, N)
    np.testing.assert_allclose(Q[0] @ n.mean(-1), np.minimum(P[0], Q[0]).sum(), atol=1.0 / N)


@quick
@given(
    st.lists(st.integers(1, 10**6), min_size=3, max_size=3),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.25, 0.999, float(np.nextafter(np.float32(1), np.float32(0)))]),
)
def test_equal_distributions_accept_everything(weights, x, uniform):
    p = np.float32(weights) / np.float32(sum(weights))
    rows = np.stack([p, p, np.float32([0, 1, 0])])
    n, token = run(rows, rows[:2], np.array([x, x]), np.full(2, uniform), np.array(0.5))
    assert int(n) == 2 and int(token) == 1


def test_worked_numbers():
    # Draft 1 has p .3 and q .7: it stays below 3/7, and is replaced by 0 (rest .3) or 2 (rest .1).
    for uniform, drawing, expected in (
        (0.42, 0.5, (1, 2)),
        (0.44, 0.74, (0, 0)),
        (0.44, 0.76, (0, 2)),
        (0.99, 0.99, (0, 2)),
    ):
        n, token = run(P, Q[:1], np.array([1]), np.array([uniform]), np.array(drawing))
        assert (int(n), int(token)) == expected
    # After the last draft that stays, the token follows p itself: here 0 or 2.
    for drawing, expected in ((0.05, 0), (0.2, 2)):
        n, token = run(P, Q[:1], np.array([0]), np.array([0.9]), np.array(drawing))
        assert (int(n), int(token)) == (1, expected)


def test_drafts_after_a_rejection_do_not_count():
    p = np.stack([P[0], P[0], P[1]])
    q = np.stack([Q[0], P[0]])
    n, token = run(p, q, np.array([1, 0]), np.array([0.9, 0.0]), np.array(0.1))
    assert int(n) == 0 and int(token) == 0
    n, _ = run(p, q, np.array([0, 0]), np.array([0.9, 0.9]), np.array(0.1))
    assert int(n) == 2


def test_impossible_tokens_never_come_out():
    # The policy cannot sample token 1 at the second place, though the draft had it.
    p, q = np.stack([P[1], P[1]]), Q[1:]
    for uniform in GRID:
        n, token = run(p, q, np.array([1]), np.array([uniform]), np.array(uniform))
        assert int(n) == 0 and int(token) != 1


def test_by_a_key_row_by_row():
    keys = 4000
    p, q = (jnp.broadcast_to(x, (keys, *x.shape)) for x in (jnp.asarray(P), jnp.asarray(Q[:1])))
    draft = jax.random.categorical(jax.random.key(1), jnp.log(q[:, 0]))[:, None]
    accept = jax.jit(spec_accept)
    n, token = accept(jax.random.key(0), p, q, draft)
    assert n.shape == token.shape == (keys,) and n.dtype == token.dtype == jnp.int32
    first = np.where(n == 1, draft[:, 0], token)
    # Three standard deviations of a share of 4000.
    np.testing.assert_allclose(np.bincount(first, minlength=3) / keys, P[0], atol=0.024)
    again = accept(jax.random.key(0), p, q, draft)
    assert (again[1] == token).all()
    assert (accept(jax.random.key(2), p, q, draft)[1] != token).any()


def test_no_draft_is_a_plain_draw():
    none = np.zeros(0, np.float32)
    n, token = run(P[1:], np.zeros((0, 3), np.float32), none.astype(int), none, np.array(0.5))
    assert int(n) == 0 and int(token) == 2


@for_each(
    ("changes", "error", "words"),
    [
        ({"p": P[:1]}, ValueError, r"spec_accept: p must have shape \(2, 3\); got \(1, 3\)"),
        ({"p": P[:, :2]}, ValueError, r"p must have shape \(2, 3\); got \(2, 2\)"),
        ({"p": P.astype(int)}, TypeError, "p must be floating point"),
        ({"draft": np.array([1, 1])}, ValueError, r"draft must have shape \(1,\); got \(2,\)"),
        ({"draft": np.array([1.0])}, TypeError, "draft must hold integers"),
        ({"q": Q[0]}, ValueError, "q must have at least 2 axes"),
    ],
)
def test_bad_input(changes, error, words):
    good = {"p": P, "q": Q[:1], "draft": np.array([1])}
    with pytest.raises(error, match=words):
        spec_accept(jax.random.key(0), **{**good, **changes})
