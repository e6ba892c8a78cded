"""Masks with their complements estimate a likelihood with less variance than independent pairs

Tabular denoisers of four tokens out of three; responses of the policy. `diffusion.coupled` takes a
forward with everything hidden and a pair of masks, at levels t and 1 - t with t in [0.2, 0.8]: the
second the complement of the first, or drawn for itself. Both have one expectation. The numbers are
the variance of a response's estimate and that of a token's, with complements over without, as
geometric means over tasks; 1 or above refutes the claim.
"""

import jax
import jax.numpy as jnp

from benchmarks.claims import _denoisers, harness
from jaxrl_llm import diffusion

PAPER = "2506.20639"
PAIRS = (1, 2, 4)


def estimator(complements, pairs, *, token=False):
    """``(table, tokens, key) -> [B]``."""

    def estimate(table, tokens, key):
        level, one, two = jax.random.split(key, 3)
        valid = jnp.ones(tokens.shape, bool)
        t = jax.random.uniform(level, (pairs, *valid.shape[:-1]), minval=0.2, maxval=0.8)
        masked = diffusion.mask_tokens(one, valid, t)
        if complements:
            masked = diffusion.complementary(masked, valid)
        else:
            masked = jnp.concatenate([masked, diffusion.mask_tokens(two, valid, 1.0 - t)])
        full = _denoisers.log_probs(table, tokens, valid)
        logp = _denoisers.log_probs(table, tokens, masked)
        each = diffusion.coupled(full, logp, masked, jnp.concatenate([t, 1.0 - t]), valid)
        return each[..., 0] if token else each.sum(-1)

    return estimate


def nothing(table, tokens):
    del table
    return jnp.zeros(tokens.shape[:-1])


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Both worlds; one pair and more."""
    sizes = {"count": 8, "repeats": 300} if quick else {"count": 40, "repeats": 2000}
    pairs = (1,) if quick else PAIRS

    def over(count, **what):
        ours, other = (
            _denoisers.spread(estimator(each, count, **what), nothing, seed=seed, **sizes)
            for each in (True, False)
        )
        return {w: _denoisers.geometric(ours[w][0], other[w][0]) for w in _denoisers.WORLDS}

    of_responses, of_token = [over(n) for n in pairs], over(1, token=True)
    measures, series = [], []
    for world in _denoisers.WORLDS:
        label = f"variance with complements over without, {world} denoiser, one pair"
        for name, found in (("response", of_responses[0]), ("token", of_token)):
            measures.append(harness.Measure(f"{label}, of a {name}", found[world], "below", 1.0))
        value, low, high, _ = zip(*(found[world] for found in of_responses), strict=True)
        series.append(harness.Series(f"a response, {world} denoiser", pairs, value, low, high))
    label = "variance with complements over without"
    return harness.Claim(measures, harness.Plot("pairs", label, series, log="x", line=1.0))
