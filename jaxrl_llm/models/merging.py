"""Averages and merges of the parameters of models of one architecture.

Shared arguments:
  ``trees``, ``models``: sequences of parameters: pytrees of one structure, with leaves of one shape
    each.
  ``base``: parameters of the model that the others were trained from.
  ``vectors``: a sequence of task vectors, each the change by one training (:func:`task_vector`).
  ``weights``: one number per tree, adding up to 1; None for equal weights.
  ``scale``: the factor of the merged vector.

Everything is computed leaf by leaf in float32, and returned in the dtypes of the first tree or of
the base; a leaf that is not floating point is taken from there. The moving average of a run is
:func:`jaxrl_llm.regularizers.ema_reference`. All raise ValueError for trees that differ, with the
name of a leaf, and for an option out of range.
"""

import dataclasses
import numbers
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, ArrayTree, checks
from jaxrl_llm.core import trees as pytrees
from jaxrl_llm.models.lora import LoRAConfig, is_pair

# Below this sine two leaves point the same way, and the arc between them is a line.
_PARALLEL = 1e-6


def average_params(
    trees: Sequence[ArrayTree], weights: Sequence[float] | Array | None = None
) -> ArrayTree:
    """The weighted average of the parameters of several models: a soup.

        average = sum_i weights[i] * trees[i]

    Args:
      trees, weights: See the module.

    Returns:
      A pytree like the first.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> trees = {"w": jnp.array([2.0, 4.0])}, {"w": jnp.array([0.0, 2.0])}
      >>> jr.models.average_params(trees)
      {'w': Array([1., 3.], dtype=float32)}

    References:
      Chegini et al., SALSA (arXiv:2411.01798), ABSTRACT reading: the average of two independently
      fine-tuned models is the reference of the KL term; the equal weights are ours. Checkpoints of
      one run, with :func:`metric_weights`: arXiv:2504.18580.
    """
    trees = _check_trees("average_params", "the trees", trees)
    weights = _weights("average_params", weights, len(trees))
    return _leafwise(lambda *leaves: _weighted_sum(leaves, weights), trees)


def metric_weights(values: Array, *, power: float = 1.0, lower_is_better: bool = True) -> Array:
    """Weights of checkpoints by a metric, for :func:`average_params`.

        w_i = v_i^-p / sum_j v_j^-p  if lower is better,  else v_i^p / sum_j v_j^p

    A power of 0 gives equal weights; a large power selects the best value. A common factor of the
    values has no effect.

    Args:
      values: ``[..., n]``, numbers, not negative: losses, or steps from 1 with
        ``lower_is_better=False``. Below 1e-8 they count as 1e-8.
      power: p, not negative.
      lower_is_better: Whether a small value gets a large weight.

    Returns:
      ``[..., n]`` float32, adding up to 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.models.metric_weights(jnp.array([0.5, 0.5, 0.25]))
      Array([0.25, 0.25, 0.5 ], dtype=float32)

    References:
      Metrics-weighted averaging (arXiv:2504.18580), ABSTRACT reading: weights by loss or by step
      with one penalty; the form as a power is ours.
    """
    checks.check_min_rank("metric_weights", 1, values=values)
    checks.check_non_negative("metric_weights", finite=True, power=power)
    logs = jnp.log(jnp.maximum(jnp.asarray(values, jnp.float32), 1e-8))
    return jax.nn.softmax((-power if lower_is_better else power) * logs, axis=-1)


def extrapolate(new: ArrayTree, previous: ArrayTree, *, alpha: float) -> ArrayTree:
    """A step beyond the newest of two iterates, in the direction of the last step.

        new + alpha (new - previous)

    For policies that are a softmax of their parameters the result is
    ``pi_new (pi_new / pi_previous)^alpha``, normalized.

    Args:
      new: Parameters after an iteration.
      previous: Parameters before it.
      alpha: Not negative; 0 is no extrapolation.

    Returns:
      A pytree like ``new``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old, new = {"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([1.5, 1.0])}
      >>> jr.models.extrapolate(new, old, alpha=0.5)["w"].tolist()
      [1.75, 0.5]

    References:
      Accelerated preference optimization (arXiv:2410.06293), ABSTRACT reading: the policy that
      samples, and is the reference of, the next iteration of DPO or SPPO; alpha is about 0.3.
    """
    checks.check_non_negative("extrapolate", finite=True, alpha=alpha)
    pytrees.check_alike("extrapolate", "new and previous", new, previous)
    return _leafwise(lambda x, y: x + alpha * (x - y), (new, previous))


