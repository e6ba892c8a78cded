"""Non-finite updates: skipped inside the step, and counted."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import Array, ArrayTree


def keep(applied: Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """The new tree where ``applied``, else the old one bit for bit; a choice, not a product."""
    return jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, old)


def stays_finite(old: ArrayTree, new: ArrayTree) -> Array:
    """Whether no value of a state became non-finite; one that was before may stay so."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    checked = [
        jnp.all(jnp.isfinite(a) | ~jnp.isfinite(b))
        for a, b in pairs
        if jnp.issubdtype(a.dtype, jnp.floating)
    ]
    return jnp.all(jnp.stack(checked)) if checked else jnp.bool_(True)


def apply_if_finite(
    optimizer: optax.GradientTransformation,
    carry: tuple[ArrayTree, ArrayTree],
    loss: Array,
    grads: ArrayTree,
    *,
    scale: Array | None = None,
    finite: Array | bool = True,
) -> tuple[tuple[ArrayTree, ArrayTree], dict[str, Array]]:
    """One step of an optimizer, skipped where the loss, its gradient or the update is non-finite.

    The update itself is not checked if the optimizer multiplies matrices.

    Parameters and state are written in place. Compilers for GPUs do that where each leaf is a
    choice between old and new, since one kernel makes all three of its arrays. Compilers for CPUs
    and TPUs copy the old leaves first, so there the update stands in the branches of
    conditionals, whose results compilers for GPUs would copy. The norm of the update is computed
    before the update is made, since computed with it the norm would keep the old state alive: an
    update without matrix products is computed twice, which costs less than the copy.

    Args:
      optimizer: Any optax transformation; one that takes extra arguments gets ``grad_norm``.
      carry: Parameters and the optimizer's state.
      loss: ``[]``.
      grads: Its gradient.
      scale: ``[]``, multiplies the optimizer's update; None leaves it as it is.
      finite: Whether everything else that the update depends on is finite.

    Returns:
      Parameters and state after the step, and the metrics ``loss``, ``grad_norm``, ``update_norm``
      (0 if skipped) and ``skipped`` (1 if skipped).
    """
    norm = trees.norm(grads)  # non-finite if any gradient is
    applied = jnp.isfinite(loss) & jnp.isfinite(norm) & finite
    if scale is not None:
        applied &= jnp.isfinite(scale)

    update = optax.with_extra_args_support(optimizer).update

    def changed(grads, carry):
        params, opt_state = carry
        changes, opt_state = update(grads, opt_state, params, grad_norm=norm)
        if scale is not None:
            changes = jax.tree.map(lambda x: (scale * x).astype(x.dtype), changes)
        return (optax.apply_updates(params, changes), opt_state), trees.norm(changes)

    write = _by_choice if jax.default_backend() == "gpu" else _by_branch
    carry, update_norm, applied = write(applied, changed, grads, carry)
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "update_norm": update_norm,
        "skipped": 1.0 - applied.astype(jnp.float32),
    }
    return carry, metrics


def _by_branch(applied: Array, changed: Callable, grads: ArrayTree, carry):
    """Parameters and state after ``changed``, the norm of the update, whether it was applied."""

    def stay(grads, carry):
        return carry, jnp.zeros_like(trees.norm(grads))

    if _multiplies(changed, grads, carry):
        return *jax.lax.cond(applied, changed, stay, grads, carry), applied
    norm = jax.lax.cond(applied, _item(changed, 1), _item(stay, 1), grads, carry)
    # Known before the update is made, the norm can stop a non-finite one. That the second branch
    # waits for the first is also what lets it write over the arrays that both read.
    applied &= jnp.isfinite(norm)
    carry = jax.lax.cond(applied, _item(changed, 0), _item(stay, 0), grads, carry)
    return carry, jnp.where(applied, norm, 0.0), applied


def _by_choice(applied: Array, changed: Callable, grads: ArrayTree, carry):
    """:func:`_by_branch`, leaf by leaf."""
    new, norm = changed(grads, carry)
    if not _multiplies(changed, grads, carry):
        applied &= jnp.isfinite(norm)
        applied, grads, carry = jax.lax.optimization_barrier((applied, grads, carry))
        new, _ = changed(grads, carry)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(carry), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):  # a choice would promote it
            raise TypeError(
                f"apply_if_finite: the optimizer turns {b.dtype}{list(b.shape)} into "
                f"{a.dtype}{list(a.shape)}."
            )
    return keep(applied, new, carry), jnp.where(applied, norm, 0.0), applied


def _item(function, index: int):
    return lambda *args: function(*args)[index]


def _multiplies(function, *args) -> bool:
    """Whether a function multiplies matrices: then computing it twice would cost too much."""
    return "dot_general" in str(jax.make_jaxpr(function)(*args))
