"""The policy-gradient update, step by step as a paper writes it.

    batch, algo_state = score_visits(batch)    the policy's shift since the prompts' last visits
    batch = score_batch(batch)                 old_logp, ref_logp, the teacher's, the critic's
    batch = apply_rules(batch)                 the step that each token alone would make
    batch, algo_state = recipe.prepare(batch)  advantages, corrections, weights: full batch
    for epoch, minibatch:                      disjoint sets of full groups;
                                               or, with turn_updates, each turn of all groups
        gradients = accumulate_gradients(loss, microbatches)
        params = apply_if_finite(optimizer, gradients)
    last_kl = KL(old || new)                   for recipes that read it
    algo_state = recipe.learn(batch)           for recipes whose state learns from the update

:func:`make_step` compiles the full update. :func:`score_visits`, :func:`score_batch`,
:func:`make_gradients` and :func:`apply_gradients` are its steps, for custom loops.

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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import diagnostics
from jaxrl_llm.core import checks, masking, trees
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.compose import bind
from jaxrl_llm.core.flat_packing import LEAST_SAVED, smaller_rows
from jaxrl_llm.core.packing import FlatPacking
from jaxrl_llm.models.lora import merge_adapter
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import batch_shards, on_mesh, spread_update
from jaxrl_llm.recipes import AlgoState, Batch, Recipe
from jaxrl_llm.recipes.critic import Critic
from jaxrl_llm.recipes.prm import ProcessRewardModel
from jaxrl_llm.recipes.wiring import UPDATE_SCALE
from jaxrl_llm.regularizers import Iterates
from jaxrl_llm.train.algorithm import Algorithm, CompiledStep, Step
from jaxrl_llm.train.batches import (
    Passes,
    accumulate_gradients,
    least_saved_in,
    map_microbatches,
    pack_batch,
    run_passes,
    run_turns,
)
from jaxrl_llm.train.critic import update_critic, update_prm
from jaxrl_llm.train.denoising import PolicyScorer, draws_of_pass, scorer_of, tell_temperature
from jaxrl_llm.train.mesh import check_batch, place_batch
from jaxrl_llm.train.metrics import batch_metrics, no_signal, rejection_metrics
from jaxrl_llm.train.moving import moved_reference
from jaxrl_llm.train.optimizer import apply_if_finite, keep, stays_finite
from jaxrl_llm.train.score import Scorer
from jaxrl_llm.train.score_batch import (
    Teacher,
    apply_rules,
    check_teacher,
    reads_logits_of,
    score_batch,
    score_reference,
    score_visits,
    teacher_of,
    with_old_logp,
)
from jaxrl_llm.train.state import TrainState, check_step_parts

# Separate the random numbers of a recipe, of its reference and of the order of turns from those of
# the sampler in the same step.
_PREPARE, _ORDER, _REFERENCE = 0x70726570, 0x6F726472, 0x72656664


class Gradients(NamedTuple):
    """The gradient of a loss on a prepared batch; all fields are float32."""

    loss: Array  # []
    grads: ArrayTree  # with the structure of the trained parameters
    logp: Array  # [P, G, T], under the policy at which the gradient was taken
    entropy: Array  # [P, G, T]
    scale: Array | None = None  # [], multiplies the optimizer's update; None for 1


def make_step(
    model: Model,
    recipe: Recipe,
    optimizer: optax.GradientTransformation,
    *,
    epochs: int | None = None,
    minibatches: int | None = None,
    microbatches: int = 1,
    temperature: float = 1.0,
    mesh: jax.sharding.Mesh | None = None,
    remat: str = "full",
    donate: bool = True,
    chunk_size: int | None = None,
    shared_prefix_len: int = 0,
    stale: bool = False,
    critic_optimizer: optax.GradientTransformation | None = None,
    critic_model: Model | None = None,
    learning_rate: float | optax.Schedule | None = None,
    teacher: Teacher | None = None,
) -> Step:
    """A compiled function that updates the state with one batch of rollouts.

    The step runs :func:`score_batch`, then ``recipe.prepare`` on the full batch. Then, for each
    epoch and minibatch, it accumulates the gradient in float32 over microbatches of full groups and
    makes one optimizer step. The critic is trained in the same way.

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
    they are, ``loss`` and the metrics of the batch are those of the policy as it is, and its
    gradient is not computed; ``grad_norm`` is 0. What follows the policy waits for it as well:
    controllers that read its log-probabilities, its entropy or its KL, ``last_kl``, rules of the
    optimizer's steps, and what ``learn`` changes. A moving reference and the policies of earlier
    iterations stay too, and their rules count the steps after the warmup. Everything else, such as
    the memory of scores or of prompts, moves as in any step.

    With one optimizer step, ``old_logp`` may stay None: the policy being trained is then its own
    proximal policy and the ratio is 1. With several, or if ``recipe.prepare`` requires it,
    ``old_logp`` is computed before the first step, unless the batch already has it, or nothing
    compares with it (``recipe.compares_old``).

    Args:
      model, recipe, optimizer, temperature, mesh, remat, chunk_size, shared_prefix_len: See the
        module.
      critic_optimizer, critic_model, teacher: See the module. The state does not hold the teacher's
        parameters. The teacher reads the prompts of the batch.
      epochs: Passes over a batch; None for those of the recipe.
      minibatches: Optimizer steps per pass, which divide P; None for those of the recipe.
      microbatches: See the module; each minibatch is split into its share of them.
      donate: Whether to reuse the memory of the input state, which then cannot be used again.
      stale: Whether older weights may have sampled a batch; see :func:`score_batch`.
      learning_rate: The optimizer's learning rate, a number or a schedule, for a recipe that reads
          it.

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
    check_step_parts("make_step", recipe, optimizer)
    epochs = recipe.epochs if epochs is None else epochs
    minibatches = recipe.minibatches if minibatches is None else minibatches
    checks.check_positive("make_step", epochs=epochs, minibatches=minibatches)
    checks.check_positive("make_step", microbatches=microbatches, temperature=temperature)
    checks.check_non_negative("make_step", shared_prefix_len=shared_prefix_len)
    recipe.check_passes(epochs, minibatches)
    if (recipe.second_model is None) != (critic_optimizer is None):
        has = "a critic but no" if critic_optimizer is None else "no critic but a"
        raise ValueError(f"make_step: recipe {recipe.name!r} has {has} critic_optimizer.")
    if teacher is not None:
        check_teacher("make_step", recipe, model, teacher.model)
    parts = _StepParts(
        recipe=recipe,
        optimizer=optimizer,
        scorer=scorer_of(
            recipe,
            model,
            temperature=temperature,
            chunk_size=chunk_size,
            remat=remat,
            shared_prefix_len=shared_prefix_len,
        ),
        passes=Passes(epochs, minibatches, microbatches),
        shards=batch_shards(mesh),
        stale=stale,
        critic_optimizer=critic_optimizer,
        critic_model=critic_model or model,
        remat=remat,
        learning_rate=learning_rate,
        teacher=None if teacher is None else teacher.model,
    )
    turns = recipe.turn_updates
    random_turns = turns is not None and turns.order == "random"
    return CompiledStep(
        on_mesh(parts.step, mesh, model.sharding_rules),
        on_mesh(parts.prepare, mesh),
        donate=donate,
        takes_key=recipe.draws or random_turns or recipe.reference_draws,
        teacher=() if teacher is None else teacher.params,
        pass_over=parts.pass_over if recipe.reference or recipe.earlier else None,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _StepParts:
    """The step of :func:`make_step` and the functions that it consists of.

    ``teacher_params`` are those of ``teacher``, and ``base`` the frozen parameters under LoRA.
    """

    recipe: Recipe
    optimizer: optax.GradientTransformation
    scorer: PolicyScorer
    passes: Passes
    shards: int
    stale: bool
    critic_optimizer: optax.GradientTransformation | None
    critic_model: Model
    remat: str
    learning_rate: float | optax.Schedule | None
    teacher: Model | None

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
        responses = self.recipe.without_texts(batch)
        where, sampled = responses.where, responses.mask & responses.where[..., None]
        of_critic: dict[str, Array] = {}
        if (prm := self.recipe.prm) is not None:
            state, batch, of_critic = self.update_prm(prm, state, batch)
        batch, algo_state = self.prepare(state, batch, key, teacher_params)
        algo_state = _next_state(self.recipe, algo_state, state.algo_state)
        before = self.logp_at_start(state, batch)
        state, metrics, logp = self.update_policy(state, batch, algo_state, key, teacher_params)
        sound = metrics["updates"] + metrics.get("withheld", 0.0) > 0
        applied = sound | (metrics["skipped"] == 0)
        applied &= stays_finite(state.algo_state, algo_state)
        algo_state = self.learn(state, batch, algo_state, logp, before)
        state = self.move_reference(state, key)
        if (critic := self.recipe.critic) is not None:
            state, of_critic = self.update_critic(critic, state, batch)
        metrics |= {f"critic_{name}": value for name, value in of_critic.items()}
        metrics |= rejection_metrics(self.recipe, batch, sampled)
        metrics["no_signal"] = no_signal(self.recipe, batch)
        if self.recipe.curation is not None:  # which may drop every rollout
            reward = masking.masked_mean(batch.rewards, where)
            metrics["reward"] = jnp.where(jnp.any(batch.where), metrics["reward"], reward)
        algo_state = keep(applied, algo_state, state.algo_state)
        return state._replace(algo_state=algo_state, step=state.step + 1, base=()), metrics

    def prepare(
        self, state: TrainState, batch: Batch, key: Array | None, teacher_params: ArrayTree
    ) -> tuple[Batch, AlgoState]:
        """The batch with all that is known before the update, and the recipe's next state."""
        self.passes.check("make_step", batch.tokens.shape[0], self.shards)
        recipe, scorer, slices = self.recipe, self.scorer, self.slices(batch)
        batch, algo_state = score_visits(batch, recipe, scorer, state=state, microbatches=slices)
        batch = score_batch(
            batch,
            recipe,
            scorer,
            state=state,
            microbatches=slices,
            score_old=self.passes.updates > 1 and self.recipe.compares_old,
            stale=self.stale,
            critic_model=self.critic_model,
            teacher=self.teacher_from(teacher_params),
        )
        drawn = prepare_key(key, state.step) if recipe.draws else None
        batch, rules = apply_rules(
            batch,
            recipe,
            scorer,
            state=state._replace(algo_state=algo_state),
            key=drawn,
            learning_rate=self.learning_rate,
            microbatches=slices,
        )
        batch, algo_state = recipe.prepare(batch, algo_state, key=drawn)
        return batch, algo_state._replace(rules=rules)

    def update_policy(
        self,
        state: TrainState,
        batch: Batch,
        algo_state: AlgoState,
        key: Array | None,
        teacher_params: ArrayTree,
    ) -> tuple[TrainState, dict[str, Array], Array | None]:
        """The policy after the optimizer steps of a prepared batch, their metrics, and ``logp``.

        ``logp`` are the log-probabilities before the first step that trained on the group, or
        with turn updates before the first step of the batch; None if nothing reads them.
        """
        recipe, passes, turns = self.recipe, self.passes, self.recipe.turn_updates
        scorer = self.gradient_scorer(state, teacher_params)
        accumulated = passes.of(batch.packing).accumulated
        finite = stays_finite(state.algo_state, algo_state)
        reweighs = passes.minibatches > 1 or turns is not None
        hands_logp = passes.updates == 1 or recipe.learns
        waits = _waits(recipe, state.step)

        def gradients(params: ArrayTree, part: Batch) -> Gradients:
            return _policy_gradients(scorer, recipe, state.base, params, part, accumulated)

        def only_loss(params: ArrayTree, part: Batch) -> Gradients:
            return _policy_loss(scorer, recipe, state.base, params, part, accumulated)

        moves = gradients if recipe.trains_weights else only_loss

        def update(carry, part: Batch, there: Array):
            part = recipe.weigh(part) if reweighs else part
            there &= jnp.any(part.weights != 0)
            if waits is None:
                loss, grads, logp, entropy, _ = moves(carry[0], part)
            else:
                loss, grads, logp, entropy, _ = jax.lax.cond(
                    waits, only_loss, moves, carry[0], part
                )
            scale = _update_scale(recipe, part, logp, state.step)
            carry, metrics = apply_if_finite(
                self.optimizer, carry, loss, grads, scale=scale, finite=finite, there=there
            )
            metrics |= batch_metrics(recipe, logp, entropy, part)
            return carry, (metrics, logp if hands_logp else None)

        def logp_of(carry) -> Array:
            return self.logp(merge_adapter(state.base, carry[0]), batch)

        carry = state.params, state.opt_state
        if turns is None:
            of_pass = None
            if recipe.likelihood is not None and recipe.likelihood.passes > 1:
                of_pass = bind(draws_of_pass, likelihood=recipe.likelihood)
            carry, (metrics, logp) = run_passes(passes, update, carry, batch, of_pass=of_pass)
        else:
            drawn = None if turns.order != "random" else order_key(key, state.step)
            carry, (metrics, logp) = run_turns(turns, update, logp_of, carry, batch, drawn)
        return state._replace(params=carry[0], opt_state=carry[1]), metrics, logp

    def logp_at_start(self, state: TrainState, batch: Batch) -> Array | None:
        """The log-probabilities before the step, from which a recipe reads its KL."""
        # In such a run, old_logp is of older weights; without a comparison it is not scored.
        of_older = self.stale and not self.recipe.reads_behavior
        other = of_older or batch.old_logp is None
        if self.recipe.reads_last_kl and self.passes.updates > 1 and other:
            return self.logp(state.policy, batch)
        return batch.old_logp

    def learn(
        self,
        state: TrainState,
        batch: Batch,
        algo_state: AlgoState,
        logp: Array | None,
        before: Array | None,
    ) -> AlgoState:
        """The recipe's state after it learned from the update, which led to ``state``.

        Args:
          state: The state after the update.
          batch: The prepared batch.
          algo_state: The recipe's state before it learns.
          logp: Of :meth:`update_policy`.
          before: Of :meth:`logp_at_start`.
        """
        recipe, prepared = self.recipe, algo_state
        batch = recipe.without_texts(batch)
        if recipe.reads_last_kl:
            first = self.passes.updates == 1 or recipe.turn_updates is not None
            old_logp = logp if first else before
            last_kl = diagnostics.approx_kl(
                self.logp(state.policy, batch), old_logp, batch.mask, estimator="k3"
            )
            last_kl = keep(jnp.isfinite(last_kl), last_kl, state.algo_state.last_kl)
            algo_state = algo_state._replace(last_kl=last_kl)
        if recipe.learns:
            learned = recipe.learn(batch, algo_state, logp=logp)
            learned = _next_state(recipe, learned, state.algo_state)
            algo_state = keep(stays_finite(algo_state, learned), learned, algo_state)
        if (waits := _waits(recipe, state.step)) is not None:
            # What follows the policy begins with it: controllers of its divergence would else give
            # way while that is 0.
            held = {name: state.algo_state.controllers[name] for name in recipe.policy_controllers}
            waiting = prepared._replace(
                controllers=prepared.controllers | held, rules=state.algo_state.rules
            )
            algo_state = keep(waits, waiting, algo_state)
        return algo_state

    def pass_over(self, state: TrainState, key: Array | None) -> tuple[TrainState, None]:
        """The state after a step without an update."""
        state = self.move_reference(state, key)
        return state._replace(step=state.step + 1), None

    def move_reference(self, state: TrainState, key: Array | None) -> TrainState:
        """The state with its moving reference and the policies of earlier iterations.

        Their rules count steps, so they are called after every one, also if its updates were
        skipped: a reference that is replaced once would otherwise never be. The steps in which the
        critic alone trains do not count.
        """
        recipe, waits = self.recipe, _waits(self.recipe, state.step)
        step = state.step + 1
        if recipe.critic is not None and recipe.critic.warmup:
            step -= recipe.critic.warmup

        def kept(new: ArrayTree, old: ArrayTree) -> ArrayTree:
            return new if waits is None else keep(waits, old, new)

        if recipe.reference is not None:
            # The same key in every step: a rule may draw once for several steps.
            drawn = jax.random.fold_in(key, _REFERENCE) if recipe.reference_draws else None
            reference = moved_reference(
                recipe.reference, state.reference, state.params, step, key=drawn
            )
            if isinstance(state.reference, Iterates):
                reference, params = reference
                state = state._replace(params=kept(params, state.params))
            state = state._replace(reference=kept(reference, state.reference))
        if recipe.earlier is not None:
            earlier = recipe.earlier(state.earlier, state.params, step)
            state = state._replace(earlier=kept(earlier, state.earlier))
        return state

    def update_critic(
        self, critic: Critic, state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, Array]]:
        """The state with the critic after its optimizer steps, and their metrics."""
        updated, metrics = update_critic(
            critic,
            state.critic,
            self.recipe,
            batch,
            passes=self.passes.of(batch.packing),
            model=self.critic_model,
            optimizer=self.critic_optimizer,
            remat=self.remat,
        )
        return state._replace(critic=updated), metrics

    def update_prm(
        self, prm: ProcessRewardModel, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Batch, dict[str, Array]]:
        """The process reward model after its optimizer step, the batch that it read, and metrics.

        It learns before the batch is scored, as the policy learns from what it says.
        """
        slices = self.slices(batch)
        batch = with_old_logp(
            batch, self.recipe, self.scorer, state=state, microbatches=slices, stale=self.stale
        )
        updated, metrics = update_prm(
            prm,
            state.critic,
            batch,
            scorer=dataclasses.replace(self.scorer, model=self.critic_model),
            optimizer=self.critic_optimizer,
            microbatches=slices,
        )
        return state._replace(critic=updated), batch, metrics

    def slices(self, batch: Batch) -> int:
        """The microbatches of a full batch."""
        return self.passes.of(batch.packing).microbatches

    def logp(self, policy: ArrayTree, batch: Batch) -> Array:
        """Log-probabilities ``[P, G, T]`` of a batch."""
        return map_microbatches(lambda x: self.scorer(policy, x).logp, batch, self.slices(batch))

    def teacher_from(self, teacher_params: ArrayTree) -> Teacher | None:
        """The teacher with its parameters, or None."""
        return None if self.teacher is None else Teacher(self.teacher, teacher_params)

    def gradient_scorer(self, state: TrainState, teacher_params: ArrayTree) -> PolicyScorer:
        """The scorer under the gradient, with the teacher's matrix if the recipe reads logits."""
        if not self.recipe.reads_teacher_logits:
            return self.scorer
        teacher = self.teacher_from(teacher_params)
        reader, params = teacher_of(self.recipe, self.scorer, state, teacher)
        return reads_logits_of(self.scorer, reader.model, params)


