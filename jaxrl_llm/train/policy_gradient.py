"""The policy-gradient update, step by step as a paper writes it.

    batch, algo_state = score_visits(batch)    the policy's shift since the prompts' last visits
    batch = score_batch(batch)                 old_logp, ref_logp, the teacher's, the critic's
    batch = apply_rules(batch)                 the step that each token alone would make
    batch, algo_state = recipe.prepare(batch)  advantages, corrections, weights: full batch
    for epoch, minibatch:                      disjoint sets of full groups, in random order;
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
from jaxrl_llm.core import checks, masking
from jaxrl_llm.core.axes import Array, ArrayTree
from jaxrl_llm.core.compose import bind, call_with
from jaxrl_llm.core.flat_packing import smaller_rows
from jaxrl_llm.core.packing import FlatPacking, Tree
from jaxrl_llm.models.denoising import check_causal
from jaxrl_llm.models.lora import merge_adapter
from jaxrl_llm.models.protocol import Model
from jaxrl_llm.models.sharding import batch_shards, on_mesh
from jaxrl_llm.preferences.groups import count_pairs
from jaxrl_llm.recipes import AlgoState, Batch, Recipe
from jaxrl_llm.recipes.critic import Critic
from jaxrl_llm.recipes.prm import ProcessRewardModel
from jaxrl_llm.recipes.wiring import of_likelihood
from jaxrl_llm.regularizers import Iterates
from jaxrl_llm.train.algorithm import Algorithm, CompiledStep, Step
from jaxrl_llm.train.batches import (
    Passes,
    accumulate_gradients,
    join_microbatches,
    map_microbatches,
    pack_batch,
    run_passes,
    run_turns,
    split_microbatches,
)
from jaxrl_llm.train.critic import CriticState, average, critic_values
from jaxrl_llm.train.denoising import PolicyScorer, draws_of_pass, scorer_of
from jaxrl_llm.train.mesh import check_batch, place_batch
from jaxrl_llm.train.metrics import batch_metrics, rejection_metrics
from jaxrl_llm.train.optimizer import apply_if_finite, keep, next_rate, stays_finite
from jaxrl_llm.train.score import HIDDEN_STATISTICS, Scorer
from jaxrl_llm.train.state import TrainState

# Separate the random numbers of a recipe, of its reference and of the order of minibatches from
# those of the sampler in the same step.
_PREPARE, _ORDER, _REFERENCE = 0x70726570, 0x6F726472, 0x72656664


class Teacher(NamedTuple):
    """A frozen model that the policy learns from, with the policy's vocabulary."""

    model: Model
    params: ArrayTree


class Gradients(NamedTuple):
    """The gradient of a loss on a prepared batch; all fields are float32."""

    loss: Array  # []
    grads: ArrayTree  # with the structure of the trained parameters
    logp: Array  # [P, G, T], under the policy at which the gradient was taken
    entropy: Array  # [P, G, T]


