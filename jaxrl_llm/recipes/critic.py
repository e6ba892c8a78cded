"""``Critic``: the value model of a recipe, trained with the policy."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_llm import aggregate
from jaxrl_llm.core import Array, checks
from jaxrl_llm.recipes.records import format_fields


def first_head(values: Array) -> Array:
    """The value of a critic with one head, ``[..., 1] -> [...]``."""
    return values[..., 0]


def means_of_heads(mask: Array) -> Array:
    """The weights of a mean over the unmasked tokens of each head: ``[..., T, C]``, as ``mask``."""
    heads = jnp.moveaxis(mask, -1, 0)
    return jnp.stack([aggregate.token_mean(head) for head in heads], axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Critic:
    """The losses of a critic, a second model with a separate optimizer. It holds no arrays.

    The train step evaluates the critic before ``Recipe.prepare`` and puts ``old_values [P, G, T,
    C]`` and their combination ``values [P, G, T]`` into the batch, where advantages and ``returns``
    read them by name.

    Attributes:
      returns: ``(rewards, **context)``, the targets of the values: ``[P, G, T]`` for all heads, or
        ``[P, G, T, C]`` if each head has its own.
      loss: ``(values, old_values, returns, mask) -> token loss [..., T]``.
      heads: C, number of predictions per token, each with its own clipped error.
      combine: ``[..., C] -> [...]``, the one value that the advantages use.
      weights: ``(mask, **context) -> weights [..., T]``, or ``[..., T, C]`` for each head: 0 at
        tokens that are not learned, such as all tokens but the first of a turn.
      target_rate: If set, ``old_values`` come from a moving average of the critic's parameters with
        this rate per step, not from the critic itself.
      warmup: Number of first steps of a run in which the critic alone trains, on rollouts of a
        policy that does not move. See :func:`~jaxrl_llm.train.make_step`.

    Raises:
      TypeError: If an attribute is not a function, or ``heads`` or ``warmup`` is not an integer.
      ValueError: If ``heads`` is not positive, ``warmup`` is negative, or ``target_rate`` is not in
        (0, 1].
    """

    returns: Callable
    loss: Callable
    heads: int = 1
    combine: Callable = first_head
    weights: Callable = aggregate.token_mean
    target_rate: float | None = None
    warmup: int = 0

    def __post_init__(self):
        for slot in ("returns", "loss", "combine", "weights"):
            if not callable(getattr(self, slot)):
                raise TypeError(f"Critic: {slot} must be a function; got {getattr(self, slot)!r}.")
        for count in ("heads", "warmup"):
            value = getattr(self, count)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Critic: {count} must be an integer; got {value!r}.")
        checks.check_positive("Critic", heads=self.heads)
        checks.check_non_negative("Critic", warmup=self.warmup)
        if self.target_rate is not None and not 0 < self.target_rate <= 1:
            raise ValueError(f"Critic: target_rate is a share in (0, 1]; got {self.target_rate:g}.")

    def __repr__(self) -> str:
        """The functions by their names; what is left at its default is not shown."""
        return f"Critic({format_fields(self)})"

    def total_loss(self, values: Array, batch) -> Array:
        """The weighted sum of the losses of all heads, a float32 scalar; microbatches add up.

        ``values`` are ``[P, G, T, C]`` from the critic being trained, ``batch`` a prepared batch or
        some of its rows.
        """
        old_values, returns = (batch.extras[name] for name in ("old_values", "returns"))
        weights = batch.extras["critic_weights"]
        losses = [
            self.loss(values[..., c], old_values[..., c], returns[..., c], batch.mask)
            for c in range(self.heads)
        ]
        if weights.ndim == batch.mask.ndim:
            return jnp.sum(sum(losses) * weights)
        return jnp.sum(jnp.stack(losses, axis=-1) * weights)
