"""Variants of EGGROLL: a baseline of the unperturbed model, and noise at only a few entries.

The third variant of its repository, an update by signs, is an option of the gradient. The package
describes shared arguments, and the TypeError and ValueError that every function raises.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, checks, masking, stats
from jaxrl_llm.evolution import _inputs, gradient, noise


class Sparse(NamedTuple):
    """Noise at k entries of one matrix, for each of some members.

    Attributes:
      rows: int32 ``[..., k]``.
      columns: int32 ``[..., k]``.
      values: ``[..., k]``, standard normal; values of an entry that is drawn twice are added.
      sign: float32 ``[...]``.
    """

    rows: Array
    columns: Array
    values: Array
    sign: Array


def baseline_fitness(scores: Array, *, where: Array | None = None, eps: float = 1e-8) -> Array:
    """Scores relative to the unperturbed model, which is the first two members.

        Z = (S - S[:, 0]) / (std(S) + eps),  Z[:, :2] = 0,  F = mean_q Z       std of each question

    Args:
      scores: ``[Q, G]``, floating point; members 0 and 1 carry no noise (``baseline=2`` of the
        functions that draw it).
      where: bool ``[Q, G]``, True for scores that count, by :func:`graded`; None for all, which
        must be finite. Others add 0 to the mean over questions, and so do all scores of a question
        without that of member 0.
      eps: Added to the deviation, not negative.

    Returns:
      float32 ``[G]``.

    Raises:
      ValueError: If there are fewer than four members, or an odd number of them.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> scores = jnp.array([[1.0, 3, 0, 2], [0, 0, 1, 1]])
      >>> jr.evolution.baseline_fitness(scores).round(4).tolist()
      [0.0, 0.0, 0.552..., 1.447...]

    References:
      The variant with a baseline in the code of EGGROLL (arXiv:2511.16652). It clips the gradient
      to norm 1: chain ``optax.clip_by_global_norm(1.0)`` before the optimizer.
    """
    checks.check_rank("baseline_fitness", 2, scores=scores)
    stats.check_group("baseline_fitness", scores, where, name="scores")
    scores = masking.zero_masked(scores, where)
    checks.check_non_negative("baseline_fitness", eps=eps)
    members = scores.shape[-1]
    if members < 4 or members % 2:
        raise ValueError(
            f"baseline_fitness: scores must be of an even number of members, at least 4; "
            f"got shape {scores.shape}."
        )
    deviation = stats.group_std(scores, where, ddof=0) + eps
    centered = (scores - scores[:, :1]) / jnp.where(deviation > 0, deviation, 1.0)
    flat = stats.group_is_constant(scores, where) | (jnp.arange(members) < 2)
    if where is not None:
        flat |= ~(where & where[:, :1])
    return jnp.mean(jnp.where(flat, 0.0, centered), axis=0)


def _sparse(draws: noise.Draws, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Rows, columns and values ``[..., k]`` of a leaf's draws; unchecked."""
    count = max(shape)

    # Each side alone: the number of an entry may be beyond int32.
    def places(side: int, end: int) -> Array:
        of_side = draws._replace(key=jax.random.fold_in(draws.key, side))
        return of_side.each(lambda key: jax.random.randint(key, (count,), 0, end))

    values = draws._replace(key=jax.random.fold_in(draws.key, 2)).dense((count,))
    return places(0, shape[0]), places(1, shape[1]), values


def sparse_noise(
    key: Array,
    epoch: Array | int,
    members: Array,
    shape: tuple[int, int],
    *,
    dtype=jnp.float32,
    noise_reuse: int = 1,
    pairs: bool = True,
    baseline: int = 0,
) -> Sparse:
    """Noise at ``k = max(a, b)`` entries of a matrix, drawn with replacement.

        S[i_j, c_j] += v_j,   j = 1 .. k,     v standard normal,  (i, c) uniform

    An entry of S has mean 0 and variance ``q = k / (a b)``.

    Args:
      key, epoch, members, shape, dtype, noise_reuse, pairs, baseline: See the package.

    Returns:
      :class:`Sparse`, with the axes of ``members`` in front.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> noise = jr.evolution.sparse_noise(jax.random.key(0), 0, jnp.arange(4), (3, 5))
      >>> noise.rows.shape, int(noise.columns.max()) < 5
      ((4, 5), True)

    References:
      The sparse variant in the repository of EGGROLL (arXiv:2511.16652), written afresh.
    """
    checks.check_key("sparse_noise", key)
    _inputs.check_matrix("sparse_noise", shape, 1)
    _inputs.check_at_least("sparse_noise", 0, noise_reuse=noise_reuse)
    draw, sign = noise.antithetic(members, pairs=pairs, baseline=baseline)
    rows, columns, values = _sparse(noise.Draws(key, epoch, draw, dtype, noise_reuse), shape)
    return Sparse(rows, columns, values, sign)