def _next_state(recipe: Recipe, new: AlgoState, old: AlgoState) -> AlgoState:
    """The state that the recipe's Transforms return, as arrays.

    Raises:
      ValueError: If it has another structure, shape or dtype than the state before. It would be
        promoted or broadcast, and a resumed run, which begins with ``init``, could not read it.
    """
    name, new = f"Recipe {recipe.name!r}", trees.as_arrays(new)
    trees.check_alike(name, "a Transform's state before and after an update", old, new)
    rows = zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True)
    for (path, before), after in rows:
        if before.dtype != after.dtype and jnp.result_type(before, after) != before.dtype:
            raise ValueError(
                f"{name}: {trees.path_str(path)} is {before.dtype} in the state of a Transform's "
                f"init and {after.dtype} after an update; both must be of one dtype."
            )
    return new


def _with_smaller_rows(batch: Batch, *, least_saved: int) -> Batch | None:
    """The batch with the shapes of smaller flat rows, which come once responses are shorter."""
    if not isinstance(batch.packing, FlatPacking) or jax.process_count() > 1:
        return None
    smaller = smaller_rows(batch.packing, least_saved=least_saved)
    return None if smaller is None else batch.replace(packing=smaller)


def _policy_gradients(
    scorer: PolicyScorer,
    recipe: Recipe,
    base: ArrayTree,
    params: ArrayTree,
    batch: Batch,
    microbatches: int,
) -> Gradients:
    """The gradient of the recipe's loss with respect to the trained parameters."""
    tell_temperature(batch, scorer)
    statistics = recipe.computed_from("policy")
    measured = bool(recipe.computed_from("update").keys() - {UPDATE_SCALE})
    measured &= batch.old_logp is not None
    if measured and microbatches > 1:  # measured on all rows, so before the first microbatch
        policy = merge_adapter(base, params)
        before = map_microbatches(lambda part: scorer(policy, part).logp, batch, microbatches)
        batch, measured = recipe.measure(batch, before), False

    def loss(params: ArrayTree, part: Batch):
        logp, entropy, computed = scorer(merge_adapter(base, params), part, statistics)
        part = recipe.measure(part, logp) if measured else part
        value = recipe.loss(logp, part, entropy=entropy, statistics=computed)
        return value, (logp, entropy)

    value, (logp, entropy), grads = accumulate_gradients(loss, params, batch, microbatches)
    return Gradients(value, grads, logp, entropy)