def task_vector(params: ArrayTree, base: ArrayTree) -> ArrayTree:
    """The change of the parameters by a training.

        tau = params - base

    Args:
      params: Parameters after the training.
      base: See the module.

    Returns:
      A pytree, float32; leaves that are not floating point are those of ``params``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.models.task_vector({"w": jnp.array([3.0])}, {"w": jnp.array([1.0])})["w"].tolist()
      [2.0]

    References:
      Ilharco et al. (arXiv:2212.04089).
    """
    pytrees.check_alike("task_vector", "params and base", params, base)
    return _leafwise(lambda x, y: x - y, (params, base), dtype=jnp.float32)


def task_arithmetic(
    base: ArrayTree, vectors: Sequence[ArrayTree], *, scale: float | Sequence[float] = 1.0
) -> ArrayTree:
    """The base with several task vectors added.

        base + sum_i scale_i tau_i

    With one vector and scale 1 the result is the trained model; with n vectors and scale 1/n it is
    the average. A negative scale removes a task.

    Args:
      base, vectors: See the module.
      scale: One number, or one per vector.

    Returns:
      A pytree like ``base``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> base, tau = {"w": jnp.array([1.0])}, {"w": jnp.array([2.0])}
      >>> jr.models.task_arithmetic(base, [tau, tau], scale=0.25)["w"].tolist()
      [2.0]

    References:
      Ilharco et al. (arXiv:2212.04089).
    """
    vectors = _check_vectors("task_arithmetic", base, vectors)
    scales = [scale] * len(vectors) if np.ndim(scale) == 0 else list(scale)  # type: ignore[arg-type]
    if len(scales) != len(vectors):
        raise ValueError(
            f"task_arithmetic: {len(vectors)} vectors need as many scales; got {len(scales)}."
        )
    return _leafwise(lambda x, *taus: x + _weighted_sum(taus, scales), (base, *vectors))


def ties_merge(
    base: ArrayTree,
    vectors: Sequence[ArrayTree],
    *,
    density: float = 0.2,
    scale: float = 1.0,
    weights: Sequence[float] | None = None,
) -> ArrayTree:
    """TIES: the largest entries of each task vector, restricted to those that agree in sign.

        t_i = the max(1, floor(density size)) entries of tau_i that are largest in absolute value
        sign = sign(sum_i w_i t_i)
        base + scale * (mean of the t_i that are not 0 and have that sign, weighed by w_i)

    Among equally large entries the first are selected. Where the sum is 0, no change is added.

    Args:
      base, vectors, scale, weights: See the module.
      density: Share of entries, in (0, 1].

    Returns:
      A pytree like ``base``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> base = {"w": jnp.zeros(4)}
      >>> vectors = {"w": jnp.array([2.0, -0.1, 1.0, 0.1])}, {"w": jnp.array([1.0, 3.0, 0.0, -0.2])}
      >>> jr.models.ties_merge(base, vectors, density=0.5)["w"]
      Array([1.5, 3. , 1. , 0. ], dtype=float32)

    References:
      Yadav et al. (arXiv:2306.01708): density 0.2. mergekit weights the vectors in the same way.
    """
    vectors = _check_vectors("ties_merge", base, vectors)
    checks.check_share("ties_merge", zero=False, density=density)
    weights = _weights("ties_merge", weights, len(vectors))

    def merge(x: Array, *taus: Array) -> Array:
        trimmed = [_largest(tau, density) for tau in taus]
        sign = jnp.sign(_weighted_sum(trimmed, weights))
        agree = [(jnp.sign(t) == sign) & (sign != 0) for t in trimmed]
        of_sign = [jnp.where(a, t, 0.0) for a, t in zip(agree, trimmed, strict=True)]
        total = _weighted_sum(of_sign, weights)
        share = _weighted_sum(agree, weights)
        return x + scale * total / jnp.where(share > 0, share, 1.0)

    return _leafwise(merge, (base, *vectors))


