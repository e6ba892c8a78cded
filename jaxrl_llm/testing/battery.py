"""The battery: checks that every recipe must pass, whatever its method."""

from collections.abc import Callable, Mapping, Sequence

import jax

from jaxrl_llm.core import Array
from jaxrl_llm.core import checks as core_checks
from jaxrl_llm.recipes import Recipe
from jaxrl_llm.testing import array_checks, model_checks, train_checks

CHECKS: dict[str, Callable[..., None]] = {
    "jit": array_checks.check_jit,
    "microbatches": array_checks.check_microbatches,
    "devices": array_checks.check_devices,
    "junk": array_checks.check_junk,
    "permutation": array_checks.check_permutation,
    "degenerate_groups": array_checks.check_degenerate_groups,
    "on_policy": array_checks.check_on_policy,
    "precision": array_checks.check_precision,
    "layouts": model_checks.check_layouts,
    "rollouts": model_checks.check_rollouts,
    "model_precision": model_checks.check_model_precision,
    "train_step": train_checks.check_train_step,
    "checkpoint": train_checks.check_checkpoint,
}


# Checks of packed rows, or of a sampler that returns a log-probability for each token.
_CAUSAL = ("layouts", "rollouts", "model_precision")


def assert_recipe_ok(
    recipe: Recipe,
    *,
    only: Sequence[str] | None = None,
    extras: Mapping[str, Array] | None = None,
) -> None:
    """Runs the battery on a recipe; a method that passes can be trained at any size.

    The checks run on batches of 8 prompts, 4 rollouts and 6 tokens, and on a model of one layer.
    Mesh checks need 8 devices (on a CPU, set ``JAX_NUM_CPU_DEVICES=8``); with fewer devices they
    are skipped with a warning. A recipe with a likelihood skips the checks that apply only to
    causal models.

    Args:
      recipe: A Recipe.
      only: Keys of :data:`CHECKS`; all of them by default.
      extras: Arrays of ``Recipe.inputs`` and of numbers computed from "responses", if the recipe
        reads any under names of its own: ``[8, ...]``, ``[8, 4, ...]`` with one value per rollout,
        or ``[8, 4, 6, ...]`` per token. Statistics of the vocabulary are made up.

    Raises:
      AssertionError: At the first failed check; it names the check, the recipe and the number.
      ValueError: If a key is unknown, or if ``extras`` lacks a name or has one that the recipe
        does not read.

    Example:
      >>> import jaxrl_llm as jr
      >>> jr.testing.assert_recipe_ok(jr.recipes.dapo(), only=["microbatches", "junk"])
    """
    keys = tuple(CHECKS if only is None else only)
    for key in keys:
        core_checks.check_option("assert_recipe_ok", "only", key, CHECKS)
    if recipe.likelihood is not None:
        keys = tuple(key for key in keys if key not in _CAUSAL)
    # Accelerators round the inputs of a float32 product; the checks expect float32 precision.
    with jax.default_matmul_precision("highest"):
        for key in keys:
            CHECKS[key](recipe, extras=extras)
