"""What a method adds to a step: a :class:`Part`, and the records that its functions read.

first    before anything is scored: a process reward model learns
reads    forward passes, as data: whose parameters, which entries, which rows
amend    entries that need those: the step that each token alone would make
wrap     the loss of an optimizer step: scaled, withheld, with another scorer
passes   which rows become an optimizer step: minibatches, or turn by turn
after    state that follows the policy: critic, reference, KL, learned state
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import optax

from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.recipes import AlgoState, Batch, Recipe
from jaxrl_llm.train.batches import Passes
from jaxrl_llm.train.models.denoising import PolicyScorer
from jaxrl_llm.train.optimizer import keep
from jaxrl_llm.train.state import TrainState

# Separates the random numbers of a recipe from those of the sampler in the same step.
_PREPARE = 0x70726570


class Part(NamedTuple):
    """What a method adds to a step at the six places of the module; each function is optional.

    Attributes:
      name: Its name, also of its state in ``TrainState.parts``.
      init: ``(recipe, start) -> state``, its state before the first step, from a :class:`Start`.
      first: ``(state, batch, at) -> (state, batch, metrics)``.
      reads: ``(batch, at) -> reads``, the :class:`Read` that the batch still lacks.
      amend: ``(state, batch, at) -> (state, batch)``.
      wrap: ``(objective, at) -> objective``.
      passes: ``(update, carry, batch, at) -> (carry, (metrics, logp))``; at most one part has it.
      after: ``(state, done, at) -> (state, metrics)``.
      counts_steps: Whether ``after`` also runs in a step without an update, with ``done`` None.
      reads_logp: Whether ``after`` reads ``done.logp``.
      draws: Whether it draws random numbers and so reads ``at.key``.
      cost: Passes over a batch that are no reads, in words; for a user.
    """

    name: str
    init: Callable | None = None
    first: Callable | None = None
    reads: Callable | None = None
    amend: Callable | None = None
    wrap: Callable | None = None
    passes: Callable | None = None
    after: Callable | None = None
    counts_steps: bool = False
    reads_logp: bool = False
    draws: bool = False
    cost: str = ""


class Start(NamedTuple):
    """What the first state of a part is made of.

    Attributes:
      params: The trained parameters, with the structure of ``TrainState.params``.
      adapter: Whether they are those of an adapter.
      reference: Other parameters that a moving reference begins with, or None.
      second_params, second_optimizer: Of a critic or a process reward model, or None.
      optimizer_state: ``(optimizer, params) -> state``, placed as the run's are.
      replicated: ``(array) -> array`` on all devices of the mesh.
      copy: Whether to copy parameters that the state will hold, since a step donates it.
    """

    params: ArrayTree
    adapter: bool
    reference: ArrayTree | None
    second_params: ArrayTree | None
    second_optimizer: optax.GradientTransformation | None
    optimizer_state: Callable
    replicated: Callable
    copy: bool


class Source(NamedTuple):
    """A model that a step reads: its name, and ``get(at) -> (scorer, parameters)``."""

    name: str
    get: Callable


class Read(NamedTuple):
    """Entries of the batch that one forward pass of a model computes before the update.

    Reads of one source with equal ``rows`` and ``call`` are one pass.

    Attributes:
      source: The model.
      entries: Entry of the batch -> "logp", "entropy" or the name of a statistic.
      statistics: Functions of the logits, by name.
      of_hidden: Names of statistics of the hidden states.
      rows: ``(batch, at) -> (batch, microbatches)``, other prompts or responses; None for those of
        the batch.
      call: ``(scorer, params, batch) -> entries``, in place of the scorer's own numbers.
      count: Number of forward passes, for a ``call`` that reads several models.
    """

    source: Source
    entries: Mapping[str, str]
    statistics: Mapping[str, Callable] = {}  # noqa: RUF012  a default that nothing changes
    of_hidden: tuple[str, ...] = ()
    rows: Callable | None = None
    call: Callable | None = None
    count: int = 1


class Objective(NamedTuple):
    """The loss of a part of the batch, as functions ``(params, batch) -> Gradients``.

    Attributes:
      gradient: Differentiates the loss.
      value: Has a gradient of 0, for a policy that does not move.
      of_scorer: ``(scorer) -> objective``, the same loss with another scorer of the policy; only of
        one that no part has changed.
    """

    gradient: Callable
    value: Callable
    of_scorer: Callable


class Gradients(NamedTuple):
    """The gradient of a loss on a prepared batch; all fields are float32."""

    loss: Array  # []
    grads: ArrayTree  # with the structure of the trained parameters
    logp: Array  # [P, G, T], under the policy at which the gradient was taken
    entropy: Array  # [P, G, T]
    scale: Array | None = None  # [], multiplies the optimizer's update; None for 1


class Teacher(NamedTuple):
    """A frozen model that the policy learns from, with the policy's vocabulary."""

    model: Model
    params: ArrayTree


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Setup:
    """How a step was made; the fields are arguments of ``make_step``.

    ``second_model`` is the body of a critic or a process reward model, and ``second_optimizer`` its
    optimizer.
    """

    recipe: Recipe
    scorer: PolicyScorer
    passes: Passes = Passes()
    optimizer: optax.GradientTransformation | None = None
    shards: int = 1
    stale: bool = False
    score_old: bool = False
    second_model: Model | None = None
    second_optimizer: optax.GradientTransformation | None = None
    remat: str = "none"
    learning_rate: float | optax.Schedule | None = None

    @functools.cached_property
    def starts(self) -> int:
        """The first step that trains the policy."""
        return max((part.steps_before_policy for part in self.recipe.parts), default=0)