def make_step(
    model: Model,
    recipe: Recipe,
    optimizer: optax.GradientTransformation,
    *,
    epochs: int = 1,
    minibatches: int = 1,
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
    bit for bit. If all steps of a batch are skipped, the recipe's state, the reference and the
    critic's target are unchanged too, but ``state.step`` still advances. The critic's update has
    the same guard. ``skipped`` and ``critic_skipped`` count the skipped steps.

    With one optimizer step, ``old_logp`` may stay None: the policy being trained is then its own
    proximal policy and the ratio is 1. With several, or if ``recipe.prepare`` requires it,
    ``old_logp`` is computed before the first step, unless the batch already has it.

    Args:
      model, recipe, optimizer, temperature, mesh, remat, chunk_size, shared_prefix_len: See the
        module.
      critic_optimizer, critic_model, teacher: See the module. The state does not hold the teacher's
        parameters. The teacher reads the prompts of the batch.
      epochs: Passes over a batch.
      minibatches: Optimizer steps per pass; divides P.
      microbatches: See the module; each minibatch is split into its share of them.
      donate: Whether to reuse the memory of the input state, which then cannot be used again.
      stale: Whether older weights may have sampled a batch; see :func:`score_batch`.
      learning_rate: The optimizer's learning rate, a number or a schedule, for a recipe that reads
          it.

    Returns:
      ``step(state, batch) -> (state, metrics)``. The metrics are float32 scalars: ``loss``,
      ``grad_norm`` (before any clipping) and ``update_norm`` (of the change of the parameters, 0 if
      skipped), means over the optimizer steps; ``skipped``, the number of skipped steps; the same
      four of a critic, prefixed with ``critic_``; those of
      :func:`~jaxrl_llm.train.metrics.batch_metrics`, summarized by
      :func:`~jaxrl_llm.train.batches.summarize_updates`; and, for a correction with rejection
      rules, those of :func:`~jaxrl_llm.train.metrics.rejection_metrics`.

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
    checks.check_positive("make_step", epochs=epochs, minibatches=minibatches)
    checks.check_positive("make_step", microbatches=microbatches, temperature=temperature)
    checks.check_non_negative("make_step", shared_prefix_len=shared_prefix_len)
    recipe.check_passes(epochs, minibatches)
    if (recipe.second_model is None) != (critic_optimizer is None):
        has = "a critic but no" if critic_optimizer is None else "no critic but a"
        raise ValueError(f"make_step: recipe {recipe.name!r} has {has} critic_optimizer.")
    scorer = scorer_of(
        recipe,
        model,
        temperature=temperature,
        chunk_size=chunk_size,
        remat=remat,
        shared_prefix_len=shared_prefix_len,
    )
    passes = Passes(epochs, minibatches, microbatches)
    hands_logp = passes.updates == 1 or recipe.learns
    turns = recipe.turn_updates
    of_pass = None
    if recipe.likelihood is not None and recipe.likelihood.passes > 1:
        of_pass = bind(draws_of_pass, likelihood=recipe.likelihood)
    if teacher is not None:
        check_teacher("make_step", recipe, model, teacher.model)

    def prepare(state: TrainState, batch: Batch, key: Array | None, weights: ArrayTree):
        passes.check("make_step", batch.tokens.shape[0], batch_shards(mesh))
        slices = passes.of(batch.packing).microbatches
        batch, algo_state = score_visits(batch, recipe, scorer, state=state, microbatches=slices)
        batch = score_batch(
            batch,
            recipe,
            scorer,
            state=state,
            microbatches=slices,
            score_old=passes.updates > 1,
            stale=stale,
            critic_model=critic_model,
            teacher=None if teacher is None else teacher._replace(params=weights),
        )
        drawn = prepare_key(key, state.step) if recipe.draws else None
        batch, rules = apply_rules(
            batch,
            recipe,
            scorer,
            state=state._replace(algo_state=algo_state),
            key=drawn,
            learning_rate=learning_rate,
            microbatches=slices,
        )
        batch, algo_state = recipe.prepare(batch, algo_state, key=drawn)
        return batch, algo_state._replace(rules=rules)

    def step(
        state: TrainState, batch: Batch, key: Array | None, base: ArrayTree, weights: ArrayTree
    ):
        state = state._replace(base=base)
        trained, here = scorer, passes.of(batch.packing)
        slices = here.microbatches
        if recipe.reads_teacher_logits:
            other = None if teacher is None else teacher._replace(params=weights)
            of_teacher, known = teacher_of(recipe, scorer, state, other)
            matrix = jax.lax.stop_gradient(of_teacher.model.output_matrix(known))
            cap = of_teacher.model.logit_cap  # matrix and cap are constants of the step
            trained = dataclasses.replace(scorer, teacher_matrix=matrix, teacher_logit_cap=cap)
        sampled = batch.mask & batch.where[..., None]
        of_model: dict[str, Array] = {}
        if recipe.prm is not None and critic_optimizer is not None:
            batch = batch.replace(
                old_logp=old_logp_of(
                    batch, recipe, scorer, state=state, microbatches=slices, stale=stale
                )
            )
            critic, of_model = update_prm(
                recipe.prm,
                state.critic,
                batch,
                scorer=dataclasses.replace(scorer, model=critic_model or model),
                optimizer=critic_optimizer,
                microbatches=slices,
            )
            state = state._replace(critic=critic)
        batch, algo_state = prepare(state, batch, key, weights)
        finite = stays_finite(state.algo_state, algo_state)

        def update(carry, part: Batch, there: Array | bool = True):
            part = recipe.weigh(part) if minibatches > 1 or turns is not None else part
            loss, grads, logp, entropy = _policy_gradients(
                trained, recipe, base, carry[0], part, here.accumulated
            )
            scaled = "update_scale" in recipe.computed_from("batch")
            scale = part.extras["update_scale"][0, 0, 0] if scaled else None
            carry, metrics = apply_if_finite(
                optimizer, carry, loss, grads, scale=scale, finite=finite & there
            )
            metrics |= batch_metrics(recipe, logp, entropy, part)
            return carry, (metrics, logp if hands_logp else None)

        before = (state.params, state.opt_state)
        updates = passes.updates
        if turns is None:
            after, (metrics, logp) = run_passes(passes, update, before, batch, of_pass=of_pass)
        else:

            def logp_of(carry) -> Array:
                policy = merge_adapter(base, carry[0])
                return map_microbatches(lambda x: scorer(policy, x).logp, batch, slices)

            def update_turn(carry, part: Batch, logp: Array, there: Array):
                return update(carry, part.replace(old_logp=logp), there)

            drawn = None if turns.order != "random" else order_key(key, state.step)
            updates = batch.extras["turn_where"].shape[-1]
            after, (metrics, logp) = run_turns(turns, update_turn, logp_of, before, batch, drawn)
        params, opt_state = after
        state = state._replace(params=params, opt_state=opt_state)
        applied = metrics["skipped"] < updates
        if recipe.reads_last_kl:
            old_logp = logp if updates == 1 or turns is not None else batch.old_logp
            algo_state = algo_state._replace(
                last_kl=measure_last_kl(scorer, state, batch, old_logp, slices)
            )
        if recipe.learns:
            learned = recipe.learn(batch, algo_state, logp=logp)
            algo_state = keep(stays_finite(algo_state, learned), learned, algo_state)
        algo_state = keep(applied, algo_state, state.algo_state)
        if recipe.reference is not None:
            # The same key in every step: a rule may draw once for several steps.
            drawn = jax.random.fold_in(key, _REFERENCE) if recipe.reference_draws else None
            reference = call_with(
                recipe.reference, state.reference, params, state.step + 1, context={"key": drawn}
            )
            if isinstance(state.reference, Iterates):
                reference, params = reference
                state = state._replace(params=keep(applied, params, state.params))
            state = state._replace(reference=keep(applied, reference, state.reference))
        if recipe.earlier is not None:
            earlier = recipe.earlier(state.earlier, state.params, state.step + 1)
            state = state._replace(earlier=keep(applied, earlier, state.earlier))
        if recipe.critic is not None and critic_optimizer is not None:
            critic, critic_metrics = update_critic(
                recipe.critic,
                state.critic,
                recipe,
                batch,
                passes=here,
                model=critic_model or model,
                optimizer=critic_optimizer,
                remat=remat,
            )
            state, of_model = state._replace(critic=critic), critic_metrics
        metrics |= {f"critic_{name}": value for name, value in of_model.items()}
        metrics |= rejection_metrics(recipe, batch, sampled)
        return state._replace(algo_state=algo_state, step=state.step + 1, base=()), metrics

    random_turns = turns is not None and turns.order == "random"
    takes_key = recipe.draws or random_turns or recipe.reference_draws
    step = on_mesh(step, mesh, model.sharding_rules)
    return CompiledStep(
        step,
        on_mesh(prepare, mesh),
        donate=donate,
        takes_key=takes_key,
        teacher=() if teacher is None else teacher.params,
        next_shapes=_with_smaller_rows,
    )


def _with_smaller_rows(batch: Batch) -> Batch | None:
    """The batch with the shapes of smaller flat rows, which come once responses are shorter."""
    if not isinstance(batch.packing, FlatPacking) or jax.process_count() > 1:
        return None
    smaller = smaller_rows(batch.packing)
    return None if smaller is None else batch.replace(packing=smaller)


def check_teacher(function: str, recipe: Recipe, model: Model, teacher: Model) -> None:
    """Raises ValueError if a recipe does not learn from another model, or cannot from this one."""
    if not recipe.learns_from_model:
        what = "is its own teacher" if recipe.has_teacher else "learns from none"
        raise ValueError(f"{function}: teacher has no effect: recipe {recipe.name!r} {what}.")
    check_causal(function, teacher, what="the teacher")
    sizes = teacher.config.vocab_size, model.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{function}: the teacher has {sizes[0]:,} tokens in its vocabulary, but the policy "
            f"has {sizes[1]:,}; for a teacher with another tokenizer, use spans of text and a "
            "train.teachers.AlignedTeacher."
        )
    if recipe.teacher_top > sizes[0]:
        raise ValueError(
            f"{function}: recipe {recipe.name!r} reads the {recipe.teacher_top} most probable "
            f"tokens of the teacher, but its vocabulary has {sizes[0]:,}."
        )


