"""Mastered tokens: the worked numbers, the limits of the two options, and what is never read."""

import jax
import jax.numpy as jnp
import numpy as np
from compiled_curation import mpt_advantages, mpt_mask
from rows import for_each

from jaxrl_llm.core import traits_of

LOGP = jnp.log(jnp.array([0.995, 0.5, 0.999]))
ALL = jnp.ones(3, bool)
ONE = jnp.array(1.0)


@for_each(
    ("entropy", "reward", "keep"),
    [
        (0.1, 1.0, [False, True, False]),
        (0.3, 1.0, [True, True, True]),
        (0.1, 0.0, [True, True, True]),
        (0.1, -1.0, [True, True, True]),
    ],
)
def test_worked_numbers(entropy, reward, keep):
    found = mpt_mask(LOGP, jnp.full(3, entropy), ALL, jnp.array(reward))
    assert found.tolist() == keep


def test_the_mask():
    # The limits of the options.
    entropy = jnp.full(3, 5.0)
    assert mpt_mask(LOGP, entropy, ALL, ONE, sigma=0.0).all()
    static = mpt_mask(LOGP, entropy, ALL, ONE, sigma=float("inf"))
    assert static.tolist() == [False, True, False]
    # A probability of exactly 1 is mastered at any bound.
    assert not mpt_mask(jnp.zeros(3), entropy * 0, ALL, ONE, tau=1.0).any()
    # The entropy must be below the bound, not at it.
    assert mpt_mask(LOGP, jnp.full(3, 0.25), ALL, ONE, sigma=0.25).all()

    # The entropy is the mean over kept tokens.
    entropy = jnp.array([[0.1, 0.2, 9.0], [0.1, 0.4, 9.0]])
    mask = jnp.array([[True, True, False]] * 2)
    logp = jnp.zeros((2, 3))
    assert mpt_mask(logp, entropy, mask, jnp.ones(2)).tolist() == [[False] * 3, [True, True, False]]

    # Against a loop.
    rng = np.random.default_rng(0)
    logp = np.log(rng.uniform(0.97, 1.0, (4, 3, 7)))
    entropy, mask = rng.uniform(0, 0.4, (4, 3, 7)), rng.random((4, 3, 7)) < 0.8
    rewards = (rng.random((4, 3)) < 0.5).astype(np.float32)
    expected = mask.copy()
    for i in np.argwhere(mask):
        row = tuple(i[:2])
        certain = entropy[row][mask[row]].mean() < 0.2
        expected[tuple(i)] = not (rewards[row] == 1 and certain and np.exp(logp[tuple(i)]) >= 0.99)
    arrays = [jnp.asarray(x, jnp.float32) for x in (logp, entropy)]
    found = jax.jit(mpt_mask)(*arrays, jnp.asarray(mask), jnp.asarray(rewards))
    assert (found == expected).all() and 0.05 < (mask & ~expected).mean() < 0.5

    # What is masked is not read.
    mask = jnp.array([True, True, False])
    junk = jnp.array([0.0, 0.0, jnp.nan])
    keep = mpt_mask(LOGP + junk, jnp.full(3, 0.1) + junk, mask, ONE)
    assert keep.tolist() == [False, True, False]
    # A reward that is not there makes nothing right, and an empty response is no trouble.
    assert mpt_mask(LOGP, junk, mask, jnp.array(jnp.nan)).tolist() == [True, True, False]
    assert not mpt_mask(LOGP, junk, ~ALL, ONE).any()

    # Advantages of dropped tokens are zero.
    mask = jnp.array([[True, True, True], [True, True, False]])
    evidence = {
        "rewards": jnp.array([1.0, 0.0]),
        "old_logp": jnp.stack([LOGP, LOGP]),
        "old_entropy": jnp.full((2, 3), 0.1),
    }
    a = jnp.array([2.0, -3.0])
    expected = [[0.0, 2.0, 0.0], [-3.0, -3.0, 0.0]]
    assert mpt_advantages(a, mask, **evidence).tolist() == expected
    tokens = jnp.broadcast_to(a[:, None], mask.shape)
    assert mpt_advantages(tokens, mask, **evidence).tolist() == expected
    assert traits_of(mpt_advantages).token_values
    gradient = jax.grad(lambda a: mpt_advantages(a, mask, **evidence).sum())(a)
    assert gradient.tolist() == [1.0, 2.0]