def dare(key: Array, vector: ArrayTree, *, drop: float) -> ArrayTree:
    """DARE: a random part of a task vector, scaled so that its expectation is the vector.

        tau_j / (1 - drop)  with probability 1 - drop, else 0

    Follow it with :func:`task_arithmetic` or :func:`ties_merge`.

    Args:
      key: A typed key; the draw of a leaf depends only on the key and the leaf's path.
      vector: A task vector.
      drop: In [0, 1).

    Returns:
      A pytree like ``vector``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> sparse = jr.models.dare(jax.random.key(0), {"w": jnp.ones(1000)}, drop=0.75)["w"]
      >>> sorted(set(sparse.tolist())), bool(abs(sparse.mean() - 1) < 0.2)
      ([0.0, 4.0], True)

    References:
      Yu et al. (arXiv:2311.03099).
    """
    checks.check_share("dare", one=False, drop=drop)

    def one(path: str, x: Any) -> Any:
        if not pytrees.is_floating(x):
            return x
        stays = jax.random.bernoulli(
            jax.random.fold_in(key, zlib.crc32(path.encode())), 1.0 - drop, jnp.shape(x)
        )
        scaled = jnp.where(stays, jnp.asarray(x, jnp.float32) / (1.0 - drop), 0.0)
        return scaled.astype(jnp.result_type(x))

    return pytrees.map_with_path(one, vector)


def slerp(first: ArrayTree, second: ArrayTree, *, t: float) -> ArrayTree:
    """Spherical interpolation between two models, leaf by leaf.

        [sin((1 - t) w) a + sin(t w) b] / sin w,   w the angle between a and b

    Each leaf is treated as one vector. If the two have the same direction, or one is 0, the result
    is ``(1 - t) a + t b``.

    Args:
      first: Parameters at t = 0.
      second: Parameters at t = 1.
      t: In [0, 1].

    Returns:
      A pytree like ``first``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> a, b = {"w": jnp.array([1.0, 0.0])}, {"w": jnp.array([0.0, 2.0])}
      >>> jr.models.slerp(a, b, t=0.5)["w"].round(4)
      Array([0.7071, 1.4142], dtype=float32)

    References:
      Shoemake (1985). mergekit interpolates linearly above a cosine of 0.9995.
    """
    checks.check_share("slerp", t=t)
    pytrees.check_alike("slerp", "first and second", first, second)

    def arc(a: Array, b: Array) -> Array:
        u, v = (x / jnp.maximum(jnp.linalg.norm(x.ravel()), 1e-30) for x in (a, b))
        # Exact for small angles, where the arc cosine of a float32 is not.
        w = 2.0 * jnp.arctan2(jnp.linalg.norm((u - v).ravel()), jnp.linalg.norm((u + v).ravel()))
        line = (jnp.sin(w) < _PARALLEL) | ~jnp.any(a) | ~jnp.any(b)
        sine = jnp.where(line, 1.0, jnp.sin(w))
        along = (jnp.sin((1.0 - t) * w) * a + jnp.sin(t * w) * b) / sine
        return jnp.where(line, (1.0 - t) * a + t * b, along)

    return _leafwise(arc, (first, second))