def teacher_of(
    recipe: Recipe, scorer: Scorer, state: TrainState, teacher: Teacher | None
) -> tuple[Scorer, ArrayTree]:
    """The scorer and the parameters of a recipe's teacher.

    The teacher is another model, the moving reference or the policy itself.
    """
    if teacher is not None:
        return dataclasses.replace(scorer, model=teacher.model, remat="none"), teacher.params
    moving = recipe.reference is not None
    return scorer, state.reference_policy if moving else state.policy


def measure_last_kl(
    scorer: PolicyScorer, state: TrainState, batch: Batch, old_logp: Array, microbatches: int
) -> Array:
    """KL(old || new) of the last update, in nats per token; the previous KL if non-finite."""
    logp = map_microbatches(lambda part: scorer(state.policy, part).logp, batch, microbatches)
    last_kl = diagnostics.approx_kl(logp, old_logp, batch.mask, estimator="k3")
    return keep(jnp.isfinite(last_kl), last_kl, state.algo_state.last_kl)


def update_critic(
    critic: Critic,
    state: CriticState,
    recipe: Recipe,
    batch: Batch,
    *,
    passes: Passes,
    model: Model,
    optimizer: optax.GradientTransformation,
    remat: str,
) -> tuple[CriticState, dict[str, Array]]:
    """The critic after the optimizer steps of a prepared batch, and their metrics."""

    def loss(params: ArrayTree, part: Batch):
        return critic.total_loss(critic_values(model, params, part, remat=remat), part), ()

    def update(carry, part: Batch):
        part = recipe.weigh(part) if passes.minibatches > 1 else part
        value, _, grads = accumulate_gradients(loss, carry[0], part, passes.accumulated)
        carry, metrics = apply_if_finite(optimizer, carry, value, grads)
        return carry, (metrics, None)

    before = (state.params, state.opt_state)
    (params, opt_state), (metrics, _) = run_passes(passes, update, before, batch)
    target = average(state.target, params, critic.target_rate)
    target = keep(metrics["skipped"] < passes.updates, target, state.target)
    return CriticState(params, opt_state, target), metrics


