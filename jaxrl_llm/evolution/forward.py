"""The perturbed model: layers, the parameters of one member, and the delta of a population.

The package describes shared arguments, and the TypeError and ValueError that every function raises.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from jaxrl_llm.core import Array, ArrayTree, checks, trees
from jaxrl_llm.evolution import leaves, noise
from jaxrl_llm.evolution.noise import LowRank


def eggroll_matmul(
    x: Array, w: Array, perturbation: LowRank | None, *, sigma, transpose: bool = False
) -> Array:
    """A linear layer with a member's low-rank noise, which is never made dense.

        y = x W + (sign sigma / sqrt(r)) (x A) B^T               W [in, out]
        y = x W^T + (sign sigma / sqrt(r)) (x B) A^T             transpose:  W [out, in]

    The first product has the same weights for all members, so a batch of members is one product;
    only the low-rank term differs by member. The mean over a pair is the plain layer.

    Args:
      x, perturbation, sigma: See the package.
      w, transpose: ``[in, out]``, or ``[out, in]`` with ``transpose``.

    Returns:
      ``[..., T, out]``, in the dtype of ``x``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> w = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
      >>> a, b = jnp.array([[1.0], [0.0], [-1.0]]), jnp.array([[2.0], [1.0]])
      >>> noise = jr.evolution.LowRank(a, b, jnp.array(1.0))
      >>> x = jnp.array([[1.0, -1.0]])
      >>> y = jr.evolution.eggroll_matmul(x, w, noise, sigma=0.1, transpose=True)
      >>> [round(value, 4) for value in y[0].tolist()]
      [-0.9, -1.0, -1.1]

    References:
      EGGROLL (arXiv:2511.16652), sec. 4.
    """
    checks.check_min_rank("eggroll_matmul", 2, x=x)
    checks.check_rank("eggroll_matmul", 2, w=w)
    checks.check_non_negative("eggroll_matmul", sigma=sigma)
    if x.shape[-1] != w.shape[1 if transpose else 0]:
        raise ValueError(f"eggroll_matmul: x {x.shape} does not match w {w.shape}.")
    y = x @ (w.T if transpose else w).astype(x.dtype)
    if perturbation is None:
        return y
    _check_factors("eggroll_matmul", w, perturbation)
    first, second = perturbation.a, perturbation.b
    if transpose:
        first, second = second, first
    scale = _scale(perturbation, sigma)
    low = jnp.matmul(x, first.astype(x.dtype))
    change = jnp.matmul(low, jnp.swapaxes(second, -1, -2).astype(x.dtype))
    return (y + scale * change).astype(x.dtype)


def eggroll_embed(tokens: Array, w: Array, perturbation: LowRank | None, *, sigma) -> Array:
    """Rows of an embedding with a member's noise; only the rows that are read are computed.

        y[t] = W[t] + (sign sigma / sqrt(r)) A[t] B^T

    Args:
      tokens, perturbation, sigma: See the package.
      w: ``[V, D]``.

    Returns:
      ``[..., T, D]``, in the dtype of ``w``.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> w, members = jnp.zeros((5, 3)), jnp.arange(2)
      >>> noise = jr.evolution.lowrank_noise(jax.random.key(0), 0, members, w.shape)
      >>> rows = jr.evolution.eggroll_embed(jnp.ones((2, 4), int), w, noise, sigma=0.1)
      >>> rows.shape, bool((rows[0] == -rows[1]).all())
      ((2, 4, 3), True)

    References:
      EGGROLL (arXiv:2511.16652), its paper and its integer code; the float code has no noise for
      embeddings.
    """
    checks.check_min_rank("eggroll_embed", 1, tokens=tokens)
    checks.check_integer("eggroll_embed", tokens=tokens)
    checks.check_rank("eggroll_embed", 2, w=w)
    checks.check_non_negative("eggroll_embed", sigma=sigma)
    y = w[tokens]
    if perturbation is None:
        return y
    _check_factors("eggroll_embed", w, perturbation)
    low = noise.take_rows(perturbation.a, tokens)
    change = jnp.matmul(low, jnp.swapaxes(perturbation.b, -1, -2))
    return (y + _scale(perturbation, sigma) * change).astype(w.dtype)


def _scale(perturbation: LowRank, sigma) -> Array:
    rank = perturbation.a.shape[-1]
    return noise.sign_and_scale(perturbation.sign, sigma, rank)[..., None, None]


def _check_factors(function: str, w: Array, perturbation: LowRank) -> None:
    a, b = perturbation.a, perturbation.b
    if (a.shape[-2], b.shape[-2]) != w.shape or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"{function}: factors {a.shape} and {b.shape} do not match w {w.shape}.")


def perturb(
    params: ArrayTree,
    classes: ArrayTree,
    key: Array,
    epoch: Array | int,
    member: Array | int,
    *,
    sigma,
    rank: int = 1,
    dtype=jnp.float32,
    noise_reuse: int = 1,
    pairs: bool = True,
    baseline: int = 0,
) -> ArrayTree:
    """The parameters of one member, in full: for small models and for tests.

        W_n = W + sign sigma A B^T / sqrt(r)               full:  W_n = W + sign sigma eps

    ``jax.vmap`` over ``member`` gives a population. For a language model this needs too much
    memory; use :func:`model_delta`, which has the same noise.

    Args:
      params, classes, key, epoch, member, sigma, rank, dtype, noise_reuse, pairs, baseline: See the
        package.

    Returns:
      Parameters of the same form and dtypes; int8 leaves become float32.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> params = {"w": jnp.eye(3)}
      >>> args = (params, jr.evolution.leaf_classes(params), jax.random.key(0), 0)
      >>> up, down = (jr.evolution.perturb(*args, n, sigma=0.1)["w"] for n in (0, 1))
      >>> bool(jnp.allclose((up + down) / 2, params["w"]))
      True

    References:
      EGGROLL (arXiv:2511.16652), sec. 4.
    """
    leaves.check_evolution(
        "perturb", params, classes, key, rank=rank, noise_reuse=noise_reuse, sigma=sigma
    )
    draw, sign = noise.antithetic(jnp.asarray(member), pairs=pairs, baseline=baseline)
    checks.check_rank("perturb", 0, member=draw)

    def change(key: Array, name: str, leaf) -> Array:
        drawn = noise.Draws(key, epoch, draw, dtype, noise_reuse)
        if name == "full":
            eps = drawn.dense(leaf.shape).astype(jnp.float32)
            return noise.sign_and_scale(sign, sigma) * eps
        a, b = drawn.factors(leaf.shape, rank)
        product = jnp.matmul(a, b.mT, preferred_element_type=jnp.float32)
        return noise.sign_and_scale(sign, sigma, rank) * product

    def moved(leaf: Array, by: Array | None) -> Array:
        if by is None:
            return leaf
        to = leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.float32
        return (leaf + by).astype(to)

    changes = leaves.map_alike(params, classes, key, change)
    leaves_of_params, form = jax.tree.flatten(params)
    return jax.tree.unflatten(form, map(moved, leaves_of_params, changes))


def model_delta(
    params: ArrayTree,
    classes: ArrayTree,
    key: Array,
    epoch: Array | int,
    members: Array,
    *,
    sigma,
    rank: int = 1,
    dtype=jnp.float32,
    noise_reuse: int = 1,
    pairs: bool = True,
    baseline: int = 0,
    share_pairs: bool = False,
) -> dict:
    """A population as the low-rank delta that a model of this library takes.

    Each entry is at the path of the module of its leaves:

        kernel      (A [..., in, r], B^T [..., r, out], scale [..., 1, 1]); of experts, A and B^T
                    have their axis E in front of the last two
        and bias    a fourth entry [..., 1, out], already scaled; alone, the first three are None
        embedding   as kernel, with A [..., V, r]
        scale       of a norm: an array [..., 1, size], already scaled

    ``model.apply`` adds it to the weights of each row of a batch ``[P, G]``, so that one batch
    holds many members; the sampler takes one with a single leading axis, as ``deltas``.

    Args:
      params, classes, key, epoch, sigma, rank, dtype, noise_reuse, pairs, baseline: See the
        package.
      members: int ``[P, G]``, or ``[N]`` for the sampler: the member of each row.
      share_pairs: Whether the factors of a pair are stored once, ``[N / 2, ...]``, with a scale for
        each member. ``model.apply`` and the sampler of a population accept this form too; it halves
        the memory.

    Returns:
      Nested dict, without frozen leaves.

    Raises:
      ValueError: If a leaf that is not frozen is none of the above or is a bias of experts, or if
        ``share_pairs`` is True and ``members`` is no numpy array of complete pairs, side by side.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> classes = jr.evolution.leaf_classes(params)
      >>> members = jnp.arange(4)[None]
      >>> delta = jr.evolution.model_delta(
      ...     params, classes, jax.random.key(0), 0, members, sigma=0.01)
      >>> [x.shape for x in delta["layers"]["0"]["mlp"]["up"]]
      [(1, 4, 32, 1), (1, 4, 1, 64), (1, 4, 1, 1)]

    References:
      EGGROLL (arXiv:2511.16652), sec. 4.
    """
    leaves.check_evolution(
        "model_delta", params, classes, key, rank=rank, noise_reuse=noise_reuse, sigma=sigma
    )
    draw, sign = noise.antithetic(members, pairs=pairs, baseline=baseline)
    # Known while tracing: a jax array of ids may hold any.
    known = pairs and isinstance(members, np.ndarray) and members.ndim == 1
    known = known and len(members) % 2 == 0
    if share_pairs and not (
        known and ((members[::2] % 2 == 0) & (members[1::2] == members[::2] + 1)).all()
    ):
        raise ValueError(
            "model_delta: share_pairs needs members [N] that are a numpy array of complete pairs, "
            "side by side."
        )
    of_factors = draw[::2] if share_pairs else draw
    rows = leaves.by_leaf(params, classes)
    keys = {trees.path_str(path): path for path, _ in jax.tree.leaves_with_path(params)}
    for path, leaf, name in rows:
        *module, leaf_name = path.split("/")
        if name != "frozen" and not all(isinstance(key, DictKey) for key in keys[path]):
            raise ValueError(
                "model_delta: parameters that take a delta must be nested dicts; "
                f"{path!r} is not in dicts alone."
            )
        if name != "frozen" and leaf_name == "bias" and len(leaf.shape) == 2:
            raise ValueError(
                f"model_delta: {path!r} is of experts, whose biases take no noise by row: it can "
                "only be 'frozen'."
            )
        expected = {"kernel": "lowrank", "embedding": "embedding", "bias": "full", "scale": "full"}
        if name != "frozen" and (expected.get(leaf_name) != name or not module):
            raise ValueError(
                f"model_delta: no model takes a delta for {path!r} as {name!r}; it can be "
                f"'frozen'"
                + (f" or {expected[leaf_name]!r}." if leaf_name in expected and module else ".")
            )

    def entry(key: Array, name: str, leaf):
        drawn = noise.Draws(key, epoch, draw, dtype, noise_reuse)
        if name == "full":
            eps = drawn.dense(leaf.shape).astype(jnp.float32)
            return (noise.sign_and_scale(sign, sigma)[..., None] * eps)[..., None, :]
        a, b = drawn._replace(ids=of_factors).factors(leaf.shape, rank)
        return a, jnp.swapaxes(b, -1, -2)

    delta: dict = {}
    scale = noise.sign_and_scale(sign, sigma, rank)[..., None, None]
    entries = leaves.map_alike(params, classes, key, entry)
    for (path, _, name), made in zip(rows, entries, strict=True):
        if name == "frozen":
            continue
        *around, module, leaf_name = (key.key for key in keys[path])
        made = made if name == "full" else (*made, scale)
        node = functools.reduce(lambda node, part: node.setdefault(part, {}), around, delta)
        if leaf_name == "bias":  # it joins the entry of its kernel
            made = (*node.get(module, (None, None, None)), made)
        elif leaf_name == "kernel" and module in node:
            made = (*made, node[module][3])
        node[module] = made
    return delta