def model_stock(base: ArrayTree, models: Sequence[ArrayTree]) -> ArrayTree:
    """Model stock: between base and average, nearer to the average the more the models agree.

        ratio = k c / (1 + (k - 1) c),   c the mean cosine between two task vectors of a leaf
        ratio * average + (1 - ratio) * base

    Task vectors that point away from each other (c below 0) give a ratio below 0, which grows
    without bound as c nears ``-1 / (k - 1)``; at and below that it is 0.

    Args:
      base: See the module.
      models: k of them, at least 2.

    Returns:
      A pytree like ``base``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> base = {"w": jnp.zeros(2)}
      >>> models = {"w": jnp.array([1.0, 0.0])}, {"w": jnp.array([0.0, 1.0])}
      >>> jr.models.model_stock(base, models)["w"]  # at right angles they agree on nothing
      Array([0., 0.], dtype=float32)

    References:
      Jang et al. (arXiv:2403.19522); the mean over the pairs is mergekit's reading.
    """
    models = _check_trees("model_stock", "the models", models)
    if len(models) < 2:
        raise ValueError(f"model_stock: there must be at least two models; got {len(models)}.")
    pytrees.check_alike("model_stock", "base and models", base, models[0])
    k = len(models)

    def merge(x: Array, *leaves: Array) -> Array:
        taus = jnp.stack([(leaf - x).ravel() for leaf in leaves])
        norms = jnp.linalg.norm(taus, axis=-1, keepdims=True)
        units = taus / jnp.maximum(norms, 1e-30)
        products = jnp.matmul(units, units.T, precision=jax.lax.Precision.HIGHEST)
        cosine = jnp.sum(jnp.triu(products, 1)) / (k * (k - 1) / 2)
        below = 1.0 + (k - 1) * cosine
        ratio = jnp.where(below > 1e-6, k * cosine / jnp.maximum(below, 1e-6), 0.0)
        return x + ratio * jnp.mean(taus, axis=0).reshape(x.shape)

    return _leafwise(merge, (base, *models))


def iso_c(base: ArrayTree, vectors: Sequence[ArrayTree], *, scale: float = 1.0) -> ArrayTree:
    """Iso-C: the sum of task vectors with all singular values made equal.

        U S V = sum_i tau_i of a matrix:   base + scale mean(S) U V
        of a leaf that is no matrix:       base + scale mean_i(tau_i)

    In a stack ``[E, in, out]`` at ``.../experts/.../kernel`` each expert's matrix has its own
    singular values. Biases, also those of experts ``[E, out]``, are no matrices.

    Args:
      base, vectors, scale: See the module.

    Returns:
      A pytree like ``base``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> base, tau = {"w": jnp.zeros((2, 2))}, {"w": jnp.diag(jnp.array([3.0, 1.0]))}
      >>> jr.models.iso_c(base, [tau])["w"].round(4) + 0.0
      Array([[2., 0.],
             [0., 2.]], dtype=float32)

    References:
      Marczak et al. (arXiv:2502.04959), and its released code, which leaves out one projection of
      its image model; here every matrix is included, also the embedding.
    """
    vectors = _check_vectors("iso_c", base, vectors)

    def merge(path: str, x: Array, *taus: Array) -> Array:
        total = _weighted_sum(taus, [1.0] * len(taus))
        *modules, last = path.split("/")
        stack = x.ndim == 3 and last == "kernel" and "experts" in modules
        if not stack and (x.ndim != 2 or last == "bias"):
            return x + scale * total / len(taus)
        u, s, v = jnp.linalg.svd(total, full_matrices=False)
        size = jnp.mean(s, axis=-1)[..., None, None]
        return x + scale * size * jnp.matmul(u, v, precision=jax.lax.Precision.HIGHEST)

    return _leafwise(merge, (base, *vectors), with_path=True)