def _policy_loss(
    scorer: PolicyScorer,
    recipe: Recipe,
    base: ArrayTree,
    params: ArrayTree,
    batch: Batch,
    microbatches: int,
) -> Gradients:
    """As :func:`_policy_gradients` for a policy that does not move: the gradient is 0."""
    policy, statistics = merge_adapter(base, params), recipe.computed_from("policy")
    logp, entropy, computed = map_microbatches(
        lambda part: scorer(policy, part, statistics), batch, microbatches
    )
    measured = recipe.measure(batch, logp)
    value = recipe.loss(logp, measured, entropy=entropy, statistics=computed)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params)
    return Gradients(value, spread_update(zeros), logp, entropy)


def _waits(recipe: Recipe, step: Array) -> Array | None:
    """Whether the policy waits for its critic in this step; None if it never does."""
    critic = recipe.critic
    return None if critic is None or not critic.warmup else step < critic.warmup


def _update_scale(recipe: Recipe, batch: Batch, logp: Array, step: Array) -> Array | None:
    """What the optimizer's update of a policy is multiplied by; None for nothing."""
    scale, waits = None, _waits(recipe, step)
    if UPDATE_SCALE in recipe.computed_from("update"):
        batch = recipe.measure(batch, logp)
    if UPDATE_SCALE in recipe.computed_from("batch", "update"):
        scale = batch.extras[UPDATE_SCALE][0, 0, 0]
    if waits is None:
        return scale
    return jnp.where(waits, 0.0, 1.0 if scale is None else scale)


