"""Evolution strategies with full-rank noise, the reference for low-rank noise.

The package describes shared arguments, and the TypeError and ValueError that every function raises.
Every leaf that is not frozen gets noise, and a draw is as large as the parameters, so ``chunk`` is
1.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, ArrayTree
from jaxrl_llm.evolution import leaves
from jaxrl_llm.evolution.gradient import Scale, eggroll_grad


def full_rank(classes: ArrayTree) -> ArrayTree:
    """The same classes with full-rank noise for all leaves that are not frozen.

    Args:
      classes: See the package.

    Returns:
      Pytree of "full" and "frozen".

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.evolution.full_rank({"kernel": "lowrank", "bias": "frozen"}) == {
      ...     "kernel": "full", "bias": "frozen"}
      True

    References:
      OpenAI-ES (arXiv:1703.03864).
    """
    return jax.tree.map(lambda moves: "full" if moves else "frozen", leaves.moving(classes))


def open_es_grad(
    params: ArrayTree,
    classes: ArrayTree,
    key: Array,
    epoch: Array | int,
    fitness: Array,
    *,
    sigma=None,
    dtype=jnp.float32,
    noise_reuse: int = 1,
    pairs: bool = True,
    draws: Array | None = None,
    where: Array | None = None,
    scale: Scale = "gradient",
    chunk: int = 1,
) -> ArrayTree:
    """The gradient of OpenAI-ES: every entry of a leaf that is not frozen has independent noise.

        grad = -1 / (N sigma) sum_n F_n s_n eps_n

    The members are ``perturb(params, full_rank(classes), ...)``. With two members and unshaped
    fitness this is the estimate of MeZO, for the loss L = -F: ``g = (L(theta + sigma eps) - L(theta
    - sigma eps)) / (2 sigma) eps``.

    Args:
      params, classes, key, epoch, fitness, sigma, dtype, noise_reuse, pairs, draws, where, chunk:
        See the package.
      scale: As in :func:`eggroll_grad`; "step" makes the two comparable at one learning rate.

    Returns:
      Pytree of the form of ``params``, in the dtypes of its leaves.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> params = {"w": jnp.zeros(3)}
      >>> classes = jr.evolution.leaf_classes(params, others="full")
      >>> fitness = jr.evolution.centered_ranks(jnp.array([0.1, 0.4, 0.3, 0.2]))
      >>> grads = jr.evolution.open_es_grad(
      ...     params, classes, jax.random.key(0), 0, fitness, sigma=0.1)
      >>> grads["w"].shape
      (3,)

    References:
      OpenAI-ES (arXiv:1703.03864): ranks, Adam, decay of weights. MeZO (arXiv:2305.17333),
      ABSTRACT reading.
    """
    return eggroll_grad(
        params,
        full_rank(classes),
        key,
        epoch,
        fitness,
        sigma=sigma,
        dtype=dtype,
        noise_reuse=noise_reuse,
        pairs=pairs,
        draws=draws,
        where=where,
        scale=scale,
        chunk=chunk,
    )


def es_qiu_grad(
    params: ArrayTree,
    classes: ArrayTree,
    key: Array,
    epoch: Array | int,
    fitness: Array,
    *,
    dtype=jnp.float32,
    draws: Array | None = None,
    where: Array | None = None,
    chunk: int = 1,
) -> ArrayTree:
    """The gradient of plain evolution strategies for all parameters of a language model.

        theta <- theta + alpha / N sum_n Z_n eps_n,     Z = (R - mean(R)) / std(R)

    which is ``optax.sgd(alpha)`` with this gradient: ``1 / sigma`` is part of alpha, there are no
    pairs, no ranks and no optimizer beyond. The members are ``perturb(params, full_rank(classes),
    key, epoch, n, sigma=1e-3, pairs=False)`` with ``others="full"`` in the classes, R the mean
    reward of greedy answers, Z ``zscore(R, eps=0.0)``; the paper has N = 30 and alpha = 5e-4.

    Args:
      params, classes, key, epoch, dtype, draws, where, chunk: See the package.
      fitness: ``[N]``, Z: floating point and finite.

    Returns:
      Pytree of the form of ``params``, in the dtypes of its leaves.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> params = {"w": jnp.zeros(3)}
      >>> classes = jr.evolution.leaf_classes(params, others="full")
      >>> fitness = jr.evolution.zscore(jnp.array([0.2, 0.4, 0.9]), eps=0.0)
      >>> [round(value, 4) for value in fitness.tolist()]
      [-1.019, -0.3397, 1.3587]
      >>> args = params, jr.evolution.full_rank(classes), jax.random.key(0), 0
      >>> noise = [jr.evolution.perturb(*args, n, sigma=1.0, pairs=False)["w"] for n in range(3)]
      >>> grads = jr.evolution.es_qiu_grad(params, classes, jax.random.key(0), 0, fitness)
      >>> bool(jnp.allclose(grads["w"], -fitness @ jnp.stack(noise) / 3, atol=1e-5))
      True

    References:
      Qiu et al. (arXiv:2509.24372). Their first code draws all tensors of a member from one seed,
      so the noise of different tensors is partly equal; their later scripts and ours do not. They
      add 1e-8 to the deviation.
    """
    return eggroll_grad(
        params,
        full_rank(classes),
        key,
        epoch,
        fitness,
        dtype=dtype,
        pairs=False,
        draws=draws,
        where=where,
        scale="mean",
        chunk=chunk,
    )
