"""The policy-gradient algorithm: its compiled step, and the pieces of it for custom loops.

:func:`make_step` compiles :func:`~jaxrl_llm.train.update.step.update_batch`, which one reads from
top to bottom, and :func:`make_pieces` returns the same step in pieces that serve every recipe.
:func:`~jaxrl_llm.train.score_batch`, :func:`make_gradients` and :func:`apply_gradients` are single
compiled functions, for a recipe whose parts only add to the batch.

Shared arguments:

- ``model``, ``recipe``; ``optimizer``: any optax transformation, including clipping and a schedule.
- ``batch``: ``[P, G, T]``. ``scorer``: the model and how it scores the policy.
- ``microbatches``: number of slices of the batch, which divides P; one is in memory at a time.
- ``temperature``: temperature of the policy being trained, equal to the sampler's.
- ``mesh``: the mesh of the state and the batch.
- ``remat``: rematerialization of the layers: "none", "dots" or "full" (recompute all).
- ``chunk_size``: as in ``logprobs``, which chooses it if None; bounds the logits in memory.
- ``shared_prefix_len``: number of first tokens that the prompts of every batch share; the policy
  computes them once for all prompts.
- ``critic_optimizer``: for a recipe with a critic, the one passed to ``init_state``.
- ``critic_model``: the critic's body, if it differs from the policy's model.
- ``teacher``: another model that the policy learns from, if the recipe uses one.
"""

