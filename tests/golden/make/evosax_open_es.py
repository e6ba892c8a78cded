"""Writes estimators/evosax_open_es.*: evosax's OpenAI-ES.

python tests/golden/make/evosax_open_es.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from estimator_cases import Writer
from evosax.algorithms.distribution_based.open_es import Open_ES
from evosax.core import fitness_shaping

STEPS, MEMBERS, SIZE, SIGMA = 6, 16, 5, 0.3
SHAPING = {
    "ranks": fitness_shaping.centered_rank_fitness_shaping_fn,
    "standardize": fitness_shaping.standardize_fitness_shaping_fn,
    "identity": fitness_shaping.identity_fitness_shaping_fn,
}


def run_cases():
    """Where a run begins, what it draws, and costs that it is told, step by step."""

    def case(seed, costs=None):
        rng = np.random.default_rng((40, seed))
        costs = rng.normal(size=(STEPS, MEMBERS)) if costs is None else costs(rng)
        keys = jax.random.split(jax.random.key(seed), STEPS)
        draws = [jax.random.normal(key, (MEMBERS, SIZE)) for key in keys]
        halves = [jax.random.normal(key, (MEMBERS // 2, SIZE)) for key in keys]
        return {
            "seed": np.asarray(seed, np.int32),
            "mean": rng.normal(size=SIZE).astype(np.float32),
            "costs": costs.astype(np.float32),
            "draws": np.stack(draws),
            "pair_draws": np.stack(halves),
        }

    return {
        "normal": case(1),
        "ties": case(2, lambda rng: rng.integers(0, 3, (STEPS, MEMBERS))),
        "equal": case(3, lambda rng: np.full((STEPS, MEMBERS), 0.7)),
    }


def run(shaping, optimizer, *, pairs=True, schedule=None, cost=None):
    """A whole run: its populations, the mean after each step, and the deviations of the noise."""

    def compute(case, a):
        algorithm = Open_ES(
            MEMBERS,
            jnp.zeros(SIZE),
            use_antithetic_sampling=pairs,
            optimizer=optimizer,
            std_schedule=schedule or optax.constant_schedule(SIGMA),
            fitness_shaping_fn=SHAPING[shaping],
        )
        params = algorithm.default_params
        keys = jax.random.split(jax.random.key(int(a["seed"])), STEPS)
        state = algorithm.init(keys[0], jnp.asarray(a["mean"]), params)
        found = {"population": [], "mean": [], "sigma": []}
        for step, key in enumerate(keys):
            found["sigma"].append(float(state.std))
            population, state = algorithm.ask(key, state, params)
            costs = jnp.asarray(a["costs"][step]) if cost is None else cost(population)
            state, _ = algorithm.tell(key, population, costs, state, params)
            found["population"].append(population)
            found["mean"].append(algorithm.get_mean(state))
        return {name: np.asarray(x) for name, x in found.items()}

    return compute


def shape(shaping):
    def compute(case, a):
        shaped = [SHAPING[shaping](None, jnp.asarray(x), None, None) for x in a["costs"]]
        return {"shaped": np.stack(shaped)}

    return compute


def main():
    packages = ["evosax", "jax", "jaxlib", "optax", "flax", "numpy"]
    writer = Writer("evosax_open_es", "evosax", packages, "evosax_open_es.py")
    writer.inputs("runs", run_cases())
    for shaping in ("ranks", "standardize"):
        writer.add(f"shaping_{shaping}", shape(shaping))
    sgd, adam = optax.sgd(0.2), optax.adam(0.05)
    halving = optax.exponential_decay(SIGMA, 1, 0.5)
    computes = {
        "sgd": run("ranks", sgd),
        "adam": run("ranks", adam),
        "adam_standardized": run("standardize", adam),
        "not_shaped": run("identity", sgd),
        "without_pairs": run("ranks", adam, pairs=False),
        "sigma_halves": run("ranks", sgd, schedule=halving),
        "sphere": run("ranks", adam, cost=lambda x: jnp.sum(x**2, axis=-1)),
    }
    for name, compute in computes.items():
        writer.add(name, compute)
    writer.save()


if __name__ == "__main__":
    main()
