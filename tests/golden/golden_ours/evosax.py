"""Our evolution strategy of full rank against evosax's, from the same noise, step by step."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from golden_data import Difference, Ours

from jaxrl_llm import evolution
from jaxrl_llm.evolution import noise
from jaxrl_llm.testing import quadratic

SIGMA, STEPS = 0.3, 6
KEY = jax.random.key(0)


def ranks(costs):
    """Fitness of costs: evosax makes them small. Ties have the mean of their ranks."""
    return evolution.centered_ranks(-costs, ties="mean")


def standardized(costs):
    return evolution.zscore(-costs, eps=1e-8)


def shaped(shape):
    """As evosax has it, with the sign of a cost."""
    return lambda a: {"shaped": -shape(a["costs"])}


def run(optimizer, shape=ranks, *, pairs=True, sigmas=(SIGMA,) * STEPS, score=None):
    """A run from noise that is given; evosax has the other sides of all pairs in a second half."""

    def side_by_side(x):
        return jnp.stack(jnp.split(x, 2), 1).reshape(x.shape) if pairs else x

    def in_halves(x):
        return jnp.concatenate([x[::2], x[1::2]]) if pairs else x

    def compute(a):
        given = a["pair_draws" if pairs else "draws"]
        params = {"x": a["mean"]}
        classes = evolution.leaf_classes(params, others="full")
        members = jnp.arange(a["costs"].shape[-1])

        def step(carry, now):
            (params, state), (epoch, sigma, costs) = carry, now
            options = {"sigma": sigma, "pairs": pairs}

            def one(member):
                return evolution.perturb(params, classes, KEY, epoch, member, **options)["x"]

            population = jax.vmap(one)(members)
            costs = -score(population) if score else side_by_side(costs)
            fitness = shape(costs)
            grads = evolution.open_es_grad(params, classes, KEY, epoch, fitness, **options)
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), {"population": in_halves(population), "mean": params["x"]}

        steps = (jnp.arange(STEPS), jnp.array(sigmas), a["costs"])
        with mock.patch.object(
            noise.Draws, "dense", lambda self, shape: given[self.epoch][self.ids]
        ):
            _, found = jax.lax.scan(step, (params, optimizer.init(params)), steps)
        return found | {"sigma": jnp.array(sigmas)}

    return compute


def nothing(inputs, theirs):
    return {"shaped": np.zeros_like(theirs["shaped"])}


def still(draws):
    """The mean stays where it was, and the populations are around it."""

    def expected(inputs, theirs):
        noise = inputs[draws]
        noise = noise if draws == "draws" else np.concatenate([noise, -noise], axis=1)
        mean = np.broadcast_to(inputs["mean"], theirs["mean"].shape)
        return {"mean": mean, "population": mean[:, None] + SIGMA * noise}

    return expected


def where_equal(expected):
    reason = "evosax moves by the rounding of its shaped fitness, which Adam makes a whole step"
    return {"equal": Difference(reason, expected)}


SGD, ADAM = optax.sgd(0.2), optax.adam(0.05)
# The schedule is asked for step g after step g, so that its first value serves twice.
HALVES = (SIGMA, *(SIGMA / 2**step for step in range(STEPS - 1)))
TABLE = {
    "shaping_ranks": Ours(shaped(ranks)),
    "shaping_standardize": Ours(shaped(jax.vmap(standardized)), where_equal(nothing)),
    "sgd": Ours(run(SGD)),
    "adam": Ours(run(ADAM)),
    "adam_standardized": Ours(run(ADAM, standardized), where_equal(still("pair_draws"))),
    "not_shaped": Ours(run(SGD, jnp.negative)),
    "without_pairs": Ours(run(ADAM, pairs=False), where_equal(still("draws"))),
    "sigma_halves": Ours(run(SGD, sigmas=HALVES)),
    "sphere": Ours(run(ADAM, score=quadratic)),
}
TABLES = {"evosax_open_es": TABLE}
