"""``TrainState``: everything that a resumed run needs, in one pytree of arrays or shapes."""

import math
from typing import Any, NamedTuple

import jax

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.lora import merge_adapter
from jaxrl_llm.recipes.needs import is_recipe
from jaxrl_llm.regularizers import Anchored, Iterates, StoredPolicies
from jaxrl_llm.train.models.moving import adapter_of


class SubagentState(NamedTuple):
    """The state of a second policy that the first one calls.

    Attributes:
      params: Its parameters.
      opt_state: State of its optimizer.
      algo_state: State of its recipe.
    """

    params: ArrayTree
    opt_state: ArrayTree
    algo_state: ArrayTree


class TrainState(NamedTuple):
    """The complete state of a run between two steps.

    Attributes:
      params: The trained parameters: the parameters of the model, or an adapter.
      opt_state: State of the optimizer.
      algo_state: State of the recipe: trackers and controllers; often empty.
      key: A typed key that never changes; the randomness of a step comes from ``fold_in(key,
        step)``.
      step: int32 ``[]``, number of steps so far.
      data_cursor: Position in the prompt order: Python integers, which stay on the host.
      base: Frozen parameters below an adapter, or ``()``: passed from step to step by reference,
        and not part of a checkpoint.
      collector_state: State of the recipe's collector: NumPy arrays, which stay on the host.
      parts: State of each part of the step that has one, by its name.
    """

    params: ArrayTree
    opt_state: ArrayTree
    algo_state: ArrayTree
    key: Array
    step: Array
    data_cursor: Any = ()
    base: ArrayTree = ()
    collector_state: ArrayTree = ()
    parts: dict[str, ArrayTree] = {}  # noqa: RUF012  a default that nothing changes

    def with_parts(self, **states: ArrayTree) -> "TrainState":
        """The state with other states of parts; ``()`` for none."""
        parts = {name: x for name, x in (self.parts | states).items() if not _is_nothing(x)}
        return self._replace(parts=parts)

    @property
    def critic(self) -> Any:
        """A ``CriticState`` of a critic or a process reward model, or ``()``."""
        return self.parts.get("critic", ())

    @property
    def reference(self) -> Any:
        """A moving reference with the structure of ``params``, or its rule's state, or ``()``."""
        return self.parts.get("reference", ())

    @property
    def earlier(self) -> Any:
        """Policies of earlier iterations, see ``regularizers.Earlier``, or ``()``."""
        return self.parts.get("earlier", ())

    @property
    def subagent(self) -> Any:
        """A :class:`SubagentState`, or ``()``."""
        return self.parts.get("subagent", ())

    @property
    def policy(self) -> ArrayTree:
        """Parameters in the form that the model takes: ``params``, with any base."""
        return self.with_base(self.params)

    @property
    def reference_params(self) -> ArrayTree:
        """Parameters of a moving reference, with the structure of ``params``.

        Of an adapter, its factors have several times the rank; see ``train/models/moving.py``.
        """
        state, stateful = self.reference, Iterates | Anchored | StoredPolicies
        return adapter_of(state.reference if isinstance(state, stateful) else state)

    @property
    def anchor_policy(self) -> ArrayTree:
        """Parameters that an anchored reference began with, in the form that the model takes."""
        return self.with_base(adapter_of(self.reference.anchor))

    @property
    def reference_policy(self) -> ArrayTree:
        """Parameters of a moving reference, in the form that the model takes."""
        return self.with_base(self.reference_params)

    def with_base(self, params: ArrayTree) -> ArrayTree:
        """Parameters with the structure of ``self.params``, in the form that the model takes."""
        return merge_adapter(self.base, params)


def _is_nothing(x: ArrayTree) -> bool:
    return isinstance(x, tuple) and not x


def check_step_parts(function: str, recipe: Any, optimizer: Any) -> None:
    """Raises TypeError unless there is a recipe, and an optimizer of optax."""
    if not is_recipe(recipe):
        what = f"a Recipe, such as jr.recipes.grpo(); got {recipe!r}"
        raise TypeError(f"{function}: recipe must be {what}.")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        what = f"a transformation of optax, such as optax.adamw(1e-6); got {optimizer!r}"
        raise TypeError(f"{function}: optimizer must be {what}.")


def device_bytes(tree: ArrayTree) -> int:
    """Bytes per device of a tree of arrays or shapes."""

    def size(x) -> int:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(size(x) for x in jax.tree.leaves(tree))
