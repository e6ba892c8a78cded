"""What the files of presets share: the fields of a batch, a loss by a formula, single options."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative import expect_derivative

from jaxrl_llm.recipes import Batch

# Of three or four groups of four rollouts of at most five tokens: one response is empty.
LENGTHS = np.array([[5, 2, 3, 1], [4, 4, 1, 2], [5, 0, 2, 3], [3, 1, 5, 2]])
MASK = np.arange(5) < LENGTHS[..., None]
# The second group agrees, and a rollout of the third is left out.
REWARDS = np.array([[1, 0, 0, 0.5], [1, 1, 1, 1], [0, 1, 0.25, np.nan]])


def batch_of(mask, rewards, **fields) -> Batch:
    """A batch of the rollouts whose reward is a number, in float32."""
    arrays = {
        "tokens": np.zeros(np.shape(mask), np.int32),
        "mask": mask,
        "rewards": rewards,
        "where": np.isfinite(rewards),
        "prompt_tokens": np.ones((len(mask), 2), np.int32),
        "prompt_mask": np.ones((len(mask), 2), bool),
    }
    return Batch(**jax.tree.map(_in_float32, arrays | fields))


def _in_float32(x):
    floating = jnp.issubdtype(np.asarray(x).dtype, np.floating)
    return jnp.asarray(x, jnp.float32 if floating else None)


def near(rng: np.random.Generator, logp, spread: float = 0.4) -> np.ndarray:
    """Log-probabilities of another policy, so that ratios are far from 1."""
    return logp + rng.normal(0, spread, np.shape(logp))


def expect_loss(
    recipe,
    logp,
    ready: Batch,
    formula: Callable[[np.ndarray], float],
    *,
    rel: float,
    atol: float = 1e-6,
    least: float | None = 1e-3,
    rtol: float = 1e-4,
) -> None:
    """Holds the loss to a formula in float64, and its gradient to the slope of the formula.

    Some entry of the gradient is above ``least``. With None the gradient is not compared, for a
    loss with weights that are constants.
    """
    value, grad = jax.jit(jax.value_and_grad(recipe.loss))(jnp.asarray(logp), ready)
    assert float(value) == pytest.approx(formula(logp), rel=rel, abs=1e-7)
    if least is not None:
        expect_derivative(np.asarray(grad), formula, logp, rtol=rtol, atol=atol)
        assert np.abs(grad).max() > least


def one_by_one(table: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A row with the name and one option, for each option of each name."""
    for name, options in table.items():
        for option, value in options.items():
            yield name, {option: value}
