"""Tasks that return only a score, and a loop that maximizes it.

A point is a floating point array ``x [..., D]``. Its score ``[...]`` is at most 0; higher is
better. A wrong dtype raises TypeError, a scalar ValueError. Another task is in ``control``.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm import evolution
from jaxrl_llm.core import Array, ArrayTree, checks, masking
from jaxrl_llm.evolution import _inputs


def quadratic(x: Array, center: Array | float = 0.0) -> Array:
    """An inverted bowl with its maximum, 0, at ``center``.

        f(x) = -sum_i (x_i - c_i)^2

    For noise ``e`` of mean 0 and variance 1 in each entry, ``E f(x + sigma e) = f(x) - sigma^2 D``.
    ``center`` is c, ``[D]`` or a number. The negative of f is the standard sphere function.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.testing.quadratic(jnp.array([[1.0, 2.0], [0.0, 0.0]]), 1.0).tolist()
      [-1.0, -2.0]
    """
    _check_point("quadratic", x)
    return -jnp.sum(jnp.square(x - center), axis=-1)


def rastrigin(x: Array) -> Array:
    """An inverted bowl with a local maximum near every integer point; the best is 0 at the origin.

        f(x) = -sum_i (x_i^2 + 10 (1 - cos(2 pi x_i)))

    The local maxima that trap gradient ascent hardly affect the mean score of a population. Noise
    of scale sigma shrinks the waves to a share of their height,

        E f(x + sigma e) = -sum_i (x_i^2 + sigma^2 + 10 (1 - share cos(2 pi x_i)))

        share = (1 + (2 pi sigma)^2 / r)^(-r / 2)     rank r
        share = exp(-(2 pi sigma)^2 / 2)              full rank

    so noise of rank 1, which has mostly small entries, smooths the least.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.testing.rastrigin(jnp.array([[0.5, 0.0], [1.0, 2.0]])).round().tolist()
      [-20.0, -5.0]

    References:
      Rastrigin (1974), with the opposite sign: the usual benchmarks minimize it.
    """
    _check_point("rastrigin", x)
    waves = 10.0 * (1.0 - jnp.cos(2.0 * math.pi * x))
    return -jnp.sum(jnp.square(x) + waves, axis=-1)


def _check_point(function: str, x: Array) -> None:
    checks.check_min_rank(function, 1, x=x)
    checks.check_float(function, x=x)


def evolve(
    params: ArrayTree,
    key: Array,
    score: Callable[[ArrayTree, int], Any],
    *,
    steps: int,
    optimizer: optax.GradientTransformation,
    population: int = 64,
    sigma: float = 0.1,
    rank: int | None = 1,
    shape: Callable[..., Array] = evolution.zscore,
) -> tuple[ArrayTree, np.ndarray]:
    """Evolution strategies on any score: perturb, score, shape, and one step of an optimizer.

    For tests and notebooks. All leaves are trained. A member with a non-finite score is left out
    with its partner.

    Args:
      params: Pytree of floating point arrays.
      key: Typed key of the run.
      score: ``(members, step) -> scores [N]``. Every leaf of the members' parameters has a leading
        axis N. The function need not be traceable.
      steps: Number of steps.
      optimizer: An optax optimizer. It gets the gradient of :func:`eggroll_grad` at scale "step".
      population: N, even: members 2k and 2k+1 are a pair.
      sigma: Scale of the noise.
      rank: Rank of the noise of matrices; other leaves have noise of full rank. None means full
        rank for all leaves, which is OpenAI-ES.
      shape: Maps scores ``[N]`` to fitness, called as ``shape(scores, where=)``.

    Returns:
      ``(params, history)``; the history is the mean score of each step's population, float32
      ``[steps]``.

    Raises:
      TypeError: If ``key`` is not one typed key or a count is not an integer.
      ValueError: If ``population`` is odd, ``sigma`` is not above 0, or ``rank`` is out of range.

    Example:
      >>> import jax, optax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> params, history = jr.testing.evolve(
      ...     {"x": jnp.ones((2, 3))}, jax.random.key(0),
      ...     lambda members, step: jr.testing.quadratic(members["x"].reshape(-1, 6)),
      ...     steps=40, optimizer=optax.adam(0.1))
      >>> bool(history[0] < -5 and history[-1] > -0.5)
      True

    References:
      EGGROLL (arXiv:2511.16652); OpenAI-ES (arXiv:1703.03864).
    """
    _inputs.check_at_least("evolve", 0, steps=steps)
    _inputs.check_at_least("evolve", 2, population=population)
    if population % 2:
        raise ValueError(f"evolve: population must be even, for it is of pairs; got {population}.")
    classes = evolution.leaf_classes(params, others="full")
    grad: Callable
    if rank is None:
        rank, classes, grad = 1, evolution.full_rank(classes), evolution.open_es_grad
    else:
        grad = functools.partial(evolution.eggroll_grad, rank=rank)

    @jax.jit
    def members_of(params, step):
        def one(member):
            return evolution.perturb(params, classes, key, step, member, sigma=sigma, rank=rank)

        return jax.vmap(one)(jnp.arange(population))

    @jax.jit
    def update(params, state, scores, step):
        where = evolution.graded(scores)
        grads = grad(
            params,
            classes,
            key,
            step,
            shape(scores, where=where),
            sigma=sigma,
            where=where,
            scale="step",
            chunk=64,
        )
        updates, state = optimizer.update(grads, state, params)
        mean = masking.masked_mean(scores, jnp.isfinite(scores))
        return optax.apply_updates(params, updates), state, mean

    state, history = optimizer.init(params), []
    for step in range(steps):
        scores = jnp.asarray(score(members_of(params, step), step), jnp.float32)
        checks.check_shape("evolve", "score(...)", scores, (population,))
        params, state, mean = update(params, state, scores, step)
        history.append(mean)
    return params, np.asarray(history, np.float32)