import dataclasses
import difflib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from jaxrl_llm.core import checks
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.compose import bind
from jaxrl_llm.core.flat_packing import LEAST_SAVED, smaller_rows
from jaxrl_llm.core.packing import FlatPacking
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import batch_shards, on_mesh
from jaxrl_llm.recipes import Batch, Recipe
from jaxrl_llm.train.algorithm import Algorithm, CompiledStep, Step
from jaxrl_llm.train.batches import Passes, least_saved_in, map_microbatches, pack_batch
from jaxrl_llm.train.mesh import place_batch
from jaxrl_llm.train.models.denoising import PolicyScorer, scorer_of
from jaxrl_llm.train.models.score import Scorer
from jaxrl_llm.train.optimizer import apply_if_finite
from jaxrl_llm.train.state import TrainState, check_step_parts
from jaxrl_llm.train.update.part import Gradients, Setup, Teacher
from jaxrl_llm.train.update.parts import parts_of
from jaxrl_llm.train.update.parts.teacher import check_teacher
from jaxrl_llm.train.update.pieces import StepPieces
from jaxrl_llm.train.update.score_batch import score_reference
from jaxrl_llm.train.update.step import objective_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Further options of a step; most loops leave them at their defaults.

    Attributes:
      epochs: Passes over a batch; None for those of the recipe.
      minibatches: Optimizer steps per pass, which divide P; None for those of the recipe.
      chunk_size, shared_prefix_len, critic_optimizer, critic_model: See the module.
      stale: Whether older weights may have sampled a batch; see :func:`score_batch`.
      learning_rate: The optimizer's learning rate, a number or a schedule, for a recipe that reads
        it.
    """

    epochs: int | None = None
    minibatches: int | None = None
    chunk_size: int | None = None
    shared_prefix_len: int = 0
    stale: bool = False
    learning_rate: float | optax.Schedule | None = None
    critic_optimizer: optax.GradientTransformation | None = None
    critic_model: Model | None = None


def make_step(
    model: Model,
    recipe: Recipe,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    temperature: float = 1.0,
    remat: str = "full",
    mesh: jax.sharding.Mesh | None = None,
    donate: bool = True,
    options: StepOptions | None = None,
    teacher: Teacher | None = None,
    **moved: Any,
) -> Step:
    """A compiled function that updates the state with one batch of rollouts.

    The step is :func:`~jaxrl_llm.train.update.step.update_batch`: models score the batch, then
    ``recipe.prepare`` sees all of it. For each epoch and minibatch, the gradient is accumulated in
    float32 over microbatches of full groups and one optimizer step is made. The critic is trained
    in the same way.

    As in PPO, a batch gets ``epochs`` times ``minibatches`` optimizer steps. Minibatches are
    disjoint sets of full groups: with m of them, group p belongs to minibatch ``p % m`` in every
    pass. Advantages come from the full batch, weights (the denominators of the loss) from each
    minibatch, and ``old_logp`` is scored once before the first step, as in verl, TRL and OpenRLHF.
    The weights are computed before a minibatch is divided, so the numbers of microbatches and
    devices affect only rounding.

    An optimizer step is skipped if its loss, gradient or scale is non-finite, or if the recipe's
    state would become non-finite. A skipped step leaves parameters and optimizer state unchanged,
    bit for bit. If all steps of a batch are skipped, the recipe's state and the critic's target are
    unchanged too, but ``state.step`` still advances, and with it a moving reference, whose rule
    counts steps and may also move the policy (``extrapolated``). The critic's update has the same
    guard. ``skipped`` and ``critic_skipped`` count the skipped steps; ``withheld`` counts those
    that an ``update_scale`` of 0 or a critic's ``warmup`` leaves out. A minibatch without a token
    to train on, as after a rule has dropped its groups, makes no step. It counts in no metric but
    ``reward``, ``reward_std`` and ``informative``, and in these if a rollout of it takes part.

    While ``state.step`` is below the critic's ``warmup``, the critic alone trains. The policy's
    steps are withheld: its parameters and optimizer, and so its learning rate, stay bit for bit as
    they are, and ``grad_norm`` is 0. State that tracks the policy starts after the warmup:
    controllers that read its log-probabilities, its entropy or its KL, rules of the optimizer's
    steps, a moving reference and policies of earlier iterations. All else moves as in any step.

    With one optimizer step, ``old_logp`` may stay None: the policy being trained is then its own
    proximal policy and the ratio is 1. With several, or if ``recipe.prepare`` requires it,
    ``old_logp`` is computed before the first step, unless the batch already has it, or nothing
    compares with it (``recipe.compares_old``).

    Args:
      model, recipe, optimizer, temperature, remat, mesh: See the module.
      microbatches: See the module; each minibatch is split into its share of them.
      donate: Whether to reuse the memory of the input state, which then cannot be used again.
      options: Further options; None for their defaults.
      teacher: See the module. The state does not hold the teacher's parameters. The teacher reads
        the prompts of the batch.
      **moved: Options of :class:`StepOptions` by themselves, as before; deprecated.

    Returns:
      ``step(state, batch) -> (state, metrics)``. The metrics are float32 scalars: ``loss``,
      ``grad_norm`` (before any clipping) and ``update_norm`` (of the change of the parameters, 0
      without a step), means over the optimizer steps; ``updates`` and ``skipped``, the numbers of
      steps that were made and that were skipped; the same five of a critic, prefixed with
      ``critic_``; with a recipe's ``update_scale`` or a critic's ``warmup``, ``withheld``, the
      number of steps that these left out; those of
      :func:`~jaxrl_llm.train.metrics.batch_metrics`, summarized by
      :func:`~jaxrl_llm.train.batches.summarize_updates`; ``no_signal``; and, for a correction with
      rejection rules, those of :func:`~jaxrl_llm.train.metrics.rejection_metrics`.

    Raises:
      ValueError: If a number is not positive, or the recipe has a critic without an optimizer; when
        the step is called, if P does not split into the minibatches and microbatches.

    Example:
      >>> import jax, optax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> recipe, optimizer = jr.recipes.dr_grpo(length=4), optax.adamw(1e-3)
      >>> step = jr.train.make_step(model, recipe, optimizer)
      >>> state = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0))
      >>> mask = jax.numpy.ones((2, 2, 4), bool)
      >>> batch = jr.recipes.Batch(
      ...     tokens=jax.numpy.arange(16).reshape(2, 2, 4), mask=mask,
      ...     rewards=jax.numpy.array([[1.0, 0.0], [0.0, 1.0]]), where=mask[..., 0],
      ...     prompt_tokens=jax.numpy.ones((2, 3), int), prompt_mask=jax.numpy.ones((2, 3), bool))
      >>> state, metrics = step(state, batch)
      >>> int(state.step), float(metrics["reward"])
      (1, 0.5)
    """
    pieces = _pieces(
        "make_step",
        model,
        recipe,
        optimizer,
        microbatches=microbatches,
        temperature=temperature,
        remat=remat,
        mesh=mesh,
        options=_with_moved("make_step", options or StepOptions(), moved),
        teacher=teacher,
    )
    return CompiledStep(
        on_mesh(pieces.step, mesh, model.sharding_rules),
        on_mesh(pieces.prepare, mesh),
        donate=donate,
        takes_key=recipe.draws or any(part.draws for part in pieces.parts),
        teacher=() if teacher is None else teacher.params,
        pass_over=pieces.pass_over if any(p.counts_steps for p in pieces.parts) else None,
    )


def make_pieces(
    model: Model,
    recipe: Recipe,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    temperature: float = 1.0,
    remat: str = "full",
    mesh: jax.sharding.Mesh | None = None,
    options: StepOptions | None = None,
    teacher: Teacher | None = None,
) -> StepPieces:
    """The step of :func:`make_step` in pieces, for a loop that changes what happens between them.

    The pieces are functions for ``jit``; together they serve every recipe, with its critic, process
    reward model, teacher, moving reference and updates turn by turn.

    Args:
      model, recipe, optimizer, microbatches, temperature, remat, mesh, options, teacher: As in
        :func:`make_step`. The parameters of ``teacher`` are an argument of ``begin``.

    Returns:
      :class:`~jaxrl_llm.train.StepPieces`: ``begin``, ``gradients``, ``apply`` and ``finish``.

    Raises:
      ValueError: If a number is not positive, or the recipe has a critic without an optimizer; when
        a piece is traced, if P does not split into the minibatches and microbatches.

    Example:
      >>> import jax, optax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> recipe, optimizer = jr.recipes.dr_grpo(length=6), optax.sgd(0.1)
      >>> pieces = jr.train.make_pieces(model, recipe, optimizer)
      >>> @jax.jit
      ... def step(state, batch):
      ...     begun = pieces.begin(state, batch)
      ...     def update(carry, rows, trains):
      ...         gradients = pieces.gradients(begun, carry, rows)
      ...         return pieces.apply(begun, carry, rows, gradients, trains=trains)
      ...     return pieces.finish(begun, update)
      >>> state = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0))
      >>> state, metrics = step(state, jr.testing.make_case().batch)
      >>> int(state.step), float(metrics["skipped"])
      (1, 0.0)
    """
    return _pieces(
        "make_pieces",
        model,
        recipe,
        optimizer,
        microbatches=microbatches,
        temperature=temperature,
        remat=remat,
        mesh=mesh,
        options=options or StepOptions(),
        teacher=teacher,
    )


def _with_moved(function: str, options: StepOptions, moved: Mapping[str, Any]) -> StepOptions:
    """The options with those that a call still passes by themselves."""
    known = [field.name for field in dataclasses.fields(StepOptions)]
    for name in moved:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, "microbatches", "temperature"], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise TypeError(f"{function}: there is no argument {name!r}{hint}")
        text = f"{function}: pass {name}= as options=jr.train.StepOptions({name}=...)."
        warnings.warn(text, DeprecationWarning, stacklevel=3)
    return dataclasses.replace(options, **moved)


def _pieces(
    function: str,
    model: Model,
    recipe: Recipe,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int,
    temperature: float,
    remat: str,
    mesh: jax.sharding.Mesh | None,
    options: StepOptions,
    teacher: Teacher | None,
) -> StepPieces:
    check_step_parts(function, recipe, optimizer)
    epochs = recipe.epochs if options.epochs is None else options.epochs
    minibatches = recipe.minibatches if options.minibatches is None else options.minibatches
    checks.check_positive(function, epochs=epochs, minibatches=minibatches)
    checks.check_positive(function, microbatches=microbatches, temperature=temperature)
    checks.check_non_negative(function, shared_prefix_len=options.shared_prefix_len)
    recipe.check_passes(epochs, minibatches)
    second = options.critic_optimizer
    if (recipe.second_model is None) != (second is None):
        has = "a critic but no" if second is None else "no critic but a"
        raise ValueError(f"{function}: recipe {recipe.name!r} has {has} critic_optimizer.")
    if teacher is not None:
        check_teacher(function, recipe, model, teacher.model)
    scorer = scorer_of(
        recipe,
        model,
        temperature=temperature,
        chunk_size=options.chunk_size,
        remat=remat,
        shared_prefix_len=options.shared_prefix_len,
    )
    setup = Setup(
        recipe=recipe,
        scorer=scorer,
        passes=Passes(epochs, minibatches, microbatches),
        optimizer=optimizer,
        shards=batch_shards(mesh),
        stale=options.stale,
        score_old=epochs * minibatches > 1 and recipe.compares_old,
        second_model=options.critic_model or model,
        second_optimizer=second,
        remat=remat,
        learning_rate=options.learning_rate,
    )
    return StepPieces(function, setup, parts_of(setup), None if teacher is None else teacher.model)


def _with_smaller_rows(batch: Batch, *, least_saved: int) -> Batch | None:
    """The batch with the shapes of smaller flat rows, which come once responses are shorter."""
    if not isinstance(batch.packing, FlatPacking) or jax.process_count() > 1:
        return None
    smaller = smaller_rows(batch.packing, least_saved=least_saved)
    return None if smaller is None else batch.replace(packing=smaller)


def make_gradients(
    model: Model,
    recipe: Recipe,
    *,
    microbatches: int = 1,
    temperature: float = 1.0,
    remat: str = "full",
    chunk_size: int | None = None,
    shared_prefix_len: int = 0,
    mesh: jax.sharding.Mesh | None = None,
    teacher: Teacher | None = None,
) -> Callable[[TrainState, Batch], Gradients]:
    """A compiled ``gradients(state, batch) -> Gradients`` of the recipe's loss on a prepared batch.

    Followed by :func:`apply_gradients`, it makes one optimizer step in a custom loop.

    Example:
      >>> import jax, optax
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model()
      >>> recipe, optimizer = jr.recipes.dr_grpo(length=6), optax.sgd(0.1)
      >>> state = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0))
      >>> batch, _ = recipe.prepare(jr.testing.make_case().batch, state.algo_state)
      >>> gradients = jr.train.make_gradients(model, recipe)(state, batch)
      >>> state, metrics = jr.train.apply_gradients(optimizer, state, gradients)
      >>> int(state.step), float(metrics["skipped"])
      (1, 0.0)
    """
    checks.check_positive("make_gradients", microbatches=microbatches, temperature=temperature)
    scorer = scorer_of(
        recipe,
        model,
        temperature=temperature,
        chunk_size=chunk_size,
        remat=remat,
        shared_prefix_len=shared_prefix_len,
    )

    passes, shards = Passes(microbatches=microbatches), batch_shards(mesh)
    setup = Setup(recipe=recipe, scorer=scorer, passes=passes, shards=shards)
    other = None if teacher is None else teacher.model
    pieces = StepPieces("make_gradients", setup, parts_of(setup), other)

    def gradients(state: TrainState, batch: Batch, teacher_params: ArrayTree) -> Gradients:
        at = pieces.at(state, batch, None, teacher_params)
        objective = objective_of(pieces.parts, at, microbatches)
        return objective.gradient(state.params, batch)

    compiled = jax.jit(on_mesh(gradients, mesh, model.sharding_rules))
    teacher_params = None if teacher is None else teacher.params

    def call(state: TrainState, batch: Batch) -> Gradients:
        on_device = state._replace(data_cursor=(), collector_state=())
        return compiled(on_device, batch, teacher_params)

    return call


_apply = jax.jit(apply_if_finite, static_argnums=0)


def apply_gradients(
    optimizer: optax.GradientTransformation, state: TrainState, gradients: Gradients
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step, skipped if the loss, gradient or update is non-finite.

    A recipe's ``update_scale``, which the gradients hold, multiplies the update. While a critic
    trains alone (its ``warmup``), it is 0.

    Args:
      optimizer: The one passed to ``init_state``.
      state: The state before the step.
      gradients: From :func:`make_gradients`.

    Returns:
      The state of the next step, and ``loss``, ``grad_norm``, ``update_norm``, ``updates`` and
      ``skipped``, with an ``update_scale`` also ``withheld``. A step is made also if the batch had
      no token to train on, unlike in :func:`make_step`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax, optax
      >>> import jaxrl_llm as jr
      >>> params, optimizer = {"w": jnp.array([1.0, 2.0])}, optax.sgd(0.5)
      >>> recipe, logp = jr.recipes.dr_grpo(length=4), jnp.zeros((1, 1, 4))
      >>> state = jr.train.init_state(params, optimizer, recipe, key=jax.random.key(0))
      >>> for gradient in (jnp.array([1.0, 0.0]), jnp.array([jnp.nan, 0.0])):
      ...     gradients = jr.train.Gradients(jnp.float32(0.0), {"w": gradient}, logp, logp)
      ...     state, metrics = jr.train.apply_gradients(optimizer, state, gradients)
      ...     print(state.params["w"], int(state.step), float(metrics["skipped"]))
      [0.5 2. ] 1 0.0
      [0.5 2. ] 2 1.0
    """
    carry = (state.params, state.opt_state)
    carry, metrics = _apply(
        optimizer, carry, gradients.loss, gradients.grads, scale=gradients.scale
    )
    return state._replace(params=carry[0], opt_state=carry[1], step=state.step + 1), metrics