def update_prm(
    rule: ProcessRewardModel,
    state: CriticState,
    batch: Batch,
    *,
    scorer: PolicyScorer,
    optimizer: optax.GradientTransformation,
    microbatches: int,
) -> tuple[CriticState, dict[str, Array]]:
    """The process reward model after an optimizer step on a batch with ``old_logp``."""
    pairs = count_pairs(batch.rewards, batch.mask, where=batch.where)
    batch = batch.replace(experts=None)  # which are those of the policy

    def loss(params: ArrayTree, part: Batch):
        return rule.total_loss(scorer(params["model"], part).logp, part, pairs), ()

    value, _, grads = accumulate_gradients(loss, state.params, batch, microbatches)
    carry = (state.params, state.opt_state)
    (params, opt_state), metrics = apply_if_finite(optimizer, carry, value, grads)
    return CriticState(params, opt_state, ()), metrics


def old_logp_of(
    batch: Batch,
    recipe: Recipe,
    scorer: PolicyScorer,
    *,
    state: TrainState,
    microbatches: int,
    stale: bool,
) -> Array:
    """Log-probabilities of the proximal policy; see :func:`score_batch`."""
    if batch.old_logp is not None:
        return batch.old_logp
    if stale and not recipe.reads_behavior and batch.behavior_logp is not None:
        return batch.behavior_logp
    return map_microbatches(lambda part: scorer(state.policy, part).logp, batch, microbatches)


