"""Rules of agents that branch and call others, and the credit of the calls."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap import close, equal
from compiled_curation import align_calls, entropy_branches, top_k_entropy

from jaxrl_llm.advantages import m_grpo
from jaxrl_llm.rewards import call_rewards

branch = jax.jit(entropy_branches)


def test_branches():
    # Worked numbers of a branch.
    first, now, draws = jnp.array([0.1]), jnp.array([0.8]), jnp.array([[0.6]])
    assert branch(first, now, draws, slots=1).tolist() == [[True]]
    assert branch(first, now, draws, slots=0).tolist() == [[False]]
    # Without a weight, the chance is prob.
    draws = jax.random.uniform(jax.random.key(0), (4000, 1))
    many = {"first_entropy": jnp.zeros(4000), "entropy": jnp.ones(4000), "draws": draws}
    rates = [
        float(jnp.mean(branch(**many, slots=4000, weight=w, prob=p)))
        for w, p in ((0.0, 0.5), (0.2, 0.5), (0.2, 0.9), (-0.0, 0.25))
    ]
    close(rates, [0.5, 0.7, 1.0, 0.25], atol=0.03)

    # Branches come in order until slots run out.
    rng = np.random.default_rng(0)
    for slots in range(5):
        first, now, draws = rng.random(6), rng.random(6) * 2, rng.random((6, 2))
        where = rng.random(6) < 0.8
        arrays = [np.where(where, x, np.nan).astype(np.float32) for x in (first, now)]
        ours = branch(*arrays, draws.astype(np.float32), slots=slots, where=where)
        left, expected = slots, np.zeros((6, 2), bool)
        for i in np.flatnonzero(where):
            tries = min(2, left)
            for j in range(tries):
                u = np.clip(draws[i, j] - 0.2 * (now[i] - first[i]), 0, 1)
                expected[i, j] = u <= 0.5
            left -= expected[i].sum()
        equal(ours, expected)

    # Entropy of the likeliest tokens.
    rng = np.random.default_rng(1)
    logp = np.log(rng.dirichlet(np.ones(8), (3, 5))[..., :4]).astype(np.float32)
    where = np.arange(5) < np.array([[5], [2], [0]])
    each = -(np.exp(np.float64(logp)) * logp).sum(-1)
    junk = np.where(where[..., None], logp, np.nan)
    for reduce in ("sum", "mean"):
        ours = top_k_entropy(junk, vocab_size=50, reduce=reduce, where=where)
        total = (each * where).sum(-1)
        expected = total if reduce == "sum" else total / np.maximum(where.sum(-1), 1)
        close(ours, expected / np.log(50), rtol=1e-5)


def test_calls():
    # Worked numbers of calls.
    rewards, calls = jnp.array([[0.8, 0.6], [0.2, 9.0]]), jnp.array([[0, 1], [0, 0]])
    ours = m_grpo(rewards, calls, call_where=jnp.ones((2, 2), bool))
    close(ours, [[1.1667, 0.5], [-0.8333, -0.8333]], atol=1e-4)
    some = jnp.array([[True, True], [False, False]])
    left = m_grpo(jnp.where(some, rewards, jnp.nan), calls, call_where=some)
    close(left, [[0.7071, -0.7071], [0.0, 0.0]], atol=1e-4)
    formats, outcome = jnp.array([[1.0, 0.0], [1.0, 1.0]]), jnp.array([1.0, 0.1])
    close(call_rewards(formats, outcome, form="steps"), [[1, 0], [0.1, 0.1]])
    # Without a weight of the outcome the agents are independent.
    alone = call_rewards(
        formats,
        jnp.array([jnp.nan, 5.0]),
        weights=(1.0, 0.0, 0.0),
        call_where=jnp.array([[False, False], [True, True]]),
    )
    close(alone, [[0, 0], [1, 1]])
    judged = call_rewards(formats, outcome, weights=(0.5, 1.0, 2.0), quality=formats)
    close(judged, [[3.5, 1.0], [2.6, 2.6]], rtol=1e-6)

    # Calls are aligned.
    where = jnp.arange(5) < jnp.array([[5], [3], [2], [0]])
    where = where.at[2].set(jnp.array([False, True, False, True, False]))
    seen, last = set(), set()
    for seed in range(30):
        index, there = align_calls(where, jax.random.key(seed), count=3)
        assert there.tolist() == [[True] * 3] * 3 + [[False] * 3]
        subset = index[0].tolist()
        assert sorted(set(subset)) == subset  # a subset in order
        assert index[1].tolist() == [0, 1, 2] and index[2, :2].tolist() == [1, 3]
        seen.add(tuple(subset)), last.add(int(index[2, 2]))
    assert len(seen) > 5 and last == {1, 3}
    wide = align_calls(where, jax.random.key(0), count=7)
    assert wide.index[0, :5].tolist() == [0, 1, 2, 3, 4] and wide.index.shape == (4, 7)
