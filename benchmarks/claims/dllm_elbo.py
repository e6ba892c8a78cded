"""Hiding an exact number of tokens estimates the bound with less variance than a random level

Tabular denoisers of four tokens out of three; responses of the policy. The number is the variance
of an estimate of the lower bound from masks of an exact, uniform size (`mask_exact`), over that
from masks of independent tokens at a uniform level (`mask_tokens`), with as many forwards: a
geometric mean over tasks, of one forward and of four; 1 or above refutes the claim. Listed beside:
the same with levels and sizes spread evenly over the draws, which are ours.
"""

import jax
import jax.numpy as jnp

from benchmarks.claims import _denoisers, harness
from jaxrl_llm import diffusion

PAPER = "2502.09992"
FORWARDS = (1, 2, 4, 8)
NAMES = ("exact sizes", "exact sizes, stratified", "levels", "levels, stratified")


def estimator(name, forwards):
    """``(table, tokens, key) -> [B]``."""
    draws = "stratified" if name.endswith("stratified") else "independent"

    def estimate(table, tokens, key):
        one, two = jax.random.split(key)
        valid = jnp.ones(tokens.shape, bool)
        if name.startswith("exact"):
            counts = diffusion.mask_counts(one, valid, samples=forwards, draws=draws)
            masked = diffusion.mask_exact(two, valid, counts)
            t = diffusion.count_levels(masked, valid)
        else:
            t = diffusion.noise_levels(one, valid.shape[:-1], samples=forwards, draws=draws)
            masked = diffusion.mask_tokens(two, valid, t)
        return diffusion.elbo(_denoisers.log_probs(table, tokens, masked), masked, t).sum(-1)

    return estimate


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Both worlds, all numbers of forwards."""
    sizes = {"count": 8, "repeats": 200} if quick else {"count": 40, "repeats": 1000}
    forwards, names = ((1, 4), (NAMES[0], NAMES[2])) if quick else (FORWARDS, NAMES)
    every = {
        (name, n): _denoisers.spread(estimator(name, n), _denoisers.exact_elbo, seed=seed, **sizes)
        for name in names
        for n in forwards
    }
    measures, facts, series = [], {}, []
    for world in _denoisers.WORLDS:
        found = {which: x[world][0] for which, x in every.items()}

        def over(name, n, found=found):
            return _denoisers.geometric(found[name, n], found["levels", n])

        for n in (1, 4):
            what = f"variance over that at random levels, {world} denoiser, forwards: {n}"
            measures.append(harness.Measure(what, over("exact sizes", n), "below", 1.0))
            for name in (x for x in names if x.endswith("stratified")):
                facts[f"{what}, {name}"] = over(name, n).value
        for name in (each for each in names if each != "levels"):
            values, low, high, _ = zip(*(over(name, n) for n in forwards), strict=True)
            series.append(harness.Series(f"{name}, {world}", forwards, values, low, high))
    label = "variance over that at random levels"
    return harness.Claim(
        measures, harness.Plot("forwards", label, series, log="xy", line=1.0), facts
    )
