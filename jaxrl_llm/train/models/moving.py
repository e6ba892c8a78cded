"""A moving reference of a run: how it begins, and a step of its rule.

The reference of an adapter is an adapter of several times its rank. A rule of averages, such as
``ema_reference``, then averages the products of the factors, which are the changes of the weights:
the averages of A and of B have another product. The average of many adapters has a higher rank than
each; at :data:`WIDTH` times the rank, what is cut off is less than a tenth of the error of averages
of the factors.
"""

from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.compose import call_with
from jaxrl_llm.core.low_rank import Factors, is_factors, widen
from jaxrl_llm.models.lora import is_pair
from jaxrl_llm.regularizers import Iterates

WIDTH = 4


def first_reference(rule: Callable, start: ArrayTree, *, adapter: bool) -> ArrayTree:
    """The state of a moving reference before the first step; of an adapter, its pairs as products.

    Args:
      rule: ``Recipe.reference``.
      start: The trained parameters, or those of a reference in their form.
      adapter: Whether they are those of an adapter.
    """
    init = getattr(rule, "init", None)
    state = start if init is None else init(start)
    # A rule that also changes the policy extrapolates each factor, so it keeps the factors.
    return _products(state) if adapter and not isinstance(state, Iterates) else state


def moved_reference(
    rule: Callable, state: ArrayTree, params: ArrayTree, step: int | Array, *, key: Array | None
) -> Any:
    """What a rule returns for its state and the trained parameters after a step."""
    if any(map(is_factors, jax.tree.leaves(state, is_leaf=is_factors))):
        params = _products(params)
    return call_with(rule, state, params, step, context={"key": key})


def adapter_of(reference: ArrayTree) -> ArrayTree:
    """Parameters of a reference in the form of the trained ones; only products change."""
    return jax.tree.map(
        lambda x: x._asdict() if is_factors(x) else x, reference, is_leaf=is_factors
    )


def _products(tree: ArrayTree) -> ArrayTree:
    """The pairs of an adapter as products, with room for averages."""
    return jax.tree.map(
        lambda x: widen(Factors(**x), WIDTH) if is_pair(x) else x, tree, is_leaf=is_pair
    )