def score_batch(
    batch: Batch,
    recipe: Recipe,
    scorer: PolicyScorer,
    *,
    state: TrainState,
    microbatches: int = 1,
    score_old: bool = False,
    stale: bool = False,
    critic_model: Model | None = None,
    teacher: Teacher | None = None,
) -> Batch:
    """Adds to a batch every number that a model computes before the update.

    These fields are set nowhere else; fields that the batch already has stay unchanged.

    - ``behavior_logp`` of tokens for which it is unknown (extra ``behavior_known``), as in a
      demonstration: under the policy at the start of the step, so ratios and corrections treat
      these tokens as on-policy.
    - ``old_logp``, of the proximal policy: under the policy at the start of the step, if
      ``score_old`` is True or ``recipe.prepare`` requires it. If older weights may have sampled
      (``stale``) and the recipe does not read ``behavior_logp``, ``old_logp`` is ``behavior_logp``:
      the ratio then compares the policy with the weights that sampled.
    - ``old_entropy``, ``hidden_sq``, ``hidden_rank`` and statistics with source "old_policy": under
      the policy at the start of the step.
    - Other results of a likelihood's scorer, such as ``old_draw_logp``: under the same policy.
    - ``ref_logp`` and statistics with source "reference": under a moving reference. For a frozen
      reference, see :func:`score_reference`.
    - Statistics with source "teacher", and ``teacher_hidden`` if the recipe reads the teacher's
      logits: of another model; or of the policy or the moving reference after the teacher's prompt.
    - ``answer_logp``: under the policy at the start of the step, after each turn.
    - ``kl_logp``: under the policy at the start of the step, after the previous row's prompt.
    - ``earlier_logp``: the weighted mean under the policies of earlier iterations.
    - ``old_values`` and ``values``: of the critic.
    - ``prm_logp``: of the process reward model, which has already learned from the batch.

    Args:
      batch, recipe, scorer, microbatches, critic_model, teacher: See the module.
      state: The state before the update.
      score_old: Whether ``old_logp`` is needed regardless of what the recipe reads.
      stale: Whether older weights may have sampled the batch.

    Returns:
      The batch that ``recipe.prepare`` takes.

    Raises:
      ValueError: If the recipe needs teacher prompts or reference answers, and the batch has
        neither those nor the numbers computed from them.
    """
    needs = recipe.required_fields

    def absent(source):
        functions = recipe.computed_from(source)
        return {name: f for name, f in functions.items() if name not in batch.extras}

    def with_extras(extras):
        return batch.replace(extras={**batch.extras, **extras})

    def scored(function):
        return map_microbatches(function, batch, microbatches)

    known = batch.extras.get("behavior_known")
    if known is not None and batch.behavior_logp is not None:
        logp = batch.old_logp
        if logp is None:
            logp = scored(lambda part: scorer(state.policy, part).logp)
        logp = jnp.where(known, batch.behavior_logp, jax.lax.stop_gradient(logp))
        batch = batch.replace(behavior_logp=logp)
    if stale and not recipe.reads_behavior and batch.old_logp is None:
        batch = batch.replace(old_logp=batch.behavior_logp)
    old_logp = (score_old or "old_logp" in needs) and batch.old_logp is None
    entropy = "old_entropy" in needs and "old_entropy" not in batch.extras
    of_hidden = tuple(x for x in HIDDEN_STATISTICS if x in needs and x not in batch.extras)
    statistics = absent("old_policy")
    besides = {k: name for k, name in of_likelihood(recipe, "old").items() if k not in batch.extras}
    if old_logp or entropy or of_hidden or statistics or besides:
        scores = scored(lambda part: scorer(state.policy, part, statistics, of_hidden=of_hidden))
        if old_logp:
            batch = batch.replace(old_logp=scores.logp)
        of_policy = scores.statistics
        if recipe.likelihood is not None:
            of_policy = _constants(of_policy, besides)
        computed = of_policy | ({"old_entropy": scores.entropy} if entropy else {})
        batch = with_extras(computed)

    moving = recipe.reference is not None
    if moving:
        reference = state.reference_policy
        batch = score_reference(batch, recipe, scorer, reference, microbatches=microbatches)

    taught = absent("teacher")
    states = recipe.reads_teacher_logits and "teacher_hidden" not in batch.extras
    itself = teacher is None
    if (taught or states) and itself and "teacher_prompt_tokens" not in batch.extras:
        names = ", ".join([*taught, *(["teacher_hidden"] if states else [])])
        raise ValueError(
            f"Recipe {recipe.name!r}: the batch needs teacher_prompt_tokens and "
            f"teacher_prompt_mask in its extras, or {names} computed from them, since no other "
            "model is the teacher."
        )
    if taught or states:
        reader, params = teacher_of(recipe, scorer, state, teacher)
        values = scored(lambda part: reader.teacher(params, part, taught, states=states))
        batch = with_extras(values)

    if "answer_logp" in needs and "answer_logp" not in batch.extras:
        sources = {"ground_truth", "ground_truth_mask", "turn_ids", "turn_where"}
        if missing := sorted(sources - set(batch.extras)):
            raise ValueError(
                f"Recipe {recipe.name!r}: the batch has no {' and no '.join(missing)} in its "
                "extras, and no answer_logp computed from them."
            )
        batch = with_extras(
            {"answer_logp": scored(lambda part: scorer.answers(state.policy, part))}
        )

    if "kl_logp" in needs and "kl_logp" not in batch.extras:
        batch = with_extras({"kl_logp": mismatched(scorer, state.policy, batch, microbatches)})

    if recipe.earlier is not None and "earlier_logp" not in batch.extras:
        shares, total = recipe.earlier.shares(state.earlier), jnp.zeros(batch.mask.shape)
        for share, params in zip(shares, state.earlier.policies, strict=True):
            policy = state.with_base(params)
            logp = scored(lambda part, policy=policy: scorer(policy, part).logp)
            total += share * jax.lax.stop_gradient(logp)
        batch = with_extras({"earlier_logp": total})

    if recipe.critic is not None and "old_values" not in batch.extras:
        critic, body = state.critic, critic_model or scorer.model
        params = critic.params if recipe.critic.target_rate is None else critic.target
        values = scored(lambda part: critic_values(body, params, part))
        batch = with_extras({"old_values": values, "values": recipe.critic.combine(values)})
    if recipe.prm is not None and "prm_logp" not in batch.extras:
        reader = dataclasses.replace(scorer, model=critic_model or scorer.model)
        chooses, params = batch.replace(experts=None), state.critic.params["model"]
        logp = map_microbatches(lambda part: reader(params, part).logp, chooses, microbatches)
        batch = with_extras({"prm_logp": logp})
    return batch


