"""The step of a batch in pieces, for a loop that changes what happens between them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import AlgoState, Batch
from jaxrl_llm.train.state import TrainState
from jaxrl_llm.train.update import step
from jaxrl_llm.train.update.part import At, Gradients, Part, Setup, Teacher
from jaxrl_llm.train.update.reads import prepare_batch


class StepPieces(NamedTuple):
    """A step that serves every recipe, in pieces; made by :func:`~jaxrl_llm.train.make_pieces`.

    The step of ``make_step``, which an own one may change at any line, is::

        @jax.jit
        def my_step(state, batch):
            begun = pieces.begin(state, batch)

            def update(carry, rows, trains):
                gradients = pieces.gradients(begun, carry, rows)
                return pieces.apply(begun, carry, rows, gradients, trains=trains)

            return pieces.finish(begun, update)

    Attributes:
      function: Of the package that made it, for errors.
      setup: How it was made.
      parts: What the recipe adds to a step.
      teacher: Another model that the policy learns from, or None.
    """

    function: str
    setup: Setup
    parts: tuple[Part, ...]
    teacher: Model | None

    def begin(
        self, state: TrainState, batch: Batch, teacher_params: ArrayTree = None
    ) -> step.Begun:
        """The prepared batch: scored by all models that the recipe reads, with its advantages.

        A process reward model learns before. ``begun.batch`` is the batch,
        ``begun._replace(batch=...)`` another one.
        """
        at = self.at(state, batch, state.key, teacher_params)
        return step.begin(self.parts, state, batch, at)

    def gradients(self, begun: step.Begun, carry: tuple, rows: Batch) -> Gradients:
        """The gradient of the recipe's loss on some rows, at ``carry = (params, opt_state)``."""
        return step.objective_of(self.parts, begun.at, begun.accumulated).gradient(carry[0], rows)

    def apply(
        self, begun: step.Begun, carry: tuple, rows: Batch, gradients: Gradients, *, trains: Array
    ) -> tuple[tuple, tuple[dict[str, Array], Array | None]]:
        """The carry after one optimizer step, and its metrics; skipped if it is non-finite."""
        return step.optimizer_step(self.parts, begun, carry, rows, gradients, trains=trains)

    def finish(self, begun: step.Begun, update: Callable) -> tuple[TrainState, dict[str, Array]]:
        """The state and the metrics after the optimizer steps of a batch.

        Args:
          begun: From :meth:`begin`.
          update: ``(carry, rows, trains) -> (carry, (metrics, logp))``, an optimizer step on the
            rows of a minibatch or a turn; ``trains`` is False if it must not be made.
        """
        done = step.optimizer_steps(self.parts, begun, update)
        return step.finish(self.parts, begun, *done)

    def at(self, state: TrainState, batch: Batch, key: Array | None, teacher_params: Any) -> At:
        """Where the step is."""
        passes, setup = self.setup.passes, self.setup
        passes.check(self.function, batch.tokens.shape[0], setup.shards)
        teacher = None if self.teacher is None else Teacher(self.teacher, teacher_params)
        return At(setup, state, passes.of(batch.packing).microbatches, key, teacher)

    def step(
        self,
        state: TrainState,
        batch: Batch,
        key: Array | None,
        base: ArrayTree,
        teacher_params: ArrayTree,
    ) -> tuple[TrainState, dict[str, Array]]:
        """The state after the updates of a batch, without its ``base``, and their metrics."""
        state = state._replace(base=base)
        at = self.at(state, batch, key, teacher_params)
        state, metrics = step.update_batch(self.parts, state, batch, at)
        return state._replace(base=()), metrics

    def prepare(
        self, state: TrainState, batch: Batch, key: Array | None, teacher_params: ArrayTree
    ) -> tuple[Batch, AlgoState]:
        """The batch with all that is known before the update, and the recipe's next state."""
        return prepare_batch(self.parts, state, batch, self.at(state, batch, key, teacher_params))

    def pass_over(self, state: TrainState, key: Array | None) -> tuple[TrainState, None]:
        """The state after a step without an update: parts that count steps see it."""
        at = At(self.setup, state, 1, key)
        for part in self.parts:
            if part.counts_steps and part.after is not None:
                state, _ = part.after(state, None, at)
        return state._replace(step=state.step + 1), None