def make_scorer(
    model: Model,
    *,
    microbatches: int = 1,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    shared_prefix_len: int = 0,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[[ArrayTree, Batch], Array]:
    """A compiled ``scorer(params, batch) -> logp [P, G, T]``, without gradients.

        logp[p, g, t] = log softmax(logits(prompt[p], y[p, g, :t]) / temperature)[y[p, g, t]]

    For log-probabilities that must be known before the step, such as ``ref_logp`` of a frozen
    reference, which chooses the experts itself: ``batch.replace(experts=None)``.

    Args:
      model, microbatches, temperature, chunk_size, shared_prefix_len, mesh: See the module.

    Returns:
      ``scorer(params, batch)``: float32 ``[P, G, T]`` in nats, 0 where ``batch.mask`` is False.

    Raises:
      ValueError: If ``microbatches`` or ``temperature`` is not positive, ``shared_prefix_len`` is
        negative, or, when called, ``microbatches`` does not divide P.

    Example:
      >>> import jaxrl_llm as jr
      >>> model, params = jr.testing.tiny_model(num_layers=1)
      >>> batch = jr.testing.make_case().batch
      >>> logp = jr.train.make_scorer(model)(params, batch)
      >>> bool((logp[batch.mask] < 0).all()), bool((logp[~batch.mask] == 0).all())
      (True, True)
      >>> batch = batch.replace(ref_logp=logp)  # for a recipe with a frozen reference
    """
    checks.check_positive("make_scorer", microbatches=microbatches, temperature=temperature)
    checks.check_non_negative("make_scorer", shared_prefix_len=shared_prefix_len)
    scorer = Scorer(model, temperature, chunk_size, "none", shared_prefix_len)
    return _logp_of(scorer, Passes(microbatches=microbatches), mesh)


def _logp_of(
    scorer: PolicyScorer, passes: Passes, mesh: jax.sharding.Mesh | None
) -> Callable[[ArrayTree, Batch], Array]:
    def score(params: ArrayTree, batch: Batch) -> Array:
        slices = passes.of(batch.packing).microbatches
        return map_microbatches(lambda part: scorer(params, part).logp, batch, slices)

    return jax.jit(on_mesh(score, mesh))


class RunOptions(NamedTuple):
    """The options of the updates of a run, which its configuration sets.

    ``steps`` is how many the run has, for what is worth compiling. With None, the shapes are those
    of a long run, and none is compiled ahead.
    """

    passes: Passes
    temperature: float
    remat: str
    shared_prefix_len: int
    packing: str
    stale: bool
    mesh: jax.sharding.Mesh | None
    learning_rate: float | optax.Schedule | None = None
    tokens_per_microbatch: int | None = None
    steps: int | None = None


def make_policy_gradient(
    model: Model,
    recipe: Recipe,
    optimizer: optax.GradientTransformation,
    sampler: Callable,
    *,
    options: RunOptions,
    critic_optimizer: optax.GradientTransformation | None = None,
    reference: ArrayTree | None = None,
    teacher: Teacher | None = None,
) -> Algorithm:
    """The algorithm of a run that trains by policy gradients.

    Args:
      model, recipe, optimizer, critic_optimizer, teacher: See the module.
      sampler: Sampler of rollouts; see ``rollout.make_sampler``.
      options: Options of the updates.
      reference: Parameters of a frozen reference, for a recipe that reads it.
    """
    passes, mesh = options.passes, options.mesh
    step: Any = make_step(
        model,
        recipe,
        optimizer,
        microbatches=passes.microbatches,
        temperature=options.temperature,
        remat=options.remat,
        mesh=mesh,
        options=StepOptions(
            epochs=passes.epochs,
            minibatches=passes.minibatches,
            shared_prefix_len=options.shared_prefix_len,
            stale=options.stale,
            learning_rate=options.learning_rate,
            critic_optimizer=critic_optimizer,
        ),
        teacher=teacher,
    )
    least_saved = LEAST_SAVED
    if options.steps is not None:
        least_saved = least_saved_in(options.steps * passes.epochs)
    smaller = bind(_with_smaller_rows, least_saved=least_saved)
    step.look_ahead(None if options.steps is None else smaller, steps=options.steps or 0)
    scorer = scorer_of(
        recipe,
        model,
        temperature=options.temperature,
        shared_prefix_len=options.shared_prefix_len,
    )

    def score_frozen(params: ArrayTree, batch: Batch) -> Batch:
        slices = passes.of(batch.packing).microbatches
        return score_reference(batch, recipe, scorer, params, microbatches=slices)

    scored = jax.jit(on_mesh(score_frozen, mesh))
    logp_of = _logp_of(scorer, passes, mesh)

    reader = model  # as little as both models read
    if teacher is not None:
        reader = model._replace(
            reads_segments=model.reads_segments and teacher.model.reads_segments,
            reads_prompt_trees=model.reads_prompt_trees and teacher.model.reads_prompt_trees,
        )

    def score(batch: Batch) -> tuple[Batch, dict[str, float]]:
        batch, metrics = pack_batch(
            batch,
            options.packing,
            model=reader,
            passes=passes,
            shards=batch_shards(mesh),
            shared_prefix_len=options.shared_prefix_len,
            tokens_per_microbatch=options.tokens_per_microbatch,
            least_saved=least_saved,
        )
        batch = place_batch(batch, mesh)
        return batch if reference is None else scored(reference, batch), metrics

    def inspect(state: TrainState, batch: Batch) -> tuple[Batch, Array]:
        before = state._replace(step=state.step - 1)
        return step.prepared(before, batch), logp_of(state.policy, batch)

    return Algorithm(sampler, score, step, inspect, step.compile_ahead, step.pass_over)
