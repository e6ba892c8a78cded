"""Where the loop gets its batches: made when they are asked for, or ahead of that in a thread.

With ``max_staleness=0`` the loop samples and trains in turns. Above it, a thread samples and grades
while the loop trains. Batch n trains the weights of version n; it may be started once version
n - max_staleness is there and takes the newest there is. Batches are trained on in their order, so
no token is older than that, and each question is used once, in the order of the cursor::

    sampler   0 | 1 |   2   | 3 | ...        max_staleness=1: batch 2 waits for version 1
    trainer       0 | 1 |     2 | 3 | ...
"""

import atexit
import threading
from collections import deque
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxrl_llm.core.axes import ArrayTree
from jaxrl_llm.models.lora import merge_adapter
from jaxrl_llm.models.sharding import param_shardings
from jaxrl_llm.train.gather import Gathered, gather
from jaxrl_llm.train.mesh import replicated
from jaxrl_llm.train.setup import Parts
from jaxrl_llm.train.state import TrainState

# Seconds for which a run that ends early waits for the batch under way, which nobody will train on;
# who stopped it at once waits less.
_PATIENCE, _AT_ONCE = 5.0, 1.0
_THREAD = "rollouts"


def may_start(number: int, version: int, *, max_staleness: int) -> bool:
    """Whether a batch may be sampled by weights of a version.

    It is :func:`~jaxrl_llm.corrections.staleness_capacity` in batches, one of which is under way at
    a time, in integers of the host: a thread that asks must not wait for the device.
    """
    return number <= version + max_staleness


class InTurns:
    """Batches that are sampled when they are asked for, by the weights that they train.

    Args:
      parts: Of the run.
      state: Where it begins.
    """

    def __init__(self, parts: Parts, state: TrainState):
        self._parts, self._state = parts, state

    def __enter__(self) -> "InTurns":
        return self

    def __exit__(self, *error) -> None:
        return None

    def take(self) -> Gathered:
        """The batch that the newest state trains on."""
        state = self._state
        number = int(state.step)
        given = (self._parts, state.policy, state.key, state.data_cursor)
        return gather(*given, number=number, version=number)

    def publish(self, state: TrainState) -> None:
        """Brings the state after a step."""
        self._state = state

    def waiting(self, step: int) -> list[Gathered]:
        """Finished batches that no step has trained on; here there are none."""
        del step
        return []


class Ahead:
    """Batches that a thread samples and grades while others are trained on.

    It is entered before the first batch is taken. What fails in the thread is raised by ``take``,
    after the batches before it.

    Args:
      parts: Of the run.
      state: Where it begins.
      waiting: Batches that are there already, from ``state.step`` on.
    """

    def __init__(self, parts: Parts, state: TrainState, waiting: Sequence[Gathered] = ()):
        self._parts, self._mesh, self._key = parts, parts.sampler_mesh, state.key
        self._base = state.base
        if self._mesh is not None:
            self._key = jax.device_put(state.key, replicated(self._mesh))
            self._base = self._copy(state.base)
        self._ready = deque(waiting)  # in order; a batch stays until it has been trained on
        self._number = int(state.step) + len(waiting)
        self._cursor = waiting[-1].cursor if waiting else state.data_cursor
        self._changed = threading.Condition()
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self.publish(state)

    def __enter__(self) -> "Ahead":
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        at_once = kind is not None and not issubclass(kind, Exception)
        self._thread.join(_AT_ONCE if at_once else _PATIENCE)
        if self._thread.is_alive() and not at_once:
            # A device call cannot be stopped, and Python aborts when it ends in the middle of one.
            atexit.register(self._thread.join)

    def take(self) -> Gathered:
        """The batch that the newest state trains on, as soon as it is there."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None)
            if not self._ready and self._error is not None:
                raise self._error
            return self._ready[0]

    def publish(self, state: TrainState) -> None:
        """Hands the weights after a step to the sampler, and drops what the step trained on."""
        version = int(state.step)
        params = merge_adapter(self._base, self._copy(state.params))
        with self._changed:
            self._weights = (version, params)
            self._ready = deque(self._from(version))
            self._changed.notify_all()

    def waiting(self, step: int) -> list[Gathered]:
        """Finished batches that no step up to ``step`` has trained on; a checkpoint keeps them."""
        with self._changed:
            return self._from(step)

    def _from(self, step: int) -> list[Gathered]:
        return [batch for batch in self._ready if batch.number >= step]

    def _copy(self, params: ArrayTree) -> ArrayTree:
        """Weights for the sampler: the next step gives away (donates) those that it is given."""
        if self._mesh is None:
            return jax.tree.map(jnp.copy, params)
        return jax.device_put(params, param_shardings(params, self._mesh))

    def _run(self) -> None:
        """The thread: batch after batch, as soon as each may be started."""
        try:
            while (weights := self._admitted()) is not None:
                version, params = weights
                given = (self._parts, params, self._key, self._cursor)
                batch = gather(*given, number=self._number, version=version)
                del weights, params, given  # nothing holds old weights while it waits for new ones
                with self._changed:
                    self._ready.append(batch)
                    self._number, self._cursor = batch.number + 1, batch.cursor
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _admitted(self) -> tuple[int, ArrayTree] | None:
        """The newest weights, once the next batch may be started; None if none is to be."""
        if self._number >= self._parts.config.steps:
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._may_start())
            return None if self._stopped else self._weights

    def _may_start(self) -> bool:
        most = self._parts.config.asynchrony.max_staleness
        return may_start(self._number, self._weights[0], max_staleness=most)


def batches(parts: Parts, state: TrainState, waiting: Sequence[Gathered] = ()) -> InTurns | Ahead:
    """Where a run gets its batches, as its configuration says.

    Args:
      parts: Of the run.
      state: Where it begins.
      waiting: Batches that are there already, from ``state.step`` on.
    """
    for thread in threading.enumerate():
        # Of a run that ended early in this process, in the middle of a batch: two that sample at
        # once take twice the memory, and on several devices wait for each other.
        if thread.name == _THREAD:
            thread.join()
    if not parts.config.asynchrony.max_staleness:
        return InTurns(parts, state)
    return Ahead(parts, state, waiting)
