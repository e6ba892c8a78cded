"""A log-linear policy over eight responses a prompt, trained on preferences of them.

Each prompt has responses with features that all prompts share, and a response's merit is linear in
them. The reference is uniform. Preferences are by Bradley and Terry of the merits. The policy is
trained by Adam on all of its data at once, for as many steps as make it the minimizer.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

PROMPTS, RESPONSES, WIDTH = 64, 8, 16
SPREAD = 2.0  # standard deviation of merits


class Task(NamedTuple):
    """Features ``[N, A, W]`` and merits ``[N, A]``."""

    features: jax.Array
    merit: jax.Array


class Pairs(NamedTuple):
    """Prompts, and which of their responses is chosen and rejected: ``[M]`` each."""

    prompts: jax.Array
    chosen: jax.Array
    rejected: jax.Array


def make_task(key: jax.Array, *, prompts: int = PROMPTS, responses: int = RESPONSES) -> Task:
    first, second = jax.random.split(key)
    features = jax.random.normal(first, (prompts, responses, WIDTH))
    direction = jax.random.normal(second, (WIDTH,))
    return Task(features, features @ (SPREAD * direction / jnp.linalg.norm(direction)))


def log_policy(params: jax.Array, task: Task) -> jax.Array:
    """Log-probabilities ``[N, A]`` of the responses; parameters of zeros are the reference."""
    return jax.nn.log_softmax(task.features @ params, axis=-1)


def draw_pairs(key: jax.Array, task: Task, count: int, *, flipped: float = 0.0) -> Pairs:
    """Pairs of two different responses, labeled by their merits; a share has the labels flipped."""
    of_prompt, of_pair, of_label, of_flip = jax.random.split(key, 4)
    size, responses = task.merit.shape
    prompts = jax.random.randint(of_prompt, (count,), 0, size)
    both = jax.random.split(of_pair, count)
    both = jax.vmap(lambda k: jax.random.choice(k, responses, (2,), replace=False))(both)
    merit = task.merit[prompts[:, None], both]
    wins = jax.random.uniform(of_label, (count,)) < jax.nn.sigmoid(merit[:, 0] - merit[:, 1])
    wins ^= jax.random.uniform(of_flip, (count,)) < flipped
    chosen = jnp.where(wins, both[:, 0], both[:, 1])
    return Pairs(prompts, chosen, jnp.where(wins, both[:, 1], both[:, 0]))


def of_pairs(params: jax.Array, task: Task, pairs: Pairs) -> tuple[jax.Array, ...]:
    """Log-probabilities ``[M]``: chosen, rejected, and both under the reference."""
    at = [(pairs.prompts, x) for x in (pairs.chosen, pairs.rejected)]
    policies = (log_policy(x, task) for x in (params, jnp.zeros_like(params)))
    return tuple(logp[place] for logp in policies for place in at)


def train(
    objective: Callable[[jax.Array], jax.Array], *, steps: int = 600, rate: float = 0.02
) -> jax.Array:
    """Parameters ``[W]`` after Adam's steps on ``objective(params) -> []``, from the reference."""
    optimizer = optax.adam(rate)
    start = jnp.zeros(WIDTH)

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(objective)(params), state)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), None, steps)
    return params


def expected_merit(params: jax.Array, task: Task) -> jax.Array:
    """Of a response of the policy, less that of the reference: a mean over prompts."""
    merit = jnp.sum(jnp.exp(log_policy(params, task)) * task.merit, axis=-1)
    return jnp.mean(merit - jnp.mean(task.merit, axis=-1))


def similar_pairs(key: jax.Array, task: Task) -> Pairs:
    """Of each prompt, the better of two responses that are much alike: a random one, its nearest.

    The nearest is that of the greatest inner product of features.
    """
    size, responses = task.merit.shape
    prompts, first = jnp.arange(size), jax.random.randint(key, (size,), 0, responses)
    alike = jnp.einsum("nw,naw->na", task.features[prompts, first], task.features)
    alike = alike.at[prompts, first].set(-jnp.inf)
    second = jnp.argmax(alike, axis=-1)
    better = task.merit[prompts, first] > task.merit[prompts, second]
    return Pairs(prompts, jnp.where(better, first, second), jnp.where(better, second, first))
