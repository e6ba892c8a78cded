"""LLDS: the worked numbers, both levels of the gate, and where the gradient is zero."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal, quick
from hypothesis import given
from hypothesis.extra import numpy as hnp
from rows import for_each

from jaxrl_llm.regularizers import chunk_ids_from_mask, imitation, llds

OLD, NEW = np.array([[-1.0, -0.5, -2.0, -1.0]]), np.array([[-1.5, -0.4, -2.1, -0.4]])
CHUNKS, ALL = jnp.array([[1, 1, 2, 2]]), jnp.ones((1, 4), bool)


def reference(logp, old, mask, advantages, chunks, level, coef):
    out = np.zeros(logp.shape)
    for row in np.ndindex(logp.shape[:-1]):
        d = old[row] - logp[row]
        for t in range(logp.shape[-1]):
            if not mask[row][t]:
                continue
            same = mask[row] & ((chunks[row] == chunks[row][t]) | (level == "response"))
            if advantages[row] >= 0 and d[same].sum() > 0:
                out[row][t] = coef * max(0.0, d[t])
    return out


def test_worked_numbers():
    # Worked numbers.
    zero = jnp.zeros(1)
    loss = llds(NEW, OLD, ALL, zero, chunk_ids=CHUNKS, coef=1.0)
    close(loss, [[0.5, 0, 0, 0]], rtol=1e-6)
    close(loss.mean(), 0.125, rtol=1e-6)
    assert not np.any(llds(NEW, OLD, ALL, zero, level="response"))
    assert not np.any(llds(NEW, OLD, ALL, jnp.array([-1e-3]), chunk_ids=CHUNKS))
    assert not np.any(llds(NEW + 3.0, OLD, ALL, zero, chunk_ids=CHUNKS))
    close(llds(NEW, OLD, ALL, zero, chunk_ids=CHUNKS), 0.1 * loss)

    # Gradient is minus the coefficient where active.
    gradient = jax.grad(lambda x: llds(x, OLD, ALL, jnp.zeros(1), chunk_ids=CHUNKS, coef=0.2).sum())
    close(gradient(jnp.asarray(NEW)), [[-0.2, 0, 0, 0]], rtol=1e-6)

    # Nothing before the policy has moved.
    for old in (None, NEW):
        loss = lambda x, old=old: llds(x, old, ALL, jnp.zeros(1)).sum()  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(jnp.asarray(NEW))
        assert value == 0 and not np.any(gradient)

    # Rounding is no loss.
    old = jnp.zeros((1, 2))
    logp = jnp.array([[-5e-5, -2e-4]])
    mask, advantages = jnp.ones((1, 2), bool), jnp.ones(1)
    loss = lambda x, **options: llds(x, old, mask, advantages, coef=1.0, **options).sum()  # noqa: E731
    equal(jax.grad(loss)(logp), [[0.0, -1.0]])
    exact = jax.grad(lambda x: loss(x, tolerance=0.0))
    equal(exact(logp), [[-1.0, -1.0]])


@for_each("level", ["action", "response"])
@for_each("seed", range(3))
def test_against_float64(level, seed):
    rng = np.random.default_rng(seed)
    shape = (2, 3, 8)
    mask = rng.random(shape) < 0.7
    old = rng.normal(-1, 0.5, shape).astype(np.float32)
    logp = (old + rng.normal(0, 0.4, shape)).astype(np.float32)
    advantages = rng.choice([-1.0, 0.0, 1.0], shape[:-1]).astype(np.float32)
    chunks = np.asarray(chunk_ids_from_mask(mask))
    out = jax.jit(lambda *x: llds(*x, level=level, coef=0.7))(logp, old, mask, advantages)
    expected = reference(
        *(x.astype(np.float64) for x in (logp, old)), mask, advantages, chunks, level, 0.7
    )
    close(out, expected, rtol=1e-4, atol=1e-6)
    per_token = np.broadcast_to(advantages[..., None], shape)
    equal(llds(logp, old, mask, per_token, level=level, coef=0.7), out)


def test_actions_and_answers():
    # One action is the response.
    rng = np.random.default_rng(5)
    old, logp = (rng.normal(-1, 0.5, (4, 6)).astype(np.float32) for _ in range(2))
    mask, advantages = np.ones((4, 6), bool), np.ones(4, np.float32)
    equal(llds(logp, old, mask, advantages), llds(logp, old, mask, advantages, level="response"))

    # Answers can be left out of sums and penalty.
    old, logp = jnp.zeros((1, 3)), jnp.array([[-0.2, 0.5, -1.0]])
    mask, advantages = jnp.ones((1, 3), bool), jnp.ones(1)
    close(llds(logp, old, mask, advantages, coef=1.0), [[0.2, 0, 1.0]])
    answer = jnp.array([[False, False, True]])
    assert not np.any(llds(logp, old, mask, advantages, coef=1.0, answer_tokens=answer))

    # A coefficient of zero turns a term off at impossible tokens too.
    logp, mask = jnp.array([[-jnp.inf, -1.0]]), jnp.ones((1, 2), bool)
    for term in (
        lambda x: llds(x, jnp.zeros((1, 2)), mask, jnp.zeros(1), coef=0.0),
        lambda x: imitation(x, mask, imitated=jnp.array([True]), coef=0.0),
    ):
        assert not np.any(term(logp))
        assert not np.any(jax.grad(lambda x, f=term: f(x).sum())(logp))


@for_each("junk", [1e4, np.nan, np.inf, -np.inf])
@for_each("level", ["action", "response"])
def test_masked_cells_are_never_read(junk, level):
    mask = jnp.array([[True, True, False, True], [False, False, False, False]])
    old = jnp.zeros((2, 4))
    logp = jnp.array([[-0.5, 0.1, 0.0, -0.3], [0.0, 0.0, 0.0, 0.0]])
    advantages = jnp.array([1.0, 1.0])

    def both(logp, old, advantages):
        loss = lambda x: llds(x, old, mask, advantages, level=level).sum()  # noqa: E731
        return jax.value_and_grad(loss)(logp)

    clean = both(logp, old, advantages)
    dirty = both(
        jnp.where(mask, logp, junk),
        jnp.where(mask, old, junk),
        jnp.where(mask.any(-1), advantages, junk),
    )
    jax.tree.map(equal, dirty, clean)


@quick
@given(mask=hnp.arrays(np.bool_, (2, 3, 7)))
def test_chunks_are_the_runs_of_the_mask(mask):
    chunks = np.asarray(chunk_ids_from_mask(mask))
    assert chunks.dtype == np.int32
    for row, ids in zip(mask.reshape(-1, 7), chunks.reshape(-1, 7), strict=True):
        number, before = 0, False
        for kept, found in zip(row, ids, strict=True):
            number += kept and not before
            assert found == (number if kept else 0)
            before = kept


def test_constants_bfloat16_and_no_tokens():
    args = (jnp.asarray(NEW), jnp.asarray(OLD), jnp.ones(1))
    loss = lambda x, old, a: llds(x, old, ALL, a, chunk_ids=CHUNKS).sum()  # noqa: E731
    gradients = jax.grad(loss, argnums=(0, 1, 2))(*args)
    assert np.any(gradients[0]) and not np.any(gradients[1]) and not np.any(gradients[2])
    low = [x.astype(jnp.bfloat16) for x in args]
    assert llds(low[0], low[1], ALL, low[2]).dtype == jnp.float32
    assert llds(*(jnp.zeros((2, 0)),) * 2, jnp.zeros((2, 0), bool), jnp.zeros(2)).shape == (2, 0)