def average_lora(
    adapters: Sequence[ArrayTree],
    weights: Sequence[float] | None = None,
    *,
    config: LoRAConfig,
) -> tuple[ArrayTree, LoRAConfig]:
    """The average of several adapters, as one adapter of a higher rank.

        A = [A_1 A_2 ...],   B = [w_1 B_1; w_2 B_2; ...],   so that A B = sum_i w_i A_i B_i

    Averaging the factors A and B separately would give a different matrix.

    Args:
      adapters: Adapters of the same base, all with the configuration ``config``.
      weights: See the module.
      config: The configuration of each.

    Returns:
      The adapter, and its configuration: n times the rank at the same scale.

    Example:
      >>> import jax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> config = jr.train.LoRAConfig(rank=2, alpha=4.0)
      >>> adapter = jr.train.init_lora(params, config)
      >>> _, merged = jr.models.average_lora([adapter, adapter], config=config)
      >>> merged.rank, merged.scale == config.scale
      (4, True)

    References:
      LoRA (arXiv:2106.09685); PEFT's "cat" combination.
    """
    function = "average_lora"
    adapters = _check_trees(function, "the adapters", adapters)
    shares = _weights(function, weights, len(adapters))
    rank, scale = config.rank, config.scale
    if rank is None:
        raise ValueError(f"{function}: the configuration has no rank.")

    def join(pairs: Sequence[Any]) -> Any:
        if not is_pair(pairs[0]):
            return {name: join([pair[name] for pair in pairs]) for name in pairs[0]}
        if pairs[0]["a"].shape[-1] != rank:
            raise ValueError(
                f"{function}: the configuration has rank {rank}, but an adapter has rank "
                f"{pairs[0]['a'].shape[-1]}."
            )
        down = [jnp.asarray(pair["a"], jnp.float32) for pair in pairs]
        up = [
            w * jnp.asarray(pair["b"], jnp.float32) for w, pair in zip(shares, pairs, strict=True)
        ]
        return {"a": jnp.concatenate(down, axis=-1), "b": jnp.concatenate(up, axis=-2)}

    wide = rank * len(adapters)
    return join(adapters), dataclasses.replace(config, rank=wide, alpha=scale * wide)


def _check_trees(function: str, what: str, trees: Sequence[ArrayTree]) -> tuple[ArrayTree, ...]:
    trees = tuple(trees)
    if not trees:
        raise ValueError(f"{function}: {what} must be at least one; got none.")
    for tree in trees[1:]:
        pytrees.check_alike(function, what, trees[0], tree)
    return trees


def _check_vectors(function: str, base: ArrayTree, vectors) -> tuple[ArrayTree, ...]:
    vectors = _check_trees(function, "the vectors", vectors)
    pytrees.check_alike(function, "base and vectors", base, vectors[0])
    return vectors


def _weights(function: str, weights: Any, count: int) -> Any:
    """One weight a tree, adding up to 1 as far as that is known."""
    weights = [1.0 / count] * count if weights is None else weights
    if len(weights) != count:
        raise ValueError(f"{function}: {count} trees need {count} weights; got {len(weights)}.")
    if all(isinstance(w, numbers.Real) for w in weights) and abs(sum(weights) - 1.0) > 1e-6:
        raise ValueError(f"{function}: the weights must add up to 1; got {sum(weights):g}.")
    return weights


def _weighted_sum(leaves: Sequence[Array], weights: Any) -> Array:
    total = jnp.float32(0)
    for weight, leaf in zip(weights, leaves, strict=True):
        total = total + weight * leaf
    return total


def _leafwise(
    f: Callable[..., Array], trees: Sequence[ArrayTree], dtype=None, *, with_path: bool = False
) -> ArrayTree:
    """``f`` of the leaves of the trees in float32, in the dtype of the first or another.

    ``with_path``: whether the path of the leaves is its first argument.
    """

    def one(path, first: Any, *others: Any) -> Any:
        if not pytrees.is_floating(first):
            return first
        before = (pytrees.path_str(path),) if with_path else ()
        value = f(*before, *(jnp.asarray(leaf, jnp.float32) for leaf in (first, *others)))
        return value.astype(jnp.result_type(first) if dtype is None else dtype)

    return jax.tree_util.tree_map_with_path(one, *trees)


def _largest(x: Array, density: float) -> Array:
    """The largest entries in absolute value, the first ones of those equally large; 0 else."""
    size = jnp.abs(x).ravel()
    count = max(1, int(density * size.shape[0] + 1e-6))
    least = jnp.sort(size)[size.shape[0] - count]
    above, level = size > least, size == least
    stays = above | (level & (jnp.cumsum(level) <= count - jnp.sum(above)))
    return jnp.where(stays.reshape(x.shape), x, 0.0)
