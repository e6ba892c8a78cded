"""Mastered tokens: the worked numbers, the limits of the two options, and what is never read."""

import compiled_curation as cur
import jax
import jax.numpy as jnp
import numpy as np
from rows import for_each

from jaxrl_llm.core import traits_of
from jaxrl_llm.curation import mpt_advantages

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
    found = cur.mpt_mask(LOGP, jnp.full(3, entropy), ALL, jnp.array(reward))
    assert found.tolist() == keep


def test_the_mask():
    # The limits of the options.
    assert cur.mpt_mask(LOGP, jnp.full(3, 5.0), ALL, ONE, sigma=0.0).all()
    static = cur.mpt_mask(LOGP, jnp.full(3, 5.0), ALL, ONE, sigma=float("inf"))
    assert static.tolist() == [False, True, False]
    # A probability of exactly 1 is mastered at any bound.
    assert not cur.mpt_mask(jnp.zeros(3), jnp.zeros(3), ALL, ONE, tau=1.0).any()
    # The entropy must be below the bound, not at it.
    assert cur.mpt_mask(LOGP, jnp.full(3, 0.25), ALL, ONE, sigma=0.25).all()

    # Against a loop; what is masked is not read.
    rng = np.random.default_rng(0)
    logp = np.log(rng.uniform(0.97, 1.0, (4, 3, 7)))
    entropy, mask = rng.uniform(0, 0.4, (4, 3, 7)), rng.random((4, 3, 7)) < 0.8
    rewards = (rng.random((4, 3)) < 0.5).astype(np.float32)
    expected = mask.copy()
    for i in map(tuple, np.argwhere(mask)):
        certain = entropy[i[:2]][mask[i[:2]]].mean() < 0.2
        expected[i] = not (rewards[i[:2]] == 1 and certain and np.exp(logp[i]) >= 0.99)
    junk = [np.where(mask, x, np.nan).astype(np.float32) for x in (logp, entropy)]
    assert (cur.mpt_mask(*junk, mask, rewards) == expected).all()
    assert 0.05 < (mask & ~expected).mean() < 0.5
    # A reward that is not there makes nothing right, and an empty response is no trouble.
    mask, junk = jnp.array([True, True, False]), jnp.array([0.0, 0.0, jnp.nan])
    assert cur.mpt_mask(LOGP, junk, mask, jnp.array(jnp.nan)).tolist() == [True, True, False]
    assert not cur.mpt_mask(LOGP, junk, ~ALL, ONE).any()

    # Advantages of dropped tokens are zero.
    mask = jnp.array([[True, True, True], [True, True, False]])
    evidence = {"rewards": jnp.array([1.0, 0.0]), "old_logp": jnp.stack([LOGP, LOGP])}
    evidence |= {"old_entropy": jnp.full((2, 3), 0.1)}
    a, expected = jnp.array([2.0, -3.0]), [[0.0, 2.0, 0.0], [-3.0, -3.0, 0.0]]
    for advantages in (a, jnp.broadcast_to(a[:, None], mask.shape)):
        assert cur.mpt_advantages(advantages, mask, **evidence).tolist() == expected
    assert traits_of(mpt_advantages).token_values
    gradient = jax.grad(lambda a: cur.mpt_advantages(a, mask, **evidence).sum())(a)
    assert gradient.tolist() == [1.0, 2.0]
