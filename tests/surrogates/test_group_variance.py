"""gvpo against the paper's loss written group by group in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close, compiled, equal
from rows import for_each

from jaxrl_llm import aggregate
from jaxrl_llm.core import traits_of
from jaxrl_llm.surrogates import gvpo

# Groups with an empty response, with one response, and without any.
LENGTHS = np.array([[5, 3, 1], [0, 4, 2], [0, 0, 5], [0, 0, 0], [2, 1, 4]])
SHAPE = (*LENGTHS.shape, 5)
MASK = np.arange(5) < LENGTHS[..., None]
MASK[4, 2, 1] = False  # an observation between two turns
RNG = np.random.default_rng(0)
OLD = RNG.normal(-1.5, 0.6, SHAPE).astype(np.float32)
LOGP = (OLD + RNG.normal(0.05, 0.4, SHAPE)).astype(np.float32)
REWARDS = RNG.uniform(0, 1, SHAPE[:-1]).astype(np.float32)


def paper64(logp, old, rewards, mask, beta):
    total, groups = 0.0, 0
    for x, o, r, m in zip(logp, old, rewards, mask, strict=True):
        rows = [g for g in range(len(m)) if m[g].any()]
        groups += bool(rows)
        if len(rows) > 1:
            d = np.array([beta * (x[g] - o[g])[m[g]].sum() for g in rows])
            error = (d - d.mean()) - (r[rows] - r[rows].mean())
            total += (error**2).sum() / 2 / (len(rows) - 1)
    return total / groups


def loss(logp, old=OLD, rewards=REWARDS, mask=MASK, beta=0.3):
    tokens = gvpo(logp, old, rewards, mask, beta=beta)
    return aggregate.weighted_sum(tokens, aggregate.group_mean(jnp.asarray(mask)))


gradient_of = compiled(jax.grad(loss))


def test_worked_numbers():
    # Log-ratios 1, 0 and -1 of whole responses, and rewards 1, 0 and 0; beta 0.5.
    old = jnp.full((3, 2), -2.0)
    logp = old + jnp.array([[0.5, 0.5], [0.25, -0.25], [-1.0, 0.0]])
    mask, rewards = jnp.ones((3, 2), bool), jnp.array([1.0, 0.0, 0.0])
    tokens = gvpo(logp, old, rewards, mask, beta=0.5)
    error = np.array([0.5 - 2 / 3, 1 / 3, -0.5 + 1 / 3])
    close(tokens[:, 0], 1.5 * error**2 / 2, rtol=1e-6)
    equal(tokens[:, 0], tokens[:, 1])


@for_each("beta", [0.1, 1.0])
def test_value_and_gradient_are_those_of_the_paper(beta):
    value, gradient = jax.jit(jax.value_and_grad(lambda x: loss(x, beta=beta)))(LOGP)
    arrays = [np.float64(x) for x in (OLD, REWARDS)]
    x64 = LOGP.astype(np.float64)
    assert float(value) == pytest.approx(paper64(x64, *arrays, MASK, beta), rel=1e-5)
    numeric = np.zeros(SHAPE)
    for i in np.ndindex(SHAPE):
        ends = []
        for step in (1e-6, -1e-6):
            moved = x64.copy()
            moved[i] += step
            ends.append(paper64(moved, *arrays, MASK, beta))
        numeric[i] = (ends[0] - ends[1]) / 2e-6
    close(gradient, numeric, rtol=1e-4, atol=1e-6)
    # A response alone in its group has nothing to be compared with.
    assert not gradient[2].any() and gradient[1].any()


def test_masked_cells_are_never_read():
    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    clean = both(LOGP, OLD, REWARDS)
    assert not np.any(clean[1][1]) and not np.any(clean[1][2])
    for junk in np.float32([1e4, np.nan, np.inf]):
        arrays = [np.where(MASK, x, junk) for x in (LOGP, OLD)]
        dirty = both(*arrays, np.where(MASK.any(-1), REWARDS, junk))
        jax.tree.map(equal, dirty, clean)
    assert np.isnan(loss(LOGP, rewards=np.where(LENGTHS == 3, np.nan, REWARDS)))
    assert gvpo(LOGP.astype(jnp.bfloat16), OLD, REWARDS, MASK).dtype == jnp.float32
    assert not np.any(gradient_of(LOGP, mask=np.zeros(SHAPE, bool)))


def test_marks():
    facts = traits_of(gvpo)
    assert (facts.level, facts.policy_gradient, facts.takes_correction) == (
        "sequence",
        False,
        False,
    )
