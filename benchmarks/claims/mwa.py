"""Averages of a run's checkpoints weighted by loss or by step are better than their plain average.

Linear regression of 32 features with unit noise, 500 steps of SGD on batches of eight at a constant
learning rate of 0.01, and a checkpoint every 50 steps. The ten are averaged by `average_params`
with equal weights and with `metric_weights` of power 1: by the training loss (mean over the last 50
batches) and by the step. The loss is exact: the squared distance from the true weights. The number
is the loss with weights by training loss over that with equal weights; 1 or above refutes the
claim. The same with weights by step; and both over the loss of the last checkpoint.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jr
from benchmarks.claims import harness

PAPER = "2504.18580"
WIDTH, BATCH, STEPS, EVERY, RATE = 32, 8, 500, 50, 0.01
SCALE = 2.0
POWERS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


@jax.jit
def checkpoints(keys):
    """Of each run: distances of checkpoints from the true weights, and training losses."""

    def one(key):
        first, second = jax.random.split(key)
        true = SCALE * jax.random.normal(first, (WIDTH,)) / np.sqrt(WIDTH)

        def step(weights, key):
            of_inputs, of_noise = jax.random.split(key)
            inputs = jax.random.normal(of_inputs, (BATCH, WIDTH))
            targets = inputs @ true + jax.random.normal(of_noise, (BATCH,))

            def loss(weights):
                return jnp.mean((inputs @ weights - targets) ** 2)

            value, slope = jax.value_and_grad(loss)(weights)
            weights = weights - RATE * slope
            return weights, (weights, value)

        start = jnp.zeros(WIDTH)
        _, (weights, losses) = jax.lax.scan(step, start, jax.random.split(second, STEPS))
        return weights[EVERY - 1 :: EVERY] - true, losses.reshape(-1, EVERY).mean(-1)

    return jax.vmap(one)(keys)


@functools.partial(jax.jit, static_argnames="lower_is_better")
def averaged(distances, metric, power, *, lower_is_better: bool):
    """The loss ``[runs]`` of the weighted average of each run's checkpoints."""

    def one(distances, metric):
        weights = jr.models.metric_weights(metric, power=power, lower_is_better=lower_is_better)
        return jnp.sum(jr.models.average_params(list(distances), weights) ** 2)

    return jax.vmap(one)(distances, metric)


def run(*, seed: int = 0, quick: bool = False) -> harness.Claim:
    """Averages of the same checkpoints."""
    runs = 64 if quick else 512
    distances, losses = checkpoints(jax.random.split(jax.random.key(seed), runs))
    steps = jnp.broadcast_to(jnp.arange(EVERY, STEPS + 1, EVERY, dtype=jnp.float32), losses.shape)
    ways = {"training loss": (losses, True), "step": (steps, False)}
    powers = (0.0, 1.0) if quick else POWERS
    curves = {
        name: {
            power: np.asarray(averaged(distances, metric, power, lower_is_better=lower), np.float64)
            for power in powers
        }
        for name, (metric, lower) in ways.items()
    }
    plain = curves["step"][0.0]
    last = np.asarray(jnp.sum(distances[:, -1] ** 2, axis=-1), np.float64)

    def over(values, other):
        return harness.ratio(values, other, what="runs")

    measures = [
        harness.Measure(
            f"loss, weights by {name}, over that of {what}",
            over(curves[name][1.0], other),
            "below",
            1.0,
        )
        for what, other in (("equal weights", plain), ("the last checkpoint", last))
        for name in ways
    ]
    facts = {"loss, last checkpoint": last.mean(), "loss, equal weights": plain.mean()}
    for name, by_power in curves.items():
        facts[f"loss, weights by {name}"] = by_power[1.0].mean()
    series = []
    for name, by_power in curves.items():
        centers = [over(values, plain) for values in by_power.values()]
        value, low, high, _ = zip(*centers, strict=True)
        series.append(harness.Series(f"by {name}", powers, value, low, high))
    label = "loss over that of equal weights"
    return harness.Claim(measures, harness.Plot("power", label, series, line=1.0), facts)
