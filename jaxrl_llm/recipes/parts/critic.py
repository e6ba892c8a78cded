"""``Critic``: the value model of a recipe, trained with the policy."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxrl_llm import aggregate
from jaxrl_llm.core import Array, checks
from jaxrl_llm.recipes import wiring
from jaxrl_llm.recipes.batch import Batch
from jaxrl_llm.recipes.parts.second_model import SecondModel
from jaxrl_llm.recipes.records import format_fields
from jaxrl_llm.recipes.results import weights_of, with_extra
from jaxrl_llm.recipes.wiring import Reader


def first_head(values: Array) -> Array:
    """The value of a critic with one head, ``[..., 1] -> [...]``."""
    return values[..., 0]


def means_of_heads(mask: Array) -> Array:
    """The weights of a mean over the unmasked tokens of each head: ``[..., T, C]``, as ``mask``."""
    heads = jnp.moveaxis(mask, -1, 0)
    return jnp.stack([aggregate.token_mean(head) for head in heads], axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Critic(SecondModel):
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

    keyword: ClassVar[str] = "critic"
    title: ClassVar[str] = "a critic"
    reserved: ClassVar[frozenset[str]] = frozenset(
        {"values", "old_values", "returns", "critic_weights", "critic_places"}
    )

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

    @property
    def steps_before_policy(self) -> int:
        """The critic's warmup."""
        return self.warmup

    def readers(self) -> tuple[Reader, ...]:
        """The returns, and the weights."""
        returns = Reader("critic's returns", self.returns, ("rewards",), offered="prepared")
        return returns, Reader("critic's weights", self.weights, ("mask",), offered="weights")

    def required(self, recipe, names: frozenset[str]) -> frozenset[str]:
        """The critic's values."""
        del recipe, names
        return frozenset({"values", "old_values"})

    def computed_by_step(self, recipe) -> frozenset[str]:
        """The critic's values."""
        return self.required(recipe, frozenset())

    def computed_by_prepare(self) -> frozenset[str]:
        """The returns."""
        return frozenset({"returns"})

    def check(self, recipe) -> None:
        """Raises ValueError if a function cannot be called as the critic calls it."""
        for slot, function, arguments in (
            ("loss", self.loss, ("values", "old_values", "returns", "mask")),
            ("combine", self.combine, ("values",)),
        ):
            wiring.check_arguments(recipe.name, Reader(f"critic's {slot}", function, arguments))

    def prepared(self, recipe, batch: Batch, unselected: Array, call: Callable) -> Batch:
        """The batch with returns, of all tokens from before the selection.

        The rewards of tokens that the selection drops still count, as in the advantages.
        """
        complete = batch.replace(mask=unselected)
        returns = call(self.returns, jnp.asarray(batch.rewards, jnp.float32), of=complete)
        shapes = self._shapes(batch)
        wiring.check_output(recipe.name, "the critic's returns", returns, *shapes)
        if returns.shape == batch.mask.shape:
            returns = jnp.broadcast_to(returns[..., None], shapes[1])
        batch = with_extra(batch, "returns", returns)
        if recipe.selection is None:
            return batch
        context = wiring.context(complete, wiring.PREPARE_CONTEXT)
        places = weights_of(recipe, self.weights, complete, context, *shapes) != 0
        return with_extra(batch, "critic_places", places)

    def weighed(self, recipe, batch: Batch, responses: Batch, context: Mapping[str, Any]) -> Batch:
        """The batch with the weights of the critic's loss."""
        shapes = self._shapes(batch)
        if recipe.selection is None:
            weights = weights_of(recipe, self.weights, responses, context, *shapes)
        else:
            weights = self._weights_at_places(recipe, responses, shapes)
        return with_extra(batch, "critic_weights", weights)

    def _shapes(self, batch: Batch) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What its functions may return: one value for all heads, or one for each."""
        return batch.mask.shape, (*batch.mask.shape, self.heads)

    def _weights_at_places(self, recipe, batch: Batch, shapes) -> Array:
        """Weights that add up over those of its places that the selection left.

        The first token of a turn that is left may not be the one that has its target.
        """

        def at(places: Array) -> Array:
            left = batch.replace(mask=batch.mask & places)
            context = wiring.context(left, wiring.PREPARE_CONTEXT)
            return weights_of(recipe, self.weights, left, context, *shapes)

        places = batch.extras["critic_places"]
        if places.ndim == batch.mask.ndim:
            return at(places)
        heads = range(places.shape[-1])  # each has places of its own
        return jnp.stack([at(places[..., head])[..., head] for head in heads], axis=-1)
