"""Fixed noise levels by quadrature estimate the bound with less error than random levels

Tabular denoisers of four tokens out of three; responses of the policy. With as many forwards, the
number is the mean square error of an estimate of the exact lower bound from masks at Gauss-Legendre
levels (`quadrature_levels`) over that from masks at uniform levels, as a geometric mean over tasks;
1 or above refutes the claim. The masks of independent tokens are random in both. Listed beside:
the share of the error that is bias, and masks of exact, evenly spread sizes, which the paper does
not compare.
"""

import jax.numpy as jnp

from benchmarks.claims import _denoisers, dllm_elbo, harness
from jaxrl_llm import diffusion

PAPER = "2510.08554"
FORWARDS = (1, 2, 3, 4, 8)


def quadrature(forwards):
    """``(table, tokens, key) -> [B]``."""

    def estimate(table, tokens, key):
        t, weights = diffusion.quadrature_levels(forwards)
        masked = diffusion.mask_tokens(key, jnp.ones(tokens.shape, bool), t)
        logp = _denoisers.log_probs(table, tokens, masked)
        return diffusion.elbo(logp, masked, t, weights=weights).sum(-1)

    return estimate


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Both worlds; two and three forwards decide."""
    sizes = {"count": 8, "repeats": 200} if quick else {"count": 40, "repeats": 1000}
    forwards = (2, 3) if quick else FORWARDS

    def found(estimate):
        return _denoisers.spread(estimate, _denoisers.exact_elbo, seed=seed, **sizes)

    fixed = {n: found(quadrature(n)) for n in forwards}
    random = {n: found(dllm_elbo.estimator("levels", n)) for n in forwards}
    sized = {n: found(dllm_elbo.estimator("exact sizes, stratified", n)) for n in (2, 3)}
    measures, facts, series = [], {}, []
    for world in _denoisers.WORLDS:
        rows = [_denoisers.geometric(fixed[n][world][1], random[n][world][1]) for n in forwards]
        for n in (2, 3):
            what = f"error over that at random levels, {world} denoiser, forwards: {n}"
            measures.append(harness.Measure(what, rows[forwards.index(n)], "below", 1.0))
            variance, error = fixed[n][world]
            share = f"share of variance in the error, {world} denoiser, forwards: {n}"
            facts[share] = float((variance / error).mean())
            other = _denoisers.geometric(sized[n][world][1], random[n][world][1])
            facts[f"{what}, exact sizes"] = other.value
        value, low, high, _ = zip(*rows, strict=True)
        series.append(harness.Series(f"{world} denoiser", forwards, value, low, high))
    label = "error over that at random levels"
    return harness.Claim(
        measures, harness.Plot("forwards", label, series, log="xy", line=1.0), facts
    )