def mismatched(scorer: PolicyScorer, params: ArrayTree, batch: Batch, microbatches: int) -> Array:
    """Total log-probabilities ``[P, G]`` of responses after the previous row's prompt.

    The first row takes the prompt of the last row. The results estimate the divergence of a policy
    on inputs that it was not trained on. Raises ValueError for a batch of one prompt.
    """
    if batch.prompt_tokens.shape[0] < 2:
        raise ValueError(
            "score_batch: kl_logp scores responses after another row's prompt, so a batch needs at "
            f"least 2 prompts; got {batch.prompt_tokens.shape[0]}."
        )
    others = batch.replace(
        prompt_tokens=jnp.roll(batch.prompt_tokens, 1, axis=0),
        prompt_mask=jnp.roll(batch.prompt_mask, 1, axis=0),
        packing=None,
        experts=None,
    )
    logp = map_microbatches(lambda part: scorer(params, part).logp, others, microbatches)
    return jax.lax.stop_gradient(jnp.sum(masking.zero_masked(logp, batch.mask), axis=-1))


def score_visits(
    batch: Batch, recipe: Recipe, scorer: PolicyScorer, *, state: TrainState, microbatches: int = 1
) -> tuple[Batch, AlgoState]:
    """The batch with numbers computed from the last visits to its prompts, and the next state.

    The policy at the start of the step scores the responses that the recipe recalls, over the full
    vocabulary. Numbers that the batch already has stay unchanged, and no visit is recorded.

    Args:
      batch, recipe, scorer, microbatches: See the module.
      state: The state before the update.

    Raises:
      ValueError: If the batch has no ``prompt_ids``.
    """
    algo_state, extras = state.algo_state, dict(batch.extras)
    for name, memory in recipe.computed_from("last_visit").items():
        if name in batch.extras:
            continue
        if isinstance(batch.packing, Tree) and batch.packing.parents is not None:
            raise ValueError(
                f"Recipe {recipe.name!r}: {name!r} recalls responses, but not their turns that the "
                "chat template or the environment rewrites."
            )
        if "prompt_ids" not in batch.extras:
            raise ValueError(f"Recipe {recipe.name!r}: the batch has no prompt_ids in its extras.")
        visits = algo_state.controllers[name]
        recalled = memory.recall(
            visits,
            prompt_ids=batch.extras["prompt_ids"],
            tokens=batch.tokens,
            mask=batch.mask,
            where=batch.where,
        )
        responses = batch.replace(
            tokens=recalled.tokens, mask=recalled.mask, support=None, packing=None, experts=None
        )
        logp = map_microbatches(
            lambda part: scorer(state.policy, part).logp, responses, microbatches
        )
        extras[name], visits = memory.update(jax.lax.stop_gradient(logp), visits, recalled)
        algo_state = algo_state._replace(controllers={**algo_state.controllers, name: visits})
    return batch.replace(extras=extras), algo_state


