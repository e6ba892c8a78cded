"""Updates that are no numbers: left out inside the step, counted, and too many end the run."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core import trees
from jaxrl_llm.core.axes import Array, ArrayTree


def keep(made: Array, new: ArrayTree, old: ArrayTree) -> ArrayTree:
    """The new tree where ``made``, else the old one bit for bit; it is a choice, not a product."""
    return jax.tree.map(lambda a, b: jnp.where(made, a, b), new, old)


def stays_finite(old: ArrayTree, new: ArrayTree) -> Array:
    """Whether no number of a state became NaN or infinite; one that was before may stay so."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    checked = [
        jnp.all(jnp.isfinite(a) | ~jnp.isfinite(b))
        for a, b in pairs
        if jnp.issubdtype(a.dtype, jnp.floating)
    ]
    return jnp.all(jnp.stack(checked)) if checked else jnp.bool_(True)


def guarded_update(
    optimizer: optax.GradientTransformation,
    carry: tuple[ArrayTree, ArrayTree],
    loss: Array,
    grads: ArrayTree,
    *,
    scale: Array | None = None,
    sound: Array | bool = True,
) -> tuple[tuple[ArrayTree, ArrayTree], dict[str, Array]]:
    """One update of an optimizer, or none where the loss or its gradient is no finite number.

    Nor is there one where the update itself is none, unless the optimizer multiplies matrices.

    Parameters and state are written in their place. Compilers for GPUs do that where each leaf is
    chosen between old and new, since one kernel makes all three of its numbers; the others copy the
    old ones first, so that there everything stands in the branches of conditionals, whose results
    compilers for GPUs would copy. The norm of the update comes before it, since beside the update
    it would keep the old state: an update without matrix products is computed a second time for it,
    which takes less.

    Args:
      optimizer: Any optax transformation; one that takes extra arguments is told ``grad_norm``.
      carry: Parameters and the optimizer's state.
      loss: ``[]``.
      grads: Its gradient.
      scale: ``[]``, multiplies the optimizer's update; None leaves it as it is.
      sound: Whether all else that the update rests on is finite.

    Returns:
      Parameters and state after it, and the metrics ``loss``, ``grad_norm``, ``update_norm`` (0 if
      there was none) and ``skipped`` (1 if there was none).
    """
    norm = trees.norm(grads)  # no number if any gradient is none
    made = jnp.isfinite(loss) & jnp.isfinite(norm) & sound
    if scale is not None:
        made &= jnp.isfinite(scale)

    update = optax.with_extra_args_support(optimizer).update

    def changed(grads, carry):
        params, opt_state = carry
        changes, opt_state = update(grads, opt_state, params, grad_norm=norm)
        if scale is not None:
            changes = jax.tree.map(lambda x: (scale * x).astype(x.dtype), changes)
        return (optax.apply_updates(params, changes), opt_state), trees.norm(changes)

    write = _chosen if jax.default_backend() == "gpu" else _branched
    carry, update_norm, made = write(made, changed, grads, carry)
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "update_norm": update_norm,
        "skipped": 1.0 - made.astype(jnp.float32),
    }
    return carry, metrics


def _branched(made: Array, changed: Callable, grads: ArrayTree, carry):
    """What ``changed`` makes of parameters and state, its norm and whether it was made."""

    def stay(grads, carry):
        return carry, jnp.zeros_like(trees.norm(grads))

    of = (grads, carry)
    if _multiplies(changed, *of):
        return *jax.lax.cond(made, changed, stay, *of), made
    norm = jax.lax.cond(made, _item(changed, 1), _item(stay, 1), *of)
    # Known before the update is made, it can keep one out that is no number. That the second
    # branch waits for the first is also what lets it write over what both read.
    made &= jnp.isfinite(norm)
    carry = jax.lax.cond(made, _item(changed, 0), _item(stay, 0), *of)
    return carry, jnp.where(made, norm, 0.0), made


def _chosen(made: Array, changed: Callable, grads: ArrayTree, carry):
    """:func:`_branched`, leaf by leaf."""
    new, norm = changed(grads, carry)
    if not _multiplies(changed, grads, carry):
        made &= jnp.isfinite(norm)
        made, grads, carry = jax.lax.optimization_barrier((made, grads, carry))
        new, _ = changed(grads, carry)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(carry), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):  # a choice would promote it
            raise TypeError(
                f"guarded_update: the optimizer makes {a.dtype}{list(a.shape)} of what was "
                f"{b.dtype}{list(b.shape)}."
            )
    return keep(made, new, carry), jnp.where(made, norm, 0.0), made


def _item(function, index: int):
    return lambda *args: function(*args)[index]


def _multiplies(function, *args) -> bool:
    """Whether a function multiplies matrices: then it is not computed twice for little."""
    return "dot_general" in str(jax.make_jaxpr(function)(*args))
