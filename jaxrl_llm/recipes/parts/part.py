"""``RecipePart``: what a method adds to its update beyond the pure slots of a Recipe."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from jaxrl_llm.core import Array
from jaxrl_llm.recipes.batch import Batch
from jaxrl_llm.recipes.wiring import Reader


class RecipePart:
    """The record of a part: a frozen dataclass that is pure, compares by value and prints itself.

    A Recipe calls these methods and knows no part by name. A part of one's own goes into
    ``Recipe(parts=(...))``; what it adds to the train step is its method ``step_part``, which
    returns a :class:`jaxrl_llm.train.update.part.Part`.

    Attributes:
      keyword: Argument of ``Recipe`` that makes the part, or "".
      title: What an error calls it, such as "a critic".
      reserved: Entries of the batch that come from the part alone.
      left_to_right: Whether it reads tokens from left to right, which no denoising model can have.
      takes_texts: Whether it may read rollouts that are texts, which are no responses.
      trains_on_texts: Whether rollouts that are texts train through it; else no batch may have any.
      reads_turns: Whether it needs the turns of an environment.
      divides_batch: Whether it makes several optimizer steps of each batch.
      must_be: What an error says the value of the keyword must be.
    """

    keyword: ClassVar[str] = ""
    title: ClassVar[str] = "a part"
    must_be: ClassVar[str] = ""
    reserved: ClassVar[frozenset[str]] = frozenset()
    left_to_right: ClassVar[bool] = False
    takes_texts: ClassVar[bool] = True
    trains_on_texts: ClassVar[bool] = False
    reads_turns: ClassVar[bool] = False
    divides_batch: ClassVar[bool] = False

    @classmethod
    def of(cls, recipe: str, value: Any) -> Self | None:
        """The part for the value of its keyword; None for the default of the keyword.

        Raises TypeError for a value of another kind.
        """
        if not isinstance(value, cls | None):
            must_be = cls.must_be or f"a {cls.__name__}"
            raise TypeError(f"Recipe {recipe!r}: {cls.keyword} must be {must_be}; got {value!r}.")
        return value

    @property
    def value(self) -> Any:
        """The value of its keyword."""
        return self

    @property
    def steps_before_policy(self) -> int:
        """Number of first steps in which the policy does not train yet."""
        return 0

    def step_part(self, setup: Any) -> Any:
        """What it adds to the train step, a ``train.update.part.Part``; None for nothing."""
        del setup
        return None

    # What it reads and writes

    def readers(self) -> tuple[Reader, ...]:
        """Its functions that ``Recipe.prepare`` calls."""
        return ()

    def required(self, recipe, names: frozenset[str]) -> frozenset[str]:
        """Entries that the batch must have to be prepared, if the recipe's slots need ``names``."""
        del recipe, names
        return frozenset()

    def computed_by_step(self, recipe) -> frozenset[str]:
        """Those of them that the train step computes."""
        del recipe
        return frozenset()

    def computed_by_prepare(self) -> frozenset[str]:
        """Entries that ``Recipe.prepare`` adds."""
        return frozenset()

    def statistics(self) -> frozenset[str]:
        """Numbers of the policy being trained that the loss may read."""
        return frozenset()

    # Checks, which raise ValueError

    def check(self, recipe) -> None:
        """Raises ValueError if the part has no effect in the recipe, or contradicts another."""

    def check_collector(self, recipe, needs) -> None:
        """Raises ValueError if a collector with these needs does not bring what the part reads."""

    def dry_run(self) -> None:
        """Calls its functions on shapes, which raises for bad options."""

    def check_passes(self, recipe, epochs: int, minibatches: int) -> None:
        """Raises ValueError if a batch cannot have so many optimizer steps."""

    def refuses_other_sampler(self) -> str | None:
        """Why no other weights than the policy's may sample: the end of a sentence, or None."""
        return None

    # What it does to a batch

    def responses(self, batch: Batch) -> Batch:
        """The batch as slots see it: without rollouts that are no responses."""
        return batch

    def prepared(self, recipe, batch: Batch, unselected: Array, call: Callable) -> Batch:
        """The batch with the entries that the part adds when it is prepared.

        ``unselected`` is the mask before the selection; ``call(function, batch, *arrays)`` calls a
        function with the context of ``prepare``.
        """
        del recipe, unselected, call
        return batch

    def masked(self, batch: Batch, present: Array) -> Batch:
        """The prepared batch with its final ``mask``; ``present`` are all tokens that exist."""
        del present
        return batch

    def weighed(self, recipe, batch: Batch, responses: Batch, context: Mapping[str, Any]) -> Batch:
        """The batch with the weights of the part; the slots see ``responses``."""
        del recipe, responses, context
        return batch

    def token_loss(self, loss: Array, logp: Array, batch: Batch) -> Array:
        """The token losses ``[P, G, T]`` as the part changes them."""
        del logp, batch
        return loss

    def others(self, batch: Batch) -> Array | None:
        """The tokens of a prepared batch that train and are of no response, ``[P, G, T]``."""
        del batch
        return None

    def metrics(self, logp: Array, batch: Batch) -> dict[str, Array]:
        """Metrics of a prepared batch, for the policy before an optimizer step."""
        del logp, batch
        return {}