def apply_rules(
    batch: Batch,
    recipe: Recipe,
    scorer: PolicyScorer,
    *,
    state: TrainState,
    key: Array | None = None,
    learning_rate: float | optax.Schedule | None = None,
    microbatches: int = 1,
) -> tuple[Batch, dict[str, ArrayTree]]:
    """Adds the numbers computed from "optimizer"; returns the batch and the rules' next states.

    The selection reads these numbers, and the rules read the advantages. The advantages are
    therefore prepared for the rules first, without the selection.

    Args:
      batch, recipe, scorer, microbatches: See the module; the batch comes from ``score_batch``.
      state: The state before the update.
      key: The key of ``recipe.prepare``.
      learning_rate: See :func:`make_step`.

    Raises:
      ValueError: If the state of a rule is absent, or a rule reads the learning rate and it is
        None.
    """
    states = dict(state.algo_state.rules)
    every = recipe.computed_from("optimizer")
    rules = {name: rule for name, rule in every.items() if name not in batch.extras}
    if not rules:
        return batch, states
    if absent := [name for name in rules if name not in states]:
        raise ValueError(
            f"recipe {recipe.name!r} computes {', '.join(absent)} from the output matrix; pass its "
            "output_shape to init_state."
        )
    if learning_rate is None and any(rule.reads_rate for rule in rules.values()):
        raise ValueError(
            f"recipe {recipe.name!r} reads the learning rate of the update; pass learning_rate to "
            "make_step, a number or the optimizer's schedule."
        )
    rate = None if learning_rate is None else next_rate(learning_rate, state.opt_state)
    others = tuple(entry for entry in recipe.computed if entry.source != "optimizer")
    unselected = recipe.replace(selection=None, computed=others)
    prepared, _ = unselected.prepare(batch, state.algo_state, key=key)
    mask, extras = prepared.mask, dict(batch.extras)
    advantages = masking.spread("apply_rules", "advantages", prepared.advantages, mask)
    parts = split_microbatches((batch.replace(mask=mask), advantages), microbatches)
    for name, rule in rules.items():
        old = states[name]

        def add(total, part, rule=rule, old=old):
            part, advantages = part
            effects, sums = scorer.step_effects(
                state.policy, part, rule, old, advantages=advantages, rate=rate
            )
            return jax.tree.map(jnp.add, total, sums), effects

        zeros = rule.zeros(*scorer.model.output_matrix(state.policy).shape)
        sums, effects = jax.lax.scan(add, zeros, parts)
        extras[name], states[name] = join_microbatches(effects), rule.learn(old, sums)
    return batch.replace(extras=extras), states


def score_reference(
    batch: Batch, recipe: Recipe, scorer: PolicyScorer, params: ArrayTree, *, microbatches: int = 1
) -> Batch:
    """The batch with ``ref_logp``, ``kl_ref_logp`` and statistics with source "reference".

    Only those that the recipe reads are added. ``params`` are the reference's parameters.
    """
    functions = recipe.computed_from("reference")
    if "kl_ref_logp" in recipe.required_fields and "kl_ref_logp" not in batch.extras:
        kl_ref_logp = mismatched(scorer, params, batch, microbatches)
        batch = batch.replace(extras={**batch.extras, "kl_ref_logp": kl_ref_logp})
    statistics = {name: f for name, f in functions.items() if name not in batch.extras}
    ref_logp = "ref_logp" in recipe.required_fields and batch.ref_logp is None
    besides = {k: name for k, name in of_likelihood(recipe, "ref").items() if k not in batch.extras}
    if not ref_logp and not statistics and not besides:
        return batch
    chooses = batch.replace(experts=None)  # which are those of another model
    scores = map_microbatches(lambda part: scorer(params, part, statistics), chooses, microbatches)
    if ref_logp:
        batch = batch.replace(ref_logp=scores.logp)
    computed = _constants(scores.statistics, {name: name for name in statistics} | besides)
    return batch.replace(extras={**batch.extras, **computed})


