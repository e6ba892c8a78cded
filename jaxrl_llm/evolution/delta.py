"""A population as the delta that a model's forward pass takes beside its weights."""

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core import Array, ArrayTree
from jaxrl_llm.evolution import leaves, noise


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

    An entry stands where the module of its leaves stands:

        kernel      (A [..., in, r], B^T [..., r, out], scale [..., 1, 1])
        and bias    a fourth entry [..., 1, out], already scaled; alone, the first three are None
        embedding   as kernel, with A [..., V, r]
        scale       of a norm: an array [..., 1, size], already scaled

    ``model.apply`` adds it to the weights of each row of a batch ``[P, G]``, so that one batch
    holds many members; the sampler takes one with a single leading axis, as ``deltas``.

    Args:
      params: Pytree of arrays, or of their shapes: a nested dict.
      classes: Pytree of class names, by :func:`leaf_classes`.
      key: A typed key, that of the whole run.
      epoch: int ``[]``, updates made so far.
      members: int ``[P, G]``, or ``[N]`` for the sampler: which member each row is.
      sigma: Scale of the noise, not negative; 0 for the plain model.
      rank: Of the noise of matrices.
      dtype: Of the noise; it decides what is drawn.
      noise_reuse: For how many epochs a draw stays; 1 draws afresh at each, 0 never.
      pairs: Whether members 2k and 2k+1 share a draw, with opposite signs.
      baseline: How many of the first members carry no noise.
      share_pairs: Whether the factors of a pair stand there once, ``[N / 2, ...]``, beside a scale
        for each member. ``model.apply`` and the sampler of a population take that as well, in half
        of the memory.

    Returns:
      Nested dict, without what is frozen.

    Raises:
      TypeError: If ``key`` is not one typed key or the ids are not integers.
      ValueError: If ``classes`` does not fit, an option is out of its range, a leaf is none of
        those above, or pairs are to be shared where ``members`` is no numpy array of whole pairs,
        side by side.

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
    shared = {"rank": rank, "noise_reuse": noise_reuse, "sigma": sigma}
    options = {"dtype": dtype, "noise_reuse": noise_reuse}
    leaves.check_evolution("model_delta", params, classes, key, **shared)
    draw, sign = noise.antithetic(members, pairs=pairs, baseline=baseline)
    if share_pairs and not _whole_pairs(members, pairs):
        raise ValueError(
            "model_delta: share_pairs needs members [N] that are a numpy array of whole pairs, "
            "side by side."
        )
    of_factors = draw[::2] if share_pairs else draw
    found = leaves.by_leaf(params, classes)
    for path, _, name in found:
        *module, own = path.split("/")
        expected = {"kernel": "lowrank", "embedding": "embedding", "bias": "full", "scale": "full"}
        if name != "frozen" and (expected.get(own) != name or not module):
            raise ValueError(
                f"model_delta: no model takes a delta for {path!r} as {name!r}; it can be "
                f"'frozen'" + (f" or {expected[own]!r}." if own in expected and module else ".")
            )

    def entry(key: Array, name: str, leaf):
        if name == "full":
            eps = noise.dense(key, epoch, draw, leaf.shape, **options).astype(jnp.float32)
            return (noise.sign_and_scale(sign, sigma)[..., None] * eps)[..., None, :]
        a, b = noise.factors(key, epoch, of_factors, leaf.shape, rank=rank, **options)
        return a, jnp.swapaxes(b, -1, -2)

    delta: dict = {}
    scale = noise.sign_and_scale(sign, sigma, rank)[..., None, None]
    entries = leaves.map_alike(params, classes, key, entry)
    for (path, _, name), made in zip(found, entries, strict=True):
        if name != "frozen":
            *module, own = path.split("/")
            _put(delta, module, own, made if name == "full" else (*made, scale))
    return delta


def _whole_pairs(members: Array, pairs: bool) -> bool:
    """Whether it is known while tracing that members ``2k, 2k + 1`` stand side by side."""
    if not (pairs and isinstance(members, np.ndarray) and members.ndim == 1):
        return False
    first, second = members[::2], members[1::2]
    return len(members) % 2 == 0 and bool(((first % 2 == 0) & (second == first + 1)).all())


def _put(delta: dict, module: list[str], own: str, entry) -> None:
    """Sets the entry of a module; a bias joins that of its kernel."""
    for part in module[:-1]:
        delta = delta.setdefault(part, {})
    there = delta.get(module[-1])
    if own == "bias":
        entry = (*(there or (None, None, None)), entry)
    elif own == "kernel" and there is not None:
        entry = (*entry, there[3])
    delta[module[-1]] = entry
