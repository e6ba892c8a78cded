"""Tabular masked-diffusion policies: four tokens out of three, with an exact likelihood.

A `consistent` denoiser has the conditionals of a random distribution, the aim of training; the
conditionals of a `random` one contradict each other.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import diffusion_world
from benchmarks.claims import _chosen, harness
from jaxrl_llm import advantages, diffusion

V, L = 3, 4
POWERS = (V + 1) ** jnp.arange(L)
RESPONSES = jnp.asarray(list(itertools.product(range(V), repeat=L)))
WORLDS = ("consistent", "random")


def make(world: str, seed: int) -> np.ndarray:
    """Log-probabilities ``[(V + 1)^L, L, V]`` by what a denoiser sees."""
    if world == "consistent":
        joint = 2.0 * np.random.default_rng(seed).normal(size=(V,) * L)
        table = diffusion_world.consistent(joint).table
    else:
        table = diffusion_world.denoiser(seed, vocabulary=V, length=L, spread=1.5).table
    # A token that is shown is known, which no mask asks for.
    return np.maximum(table, -30.0).astype(np.float32)


def tables(world: str, *, seed: int, count: int) -> jax.Array:
    """Of several denoisers."""
    return jnp.asarray(np.stack([make(world, 1000 * seed + i) for i in range(count)]))


def log_probs(table, tokens, masked):
    """``[..., L]`` of tokens by a denoiser that sees the rest."""
    rows = jnp.where(masked, V, tokens) @ POWERS
    logp = jax.nn.log_softmax(table)[rows]
    index = jnp.broadcast_to(tokens, masked.shape)[..., None]
    return jnp.take_along_axis(logp, index, axis=-1)[..., 0]


# All masks but that of nothing, and how many tokens each hides.
MASKS = np.array(list(itertools.product([False, True], repeat=L)))[1:]
HIDDEN = MASKS.sum(-1)


def log_likelihood(table, tokens):
    """``[B]``, exact: the mean over all orders of unmasking one token at a time."""
    logp = log_probs(table, tokens, jnp.broadcast_to(MASKS[:, None], (len(MASKS), *tokens.shape)))
    row = {tuple(mask): i for i, mask in enumerate(MASKS.tolist())}
    # Of the tokens so far in any order, from all hidden to none.
    done = {(True,) * L: jnp.zeros(tokens.shape[:-1])}
    for size in range(L, 0, -1):
        after: dict[tuple, list] = {}
        for mask, before in done.items():
            for i in (i for i in range(L) if mask[i]):
                left = tuple(x and j != i for j, x in enumerate(mask))
                step = before + logp[row[mask], :, i] - np.log(size)
                after.setdefault(left, []).append(step)
        done = {k: jax.scipy.special.logsumexp(jnp.stack(x), axis=0) for k, x in after.items()}
    return done[(False,) * L]


def exact_elbo(table, tokens):
    """``[B]``, the mean over all orders of their log-probabilities."""
    masks = jnp.broadcast_to(MASKS[:, None], (len(MASKS), *tokens.shape))
    ways = jnp.asarray([1.0 / (n * math.comb(L, n)) for n in HIDDEN.tolist()])
    each = jnp.where(masks, log_probs(table, tokens, masks), 0.0).sum(-1)
    return jnp.sum(ways[:, None] * each, axis=0)


def draw(table, key, count):
    """Responses ``[count, L]``, one token at a time in a random order."""
    orders, draws = jax.random.split(key)
    order = jnp.argsort(jax.random.uniform(orders, (count, L)))

    def unmask(seen, inputs):
        place, key = inputs
        token = jax.random.categorical(key, table[seen @ POWERS, place])
        return seen.at[jnp.arange(count), place].set(token), None

    start = jnp.full((count, L), V)
    return jax.lax.scan(unmask, start, (order.T, jax.random.split(draws, L)))[0]


def spread(
    estimate: Callable, exact: Callable, *, seed: int, count: int, repeats: int
) -> dict[str, np.ndarray]:
    """Variance and mean square error of ``estimate(table, tokens, key) -> [B]``: ``[2, tasks]``.

    Of responses of each world's policies, ``exact(table, tokens) -> [B]`` is what it is compared
    with; in nats squared.
    """

    @jax.jit
    def of_tasks(tables, keys):
        def of_task(inputs):
            table, key = inputs
            one, two = jax.random.split(key)
            tokens = draw(table, one, 8)
            rows = jnp.repeat(tokens, repeats, axis=0)
            values = estimate(table, rows, two).reshape(8, repeats)
            error = jnp.mean((values - exact(table, tokens)[:, None]) ** 2)
            return jnp.stack([jnp.mean(jnp.var(values, axis=1, ddof=1)), error])

        return jax.lax.map(of_task, (tables, keys))

    keys = jax.random.split(jax.random.key(seed), count)
    return {
        world: np.asarray(of_tasks(tables(world, seed=seed, count=count), keys)).T
        for world in WORLDS
    }


def geometric(numerator: np.ndarray, denominator: np.ndarray) -> harness.Estimate:
    """Geometric mean over tasks of a ratio."""
    ratio = np.log(numerator) - np.log(denominator)
    center, low, high, how = harness.mean(ratio, "tasks")
    center, low, high = np.exp((center, low, high)).tolist()
    return harness.Estimate(center, low, high, f"{how}, of the logarithm")


# Training


def rewards_of(key):
    """Of all responses ``[V^L]``: a fifth of them are right."""
    return (jax.random.uniform(key, (len(RESPONSES),)) < 0.2).astype(jnp.float32)


def graded_rewards_of(key):
    """Of all responses ``[V^L]``, from 0 to 1: the mean is a fifth, and few are near 1.

    A rate can be too great for them: the policy settles on a response before it meets the best.
    With right and wrong alone any right response is the best, and all great rates are as good.
    """
    return jax.random.uniform(key, (len(RESPONSES),)) ** 4


def expected(table, rewards):
    """The exact mean reward."""
    return jnp.sum(jnp.exp(log_likelihood(table, RESPONSES)) * rewards)


@functools.partial(jax.jit, static_argnames=("loss", "updates", "steps", "group"))
def train(keys, rate, *, loss: Callable, updates: int, steps: int = 60, group: int = 16):
    """Mean reward before each step and after the last ``[seeds, steps + 1]``, by gradient descent.

    ``loss(table, old table, tokens, advantages, key)``; ``updates`` of one batch, with its masks.
    """

    def run(key):
        first, second, third = jax.random.split(key, 3)
        rewards = graded_rewards_of(second)
        start = 0.5 * jax.random.normal(first, ((V + 1) ** L, L, V))

        def step(table, key):
            one, two = jax.random.split(key)
            tokens = draw(table, one, group)
            grades = rewards[tokens @ (V ** jnp.arange(L)[::-1])]
            A = advantages.dr_grpo(grades)
            old = table

            def update(table, _):
                return table - rate * jax.grad(loss)(table, old, tokens, A, two), None

            table, _ = jax.lax.scan(update, old, None, length=updates)
            return table, expected(old, rewards)

        last, curve = jax.lax.scan(step, start, jax.random.split(third, steps))
        return jnp.append(curve, expected(last, rewards))

    return jax.lax.map(run, keys)


def best(
    losses: Mapping[str, Callable], rates, *, seed: int, quick: bool, updates: int = 1
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Curves ``[seeds, steps + 1]`` of each loss at the rate of its best mean reward, and rates.

    The rates are chosen on other seeds than those of the curves, and lie within their grid.
    """
    count = 6 if quick else 32
    choose, keys = (jax.random.split(jax.random.key(10 * seed + i), count) for i in (0, 1))
    curves, chosen = {}, {}
    for name, loss in losses.items():
        ends = [train(choose, r, loss=loss, updates=updates)[:, -1].mean() for r in rates]
        place = _chosen.highest(f"learning rate, {name}", rates, np.array(ends), quick=quick)
        chosen[name] = float(rates[place])
        curves[name] = np.asarray(train(keys, chosen[name], loss=loss, updates=updates))
    return curves, chosen


def exact_masks(key, valid, samples, *, least=1):
    """Masks of exact sizes and their levels."""
    one, two = jax.random.split(key)
    counts = diffusion.mask_counts(one, valid, samples=samples, draws="stratified", least=least)
    masked = diffusion.mask_exact(two, valid, counts)
    return masked, diffusion.count_levels(masked, valid, least=least)


def curve_plot(curves: Mapping[str, np.ndarray]) -> harness.Plot:
    """Mean reward by step."""
    series = []
    for name, values in curves.items():
        centers = [harness.mean(x, "seeds") for x in values.T]
        value, low, high, _ = zip(*centers, strict=True)
        series.append(harness.Series(name, list(range(len(value))), value, low, high))
    return harness.Plot("step", "exact mean reward", series)