class At(NamedTuple):
    """Where a step is: what its parts may read besides state and batch.

    Attributes:
      setup: How the step was made.
      state: The state before the update.
      slices: Number of microbatches of a full batch.
      key: The key of the run, for a step that draws; else None.
      teacher: A teacher that is another model, or None.
      reference: Parameters of a frozen reference, which no state holds, or None.
    """

    setup: Setup
    state: TrainState
    slices: int
    key: Array | None = None
    teacher: Teacher | None = None
    reference: ArrayTree | None = None

    @property
    def recipe(self) -> Recipe:
        """The method."""
        return self.setup.recipe

    @property
    def draw(self) -> Array | None:
        """The key of ``Recipe.prepare``, for a recipe that draws."""
        return prepare_key(self.key, self.state.step) if self.recipe.draws else None

    @property
    def waits(self) -> Array | None:
        """Whether the policy does not train yet in this step; None if it always does."""
        return self.state.step < self.setup.starts if self.setup.starts else None

    @property
    def policy_step(self) -> Array:
        """Number of steps of the policy, this one included."""
        step = self.state.step + 1
        return step - self.setup.starts if self.setup.starts else step

    def once_it_trains(self, new: ArrayTree, old: ArrayTree) -> ArrayTree:
        """``new``, but ``old`` while the policy does not train yet."""
        return new if self.waits is None else keep(self.waits, old, new)


class Done(NamedTuple):
    """The update of a batch, for state that follows it.

    Attributes:
      batch: The prepared batch.
      algo_state: The recipe's state as ``prepare`` returned it.
      logp: Log-probabilities ``[P, G, T]`` before the first optimizer step that trained on the
        group, or with turn updates before the first step of the batch; None if no part reads them.
      metrics: Of the optimizer steps.
    """

    batch: Batch
    algo_state: AlgoState
    logp: Array | None
    metrics: dict[str, Array]


def prepare_key(key: Array, step: int | Array) -> Array:
    """The key that ``Recipe.prepare`` receives in a step of a run with this key."""
    return jax.random.fold_in(jax.random.fold_in(key, step), _PREPARE)


def absent(batch: Batch, recipe: Recipe, source: str) -> dict[str, Callable]:
    """The statistics with this source that the batch does not have."""
    return {k: f for k, f in recipe.computed_from(source).items() if k not in batch.extras}


def _policy(at: At) -> tuple[PolicyScorer, ArrayTree]:
    return at.setup.scorer, at.state.policy


POLICY = Source("policy", _policy)
