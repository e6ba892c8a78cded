"""FIPO: a token counts by what became of the tokens behind it.

    f_t = clip(exp(sum_{k >= t} 2^(-(k - t) / half_life) log r_k), w_min, w_max)

Ratios (4, 1/2, 4) with a half-life of 1 have the weights (4, 1, 4): the exponents of 2 are
2 - 1/2 + 2/4, -1 + 2/2 and 2. Tokens beyond the dual clip move no weight, a bad token that became
likely is not amplified, and a response with many dual-clipped tokens does not train. The loss is
compared with float64 in `test_surrogates.py`.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from cheap import close
from rows import for_each

from jaxrl_llm.surrogates import fipo, fipo_weights

OPEN = {"w_min": 0.0, "w_max": 1e6}  # bounds that no weight here reaches


def of(ratios, advantage=1.0, mask=None, **options):
    logp = jnp.log(jnp.asarray(ratios, jnp.float32))
    mask = jnp.ones(logp.shape, bool) if mask is None else jnp.asarray(mask)
    return fipo_weights(logp, 0 * logp, jnp.asarray(advantage), mask, **options).tolist()


def test_weights():
    # Worked numbers of the weights.
    # Ratios of 4, 1/2 and 4 with half-life 1: exponents of 2 are 2 - 1/2 + 2/4, -1 + 2/2 and 2.
    close(of([4, 0.5, 4], half_life=1, **OPEN), [4, 1, 4], rtol=1e-6)
    close(of([4, 0.5, 0.5], half_life=1), [1.2, 1, 1], rtol=1e-6)
    wide = {"w_min": 0.6, "w_max": 3.0}
    close(of([4, 0.5, 0.5], half_life=1, **wide), [2.378, 0.6, 0.6], rtol=1e-3)

    # A token beyond the dual clip moves no weight.
    options = {"half_life": 1, "dual_clip": 3.0} | OPEN
    for advantage in (1.0, -1.0):
        options["safe_ratio"] = None
        close(of([2, 4, 2], advantage, **options), [2 * 2**0.25, 2**0.5, 2])

    # A bad token that became likely is not amplified.
    ratios = [1.5, 1.05, 1.0]
    for advantage, expected in ((1.0, [1.2, 1.05, 1.0]), (-1.0, [1.0, 1.05, 1.0])):
        close(of(ratios, advantage, safe_ratio=1.4), expected, rtol=1e-6)
    low = of([1.5, 0.1, 1.0], -1.0, safe_ratio=1.4, w_min=0.1)
    close(low, [0.8, 0.1, 1.0], rtol=1e-6)
    assert of(ratios, -1.0, safe_ratio=None)[0] == pytest.approx(1.2)

    # Masked tokens are neither read nor counted in distances.
    options = {"half_life": 1} | OPEN
    holes = of([4, 7, 7, 0.5, 4], mask=[True, False, False, True, True], **options)
    close(holes, [4, 0, 0, 1, 4], rtol=1e-6)

    # An endless half life sums the rest and none takes the token alone.
    rng = np.random.default_rng(0)
    d = rng.normal(0, 0.1, 7)
    rest = np.exp(np.cumsum(d[::-1])[::-1])
    close(of(np.exp(d), half_life=np.inf, **OPEN), rest, rtol=1e-5)
    close(of(np.exp(d), half_life=1e-3, **OPEN), np.exp(d), rtol=1e-5)


@for_each(("max_clipped", "kept"), [(0, 1), (1, 2), (2, 3), (None, 3)])
def test_a_response_with_many_dual_clipped_tokens_does_not_train(max_clipped, kept):
    ratios = np.ones((4, 3), np.float32)
    ratios[1, 0] = ratios[2, :2] = ratios[3] = 5.0
    logp, mask = jnp.log(ratios), jnp.ones((4, 3), bool).at[3, 2].set(False)
    advantages = jnp.array([-1.0, -1.0, -1.0, 1.0])  # that of the last one bounds nothing
    options = {"dual_clip": 4.0, "max_clipped": max_clipped}
    loss = fipo(logp, 0 * logp, advantages, mask, **options)
    assert np.asarray(loss != 0).any(-1).tolist() == [i < kept for i in range(3)] + [True]
