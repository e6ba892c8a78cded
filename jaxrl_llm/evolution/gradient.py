"""The update: a gradient per leaf from shaped fitness and from noise that is drawn again.

The package describes shared arguments, and the TypeError and ValueError that every function raises.
"""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, ArrayTree, checks
from jaxrl_llm.evolution import _inputs, leaves, noise

Scale = Literal["step", "gradient", "mean"]
SCALES: tuple[Scale, ...] = ("step", "gradient", "mean")


def coefficient(scale: Scale, population: Array | int, sigma) -> Array | float:
    """The coefficient of ``sum_n F_n E_n``."""
    if scale == "step":
        return sigma / population**0.5
    return 1.0 / population if scale == "mean" else 1.0 / (population * sigma)


def graded_members(
    function: str, fitness: Array, where: Array | None, *, pairs: bool
) -> tuple[Array, Array | int]:
    """Fitness of all members as float32 ``[N]``, 0 where they do not count, and how many do."""
    checks.check_bool(function, where=where)
    checks.check_same_shape(function, fitness=fitness, where=where)
    if where is None:
        fitness = _inputs.population(function, fitness, pairs=pairs)
        return fitness, fitness.shape[0]
    fitness = _inputs.population(function, jnp.where(where, fitness, 0.0), pairs=pairs)
    return fitness, jnp.maximum(jnp.sum(where, dtype=jnp.float32), 1.0)


def check_scale(function: str, scale: str, allowed: tuple[str, ...], sigma) -> None:
    """Raises unless ``sigma`` is above 0 where it is used, and None elsewhere."""
    checks.check_option(function, "scale", scale, allowed)
    if scale == "mean":
        checks.check_no_effect(function, "with scale='mean'", sigma=sigma)
    elif sigma is None:
        raise ValueError(f"{function}: scale={scale!r} needs the sigma that the members had.")
    checks.check_positive(function, sigma=sigma)


def weights_of(fitness: Array, *, pairs: bool) -> Array:
    """The weight of each draw: the difference of its pair, or the fitness of its only member."""
    return fitness[::2] - fitness[1::2] if pairs else fitness


def sum_chunks(draws: Array, weights: Array, chunk: int, one: Callable) -> Array:
    """``sum of one(draws, weights)`` over chunks of draws, in float32, one chunk at a time."""
    count = draws.shape[0]
    if count <= chunk:
        return one(draws, weights)
    extra = -count % chunk
    # What fills the last chunk has weight 0.
    draws, weights = (jnp.pad(x, (0, extra)).reshape(-1, chunk) for x in (draws, weights))

    def add(total: Array, rows: tuple[Array, Array]) -> tuple[Array, None]:
        ids, weights = rows
        return total + one(ids, weights), None

    shape = jax.eval_shape(one, draws[0], weights[0])
    return jax.lax.scan(add, jnp.zeros(shape.shape, shape.dtype), (draws, weights))[0]


def _dtype(leaf: Array):
    """Dtype of a leaf's gradient: that of the leaf; float32 for integers."""
    return leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.float32


