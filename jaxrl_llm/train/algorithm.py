"""The interface between an algorithm and the training loop: a few functions."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.runtime.heap import trim_after_compiling
from jaxrl_llm.core.runtime.threads import compile_aside, wait_for_one
from jaxrl_llm.recipes import Batch
from jaxrl_llm.train.state import TrainState

Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]

# Number of last steps without compilation ahead; the run would wait for the compiler at its end.
_LAST_STEPS = 16


class Algorithm(NamedTuple):
    """A training algorithm, built in ``policy_gradient.py`` and ``evolution.py``.

    Attributes:
      sampler: ``(params, key, prompts, *, version) -> Rollout``, the rollouts of a batch.
      score: ``(batch) -> (batch, metrics)``: places a host batch on the devices, packed if that
        saves time, with log-probabilities of a frozen reference. The metrics describe the packing.
      step: ``(state, batch) -> (state, metrics)``, one compiled update.
      inspect: ``(state, batch) -> (batch, logp)``: the batch as the step prepared it, and the
        policy's log-probabilities ``[P, G, T]``; for a batch with a skipped update.
      compile_ahead: ``(state, batch) -> None``, begins to compile the step for these shapes in
        another thread; the step waits for it. Results do not depend on it.
      pass_over: ``(state) -> state``, the state after a step whose batch has no signal: its number,
        and a reference that moves with the number of steps. May reuse the memory of the state.
    """

    sampler: Callable
    score: Callable[[Batch], tuple[Batch, dict[str, float]]]
    step: Step
    inspect: Callable[[TrainState, Batch], tuple[Batch, Array]]
    compile_ahead: Callable[[TrainState, Batch], None] = lambda state, batch: None
    pass_over: Callable[[TrainState], TrainState] = lambda state: state._replace(
        step=state.step + 1
    )

    def without_update(
        self, state: TrainState, reward: float
    ) -> tuple[TrainState, dict[str, Array]]:
        """The state and metrics after a step whose batch has no signal.

        Args:
          state: State before the step.
          reward: Mean reward of the rollouts.
        """
        of_step = "loss", "grad_norm", "update_norm", "updates", "skipped"
        zeros = *of_step, "reward_std", "informative", "tokens"
        metrics = {name: jnp.zeros(()) for name in zeros} | {"reward": jnp.float32(reward)}
        return self.pass_over(state), metrics


class CompiledStep:
    """A step under ``jit`` that keeps the shardings of the state, so it compiles only once.

    The key, the data cursor, the collector's state and frozen base parameters do not change in a
    step, so they are not donated.

    Args:
      step: ``step(state, batch, key, base, teacher) -> (state, metrics)``, on a state without key,
        cursor and base.
      prepare: ``prepare(state, batch, key, teacher) -> (batch, algo_state)``.
      donate: Whether to reuse the memory of the input state.
      takes_key: Whether the two functions draw random numbers; if not, their key is None.
      teacher: Parameters of a frozen teacher, which are not part of any state.
      pass_over: ``pass_over(state, key) -> (state, None)``, the state after a step without an
        update; None if only its number changes.
    """

    def __init__(
        self,
        step: Callable,
        prepare: Callable,
        *,
        donate: bool,
        takes_key: bool,
        teacher: ArrayTree = (),
        pass_over: Callable | None = None,
    ):
        trim_after_compiling()
        self._pass_over, self._passing_over = pass_over, cast(Any, None)
        self._teacher = teacher
        self._step, self._prepare = step, prepare
        self._donate, self._takes_key = donate, takes_key
        self.compiled: Callable | None = None  # made on the first call, when shardings are known
        self._next_shapes: Callable[[Batch], Batch | None] | None = None
        self._steps, self._left = 0, 0  # of the run, and still to come when it was last seen
        self._seen, self._looked_ahead = set[Any](), set[Any]()
        self.compiling: dict[Any, Future] = {}  # by shapes, until a step needs the program

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        """One update of the state; see ``make_step``."""
        inner, key = self._split(state)
        if self.compiled is None:
            self.compiled = self._jit(self._step, inner)
        if (program := self.compiling.pop(_shapes_of(batch), None)) is not None:
            wait_for_one([program])  # if it failed, the same error comes from here
        if self._next_shapes is not None and not self._left:
            self._left = self._steps - int(state.step)
        new, metrics = self.compiled(inner, batch, key, state.base, self._teacher)
        self._look_ahead(new, batch, key, state.base)
        return _with_the_rest(new, state), metrics

    def pass_over(self, state: TrainState) -> TrainState:
        """The state after a step without an update; see :class:`Algorithm`."""
        if self._pass_over is None:
            return state._replace(step=state.step + 1)
        inner, key = self._split(state)
        if self._passing_over is None:
            self._passing_over = self._jit(self._pass_over, inner)
        return _with_the_rest(self._passing_over(inner, key)[0], state)

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """The program for arrays of these shapes and shardings; the arrays need not exist."""
        inner, key = self._split(state)
        return self._jit(self._step, inner).lower(inner, batch, key, state.base, self._teacher)

    def compile_ahead(self, state: TrainState, batch: Batch) -> None:
        """Begins to compile the program for these arrays; see :class:`Algorithm`.

        Several processes compile their programs in one order, so there it has no effect.
        """
        if jax.process_count() > 1:
            return
        inner, key = self._split(state)
        if self.compiled is None:
            self.compiled = self._jit(self._step, inner)
        self._compile_aside(inner, batch, batch, key, state.base)

    def look_ahead(
        self, next_shapes: Callable[[Batch], Batch | None] | None, *, steps: int
    ) -> None:
        """From now on, compiles what may come next in another thread while steps run.

        Results do not depend on it. A process that ends waits for such a program, so none is
        compiled in the last 16 steps.

        Args:
          next_shapes: ``next_shapes(batch)``, a batch of the shapes that may come after those of
            this one, or None. It is asked once for each shape. None ends the looking ahead.
          steps: The steps of the run, as ``state.step`` counts them.
        """
        self._next_shapes, self._steps, self._left = next_shapes, steps, 0

    def prepared(self, state: TrainState, batch: Batch) -> Batch:
        """The batch with everything that the step computes before its update."""
        _, key = self._split(state)
        state = state._replace(data_cursor=(), collector_state=())
        return jax.jit(self._prepare)(state, batch, key, self._teacher)[0]

    def _look_ahead(self, inner: TrainState, batch: Batch, key, base) -> None:
        """Compiles the program of the shapes that may come after those of this batch, once."""
        shapes = _shapes_of(batch)
        self._seen.add(shapes)
        self._left -= 1
        few = self._left < _LAST_STEPS
        if self._next_shapes is None or few or shapes in self._looked_ahead:
            return
        self._looked_ahead.add(shapes)
        if (then := self._next_shapes(batch)) is not None:
            self._compile_aside(inner, then, batch, key, base)

    def _compile_aside(self, inner: TrainState, batch: Batch, placed: Batch, key, base) -> None:
        """Compiles in another thread for a batch that will be placed as another one is."""
        shapes, compiled = _shapes_of(batch), cast(Any, self.compiled)
        if shapes in self._seen or shapes in self.compiling:
            return
        inner, batch = jax.tree.map(_abstract, inner, inner), jax.tree.map(_abstract, batch, placed)
        args = inner, batch, key, base, self._teacher
        self.compiling[shapes] = compile_aside(
            "compile a step", lambda: compiled.lower(*args).compile()
        )

    def _split(self, state: TrainState) -> tuple[TrainState, Array | None]:
        inner = state._replace(key=(), data_cursor=(), base=(), collector_state=())
        return inner, state.key if self._takes_key else None

    def _jit(self, function: Callable, inner: TrainState) -> Any:
        """A function with two outputs under ``jit``; the first is a state, placed as its input."""
        donated = (0,) if self._donate else ()
        if not isinstance(inner.step.sharding, jax.sharding.NamedSharding):
            return jax.jit(function, donate_argnums=donated)
        shardings = jax.tree.map(lambda x: x.sharding, inner)
        return jax.jit(function, donate_argnums=donated, out_shardings=(shardings, None))


def _with_the_rest(new: TrainState, state: TrainState) -> TrainState:
    """The new state with the parts of ``state`` that no step changes."""
    return new._replace(
        key=state.key,
        data_cursor=state.data_cursor,
        base=state.base,
        collector_state=state.collector_state,
    )


def _abstract(x: Array | jax.ShapeDtypeStruct, placed: Array) -> jax.ShapeDtypeStruct:
    """The shape and dtype of ``x``, with the sharding of ``placed`` if a mesh shards that."""
    sharding = getattr(placed, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        sharding = None
    weak = getattr(placed, "weak_type", False)
    return jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=sharding, weak_type=weak)


def _shapes_of(batch: Batch) -> tuple:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple(jnp.shape(x) for x in leaves)
