"""Reference policies that are not the first checkpoint: soups, moving averages, resets.

``reference`` and ``params`` are pytrees of parameters of one structure and of leaves of one shape
each; otherwise ValueError is raised. A rule works leaf by leaf, in float32 where it computes, and
returns a pytree in the dtypes of the ``reference``.
"""

import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxrl_llm.core import Array, ArrayTree, checks


def soup(trees: Sequence[ArrayTree], weights: Sequence[float] | Array | None = None) -> ArrayTree:
    """Weighted average of the parameters of several models of one architecture.

        soup = sum_i weights[i] * trees[i]

    A leaf that is not floating point is taken from the first tree.

    Args:
      trees: Pytrees of one structure with leaves of one shape each.
      weights: One number a tree, adding up to 1; None for equal ones.

    Returns:
      A pytree in the dtypes of the first.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> trees = {"w": jnp.array([2.0, 4.0])}, {"w": jnp.array([0.0, 2.0])}
      >>> jr.regularizers.soup(trees)
      {'w': Array([1., 3.], dtype=float32)}

    References:
      Chegini et al., SALSA (arXiv:2411.01798), ABSTRACT reading: the average of two independently
      fine-tuned models is the reference of the KL term; the equal weights are ours.
    """
    trees = tuple(trees)
    if not trees:
        raise ValueError("soup: there must be at least one tree; got none.")
    count = len(trees)
    weights = [1.0 / count] * count if weights is None else weights
    if len(weights) != count:
        raise ValueError(f"soup: {count} trees need {count} weights; got {len(weights)}.")
    if all(isinstance(w, numbers.Real) for w in weights) and abs(sum(weights) - 1.0) > 1e-6:
        raise ValueError(f"soup: the weights must add up to 1; got {sum(weights):g}.")
    for tree in trees[1:]:
        _check_alike("soup", "the trees", trees[0], tree)

    def mix(*leaves):
        if not _floating(leaves[0]):
            return leaves[0]
        total = jnp.float32(0)
        for weight, leaf in zip(weights, leaves, strict=True):
            total = total + weight * jnp.asarray(leaf, jnp.float32)
        return total.astype(jnp.result_type(leaves[0]))

    return jax.tree.map(mix, *trees)


def ema_reference(
    reference: ArrayTree,
    params: ArrayTree,
    step: int | Array | None = None,
    *,
    rate: float | Array = 0.05,
) -> ArrayTree:
    """Moves a reference a little toward the policy: an exponential moving average.

        reference = (1 - rate) * reference + rate * params

    Hold the reference in float32: in bfloat16 a small step from a close policy rounds to nothing. A
    leaf that is not floating point is taken from the policy.

    Args:
      reference, params: See the module.
      step: Not used: a Recipe calls all rules for its reference alike.
      rate: Share of the policy in the new reference, between 0 and 1.

    Returns:
      A pytree like ``reference``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> jr.regularizers.ema_reference({"w": jnp.zeros(1)}, {"w": jnp.ones(1)}, rate=0.25)
      {'w': Array([0.25], dtype=float32)}

    References:
      The teacher of SDPO (arXiv:2601.20802): 0.05 a step, 0.01 with rich feedback. The Polyak
      average of SAFE's target critic is the same with 0.05.
    """
    checks.check_share("ema_reference", rate=rate)
    _check_alike("ema_reference", "reference and params", reference, params)

    def mix(old, new):
        if not _floating(old):
            return new
        start = jnp.asarray(old, jnp.float32)
        return (start + rate * (jnp.asarray(new, jnp.float32) - start)).astype(jnp.result_type(old))

    return jax.tree.map(mix, reference, params)


def reset_reference(
    reference: ArrayTree,
    params: ArrayTree,
    step: int | Array,
    *,
    every: int,
    times: int | None = None,
) -> ArrayTree:
    """Replaces a reference by the policy at every so manieth step.

        reference = params if step > 0 and step % every == 0 and step <= times every else reference

    Args:
      reference, params: See the module.
      step: How many updates have been made; may be traced.
      every: Steps between resets, above 0.
      times: How many resets there are; None for no end.

    Returns:
      A pytree like ``reference``.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxrl_llm as jr
      >>> old, new = {"w": jnp.zeros(1)}, {"w": jnp.ones(1)}
      >>> [jr.regularizers.reset_reference(old, new, n, every=3)["w"].item() for n in range(4)]
      [0.0, 0.0, 0.0, 1.0]

    References:
      Liang et al., ReMix (arXiv:2507.06892), once; Liu et al., ProRL (arXiv:2505.24864),
      repeatedly.
    """
    checks.check_positive("reset_reference", finite=True, every=every, times=times)
    _check_alike("reset_reference", "reference and params", reference, params)
    due = (jnp.asarray(step) > 0) & (jnp.asarray(step) % every == 0)
    if times is not None:
        due &= jnp.asarray(step) <= times * every
    return jax.tree.map(
        lambda old, new: jnp.where(due, jnp.asarray(new).astype(jnp.result_type(old)), old),
        reference,
        params,
    )


def _floating(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _check_alike(function: str, what: str, first: ArrayTree, other: ArrayTree) -> None:
    """Raises ValueError unless two trees have one structure and leaves of the same shapes."""
    structures = jax.tree.structure(first), jax.tree.structure(other)
    if structures[0] != structures[1]:
        raise ValueError(
            f"{function}: {what} must have one structure; got {structures[0]} and {structures[1]}."
        )
    paths = jax.tree_util.tree_leaves_with_path(first)
    for (path, x), y in zip(paths, jax.tree.leaves(other), strict=True):
        if jnp.shape(x) != jnp.shape(y):
            raise ValueError(
                f"{function}: {what} must have leaves of the same shapes; "
                f"{jax.tree_util.keystr(path, simple=True, separator='/')} has {jnp.shape(x)} and "
                f"{jnp.shape(y)}."
            )
