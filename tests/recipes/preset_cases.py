"""What the files of presets share: one example of a batch, its rollouts in float64, a loss by them.

The example has three or four groups of four rollouts of at most five tokens: one group agrees, one
response is empty, one rollout is left out, and ratios are far from 1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative import expect_derivative

from jaxrl_llm.recipes import Batch

P, G, T = 3, 4, 5
LENGTHS = np.array([[5, 2, 3, 1], [4, 4, 1, 2], [5, 0, 2, 3], [3, 1, 5, 2]])
MASK = np.arange(T) < LENGTHS[..., None]
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


def example(seed: int, rewards=REWARDS, *, mask=None, extras=(), **fields):
    """Log-probabilities and their batch, whose ``extras`` may be drawn: ``rng, logp -> arrays``."""
    rng, mask = np.random.default_rng(seed), MASK[: len(rewards)] if mask is None else mask
    logp = rng.normal(-1.5, 0.5, mask.shape).astype(np.float32)
    others = {name: near(rng, logp) for name in ("old_logp", "ref_logp", "behavior_logp")}
    extras = extras(rng, logp) if callable(extras) else dict(extras)
    return logp, batch_of(mask, rewards, **others | fields, extras=extras)


class Rows:
    """The rollouts that take part, one after another: float64 numbers of their tokens."""

    def __init__(self, logp, batch):
        self.batch, self.places = batch, [tuple(i) for i in np.argwhere(np.asarray(batch.where))]
        self.r = np.array([float(batch.rewards[i]) for i in self.places])
        others = (batch.old_logp, batch.ref_logp, batch.behavior_logp)
        self.all = [self.tokens(array) for array in (logp, *others)]
        self.x, self.old, self.ref, self.mu = self.all
        self.lengths = np.array([len(x) for x in self.x])
        prompts = [p for p, _ in self.places]
        self.groups = [np.flatnonzero(np.equal(prompts, p)) for p in sorted(set(prompts))]

    def tokens(self, array) -> list[np.ndarray]:
        """What stands at the tokens of each."""
        if array is None:
            return []
        mask = np.asarray(self.batch.mask)
        return [np.float64(array[i])[mask[i]] for i in self.places]

    def extra(self, name: str) -> list[np.ndarray]:
        return self.tokens(self.batch.extras[name])

    def of(self, name: str) -> np.ndarray:
        """An extra with one number a rollout."""
        return np.array([self.batch.extras[name][i] for i in self.places])

    def each(self, function: Callable[[np.ndarray], np.ndarray], values=None) -> np.ndarray:
        """``function`` of the rewards, or other values, of each group."""
        values = self.r if values is None else np.asarray(values)
        out = np.zeros(len(values))
        for group in self.groups:
            out[group] = function(values[group])
        return out


def center(r):
    """Of a group, or of each row of groups."""
    return r - r.mean(-1, keepdims=True)


def z(r, eps=1e-6, ddof=1):
    """Scores over their deviation; 0 if all agree."""
    agree = r.max(-1, keepdims=True) == r.min(-1, keepdims=True)
    return center(r) / np.where(agree, 1.0, r.std(-1, ddof=ddof, keepdims=True) + eps)


def double(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


def clip(ratio, a, low=0.8, high=1.2, dual=1e9):
    """The clipped surrogate; of advantages below 0 at most ``dual`` times them."""
    loss = -np.minimum(ratio * a, np.clip(ratio, low, high) * a)
    return np.where(np.less(a, 0), np.minimum(loss, -dual * np.asarray(a)), loss)


def k3(x, ref):
    return np.exp(ref - x) - 1 - (ref - x)


def mean(rows, of: str = "token") -> float:
    """Over tokens, over the means of sequences, or over their sums; empty ones count in none."""
    rows = [row for row in rows if len(row)]
    if of == "token":
        return np.concatenate(rows).mean()
    return np.mean([row.sum() if of == "sum" else row.mean() for row in rows])


def prepared(recipe, batch: Batch, state=None, **options) -> Batch:
    """The batch as a step of the recipe prepares it, from its first state on."""
    state = recipe.init() if state is None else state
    return jax.jit(recipe.prepare)(batch, state, **options)[0]


def loss_of(recipe, logp, batch: Batch, entropy=None, **statistics) -> float:
    """The loss of a batch that is not prepared."""
    ready = prepared(recipe, batch, key=jax.random.key(0))
    given = {"entropy": entropy, "statistics": statistics}
    given = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), given)
    return float(jax.jit(recipe.loss)(jnp.asarray(logp, jnp.float32), ready, **given))


def expect_loss(
    recipe,
    logp,
    ready: Batch,
    formula: Callable[[np.ndarray], float],
    *,
    rel: float = 1e-5,
    atol: float = 2e-6,
    least: float | None = 1e-4,
    rtol: float = 2e-4,
    **options: Any,
) -> None:
    """Holds the loss to a formula in float64, and its gradient to the slope of the formula.

    Some entry of the gradient is above ``least``. With None the gradient is not compared, for a
    loss with weights that are constants.
    """
    run = jax.value_and_grad(lambda x: recipe.loss(x, ready, **options))
    value, grad = jax.jit(run)(jnp.asarray(logp))
    assert float(value) == pytest.approx(formula(logp), rel=rel, abs=1e-7)
    if least is not None:
        expect_derivative(np.asarray(grad), formula, logp, rtol=rtol, atol=atol)
        assert np.abs(grad).max() > least