def _constants(statistics: dict[str, Array], names: dict[str, str]) -> dict[str, Array]:
    """Statistics of a scorer under other names, without a gradient."""
    return {extra: jax.lax.stop_gradient(statistics[name]) for extra, name in names.items()}


def _policy_gradients(
    scorer: PolicyScorer,
    recipe: Recipe,
    base: ArrayTree,
    params: ArrayTree,
    batch: Batch,
    microbatches: int,
) -> Gradients:
    """The gradient of the recipe's loss with respect to the trained parameters."""
    statistics = recipe.computed_from("policy")
    measured = bool(recipe.computed_from("update")) and batch.old_logp is not None
    if measured and microbatches > 1:  # measured on all rows, so before the first microbatch
        policy = merge_adapter(base, params)
        before = map_microbatches(lambda part: scorer(policy, part).logp, batch, microbatches)
        batch, measured = recipe.measure(batch, before), False

    def loss(params: ArrayTree, part: Batch):
        scores = scorer(merge_adapter(base, params), part, statistics)
        logp, entropy, computed = scores
        part = recipe.measure(part, logp) if measured else part
        value = recipe.loss(logp, part, entropy=entropy, statistics=computed)
        return value, (logp, entropy)

    value, (logp, entropy), grads = accumulate_gradients(loss, params, batch, microbatches)
    return Gradients(value, grads, logp, entropy)


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

    def gradients(params: ArrayTree, base: ArrayTree, batch: Batch, weights) -> Gradients:
        check_batch("make_gradients", batch.tokens.shape[0], microbatches, batch_shards(mesh))
        trained = scorer
        if teacher is not None and recipe.reads_teacher_logits:
            matrix = jax.lax.stop_gradient(teacher.model.output_matrix(weights))
            cap = teacher.model.logit_cap
            trained = dataclasses.replace(scorer, teacher_matrix=matrix, teacher_logit_cap=cap)
        return _policy_gradients(trained, recipe, base, params, batch, microbatches)

    compiled = jax.jit(on_mesh(gradients, mesh, model.sharding_rules))
    weights = None if teacher is None else teacher.params
    return lambda state, batch: compiled(state.params, state.base, batch, weights)


_apply = jax.jit(apply_if_finite, static_argnums=0)


def apply_gradients(
    optimizer: optax.GradientTransformation, state: TrainState, gradients: Gradients
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step, skipped if the loss, gradient or update is non-finite.

    Args:
      optimizer: The one passed to ``init_state``.
      state: The state before the step.
      gradients: From :func:`make_gradients`.

    Returns:
      The state of the next step, and ``loss``, ``grad_norm``, ``update_norm`` and ``skipped``.
    """
    carry = (state.params, state.opt_state)
    carry, metrics = _apply(optimizer, carry, gradients.loss, gradients.grads)
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

    For log-probabilities that must be known before the step, such as those of a frozen reference,
    which chooses the experts itself: ``batch.replace(experts=None)``.
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
    """The options of :func:`make_step` that a run's configuration sets."""

    passes: Passes
    temperature: float
    remat: str
    shared_prefix_len: int
    packing: str
    stale: bool
    mesh: jax.sharding.Mesh | None
    learning_rate: float | optax.Schedule | None = None
    tokens_per_microbatch: int | None = None


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
        )
        batch = place_batch(batch, mesh)
        return batch if reference is None else scored(reference, batch), metrics

    def inspect(state: TrainState, batch: Batch) -> tuple[Batch, Array]:
        before = state._replace(step=state.step - 1)
        return step.prepared(before, batch), logp_of(state.policy, batch)

    return Algorithm(sampler, score, step, inspect, step.compile_ahead)
