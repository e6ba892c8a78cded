"""More forwards bring the gradient nearer to that of the likelihood, where one step stays apart

Tabular denoisers of four tokens out of three, a fifth of whose responses are right. On one group of
16 responses the gradient of `bgpo_terms` with J forwards, which is exact in memory whatever J, is
compared with that of the exact likelihood of the same responses by the cosine of their angle, as a
mean over tasks. The numbers are the cosine with 16 forwards less that with one, and less that of
the likelihood of one step of denoising (`mean_field`); 0 or below refutes the claim.
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.claims import _denoisers, harness
from jaxrl_llm import advantages, diffusion

PAPER = "2510.11683"
FORWARDS = (1, 2, 4, 8, 16)


def cosines(table, key, forwards):
    """Of the gradient by so many forwards, and of one step of denoising."""
    one, two, three = jax.random.split(key, 3)
    tokens = _denoisers.draw(table, one, 16)
    rewards = _denoisers.rewards_of(two)[tokens @ (_denoisers.V ** jnp.arange(_denoisers.L)[::-1])]
    A, valid = advantages.dr_grpo(rewards), jnp.ones(tokens.shape, bool)
    t = diffusion.noise_levels(three, valid.shape[:-1], samples=forwards)
    masked = diffusion.mask_tokens(jax.random.fold_in(three, 1), valid, t)

    def exact(table):
        return jnp.sum(A * _denoisers.log_likelihood(table, tokens))

    def bounded(table):
        terms = diffusion.elbo_terms(_denoisers.log_probs(table, tokens, masked), masked, t)
        return diffusion.bgpo_terms(terms, jax.lax.stop_gradient(terms), A).sum()

    def one_step(table):
        logp = _denoisers.log_probs(table, tokens, valid)
        return jnp.sum(A * diffusion.mean_field(logp[None], valid).sum(-1))

    want = jax.grad(exact)(table)

    def cosine(x):
        norms = jnp.linalg.norm(x) * jnp.linalg.norm(want)
        return jnp.sum(x * want) / jnp.maximum(norms, 1e-12)

    return cosine(jax.grad(bounded)(table)), cosine(jax.grad(one_step)(table))


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Both worlds, all numbers of forwards."""
    count = 20 if quick else 200
    forwards = (1, 16) if quick else FORWARDS
    keys = jax.random.split(jax.random.key(seed), count)
    every = {}
    for n in forwards:
        of = jax.jit(lambda x, n=n: jax.lax.map(lambda y: cosines(y[0], y[1], n), x))
        for world in _denoisers.WORLDS:
            made = _denoisers.tables(world, seed=seed, count=count)
            every[world, n] = tuple(map(np.asarray, of((made, keys))))
    measures, facts, series = [], {}, []
    for world in _denoisers.WORLDS:
        found = {n: every[world, n][0] for n in forwards}
        single = every[world, 1][1]
        for name, other in (("one forward", found[1]), ("one step of denoising", single)):
            what = f"cosine with 16 forwards less that of {name}, {world} denoiser"
            estimate = harness.mean(found[16] - other, "tasks")
            measures.append(harness.Measure(what, estimate, "above", 0.0))
        facts[f"cosine of one step of denoising, {world} denoiser"] = single.mean()
        rows = [harness.mean(found[n], "tasks") for n in forwards]
        value, low, high, _ = zip(*rows, strict=True)
        series.append(harness.Series(f"bgpo, {world} denoiser", forwards, value, low, high))
        flat = harness.mean(single, "tasks")
        series.append(
            harness.Series(
                f"one step, {world} denoiser",
                forwards,
                *([x] * len(forwards) for x in flat[:3]),
            )
        )
    return harness.Claim(
        measures,
        harness.Plot("forwards", "cosine with the exact gradient", series, log="x"),
        facts,
    )