def prepare_key(key: Array, step: int | Array) -> Array:
    """The key that ``Recipe.prepare`` receives in a step of a run with this key."""
    return jax.random.fold_in(jax.random.fold_in(key, step), _PREPARE)


def order_key(key: Array, step: int | Array) -> Array:
    """The key that orders the turns in a step of a run with this key."""
    return jax.random.fold_in(jax.random.fold_in(key, step), _ORDER)


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

    def gradients(
        params: ArrayTree, base: ArrayTree, step: Array, batch: Batch, teacher_params
    ) -> Gradients:
        check_batch("make_gradients", batch.tokens.shape[0], microbatches, batch_shards(mesh))
        trained = scorer
        if teacher is not None and recipe.reads_teacher_logits:
            trained = reads_logits_of(scorer, teacher.model, teacher_params)
        found = _policy_gradients(trained, recipe, base, params, batch, microbatches)
        return found._replace(scale=_update_scale(recipe, batch, found.logp, step))

    compiled = jax.jit(on_mesh(gradients, mesh, model.sharding_rules))
    teacher_params = None if teacher is None else teacher.params
    return lambda state, batch: compiled(
        state.params, state.base, state.step, batch, teacher_params
    )


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


class StepOptions(NamedTuple):
    """The options of :func:`make_step` that a run's configuration sets.

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
    options: StepOptions,
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
        epochs=passes.epochs,
        minibatches=passes.minibatches,
        microbatches=passes.microbatches,
        temperature=options.temperature,
        mesh=mesh,
        remat=options.remat,
        shared_prefix_len=options.shared_prefix_len,
        stale=options.stale,
        critic_optimizer=critic_optimizer,
        learning_rate=options.learning_rate,
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
