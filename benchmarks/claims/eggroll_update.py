"""Low-rank noise errs by about one over its rank, and already rank 1 trains like full noise.

First the expected update. A matrix of 8 by 8, fitness the sine of its product with a rank-one
matrix, sigma 1: for noise of full rank the expected update is known, and for noise of rank r it
differs from that along the rank-one matrix. The number is the error with rank 8 over that with rank
2, by `eggroll_grad` on large populations: an error as one over the rank gives 1/4, as one over its
root (which the central limit theorem alone would give) 1/2; 0.375 or above refutes the claim.

Then training. A network of 6, 12 and 3 units with tanh learns another of its form from 64 inputs
by 150 updates of 32 members with standardized fitness, with noise of rank 1 and with full noise,
each at the learning rate of a grid that is best on a third of the seeds. The second number is the
final loss with rank 1 over that with full noise on the others; 1.1 or above refutes that rank 1
is enough.

The error falls as the theorem says. In matrices as small as these, rank 1 learns more slowly than
full noise with as many members; the paper's are a thousand times as wide.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import _chosen, harness

PAPER = "2511.16652"
SIDE, RANKS = 8, (1, 2, 4, 8)
LOW, HIGH = 2, 8
WIDTHS, INPUTS, MEMBERS, UPDATES, SIGMA = (6, 12, 3), 64, 32, 150, 0.1
RATES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
NOISE = ("rank 1", "full noise")


@functools.partial(jax.jit, static_argnames=("rank", "members"))
def errors(keys, *, rank: int, members: int):
    """Shortfall of the update along the rank-one matrix ``[seeds]``, over a few populations."""
    params = {"w": jnp.zeros((SIDE, SIDE))}
    classes = jr.evolution.leaf_classes(params)

    def one(key):
        of_left, of_right, of_noise = jax.random.split(key, 3)
        left, right = (jax.random.normal(k, (SIDE,)) for k in (of_left, of_right))
        along = jnp.outer(left / jnp.linalg.norm(left), right / jnp.linalg.norm(right))

        def score(member):
            moved = jr.evolution.perturb(params, classes, of_noise, 0, member, sigma=1.0, rank=rank)
            return jnp.sin(jnp.sum(along * moved["w"]))

        fitness = jax.vmap(score)(jnp.arange(members))
        grads = jr.evolution.eggroll_grad(
            params, classes, of_noise, 0, fitness,
            sigma=1.0, rank=rank, scale="gradient", chunk=1024,
        )  # fmt: skip
        return math.exp(-0.5) + jnp.sum(grads["w"] * along)

    return jax.lax.map(one, keys)


def network(key):
    """Weights of a random network."""
    sizes = zip(WIDTHS[:-1], WIDTHS[1:], strict=True)
    keys = jax.random.split(key, len(WIDTHS) - 1)
    return [
        jax.random.normal(k, size) / math.sqrt(size[0]) for k, size in zip(keys, sizes, strict=True)
    ]


def outputs(weights, x):
    return jnp.tanh(x @ weights[0]) @ weights[1]


@functools.partial(jax.jit, static_argnames="noise")
def train(keys, rate, *, noise: str):
    """Loss ``[seeds, UPDATES]`` before each update."""

    def one(key):
        of_teacher, of_start, of_inputs, of_noise = jax.random.split(key, 4)
        inputs = jax.random.normal(of_inputs, (INPUTS, WIDTHS[0]))
        targets = outputs(network(of_teacher), inputs)
        start = network(of_start)
        full = noise == "full noise"
        classes = jr.evolution.leaf_classes(start, rules=[("*", "full")] if full else [])

        def loss(weights):
            return jnp.mean((outputs(weights, inputs) - targets) ** 2)

        def update(weights, epoch):
            def score(member):
                return -loss(
                    jr.evolution.perturb(weights, classes, of_noise, epoch, member, sigma=SIGMA)
                )

            fitness = jr.evolution.zscore(jax.vmap(score)(jnp.arange(MEMBERS)))
            grads = jr.evolution.eggroll_grad(
                weights, classes, of_noise, epoch, fitness, sigma=SIGMA
            )
            return jax.tree.map(lambda w, g: w - rate * g, weights, grads), loss(weights)

        return jax.lax.scan(update, start, jnp.arange(UPDATES))[1]

    return jax.vmap(one)(keys)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """The error by rank, and both kinds of noise in training."""
    first, second = jax.random.split(jax.random.key(seed))
    populations, members = (4, 2048) if quick else (12, 32768)
    ranks = (LOW, HIGH) if quick else RANKS
    keys = jax.random.split(first, populations)
    short = {rank: np.asarray(errors(keys, rank=rank, members=members)) for rank in ranks}
    ratio = harness.ratio(short[HIGH], short[LOW], what="populations")
    seeds, rates = (3, RATES[3:4]) if quick else (24, RATES)
    keys, taken = jax.random.split(second, seeds), _chosen.counted(seeds)
    last, best = {}, {}
    for noise in NOISE:
        losses = np.stack([np.asarray(train(keys, rate, noise=noise))[:, -1] for rate in rates])
        # A diverged run is as bad as any.
        losses = np.nan_to_num(losses, nan=1e6, posinf=1e6)
        place = _chosen.best(f"learning rate, {noise}", rates, -losses, quick=quick)
        last[noise], best[noise] = losses[place, taken], rates[place]
    measures = [
        harness.Measure(
            f"error of the expected update, rank {HIGH} over rank {LOW}", ratio, "below", 0.375
        ),
        harness.Measure(
            f"loss after {UPDATES} updates, rank 1 over full noise",
            harness.ratio(*last.values(), what="seeds"),
            "below",
            1.1,
        ),
    ]
    facts: dict[str, float] = {}
    for noise in NOISE:
        facts[f"best learning rate, {noise}"] = best[noise]
        facts[f"loss after {UPDATES} updates, {noise}"] = last[noise].mean()
    centers = [harness.mean(short[rank], "populations") for rank in ranks]
    value, low, high, _ = zip(*centers, strict=True)
    ideal = {"1 / rank": 1.0, "1 / root of the rank": 0.5}
    series = [
        harness.Series("measured", ranks, value, low, high),
        *(
            harness.Series(name, ranks, [value[0] * (ranks[0] / r) ** power for r in ranks])
            for name, power in ideal.items()
        ),
    ]
    label = "error of the expected update"
    return harness.Claim(measures, harness.Plot("rank", label, series, log="xy"), facts)
