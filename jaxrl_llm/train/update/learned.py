"""The next state of a recipe's Transforms, checked against the one before."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core import trees
from jaxrl_llm.recipes import AlgoState, Recipe


def next_state(recipe: Recipe, new: AlgoState, old: AlgoState) -> AlgoState:
    """The state that the recipe's Transforms return, as arrays.

    Raises:
      ValueError: If it has another structure, shape or dtype than the state before. It would be
        promoted or broadcast, and a resumed run, which begins with ``init``, could not read it.
    """
    name, new = f"Recipe {recipe.name!r}", trees.as_arrays(new)
    trees.check_alike(name, "a Transform's state before and after an update", old, new)
    rows = zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True)
    for (path, before), after in rows:
        if before.dtype != after.dtype and jnp.result_type(before, after) != before.dtype:
            raise ValueError(
                f"{name}: {trees.path_str(path)} is {before.dtype} in the state of a Transform's "
                f"init and {after.dtype} after an update; both must be of one dtype."
            )
    return new