def sparse_matmul(x: Array, w: Array, perturbation: Sparse | None, *, sigma) -> Array:
    """A linear layer with a member's sparse noise.

        y = x W,   y[..., c_j] += sign sigma v_j x[..., i_j]

    Args:
      x, perturbation, sigma: See the package.
      w: ``[in, out]``.

    Returns:
      ``[..., T, out]``, in the dtype of ``x``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> w, x = jnp.zeros((3, 5)), jnp.ones((2, 1, 3))
      >>> noise = jr.evolution.sparse_noise(jax.random.key(0), 0, jnp.arange(2), w.shape)
      >>> y = jr.evolution.sparse_matmul(x, w, noise, sigma=0.1)
      >>> y.shape, bool((y[0] == -y[1]).all())
      ((2, 1, 5), True)

    References:
      The sparse variant in the repository of EGGROLL (arXiv:2511.16652), which takes one row of
      activations at a time.
    """
    checks.check_min_rank("sparse_matmul", 2, x=x)
    checks.check_rank("sparse_matmul", 2, w=w)
    checks.check_non_negative("sparse_matmul", sigma=sigma)
    if x.shape[-1] != w.shape[0]:
        raise ValueError(f"sparse_matmul: x {x.shape} does not match w {w.shape}.")
    y = x @ w.astype(x.dtype)
    if perturbation is None:
        return y
    lead, outputs = perturbation.sign.shape, w.shape[1]
    if x.shape[: len(lead)] != lead:
        raise ValueError(f"sparse_matmul: x {x.shape} needs the members {lead} in front.")
    values = noise.sign_and_scale(perturbation.sign, sigma)[..., None] * perturbation.values

    def change(x: Array, rows: Array, columns: Array, values: Array) -> Array:
        zeros = jnp.zeros((*x.shape[:-1], outputs), jnp.float32)
        return zeros.at[..., columns].add(x[..., rows] * values)

    for _ in lead:
        change = jax.vmap(change)
    return (y + change(x, perturbation.rows, perturbation.columns, values)).astype(x.dtype)


def sparse_grad(
    key: Array,
    epoch: Array | int,
    fitness: Array,
    shape: tuple[int, int],
    *,
    sigma,
    dtype=jnp.float32,
    noise_reuse: int = 1,
    pairs: bool = True,
    where: Array | None = None,
    scale: Literal["step", "gradient"] = "step",
) -> Array:
    """The gradient of one matrix whose members had sparse noise.

        grad = -c sum_n F_n s_n S_n,   q = k / (a b)

        scale="step":      c = sigma / sqrt(N q)         RMS of a step lr sigma, as elsewhere
        scale="gradient":  c = 1 / (N sigma q)           an estimate of the gradient

    Args:
      key, epoch, fitness, shape, sigma, dtype, noise_reuse, pairs, where: See the package.
      scale: The coefficient of the sum.

    Returns:
      float32 ``[a, b]``, for an optimizer that descends.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> fitness = jnp.array([1.0, -1.0])
      >>> grad = jr.evolution.sparse_grad(jax.random.key(0), 0, fitness, (3, 5), sigma=0.1)
      >>> int((grad != 0).sum()) <= 5
      True

    References:
      The sparse variant in the repository of EGGROLL (arXiv:2511.16652) multiplies by q, although
      an estimate of the gradient divides by it; its author marks this as to be verified.
    """
    checks.check_key("sparse_grad", key)
    _inputs.check_matrix("sparse_grad", shape, 1)
    _inputs.check_at_least("sparse_grad", 0, noise_reuse=noise_reuse)
    gradient.check_scale("sparse_grad", scale, ("step", "gradient"), sigma)
    fitness, population = gradient.graded_members("sparse_grad", fitness, where, pairs=pairs)
    weights = gradient.weights_of(fitness, pairs=pairs)
    share = max(shape) / (shape[0] * shape[1])
    factor = gradient.coefficient(scale, population, sigma)
    factor = factor / (share**0.5 if scale == "step" else share)
    draws = noise.Draws(key, epoch, jnp.arange(weights.shape[0]), dtype, noise_reuse)
    rows, columns, values = _sparse(draws, shape)
    weighted = values.astype(jnp.float32) * weights[:, None]
    return -factor * jnp.zeros(shape, jnp.float32).at[rows, columns].add(weighted)
