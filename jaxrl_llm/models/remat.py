"""Rematerialization: what the backward pass of a layer stores and what it recomputes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.kernels.barriers import always
from jaxrl_llm.models.sharding import splits_weights

_PRODUCT = "product"

# Everything; nothing but its input; what linear layers give.
POLICIES: dict[str, Callable | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(_PRODUCT),
}


def product(x: Array) -> Array:
    """Marks the output of a linear layer, for the policy that stores it."""
    return checkpoint_name(x, _PRODUCT)


def rematerialized(function: Callable, policy: Callable) -> Callable:
    """``jax.checkpoint`` that recomputes on CPUs too.

    On CPUs XLA removes the barriers between the two computations before it eliminates common
    subexpressions, and so it stores everything. Here the stored values pass through a conditional
    on the cotangent, whose outcome the compiler cannot know.
    """
    if jax.default_backend() != "cpu":
        return jax.checkpoint(function, policy=policy)

    run = jax.custom_vjp(function)

    def forward(*args):
        return jax.vjp(jax.checkpoint(function, policy=policy, prevent_cse=False), *args)

    def backward(pullback, cotangent):
        known = always(jax.tree.leaves(cotangent)[0])

        def fence(x):
            """A value, but no matrix of weights, as one that only the backward pass knows.

            Weights have two axes, or three for experts; activations have more.
            """
            fenced = jnp.ndim(x) not in (2, 3) and jnp.issubdtype(x.dtype, jnp.floating)
            return jnp.where(known, x, jnp.zeros_like(x)) if fenced else x

        return jax.tree.map(fence, pullback)(cotangent)

    run.defvjp(forward, backward)
    return run


def recomputed(function: Callable) -> Callable:
    """A function whose backward pass stores only the arguments."""
    return rematerialized(function, jax.checkpoint_policies.nothing_saveable)


def all_gather_after(weights: ArrayTree, *, after: Array) -> ArrayTree:
    """Weights of a layer whose all-gather waits for ``after``, and is repeated in each pass.

    Where a mesh splits weights, the CPU compiler moves the all-gathers of all layers before the
    first layer and keeps their results until the backward pass, which is the full model at once.
    """
    if jax.default_backend() != "cpu" or not splits_weights():
        return weights
    known = always(jax.lax.stop_gradient(after))
    return jax.tree.map(
        lambda w: jnp.where(known, w, jnp.zeros_like(w)) if w.ndim > 1 else w, weights
    )
