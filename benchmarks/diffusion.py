"""Every estimate of a masked-diffusion model's log-likelihood against the exact one.

python -m benchmarks.diffusion --save

Responses are so short that their log-likelihood is a sum over all orders of unmasking
(benchmarks/diffusion_world.py). A `consistent` denoiser has the conditionals of a distribution, the
aim of training: all orders agree, so that the lower bound is the log-likelihood. A `random` one has
conditionals that contradict each other. Each estimator is drawn many times for each response, by a
policy and by an older one, with so many forwards:

    bias         mean of the estimate less the log-likelihood, mean over the responses
    elbo_bias    the same less the exact lower bound: 0 for an estimator of it without a bias
    std          of one estimate, in nats
    error        root mean square error of the estimate, from bias and noise both
    ratio_error  root mean square error of the log ratio of the two policies on shared masks
    ratio_apart  the same with masks of their own

`noise` is the standard error of `bias` and `elbo_bias`.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.diffusion_world import Denoiser, consistent, denoiser
from benchmarks.worker import jax_device_name, package_versions
from jaxrl_llm import diffusion
from jaxrl_llm.core import Array

SIZE = {"length": 6, "vocabulary": 3, "responses": 16, "repeats": 300}
BUDGETS = (1, 2, 4, 8)
STEP = 0.1  # of the logits between the two policies
WORLDS = ("consistent", "random")


class Draws(NamedTuple):
    """Which tokens ``[J, B, T]`` the forwards hide, at which levels, and their weights."""

    masked: Array
    t: Array
    weights: Array | None = None


class Estimator(NamedTuple):
    """How an estimate is made.

    Attributes:
      name: In the table.
      draw: From a key, valid tokens and a number of forwards.
      estimate: ``[B]`` of log-probabilities, draws and valid tokens.
      forwards: The numbers of forwards it can have.
    """

    name: str
    draw: Callable[[Array, Array, int], Draws]
    estimate: Callable[[Array, Draws, Array], Array]
    forwards: Sequence[int] = BUDGETS


def levels(draws: str) -> Callable[[Array, Array, int], Draws]:
    """Independent masks at random levels."""

    def draw(key: Array, valid: Array, samples: int) -> Draws:
        one, two = jax.random.split(key)
        t = diffusion.noise_levels(one, valid.shape[:-1], samples=samples, draws=draws)
        return Draws(diffusion.mask_tokens(two, valid, t), t)

    return draw


def counts(draws: str) -> Callable[[Array, Array, int], Draws]:
    """Masks of an exact size."""

    def draw(key: Array, valid: Array, samples: int) -> Draws:
        one, two = jax.random.split(key)
        size = diffusion.mask_counts(one, valid, samples=samples, draws=draws)
        masked = diffusion.mask_exact(two, valid, size)
        return Draws(masked, diffusion.count_levels(masked, valid))

    return draw


def complements(key: Array, valid: Array, samples: int) -> Draws:
    """ESPO's: masks of an exact size and what they leave."""
    one, two = jax.random.split(key)
    size = diffusion.mask_counts(one, valid, samples=samples // 2, draws="stratified", least=0)
    masked = diffusion.complementary(diffusion.mask_exact(two, valid, size), valid)
    return Draws(masked, diffusion.count_levels(masked, valid, least=0))


def quadrature(key: Array, valid: Array, samples: int) -> Draws:
    """GDPO's: random masks at fixed levels."""
    t, weights = diffusion.quadrature_levels(samples)
    return Draws(diffusion.mask_tokens(key, valid, t), t, weights)


def everything(key: Array, valid: Array, samples: int) -> Draws:
    """One step: all tokens at once."""
    return Draws(jnp.broadcast_to(valid, (samples, *valid.shape)), jnp.ones(samples))


def pairs(key: Array, valid: Array, samples: int) -> Draws:
    """DiffuCoder's: everything, then masks with complements at levels in [0.2, 0.8]."""
    one, two = jax.random.split(key)
    t = jax.random.uniform(one, ((samples - 1) // 2, *valid.shape[:-1]), minval=0.2, maxval=0.8)
    both = diffusion.complementary(diffusion.mask_tokens(two, valid, t), valid)
    masked = jnp.concatenate([valid[None], both])
    return Draws(masked, jnp.concatenate([jnp.ones_like(t[:1]), t, 1.0 - t]))


def lower(logp: Array, d: Draws, valid: Array) -> Array:
    return diffusion.elbo(logp, d.masked, d.t, weights=d.weights).sum(-1)


def upper(beta: float) -> Callable[[Array, Draws, Array], Array]:
    def estimate(logp: Array, d: Draws, valid: Array) -> Array:
        return diffusion.eubo(logp, d.masked, d.t, valid, beta=beta).sum(-1)

    return estimate


def coupled(logp: Array, d: Draws, valid: Array) -> Array:
    return diffusion.coupled(logp[0], logp[1:], d.masked[1:], d.t[1:], valid).sum(-1)


def one_step(logp: Array, d: Draws, valid: Array) -> Array:
    return diffusion.mean_field(logp, valid).sum(-1)


EVEN = tuple(n for n in BUDGETS if n % 2 == 0)
ESTIMATORS = (
    Estimator("mean field", everything, one_step, (1,)),
    Estimator("ELBO, independent levels", levels("independent"), lower),
    Estimator("ELBO, antithetic levels", levels("antithetic"), lower, EVEN),
    Estimator("ELBO, stratified levels", levels("stratified"), lower, BUDGETS[1:]),
    Estimator("ELBO, quadrature", quadrature, lower),
    Estimator("ELBO, exact counts", counts("independent"), lower, (*BUDGETS, 32)),
    Estimator("ELBO, stratified counts", counts("stratified"), lower, (*BUDGETS[1:], 32)),
    Estimator("ELBO, complements", complements, lower, EVEN),
    Estimator("coupled", pairs, coupled, (3, 5, 9)),
    Estimator("EUBO, beta 1.5", counts("stratified"), upper(1.5), BUDGETS[1:]),
    Estimator("EUBO, beta L", counts("stratified"), upper(float(SIZE["length"])), BUDGETS[1:]),
)
# For tests.
TINY = (ESTIMATORS[0], ESTIMATORS[5]._replace(forwards=(2,)))


class Setting(NamedTuple):
    """Two policies, some responses ``[R, L]``, and what enumeration says of them ``[R]``."""

    policy: Denoiser
    older: Denoiser
    tokens: np.ndarray
    truth: np.ndarray
    older_truth: np.ndarray
    elbo: np.ndarray


def setting(world: str, size: Mapping[str, int]) -> Setting:
    """The policies; responses are uniform among all there are."""
    V, L = size["vocabulary"], size["length"]
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, V, (size["responses"], L))
    if world == "consistent":
        joint, other = 2.0 * rng.normal(size=(2, *(V,) * L))
        policy, older = consistent(joint), consistent(joint + STEP * other)
    else:
        policy, other = (denoiser(seed, vocabulary=V, length=L) for seed in (0, 1))
        moved = policy.table + STEP * other.table
        older = policy._replace(table=moved - np.logaddexp.reduce(moved, axis=-1, keepdims=True))
    facts = [policy.exact(x) for x in tokens]
    old = np.array([older.exact(x).log_likelihood for x in tokens])
    truth = np.array([x.log_likelihood for x in facts])
    return Setting(policy, older, tokens, truth, old, np.array([x.elbo for x in facts]))


def measure(
    settings: Mapping[str, Setting], estimator: Estimator, forwards: int, repeats: int
) -> dict[str, dict[str, float]]:
    """The row of an estimator with so many forwards, in each world."""

    # Not jitted: the programs of single operations serve all estimators.
    def estimates(tables: tuple[Array, Array], rows: Array, key: Array) -> tuple[Array, ...]:
        length, mask_id = tables[0].shape[1:]
        powers = (mask_id + 1) ** jnp.arange(length)
        valid = jnp.ones(rows.shape, bool)

        def of(table: Array, d: Draws) -> Array:
            seen = jnp.where(d.masked, mask_id, rows) @ powers
            logp = table[seen[..., None], jnp.arange(length), rows]
            return estimator.estimate(logp, d, valid)

        shared, apart = (estimator.draw(k, valid, forwards) for k in jax.random.split(key))
        return of(tables[0], shared), of(tables[1], shared), of(tables[1], apart)

    def root(x: np.ndarray) -> float:
        return float(np.sqrt((x**2).mean()))

    found = {}
    for world, s in settings.items():
        tables = tuple(jnp.asarray(x.table, jnp.float32) for x in (s.policy, s.older))
        rows = jnp.asarray(np.repeat(s.tokens, repeats, axis=0))
        made = estimates(tables, rows, jax.random.key(0))
        now, old, apart = (np.float64(x).reshape(len(s.tokens), repeats) for x in made)
        ratio = (s.truth - s.older_truth)[:, None]
        found[world] = {
            "bias": float((now.mean(-1) - s.truth).mean()),
            "elbo_bias": float((now.mean(-1) - s.elbo).mean()),
            "noise": float(np.sqrt(now.var(-1).mean() / now.size)),
            "std": float(np.sqrt(now.var(-1).mean())),
            "error": root(now - s.truth[:, None]),
            "ratio_error": root(now - old - ratio),
            "ratio_apart": root(now - apart - ratio),
        }
    return found


def run(size: Mapping[str, int], estimators: Sequence[Estimator] = ESTIMATORS) -> dict[str, Any]:
    """Of each world what is exact, and the table by estimator and number of forwards."""
    settings = {world: setting(world, size) for world in WORLDS}
    tables: dict[str, Any] = {world: {} for world in WORLDS}
    for estimator in estimators:
        for forwards in estimator.forwards:
            for world, row in measure(settings, estimator, forwards, size["repeats"]).items():
                rounded = {name: round(x, 4) for name, x in row.items()}
                tables[world].setdefault(estimator.name, {})[str(forwards)] = rounded
    worlds = {}
    for world, s in settings.items():
        ratio = s.truth - s.older_truth
        exact = {
            "log_likelihood": round(float(s.truth.mean()), 4),
            "elbo": round(float(s.elbo.mean()), 4),
            "log_ratio_rms": round(float(np.sqrt((ratio**2).mean())), 4),
        }
        worlds[world] = {"exact": exact, "estimators": tables[world]}
    return {"worlds": worlds}


def main(argv: list[str] | None = None) -> None:
    """Measure and print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="few repeats, for tests")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args(argv)
    if options.save and options.tiny:
        raise SystemExit("benchmarks.diffusion: --save takes all repeats.")
    size = {**SIZE, "responses": 4, "repeats": 50} if options.tiny else SIZE
    begin = time.process_time()
    tables = run(size, TINY if options.tiny else ESTIMATORS)
    result = {
        "name": "diffusion",
        "workload": {**size, "policy_step": STEP},
        "device": jax_device_name(),
        "versions": {"ours": package_versions(("jax", "jaxlib", "jaxrl_llm"))},
        "commit": harness.commit(),
        "core_seconds": round(time.process_time() - begin, 1),
        **tables,
    }
    harness.finish(result, to_file=options.save)


if __name__ == "__main__":
    main()
