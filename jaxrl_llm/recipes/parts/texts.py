"""``Texts``: rollouts that are texts, such as those of the pretraining, and train by likelihood."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax.numpy as jnp

from jaxrl_llm import aggregate
from jaxrl_llm.core import Array, checks, masking
from jaxrl_llm.recipes.batch import Batch
from jaxrl_llm.recipes.parts.part import RecipePart

_TEXTS = "texts"


@dataclasses.dataclass(frozen=True)
class Texts(RecipePart):
    """A loss on texts: ``- coef * mean of logp over the tokens of texts``.

    Texts are the rollouts that are True in the extra ``texts``, which ``curation.plain_texts``
    brings. All slots of the recipe see the batch without them. The mean is over the tokens of one
    optimizer step.

    Attributes:
      coef: Weight of the loss, above 0.
    """

    coef: float

    keyword: ClassVar[str] = "text_coef"
    title: ClassVar[str] = "texts"
    trains_on_texts: ClassVar[bool] = True

    @classmethod
    def of(cls, recipe: str, value: Any) -> Self | None:
        """The part for a weight; None for 0."""
        checks.check_non_negative(f"Recipe {recipe!r}", finite=True, text_coef=value)
        return cls(value) if value else None

    @property
    def value(self) -> float:
        """The weight."""
        return self.coef

    def required(self, recipe, names: frozenset[str]) -> frozenset[str]:
        """The extra that says which rollouts are texts."""
        del recipe, names
        return frozenset({_TEXTS})

    def check(self, recipe) -> None:
        """Raises ValueError if the recipe has what would read texts as responses."""
        others = [part.title for part in recipe.parts if not part.takes_texts]
        others += ["a surrogate that trains a reward model"] if recipe.head else []
        visits = recipe.computed_from("last_visit")
        others += ["numbers computed from the last visit"] if visits else []
        if others:
            raise ValueError(
                f"Recipe {recipe.name!r} has text_coef {self.coef:g} and {others[0]}, which would "
                "read texts as responses; leave one of them out."
            )

    def check_collector(self, recipe, needs) -> None:
        """Raises ValueError if the collector brings no texts."""
        if not needs.brings_texts:
            raise ValueError(
                f"recipe {recipe.name!r} has text_coef {self.coef:g}, but its collector brings no "
                "texts; mix curation.plain_texts() into it, or set text_coef to 0."
            )

    def responses(self, batch: Batch) -> Batch:
        """The batch whose ``where`` and ``mask`` are False in texts."""
        where = ~batch.extras[_TEXTS]
        return batch.replace(where=batch.where & where, mask=batch.mask & where[..., None])

    def masked(self, batch: Batch, present: Array) -> Batch:
        """The batch with the tokens of texts in its mask."""
        return batch.replace(mask=batch.mask | (present & _of_texts(batch)))

    def weighed(self, recipe, batch: Batch, responses: Batch, context: Mapping[str, Any]) -> Batch:
        """The batch with the weights of the tokens of texts."""
        del recipe, responses, context
        texts = aggregate.token_mean(self.others(batch))
        return batch.replace(weights=batch.weights + self.coef * texts)

    def token_loss(self, loss: Array, logp: Array, batch: Batch) -> Array:
        """The token losses, of texts the negative log-probabilities."""
        return jnp.where(_of_texts(batch), -logp, loss)

    def others(self, batch: Batch) -> Array:
        """The tokens of texts."""
        return batch.mask & _of_texts(batch)

    def metrics(self, logp: Array, batch: Batch) -> dict[str, Array]:
        """The loss of texts without its weight, and the number of their tokens."""
        texts = self.others(batch)
        loss = -masking.masked_mean(logp, texts)
        metrics = {"text_loss": loss, "text_tokens": jnp.sum(texts, dtype=jnp.float32)}
        return metrics


def _of_texts(batch: Batch) -> Array:
    return batch.extras[_TEXTS][..., None]
