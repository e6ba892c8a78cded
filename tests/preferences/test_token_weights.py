"""What tokens and pairs count: worked numbers, reductions, masked cells and gradients."""

import jax.numpy as jnp
import numpy as np
from cheap import close, grad

from jaxrl_llm import preferences

RNG = np.random.default_rng(0)
LOGP = np.float32(-RNG.uniform(0.1, 2.0, (3, 5)))
MASK = np.arange(5) < np.array([[5], [2], [4]])
JUNK = np.where(MASK, LOGP, np.nan)


def test_tokens_beyond_the_other_response_count_less():
    sums = preferences.desensitized_logp(JUNK, MASK, np.array([2, 5, 3]), alpha=0.25)
    want = [
        LOGP[0, :2].sum() + 0.25 * LOGP[0, 2:].sum(),
        LOGP[1, :2].sum(),
        LOGP[2, :3].sum() + 0.25 * LOGP[2, 3],
    ]
    close(sums, want, rtol=1e-6)
    even = preferences.desensitized_logp(JUNK, MASK, np.zeros(3), alpha=1.0)
    close(even, np.where(MASK, LOGP, 0).sum(-1), rtol=1e-6)
    # A place is that among the tokens that count, not that of the array.
    later = preferences.desensitized_logp(
        JUNK[:1], np.array([[False, True, True, True, False]]), np.array([2]), alpha=0.0
    )
    close(later, LOGP[0, 1:3].sum(), rtol=1e-6)


def test_weights_are_of_the_mean_over_tokens_and_have_no_gradient():
    energy = RNG.uniform(0.2, 0.9, LOGP.shape)
    weights = preferences.alignment_weights(JUNK, jnp.float32(np.where(MASK, energy, -1.0)), MASK)
    mean = [(LOGP - np.log(energy))[i][MASK[i]].mean() for i in range(3)]
    close(weights, np.exp(mean), rtol=1e-5)
    # Equal probabilities are as likely as what the policy samples.
    even = preferences.alignment_weights(
        np.full((1, 4), np.log(0.25)), np.full((1, 4), 0.25), np.ones((1, 4), bool)
    )
    close(even, 1.0, rtol=1e-6)

    def total(logp):
        return preferences.alignment_weights(logp, jnp.float32(energy), MASK).sum()

    assert not grad(total)(np.asarray(LOGP)).any()