def eggroll_grad(
    params: ArrayTree,
    classes: ArrayTree,
    key: Array,
    epoch: Array | int,
    fitness: Array,
    *,
    sigma=None,
    rank: int = 1,
    dtype=jnp.float32,
    noise_reuse: int = 1,
    pairs: bool = True,
    draws: Array | None = None,
    where: Array | None = None,
    scale: Scale = "step",
    sign: bool = False,
    chunk: int = 64,
) -> ArrayTree:
    """The gradient for an optax optimizer, from the fitness of a population.

        grad = -c sum_n F_n E_n         E_n: noise of member n, drawn again

        scale="step":      c = sigma / sqrt(N)     with standardized fitness, one step of
                                                   optax.sgd(lr) has RMS lr sigma, whatever N and r
        scale="gradient":  c = 1 / (N sigma)       an estimate of minus the gradient of the fitness
        scale="mean":      c = 1 / N

    The sign is that of a loss: descent raises the fitness. A leaf needs one product per chunk, of
    contraction length ``chunk r``, in which a pair is one draw; only the noise of ``full`` leaves
    is made dense. The rank of a matrix's gradient is at most r times the number of draws. Frozen
    leaves get zeros; exclude them from weight decay with :func:`moving`.

    Args:
      params, classes, key, epoch, fitness, rank, dtype, noise_reuse, pairs, draws, where, chunk:
        See the package.
      sigma: Above 0; None with ``scale="mean"``.
      scale: The coefficient c.
      sign: Whether the update uses the signs of the factors; the members use the factors
        themselves.

    Returns:
      Pytree of the form of ``params``, in the dtypes of its leaves; float32 for integer leaves.

    Raises:
      ValueError: If a group ends inside a pair, ``sigma`` is missing, or ``sigma`` or ``sign`` has
        no effect.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> params, key = {"w": jnp.zeros((4, 3))}, jax.random.key(0)
      >>> classes = jr.evolution.leaf_classes(params)
      >>> def score(member):
      ...     perturbed = jr.evolution.perturb(params, classes, key, 0, member, sigma=0.1)
      ...     return -jnp.square(perturbed["w"] - 1.0).sum()
      >>> fitness = jr.evolution.zscore(jax.vmap(score)(jnp.arange(512)))
      >>> grads = jr.evolution.eggroll_grad(params, classes, key, 0, fitness, sigma=0.1)
      >>> bool((grads["w"] < 0).all())  # descent raises w towards 1
      True

    References:
      EGGROLL (arXiv:2511.16652), sec. 4. ``scale="step"`` follows the code: sigma multiplies, and
      SGD with ``lr`` is the paper's rule with ``alpha = lr sigma sqrt(N)``, which is
      ``scale="mean"``. ``sign=True`` is the variant of its repository that updates by signs.
    """
    leaves.check_evolution("eggroll_grad", params, classes, key, rank=rank, noise_reuse=noise_reuse)
    check_scale("eggroll_grad", scale, SCALES, sigma)
    _inputs.check_at_least("eggroll_grad", 1, chunk=chunk)
    fitness, population = graded_members("eggroll_grad", fitness, where, pairs=pairs)
    weights = weights_of(fitness, pairs=pairs)
    draws = jnp.arange(weights.shape[0]) if draws is None else draws
    checks.check_integer("eggroll_grad", draws=draws)
    checks.check_shape("eggroll_grad", "draws", draws, weights.shape)
    if sign and not set(jax.tree.leaves(classes)) & set(leaves.FACTORED):
        raise ValueError("eggroll_grad: sign has no effect where no leaf has noise of low rank.")
    factor = coefficient(scale, population, sigma)

    def one(key: Array, name: str, leaf) -> Array:
        drawn = noise.Draws(key, epoch, draws, dtype, noise_reuse)

        def full(ids: Array, weights: Array) -> Array:
            eps = drawn._replace(ids=ids).dense(leaf.shape)
            return jnp.tensordot(weights, eps.astype(jnp.float32), 1)

        def lowrank(ids: Array, weights: Array) -> Array:
            # sum_k w_k A_k B_k^T as one product of contraction length chunk r.
            a, b = map(noise.everywhere, drawn._replace(ids=ids).factors(leaf.shape, rank))
            if sign:
                a, b = jnp.sign(a), jnp.sign(b)
            a = a.astype(jnp.float32) * jnp.expand_dims(weights, range(1, a.ndim))
            return jnp.einsum("k...ir,k...jr->...ij", a, b.astype(jnp.float32))

        if name == "full":
            total = -factor * sum_chunks(draws, weights, chunk, full)
        else:
            total = -factor / math.sqrt(rank) * sum_chunks(draws, weights, chunk, lowrank)
        return total.astype(_dtype(leaf))

    moved = leaves.map_alike(params, classes, key, one)
    every = zip(jax.tree.leaves(params), moved, strict=True)
    grads = [jnp.zeros(leaf.shape, _dtype(leaf)) if x is None else x for leaf, x in every]
    return jax.tree.unflatten(jax.tree.structure(params), grads)
